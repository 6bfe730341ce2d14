"""Whatever arrives on an encrypted connection: it is what was sent, or the connection ends."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import pytest
from handshakes import KEY, SECRET, ciphers, record_pair, shake_hands
from hypothesis import given
from hypothesis import strategies as st
from mutation import cut, mutated
from transport_ranks import status_of
from wire_peer import EAGER, FrameSealer, Wire, frame

from cydist import _native
from cydist.errors import AuthenticationError, DistError
from cydist.net import auth
from cydist.net.encryption import check_encryption

pytestmark = pytest.mark.fuzz


@pytest.fixture(autouse=True, scope="module")
def encrypted() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CYDIST_ENCRYPT", "1")
        check_encryption()
        yield


@given(
    st.binary(max_size=600)
    | mutated(st.builds(lambda: _native.TlsHandshake(KEY, False).receive(b"")))
)
def test_tls_is_told_anything(said: bytes) -> None:
    """A server of TLS answers a client's first message, or raises ValueError."""
    server = _native.TlsHandshake(KEY, True)
    with contextlib.suppress(ValueError):
        server.receive(said)
    assert server.cipher is None


@given(st.data())
def test_changed_on_the_way(data: st.DataObject) -> None:
    """Whichever of the five messages of cydist's handshake is changed, the sides do not agree, or
    the change is one that TLS ignores."""
    server = auth.ServerHandshake(SECRET, b"peer", "j")
    client = auth.ClientHandshake(SECRET, b"peer", "j")
    number, counted = data.draw(st.integers(0, 4)), 0

    def change(message: bytes) -> bytes:
        nonlocal counted
        counted += bool(message)
        if not message or counted != number + 1:
            return message
        changed = data.draw(mutated(st.just(message)))
        return (changed + bytes(len(message)))[: len(message)]

    # Both sides may also wait, for the rest of a longer record: AssertionError of `shake_hands`.
    with contextlib.suppress(DistError, OSError, AssertionError):
        shake_hands(server, client, change)
    if server.done and client.done:
        assert server.keys(b"x") == client.keys(b"x")[::-1]


@given(
    sizes=st.lists(st.sampled_from([1, 5, 200, 65536, 70_000]), min_size=1, max_size=4),
    damaged=st.booleans(),
    data=st.data(),
)
def test_sealed_records(sizes: list[int], damaged: bool, data: st.DataObject) -> None:
    """What comes out of damaged records is a beginning of what was sealed."""
    there, here = ciphers()
    sent = b"".join(bytes([number + 1]) * nbytes for number, nbytes in enumerate(sizes))
    said = here.seal(sent)
    opened = b""
    with contextlib.suppress(ValueError):
        for piece in data.draw(cut(data.draw(mutated(st.just(said))) if damaged else said)):
            opened += there.open(piece)
    assert sent.startswith(opened)
    assert damaged or opened == sent


@given(
    bodies=st.lists(st.binary(max_size=200), min_size=1, max_size=3),
    damaged=st.booleans(),
    data=st.data(),
)
def test_records(bodies: list[bytes], damaged: bool, data: st.DataObject) -> None:
    """What a store's server takes from damaged sealed records is a beginning of what was sent."""
    server, client = record_pair()
    said = b"".join(map(client.seal, bodies))
    heard, taken = b"", []
    with contextlib.suppress(AuthenticationError):
        for piece in data.draw(cut(data.draw(mutated(st.just(said))) if damaged else said)):
            heard += server.decrypt(piece)
            while len(heard) >= 12 and len(heard) >= (size := 12 + server.open_head(heard[:12])):
                taken.append(server.open_body(heard[12:size]))
                heard = heard[size:]
    assert taken == bodies[: len(taken)]
    assert damaged or taken == bodies


@given(
    sizes=st.lists(st.sampled_from([0, 1, 200, 20_000]), min_size=1, max_size=4),
    damaged=st.sampled_from(["nothing", "frames", "tags", "records"]),
    data=st.data(),
)
def test_streams(sizes: list[int], damaged: str, data: st.DataObject) -> None:
    """A link opens records until the first that was changed, and then ends the connection. Frames
    that were changed before they were sealed, with valid tags or with others, are behind that."""
    server, client = ciphers()
    bodies = [bytes([number + 1]) * nbytes for number, nbytes in enumerate(sizes)]
    said = b"".join(frame(EAGER, nbytes=len(body)) + body for body in bodies)

    def changed(whole: bytes, where: str) -> bytes:
        return data.draw(mutated(st.just(whole))) if where == damaged else whole

    sealed = changed(FrameSealer()(changed(said, "frames")), "tags")
    wire = Wire(server)
    with wire.peer:
        memory = [np.zeros(nbytes, np.uint8) for nbytes in sizes]
        receives = [wire.group.irecv(array, 1, 0) for array in memory]
        for piece in data.draw(cut(changed(client.seal(sealed), "records"))):
            wire.put(piece)
        wire.go_on()
        wire.close()
    assert all(receive.over for receive in receives)
    ended = [status_of(receive) for receive in receives]
    assert set(ended) <= {"ok", "mismatch", "peer_lost", "aborted", "closed"}
    if damaged == "nothing":
        assert set(ended) == {"ok"}
    if damaged in ("nothing", "records"):
        arrived = [array.tobytes() for array in memory]
        assert [a for a, end in zip(arrived, ended, strict=True) if end == "ok"] == bodies[
            : ended.count("ok")
        ]
