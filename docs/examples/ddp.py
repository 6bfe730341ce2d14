"""Train a classifier of handwritten digits with PyTorch's DistributedDataParallel.

    torchrun --nproc-per-node 2 docs/examples/ddp.py
    torchrun --nproc-per-node 2 docs/examples/ddp.py --backend gloo
    torchrun --nproc-per-node 2 docs/examples/ddp.py --beside gloo --hidden 5000

Nothing here knows cydist but the backend's name. With `--beside` the ranks also train copies of
the model on a second backend, taking turns step by step, and rank 0 prints how many steps per
second each made and how long an all_reduce of one element takes. `--hidden 512` is a model of
1 MB, `--hidden 5000` of 100 MB. The data are the 1,797 digits that come with scikit-learn.

Exits with 1 if the test accuracy is below 95 % after whole epochs, or if the replicas differ in a
single bit.
"""

from __future__ import annotations

import argparse
import importlib
import statistics
import sys
import time
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from sklearn.datasets import load_digits
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

SEED = 20
BATCH = 120  # samples in a step, over all ranks together
WANTED_ACCURACY = 0.95


def digits() -> tuple[Any, Any, Any, Any]:
    """Return images (n, 64) from 0 to 1 and labels (n,), for training and, every fifth, for
    testing."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(SEED).permutation(len(labels))
    images = torch.from_numpy(images[order]).float() / 16
    labels = torch.from_numpy(labels[order])
    test = torch.arange(len(labels)) % 5 == 0
    return images[~test], labels[~test], images[test], labels[test]


class Training:
    """A model, its replicas on the other ranks of a group, and the times of its steps."""

    def __init__(self, backend: str, group: Any, hidden: int) -> None:
        self.backend = backend
        self.seconds: list[float] = []
        torch.manual_seed(SEED)
        layers = [torch.nn.Linear(64, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, hidden)]
        layers += [torch.nn.Tanh(), torch.nn.Linear(hidden, 10)]
        self.model = DistributedDataParallel(torch.nn.Sequential(*layers), process_group=group)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.15, momentum=0.9)

    def step(self, images: Any, labels: Any) -> float:
        """Run one step on this rank's share of a batch, and return the loss."""
        began = time.perf_counter()
        self.optimizer.zero_grad()
        loss = cross_entropy(self.model(images), labels)
        loss.backward()
        self.optimizer.step()
        self.seconds.append(time.perf_counter() - began)
        return loss.item()

    def accuracy(self, images: Any, labels: Any) -> float:
        """Return the share of images that are recognized."""
        with torch.no_grad():
            return float((self.model.module(images).argmax(1) == labels).float().mean())

    def steps_per_second(self) -> float:
        """Return the steps per second of the median step."""
        return 1 / statistics.median(self.seconds)

    def replicas_agree(self) -> bool:
        """Return whether all ranks have the same bits."""
        mine = torch.cat([p.detach().flatten() for p in self.model.parameters()])
        first = mine.clone()
        dist.broadcast(first, 0)
        differ = torch.tensor([float(not torch.equal(mine, first))])
        dist.all_reduce(differ)
        return not differ.item()


def microseconds(group: Any, calls: int = 300) -> float:
    """Return how many microseconds an all_reduce of one element takes."""
    x = torch.ones(1)
    dist.barrier(group)
    began = time.perf_counter()
    for _ in range(calls):
        dist.all_reduce(x, op=dist.ReduceOp.MAX, group=group)
    return (time.perf_counter() - began) / calls * 1e6


def train(trainings: list[Training], epochs: int, steps: int | None) -> bool:
    """Train all in turn, with a limit of steps in an epoch. Return whether all results are
    right."""
    rank, size = dist.get_rank(), dist.get_world_size()
    images, labels, test_images, test_labels = digits()
    order = torch.Generator().manual_seed(SEED)
    accuracy = 0.0
    for epoch in range(epochs):
        shuffled = torch.randperm(len(labels), generator=order)
        losses = []
        for batch in shuffled.split(BATCH)[:steps]:
            mine = batch[rank::size]
            losses.append([each.step(images[mine], labels[mine]) for each in trainings])
        accuracy = trainings[0].accuracy(test_images, test_labels)
        if rank == 0:
            loss = statistics.mean(first for first, *_ in losses)
            print(f"epoch {epoch + 1:2}/{epochs}  loss {loss:.4f}  test accuracy {accuracy:.2%}")
    agree = all([each.replicas_agree() for each in trainings])  # noqa: C419  all ranks call it
    if rank == 0 and not agree:
        print("the replicas differ", file=sys.stderr)
    learnt = steps is not None or accuracy >= WANTED_ACCURACY
    if rank == 0 and not learnt:
        print(f"{accuracy:.2%} is below {WANTED_ACCURACY:.0%}: give more --epochs", file=sys.stderr)
    return agree and learnt


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--backend", default="cydist")
    parser.add_argument("--beside", help="a second backend to compare with")
    parser.add_argument("--hidden", type=int, default=512, help="width of the hidden layers")
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--steps", type=int, help="at most so many in an epoch")
    options = parser.parse_args()
    torch.set_num_threads(1)  # ranks share the cores
    if "cydist" in (options.backend, options.beside):
        importlib.import_module("cydist.interop.torch")  # for a cydist that is not installed
    dist.init_process_group(options.backend)
    groups = {options.backend: dist.group.WORLD}
    if options.beside:
        groups[options.beside] = dist.new_group(backend=options.beside)
    trainings = [Training(name, group, options.hidden) for name, group in groups.items()]
    right = train(trainings, options.epochs, options.steps)
    rounds = [[microseconds(group) for group in groups.values()] for _ in range(9)]
    latencies = [statistics.median(times) for times in zip(*rounds, strict=True)]
    if dist.get_rank() == 0:
        for each, latency in zip(trainings, latencies, strict=True):
            print(
                f"{each.backend}: {each.steps_per_second():.1f} steps/s, "
                f"all_reduce of one element in {latency:.1f} us"
            )
        if options.beside:
            first, second = trainings
            print(
                f"{first.backend} is {first.steps_per_second() / second.steps_per_second():.2f} "
                f"times as fast in steps, {latencies[1] / latencies[0]:.0f} times in all_reduce"
            )
    dist.destroy_process_group()
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
