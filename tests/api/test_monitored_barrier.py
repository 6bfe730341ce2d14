"""monitored_barrier names who did not come."""

import pytest

import cydist as dist
from cydist.testing import run_threads


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
