"""Relays: one that leads a member to itself, and passes on all bytes, is not let between."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from tcp_proxy import NetworkFaults, Proxy
from thread_rendezvous import HOST, WAIT, stand_alone, together
from transport_ranks import DEADLINE, SECRET

from cydist.backends.host.addresses import Address
from cydist.backends.host.connections import Connections
from cydist.backends.host.peer_report import PeerReport
from cydist.errors import AuthenticationError
from cydist.rendezvous.handlers import rendezvous_through
from cydist.stores import HashStore, TCPStore

pytestmark = pytest.mark.usefixtures("secret")

PLACE = r"127\.0\.0\.1:\d+"
REFUSED = rf"this side sees a connection ({PLACE}) -> ({PLACE}), the other side one (?!\1)"

Relay = Callable[[str, int], int]


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CYDIST_NAT", raising=False)
    stand_alone(monkeypatch, tmp_path)


@pytest.fixture
def relay() -> Iterator[Relay]:
    """host, port -> the port of a relay to there on this host."""
    made: list[Proxy] = []

    def make(host: str, port: int) -> int:
        made.append(Proxy((host, port), NetworkFaults()))
        return made[-1].port

    yield make
    for proxy in made:
        proxy.close()


class OverwrittenStore(HashStore):
    """A store that anybody may write, in which a relay puts its place for rank 0's."""

    def __init__(self, relay: Relay) -> None:
        super().__init__()
        self._relay = relay

    def set(self, key: str, value: object) -> None:
        if key == "address":
            size, host, port, name, mac = str(value).split()
            value = f"{size} {HOST} {self._relay(host, int(port))} {name} {mac}"
        super().set(key, value)  # type: ignore[arg-type]


def test_store_through_a_relay_is_refused(master: TCPStore, relay: Relay) -> None:
    """A TCPStore that is reached through a relay is an AuthenticationError that names what both
    sides see; the relay is no member of the store."""
    port = relay(HOST, master.port)
    with pytest.raises(AuthenticationError, match=REFUSED) as caught:
        TCPStore(HOST, port, timeout=WAIT)
    seen = re.findall(PLACE, str(caught.value).partition("this side")[2])
    assert [seen[1], seen[3]] == [f"{HOST}:{port}", f"{HOST}:{master.port}"]
    assert "set CYDIST_NAT=1 on every rank of the job" in str(caught.value)
    assert master.add("still", 1) == 1
    assert master._refcount is not None
    assert len(master._refcount.server._connections) == 1


def test_store_through_a_relay_is_used_where_that_is_allowed(
    master: TCPStore, relay: Relay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With CYDIST_NAT=1 a network may translate addresses, and a relay cannot be told from it."""
    monkeypatch.setenv("CYDIST_NAT", "1")
    with closing(TCPStore(HOST, relay(HOST, master.port), timeout=WAIT)) as store:
        store.set("key", "v")
    assert master.get("key") == b"v"


def meet(shared_store: OverwrittenStore, rank: int, timeout: float) -> Callable[[], Any]:
    """One rank's way to meet the other one by that store."""
    return lambda: rendezvous_through(
        shared_store, lambda deadline: HOST, rank=rank, world_size=2, timeout=timeout
    )


@pytest.mark.parametrize("nat", ["0", "1"], ids="CYDIST_NAT={}".format)
def test_address_overwritten_in_a_shared_store_is_refused(
    relay: Relay, nat: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A process that may write in the store by which ranks meet, torchrun's for one, leads no rank
    to a relay, not even where relays are allowed."""
    monkeypatch.setenv("CYDIST_NAT", nat)
    shared_store = OverwrittenStore(relay)
    _, refused = together(meet(shared_store, 0, 1.0), meet(shared_store, 1, WAIT))
    assert isinstance(refused, AuthenticationError)
    assert "does not prove knowledge of this job's secret" in str(refused)


def test_question_through_a_relay_is_refused(relay: Relay) -> None:
    """A rank that asks another what it is doing tells a relay nothing, and hears nothing. The
    refusal is the answer, though the rank's next address is closed."""
    with (
        closing(Connections(0, 2, host=HOST, job="j", secret=SECRET)) as asked,
        closing(Connections(1, 2, host=HOST, job="j", secret=SECRET)) as asking,
    ):
        asked.report_of = lambda comm_id: PeerReport("busy", "")
        there = Address.decode(asked.address())
        lanes = [[(HOST, relay(*there.lanes[0][0])), (HOST, 1)]]
        asking.connect([Address(0, there.host, lanes).encode(), asking.address()])
        with pytest.raises(AuthenticationError, match=REFUSED):
            asking.query(0, 1, time.monotonic() + DEADLINE)
