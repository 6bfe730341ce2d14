"""tests/interop/torch_failing_peer.py for Lightning: ModelParallelStrategy in Fabric.

python failing_lightning.py < trials > outcomes
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "interop"))
import torch_failing_peer as trials


def trained(strategy: Any) -> trials.Step:
    """One step of a model that a strategy shards, over the default group that is there."""
    os.environ |= {"LOCAL_RANK": str(dist.get_rank()), "MASTER_ADDR": "127.0.0.1"}
    fabric = lightning.Fabric(
        accelerator="cpu", devices=dist.get_world_size(), strategy=strategy,
        plugins=[LightningEnvironment()],
    )  # fmt: skip
    fabric.launch()
    net = trials.layers()
    net = fabric.setup_module(net)
    optimizer = fabric.setup_optimizers(torch.optim.SGD(net.parameters(), lr=0.1))

    def step() -> None:
        fabric.backward(net(torch.ones(2, 8)).sum())
        optimizer.step()

    return step


def shard(net: torch.nn.Module, mesh: Any) -> torch.nn.Module:
    for layer in net.children():
        fully_shard(layer, mesh=mesh["data_parallel"])
    return fully_shard(net, mesh=mesh["data_parallel"])


def model_parallel() -> trials.Step:
    return trained(
        ModelParallelStrategy(
            shard, data_parallel_size=dist.get_world_size(), tensor_parallel_size=1,
            process_group_backend="cydist",
        )
    )  # fmt: skip


trials.MODES = (model_parallel,)

if __name__ == "__main__":
    trials.serve()
