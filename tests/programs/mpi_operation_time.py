"""How long an all_reduce of float16 over MPI takes by our algorithms, and by an operation of MPI's.

    CYDIST_TRANSPORT=mpi mpirun -n 2 python tests/programs/mpi_operation_time.py

The operation is a loop in C, so it takes no GIL; its call is non-blocking and polled. Beside both,
the same bytes of float32 by MPI's own sum. By turns in one job; microseconds per call, medians of
the rounds on rank 0. Needs gcc 12.
"""

import ctypes
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import numpy as np
from mpi4py import MPI

import cydist as dist

SOURCE = """
void half_sum(const void *in, void *inout, const int *count, const void *datatype) {
    const _Float16 *a = in;
    _Float16 *b = inout;
    for (int i = 0; i < *count; i++)
        b[i] = (_Float16)((float)a[i] + (float)b[i]);
}
"""
SIZES = (8, 1 << 10, 1 << 14, 1 << 18, 1 << 22)
ROUNDS = 5


def compiled():
    """The operation's C function."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "half_sum.so")
        command = ["gcc", "-O3", "-march=native", "-shared", "-fPIC", "-x", "c", "-", "-o", path]
        subprocess.run(command, input=SOURCE, text=True, check=True, timeout=60)
        return ctypes.CDLL(str(path)).half_sum


def operation(function):
    """An operation of this MPI over it; mpi4py's own takes Python functions only."""
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    libraries = [ctypes.CDLL(path) for path in mapped if Path(path).name.startswith("libmpi")]
    library = next(each for each in libraries if hasattr(each, "MPI_Op_create"))
    handle = (ctypes.c_void_p if MPI.get_vendor()[0] == "Open MPI" else ctypes.c_uint32)()
    library.MPI_Op_create(ctypes.cast(function, ctypes.c_void_p), 1, ctypes.byref(handle))
    return MPI.Op.fromhandle(handle.value)


def timed(comm, call, times):
    call()
    comm.Barrier()
    start = time.perf_counter()
    for _ in range(times):
        call()
    comm.Barrier()
    return (time.perf_counter() - start) / times


def main():
    dist.init_process_group("mpi")
    comm, half_sum = MPI.COMM_WORLD.Dup(), operation(compiled())

    def polled(array, result, datatype, op):
        request = comm.Iallreduce((array, datatype), (result, datatype), op)
        while not request.Test():
            pass

    found = {}
    for turn in range(ROUNDS):
        for nbytes in SIZES:
            half, total = np.ones((2, nbytes // 2), np.float16)
            single, sums = np.ones((2, nbytes // 4), np.float32)
            polled(half, total, MPI.SHORT, half_sum)
            assert np.all(total == dist.get_world_size())
            half[:] = 0
            ways = [
                ("float16, ours", lambda half=half: dist.all_reduce(half)),
                (
                    "float16, MPI's operation",
                    lambda half=half, total=total: polled(half, total, MPI.SHORT, half_sum),
                ),
                (
                    "float32, MPI's own",
                    lambda single=single, sums=sums: polled(single, sums, MPI.FLOAT, MPI.SUM),
                ),
            ]
            times = max(5, min(300, (1 << 23) // nbytes))
            for name, call in ways[:: -1 if turn % 2 else 1]:
                found.setdefault(name, {}).setdefault(nbytes, []).append(timed(comm, call, times))
    if dist.get_rank() == 0:
        for name, by_size in sorted(found.items()):
            shown = (f"{1e6 * statistics.median(by_size[nbytes]):9.2f}" for nbytes in SIZES)
            print(f"{name:26}", *shown)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
