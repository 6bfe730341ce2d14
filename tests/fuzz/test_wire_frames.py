"""A peer that has proved itself, and then sends anything: what arrives is right, or it is lost."""

from __future__ import annotations

import ctypes
import random
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mutation import cut, mutated
from transport_ranks import status_of
from wire_peer import CREDIT, CTS, DATA, EAGER, FAREWELL, GOODBYE, RTS, WITHDRAW, Wire, frame

from cydist import _native

pytestmark = pytest.mark.fuzz

SIZES = st.sampled_from([0, 1, 95, 200, 4096, 65536, 65537, 70000])
TAGS = st.integers(0, 2)


@dataclass
class Story:
    """What a test has under way."""

    wire: Wire = field(default_factory=Wire)
    receives: list[tuple[np.ndarray, _native.Message]] = field(default_factory=list)
    sends: list[tuple[np.ndarray, _native.Message]] = field(default_factory=list)
    offered: dict[int, bytes] = field(default_factory=dict)
    contiguous: bool = True  # the bytes of every message were said in one go


def pattern(seed: int, nbytes: int) -> bytes:
    """Bytes that no other message has."""
    return random.Random(seed).randbytes(nbytes)


def step(story: Story, number: int, data: st.DataObject) -> None:
    """Do one more thing, here or at the peer."""
    wire, tag, nbytes = story.wire, data.draw(TAGS), data.draw(SIZES)
    said = b""
    match data.draw(st.sampled_from(DEEDS)):
        case "receive":
            memory = np.zeros(nbytes, np.uint8)
            source = data.draw(st.sampled_from([1, -1]))
            story.receives.append((memory, wire.group.irecv(memory, source, tag)))
        case "send":
            memory = np.full(nbytes, number % 256, np.uint8)
            story.sends.append((memory, wire.group.isend(memory, 1, tag)))
        case "cancel receive" if story.receives:
            data.draw(st.sampled_from(story.receives))[1].cancel()
        case "cancel send" if story.sends:
            data.draw(st.sampled_from(story.sends))[1].cancel()
        case "eager":
            said = frame(EAGER, tag=tag, nbytes=nbytes) + pattern(number, nbytes)
        case "offer":
            story.offered[number] = pattern(number, nbytes)
            said = frame(RTS, tag=tag, nbytes=nbytes, id=number)
        case "data" if wire.answers:
            id, other = wire.answers.pop()
            body = story.offered.get(id, b"")
            said = frame(DATA, nbytes=len(body), other=other) + body
        case "half the data" if wire.answers:
            id, other = wire.answers[-1]
            body = story.offered.get(id, b"")[:50]
            story.contiguous = False
            said = frame(DATA, nbytes=len(body), other=other) + body
        case "answer" if wire.offers:
            flags = data.draw(st.integers(0, 3))
            said = frame(CTS, id=wire.offers.pop(), other=number, flags=flags)
        case "withdraw":
            said = frame(WITHDRAW, id=data.draw(st.integers(0, number)))
        case "credit":
            said = frame(CREDIT, released=data.draw(st.integers(0, 1000)))
        case "any header":
            said = frame(
                data.draw(st.integers(0, 9)), tag=tag, nbytes=nbytes, id=number % 3,
                follow=data.draw(st.sampled_from([0, nbytes, 1 << 60, (1 << 64) - 1])),
                other=data.draw(st.integers(0, 3)), context=data.draw(st.integers(0, 2)),
            )  # fmt: skip
        case "farewell":
            said = frame(FAREWELL, id=data.draw(st.integers(0, 2)))
        case "goodbye":
            said = frame(GOODBYE)
        case "noise":
            said = data.draw(st.binary(max_size=300))
    if said and data.draw(st.integers(0, 9)) == 0:
        said = data.draw(mutated(st.just(said)))
    wire.say(data.draw(cut(said)))


# The likelier, the longer a story goes on.
DEEDS = [
    "receive", "receive", "receive", "eager", "eager", "eager", "offer", "offer", "data", "data",
    "data", "half the data", "send", "answer", "cancel receive", "cancel send", "withdraw",
    "credit", "any header", "farewell", "goodbye", "noise",
]  # fmt: skip


@settings(max_examples=2 * settings.default.max_examples)
@given(st.data())
def test_stories(data: st.DataObject) -> None:
    """However valid, broken and random frames and calls of ours follow each other, a receive that
    ends well holds bytes that were sent, everything ends with the peer, and nothing is left."""
    story = Story()
    with story.wire.peer:
        for number in range(data.draw(st.integers(1, 20))):
            step(story, number, data)
        story.wire.close()
    for memory, message in story.receives:
        assert message.over
        if status_of(message) == "ok" and story.contiguous:
            assert memory.tobytes() in story.wire.said
        else:
            assert status_of(message) in ("ok", "mismatch", "peer_lost", "aborted", "closed")
    for _, message in story.sends:
        assert message.over
        assert status_of(message) in ("ok", "peer_lost", "aborted", "closed")


@given(sizes=st.lists(st.sampled_from([0, 1, 200, 65536]), min_size=1, max_size=4), data=st.data())
def test_tags_that_are_wrong(sizes: list[int], data: st.DataObject) -> None:
    """Frames that were changed after they were sealed end the connection, but for the elements of
    arrays: a receive that ends well has its own header, in its turn."""
    wire = Wire()
    said = [
        frame(EAGER, tag=tag, nbytes=nbytes) + bytes(nbytes) for tag, nbytes in enumerate(sizes)
    ]
    with wire.peer:
        memory = [np.ones(nbytes, np.uint8) for nbytes in sizes]
        receives = [wire.group.irecv(array, 1, tag) for tag, array in enumerate(memory)]
        for piece in data.draw(cut(data.draw(mutated(st.just(b"".join(map(wire.seal, said))))))):
            wire.put(piece)
        wire.go_on()
        wire.close()
    ended = [status_of(receive) for receive in receives]
    assert all(receive.over for receive in receives)
    assert set(ended) <= {"ok", "peer_lost"}
    assert ended == sorted(ended)  # nothing arrives after a frame that did not


class Allocated(ctypes.Structure):
    """glibc's mallinfo2."""

    _fields_ = tuple((f"field{i}", ctypes.c_size_t) for i in range(10))


def allocated() -> int:
    """Bytes that malloc has given out, except large blocks of their own."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = Allocated
    return int(mallinfo2().field7)


def test_broken_streams_leave_no_memory() -> None:
    """A hundred peers that break off in the middle of messages take no memory with them."""

    def break_off(number: int) -> None:
        wire = Wire()
        memory = [np.zeros(n, np.uint8) for n in (60_000, 70_000)]
        receives = [wire.group.irecv(array, 1, tag) for tag, array in enumerate(memory)]
        wire.say([frame(RTS, tag=1, nbytes=70_000, id=1), frame(RTS, tag=7, nbytes=8, id=2)])
        wire.say([frame(EAGER, tag=5, nbytes=60_000) + bytes(60_000)])
        tag = 6 if number % 2 else 0
        wire.say([frame(EAGER, tag=tag, nbytes=60_000) + bytes(30_000)])
        wire.close()
        assert {status_of(receive) for receive in receives} == {"peer_lost"}

    for number in range(10):
        break_off(number)
    before = allocated()
    for number in range(100):
        break_off(number)
    assert allocated() - before < 100_000
