"""Ranks that meet, each on a thread, away from whatever launcher runs the tests."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cydist.rendezvous import handlers, launcher_env, multicast
from cydist.stores import MembershipStore

HOST = "127.0.0.1"
WAIT = 30
Outcome = tuple[MembershipStore, int, int] | Exception

VARIABLES = {name for each in launcher_env.LAUNCHERS for name in each.rank + each.size + each.job}
VARIABLES |= {name for each in launcher_env.LAUNCHERS for name in each.local_rank + each.local_size}
VARIABLES |= {
    "MASTER_ADDR", "MASTER_PORT", "CYDIST_MASTER_ADDR", "CYDIST_MASTER_PORT", "CYDIST_RUN_ID",
    "CYDIST_STORE_FD", "CYDIST_STORE_PORT", "TORCHELASTIC_USE_AGENT_STORE", "PMIX_RANK",
    "HYDI_CONTROL_FD", "CYDIST_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME",
}  # fmt: skip


def stand_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No launcher, announcements that stay on this host; say so in a fixture."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(multicast, "HOPS", 0)


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Run the calls at once, each on a thread; results or exceptions, in order."""
    results: list[Any] = [None] * len(calls)

    def run(i: int) -> None:
        try:
            results[i] = calls[i]()
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * WAIT)
    return results


def meet(
    method: str | None, ranks: list[int], size: int | None = None, **more: Any
) -> list[Outcome]:
    """All ranks call rendezvous with these arguments; -1 asks for any rank."""
    timeout = more.pop("timeout", WAIT)
    world_size = len(ranks) if size is None else size

    def one(rank: int) -> Callable[[], Outcome]:
        return lambda: handlers.rendezvous(
            method, rank=rank, world_size=world_size, timeout=timeout, **more
        )

    return together(*(one(rank) for rank in ranks))


def check_met(outcomes: list[Outcome], ranks: list[int] | None = None) -> None:
    """Every rank met: different ranks (those asked for), one size, one meeting, one store."""
    size = len(outcomes)
    met = []
    for outcome in outcomes:
        assert isinstance(outcome, tuple), outcome
        met.append(outcome)
    assert {their_size for _, _, their_size in met} == {size}
    assert sorted(rank for _, rank, _ in met) == list(range(size))
    if ranks is not None:
        asked = [(want, rank) for want, (_, rank, _) in zip(ranks, met, strict=True) if want >= 0]
        assert all(want == rank for want, rank in asked)
    assert len({store.nonce for store, _, _ in met}) == 1
    for store, rank, _ in met:
        store.set(f"from/{rank}", str(rank))
    for store, _, _ in met:
        assert store.multi_get([f"from/{r}" for r in range(size)]) == [
            str(r).encode() for r in range(size)
        ]
