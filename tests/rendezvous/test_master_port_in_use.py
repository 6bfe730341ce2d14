"""MASTER_PORT belongs to somebody else: all ranks say so at once."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable

import pytest

from cydist.errors import DistError, DistNetworkError
from cydist.net import auth
from cydist.rendezvous import handlers

pytestmark = pytest.mark.usefixtures("secret")

HOST = "127.0.0.1"
WAIT = 30


@pytest.fixture(params=["tcp", "env"])
def url(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], str]:
    """The port -> an URL by which rank 0 serves it."""

    def at(port: int) -> str:
        monkeypatch.setenv("MASTER_ADDR", HOST)
        monkeypatch.setenv("MASTER_PORT", str(port))
        return f"tcp://{HOST}:{port}" if request.param == "tcp" else "env://"

    return at


def test_taken_port_is_named(url: Callable[[int], str]) -> None:
    """Rank 0 does not wait for a port that another service has, and says which."""
    with socket.create_server((HOST, 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(DistNetworkError, match=f"port {port} .*in use"):
            handlers.rendezvous(url(port), rank=0, world_size=2, timeout=3600)


@pytest.mark.parametrize(
    "says", [None, b"HTTP/1.1 400 Bad Request\r\n\r\n", b""], ids=["silent", "http", "closes"]
)
def test_wrong_service_is_named(
    url: Callable[[int], str], monkeypatch: pytest.MonkeyPatch, says: bytes | None
) -> None:
    """The other ranks do not wait for a port that some other service has, be it silent (None),
    talkative, or one that hangs up."""
    monkeypatch.setattr(auth, "HANDSHAKE_TIMEOUT", 0.05)
    monkeypatch.setattr("cydist.stores.tcp._CLOSED_LIMIT", 0.05)
    held = []
    with socket.create_server((HOST, 0)) as other:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    sock, _ = other.accept()
                    held.append(sock)
                    if says is not None:
                        sock.sendall(says)
                        sock.close()

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        with pytest.raises(DistError, match="not a cydist store"):
            handlers.rendezvous(url(other.getsockname()[1]), rank=1, world_size=2, timeout=3600)
        other.shutdown(socket.SHUT_RDWR)
        thread.join(WAIT)
    for sock in held:
        sock.close()
