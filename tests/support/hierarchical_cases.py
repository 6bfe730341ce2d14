"""Placements of ranks on hosts, and what else the tests of hierarchical algorithms share."""

import time

import pytest
from collective_cases import TINY, choose_for_part

from cydist import _native
from cydist.tuning import table as tuning_table

ROWS = sorted(row for row, needs in tuning_table.NEEDS.items() if needs & tuning_table.HOSTS)
# The host of each rank.
PLACEMENTS = {
    "2+2": [0, 0, 1, 1],
    "round-robin": [0, 1, 0, 1],
    "3+1": [0, 0, 0, 1],
    "1+3": [0, 1, 1, 1],
    "2+1+3": [5, 5, 7, 2, 2, 2],
    "2+2+2-mixed": [0, 1, 2, 1, 0, 2],
}
CONSECUTIVE = ("2+2", "3+1", "1+3", "2+1+3")


def row_id(row):
    return "-".join(row)


def cut_parts_at(group, segment):
    """Let the parts of all ranks' group send segments of so many bytes."""
    for each in group.groups:
        each.prepare_parts(choose_for_part, lambda ranks, windows: segment)


def placed(rows):
    """Parametrize by these rows and every placement where each can run."""
    able = [
        pytest.param(row, placement, id=f"{row_id(row)}-{placement}")
        for row in rows
        for placement in PLACEMENTS
        if placement in CONSECUTIVE or not tuning_table.NEEDS[row] & tuning_table.CONSECUTIVE
    ]
    return pytest.mark.parametrize(("row", "placement"), able)


def status_of(group, case, name, rank):
    """Run a call, compare it with the others', and return how it ended."""
    try:
        case.run(group.groups[rank], rank, name, 1, TINY, 20.0)
        group.groups[rank].compare_last(time.monotonic_ns() + int(20e9))
    except _native.CallError as error:
        return error.status
    return "ok"


def pending(link):
    counts = getattr(link, "messages", link).statistics()
    return counts["posted"], counts["arrived"]
