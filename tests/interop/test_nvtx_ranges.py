"""NVTX: calls with ranges around them. Without a profiler that listens NVTX does nothing, so these
tests show that the hook calls it as it wants; what Nsight shows takes a GPU."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import cydist as dist
from cydist.testing import run_threads

nvtx = pytest.importorskip("nvtx")


@pytest.fixture
def marks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What NVTX is told, beside what it does."""
    from cydist.interop import nvtx_ranges

    told: list[Any] = []
    start, end = nvtx.start_range, nvtx.end_range

    def started(message: str, domain: str) -> Any:
        told.append((message, domain))
        return start(message=message, domain=domain)

    def ended(found: Any) -> None:
        end(found)
        told.append("end")

    monkeypatch.setattr(nvtx, "start_range", started)
    monkeypatch.setattr(nvtx, "end_range", ended)
    handle = nvtx_ranges.add_ranges()
    yield told
    handle.remove()


def test_each_call_is_a_range(marks: list[Any]) -> None:
    """With its name, group and bytes; it ends with the call."""
    run_threads(lambda rank: dist.all_reduce(np.ones(6)), 1)
    assert marks == [("all_reduce on group 0, 48 bytes", "cydist"), "end"]
