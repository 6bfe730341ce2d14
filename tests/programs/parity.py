"""The same calls on torch.distributed (gloo) and on cydist, on two ranks: what each gives.

A case is a function of `dist`, `make` (list, dtype -> array) and `rank`. It returns what JSON can
hold. The program prints, by case and by library, results, or the classes of what was raised.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed

import cydist

CASES: dict[str, Callable[[Any, Any, int], Any]] = {}


def case(function: Callable[[Any, Any, int], Any]) -> Callable[[Any, Any, int], Any]:
    CASES[function.__name__] = function
    return function


def kind(value: Any) -> str:
    """What a call returned, where the libraries' own classes count as one."""
    if isinstance(value, (cydist.Work, torch.distributed.Work)):
        return "Work"
    for known in (bool, int, str, list):
        if isinstance(value, known):
            return known.__name__
    if value is None:
        return "None"
    return "object"


def values(xs: Any) -> list[Any]:
    return [x.tolist() for x in xs]


@case
def all_reduce(dist: Any, make: Any, rank: int) -> Any:
    out = []
    for op in ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR"):
        x = make([rank + 1, 5 - rank], "int32")
        out.append((kind(dist.all_reduce(x, getattr(dist.ReduceOp, op))), x.tolist()))
    x = make([rank + 0.5], "float32")
    work = dist.all_reduce(x, async_op=True)
    return [*out, kind(work), work.wait(), work.is_completed(), x.tolist()]


@case
def all_reduce_coalesced(dist: Any, make: Any, rank: int) -> Any:
    xs = [make([rank, 1], "float32"), make([2 * rank], "float32")]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return kind(dist.all_reduce_coalesced(xs)), values(xs)


@case
def broadcast(dist: Any, make: Any, rank: int) -> Any:
    x, y = make([rank, 2], "int64"), make([rank], "int64")
    return kind(dist.broadcast(x, 1)), kind(dist.broadcast(y, group_src=0)), values([x, y])


@case
def reduce(dist: Any, make: Any, rank: int) -> Any:
    x = make([rank + 1.5], "float64")
    return kind(dist.reduce(x, 0)), x.tolist() if rank == 0 else None


@case
def all_gather(dist: Any, make: Any, rank: int) -> Any:
    xs = [make([0, 0], "int16" if dist is cydist else "int32") for _ in range(2)]
    x = make([rank, 7], "int16" if dist is cydist else "int32")
    return kind(dist.all_gather(xs, x)), values(xs)


@case
def all_gather_coalesced(dist: Any, make: Any, rank: int) -> Any:
    outs = [[make([0], "float32"), make([0, 0], "float32")] for _ in range(2)]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        made = dist.all_gather_coalesced(
            outs, [make([rank], "float32"), make([rank, 3], "float32")]
        )
    return kind(made), [values(xs) for xs in outs]


@case
def all_gather_into_tensor(dist: Any, make: Any, rank: int) -> Any:
    x = make([0] * 4, "float32")
    return kind(dist.all_gather_into_tensor(x, make([rank, 9], "float32"))), x.tolist()


@case
def all_gather_single(dist: Any, make: Any, rank: int) -> Any:
    x = make([0] * 4, "float32")
    return kind(dist.all_gather_single(x, make([rank, 9], "float32"))), x.tolist()


@case
def gather(dist: Any, make: Any, rank: int) -> Any:
    xs = [make([0], "int32") for _ in range(2)] if rank == 1 else None
    return kind(dist.gather(make([rank + 3], "int32"), xs, dst=1)), xs and values(xs)


@case
def scatter(dist: Any, make: Any, rank: int) -> Any:
    x = make([0], "int32")
    xs = [make([i + 3], "int32") for i in range(2)] if rank == 0 else None
    return kind(dist.scatter(x, xs)), x.tolist()


@case
def reduce_scatter(dist: Any, make: Any, rank: int) -> Any:
    x = make([0.0], "float32")
    return kind(dist.reduce_scatter(x, [make([i + rank], "float32") for i in range(2)])), x.tolist()


@case
def reduce_scatter_tensor(dist: Any, make: Any, rank: int) -> Any:
    x = make([0.0], "float32")
    return kind(dist.reduce_scatter_tensor(x, make([1 + rank, 5], "float32"))), x.tolist()


@case
def reduce_scatter_single(dist: Any, make: Any, rank: int) -> Any:
    x = make([0.0], "float32")
    return kind(dist.reduce_scatter_single(x, make([1 + rank, 5], "float32"))), x.tolist()


@case
def all_to_all(dist: Any, make: Any, rank: int) -> Any:
    xs = [make([0], "int32") for _ in range(2)]
    made = dist.all_to_all(xs, [make([10 * rank + i], "int32") for i in range(2)])
    return kind(made), values(xs)


@case
def all_to_all_single(dist: Any, make: Any, rank: int) -> Any:
    x, y = make([0, 0], "int32"), make([0] * (1 + 2 * rank), "int32")
    made = dist.all_to_all_single(x, make([10 * rank, 10 * rank + 1], "int32"))
    splits = ([1, 0], [1, 1]) if rank == 0 else ([1, 2], [0, 2])
    given = make([rank, 8] if rank == 0 else [6, 7], "int32")
    dist.all_to_all_single(y, given, *splits)
    return kind(made), values([x, y])


@case
def barrier(dist: Any, make: Any, rank: int) -> Any:
    work = dist.barrier(async_op=True)
    return kind(dist.barrier()), kind(work), work.wait()


@case
def monitored_barrier(dist: Any, make: Any, rank: int) -> Any:
    return kind(dist.monitored_barrier(timeout=timedelta(seconds=30), wait_all_ranks=True))


@case
def send_and_recv(dist: Any, make: Any, rank: int) -> Any:
    x = make([rank * 4], "int64")
    if rank == 0:
        return [kind(dist.send(make([i], "int64"), 1, tag=i)) for i in range(3)]
    return dist.recv(x, 0, tag=0), x.tolist(), dist.recv(x, tag=1), dist.recv(x, group_src=0, tag=2)


@case
def isend_and_irecv(dist: Any, make: Any, rank: int) -> Any:
    x = make([rank * 4], "int64")
    work = dist.irecv(x, 0) if rank else dist.isend(make([5], "int64"), 1)
    return kind(work), work.wait(), work.is_completed(), x.tolist()


@case
def batch_isend_irecv(dist: Any, make: Any, rank: int) -> Any:
    x = make([0], "int32")
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, make([rank], "int32"), 1 - rank),
            dist.P2POp(dist.irecv, x, 1 - rank),
        ]
    )
    return [work.wait() for work in works], [kind(work) for work in works], x.tolist()


@case
def all_gather_object(dist: Any, make: Any, rank: int) -> Any:
    xs: list[Any] = [None, None]
    return kind(dist.all_gather_object(xs, {"rank": rank, "s": "é"})), xs


@case
def broadcast_object_list(dist: Any, make: Any, rank: int) -> Any:
    xs = [{"a": [1, 2]}, 3] if rank == 1 else [None, None]
    return kind(dist.broadcast_object_list(xs, src=1)), xs


@case
def gather_object(dist: Any, make: Any, rank: int) -> Any:
    xs = [None, None] if rank == 0 else None
    return kind(dist.gather_object([rank], xs)), xs


@case
def scatter_object_list(dist: Any, make: Any, rank: int) -> Any:
    xs: list[Any] = [None]
    return kind(dist.scatter_object_list(xs, ["a", "b"] if rank == 0 else None)), xs


@case
def send_object_list_and_recv_object_list(dist: Any, make: Any, rank: int) -> Any:
    xs: list[Any] = [None, None]
    if rank == 0:
        return kind(dist.send_object_list([1, "x"], 1))
    return dist.recv_object_list(xs, 0), xs


@case
def get_rank_and_get_world_size(dist: Any, make: Any, rank: int) -> Any:
    return dist.get_rank(), dist.get_world_size(), dist.is_initialized(), dist.is_available()


@case
def groups(dist: Any, make: Any, rank: int) -> Any:
    """Make groups; get_group_rank, get_global_rank, and so on, on members and others."""
    both, second = dist.new_group([1, 0]), dist.new_group([1])
    x = make([rank + 1], "int32")
    dist.all_reduce(x, group=both)
    out = [x.tolist(), dist.get_rank(second), dist.get_world_size(second)]
    out += [dist.get_process_group_ranks(both), dist.get_group_rank(both, 1)]
    out += [dist.get_global_rank(both, 0), dist.get_process_group_ranks(None)]
    if rank == 1:
        out += [dist.get_group_rank(second, 1), dist.get_global_rank(second, 0)]
    else:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out.append(kind(dist.all_reduce(x, group=second)))
    return [*out, x.tolist(), second == dist.GroupMember.NON_GROUP_MEMBER]


@case
def new_subgroups(dist: Any, make: Any, rank: int) -> Any:
    own, every = dist.new_subgroups(1)
    return dist.get_process_group_ranks(own), len(every), dist.get_rank(own)


@case
def new_subgroups_by_enumeration(dist: Any, make: Any, rank: int) -> Any:
    own, every = dist.new_subgroups_by_enumeration([[0], [1]])
    return dist.get_process_group_ranks(own), len(every), dist.get_rank(own)


@case
def get_backend(dist: Any, make: Any, rank: int) -> Any:
    return kind(dist.get_backend()), dist.is_backend_available("gloo"), dist.is_gloo_available()


@case
def is_available_of_missing(dist: Any, make: Any, rank: int) -> Any:
    return dist.is_backend_available("no such")


@case
def supports_complex(dist: Any, make: Any, rank: int) -> Any:
    return [dist.supports_complex(getattr(dist.ReduceOp, op)) for op in ("SUM", "MAX", "BAND")]


@case
def is_ucc_available(dist: Any, make: Any, rank: int) -> Any:
    return dist.is_ucc_available(), dist.is_xccl_available()


@case
def get_backend_config(dist: Any, make: Any, rank: int) -> Any:
    return kind(dist.get_backend_config()), kind(dist.get_default_backend_for_device("cpu"))


@case
def get_node_local_rank(dist: Any, make: Any, rank: int) -> Any:
    return dist.get_node_local_rank(), dist.get_node_local_rank(7)


@case
def is_torchelastic_launched(dist: Any, make: Any, rank: int) -> Any:
    return dist.is_torchelastic_launched()


@case
def debug_levels(dist: Any, make: Any, rank: int) -> Any:
    found = []
    for name in ("INFO", "DETAIL", "OFF"):
        dist.set_debug_level(getattr(dist.DebugLevel, name))
        found.append((dist.get_debug_level().name, dist.get_debug_level().value))
    dist.set_debug_level_from_env()
    return found, dist.get_debug_level().name


@case
def set_debug_level(dist: Any, make: Any, rank: int) -> Any:
    try:
        dist.set_debug_level("DETAIL")
    except TypeError:
        return "TypeError"


@case
def init_device_mesh(dist: Any, make: Any, rank: int) -> Any:
    made = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b"))
    return made.get_local_rank("a"), made["b"].size(), list(made.mesh_dim_names or ())


@case
def get_pg_count(dist: Any, make: Any, rank: int) -> Any:
    before = dist.get_pg_count()
    dist.new_group([0, 1])
    return dist.get_pg_count() - before


@case
def init_process_group(dist: Any, make: Any, rank: int) -> Any:
    """A second time: the exception."""
    dist.init_process_group("gloo")


# One rank's wrong or unusual calls, as Python that both libraries run. `x` has 4 float32 of
# this rank, `n` 4 int64, `z` 2 complex64. Each must leave the group as it was.
EDGES = """
dist.all_reduce([1, 2])
dist.all_reduce('x')
dist.all_reduce(None)
dist.all_reduce(x, 'sum')
dist.all_reduce(x, op=None)
dist.all_reduce(x, group='g')
dist.all_reduce(z, dist.ReduceOp.MAX)
dist.all_reduce(z, dist.ReduceOp.MIN)
dist.all_reduce(z, dist.ReduceOp.PRODUCT)
dist.all_reduce(z)
dist.all_reduce(n, dist.ReduceOp.AVG)
dist.all_reduce(x, dist.ReduceOp.BAND)
dist.all_reduce(x, dist.ReduceOp.PREMUL_SUM)
dist.all_reduce(x[:0])
dist.all_reduce(x[::2])
dist.all_reduce_coalesced([])
dist.broadcast(x, 5)
dist.broadcast(x, -1)
dist.broadcast(x)
dist.broadcast(x, 0, group_src=0)
dist.broadcast(x, '0')
dist.broadcast([x], 0)
dist.reduce(x, 5)
dist.reduce(x)
dist.all_gather([x], n)
dist.all_gather([], x)
dist.all_gather([x[:2]], x)
dist.all_gather(x, x)
dist.all_gather_into_tensor(x[:2], x)
dist.all_gather_into_tensor(x, n)
dist.gather(x)
dist.gather(x, [])
dist.gather(x, [x], dst=5)
dist.gather(x, [n])
dist.scatter(x)
dist.scatter(x, [])
dist.scatter(x, [x], src=5)
dist.scatter(x, [n])
dist.reduce_scatter(x, [n])
dist.reduce_scatter(x, [])
dist.reduce_scatter_tensor(x, n)
dist.reduce_scatter_tensor(x[:2], x)
dist.all_to_all([x], [n])
dist.all_to_all([], [])
dist.all_to_all_single(x, x[:2])
dist.all_to_all_single(x, x, [3], [4])
dist.all_to_all_single(x, n)
dist.send(x, 0)
dist.send(x, 5)
dist.send(x)
dist.recv(x, 0)
dist.recv(x, 5)
dist.isend(x, 0)
dist.irecv(x, 0)
dist.isend(x, 5)
dist.batch_isend_irecv([])
dist.batch_isend_irecv([1])
dist.P2POp(dist.all_reduce, x, 0)
dist.broadcast_object_list('ab', 0)
dist.broadcast_object_list([1], 5)
dist.all_gather_object([], 1)
dist.gather_object(1)
dist.scatter_object_list([], [1])
dist.scatter_object_list([None], [1, 2])
dist.get_group_rank(None, 0)
dist.get_group_rank(dist.group.WORLD, 4)
dist.get_global_rank(dist.group.WORLD, 4)
dist.get_rank('g')
dist.get_backend('g')
dist.new_group([0, 0])
dist.new_group([5])
dist.new_group([])
dist.new_group([0], backend='no such')
dist.new_group([0], timeout=5)
dist.Backend('no such')
dist.Backend(5)
dist.Backend('GLOO')
dist.Backend.register_backend('gloo', print)
dist.init_process_group('gloo')
dist.PrefixStore('p', None)
dist.HashStore().get(5)
dist.HashStore().set('k', 5)
dist.destroy_process_group('g')
dist.group.WORLD.allreduce([x])
dist.group.WORLD.allreduce(x)
dist.group.WORLD.allreduce(tensor=x)
dist.group.WORLD.broadcast([x], 0)
dist.group.WORLD.barrier()
dist.group.WORLD.allgather([[x]], [x])
dist.group.WORLD.allgather([[x], [x]], [x])
dist.group.WORLD.allreduce([x, x])
dist.group.WORLD.reduce([x], 0)
dist.group.WORLD.size()
dist.group.WORLD.monitored_barrier()
dist.new_group([0]) == dist.group.WORLD
dist.all_reduce(x, async_op=True).get_future()
dist.split_group(None, [])
dist.new_subgroups(3)
dist.new_subgroups_by_enumeration([])
dist.new_subgroups_by_enumeration([[0], [0]])
dist.init_device_mesh('cpu', (2,))
dist.init_device_mesh('cpu', (1,), mesh_dim_names=('a', 'b'))
dist.init_device_mesh('cpu:0', (1,))
dist.DeviceMesh('cpu', [3])
dist.supports_complex('SUM')
dist.set_debug_level(1)
dist.get_node_local_rank('x')
dist.breakpoint(7)
dist.monitored_barrier(timeout=-1)
dist.TCPStore('127.0.0.1', 0, 1, True, 5)
dist.TCPStore('127.0.0.1', 'x', 1, True)
dist.rendezvous(5)
dist.rendezvous('x://y')
""".strip().splitlines()

# Calls after destroy_process_group.
AFTER = """
dist.destroy_process_group()
dist.all_reduce(x)
dist.barrier()
dist.send(x, 0)
dist.get_rank()
dist.get_world_size()
dist.get_backend()
dist.new_group()
dist.is_initialized()
dist.get_process_group_ranks(None)
dist.get_pg_count()
dist.batch_isend_irecv([dist.P2POp(dist.isend, x, 0)])
dist.monitored_barrier()
dist.all_gather_object([None], 1)
""".strip().splitlines()


# Calls whose rank gloo does not check: what it does then is undefined, and often ends the process.
UNCHECKED_BY_GLOO = ("dist.send(x, 5)", "dist.recv(x, 5)", "dist.isend(x, 5)")


def outcome(run: Callable[[], Any]) -> dict[str, Any]:
    """What a call gave: its result, or the classes of its exception, the nearest first."""
    try:
        return {"returns": json.loads(json.dumps(run()))}
    except Exception as error:
        names = [each.__name__ for each in type(error).__mro__[:-2]]
        return {"raises": names, "text": str(error)[:200]}


def edge(dist: Any, make: Any, code: str) -> dict[str, Any]:
    given = {
        "dist": dist, "x": make([0, 1, 2, 3], "float32"), "n": make([0, 1, 2, 3], "int64"),
        "z": make([1, 2], "complex64"),
    }  # fmt: skip
    return outcome(lambda: kind(eval(code, given)))  # of the list above


def main() -> None:
    """Print the outcomes of the cases on all ranks, or of EDGES on one."""
    rank, size = (int(sys.argv[1]), 2) if sys.argv[1] != "edges" else (0, 1)
    only = sys.argv[3:]  # edges for gloo alone
    path = sys.argv[2]
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{path}/torch", rank=rank, world_size=size,
        timeout=timedelta(seconds=40),
    )  # fmt: skip
    cydist.init_process_group(
        "tcp", f"file://{path}/cydist", timeout=timedelta(seconds=40), rank=rank, world_size=size
    )

    def tensor(given: Any, dtype: str) -> Any:
        return torch.tensor(given, dtype=getattr(torch, dtype))

    if only:
        for name in only:
            edge(torch.distributed, tensor, name)
        return
    sides: dict[str, tuple[Any, Any]] = {
        "gloo": (torch.distributed, tensor),
        "cydist, torch": (cydist, tensor),
        "cydist, numpy": (cydist, np.array),
    }
    found: dict[str, Any] = {}
    for name in CASES if size == 2 else EDGES:
        found[name] = {}
        for side, (dist, make) in sides.items():
            if size == 2:
                run = CASES[name]
                found[name][side] = outcome(lambda run=run, d=dist, m=make: run(d, m, rank))
            elif side != "gloo" or name not in UNCHECKED_BY_GLOO:
                found[name][side] = edge(dist, make, name)
    cydist.destroy_process_group()
    torch.distributed.destroy_process_group()
    for name in AFTER if size == 1 else ():
        found[name] = {side: edge(dist, make, name) for side, (dist, make) in sides.items()}
    print("FOUND " + json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
