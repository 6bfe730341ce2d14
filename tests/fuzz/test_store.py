"""Whatever reaches a store, its clients, or its file: typed errors, bounded memory, no harm."""

from __future__ import annotations

import contextlib
import os
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from handshakes import shaken_hands
from hypothesis import given, settings
from hypothesis import strategies as st
from mutation import cut, mutated

from cydist.errors import AuthenticationError, DistStoreError
from cydist.net import auth
from cydist.net.records import HEAD_BYTES, Records
from cydist.stores import FileStore, TCPStore, tcp
from cydist.stores.file import log_entry
from cydist.stores.kv_table import KeyValueTable
from cydist.stores.protocol import (
    BLOCKING,
    INTERNAL,
    MAX_FRAME_BYTES,
    Op,
    Reply,
    ReplyStatus,
    StoreRequest,
    decode_reply,
    decode_request,
    encode_reply,
    encode_request,
)
from cydist.waiting import LONGEST_TIMEOUT

pytestmark = pytest.mark.fuzz

SECRET = bytes(range(32))
WAIT = 20

keys = st.sampled_from([b"a", b"b", b"\x80", b"", INTERNAL + b"opened", INTERNAL + b"closed"])
values = st.sampled_from([b"", b"1", b"-7", b"x", b"9223372036854775807"]) | st.binary(max_size=40)
requests = st.builds(
    lambda op, keys, values, block: StoreRequest(
        op, tuple(keys), tuple(values), block and op in BLOCKING, 0.0
    ),
    st.sampled_from(Op),
    st.lists(keys, max_size=3),
    st.lists(values, max_size=3),
    st.booleans(),
)
sensible = st.builds(StoreRequest, st.just(Op.ADD), st.tuples(keys), st.just((b"1",))) | st.builds(
    StoreRequest,
    st.sampled_from([Op.SET, Op.APPEND, Op.QUEUE_PUSH]),
    st.tuples(keys),
    st.tuples(values),
)
frames = requests.map(encode_request)
TIMEOUT, TIMEOUT_AT = struct.Struct("<d"), 10
replies = st.builds(Reply, st.sampled_from(ReplyStatus), st.lists(values, max_size=4).map(tuple))


@given(mutated(frames))
def test_requests(frame: bytes) -> None:
    """A changed request is refused, or means exactly what its bytes say; a table survives it."""
    table = KeyValueTable(1000, 100)
    try:
        request = decode_request(frame)
        (asked,) = TIMEOUT.unpack_from(frame, TIMEOUT_AT)
        assert request.timeout == min(asked, LONGEST_TIMEOUT)
        assert encode_request(request._replace(timeout=asked)) == frame
        if table.awaits(request) is None:
            table.execute(request)
    except DistStoreError:
        pass
    assert 0 <= table.used_bytes <= 1000


@given(mutated(replies.map(encode_reply)))
def test_replies(frame: bytes) -> None:
    """A changed reply is refused, or means exactly what its bytes say."""
    with contextlib.suppress(DistStoreError):
        reply = decode_reply(frame)
        assert encode_reply(reply) == frame


# Conversations


@pytest.fixture(scope="module")
def master() -> Iterator[TCPStore]:
    auth.forget_secret()
    auth.set_secret(SECRET)
    with contextlib.closing(TCPStore("127.0.0.1", 0, None, True, WAIT)) as store:
        yield store
    auth.forget_secret()


@settings(max_examples=settings.default.max_examples // 2)
@given(bodies=st.lists(frames | mutated(frames), max_size=3), damaged=st.booleans(), data=st.data())
def test_server(master: TCPStore, bodies: list[bytes], damaged: bool, data: st.DataObject) -> None:
    """A member that says anything, in its own records or in damaged ones, gets whole replies, or
    its connection closed; others go on."""
    with socket.create_connection(("127.0.0.1", master.port), WAIT) as sock:
        shake = auth.authenticate_client(sock, channel=b"store", job="", secret=SECRET)
        records = Records(shake, MAX_FRAME_BYTES)
        said = b"".join(map(records.seal, bodies))
        said = data.draw(mutated(st.just(said))) if damaged else said
        heard = b""
        with contextlib.suppress(ConnectionError):
            for piece in data.draw(cut(said)):
                sock.sendall(piece)
            with contextlib.suppress(OSError):  # the server may have hung up
                sock.shutdown(socket.SHUT_WR)
            while part := sock.recv(65536):
                heard += part
    while heard:
        size = HEAD_BYTES + records.open_head(heard)
        decode_reply(records.open_body(heard[HEAD_BYTES:size]))
        heard = heard[size:]
    master.set("key", "v")
    assert master.get("key") == b"v"
    assert all(isinstance(key, str) for key in master.list_keys())


CALLS: dict[str, Callable[[TCPStore], Any]] = {
    "set": lambda store: store.set("k", "v"),
    "get": lambda store: store.get("k"),
    "add": lambda store: store.add("k", 1),
    "check": lambda store: store.check(["k"]),
    "wait": lambda store: store.wait(["k", "l"]),
    "delete": lambda store: store.delete_key("k"),
    "num_keys": lambda store: store.num_keys(),
    "compare_set": lambda store: store.compare_set("k", "a", "b"),
    "multi_get": lambda store: store.multi_get(["k", "l"]),
    "pop": lambda store: store.queue_pop("k"),
    "length": lambda store: store.queue_len("k"),
    "list": lambda store: store.list_keys(),
}


@settings(max_examples=2 * settings.default.max_examples)
@given(
    call=st.sampled_from(sorted(CALLS)),
    body=replies.map(encode_reply) | mutated(replies.map(encode_reply)) | st.binary(max_size=40),
    damaged=st.booleans(),
    data=st.data(),
)
def test_client(
    master: TCPStore, call: str, body: bytes, damaged: bool, data: st.DataObject
) -> None:
    """A client whose server answers anything, in its own record or in a damaged one, gets an answer
    of the right kind, DistStoreError or AuthenticationError."""
    server, client = shaken_hands()
    said = Records(server, MAX_FRAME_BYTES).seal(body)
    said = data.draw(mutated(st.just(said))) if damaged else said
    ours, theirs = socket.socketpair()
    theirs.sendall(said)
    theirs.shutdown(socket.SHUT_WR)
    for sock in master._pool._idle:
        sock.close()
    master._pool._idle[:] = [tcp._Connection(ours, client)]
    with theirs, contextlib.suppress(DistStoreError, AuthenticationError):
        result = CALLS[call](master)
        if call == "multi_get":
            assert len(result) == 2
    for sock in master._pool._idle:
        sock.close()
    master._pool._idle.clear()


# FileStore's log


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "store"


@given(
    log=st.lists(sensible | requests, max_size=4)
    .map(lambda log: b"cydist\x01\n" + b"".join(map(log_entry, log)))
    .flatmap(lambda log: st.just(log) | mutated(st.just(log))),
    users=st.sampled_from([-1, 1]),
)
def test_log(path: Path, log: bytes, users: int) -> None:
    """A FileStore's file that holds anything is used, or refused; closing never fails."""
    path.write_bytes(log)
    store = None
    with contextlib.suppress(DistStoreError):
        store = FileStore(str(path), users, timeout=0.01)
        store.set("key", "v")
        assert store.get("key") == b"v"
        store.add("n", 1)
        store.list_keys()
        path.write_bytes(log)
        store.num_keys()
    if store is not None:
        store.close()
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
