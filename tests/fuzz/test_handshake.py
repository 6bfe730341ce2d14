"""Whatever stands in place of the other side of a handshake, it ends, and nobody gets in."""

from __future__ import annotations

import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mutation import mutated

from cydist.errors import AuthenticationError, DistNetworkError
from cydist.net import auth

pytestmark = pytest.mark.fuzz

SECRET = bytes(range(32))
MAGIC = auth.ServerHandshake(SECRET, b"peer", "j").greeting[:8]

greetings = (
    st.binary(max_size=120)
    | st.binary(max_size=120).map(lambda rest: MAGIC + rest)
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
def test_client_among_unauthenticated_clients(said: bytes) -> None:
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
            raise AssertionError("a outsider was taken for a server")


@given(st.binary(max_size=300) | st.binary(max_size=300).map(lambda rest: MAGIC + rest))
def test_server_among_unauthenticated_clients(said: bytes) -> None:
    """A server that is told anything at all raises what it documents, and says at most 109
    bytes."""
    ours, theirs = spoken(said)
    with ours, theirs:
        try:
            auth.authenticate_server(ours, channel=b"peer", job="j", secret=SECRET)
        except (AuthenticationError, DistNetworkError):
            pass
        else:
            raise AssertionError("a outsider was taken for a client")
        ours.shutdown(socket.SHUT_WR)
        heard = theirs.recv(300, socket.MSG_WAITALL)
        assert len(heard) <= 109


endpoints = st.binary(min_size=36, max_size=36) | st.just(auth.NO_ENDPOINTS)


@given(seen=endpoints, told=endpoints, settings=st.sampled_from(range(8)) | st.integers(0, 255))
def test_client_is_told_of_any_endpoints_and_settings(
    seen: bytes, told: bytes, settings: int
) -> None:
    """A client answers a greeting only if it says what the client sees, and no setting else."""
    client = auth.ClientHandshake(SECRET, b"peer", "j", endpoints=seen)
    greeting = MAGIC + bytes(32) + bytes([settings]) + told
    try:
        client.receive(greeting)
    except AuthenticationError:
        assert (told, settings) != (seen, 0)
        assert len(client.refusal) == 197
    except DistNetworkError:
        assert settings > 7
    else:
        assert (told, settings) == (seen, 0)


@given(seen=endpoints, told=endpoints)
def test_server_is_told_of_any_endpoints(seen: bytes, told: bytes) -> None:
    """A server lets a member in only if both see the same endpoints."""
    server = auth.ServerHandshake(SECRET, b"peer", "j", endpoints=seen)
    client = auth.ClientHandshake(SECRET, b"peer", "j", endpoints=told)
    try:
        client.receive(server.receive(client.receive(server.greeting)))
    except AuthenticationError:
        assert seen != told
        with pytest.raises(AuthenticationError):
            server.receive(client.refusal)
    assert server.done == client.done == (seen == told)


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
