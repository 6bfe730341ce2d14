"""How long calls over MPI take, beside mpi4py's non-blocking ones polled until they are complete.

    CYDIST_TRANSPORT=mpi mpirun -n 2 python tests/programs/mpi_nonblocking_time.py

By turns in one process, a few milliseconds each: the tenth percentile of cydist's rounds, in
microseconds per call of float32 on rank 0, its ratio to mpi4py's, and mpi4py's to itself.
"""

import argparse
import time

import numpy as np
from mpi4py import MPI

import cydist as dist

TURN = 0.003  # seconds


def polled(*requests):
    """Ask MPI until they are complete."""
    for request in requests:
        while not request.Test():
            pass


def calls_of(nbytes, comm):
    """cydist's and mpi4py's calls of so many bytes in all, by the name of the collective."""
    rank, size = comm.Get_rank(), comm.Get_size()
    count = nbytes // 4 // size
    x, y = np.zeros((2, size * count), np.float32)
    part = np.zeros(count, np.float32)
    whole, blocks, other = (x, MPI.FLOAT), (x, count, MPI.FLOAT), (y, count, MPI.FLOAT)
    peer = 1 - rank

    def there_and_back():
        for sender in (0, 1):
            if rank == sender:
                dist.send(x, peer)
            elif rank == 1 - sender:
                dist.recv(x, peer)

    def there_and_back_by_mpi():
        for sender in (0, 1):
            if rank == sender:
                polled(comm.Isend(whole, peer))
            elif rank == 1 - sender:
                polled(comm.Irecv(whole, peer))

    return {
        "all_reduce": (
            lambda: dist.all_reduce(x),
            lambda: polled(comm.Iallreduce(MPI.IN_PLACE, whole)),
        ),
        "broadcast": (lambda: dist.broadcast(x, 0), lambda: polled(comm.Ibcast(whole, 0))),
        "all_gather": (
            lambda: dist.all_gather_into_tensor(y, part),
            lambda: polled(comm.Iallgather((part, MPI.FLOAT), other)),
        ),
        "reduce_scatter": (
            lambda: dist.reduce_scatter_tensor(part, x),
            lambda: polled(comm.Ireduce_scatter_block(whole, (part, MPI.FLOAT))),
        ),
        "all_to_all": (
            lambda: dist.all_to_all_single(y, x),
            lambda: polled(comm.Ialltoall(blocks, other)),
        ),
        "there and back": (there_and_back, there_and_back_by_mpi),
    }


def timed(call, times, comm):
    """Seconds per call, of all ranks together."""
    comm.Barrier()
    start = time.perf_counter()
    for _ in range(times):
        call()
    comm.Barrier()
    return (time.perf_counter() - start) / times


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--sizes", default="8,1024,65536,1048576,16777216", help="bytes")
    parser.add_argument("--rounds", type=int, default=100)
    options = parser.parse_args()
    dist.init_process_group("mpi")
    comm = MPI.COMM_WORLD.Dup()
    for nbytes in map(int, options.sizes.split(",")):
        for name, (ours, theirs) in calls_of(nbytes, comm).items():
            timed(ours, 3, comm)  # makes what the later ones find
            seconds = comm.allreduce(timed(ours, 3, comm), MPI.MAX)
            times = max(1, min(500, int(TURN / seconds)))
            rounds = {"ours": [], "theirs": [], "theirs again": []}
            for turn in range(options.rounds):
                order = list(zip(rounds, (ours, theirs, theirs), strict=True))
                for who, call in order if turn % 2 else reversed(order):
                    rounds[who].append(timed(call, times, comm))
            found = {who: np.quantile(each, 0.1) for who, each in rounds.items()}
            if dist.get_rank() == 0:
                print(
                    f"{name:14} {nbytes:9} {1e6 * found['ours']:9.2f}"
                    f"  {found['ours'] / found['theirs']:.2f}"
                    f"  {found['theirs again'] / found['theirs']:.2f}",
                    flush=True,
                )
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
