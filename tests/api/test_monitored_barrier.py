"""monitored_barrier names who did not come."""

import pytest

import cydist as dist
from cydist.testing import Faults, run_threads


@pytest.mark.parametrize("wait_all", [False, True], ids=["first", "all"])
@pytest.mark.parametrize("transport", ["inproc", "tcp", "shm"])
def test_missing_ranks_are_named_on_rank_0_and_the_others_are_told(transport, wait_all):
    """Ranks 1 and 3 of four never call."""

    def body(rank):
        if rank in (1, 3):
            return None
        with pytest.raises(dist.DistTimeoutError) as caught:
            dist.monitored_barrier(timeout=0.3 if rank == 0 else 1.0, wait_all_ranks=wait_all)
        return str(caught.value), caught.value.ranks

    first, _, third, _ = run_threads(body, 4, transport)
    missing = (1, 3) if wait_all else (1,)
    assert missing == first[1]
    named = "Ranks 1, 3" if wait_all else "Rank 1"
    assert first[0].startswith(f"[Rank 0]: {named} failed to pass monitoredBarrier in 300 ms")
    assert third[0].startswith("Rank 2 successfully reached monitoredBarrier")


@pytest.mark.parametrize("wait_all", [False, True], ids=["first", "all"])
@pytest.mark.parametrize("transport", ["inproc", "tcp", "shm"])
def test_a_rank_that_died_is_named_at_once(transport, wait_all):
    """In the words for a missing rank, which torch's documents show, and with how it ended."""

    def body(rank):
        with pytest.raises(dist.PeerFailedError) as caught:
            dist.monitored_barrier(timeout=50, wait_all_ranks=wait_all)
        assert caught.value.op == "monitored_barrier"
        return str(caught.value), caught.value.ranks

    first, _, third = run_threads(body, 3, transport, faults=Faults(kill={1: 1}))
    assert (first[1], third[1]) == ((1,), (1,))
    assert first[0].startswith("[Rank 0]: Rank 1 failed to pass monitoredBarrier in 50000 ms")
    assert third[0].startswith("Rank 2 successfully reached monitoredBarrier")
    assert all("Original exception: " in text for text, _ in (first, third))
