"""Data-parallel training in torch on CUDA tensors, through cydist: no torch.distributed.

cydistrun --nproc-per-node gpu docs/examples/parallel_torch.py

Each gradient is reduced as soon as it is there, behind the backward pass that goes on: an
asynchronous call runs on the group's stream, and `wait` orders torch's current stream after it.
With --on staged the tensors go over TCP instead of NCCL, and ranks may share a GPU; with --on cpu
they are the CPU's.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch

import cydist as dist

ROWS = 2048  # of all ranks together


class Averaged:
    """Averages the gradients of a model's parameters as soon as they are computed."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.works: list[Any] = []
        for parameter in model.parameters():
            dist.broadcast(parameter.data, 0)  # all ranks begin with the same weights
            parameter.register_post_accumulate_grad_hook(self.reduce)

    def reduce(self, parameter: torch.Tensor) -> None:
        """Start averaging a gradient that was computed."""
        self.works.append(dist.all_reduce(parameter.grad, dist.ReduceOp.AVG, async_op=True))

    def wait(self) -> None:
        """Make later work of the current stream wait for all of them."""
        for work in self.works:
            work.wait()
        self.works.clear()


def train(device: torch.device, steps: int) -> list[float]:
    """Return the loss on this rank's rows before each step."""
    torch.manual_seed(1)
    x = torch.randn(ROWS, 16)
    y = torch.sin(x.sum(1, keepdim=True))
    rank, size = dist.get_rank(), dist.get_world_size()
    x, y = x[rank::size].to(device), y[rank::size].to(device)
    model = torch.nn.Sequential(
        torch.nn.Linear(16, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)
    ).to(device)
    averaged = Averaged(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(x), y)
        loss.backward()
        averaged.wait()
        optimizer.step()
        dist.all_reduce(total := loss.detach().clone(), dist.ReduceOp.AVG)
        losses.append(total)
    dist.barrier()  # an error of a call above is raised here, at the latest
    return [float(each) for each in losses]


def main() -> None:
    """Join, train, print."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--on", choices=["gpu", "staged", "cpu"], default="gpu")
    options.add_argument("--steps", type=int, default=150)
    given = options.parse_args()
    device = torch.device("cpu")
    if given.on != "cpu":
        local = int(os.environ.get("LOCAL_RANK", 0))
        device = torch.device("cuda", local % torch.cuda.device_count())
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if given.on == "gpu" else "tcp")
    losses = train(device, given.steps)
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.4f}, after {given.steps} steps {losses[-1]:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
