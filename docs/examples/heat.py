"""Heat in a square plate on several ranks: halo exchange through strided views.

    mpirun -n 2 python docs/examples/heat.py
    cydistrun --nproc-per-node 4 docs/examples/heat.py --picture heat.png

The plate is cut into blocks, as square as the number of ranks allows. In every step each rank
sends the edges of its block to its neighbours and receives theirs: rows lie in one piece,
columns are strided views, and `batch_isend_irecv` takes both. Jacobi's method then sets every
point to the mean of its four neighbours.

Rank 0 gathers the blocks and solves the same plate alone. Exits with 1 unless both are equal,
bit for bit: every point is computed by the same operations in the same order.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np

import cydist as dist

HOT, COLD = 1.0, 0.0


def sides(ranks: int) -> tuple[int, int]:
    """Return the numbers of rows and columns of blocks, as square as possible."""
    rows = max(each for each in range(1, int(ranks**0.5) + 1) if ranks % each == 0)
    return rows, ranks // rows


def cuts(points: int, parts: int) -> list[int]:
    """Return where each part begins, and the end."""
    return [part * points // parts for part in range(parts + 1)]


def plate(points: int) -> np.ndarray:
    """Return the whole plate, (points + 2, points + 2) with its fixed rim; the upper side is
    hot."""
    grid = np.full((points + 2, points + 2), COLD)
    grid[0] = HOT
    return grid


def step(grid: np.ndarray, after: np.ndarray) -> None:
    """Set every inner point to the mean of its neighbours."""
    after[1:-1, 1:-1] = (grid[:-2, 1:-1] + grid[2:, 1:-1] + grid[1:-1, :-2] + grid[1:-1, 2:]) / 4


class Block:
    """This rank's part of the plate, with one more row or column on each side."""

    def __init__(self, points: int, rank: int, ranks: int) -> None:
        self.rows, self.columns = sides(ranks)
        self.row, self.column = divmod(rank, self.columns)
        down, across = cuts(points, self.rows), cuts(points, self.columns)
        self.place = (
            slice(down[self.row], down[self.row + 1] + 2),
            slice(across[self.column], across[self.column + 1] + 2),
        )
        self.grid = plate(points)[self.place].copy()
        self.after = self.grid.copy()

    def neighbours(self) -> list[tuple[int, np.ndarray, np.ndarray, int]]:
        """Return for each neighbour its rank, this block's edge and halo, and its side."""
        grid = self.grid
        found = []
        if self.row > 0:
            found.append((self.rank_at(-1, 0), grid[1, 1:-1], grid[0, 1:-1], 0))
        if self.row < self.rows - 1:
            found.append((self.rank_at(1, 0), grid[-2, 1:-1], grid[-1, 1:-1], 1))
        if self.column > 0:
            found.append((self.rank_at(0, -1), grid[1:-1, 1], grid[1:-1, 0], 2))
        if self.column < self.columns - 1:
            found.append((self.rank_at(0, 1), grid[1:-1, -2], grid[1:-1, -1], 3))
        return found

    def rank_at(self, down: int, right: int) -> int:
        """Return the rank at this distance in blocks."""
        return (self.row + down) * self.columns + self.column + right

    def exchange(self) -> None:
        """Send edges, receive halos. A message's tag is the side of the receiver that it comes
        from."""
        operations = []
        for rank, edge, halo, side in self.neighbours():
            operations.append(dist.P2POp(dist.irecv, halo, rank, tag=side))
            operations.append(dist.P2POp(dist.isend, edge, rank, tag=side ^ 1))
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    def advance(self) -> float:
        """Make one step, and return the largest change of any point on any rank."""
        self.exchange()
        step(self.grid, self.after)
        change = np.array([np.abs(self.after - self.grid).max()])
        self.grid, self.after = self.after, self.grid
        dist.all_reduce(change, dist.ReduceOp.MAX)
        return float(change[0])


def gathered(block: Block, points: int) -> np.ndarray | None:
    """Return the whole plate on rank 0, None elsewhere."""
    size = dist.get_world_size()
    inner = np.ascontiguousarray(block.grid[1:-1, 1:-1])
    if dist.get_rank() != 0:
        dist.gather(inner, None, 0)
        return None
    others = [Block(points, rank, size) for rank in range(size)]
    parts = [np.empty_like(other.grid[1:-1, 1:-1]) for other in others]
    dist.gather(inner, parts, 0)
    whole = plate(points)
    for other, part in zip(others, parts, strict=True):
        whole[other.place][1:-1, 1:-1] = part
    return whole


def alone(points: int, steps: int) -> np.ndarray:
    """Compute the same plate on one rank."""
    grid = plate(points)
    after = grid.copy()
    for _ in range(steps):
        step(grid, after)
        grid, after = after, grid
    return grid


def draw(grid: np.ndarray, path: Path) -> None:
    """Draw the plate."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    pyplot.imsave(path, grid, cmap="inferno")
    print(f"  picture: {path}", flush=True)


def main() -> int:
    """Solve, compare, draw."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--points", type=int, default=200, help="inner points of a side")
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--picture", type=Path, help="where to draw the plate (needs matplotlib)")
    options = parser.parse_args()
    dist.init_process_group()
    block = Block(options.points, dist.get_rank(), dist.get_world_size())
    for _ in range(options.steps):
        change = block.advance()
    whole = gathered(block, options.points)
    same = np.array([True])
    if whole is not None:
        same[0] = whole.tobytes() == alone(options.points, options.steps).tobytes()
        print(
            f"world size {dist.get_world_size()} on {dist.get_backend()}, {block.rows} x "
            f"{block.columns} blocks: after {options.steps} steps points change by {change:.3g}; "
            f"{'equal to' if same[0] else 'DIFFERENT from'} one rank alone, bit for bit",
            flush=True,
        )
        if options.picture is not None:
            draw(whole, options.picture)
    dist.broadcast(same, 0)
    dist.destroy_process_group()
    return 0 if same[0] else 1


if __name__ == "__main__":
    sys.exit(main())
