"""Groups that end while something is under way on them."""

import numpy as np
import pytest

import cydist as dist
from cydist.testing import run_threads

TRANSPORTS = ["inproc", "tcp"]


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
