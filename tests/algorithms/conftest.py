"""Groups whose ranks are on several hosts."""

import pytest
from collective_cases import Ranks
from hierarchical_cases import PLACEMENTS

APART = {"1+1+1+1": [0, 1, 2, 3]}


@pytest.fixture(scope="module")
def ranks_on():
    """ranks_on(placement, transport): the ranks of a group, made once."""
    kept = {}

    def get(placement, transport):
        if (placement, transport) not in kept:
            hosts = PLACEMENTS[placement]
            kept[placement, transport] = Ranks(len(hosts), transport, hosts)
        return kept[placement, transport]

    yield get
    for group in kept.values():
        group.close()


@pytest.fixture
def fresh_ranks_on():
    """fresh_ranks_on(placement): ranks that need not work afterwards."""
    made = []

    def make(placement):
        hosts = (PLACEMENTS | APART)[placement]
        made.append(Ranks(len(hosts), "shm", hosts))
        return made[-1]

    yield make
    for group in made:
        left = [link.messages.statistics()["in_calls"] for link in group.links]
        group.close()
        assert left == [0] * group.size
