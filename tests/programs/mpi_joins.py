"""How ranks join a job, as mpi_exits.py: `mpirun -n 3 python mpi_joins.py WAY [ARGUMENT]`."""

import faulthandler
import os
import signal
import sys
import threading

import numpy as np
from mpi_exits import WAYS, join, see_leave, total, way

import cydist as dist
from cydist.rendezvous import launcher_env


@way
def beside_tcp():
    """Many groups of "mpi", of some ranks and of all, beside a default group of "tcp"."""
    from cydist.backends.mpi import communicators, endpoint

    communicators.COMMUNICATORS = 3
    rank, size = join("tcp")
    os.environ["CYDIST_TRANSPORT"] = "mpi"
    members = [list(range(size)), [0, size - 1], list(range(1, size))] * 4
    groups = [dist.new_group(each, backend="mpi") for each in members]
    for each, group in zip(members, groups, strict=True):
        array = np.full(500, rank)
        if rank in each:
            dist.all_reduce(array, group=group)
            assert [sum(each)] * 500 == array.tolist()
    own = [group for group in groups if group]
    assert dist.get_pg_count() == 1 + len(own)
    with_one = sum(group.native.library_comm != 0 for group in own)
    print(
        f"rank {rank}: {len(endpoint._open)} for all groups, {with_one} communicators", flush=True
    )
    for group in own[1:]:
        dist.destroy_process_group(group)
    if rank < size - 1:  # a world of those that are left shares it, too
        dist.shrink_group([size - 1])
        group = dist.new_group(backend="mpi")
        array = np.full(500, rank)
        dist.all_reduce(array, group=group)
        assert [sum(range(size - 1))] * 500 == array.tolist()
        print(f"rank {rank}: {len(endpoint._open)} after the shrink", flush=True)
    dist.destroy_process_group()
    assert not endpoint._open


@way
def unfit():
    """Settings of the ranks do not fit together: say what this one hears, and whether it has asked
    for MPI."""
    try:
        join("mpi")
    except (dist.DistError, ValueError) as error:
        rank = launcher_env.placement().rank
        print(f"rank {rank}: {type(error).__name__}: {error}", flush=True)
        print(f"rank {rank}: MPI {'mpi4py.MPI' in sys.modules}", flush=True)


@way
def half_made(where, how):
    """Rank 1 fails when all have come, just before MPI makes their communicator. Rank 0, which
    waits for that, has a deadline, or gets a Ctrl-C."""
    from cydist.backends.mpi import create

    rank, make = launcher_env.placement().rank, create._communicator

    def fail(*given):
        raise RuntimeError("failed just now")

    def interrupted(*given):
        threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()
        return make(*given)

    create._communicator = fail if rank == 1 else make if how == "late" else interrupted
    timeout = 3 if how == "late" else 600
    if where == "beside-tcp":
        join("tcp")
    try:
        if where == "beside-tcp":
            dist.new_group(backend="mpi", timeout=timeout)
        else:
            dist.init_process_group("mpi", timeout=timeout)
    except (dist.DistError, RuntimeError, KeyboardInterrupt) as error:
        print(f"rank {rank}: {type(error).__name__}: {error}", flush=True)
    if where == "beside-tcp":
        print(f"rank {rank}: {total(1)} go on", flush=True)
    else:
        print(f"rank {rank}: joined {dist.is_initialized()}", flush=True)


@way
def deaf():
    """Rank 0 can listen nowhere: the job works, and what late ranks do is not told."""
    from cydist.backends.mpi import bootstrap

    def refuse(*given, **named):
        raise OSError("no descriptor is left")

    if launcher_env.placement().rank == 0:
        bootstrap.Connections = refuse
    rank, size = join()
    assert total(1) == size
    try:
        dist.recv(np.ones(1), 1 - rank, timeout=0.2 if rank == 1 else None)
    except dist.DistError as error:  # rank 0 may see first that the other has left
        print(f"rank {rank}: {error!r}", flush=True)


@way
def beside_a_wildcard():
    """The program waits on COMM_WORLD for anything from anyone, before the job begins until after
    its end: that takes nothing of ours."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    theirs = np.zeros(1)
    pending = world.Irecv(theirs, MPI.ANY_SOURCE, MPI.ANY_TAG)
    rank, size = join()
    group = dist.new_group()
    for each in (None, group):
        array = np.full(5000, rank)
        dist.all_reduce(array, group=each)
        assert [sum(range(size))] * 5000 == array.tolist()
    dist.destroy_process_group()
    assert not pending.Test()
    world.Barrier()
    world.Send(np.full(1, float(rank)), (rank + 1) % size)
    pending.Wait()
    assert theirs[0] == (rank - 1) % size
    print(f"rank {rank}: undisturbed", flush=True)


kept = []


@way
def kept_till_the_end():
    """A receive and an error of a call that MPI never ends live as long as the interpreter."""
    rank, _ = join()
    group = dist.new_group()
    dist.barrier(group)
    if rank == 0:
        kept.append(dist.irecv(np.zeros(3), 1, group, tag=9))
    try:
        if rank == 0:
            dist.broadcast(np.ones(9), 1, group)
        else:
            dist.monitored_barrier(group)
        dist.barrier(group)
    except dist.DistError as error:
        kept.append(error)
    dist.destroy_process_group()
    print(f"rank {rank}: {type(kept[-1]).__name__}", flush=True)


@way
def saying_why():
    """Rank 1 gives up a call and leaves; rank 0 looks at its receive from rank 1 then."""
    rank, _ = join()
    total(1)
    try:
        if rank == 1:
            dist.all_reduce(np.ones(1), timeout=0.1)
        work = dist.irecv(np.ones(1), 1)
        see_leave(1)
        work.wait()
    except dist.DistError as error:
        print(f"rank {rank}: {error}", flush=True)
    dist.destroy_process_group()


@way
def monitored(late):
    """The rank of this number calls monitored_barrier, the other one another collective; each
    leaves with its error."""
    rank, _ = join()
    total(1)
    try:
        dist.monitored_barrier() if rank == int(late) else dist.all_reduce(np.ones(4, "f2"))
    except dist.DistError as error:
        print(f"rank {rank}: {type(error).__name__}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    faulthandler.dump_traceback_later(25, exit=True)
    WAYS[sys.argv[1]](*sys.argv[2:])
