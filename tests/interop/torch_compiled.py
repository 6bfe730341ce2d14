"""Rank program: what torch.compile makes of programs with collectives, on "cydist" and on gloo.

    torchrun --nproc-per-node 2 tests/interop/torch_compiled.py FOLDER COMPILER [SCENARIO ...]

COMPILER is a backend of torch.compile: aot_eager or inductor. Every scenario returns tensors. Each
rank writes FOLDER/RANK.json: for every scenario whether the two backends gave the same bits, and
the error if one raised.

With two ranks a sum has one order, so that equal bits are to be expected.
"""

from __future__ import annotations

import json
import os
import sys
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import cydist.interop.torch  # noqa: F401

warnings.simplefilter("ignore")
torch.set_num_threads(1)
Tensors = list[Any]
FOLDER, COMPILER = Path(sys.argv[1]), sys.argv[2]
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def compiled(function: Any, **options: Any) -> Any:
    return torch.compile(function, backend=COMPILER, **options)


def x() -> Any:
    return torch.arange(6.0) + dist.get_rank()


def model() -> nn.Module:
    torch.manual_seed(7)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def train(net: Any) -> Tensors:
    """Three steps of gradient descent; the parameters and the losses."""
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    generator = torch.Generator().manual_seed(dist.get_rank())
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = net(torch.randn(6, 8, generator=generator)).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return losses + [p.detach().clone() for p in net.parameters()]


def compiled_ddp() -> Tensors:
    return train(compiled(DistributedDataParallel(model())))


def ddp_of_compiled() -> Tensors:
    return train(DistributedDataParallel(compiled(model())))


def ddp_compile_method() -> Tensors:
    net = DistributedDataParallel(model())
    net.compile(backend=COMPILER)
    return train(net)


def compiled_ddp_batch_norm() -> Tensors:
    """Buffers are broadcast in each forward pass."""
    torch.manual_seed(7)
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    return train(compiled(DistributedDataParallel(net)))


def compiled_ddp_small_buckets() -> Tensors:
    """Dynamo divides the graph where buckets end."""
    usual, dist._DEFAULT_FIRST_BUCKET_BYTES = dist._DEFAULT_FIRST_BUCKET_BYTES, 64
    try:
        return train(compiled(DistributedDataParallel(model(), bucket_cap_mb=0.0001)))
    finally:
        dist._DEFAULT_FIRST_BUCKET_BYTES = usual


def asynchronous() -> Tensors:
    def function(y: Any) -> Any:
        y = y * 2
        work = dist.all_reduce(y, async_op=True)
        work.wait()
        return y + 1

    return [compiled(function)(x())]


def asynchronous_after_a_break() -> Tensors:
    def function(y: Any) -> Any:
        y = y * 2
        torch._dynamo.graph_break()
        work = dist.all_reduce(y, async_op=True)
        torch._dynamo.graph_break()
        work.wait()
        return y + 1

    return [compiled(function)(x())]


def future_after_a_break() -> Tensors:
    def function(y: Any) -> Any:
        y = y * 2
        torch._dynamo.graph_break()
        future = dist.all_reduce(y, async_op=True).get_future()
        torch._dynamo.graph_break()
        future.wait()
        return y + 1

    return [compiled(function)(x())]


def in_place() -> Tensors:
    def function(y: Any) -> Any:
        y = y * 2
        dist.all_reduce(y)
        gathered = y.new_empty(SIZE * y.numel())
        dist.all_gather_into_tensor(gathered, y)
        scattered = y.new_empty(y.numel())
        dist.reduce_scatter_tensor(scattered, gathered)
        return gathered + 1, scattered + 1

    return [*compiled(function)(x())]


def messages() -> Tensors:
    def function(y: Any) -> Any:
        y = y * 2
        if RANK == 0:
            dist.send(y, 1)
        elif RANK == 1:
            dist.recv(y, 0)
        return y + 1

    return [compiled(function)(x())]


def messages_without_waiting() -> Tensors:
    def function(y: Any) -> Any:
        other = torch.empty_like(y)
        ring = [
            dist.P2POp(dist.isend, y * 2, (RANK + 1) % SIZE),
            dist.P2POp(dist.irecv, other, (RANK - 1) % SIZE),
        ]
        for work in dist.batch_isend_irecv(ring):
            work.wait()
        return other + 1

    return [compiled(function)(x())]


def broadcast() -> Tensors:
    def function(y: Any) -> Any:
        y = y * 2
        dist.broadcast(y, SIZE - 1)
        return y + 1

    return [compiled(function)(x())]


def reduce() -> Tensors:
    def function(y: Any) -> Any:
        y = y * 2
        dist.reduce(y, 0)
        return y + 1 if RANK == 0 else y.new_zeros(1)

    return [compiled(function)(x())]


def lists() -> Tensors:
    def function(y: Any) -> Any:
        every = [torch.empty_like(y) for _ in range(SIZE)]
        dist.all_gather(every, y * 2)
        mine = torch.empty_like(y)
        dist.scatter(mine, every if RANK == 0 else None, src=0)
        kept = [torch.empty_like(y) for _ in range(SIZE)] if RANK == 0 else None
        dist.gather(mine, kept, dst=0)
        swapped = [torch.empty_like(y) for _ in range(SIZE)] if RANK == 0 else every
        return torch.stack(swapped if kept is None else kept) + 1

    return [compiled(function)(x())]


def barrier() -> Tensors:
    def function(y: Any) -> Any:
        y = y * 2
        dist.barrier()
        return y + 1

    return [compiled(function)(x())]


def disabled_objects() -> Tensors:
    """Of object collectives torch compiles none, on any backend."""

    @torch.compiler.disable
    def ranks() -> Any:
        every: list[Any] = [None] * SIZE
        dist.all_gather_object(every, RANK)
        return sum(every)

    return [compiled(lambda y: y * 2 + ranks())(x())]


def subgroup() -> Tensors:
    group = dist.new_group([*range(SIZE)])

    def function(y: Any) -> Any:
        y = y * 2
        dist.all_reduce(y, group=group)
        dist.broadcast(y, 0, group=group)
        return y + dist.get_world_size(group)

    return [compiled(function)(x())]


SCENARIOS: tuple[Callable[[], Tensors], ...] = (
    compiled_ddp, ddp_of_compiled, ddp_compile_method, compiled_ddp_batch_norm,
    compiled_ddp_small_buckets, asynchronous, asynchronous_after_a_break, future_after_a_break,
    in_place, messages, messages_without_waiting, broadcast, reduce, lists, barrier,
    disabled_objects, subgroup,
)  # fmt: skip
KEPT: list[Any] = []  # a group of gloo's that ends on a thread of its own ends the process


def run(scenario: Callable[[], Tensors], backend: str) -> Tensors | str:
    """What a scenario returns on a backend; how it failed."""
    torch._dynamo.reset()
    DistributedDataParallel._active_ddp_module = None  # of a scenario that failed
    place = f"file://{FOLDER}/{scenario.__name__}-{backend}"
    limit = timedelta(seconds=60)
    dist.init_process_group(backend, place, rank=RANK, world_size=SIZE, timeout=limit)
    KEPT.append(dist.group.WORLD)
    try:
        return scenario()
    except Exception:
        return f"{backend}: {traceback.format_exc()}"
    finally:
        dist.destroy_process_group()


def compare(ours: Tensors | str, theirs: Tensors | str) -> dict[str, Any]:
    """Whether two results are the same."""
    if isinstance(ours, str) or isinstance(theirs, str):
        return {"error": ours if isinstance(ours, str) else theirs}
    return {"error": "", "same": all(map(torch.equal, ours, theirs))}


def main() -> None:
    chosen = [s for s in SCENARIOS if s.__name__ in (sys.argv[3:] or [s.__name__])]
    found = {}
    for scenario in chosen:
        found[scenario.__name__] = compare(run(scenario, "cydist"), run(scenario, "gloo"))
    (FOLDER / f"{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
