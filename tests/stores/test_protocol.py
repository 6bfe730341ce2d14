"""The layout of requests and replies, and the table that they act on."""

from __future__ import annotations

import contextlib

from hypothesis import given
from hypothesis import strategies as st

from cydist.errors import DistStoreError
from cydist.stores.kv_table import KeyValueTable
from cydist.stores.protocol import (
    BLOCKING,
    Op,
    Reply,
    ReplyStatus,
    StoreRequest,
    decode_reply,
    decode_request,
    encode_reply,
    encode_request,
)

requests = st.builds(
    lambda op, keys, values, block, timeout: StoreRequest(
        op, tuple(keys), tuple(values), block and op in BLOCKING, timeout
    ),
    st.sampled_from(Op),
    st.lists(st.binary(max_size=20), max_size=5),
    st.lists(st.binary(max_size=50), max_size=5),
    st.booleans(),
    st.floats(0, 1e9),
)
replies = st.builds(
    lambda status, items: Reply(status, tuple(items)),
    st.sampled_from(ReplyStatus),
    st.lists(st.binary(max_size=50), max_size=5),
)


@given(requests)
def test_requests_survive_the_wire(request: StoreRequest) -> None:
    """decode(encode(request)) is the request."""
    assert decode_request(encode_request(request)) == request


@given(replies)
def test_replies_survive_the_wire(reply: Reply) -> None:
    """decode(encode(reply)) is the reply."""
    assert decode_reply(encode_reply(reply)) == reply


@given(st.binary(max_size=100))
def test_garbage_is_no_request(data: bytes) -> None:
    """Any bytes are either refused with a typed error or are exactly one request."""
    try:
        request = decode_request(data)
    except DistStoreError:
        return
    assert encode_request(request) == data


@given(requests, st.data())
def test_changed_requests_never_crash_a_table(request: StoreRequest, data: st.DataObject) -> None:
    """A mutated request is refused or runs: a table raises nothing but DistStoreError."""
    body = bytearray(encode_request(request))
    for _ in range(data.draw(st.integers(1, 3))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    table = KeyValueTable(10_000)
    with contextlib.suppress(DistStoreError):
        changed = decode_request(bytes(body))
        if table.awaits(changed) is None:
            table.execute(changed)
    assert 0 <= table.used_bytes <= 10_000


@given(st.lists(requests, max_size=30))
def test_account_of_memory_adds_up(sequence: list[StoreRequest]) -> None:
    """After any requests, deleting and popping everything brings the account back to zero."""
    table = KeyValueTable()
    keys = {key for request in sequence for key in request.keys}
    for request in sequence:
        with contextlib.suppress(DistStoreError):
            if table.awaits(request) is None:
                table.execute(request)
    for key in keys:
        table.execute(StoreRequest(Op.DELETE, (key,)))
        while table.execute(StoreRequest(Op.QUEUE_LEN, (key,))) != (b"0",):
            table.execute(StoreRequest(Op.QUEUE_POP, (key,)))
    assert table.used_bytes == 0
