"""Groups whose ranks meet in a TCPStore: what one rank's trouble does to the others, and to what
they make later."""

import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cydist as dist
from cydist import deprecated
from cydist.groups import registry
from cydist.stores import TCPStore
from cydist.testing import run_threads

# Longer than any wait that is meant to end by itself, shorter than a test may take.
LONG = 30


@pytest.fixture
def run(master: TCPStore, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[Any]]:
    """Runs a body on ranks that are threads and met in a TCPStore."""
    monkeypatch.setattr("cydist.testing.HashStore", lambda: master)
    return run_threads


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> str:
    """A backend whose ranks wait for one another in the store; a test may replace `prepare`."""
    name = "waits-in-the-store"
    if not hasattr(dist.Backend, name.upper()):
        dist.register_backend(name, lambda *told: _made(*told), devices=["cpu"])
    return name


def prepare(rank: int) -> None:
    """What a rank does before it meets the others."""


def _made(store: Any, rank: int, size: int, timeout: Any) -> dist.ProcessGroup:
    prepare(rank)
    store.set(f"here/{rank}", "")
    store.wait([f"here/{other}" for other in range(size)])
    return dist.ProcessGroup(rank, size, timeout=timeout)


def test_a_group_that_failed_spoils_no_later_one(
    run: Callable[..., list[Any]], backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who waits in the failed meeting is told why; the next one waits for the rank that failed,
    and comes about."""

    def fail(rank: int) -> None:
        if rank == 1:
            raise ValueError("reason\nin two lines")

    def body(rank: int) -> None:
        monkeypatch.setattr(sys.modules[__name__], "prepare", fail)
        with pytest.raises(
            dist.PeerFailedError if rank == 0 else ValueError, match=r"reason\sin two"
        ):
            dist.new_group(backend=backend, timeout=LONG)
        dist.barrier()
        monkeypatch.setattr(sys.modules[__name__], "prepare", lambda rank: None)
        if rank == 0:
            with pytest.raises(dist.StoreTimeoutError):
                dist.new_group([0, 1], backend=backend, timeout=0.1, use_local_synchronization=True)
        dist.barrier()
        assert dist.new_group(backend=backend, timeout=LONG).size() == 2

    run(body, 2, "tcp")


def test_entries_that_one_rank_cannot_group(
    run: Callable[..., list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others are told why, and may try again."""
    create = registry.create

    def failing(name: str, options: Any, pg_options: object) -> Any:
        if "2 arrays a rank" in options.group_id and options.group_rank >= 2:
            raise ValueError("reason")
        return create(name, options, pg_options)

    def body(rank: int) -> None:
        xs = [np.ones(1), np.ones(1)]
        monkeypatch.setattr(registry, "create", failing)
        with pytest.raises(dist.PeerFailedError if rank == 0 else ValueError, match="reason"):
            deprecated.all_reduce_multigpu(xs)
        dist.barrier()
        monkeypatch.setattr(registry, "create", create)
        dist.barrier()
        deprecated.all_reduce_multigpu(xs)
        assert [x.item() for x in xs] == [4, 4]

    run(body, 2, "tcp", LONG)
