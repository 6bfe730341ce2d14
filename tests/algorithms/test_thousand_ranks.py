"""Hierarchical algorithms with data on 1,024 ranks, threads that exchange messages."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from collective_cases import ROOTED, Case, Ranks
from extra_values import long

from cydist.tuning import table as tuning_table

ROWS = sorted(row for row, needs in tuning_table.NEEDS.items() if needs & tuning_table.HOSTS)
# With p * p blocks, which take half a minute or more of one core.
MANY_BLOCKS = ("all_to_all", "all_gather", "reduce_scatter")
SECONDS = 100.0  # for one call, which takes a few on an idle machine
SEGMENT = 1 << 16


def uneven(ranks: int) -> list[int]:
    """Return places on hosts that have 1 to 17 ranks each."""
    return [host for host in range(ranks) for _ in range(1 + host * 7 % 17)][:ranks]


PLACEMENTS = {
    "uneven": uneven,
    "1-and-3-and-the-rest": lambda p: [0] + [1] * 3 + [2] * (p - 4),
    "round-robin": lambda p: [rank % (p // 16) for rank in range(p)],
}


@pytest.fixture(params=["uneven", *long("1-and-3-and-the-rest", "round-robin")])
def hosts(request: pytest.FixtureRequest) -> list[int]:
    """The host of each of 1,024 ranks."""
    return PLACEMENTS[request.param](1024)


@pytest.fixture
def ranks(hosts: list[int]) -> Iterator[Ranks]:
    """1,024 ranks in these places."""
    made = Ranks(len(hosts), "inproc", hosts)
    yield made
    made.close()


def able(row: tuple[str, str], ranks: Ranks) -> bool:
    consecutive = ranks.groups[0].hosts == [] or all(
        one <= other for one, other in zip(ranks.hosts, ranks.hosts[1:], strict=False)
    )
    return consecutive or not tuning_table.NEEDS[row] & tuning_table.CONSECUTIVE


def check(ranks: Ranks, row: tuple[str, str], roots: list[int]) -> None:
    collective, name = row
    for root in roots if collective in ROOTED else roots[:1]:
        case = Case(collective, ranks.size, 3, root=root)
        case.check(ranks.run(case, name, segment=SEGMENT, seconds=SECONDS))


@pytest.mark.timeout(300)
def test_right_data(ranks: Ranks) -> None:
    """Every algorithm gives each of 1,024 ranks its result, from the first, a middle and the last
    rank as the root."""
    for row in ROWS:
        if row[0] not in MANY_BLOCKS and able(row, ranks):
            check(ranks, row, [0, 512, 1023])


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("row", [row for row in ROWS if row[0] in MANY_BLOCKS], ids="-".join)
@pytest.mark.parametrize("place", ["uneven", "1-and-3-and-the-rest", "round-robin"])
def test_right_blocks(row: tuple[str, str], place: str) -> None:
    """The same for those that give each rank a block of each other rank: 1,024 ranks unevenly
    placed, and 256 for other placements and for all_to_all, which would have a million blocks."""
    large = place == "uneven" and row[0] != "all_to_all"
    hosts = PLACEMENTS[place](1024 if large else 256)
    ranks = Ranks(len(hosts), "inproc", hosts)
    try:
        check(ranks, row, [0])
    finally:
        ranks.close()
