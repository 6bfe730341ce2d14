"""Host names: what the resolver says, and what is done when it says nothing."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from cydist.errors import DistNetworkError, RendezvousError, StoreTimeoutError
from cydist.net import interfaces
from cydist.rendezvous import handlers
from cydist.stores import TCPStore

pytestmark = pytest.mark.usefixtures("secret")

WAIT = 30


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "[::1]"])
def test_names_and_addresses_are_resolved(host: str) -> None:
    """Names, addresses and addresses in brackets give what to connect to."""
    found = interfaces.resolve(host, 80)
    assert {kind for _, kind, _, _, _ in found} == {socket.SOCK_STREAM}
    assert {address[1] for _, _, _, _, address in found} == {80}
    assert {address[0] for _, _, _, _, address in found} <= {"127.0.0.1", "::1"}


@pytest.mark.parametrize(
    "host", ["nowhere.invalid", "no..name", "x" * 300], ids=["unknown", "empty", "long"]
)
def test_what_is_no_name_is_an_error(host: str) -> None:
    """A name that nobody knows, or that cannot be one, is an OSError."""
    with pytest.raises(OSError, match=r"."):
        interfaces.resolve(host, 80)


@pytest.fixture
def silence(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The name service does not answer until the test is over; addresses need none."""
    over = threading.Event()
    ask = socket.getaddrinfo

    def unanswered(host: str, port: int, family: int, kind: int, protocol: int, flags: int) -> Any:
        if not flags & socket.AI_NUMERICHOST:
            over.wait(WAIT)
        return ask(host, port, family, kind, protocol, flags)

    monkeypatch.setattr(socket, "getaddrinfo", unanswered)
    monkeypatch.setattr(interfaces, "PATIENCE", 0.05)
    yield
    over.set()


@pytest.mark.usefixtures("silence")
def test_silent_name_service_costs_the_timeout() -> None:
    """A rank that needs a name gives up at its deadline, and says for which name."""
    with pytest.raises(StoreTimeoutError, match="did not resolve 'localhost'"):
        TCPStore("localhost", 29500, timeout=0.05)
    with pytest.raises(DistNetworkError, match="did not resolve 'localhost'"):
        TCPStore("localhost", 0, None, True)
    with pytest.raises(RendezvousError, match="did not resolve 'localhost'"):
        handlers.rendezvous("tcp://localhost:29500", rank=1, world_size=2, timeout=0.05)
    TCPStore("127.0.0.1", 0, None, True).close()


def test_refused_connection_is_not_called_an_unresolved_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A name resolves, and nobody listens there: a last lookup cut off by the deadline hides
    nothing."""
    over = threading.Event()
    ask = socket.getaddrinfo
    lookups: list[str] = []

    def answered_once(host: Any, port: int, *rest: int) -> Any:
        if not rest[-1] & socket.AI_NUMERICHOST:
            lookups.append(host)
            if len(lookups) > 1:
                over.wait(WAIT)
        return ask(host, port, *rest)

    monkeypatch.setattr(socket, "getaddrinfo", answered_once)
    with socket.socket() as closed:  # bound, so that nobody else listens there
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
        try:
            with pytest.raises(StoreTimeoutError, match="Connection refused") as found:
                TCPStore("localhost", port, timeout=0.2)
        finally:
            over.set()
    assert len(lookups) > 1
    assert "did not resolve" not in str(found.value)
