"""Whatever stands in place of the other side of a handshake, it ends, and nobody gets in."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mutation import mutated

from cydist import auth
from cydist.errors import AuthenticationError, DistNetworkError

pytestmark = pytest.mark.fuzz

SECRET = bytes(range(32))
MAGIC = auth.ServerHandshake(SECRET, b"peer", "j").greeting[:8]

greetings = (
    st.binary(max_size=80)
    | st.binary(max_size=80).map(lambda rest: MAGIC + rest)
    | st.just(auth.FULL)
    | mutated(st.just(auth.FULL))
)


def spoken(said: bytes) -> tuple[socket.socket, socket.socket]:
    """A socket whose other end has said all that it will ever say."""
    ours, theirs = socket.socketpair()
    theirs.sendall(said)
    theirs.shutdown(socket.SHUT_WR)
    return ours, theirs


@given(greetings)
def test_client_among_strangers(said: bytes) -> None:
    """A client that is told anything at all raises what it documents."""
    ours, theirs = spoken(said)
    with ours, theirs:
        try:
            auth.authenticate_client(ours, channel=b"peer", job="j", secret=SECRET)
        except (AuthenticationError, DistNetworkError):
            pass
        except OSError as error:
            assert error.strerror is not None  # noqa: PT017
            assert said[: len(auth.FULL)] == auth.FULL
        else:
            raise AssertionError("a stranger was taken for a server")


@given(st.binary(max_size=200) | st.binary(max_size=200).map(lambda rest: MAGIC + rest))
def test_server_among_strangers(said: bytes) -> None:
    """A server that is told anything at all raises what it documents, and says at most 72 bytes."""
    ours, theirs = spoken(said)
    with ours, theirs:
        try:
            auth.authenticate_server(ours, channel=b"peer", job="j", secret=SECRET)
        except (AuthenticationError, DistNetworkError):
            pass
        else:
            raise AssertionError("a stranger was taken for a client")
        ours.shutdown(socket.SHUT_WR)
        heard = theirs.recv(200, socket.MSG_WAITALL)
        assert len(heard) <= 72


@given(
    claim=st.binary(max_size=auth.MAX_CLAIM_BYTES),
    where=st.sampled_from(["greeting", "answer", "proof"]),
    data=st.data(),
)
def test_changed_on_the_way(claim: bytes, where: str, data: st.DataObject) -> None:
    """Whichever message is changed, one side at least refuses with a typed error."""
    server = auth.ServerHandshake(SECRET, b"peer", "j")
    client = auth.ClientHandshake(SECRET, b"peer", "j", claim)

    def carried(name: str, message: bytes) -> bytes:
        if name != where:
            return message
        changed = data.draw(mutated(st.just(message)))
        return (changed + bytes(len(message)))[: len(message)]

    seen = {}
    try:
        seen["greeting"] = carried("greeting", server.greeting)
        answer = client.receive(seen["greeting"])
        seen["answer"] = carried("answer", answer)
        proof = server.receive(seen["answer"])
        seen["proof"] = carried("proof", proof)
        client.receive(seen["proof"])
    except (AuthenticationError, DistNetworkError):
        assert not (server.done and client.done)
        return
    except OSError:
        assert seen["greeting"] == auth.FULL
        return
    assert (seen["greeting"], seen["answer"], seen["proof"]) == (server.greeting, answer, proof)
    assert server.claim == claim
