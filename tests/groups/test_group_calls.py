"""Calls on the group object, as torch's ProcessGroup has them: group.WORLD.allreduce([x])."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from typing import Any

import numpy as np
import pytest

import cydist as dist
from cydist.testing import run_threads

Call = Callable[[Any, int], tuple[Any, Any]]  # of a group and rank: the Work, and what it writes


def one(rank: int) -> np.ndarray[Any, Any]:
    return np.array([rank + 1])


def options(kind: Any, **fields: object) -> Any:
    made = kind()
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def in_place(call: Callable[[Any, Any], Any]) -> Call:
    """A call that writes its only array."""

    def run(group: Any, rank: int) -> tuple[Any, Any]:
        x = one(rank)
        return call(group, x), x

    return run


def into(count: int, call: Callable[[Any, list[Any], int], Any]) -> Call:
    """A call that writes other arrays of one element."""

    def run(group: Any, rank: int) -> tuple[Any, Any]:
        outputs = [np.zeros(1, int) for _ in range(count)]
        return call(group, outputs, rank), outputs

    return run


def concatenated(call: Callable[[Any, Any, int], Any], size: int = 2) -> Call:
    def run(group: Any, rank: int) -> tuple[Any, Any]:
        x = np.zeros(size, int)
        return call(group, x, rank), x

    return run


MAX = dist.ReduceOp.MAX
# Of two ranks, which contribute 1 and 2: what each has afterwards.
CALLS: dict[str, tuple[Call, list[list[int]]]] = {
    "allreduce": (in_place(lambda g, x: g.allreduce([x])), [[3], [3]]),
    "allreduce of an array": (in_place(lambda g, x: g.allreduce(x)), [[3], [3]]),
    "allreduce with op": (in_place(lambda g, x: g.allreduce([x], MAX)), [[2], [2]]),
    "allreduce with op=": (in_place(lambda g, x: g.allreduce([x], op=MAX)), [[2], [2]]),
    "allreduce with options": (
        in_place(lambda g, x: g.allreduce([x], options(dist.AllreduceOptions, reduceOp=MAX))),
        [[2], [2]],
    ),
    "allreduce that waits": (
        in_place(lambda g, x: g.allreduce([x], options(dist.AllreduceOptions, asyncOp=False))),
        [[3], [3]],
    ),
    "allreduce_coalesced": (in_place(lambda g, x: g.allreduce_coalesced([x])), [[3], [3]]),
    "broadcast": (in_place(lambda g, x: g.broadcast([x])), [[1], [1]]),
    "broadcast with root": (in_place(lambda g, x: g.broadcast(x, 1)), [[2], [2]]),
    "broadcast with root=": (in_place(lambda g, x: g.broadcast(x, root=1)), [[2], [2]]),
    "broadcast with options": (
        in_place(lambda g, x: g.broadcast([x], options(dist.BroadcastOptions, rootRank=1))),
        [[2], [2]],
    ),
    "reduce": (in_place(lambda g, x: g.reduce([x])), [[3], [2]]),
    "reduce with root and op": (in_place(lambda g, x: g.reduce(x, 1, MAX)), [[1], [2]]),
    "reduce with options": (
        in_place(lambda g, x: g.reduce([x], options(dist.ReduceOptions, rootRank=1))),
        [[1], [3]],
    ),
    "allgather": (into(2, lambda g, out, r: g.allgather([out], [one(r)])), [[1, 2], [1, 2]]),
    "allgather of an array": (into(2, lambda g, out, r: g.allgather(out, one(r))), [[1, 2]] * 2),
    "allgather_coalesced": (
        into(2, lambda g, out, r: g.allgather_coalesced([[each] for each in out], [one(r)])),
        [[1, 2], [1, 2]],
    ),
    "gather": (
        into(2, lambda g, out, r: g.gather([] if r else [out], [one(r)])), [[1, 2], [0, 0]]
    ),
    "gather with options": (
        into(
            2,
            lambda g, out, r: g.gather(
                [out] if r else [], [one(r)], options(dist.GatherOptions, rootRank=1)
            ),
        ),
        [[0, 0], [1, 2]],
    ),
    "gather of an array": (
        into(2, lambda g, out, r: g.gather(out if r else [], one(r), 1)), [[0, 0], [1, 2]]
    ),
    "scatter": (
        into(1, lambda g, out, r: g.scatter(out, [] if r else [[one(4), one(5)]])), [[5], [6]]
    ),
    "scatter of an array": (
        into(1, lambda g, out, r: g.scatter(out[0], [one(4), one(5)] if r else [], root=1)),
        [[5], [6]],
    ),
    "scatter with options": (
        into(
            1,
            lambda g, out, r: g.scatter(
                out, [[one(4), one(5)]] if r else [], options(dist.ScatterOptions, rootRank=1)
            ),
        ),
        [[5], [6]],
    ),
    "reduce_scatter": (
        into(1, lambda g, out, r: g.reduce_scatter(out, [[one(r), one(4)]])), [[3], [10]]
    ),
    "reduce_scatter of an array": (
        into(1, lambda g, out, r: g.reduce_scatter(out[0], [one(r), one(4)], MAX)), [[2], [5]]
    ),
    "alltoall": (
        into(2, lambda g, out, r: g.alltoall(out, [one(r), one(r + 4)])), [[1, 2], [5, 6]]
    ),
    "alltoall_base": (
        concatenated(lambda g, x, r: g.alltoall_base(x, np.array([r, r + 4]), [], [], timeout=30)),
        [[0, 1], [4, 5]],
    ),
    "_allgather_base": (concatenated(lambda g, x, r: g._allgather_base(x, one(r))), [[1, 2]] * 2),
    "allgather_into_tensor_coalesced": (
        concatenated(lambda g, x, r: g.allgather_into_tensor_coalesced([x], [one(r)])),
        [[1, 2], [1, 2]],
    ),
    "_reduce_scatter_base": (
        concatenated(lambda g, x, r: g._reduce_scatter_base(x, np.array([r, r + 4])), 1),
        [[1], [9]],
    ),
    "reduce_scatter_tensor_coalesced": (
        concatenated(
            lambda g, x, r: g.reduce_scatter_tensor_coalesced([x], [np.array([r, r + 4])]), 1
        ),
        [[1], [9]],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("backend", ["inproc", "tcp"])
def test_call(name: str, backend: str) -> None:
    """Returns a Work, after whose wait the arrays hold what cydist's function gives."""
    call, expected = CALLS[name]

    def body(rank: int) -> list[int]:
        work, written = call(dist.group.WORLD, rank)
        assert work.wait() is True
        return [int(each) for each in np.ravel(written)]

    assert run_threads(body, 2, backend) == expected


def test_ranks_are_of_the_group() -> None:
    """The root and the peers are numbered as in the group."""

    def body(rank: int) -> list[int]:
        group, x, y = dist.new_group([1, 0], sort_ranks=False), one(rank), one(rank)
        group.broadcast([x], 0).wait()
        peer = 1 - group.rank()
        works = [group.recv([theirs := one(0)], peer, 3), group.send([y], peer, 3)]
        assert all(work.wait() for work in works)
        return [int(x[0]), int(theirs[0])]

    assert run_threads(body, 2) == [[2, 2], [2, 1]]


def test_receiving_from_any() -> None:
    """The Work knows the sender."""

    def body(rank: int) -> int:
        group, x = dist.group.WORLD, one(rank)
        if rank:
            group.send([x], 0, 7).wait()
            return 0
        return int(group.recv_anysource([x], 7).source_rank())

    assert run_threads(body, 2) == [1, 0]


def test_barriers() -> None:
    """Without arguments, with options or a timeout, and the one that names missing ranks."""

    def body(rank: int) -> bool:
        group = dist.group.WORLD
        works = [group.barrier(), group.barrier(dist.BarrierOptions()), group.barrier(timeout=20)]
        group.monitored_barrier(timedelta(seconds=20))
        return all(work.wait() for work in works)

    assert run_threads(body, 2) == [True, True]


def test_torchs_options_are_taken() -> None:
    """Objects of torch.distributed's own classes, with its operations and its unset timeout."""
    torch_dist = pytest.importorskip("torch").distributed
    of_torch = options(torch_dist.AllreduceOptions, reduceOp=torch_dist.ReduceOp.MAX)

    def body(rank: int) -> int:
        x = one(rank)
        dist.group.WORLD.allreduce([x], of_torch).wait()
        return int(x[0])

    assert run_threads(body, 2) == [2, 2]


@pytest.mark.parametrize("name", ["AllreduceOptions", "BroadcastOptions", "BarrierOptions"])
def test_a_misspelt_option_is_refused(name: str) -> None:
    """It would be ignored."""
    with pytest.raises(AttributeError):
        getattr(dist, name)().reducedOp = MAX


def test_the_timeout_of_a_call_is_its_own() -> None:
    """And is that of its options."""

    def body(rank: int) -> None:
        if rank == 0:
            late = options(dist.BarrierOptions, timeout=0.05)
            with pytest.raises(dist.DistTimeoutError):
                dist.group.WORLD.barrier(late).wait()

    run_threads(body, 2)


def test_lists_have_one_array() -> None:
    """Several are refused before any traffic."""

    def body(rank: int) -> int:
        with pytest.raises(ValueError, match="allreduce: expected a list of one array, found 2"):
            dist.group.WORLD.allreduce([one(0), one(0)])
        x = one(rank)
        dist.all_reduce(x)
        return int(x[0])

    assert run_threads(body, 2) == [3, 3]


def test_set_timeout() -> None:
    """Later calls have it."""

    def body(rank: int) -> None:
        group = dist.new_group()
        group.set_timeout(timedelta(seconds=0.05))
        if rank == 0:
            with pytest.raises(dist.DistTimeoutError, match=r"0\.05 s"):
                dist.barrier(group)

    run_threads(body, 2)


@pytest.mark.parametrize("wrong", ["soon", None], ids=repr)
def test_set_timeout_takes_a_time(wrong: Any) -> None:
    def body(rank: int) -> None:
        with pytest.raises(TypeError, match="set_timeout"):
            dist.group.WORLD.set_timeout(wrong)

    run_threads(body, 1)


def test_shutdown() -> None:
    """The group ends, and the job goes on: destroy_process_group follows."""

    def body(rank: int) -> None:
        group = dist.new_group()
        group.shutdown()
        with pytest.raises(dist.GroupDestroyedError):
            group.allreduce([one(rank)])
        dist.barrier()
        dist.destroy_process_group(group)

    run_threads(body, 2)


def test_split_group() -> None:
    """Only the members call it."""

    def body(rank: int) -> int:
        if rank == 0:
            return -1
        half, x = dist.group.WORLD.split_group([2, 1], group_desc="half"), one(rank)
        assert half.group_desc == "half"
        half.broadcast(x, 0).wait()
        return int(x[0])

    assert run_threads(body, 3) == [-1, 3, 3]


@pytest.mark.parametrize("backend", ["inproc", "tcp"])
def test_group_store(backend: str) -> None:
    """Members share it; other groups and cydist itself have other keys."""

    def body(rank: int) -> tuple[bytes, bool]:
        first, second = dist.new_group(), dist.new_group()
        store = first.get_group_store()
        if rank == 0:
            store.set("epoch", "3")
        found = store.get("epoch")
        return found, second.get_group_store().check(["epoch"])

    assert run_threads(body, 2, backend) == [(b"3", False)] * 2


def test_names() -> None:
    """name() is the backend, group_name the group."""

    def body(rank: int) -> tuple[str, int, int]:
        group = dist.new_group(group_desc="workers")
        assert (group.group_name, group.group_desc) == ("1", "workers")
        return group.name(), group.rank(), group.size()

    assert run_threads(body, 2) == [("inproc", 0, 2), ("inproc", 1, 2)]
