"""Two ranks, as threads, that do one thing again and again: what does the process gain by it?

    python leaks.py TRANSPORT '[["messages", 100, 1000], ...]'

does each kind 100 times, and then 1000 times more, and prints, as JSON by kind, what the process
held after each: [kilobytes of its own, descriptors, threads].
"""

import contextlib
import gc
import json
import os
import sys
import time

import numpy as np

import cydist as dist
from cydist import executor
from cydist.testing import run_threads

DEADLINE = 3600.0  # the test that starts this has its own
KINDS = {}


def kind(function):
    """Make a function one of the kinds: what rank `rank` of 2 does at its turn."""
    KINDS[function.__name__.replace("_", " ")] = function
    return function


@kind
def blocking_calls(rank):
    dist.all_reduce(np.ones(8))


@kind
def every_collective(rank):
    x, two = np.ones(4), [np.ones(4), np.ones(4)]
    dist.broadcast(x, 0)
    dist.reduce(x, 1)
    dist.all_gather(two, x)
    dist.gather(x, two if rank == 0 else None, 0)
    dist.scatter(x, two if rank == 0 else None, 0)
    dist.reduce_scatter(x, two)
    dist.all_to_all(two, [x, x + 1])
    dist.scan(x)
    dist.all_reduce_coalesced(two)
    dist.barrier()
    dist.monitored_barrier()


@kind
def asynchronous_calls(rank):
    dist.all_reduce(np.ones(8), async_op=True).wait()


@kind
def futures(rank):
    dist.all_reduce(np.ones(8), async_op=True).get_future().result()


@kind
def blocking_calls_behind_asynchronous_ones(rank):
    dist.all_reduce(np.ones(8), async_op=True)
    dist.all_reduce(np.ones(8))


@kind
def messages(rank):
    x = np.ones(8)
    if rank == 0:
        dist.send(x, 1)
        dist.recv(x)
    else:
        dist.recv(x, 0)
        dist.send(x, 0)


@kind
def long_messages(rank):
    x = np.ones(40_000)
    work = dist.isend(x, 1 - rank)
    dist.recv(np.empty(40_000), 1 - rank)
    work.wait()


@kind
def dropped_works(rank):
    dist.isend(np.ones(8), 1 - rank)
    dist.irecv(np.ones(8), 1 - rank)
    dist.all_reduce(np.ones(8), async_op=True)
    dist.barrier()


@kind
def strided_arrays(rank):
    dist.all_reduce(np.ones((8, 8))[:, ::2])
    dist.all_gather([np.ones((3, 6))[:, ::2] for _ in range(2)], np.ones((3, 3)).T)


@kind
def objects(rank):
    values = [None, None]
    dist.all_gather_object(values, {"rank": rank, "of": [2.0, "ranks"]})
    dist.broadcast_object_list(values, 1)
    if rank == 0:
        dist.send_object_list([b"x", {1, 2}], 1)
    else:
        dist.recv_object_list(values, 0)


@kind
def refused_calls(rank):
    with contextlib.suppress(TypeError):
        dist.all_reduce([1.0])
    with contextlib.suppress(ValueError):
        dist.broadcast(np.ones(2), 7)
    with contextlib.suppress(ValueError):
        dist.send(np.ones(2), rank)


@kind
def times_out(rank, timeout=0):
    work = dist.irecv(np.ones(8), 1 - rank)
    with contextlib.suppress(dist.DistTimeoutError):
        work.wait(timeout)
    dist.send(np.ones(8), 1 - rank)
    work.wait()


@kind
def groups(rank):
    group = dist.new_group([0, 1])
    dist.all_reduce(np.ones(8), group=group)
    dist.all_reduce(np.ones(8), group=group, async_op=True).wait()
    dist.destroy_process_group(group)


@kind
def groups_that_nobody_uses(rank):
    dist.destroy_process_group(dist.new_group([0, 1]))


@kind
def groups_that_fail(rank):
    group = dist.new_group([0, 1])
    pending = dist.irecv(np.ones(8), 1 - rank, group)
    with contextlib.suppress(dist.DistError):
        dist.all_reduce(np.ones(8), group=group, timeout=0)
    dist.barrier()
    dist.destroy_process_group(group)
    assert pending.is_completed()
    dist.barrier()


@kind
def groups_that_end_with_work_under_way(rank):
    group = dist.new_group([0, 1])
    works = [dist.irecv(np.ones(8), 1 - rank, group)]
    if rank == 0:
        works.append(dist.all_reduce(np.ones(8), group=group, async_op=True))
    dist.barrier()
    dist.destroy_process_group(group)
    for work in works:
        with contextlib.suppress(dist.DistError):
            work.wait()


@kind
def jobs(rank):
    if rank == 0:
        run_threads(lambda inner: dist.all_reduce(np.ones(8)), 2, sys.argv[1], DEADLINE)


def count(what):
    return len(os.listdir(f"/proc/self/{what}"))


def held(threads, descriptors):
    """Kilobytes of its own, descriptors, threads; once there are no more of the latter."""
    gc.collect()
    limit = time.monotonic() + 20
    while count("task") > threads or count("fd") > descriptors:
        if time.monotonic() > limit:
            break
        time.sleep(0.01)
    with open("/proc/self/statm") as statm:
        _, resident, shared, *_ = map(int, statm.read().split())
    pages = resident - shared  # the memory of windows is one piece, of a size of its own
    return [pages * (os.sysconf("SC_PAGE_SIZE") // 1024), count("fd"), count("task")]


def main():
    transport, plan = sys.argv[1], json.loads(sys.argv[2])
    executor.IDLE_SECONDS = 0.01  # threads that nobody needs end soon
    # Its own threads, this one, two ranks, and for each who listens for its connections.
    threads = count("task") + 2 + 2 * (transport == "tcp")

    def body(rank):
        found = {}
        # Both have come. Who waits for a rank without shared memory takes a connection to it.
        dist.barrier()
        times_out(rank, 0.2)
        for kind, warm_up, times in plan:
            found[kind] = []
            for turns in (warm_up, times):
                for _ in range(turns):
                    KINDS[kind](rank)
                dist.barrier()
                if rank == 0:
                    before = found[kind][0][1] if found[kind] else sys.maxsize
                    found[kind].append(held(threads, before))
                dist.barrier()
        return found

    print(json.dumps(run_threads(body, 2, transport, DEADLINE)[0]))


if __name__ == "__main__":
    main()
