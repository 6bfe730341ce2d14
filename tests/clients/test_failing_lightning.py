"""A peer misbehaves while Lightning shards a model: every survivor gets an exception."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest
from failing_peers import WAYS, Server, check_trial, serving

pytest.importorskip("torch")

PROGRAM = Path(__file__).parent / "programs/failing_lightning.py"

pytestmark = [pytest.mark.long, pytest.mark.timeout(200)]


@pytest.fixture(scope="module")
def server() -> Generator[Server, None, None]:
    """The program, which has imported Lightning once for all trials."""
    pytest.importorskip("lightning", reason="scripts/test-clients installs it")
    with serving(PROGRAM) as process:
        yield process


@pytest.mark.parametrize("size", [2, 3], ids="{} ranks".format)
@pytest.mark.parametrize("way", WAYS)
def test_survivors_get_an_exception(way: str, size: int, server: Server) -> None:
    """ModelParallelStrategy: cydist's whole text, the typed error, and a checkpoint afterwards."""
    check_trial(server, way, "model_parallel", size)
