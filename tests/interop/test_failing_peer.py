"""A peer misbehaves while torch trains or saves in parallel: every survivor gets an exception."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest
from failing_peers import WAYS, Server, check_trial, serving
from program_tables import names_in

pytest.importorskip("torch")

ROOT = Path(__file__).resolve().parents[2]
PROGRAM = ROOT / "tests/interop/torch_failing_peer.py"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(200)]

MODES = names_in(PROGRAM, "MODES")
# Every way and every mode, in as few trials as that takes.
DIAGONAL = {
    ("raise", "fsdp2", 2),
    ("exit", "zero_overlapped", 2),
    ("kill", "zero", 3),
    ("fewer-steps", "pipeline", 3),
    ("hang", "async_save", 2),
    ("barrier", "plain", 2),
}


def marks(way: str, mode: str, size: int) -> list[pytest.MarkDecorator]:
    """The lane of a trial."""
    if (way, mode, size) in DIAGONAL:
        return []
    return [pytest.mark.more if size == 2 else pytest.mark.long]


TRIALS = [
    pytest.param(way, mode, size, marks=marks(way, mode, size), id=f"{way}-{mode}-{size} ranks")
    for way in WAYS
    for mode in MODES
    for size in (2, 3)
]


@pytest.fixture(scope="module")
def server() -> Generator[Server, None, None]:
    """The program, which has imported torch once for all trials."""
    with serving(PROGRAM) as process:
        yield process


@pytest.mark.parametrize(("way", "mode", "size"), TRIALS)
def test_survivors_get_an_exception(way: str, mode: str, size: int, server: Server) -> None:
    """It has cydist's whole text, the group names the typed error, a checkpoint can be written
    afterwards, and no signal ends a rank."""
    # In a pipeline a message does not come, and there is no other collective.
    check_trial(server, way, mode, size, late=(way, mode) == ("barrier", "pipeline"))
