"""A rank that ends, or begins, in some way: `mpirun -n 2 python mpi_exits.py WAY [ARGUMENT]`.

Calls have ten minutes here, so a rank that waits for a rank that is gone shows its stack and ends
before they do.
"""

import faulthandler
import hashlib
import itertools
import os
import signal
import sys
import threading
import time

import numpy as np

import cydist as dist

WAYS = {}


def way(function):
    """Make a function one of the ways."""
    WAYS[function.__name__.replace("_", "-")] = function
    return function


def join(backend=None):
    """Rank and size; nothing but the launcher says them."""
    dist.init_process_group(backend, timeout=600)
    return dist.get_rank(), dist.get_world_size()


def total(value):
    """The sum of every rank's value."""
    array = np.array([value])
    dist.all_reduce(array)
    return int(array[0])


@way
def well():
    """Say which backend it was, and leave without a word to cydist."""
    rank, size = join()
    print(f"rank {rank} of {size} on {dist.get_backend()}: {total(rank)}", flush=True)


@way
def tcp():
    """As `well`, over tcp."""
    rank, size = join("tcp")
    print(f"rank {rank} of {size} on {dist.get_backend()}: {total(rank)}", flush=True)
    dist.destroy_process_group()


@way
def raising():
    """One rank raises; the other waits for it."""
    rank, _ = join()
    total(1)
    if rank == 1:
        raise LookupError("nothing here")
    total(1)


@way
def raising_after_the_end():
    """As `raising`, when the job has been left: MPI ends as it would without us."""
    hook = sys.excepthook
    join()
    assert sys.excepthook is not hook
    dist.destroy_process_group()
    assert sys.excepthook is hook
    raise LookupError("nothing here")


@way
def leaving_early():
    """One rank ends well, and the other waits for it."""
    rank, _ = join()
    total(1)
    if rank == 0:
        total(1)


@way
def given_up():
    """One rank's first call of a group ends at its deadline, while MPI makes the communicator,
    to which the other never comes."""
    rank, _ = join()
    total(1)
    group = dist.new_group()
    if rank == 0:
        try:
            group.execute("all_reduce", group._create, timeout=0.3)
        except dist.DistTimeoutError:
            print("rank 0: given up", flush=True)
    dist.destroy_process_group()


@way
def failed_in_two_jobs():
    """Groups fail in one job, and in the next one; MPI gets no communicator of theirs back."""
    from cydist.backends.mpi import communicators

    communicators.WITH_FAILED = 6
    own = 0
    for _ in range(2):
        rank, _ = join()
        spare = dist.new_group()
        dist.barrier(spare)
        for _ in range(4):
            group = dist.new_group()
            dist.barrier(group)
            own += group.native.library_comm != 0
            dist.barrier(spare)
            dist.abort(group)
            dist.destroy_process_group(group)
        dist.barrier(spare)
        dist.destroy_process_group()
    print(f"rank {rank}: {own} had one", flush=True)


def see_leave(rank):
    """Wait until this rank has left the job."""
    link = dist.group.WORLD._endpoint.messages
    deadline = time.monotonic() + 20
    while not link.lost(rank):
        link.advance()
        assert time.monotonic() < deadline


@way
def late(how):
    """The root of a broadcast has left when the last rank, which tells it what it calls, begins;
    it is in MPI_Finalize then."""
    rank, size = join()
    total(1)
    array = np.full(5, 7.0 if rank == 0 else 0.0)
    if rank == size - 1:
        see_leave(0)
    dist.broadcast(array, 0)
    print(f"rank {rank}: {array.tolist()}", flush=True)
    if how == "destroying":
        dist.destroy_process_group()


@way
def late_in_many(how):
    """As `late`, in thirty groups, for each of which the others would wait a second."""
    rank, size = join()
    groups = [dist.new_group() for _ in range(30)]
    for group in groups:
        dist.barrier(group)
    if rank == size - 1:
        see_leave(0)
    for number, group in enumerate(groups):
        array = np.full(5, number if rank == 0 else 0)
        dist.broadcast(array, 0, group)
        assert [number] * 5 == array.tolist()
    print(f"rank {rank}: content", flush=True)
    if how == "destroying":
        dist.destroy_process_group()


@way
def left_when_it_had_heard():
    """Rank 1 takes a message and leaves; rank 0, which has a hundred others under way to a rank
    that takes none, asks later."""
    from mpi4py import MPI

    rank, _ = join()
    total(1)
    world, data = MPI.COMM_WORLD, np.ones(150_000)
    if rank == 0:
        others = [dist.isend(data, 2) for _ in range(100)]
        work = dist.isend(data, 1)
        world.recv(source=1)
        while not dist.group.WORLD._endpoint.messages.lost(1):
            others[0].is_completed()
        until = time.monotonic() + 1.5  # longer than one is waited for that has left
        while time.monotonic() < until:
            world.Iprobe()
        while not work.is_completed():
            pass
        work.wait()
        print("rank 0: content", flush=True)
        world.send(None, 2)
    elif rank == 1:
        dist.recv(data, 0)
        dist.destroy_process_group()
        world.send(None, 0)
    else:
        world.recv(source=0)


@way
def differing_late(how):
    """As `late`, and the last rank's dtype is another one."""
    rank, size = join()
    total(1)
    array = np.full(5, 7, "i8" if rank == size - 1 else "f8")
    if rank == size - 1:
        see_leave(0)
    try:
        dist.broadcast(array, 0)
        if how == "destroying":
            dist.destroy_process_group()
    except dist.MismatchError as error:
        print(f"rank {rank}: {error}", flush=True)


@way
def exit_code():
    """Both ranks exit with 3."""
    join()
    total(1)
    sys.exit(3)


@way
def without_threads():
    """MPI was started by the user, for one thread."""
    import mpi4py

    mpi4py.rc.threads = False
    from mpi4py import MPI

    assert MPI.Query_thread() < MPI.THREAD_MULTIPLE
    rank, _ = join()
    arrays = [np.full(3, n) for n in range(4)]
    works = [dist.all_reduce(array, async_op=True) for array in arrays]
    futures = [work.get_future() for work in works]
    into = np.zeros(2)
    receiving = dist.irecv(into, 1 - rank)
    dist.isend(np.full(2, float(rank)), 1 - rank).wait()
    receiving.wait()
    sums = [int(future.result()[0][0]) for future in futures]
    print(f"rank {rank}: {sums} {into[0]}", flush=True)


@way
def thread_level(name):
    """MPI was started by the user at some level; say which it is, and what works there."""
    import mpi4py

    mpi4py.rc.thread_level = name
    from mpi4py import MPI

    levels = ("SINGLE", "FUNNELED", "SERIALIZED", "MULTIPLE")
    level = {getattr(MPI, f"THREAD_{each}"): each for each in levels}[MPI.Query_thread()]
    rank, size = join()
    array = np.full(1000, rank)
    dist.all_reduce(array, async_op=True).wait()
    assert [size * (size - 1) // 2] * 1000 == array.tolist()
    into = np.zeros(100_000)
    receiving = dist.irecv(into, (rank - 1) % size)
    dist.isend(np.full(100_000, float(rank)), (rank + 1) % size).wait()
    receiving.wait()
    assert into[-1] == (rank - 1) % size

    said = []

    def elsewhere():
        try:
            said.append(total(1))
        except dist.UnsupportedError as error:
            said.append(type(error).__name__ if "main thread" in str(error) else str(error))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert MPI.COMM_WORLD.allreduce(1) == total(1) == size
    print(f"rank {rank}: {level}, elsewhere {said[0]}", flush=True)


@way
def asynchronous(name):
    """MPI was started by the user at some level; what needs calls that go on in the background."""
    import mpi4py

    mpi4py.rc.thread_level = name
    from mpi4py import MPI

    rank, size = join()
    data, heard = np.full(1000, rank), np.zeros(100_000)
    if rank == 0:
        work = dist.all_reduce(data, async_op=True)
        for peer in range(1, size):
            dist.send(np.full(100_000, 7.0), peer)
        work.wait()
    else:
        dist.recv(heard, 0)
        assert heard[-1] == 7
        dist.all_reduce(data)
    assert [size * (size - 1) // 2] * 1000 == data.tolist()

    groups = [dist.new_group() for _ in range(3)]
    arrays = [np.full(30_000, each + rank) for each in range(3)]
    order = [0, 1, 2] if rank == 0 else [2, 1, 0]
    works = {
        each: dist.all_reduce(arrays[each], group=groups[each], async_op=True) for each in order
    }
    while not works[order[0]].is_completed():
        assert MPI.COMM_SELF.allreduce(1) == 1  # MPI is this thread's between cydist's calls
    dist.barrier(groups[1])
    for each in order:
        works[each].wait()
        assert arrays[each][-1] == size * each + size * (size - 1) // 2
    future = dist.all_reduce(data, async_op=True).get_future()
    assert int(future.result()[0][0]) == size * size * (size - 1) // 2
    print(f"rank {rank}: content", flush=True)


@way
def threads_in_turn(count):
    """MPI was started so that threads may call it one at a time; two do, on groups of their own."""
    import mpi4py

    mpi4py.rc.thread_level = "serialized"
    from mpi4py import MPI

    assert MPI.Query_thread() == MPI.THREAD_SERIALIZED
    rank, size = join()
    groups = [[dist.new_group() for _ in range(int(count))] for _ in range(2)]
    good = []

    def body(own):
        for _ in range(3):
            for each, group in enumerate(own):
                array = np.full(500, each + rank)
                dist.all_reduce(array, group=group)
                assert [size * each + size * (size - 1) // 2] * 500 == array.tolist()
        good.append(len(own))

    threads = [threading.Thread(target=body, args=(own,)) for own in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    print(f"rank {rank}: {good}", flush=True)
    dist.destroy_process_group()


@way
def finalizing():
    """The user started MPI, leaves the job, and ends MPI."""
    from mpi4py import MPI

    rank, size = join()
    assert total(1) == size
    dist.destroy_process_group()
    assert MPI.COMM_WORLD.allreduce(1) == size
    MPI.Finalize()
    print(f"rank {rank}: finalized", flush=True)


@way
def finalizing_first():
    """As `finalizing`, without leaving the job before."""
    from mpi4py import MPI

    rank, size = join()
    assert total(1) == size
    MPI.Finalize()
    for call in (lambda: total(1), lambda: dist.isend(np.ones(3), 1 - rank)):
        try:
            call()
        except dist.DistError as error:
            print(f"rank {rank}: {error}", flush=True)
    dist.destroy_process_group()
    print(f"rank {rank}: finalized", flush=True)


@way
def interrupted():
    """One rank gets a Ctrl-C that nobody catches, while it waits for the others."""
    rank, _ = join()
    total(1)
    if rank == 1:
        signal.raise_signal(signal.SIGINT)
    total(1)


@way
def killed():
    """The last rank is killed; the others go on without it."""
    rank, size = join()
    total(1)
    if rank == size - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dead = ()
    while not dead:
        try:
            total(1)
        except dist.PeerFailedError as error:
            dead = error.ranks
    assert (size - 1,) == dead
    dist.shrink_group()
    rank, size = dist.get_rank(), dist.get_world_size()
    into = np.zeros(100_000)
    receiving = dist.irecv(into, (rank - 1) % size)
    dist.isend(np.full(100_000, float(rank)), (rank + 1) % size).wait()
    receiving.wait()
    group = dist.new_group()
    dist.barrier(group)
    print(f"rank {rank} of {size}: {total(1)} are left, heard {into[-1]:.0f}", flush=True)
    total(1)
    dist.destroy_process_group()
    os._exit(0)  # MPI_Finalize of Open MPI 5.0 does not always end after a death


@way
def before_the_others():
    """mpi4py was told not to start MPI."""
    import mpi4py

    mpi4py.rc.initialize = False
    from mpi4py import MPI

    assert not MPI.Is_initialized()
    well()


@way
def forked():
    """A forked child's call is refused, and its end ends nothing."""
    rank, _ = join()
    total(1)
    child = os.fork()
    if child == 0:
        try:
            total(1)
        except dist.ForkedError:
            os._exit(7)
        os._exit(0)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(f"rank {rank}: child {code}, sum {total(1)}", flush=True)


@way
def again():
    """Join and leave many times; one rank never hears what the other said last."""
    for attempt in range(30):
        rank, _ = join()
        if rank == 0:
            dist.isend(np.zeros(100_000 if attempt % 10 == 9 else 3), 1)
        assert total(attempt) == 2 * attempt
        dist.destroy_process_group()
    print(f"rank {rank}: content", flush=True)


@way
def bits():
    """Reduce what rounds, each rank coming last once; say what rank 0 has."""
    rank, size = join()
    digest = hashlib.sha256()
    for count, dtype in itertools.product((3, 100, 1000, 50_000), ("f4", "f8")):
        scales = 10.0 ** np.random.default_rng(1).integers(-8, 8, count)
        mine = (np.random.default_rng(rank).standard_normal(count) * scales).astype(dtype)
        for call in (dist.all_reduce, lambda array, **how: dist.reduce(array, 0, **how)):
            found = {reduced_with(call, mine, last) for last in range(size)}
            assert rank != 0 or len(found) == 1, (count, dtype)
            digest.update(b"".join(found))
    if rank == 0:
        print(f"sums: {digest.hexdigest()}", flush=True)


def reduced_with(call, mine, last):
    """The bits of the result, when one rank comes last."""
    array, word = mine.copy(), np.zeros(1)
    if dist.get_rank() == last:
        for _ in range(dist.get_world_size() - 1):
            dist.recv(word)
        call(array)
    else:
        work = call(array, async_op=True)
        dist.send(word, last)
        work.wait()
    return array.tobytes()


@way
def over_mpi():
    """Asks for MPI, a rank that started it."""
    rank, size = join("mpi")
    print(f"rank {rank} of {size}", flush=True)


if __name__ == "__main__":
    faulthandler.dump_traceback_later(25, exit=True)
    WAYS[sys.argv[1]](*sys.argv[2:])
