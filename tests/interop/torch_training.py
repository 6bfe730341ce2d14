"""Rank program: PyTorch's ways to train in parallel, each on "cydist" and on gloo.

    torchrun --nproc-per-node 2 tests/interop/torch_training.py FOLDER [SCENARIO ...]

Every scenario trains a few steps and returns tensors. Each rank writes FOLDER/RANK.json: for every
scenario whether the two backends gave the same bits, by how much they differ, and the error if
one raised.

Backends may add up in different orders, so whatever ranks add together here is exact in any
order: activations and the gradients that flow back are rounded to quarters (`Grid`), so that a
weight's gradient, over all rows of all ranks, is a multiple of 1/16 below 2 * 6 * 8: with 8 ranks
still exact in the 11 bits of a float16.
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
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as power
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.parallel import DistributedDataParallel

import cydist.interop.torch  # noqa: F401

warnings.simplefilter("ignore")
torch.set_num_threads(1)
STEPS = 3
Tensors = list[Any]


class ToGrid(torch.autograd.Function):
    """Rounds to quarters from -1 to 1, and what flows back to quarters from -2 to 2."""

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.mul(4).round().div(4).clamp(-1, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return gradient.mul(4).round().div(4).clamp(-2, 2)


class Grid(nn.Module):
    """What bends the lines: a layer of nothing but ToGrid."""

    def forward(self, x: Any) -> Any:
        return ToGrid.apply(x)


def on_grid(parameters: Any) -> None:
    """Round to multiples of 1/256: with these a layer's output is exact, too."""
    with torch.no_grad():
        for p in parameters:
            p.copy_(p.mul(256).round().div(256))


def model() -> nn.Sequential:
    torch.manual_seed(7)
    net = nn.Sequential(
        nn.Linear(8, 32), Grid(), nn.Linear(32, 32), Grid(), nn.Linear(32, 4), Grid()
    )
    on_grid(net.parameters())
    return net


def batch(step: int, rows: int = 6) -> Any:
    """This rank's inputs in a step."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randint(-4, 5, (rows, 8), generator=generator) / 4


def train(net: Any, steps: int = STEPS, optimizer: Any = None) -> Tensors:
    """Some steps of gradient descent; the parameters and the losses."""
    optimizer = optimizer or torch.optim.SGD(net.parameters(), lr=0.02, momentum=0.9)
    before = [whole(p) for p in net.parameters()]
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = net(batch(step)).square().sum() * 4
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    after = [whole(p) for p in net.parameters()]
    assert not any(map(torch.equal, before, after)), "a parameter was not trained"
    return [*after, torch.stack(losses)]


def whole(parameter: Any) -> Any:
    """A copy of a parameter, put together where ranks hold parts."""
    found = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
    return found.detach().clone()


def ddp(**options: Any) -> Tensors:
    return train(DistributedDataParallel(model(), **options))


def ddp_small_buckets() -> Tensors:
    return ddp(bucket_cap_mb=0.001)


def ddp_views() -> Tensors:
    return ddp(gradient_as_bucket_view=True)


def ddp_static_graph() -> Tensors:
    return ddp(static_graph=True)


class Branches(nn.Module):
    """Uses another part of its parameters in every call."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.parts = nn.ModuleList([nn.Sequential(nn.Linear(8, 4), Grid()) for _ in range(3)])
        self.calls = 0

    def forward(self, x: Any) -> Any:
        self.calls += 1
        return self.parts[(self.calls + dist.get_rank()) % 3](x)


def ddp_unused_parameters() -> Tensors:
    return train(DistributedDataParallel(Branches(), find_unused_parameters=True))


class Words(nn.Module):
    """An embedding whose gradient is sparse."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.words = nn.EmbeddingBag(50, 4, sparse=True)
        self.grid = Grid()

    def forward(self, x: Any) -> Any:
        places = torch.arange(x.numel()).view(x.shape) + dist.get_rank()
        return self.grid(self.words((places + x * 4).long() % 50))


def ddp_sparse_gradients() -> Tensors:
    net = DistributedDataParallel(Words())
    return train(net, optimizer=torch.optim.SGD(net.parameters(), lr=0.02))


def ddp_join() -> Tensors:
    """Ranks with different numbers of batches."""
    net = DistributedDataParallel(model())
    with Join([net]):
        train(net, STEPS + dist.get_rank())
    return [whole(p) for p in net.parameters()]


def ddp_no_sync() -> Tensors:
    net = DistributedDataParallel(model())
    with net.no_sync():
        net(batch(9)).sum().backward()
    net(batch(10)).sum().backward()
    return [p.grad.clone() for p in net.parameters()]


def ddp_hook(state: Any, hook: Callable[..., Any]) -> Tensors:
    net = DistributedDataParallel(model())
    net.register_comm_hook(state, hook)
    return train(net)


def ddp_allreduce_hook() -> Tensors:
    return ddp_hook(None, default_hooks.allreduce_hook)


def ddp_fp16_hook() -> Tensors:
    return ddp_hook(None, default_hooks.fp16_compress_hook)


def ddp_powersgd_hook() -> Tensors:
    state = power.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    torch.set_default_dtype(torch.float64)
    try:
        return ddp_hook(state, power.powerSGD_hook)
    finally:
        torch.set_default_dtype(torch.float32)


def zero() -> Tensors:
    net = DistributedDataParallel(model())
    optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.Adam, lr=0.01)
    return train(net, optimizer=optimizer)


def zero_overlapped() -> Tensors:
    net = DistributedDataParallel(model(), gradient_as_bucket_view=True)
    optimizer = ZeroRedundancyOptimizer(
        net.parameters(), torch.optim.Adam, lr=0.01, parameters_as_bucket_view=True
    )
    return train(net, optimizer=optimizer)


def fsdp2() -> Tensors:
    net = model()
    for layer in net:
        if isinstance(layer, nn.Linear):
            fully_shard(layer)
    fully_shard(net)
    return train(net)


def fsdp1() -> Tensors:
    net = FullyShardedDataParallel(model(), device_id=torch.device("cpu"), use_orig_params=False)
    train(net)
    with FullyShardedDataParallel.summon_full_params(net):
        return [whole(p) for p in net.parameters()]


def tensor_parallel() -> Tensors:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    net = parallelize_module(model(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    torch.manual_seed(3)
    same = torch.randint(-4, 5, (5, 8)) / 4
    optimizer = torch.optim.SGD(net.parameters(), lr=0.02)
    for _ in range(STEPS):
        optimizer.zero_grad()
        net(same).square().sum().mul(4).backward()
        optimizer.step()
        on_grid(net.parameters())
    return [whole(p) for p in net.parameters()]


def dtensor() -> Tensors:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(3)
    left = distribute_tensor(torch.randint(-99, 99, (8, 12)).float(), mesh, [Shard(1)])
    right = distribute_tensor(torch.randint(-99, 99, (12, 6)).float(), mesh, [Shard(0)])
    product = left @ right
    moved = product.redistribute(mesh, [Shard(0)]).redistribute(mesh, [Shard(1)])
    return [moved.redistribute(mesh, [Replicate()]).to_local(), product.full_tensor()]


def mesh_of_two_dimensions() -> Tensors:
    half = max(1, dist.get_world_size() // 2)
    mesh = init_device_mesh("cpu", (dist.get_world_size() // half, half), mesh_dim_names=("a", "b"))
    x = torch.full((3,), float(dist.get_rank() + 1))
    dist.all_reduce(x, group=mesh["a"].get_group())
    dist.all_reduce(x, op=dist.ReduceOp.PRODUCT, group=mesh["b"].get_group())
    return [x]


def functional_collectives() -> Tensors:
    size, group = dist.get_world_size(), dist.group.WORLD
    x = torch.arange(4.0 * size) + dist.get_rank()
    found = [
        functional.all_reduce(x, "sum", group),
        functional.all_gather_tensor(x, 0, group),
        functional.reduce_scatter_tensor(x, "sum", 0, group),
        functional.all_to_all_single(x, None, None, group),
        functional.broadcast(x, size - 1, group),
        *functional.all_reduce_coalesced([x, x + 1], "max", group),
        *functional.all_gather_into_tensor_coalesced([x, x + 1], group),
        *functional.reduce_scatter_tensor_coalesced([x, x + 1], "sum", [0, 0], group),
    ]
    return [each + 0 for each in found]


def checkpoint() -> Tensors:
    folder = FOLDER / f"checkpoint-{dist.get_backend()}"
    net = model()
    fully_shard(net)
    train(net)
    saved = [whole(p) for p in net.parameters()]
    dcp.save({"model": net.state_dict()}, checkpoint_id=folder / "at once")
    dcp.async_save({"model": net.state_dict()}, checkpoint_id=folder / "meanwhile").result()
    for each in ("at once", "meanwhile"):
        other = model()
        fully_shard(other)
        state = {"model": other.state_dict()}
        dcp.load(state, checkpoint_id=folder / each)
        other.load_state_dict(state["model"])
        assert all(map(torch.equal, saved, [whole(p) for p in other.parameters()]))
    return saved


def pipeline() -> Tensors:
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    layers = [nn.Linear(8, 8) for _ in range(size)]
    stage = PipelineStage(layers[rank], rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, 4, loss_fn=lambda out, target: (out - target).square().mean())
    torch.manual_seed(6)
    inputs, target = torch.randn(8, 8), torch.randn(8, 8)
    args = (inputs,) if rank == 0 else ()
    schedule.step(*args, **({"target": target} if rank == size - 1 else {}))
    return [layers[rank].weight.grad.clone()]


def objects() -> Tensors:
    rank, size = dist.get_rank(), dist.get_world_size()
    all_ranks: list[Any] = [None] * size
    dist.all_gather_object(all_ranks, {"rank": rank})
    assert all_ranks == [{"rank": other} for other in range(size)]
    message = [rank, "from", {0}] if rank == 0 else [None] * 3
    dist.broadcast_object_list(message)
    assert message == [0, "from", {0}]
    mine: list[Any] = [None]
    dist.scatter_object_list(mine, [str(r) for r in range(size)] if rank == 0 else None)
    assert mine == [str(rank)]
    return []


SCENARIOS: tuple[Callable[[], Tensors], ...] = (
    ddp, ddp_small_buckets, ddp_views, ddp_static_graph, ddp_unused_parameters,
    ddp_sparse_gradients, ddp_join, ddp_no_sync, ddp_allreduce_hook, ddp_fp16_hook,
    ddp_powersgd_hook, zero, zero_overlapped, fsdp2, fsdp1, tensor_parallel, dtensor,
    mesh_of_two_dimensions, functional_collectives, checkpoint, pipeline, objects,
)  # fmt: skip


def run(scenario: Callable[[], Tensors], backend: str) -> Tensors | str:
    """What a scenario returns on a backend; how it failed."""
    # torchrun's store serves cydist again and again; gloo meets its own stale keys in it.
    fresh = f"file://{FOLDER}/{scenario.__name__}" if backend == "gloo" else None
    rank, size = (RANK, SIZE) if fresh else (-1, -1)
    dist.init_process_group(
        backend, fresh, rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    KEPT.append(dist.group.WORLD)
    try:
        return scenario()
    except Exception:
        return traceback.format_exc()
    finally:
        dist.destroy_process_group()


def compare(ours: Tensors | str, theirs: Tensors | str) -> dict[str, Any]:
    """How two results differ."""
    if isinstance(ours, str) or isinstance(theirs, str):
        return {"error": ours if isinstance(ours, str) else theirs}
    differences = [
        float((a.double() - b.double()).abs().max()) for a, b in zip(ours, theirs, strict=True)
    ]
    same = all(map(torch.equal, ours, theirs))
    return {"error": "", "same": same, "difference": max(differences, default=0.0)}


FOLDER = Path(sys.argv[1])
KEPT: list[Any] = []  # a group of gloo's that ends on a thread of its own ends the process
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


def main() -> None:
    chosen = [s for s in SCENARIOS if s.__name__ in (sys.argv[2:] or [s.__name__])]
    found = {}
    for scenario in chosen:
        found[scenario.__name__] = compare(run(scenario, "cydist"), run(scenario, "gloo"))
    (FOLDER / f"{RANK}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
