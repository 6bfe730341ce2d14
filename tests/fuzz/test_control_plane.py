"""Notices of a member that is broken: a group fails for a reason that exists, or goes on."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mutation import mutated
from transport_ranks import soon
from wire_peer import CONTROL_MESSAGE, CONTROL_TAG, EAGER, FINGERPRINT, HEADER, MAGIC, Wire, frame

from cydist import _native
from cydist.errors import DistError, from_call_error

pytestmark = pytest.mark.fuzz

PROBE, FAILED = 1, 2
RANKS = [4, 7]

small = st.sampled_from([-(2**31), -8, -7, -1, 0, 1, 2, 3, 99, 2**31 - 1])
bytes8 = st.integers(0, 2**64 - 1)
calls = st.builds(
    FINGERPRINT.pack,
    st.integers(0, 20) | bytes8,
    bytes8,
    *[st.integers(0, 255)] * 4,
    small,
    *[st.integers(0, 2**32 - 1)] * 2,
    bytes8,
)
messages = st.builds(
    CONTROL_MESSAGE.pack,
    st.sampled_from([PROBE, FAILED, FAILED, FAILED, 0, 3]),
    st.integers(-8, 2),
    *[st.integers(-2, 2) | small] * 2,
    small,
    small,
    bytes8,
    bytes8,
    calls,
    calls,
    st.just(b"") | st.binary(max_size=64),
)


def told(message: bytes) -> bytes:
    """The frame that carries it."""
    head = HEADER.pack(
        MAGIC, EAGER, 0, 0, 1, CONTROL_TAG, len(message), 0, 0, 0, bytes(FINGERPRINT.size), 0
    )
    return head + message


@given(st.lists(messages | mutated(messages) | st.binary(max_size=200), max_size=12))
def test_control_messages(said: list[bytes]) -> None:
    """After any notices a call ends with a typed error about members of the group, and a message
    that is on its way arrives or ends with such an error."""
    wire = Wire()
    with wire.peer:
        memory = np.zeros(3, np.uint8)
        receive = wire.group.irecv(memory, 1, 5)
        wire.say([told(message) for message in said])
        wire.say([frame(EAGER, tag=5, nbytes=3) + b"abc"])
        assert receive.wait(soon())
        x = _native.asarray(np.ones(4))
        failures = []
        for end in (
            receive.check,
            lambda: wire.group.run(
                "broadcast", [x], [x], algorithm=b"tree", deadline_ns=soon(0.001), seq=3, root=1,
                count=4,
            ),
        ):  # fmt: skip
            try:
                end()
            except _native.CallError as failure:
                failures.append(from_call_error(failure, "broadcast", "g", RANKS, 3))
        for error in failures:
            assert isinstance(error, DistError)
            assert set(error.ranks) <= set(RANKS)
            assert "status" not in str(error)
        if len(failures) == 1:
            assert memory.tobytes() == b"abc"
        wire.close()


@pytest.mark.parametrize("size", [0, CONTROL_MESSAGE.size - 1, CONTROL_MESSAGE.size + 1, 60_000])
def test_notice_of_another_size(size: int) -> None:
    """A notice of a size that no notice has is dropped, and the next one is heard."""
    wire = Wire()
    with wire.peer:
        wire.say([told(bytes(size))])
        abort = CONTROL_MESSAGE.pack(FAILED, -6, 1, -1, -1, 0, 0, 0, bytes(40), bytes(40), b"")
        wire.say([told(abort)])
        receive = wire.group.irecv(np.zeros(1), 1, 5)
        receive.wait(soon())
        with pytest.raises(_native.CallError) as caught:
            receive.check()
        assert (caught.value.status, caught.value.teller) == ("aborted", 1)
        wire.close()
