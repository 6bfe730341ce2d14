"""Groups that end while something is under way on them."""

import numpy as np
import pytest

import cydist as dist
from cydist.testing import run_threads

TRANSPORTS = ["inproc", "tcp", "shm"]


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_destroy_ends_an_asynchronous_collective(transport):
    """Its Work raises GroupDestroyedError; the memory that it uses outlives it."""

    def body(rank):
        group = dist.new_group([0, 1])
        works = []
        if rank == 0:
            works = [dist.all_reduce(np.ones(1000), group=group, async_op=True)]
        dist.barrier()
        dist.destroy_process_group(group)
        dist.barrier()
        for work in works:
            with pytest.raises(dist.GroupDestroyedError):
                work.wait(30)

    run_threads(body, 2, transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_destroy_ends_a_receive(transport):
    """A receive that nobody answers is over, whether it is waited for or asked about."""

    def body(rank):
        group = dist.new_group([0, 1])
        waited, asked = (dist.irecv(np.zeros(3), 1 - rank, group) for _ in range(2))
        dist.barrier()
        dist.destroy_process_group(group)
        assert asked.is_completed()
        with pytest.raises(dist.GroupDestroyedError):
            waited.wait(30)

    run_threads(body, 2, transport)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_abort_ends_a_receive_that_nobody_waits_for(transport):
    """is_completed sees the end, and exception says why."""

    def body(rank):
        group = dist.new_group([0, 1])
        work = dist.irecv(np.zeros(3), 1 - rank, group)
        dist.abort(group)
        assert work.is_completed()
        assert isinstance(work.exception(), dist.GroupFailedError)

    run_threads(body, 2, transport)


def test_a_blocking_call_keeps_its_timeout_behind_an_asynchronous_one():
    """Its turn never comes: DistTimeoutError at its own timeout, and the group has failed."""

    def body(rank):
        group = dist.new_group([0, 1])
        if rank == 0:
            pending = dist.all_reduce(np.ones(3), group=group, async_op=True)
            with pytest.raises(dist.DistTimeoutError, match="issued before it"):
                dist.all_reduce(np.ones(3), group=group, timeout=0.1)
            with pytest.raises(dist.GroupFailedError):
                dist.barrier(group)
            dist.abort(group)
            with pytest.raises(dist.GroupFailedError):
                pending.wait(30)

    run_threads(body, 2)


def test_a_group_outlives_one_of_an_older_world_with_its_name():
    """Destroying a group of a world that has ended leaves the new world's alone."""

    def body(rank):
        old = dist.new_group([0])
        dist.destroy_process_group()
        dist.init_process_group("inproc", rank=0, world_size=1, store=dist.HashStore())
        new = dist.new_group([0])
        assert old.group_name == new.group_name
        dist.destroy_process_group(old)
        return dist.get_pg_count()

    assert [2] == run_threads(body, 1)
