"""Data-parallel training in cupy alone: every GPU has its share of the rows.

cydistrun --nproc-per-node gpu docs/examples/parallel_cupy.py

Logistic regression on data of its own making. Gradients are averaged by one coalesced call, which
runs behind the kernels that make them; the host waits for nothing until it prints. With numpy in
cupy's place (--on cpu) it runs on CPUs, and prints the same but for rounding; with --on staged
cupy's arrays go over TCP, through pinned memory, and ranks may share a GPU.
"""

from __future__ import annotations

import argparse
import importlib
import os
from typing import Any

import cydist as dist

FEATURES, ROWS = 32, 4096  # of all ranks together


def rows(xp: Any, rank: int, size: int) -> tuple[Any, Any]:
    """Return this rank's share of the data: features, and whether their weighted sum is
    positive."""
    draw = xp.random.RandomState(1)
    x = draw.standard_normal((ROWS, FEATURES)).astype("float32")
    truth = draw.standard_normal(FEATURES).astype("float32")
    y = (x @ truth > 0).astype("float32")
    return x[rank::size], y[rank::size]


def train(xp: Any, epochs: int) -> list[float]:
    """Return the mean loss of each epoch, over all ranks."""
    rank, size = dist.get_rank(), dist.get_world_size()
    x, y = rows(xp, rank, size)
    weights, bias = xp.zeros(FEATURES, "float32"), xp.zeros(1, "float32")
    losses = []
    for _ in range(epochs):
        guess = 1 / (1 + xp.exp(-(x @ weights + bias)))
        loss = -xp.mean(xp.log(xp.where(y > 0, guess, 1 - guess) + 1e-7)).reshape(1)
        wrong = guess - y
        gradients = [x.T @ wrong / len(y), xp.mean(wrong).reshape(1), loss]
        dist.all_reduce_coalesced(gradients, dist.ReduceOp.AVG)
        weights -= 2 * gradients[0]
        bias -= 2 * gradients[1]
        losses.append(gradients[2])
    dist.barrier()  # an error of a call above is raised here, at the latest
    return [float(each[0]) for each in losses]


def main() -> None:
    """Join, train, print."""
    options = argparse.ArgumentParser(description=__doc__)
    options.add_argument("--on", choices=["gpu", "staged", "cpu"], default="gpu")
    options.add_argument("--epochs", type=int, default=40)
    given = options.parse_args()
    xp = importlib.import_module("numpy" if given.on == "cpu" else "cupy")
    if given.on != "cpu":
        local = int(os.environ.get("LOCAL_RANK", 0))
        xp.cuda.Device(local % xp.cuda.runtime.getDeviceCount()).use()
    dist.init_process_group("nccl" if given.on == "gpu" else "tcp")
    losses = train(xp, given.epochs)
    if dist.get_rank() == 0:
        print(f"loss {losses[0]:.4f}, after {given.epochs} epochs {losses[-1]:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
