"""A training loop in which rank 2 has a fault that you choose: docs/guide/debugging.md finds each.

cydistrun --nproc-per-node 4 docs/examples/faulty.py slow

The loop fits weights to data by gradient descent. Each rank has data of its own, and the mean of
the ranks' gradients.
"""

from __future__ import annotations

import argparse
import time
import zlib

import numpy as np

import cydist as dist

FEATURES, ROWS = 1000, 64
TRUE = np.sin(np.arange(FEATURES))  # the weights to be found
FAULTS = {
    "none": "there is no fault",
    "hang": "rank 2 waits for its fourth batch of data for ten minutes",
    "slow": "rank 2 takes 20 ms for each batch",
    "start": "rank 2 begins with other weights",
    "nan": "a row of rank 2's fourth batch is empty, and its mean is not a number",
}


def load_batch(rng: np.random.Generator, step: int, fault: str) -> tuple[np.ndarray, np.ndarray]:
    """Return rows of features, and the value of each."""
    if fault == "hang" and step == 3:
        time.sleep(600)
    if fault == "slow":
        time.sleep(0.02)
    x = rng.standard_normal((ROWS, FEATURES))
    if fault == "nan" and step == 3:
        x[7] = np.nan
    return x, x @ TRUE


def check_weights(weights: np.ndarray, step: int) -> None:
    """Say which ranks have other weights than rank 0."""
    sums = np.zeros(dist.get_world_size(), "int64")
    dist.all_gather_into_tensor(sums, np.array([zlib.crc32(weights)]))
    odd = [rank for rank, each in enumerate(sums) if each != sums[0]]
    if odd and dist.get_rank() == 0:
        print(f"step {step}: the weights of ranks {odd} differ from rank 0's")


def train(fault: str, steps: int, check: bool) -> None:
    """Find the weights."""
    rng = np.random.default_rng(dist.get_rank())
    weights = np.zeros(FEATURES)
    if fault == "start":
        weights += 0.01
    for step in range(steps):
        if check and step % 10 == 0:
            check_weights(weights, step)
        x, y = load_batch(rng, step, fault)
        gradient = x.T @ (x @ weights - y) / ROWS
        dist.all_reduce(gradient, dist.ReduceOp.AVG)
        weights -= 0.06 * gradient
    error = float(np.abs(weights - TRUE).mean())
    print(f"rank {dist.get_rank()}: error {error:.6f}", flush=True)


def main() -> None:
    """Parse the command line, and train."""
    it = argparse.ArgumentParser(description="Train with a planted fault.")
    it.add_argument("fault", choices=FAULTS)
    it.add_argument("--check", action="store_true", help="compare the ranks' weights")
    it.add_argument("--steps", type=int, default=50)
    given = it.parse_args()
    dist.init_process_group()
    fault = given.fault if dist.get_rank() == 2 else "none"
    train(fault, given.steps, given.check)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
