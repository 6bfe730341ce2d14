"""Objects as bytes, after something broken changed the bytes."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst
from mutation import mutated

from cydist.api import object_codec

pytestmark = pytest.mark.fuzz

DTYPES = (
    npst.boolean_dtypes()
    | npst.integer_dtypes(endianness="?")
    | npst.floating_dtypes(endianness="?")
    | npst.complex_number_dtypes(endianness="?")
    | npst.datetime64_dtypes(endianness="?")
    | npst.timedelta64_dtypes(endianness="?")
    | npst.unicode_string_dtypes(endianness="?", min_len=1)
    | npst.byte_string_dtypes(min_len=1)
)
arrays = npst.arrays(DTYPES, npst.array_shapes(min_dims=0, min_side=0, max_side=3))
keys = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary()
plain = st.recursive(
    keys | st.complex_numbers() | arrays | npst.arrays(DTYPES, (1,)).map(lambda a: a[0]),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(keys, inner)
        | st.frozensets(keys)
        | st.sets(keys)
    ),
    max_leaves=20,
)
# Parts that occur twice, too, before and after others.
tied = st.tuples(plain, plain).map(lambda two: [two, {"a": two[0], "b": [two[0], two]}, two[1]])
long = st.binary(min_size=object_codec.SHORT, max_size=2 * object_codec.SHORT)
long |= long.map(bytes.hex) | long.map(lambda data: int.from_bytes(data, "little"))
hashed = (long | st.tuples(long | keys, keys)).map(
    lambda key: [key, {key: 1}, {(key, (key,)), frozenset([key])}, {(key,): key}, key]
)
messages = (plain | tied | hashed).map(lambda value: object_codec.encode(value, allow_pickle=False))


@given(messages)
def test_whole(message: bytes) -> None:
    """What was encoded decodes to what encodes to the same bytes."""
    value = object_codec.decode(message, allow_pickle=False)
    assert len(object_codec.encode(value, allow_pickle=False)) == len(message)


@given(st.lists(st.tuples(st.booleans(), st.lists(st.integers(0), max_size=3)), max_size=10))
@example([(False, [-1] * 3)] * 10)
@example([(True, [-1]), (False, [-1, -1, -2])] * 5)
def test_shared(picked: list[tuple[bool, list[int]]]) -> None:
    """However often parts occur in others, in sets and in keys, each makes a message longer by
    what it has itself."""
    parts: list = [1, "a" * 100]
    for is_set, which in picked:
        chosen = [parts[number % len(parts)] for number in which]
        parts.append(frozenset(chosen) if is_set else tuple(chosen))
    message = object_codec.encode([{parts[-1]}, parts, {parts[-1]: 1}], allow_pickle=True)
    places = 10 + len(parts) + sum(len(which) for _, which in picked)
    assert len(message) < (1 + object_codec.COPIES) * (object_codec.SHORT * places + 100)
    assert object_codec.decode(message, allow_pickle=True)[1] == parts


def sized(tag: bytes, *sizes: int) -> bytes:
    """A message that begins with claims about its size."""
    return object_codec.TAGGED + tag + b"".join(size.to_bytes(8, "little") for size in sizes)


@settings(max_examples=2 * settings.default.max_examples)
@given(mutated(messages) | st.binary(max_size=100).map(lambda body: object_codec.TAGGED + body))
@example(sized(b"l", 1 << 60))
@example(sized(b"b", 1 << 63))
@example(sized(b"A\x03\x02<f8", 1 << 32, 1 << 32))
@example(sized(b"A\x03\x02<f8", 0, 1 << 60))
@example(sized(b"A\x0d\x01S999999999999", 0))
@example(object_codec.TAGGED + b"G\x03<U1\xff\xff\xff\xff")
@example(object_codec.TAGGED + b"G\x08<M8[1e9s]" + bytes(8))
@example(object_codec.TAGGED + b"A\x02\x00a3abc")
@example(sized(b"r", 0))
@example(sized(b"l", 1) + sized(b"r", 0)[1:])
@example(sized(b"l", 2) + b"B" + bytes(8) + sized(b"r", 0)[1:])
def test_changed(message: bytes) -> None:
    """A changed message raises CodecError, or TypeError where it turned into pickle, or is a plain
    value; and however large it says that it is, decoding it takes memory for what is there."""
    tracemalloc.start()
    try:
        value = object_codec.decode(message, allow_pickle=False)
        object_codec.encode(value, allow_pickle=False)
    except object_codec.CodecError:
        pass
    except TypeError:
        assert message[:1] == object_codec.PICKLED
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < 100 * len(message) + 50_000


@pytest.mark.parametrize(
    "name", ["f4,f4", "(2,3)f4", "object", "|V8", "float64", "i4", "<i3", "|S0", ""]
)
def test_only_our_own_dtypes(name: str) -> None:
    """Of numpy's many ways to spell a dtype a message may use the one that we write."""
    message = object_codec.TAGGED + b"A" + bytes([len(name), 1]) + name.encode() + bytes(8)
    with pytest.raises(object_codec.CodecError, match=r"dtype|of zero-size"):
        object_codec.decode(message, allow_pickle=False)


@given(mutated(messages))
def test_flat_arrays_of_bytes(message: bytes) -> None:
    """It makes no difference whether the bytes are in bytes or in an array, as received."""
    received = np.frombuffer(bytearray(message), np.uint8)

    def outcome(data: bytes | memoryview) -> str | list[str]:
        try:
            # The order of a set with a NaN in it is nobody's.
            return sorted(repr(object_codec.decode(data, allow_pickle=False)))
        except (object_codec.CodecError, TypeError) as error:
            return f"{type(error)}: {error}"

    assert outcome(received.data) == outcome(message)
