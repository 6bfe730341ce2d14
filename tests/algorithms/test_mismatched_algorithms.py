"""Ranks that choose different algorithms, and settings that name none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cydist as dist
from cydist.testing import run_threads
from cydist.testing.test_mismatches import call, mismatch_text, ones
from cydist.tuning import table as tuning_table


@pytest.fixture(params=[2, 3, 4], ids=lambda size: f"{size}ranks")
def p(request: pytest.FixtureRequest) -> int:
    """How many ranks."""
    return int(request.param)


ALGORITHMS = [
    pytest.param(name, usual, odd, id=f"{name}-{usual}-{odd}")
    for name, usual, odd in (
        ("all_reduce", "ring", "doubling"),
        ("all_reduce", "flat", "ring"),
        ("all_reduce", "ring", "flat"),
        ("broadcast", "flat", "tree"),
        ("broadcast", "tree", "flat"),
        ("reduce", "flat", "tree"),
        ("reduce", "tree", "flat"),
        ("gather", "flat", "linear"),
        ("scatter", "flat", "linear"),
        ("barrier", "flat", "dissemination"),
        ("all_gather", "bruck", "ring"),
    )
]


@pytest.mark.parametrize(("name", "usual", "odd"), ALGORITHMS)
@pytest.mark.parametrize("rank", [0, 1], ids=["root", "other"])
@pytest.mark.parametrize("transport", ["inproc", "tcp", "shm"])
def test_another_algorithm(
    transport: str,
    p: int,
    rank: int,
    name: str,
    usual: str,
    odd: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As when CYDIST_ALGORITHM is set on one rank only; through windows on some, too."""
    if transport == "tcp" and "flat" in (usual, odd):
        return  # tcp has no windows: there the table chooses for both
    choose = tuning_table.choose

    def chosen(collective: str, *rest: Any, **more: Any) -> str:
        if collective != name:
            return choose(collective, *rest, **more)
        return odd if dist.get_rank() == rank else usual

    monkeypatch.setattr(tuning_table, "choose", chosen)

    def body(_: int) -> str:
        return mismatch_text(lambda: call(name, p))

    for text in run_threads(body, p, transport):
        assert f"algorithm {usual}" in text
        assert f"algorithm {odd}" in text


@pytest.mark.parametrize("transport", ["inproc", "tcp", "shm"])
def test_a_wrong_setting_is_found_before_traffic(
    transport: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """CYDIST_ALGORITHM names what does not exist: ValueError, and the group stays usable."""

    def body(rank: int) -> float:
        dist.barrier()
        if rank == 0:
            monkeypatch.setenv("CYDIST_ALGORITHM", "all_reduce:magic")
            tuning_table.reload()
            with pytest.raises(ValueError, match="magic"):
                dist.all_reduce(ones())
            with pytest.raises(ValueError, match="magic"):
                dist.all_reduce(ones(), async_op=True)
            monkeypatch.delenv("CYDIST_ALGORITHM")
            tuning_table.reload()
        total = np.ones(1)
        dist.all_reduce(total)
        return float(total[0])

    assert run_threads(body, 2, transport) == [2.0, 2.0]
