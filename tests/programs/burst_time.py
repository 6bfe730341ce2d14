"""Times all_to_all and all_gather of large arrays, as a user's own program would.

    cydistrun --nproc-per-node 2 tests/programs/burst_time.py cydist
    mpirun -n 2 PYTHON tests/programs/burst_time.py mpi

Each size has numpy arrays of ones, and calls in five bursts of 0.12 s. Prints the median time of a
call in microseconds. Run the libraries by turns, several times: one run says little.
"""

from __future__ import annotations

import statistics
import sys
import time
from typing import Any

import numpy as np

BURSTS, SECONDS = 5, 0.12
SIZES = (1 << 20, 16 << 20, 128 << 20)


class Cydist:
    """cydist's default group."""

    def __init__(self) -> None:
        import cydist

        self._dist = cydist
        cydist.init_process_group("tcp")
        self.rank, self.size = cydist.get_rank(), cydist.get_world_size()
        self.barrier, self.close = cydist.barrier, cydist.destroy_process_group
        self.all_to_all, self.all_gather = cydist.all_to_all_single, cydist.all_gather_into_tensor

    def from_rank_0(self, number: int) -> int:
        """Return rank 0's number."""
        numbers = np.array([number])
        self._dist.broadcast(numbers, 0)
        return int(numbers[0])


class Mpi:
    """mpi4py's COMM_WORLD."""

    def __init__(self) -> None:
        from mpi4py import MPI

        self._comm = MPI.COMM_WORLD
        self.rank, self.size = self._comm.rank, self._comm.size
        self.barrier = self._comm.Barrier

    def all_to_all(self, output: Any, source: Any) -> None:
        """Exchange blocks."""
        self._comm.Alltoall(source, output)

    def all_gather(self, output: Any, source: Any) -> None:
        """Gather all ranks' arrays."""
        self._comm.Allgather(source, output)

    def from_rank_0(self, number: int) -> int:
        """Return rank 0's number."""
        return int(self._comm.bcast(number, 0))

    def close(self) -> None:
        """Leave the rest to mpi4py."""


def main(name: str) -> None:
    """Run on every rank; print on rank 0."""
    library = Cydist() if name == "cydist" else Mpi()
    for op in ("all_to_all", "all_gather"):
        call: Any = getattr(library, op)
        for nbytes in SIZES:
            own = nbytes if op == "all_to_all" else nbytes // library.size
            source, output = np.ones(own // 4, np.float32), np.ones(nbytes // 4, np.float32)
            call(output, source)
            library.barrier()
            began = time.perf_counter()
            call(output, source)
            calls = max(1, int(SECONDS / (time.perf_counter() - began)))
            calls = library.from_rank_0(calls)
            times = []
            for _ in range(BURSTS):
                library.barrier()
                began = time.perf_counter()
                for _ in range(calls):
                    call(output, source)
                times.append((time.perf_counter() - began) / calls)
            if library.rank == 0:
                print(f"{op} {nbytes} {statistics.median(times) * 1e6:.1f}", flush=True)
    library.close()


if __name__ == "__main__":
    main(sys.argv[1])
