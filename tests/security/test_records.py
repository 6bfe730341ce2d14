"""A third party between a store and its users that lacks only the secret changes no record."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import closing

import pytest
from handshakes import SECRET, record_pair, shaken_hands
from hypothesis import given
from hypothesis import strategies as st
from mutation import mutated
from tcp_proxy import NetworkFaults, Proxy

from cydist.errors import AuthenticationError, PeerFailedError
from cydist.net.auth import ClientHandshake, ServerHandshake
from cydist.net.records import HEAD_BYTES, OVERHEAD_BYTES, Records
from cydist.stores import MembershipStore, TCPStore

HOST, WAIT = "127.0.0.1", 20
# What a client is told whose request was changed on its way.
UNLIKE = r"set: the store at 127\.0\.0\.1:\d+ got another request .*: record \d+ is not the one"


def opened(records: Records, data: bytes) -> bytes:
    """The body of the one record in `data`; what is not all there is refused too."""
    if len(data) < HEAD_BYTES or len(data) != HEAD_BYTES + records.open_head(data):
        raise AuthenticationError("cut off")
    return records.open_body(data[HEAD_BYTES:])


def test_records_arrive() -> None:
    """In both directions, in their order, of any length."""
    server, client = record_pair()
    for body in (b"", b"x", bytes(100_000)):
        assert opened(client, server.seal(body)) == body
        assert opened(server, client.seal(body)) == body
    assert len(server.seal(b"")) == OVERHEAD_BYTES


ATTACKS: dict[str, Callable[[list[bytes], list[bytes]], bytes]] = {
    "dropped": lambda sent, back: sent[2],
    "repeated": lambda sent, back: sent[0],
    "reflected": lambda sent, back: back[1],
    "head of another": lambda sent, back: sent[0][:HEAD_BYTES] + sent[1][HEAD_BYTES:],
    "body of another": lambda sent, back: sent[1][:HEAD_BYTES] + sent[0][HEAD_BYTES:],
    "of another connection": lambda sent, back: [record_pair()[0].seal(b"0"), b""][0],
}


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=list(ATTACKS))
def test_only_the_next_record_is_opened(
    attack: Callable[[list[bytes], list[bytes]], bytes],
) -> None:
    """After the first record, which has the same length, no other one is taken for the second."""
    server, client = record_pair()
    sent = [server.seal(b"%d" % n) for n in range(3)]
    back = [client.seal(b"%d" % n) for n in range(3)]
    assert opened(client, sent[0]) == b"0"
    with pytest.raises(AuthenticationError, match="tampered with: record 1"):
        opened(client, attack(sent, back))


@given(st.binary(max_size=60).flatmap(lambda body: st.tuples(st.just(body), st.data())))
def test_a_changed_record_is_refused(drawn: tuple[bytes, st.DataObject]) -> None:
    """Whatever changes it."""
    body, data = drawn
    server, client = record_pair()
    whole = server.seal(body)
    changed = data.draw(mutated(st.just(whole)))
    if changed == whole:
        assert opened(client, changed) == body
    else:
        with pytest.raises(AuthenticationError):
            opened(client, changed)


def test_a_longer_record_than_allowed_is_refused() -> None:
    """Before its bytes are read, though its sender knows the secret."""
    server, client = record_pair(most=10)
    with pytest.raises(AuthenticationError, match="a record of 11 bytes"):
        client.open_head(server.seal(bytes(11)))


# Keys


def test_keys_differ_by_direction_purpose_and_connection() -> None:
    """What one side sends with, the other receives with; nothing else is the same."""
    keys = set()
    for _ in range(2):
        server, client = shaken_hands()
        for purpose in (b"frames", b"records"):
            assert server.keys(purpose) == client.keys(purpose)[::-1]
            keys |= set(server.keys(purpose))
    assert len(keys) == 2 * 2 * 2
    assert {len(key) for key in keys} == {32}


def test_there_are_no_keys_before_the_handshake_is_done() -> None:
    """On either side."""
    for shake in (ServerHandshake(SECRET, b"store", ""), ClientHandshake(SECRET, b"store", "")):
        with pytest.raises(ValueError, match="no keys before its handshake"):
            shake.keys(b"frames")


def test_keys_hang_on_the_job_and_the_channel() -> None:
    """With the same nonces and secret, other jobs and channels have other keys."""
    made = set()
    nonce = bytes(32)
    for channel, job in ((b"store", "a"), (b"store", "b"), (b"peer", "a")):
        shake = ClientHandshake(SECRET, channel, job)
        shake._begin_session(nonce + channel)
        shake.done = True
        made.add(shake.keys(b"frames"))
    assert len(made) == 3


# A relay between a store and its client, where addresses may be translated


class ChangingRelay(Proxy):
    """Replaces bytes in what the server says after the handshake."""

    def __init__(self, port: int, old: bytes, new: bytes) -> None:
        self._change = (old, new)
        super().__init__((HOST, port), NetworkFaults())

    def _write(self, sock: object, data: bytes) -> None:  # type: ignore[override]
        super()._write(sock, data.replace(*self._change))  # type: ignore[arg-type]


@pytest.fixture
def nat(monkeypatch: pytest.MonkeyPatch, secret: bytes) -> None:
    """Where relays cannot be told from networks that translate addresses."""
    monkeypatch.setenv("CYDIST_NAT", "1")


@pytest.mark.usefixtures("nat")
@pytest.mark.parametrize("value", [b"value", b"a longer value"], ids=["short", "longer"])
def test_a_relay_cannot_change_what_a_store_holds(value: bytes) -> None:
    """Neither on its way to the store nor back; the store serves its other users."""
    with (
        closing(TCPStore(HOST, 0, None, True, WAIT)) as master,
        closing(ChangingRelay(master.port, b"value", b"other")) as between,
        closing(TCPStore(HOST, between.port, timeout=WAIT)) as store,
    ):
        with pytest.raises(AuthenticationError, match=UNLIKE):
            store.set("key", value)
        assert not master.check(["key"])
        master.set("key", value)
        with pytest.raises(AuthenticationError, match="tampered with"):
            store.get("key")
        assert master.get("key") == value


@pytest.mark.usefixtures("nat")
def test_a_rank_whose_request_was_changed_is_missed() -> None:
    """It gives up, and closes its store in order; those who wait for it learn of it all the same,
    by its other connection, which carries its will."""
    with (
        closing(TCPStore(HOST, 0, None, True, WAIT)) as master,
        closing(ChangingRelay(master.port, b"value", b"other")) as between,
    ):
        store = TCPStore(HOST, between.port, timeout=WAIT)
        MembershipStore("p", store, [0, 1]).join(1)
        with pytest.raises(AuthenticationError, match=UNLIKE):
            store.set("key", b"value")
        store.close()
        with pytest.raises(PeerFailedError, match="rank 1"):
            MembershipStore("p", master, [0, 1]).wait(["never"], WAIT)


@pytest.mark.usefixtures("nat")
def test_a_store_survives_records_that_were_changed() -> None:
    """A hundred connections whose requests are changed are closed, and no thread of the server
    prints anything."""
    printed: list[object] = []
    hook, threading.excepthook = threading.excepthook, printed.append
    try:
        with (
            closing(TCPStore(HOST, 0, None, True, WAIT)) as master,
            closing(ChangingRelay(master.port, b"value", b"other")) as between,
            closing(TCPStore(HOST, between.port, timeout=WAIT)) as store,
        ):
            for _ in range(100):
                with pytest.raises(AuthenticationError, match=UNLIKE):
                    store.set("key", b"value")
            assert not master.check(["key"])
    finally:
        threading.excepthook = hook
    assert printed == []
