"""What ranks of one call must agree on, and what they are told when they do not."""

import numpy as np
import pytest

import cydist as dist
from cydist.testing import run_threads
from cydist.tuning import table as tuning_table


@pytest.mark.parametrize("transport", ["inproc", "tcp", "shm"])
def test_all_gather_with_sizes_in_another_order_is_a_mismatch(transport):
    """The sums of the sizes are equal, the lists are not: no rank gets a wrong number."""

    def body(rank):
        sizes = [2, 4] if rank == 0 else [4, 2]
        outputs = [np.zeros(size) for size in sizes]
        with pytest.raises(dist.MismatchError, match="sizes of blocks"):
            dist.all_gather(outputs, np.full(2, rank + 1.0), timeout=30)

    run_threads(body, 2, transport)


@pytest.mark.parametrize("transport", ["inproc", "tcp", "shm"])
def test_reduce_scatter_with_sizes_in_another_order_is_a_mismatch(transport):
    """The sums of the sizes are equal, the lists are not: no rank gets a wrong number."""

    def body(rank):
        sizes = [2, 4] if rank == 0 else [4, 2]
        with pytest.raises(dist.MismatchError, match="sizes of blocks"):
            dist.reduce_scatter(np.zeros(2), [np.ones(size) for size in sizes], timeout=30)

    run_threads(body, 2, transport)


@pytest.mark.parametrize("transport", ["inproc", "tcp", "shm"])
def test_another_size_of_segments_is_a_mismatch(transport, monkeypatch):
    """Ranks whose environment cuts the data otherwise would read each other's bytes askew."""

    monkeypatch.setattr(tuning_table, "segment_bytes", lambda *_: 256 << dist.get_rank())

    def body(rank):
        with pytest.raises(dist.MismatchError, match="CYDIST_SEGMENT_BYTES"):
            dist.all_reduce(np.full(512, rank + 1.0), timeout=30)

    run_threads(body, 2, transport)


@pytest.mark.parametrize("transport", ["inproc", "tcp", "shm"])
def test_another_algorithm_is_a_mismatch(transport, monkeypatch):
    """As when CYDIST_ALGORITHM is set on one rank only: no receive names the other's steps."""
    monkeypatch.setattr(
        tuning_table, "choose", lambda *_, **__: ("ring", "doubling")[dist.get_rank()]
    )

    def body(rank):
        with pytest.raises(dist.MismatchError, match="algorithm ring") as caught:
            dist.all_reduce(np.full(512, rank + 1.0), timeout=30)
        assert "algorithm doubling" in str(caught.value)
        assert (1 - rank,) == caught.value.ranks

    run_threads(body, 2, transport)


@pytest.mark.parametrize("transport", ["inproc", "tcp", "shm"])
def test_every_rank_learns_of_a_mismatch(transport):
    """Also those that are in the same call as the rank that found it."""

    def body(rank):
        call = dist.broadcast if rank else dist.all_reduce
        arguments = {"src": 0} if rank else {}
        with pytest.raises(dist.MismatchError, match=r"all_reduce.*broadcast|broadcast.*all_red"):
            call(np.ones(1000), timeout=30, **arguments)

    run_threads(body, 3, transport)
