"""Clusters of handwritten digits on several ranks: k-means, one all_reduce per round.

    mpirun -n 2 python docs/examples/kmeans.py
    cydistrun --nproc-per-node 4 docs/examples/kmeans.py --picture kmeans.png

Every rank holds a part of the 1,797 images that come with scikit-learn. In each round it gives
its images to the nearest centres, and the sums and counts of all ranks make the new ones
(S. P. Lloyd, "Least squares quantization in PCM", IEEE Trans. Inf. Theory 28, 1982).

Pixels are whole numbers up to 16, so the sums are exact and the centres are the same bits on any
number of ranks: rank 0 computes them alone as well, and the program exits with 1 if they differ,
or if fewer than 60 % of the images are with the majority of their cluster.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits

import cydist as dist

CLUSTERS = 10
WANTED_PURITY = 0.6
ZOOM = 20  # of the picture: pixels for each of an image's


def nearest(images: np.ndarray, centres: np.ndarray) -> np.ndarray:
    """Return the number of the centre nearest to each image, (n,)."""
    # One product for each image and centre, so an image's bits do not depend on other images.
    distances = np.square(images[:, None, :] - centres[None, :, :]).sum(axis=2)
    return distances.argmin(axis=1)


def sums(images: np.ndarray, nearby: np.ndarray) -> np.ndarray:
    """Return for each cluster the sum of its images and, in the last column, their number: (k,
    65)."""
    found = np.zeros((CLUSTERS, images.shape[1] + 1))
    np.add.at(found[:, :-1], nearby, images)
    found[:, -1] = np.bincount(nearby, minlength=CLUSTERS)
    return found


def fit(images: np.ndarray, centres: np.ndarray, rounds: int, *, together: bool) -> np.ndarray:
    """Return the centres when they no longer change, or after the last round; `together` with all
    ranks."""
    for _ in range(rounds):
        total = sums(images, nearest(images, centres))
        if together:
            dist.all_reduce(total)
        filled = total[:, -1:] > 0
        after = np.where(filled, total[:, :-1] / np.maximum(total[:, -1:], 1), centres)
        if np.array_equal(after, centres):
            break
        centres = after
    return centres


def purity(labels: np.ndarray, nearby: np.ndarray) -> float:
    """Return the share of all ranks' images that have their cluster's most common label."""
    table = np.zeros((CLUSTERS, 10), np.int64)
    np.add.at(table, (nearby, labels), 1)
    dist.all_reduce(table)
    return float(table.max(axis=1).sum() / table.sum())


def draw(centres: np.ndarray, path: Path) -> None:
    """Draw the centres as pictures of digits."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = np.concatenate(
        [np.concatenate(list(half.reshape(-1, 8, 8)), axis=1) for half in np.split(centres, 2)]
    )
    pyplot.imsave(path, rows.repeat(ZOOM, 0).repeat(ZOOM, 1), cmap="gray_r")
    print(f"  picture: {path}", flush=True)


def main() -> int:
    """Fit, compare, draw."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=100, help="at most")
    parser.add_argument("--picture", type=Path, help="where to draw (needs matplotlib)")
    options = parser.parse_args()
    dist.init_process_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    images, labels = load_digits(return_X_y=True)
    start = images[np.random.default_rng(1).choice(len(images), CLUSTERS, replace=False)]
    dist.broadcast(start, 0)
    mine = images[rank::size]
    centres = fit(mine, start, options.rounds, together=True)
    share = purity(labels[rank::size], nearest(mine, centres))
    good = np.array([share >= WANTED_PURITY])
    if rank == 0:
        alone = fit(images, start, options.rounds, together=False)
        good &= alone.tobytes() == centres.tobytes()
        print(
            f"world size {size} on {dist.get_backend()}: {share:.1%} of {len(images)} images are "
            f"with the majority of their cluster; centres are "
            f"{'those' if alone.tobytes() == centres.tobytes() else 'NOT those'} of one rank alone",
            flush=True,
        )
        if options.picture is not None:
            draw(centres, options.picture)
    dist.broadcast(good, 0)
    dist.destroy_process_group()
    return 0 if good[0] else 1


if __name__ == "__main__":
    sys.exit(main())
