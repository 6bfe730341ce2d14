"""register_rendezvous_handler: an init_method with a scheme of the program's own."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from thread_rendezvous import WAIT, check_met, stand_alone, together

import cydist as dist
from cydist.errors import RendezvousError
from cydist.rendezvous import handlers
from cydist.stores import HashStore


@pytest.fixture(autouse=True)
def alone(secret: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No launcher, and handlers that end with the test."""
    stand_alone(monkeypatch, tmp_path)
    monkeypatch.setattr(handlers, "_REGISTERED", {})


def test_ranks_meet_in_its_store() -> None:
    """It gets the URL with what the call says, and the timeout."""
    store, asked = HashStore(), []

    def handler(url: str, timeout: timedelta) -> Iterator[tuple[Any, int, int]]:
        asked.append(url)
        assert timedelta(0) < timeout <= timedelta(seconds=WAIT)
        yield store, int(url[-14]), 2

    dist.register_rendezvous_handler("pigeon", handler)
    urls = [f"pigeon://roof?rank={rank}&world_size=2" for rank in range(2)]
    check_met(
        together(
            lambda: handlers.rendezvous("pigeon://roof", rank=0, world_size=2, timeout=WAIT),
            lambda: handlers.rendezvous("pigeon://roof?rank=1", world_size=2, timeout=WAIT),
        )
    )
    assert sorted(asked) == urls


def test_a_handler_may_return_a_list() -> None:
    dist.register_rendezvous_handler("pigeon", lambda url, timeout: [(HashStore(), 0, 1)])
    assert handlers.rendezvous("pigeon://", timeout=WAIT)[1:] == (0, 1)


def test_a_handler_that_finds_nothing() -> None:
    dist.register_rendezvous_handler("pigeon", lambda url, timeout: [])
    with pytest.raises(RendezvousError, match="handler of pigeon:// has found no store"):
        handlers.rendezvous("pigeon://", timeout=WAIT)


def test_its_rank_is_checked() -> None:
    dist.register_rendezvous_handler("pigeon", lambda url, timeout: [(HashStore(), 2, 2)])
    with pytest.raises(ValueError, match="rank must be from 0 to 1, not 2"):
        handlers.rendezvous("pigeon://", timeout=WAIT)


@pytest.mark.parametrize("scheme", ["tcp", "pigeon", "", "Pigeon", "a b"], ids=repr)
def test_schemes_that_are_refused(scheme: str) -> None:
    """Those that are taken, and what begins no URL."""
    if scheme == "pigeon":
        dist.register_rendezvous_handler("pigeon", lambda url, timeout: [])
    with pytest.raises(ValueError, match=r"already|no scheme"):
        dist.register_rendezvous_handler(scheme, lambda url, timeout: [])


def test_unknown_schemes_name_the_known_ones() -> None:
    dist.register_rendezvous_handler("pigeon", lambda url, timeout: [])
    with pytest.raises(ValueError, match="env://, tcp://, file://, pigeon://, not 'crow://'"):
        handlers.rendezvous("crow://", timeout=WAIT)
