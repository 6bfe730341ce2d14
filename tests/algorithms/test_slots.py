"""Where ranks write the data that others read."""

from __future__ import annotations

import mmap
from contextlib import closing

import numpy as np
from transport_ranks import Group, Ranks, run, soon

from cydist import _native

SLOTS = 8
COUNT = 2500  # elements of 8 bytes: too long for a head


def places(
    ranks: Ranks, groups: list[Group], collective: str, seq: int, **options: int
) -> list[int]:
    """Run a call through windows; return where each rank's contribution lies, or -1."""
    given = [np.full(COUNT, float(1000 * seq + rank)) for rank in range(len(groups))]
    into = [np.zeros((len(groups), COUNT)) for _ in groups]

    def one(rank: int) -> None:
        sent = _native.asarray(given[rank])
        if collective == "all_gather":
            outputs = [_native.asarray(row) for row in into[rank]]
        else:
            outputs = [sent]
        groups[rank].run(
            collective, [sent], outputs, algorithm=b"flat", count=COUNT, deadline_ns=soon(),
            seq=seq, **options,
        )  # fmt: skip

    markers = [array[:16].tobytes() for array in given]
    run(*[lambda r=r: one(r) for r in range(len(groups))])
    memory = ranks.links[0].memory
    with closing(mmap.mmap(memory.fd, memory.used() + (1 << 20))) as found:
        return [found.find(marker) for marker in markers]


def test_two_ranks_write_where_they_have_just_read() -> None:
    """With every turn of the slots each writes into the other's window."""
    with closing(Ranks("shm", 2)) as ranks:
        groups = ranks.group()
        found = [places(ranks, groups, "all_gather", seq) for seq in range(1, 3 * SLOTS + 1)]
    assert min(min(each) for each in found) > 0
    assert len({place for each in found for place in each}) == 2 * SLOTS
    for before, after in zip(found, found[SLOTS:], strict=False):
        assert after == before[::-1]


def test_a_root_writes_into_its_own_window() -> None:
    """The other ranks would only read what it then has to take back."""
    with closing(Ranks("shm", 2)) as ranks:
        groups = ranks.group()
        found = [places(ranks, groups, "broadcast", seq, root=0) for seq in range(1, 17)]
    assert min(first for first, _ in found) > 0
    assert [first for first, _ in found[:SLOTS]] == [first for first, _ in found[SLOTS:]]


def test_three_ranks_write_into_their_own_windows() -> None:
    """One that is in another call by mistake does not overwrite what a root gives to the others."""
    with closing(Ranks("shm", 3)) as ranks:
        groups = ranks.group()
        found = [places(ranks, groups, "all_gather", seq) for seq in range(1, 2 * SLOTS + 1)]
    assert min(min(each) for each in found) > 0
    assert found[:SLOTS] == found[SLOTS:]
