"""Objects as bytes: what goes in comes out, and nothing else can be made of bytes."""

import tracemalloc

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cydist.api import object_codec

keys = st.none() | st.booleans() | st.integers() | st.text() | st.binary()
plain = st.recursive(
    keys | st.floats(allow_nan=False) | st.complex_numbers(allow_nan=False),
    lambda inner: (
        st.lists(inner)
        | st.tuples(inner, inner)
        | st.dictionaries(keys, inner)
        | st.frozensets(keys)
        | st.sets(keys)
    ),
    max_leaves=20,
)


class Custom:
    """Something that only pickle can say."""

    def __eq__(self, other):
        return isinstance(other, Custom)

    __hash__ = None


@given(plain)
def test_plain_values_come_back_equal_and_of_the_same_type(value):
    """decode(encode(x)) is x, without pickle."""
    back = object_codec.decode(object_codec.encode(value, allow_pickle=False), allow_pickle=False)
    assert value == back
    assert type(value) is type(back)


@pytest.mark.parametrize("dtype", ["f4", "c16", "?", "i1", ">u8", "S3", "U2", "M8[ns]"])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3), (4, 0, 2)], ids=str)
def test_arrays_keep_dtype_shape_and_bits(dtype, shape):
    """An array comes back writable, with its dtype, shape and bytes."""
    array = np.zeros(shape, dtype)
    back = object_codec.decode(
        object_codec.encode([array], allow_pickle=False), allow_pickle=False
    )[0]
    assert (array.dtype, array.shape, array.tobytes()) == (back.dtype, back.shape, back.tobytes())
    assert back.flags.writeable


def test_numpy_scalars_keep_their_type():
    """A numpy scalar does not become a Python number."""
    back = object_codec.decode(
        object_codec.encode(np.float32(1.5), allow_pickle=False), allow_pickle=False
    )
    assert type(back) is np.float32
    assert np.float32(1.5) == back


@pytest.mark.parametrize(
    "value", [np.bytes_(b"ab\0\0"), np.str_("ab\0"), np.str_("\ud800")], ids=str
)
def test_numpy_strings_keep_every_character(value):
    """Also zeros at the end, which elements of arrays do not have."""
    back = object_codec.decode(object_codec.encode(value, allow_pickle=False), allow_pickle=False)
    assert value == back
    assert type(value) is type(back)


@pytest.mark.parametrize(
    "shared",
    [[1], {1: 2}, {1}, bytearray(b"a"), np.zeros(2), ([1],), ((1, 2), 3), frozenset({1})],
    ids=["list", "dict", "set", "bytearray", "array", "tuple", "tuple of tuples", "frozenset"],
)
def test_what_occurs_twice_comes_back_as_one(shared):
    """A change of one is seen in the other, as with pickle, and it needs none."""
    given = {"between": [0], "weight": shared, "tied": ["x", shared], "after": [1]}
    given["again"] = given["after"]
    back = object_codec.decode(object_codec.encode(given, allow_pickle=False), allow_pickle=False)
    assert back["weight"] is back["tied"][1]
    assert back["again"] is back["after"]
    assert repr(given) == repr(back)


@pytest.mark.parametrize("pair", [lambda x: [x, x], lambda x: (x, x)], ids=["lists", "tuples"])
def test_what_is_shared_is_sent_once(pair):
    """2**18 ways to one value are no 2**18 copies of it."""
    value = pair(0)
    for _ in range(18):
        value = pair(value)
    message = object_codec.encode(value, allow_pickle=False)
    assert len(message) < 1000
    back = object_codec.decode(message, allow_pickle=False)
    for _ in range(18):
        assert back[0] is back[1]
        back = back[0]
    assert pair(0) == back


@pytest.mark.parametrize(
    "shared",
    ["a" * 100, b"a" * 100, 1 << 800, np.str_("a" * 100), np.bytes_(b"a" * 100)],
    ids=["str", "bytes", "int", "numpy.str_", "numpy.bytes_"],
)
def test_long_scalars_are_sent_once(shared):
    """A message with 1000 of one text is no 1000 texts long; what comes back is one, too."""
    message = object_codec.encode([[shared, i] for i in range(1000)], allow_pickle=False)
    rest = object_codec.encode([[b"", i] for i in range(1000)], allow_pickle=False)
    assert len(message) < len(rest) + 500
    back = object_codec.decode(message, allow_pickle=False)
    assert [[shared, i] for i in range(1000)] == back
    assert type(back[0][0]) is type(shared)
    assert all(pair[0] is back[0][0] for pair in back)


HASHED = {
    "set": lambda value: {value},
    "frozenset": lambda value: frozenset([value]),
    "key": lambda value: {value: None},
}


@pytest.mark.parametrize("hashed", HASHED.values(), ids=HASHED)
@pytest.mark.parametrize(
    "twice",
    [lambda x: (x, x), lambda x: frozenset([x, (x,)]), lambda x: frozenset([(x, 1), (x, 2)])],
    ids=["tuples", "frozensets", "frozensets of tuples"],
)
def test_what_is_hashed_does_not_explode(hashed, twice):
    """2**18 ways to one value in a set or a key are no 2**18 copies of it: pickle says it."""
    value = frozenset()
    for _ in range(18):
        value = twice(value)
    message = object_codec.encode(hashed(value), allow_pickle=True)
    assert len(message) < 2000
    assert type(object_codec.decode(message, allow_pickle=True)) is type(hashed(value))
    tracemalloc.start()
    try:
        with pytest.raises(TypeError, match="occurs too often in sets or keys"):
            object_codec.encode(hashed(value), allow_pickle=False)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100_000


@pytest.mark.parametrize("hashed", HASHED.values(), ids=HASHED)
@pytest.mark.parametrize(
    "shared", ["a" * 10_000, (b"a" * 10_000, 1)], ids=["text", "tuple with bytes"]
)
def test_long_keys_are_not_copied_for_ever(hashed, shared):
    """Few copies of what is long need no pickle; 1000 are no part of any message."""
    few = [hashed(shared) for _ in range(10)]
    assert few == object_codec.decode(
        object_codec.encode(few, allow_pickle=False), allow_pickle=False
    )
    many = [hashed(shared) for _ in range(1000)]
    message = object_codec.encode(many, allow_pickle=True)
    assert len(message) < 100_000
    assert many == object_codec.decode(message, allow_pickle=True)


@pytest.mark.parametrize("hashed", HASHED.values(), ids=HASHED)
@pytest.mark.parametrize(
    "shared", ["learning rate", "a" * 200, (1, 2), ((1, "a"), ("b", 2), ("c", (3.5, 4)))], ids=repr
)
def test_keys_of_usual_length_need_no_pickle(hashed, shared):
    """However many dicts have the same keys, and sets the same items."""
    value = [hashed(shared) for _ in range(10_000)]
    assert value == object_codec.decode(
        object_codec.encode(value, allow_pickle=False), allow_pickle=False
    )


def test_what_is_in_itself_needs_pickle():
    """It has no end that could be referred to."""
    circle = [1]
    circle.append({"circle": circle})
    back = object_codec.decode(object_codec.encode(circle, allow_pickle=True), allow_pickle=True)
    assert back is back[1]["circle"]
    with pytest.raises(TypeError, match="list in itself"):
        object_codec.encode(circle, allow_pickle=False)


def test_what_is_in_itself_is_found_at_once():
    """Before anything beside it is said a second time."""
    circle = [1.5] * 100_000
    circle.append(circle)
    tracemalloc.start()
    try:
        with pytest.raises(TypeError, match="in itself"):
            object_codec.encode(circle, allow_pickle=False)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 10_000_000


@pytest.mark.parametrize(
    "body",
    [
        b"r" + bytes(8),
        b"l" + (1).to_bytes(8, "little") + b"r" + bytes(8),
        b"l" + (2).to_bytes(8, "little") + b"B" + bytes(8) + b"r" + (1).to_bytes(8, "little"),
        b"l" + (2).to_bytes(8, "little") + b"b" + bytes(8) + b"r" + bytes(8),
    ],
    ids=["nothing yet", "itself", "itself, later", "a short scalar"],
)
def test_only_what_has_ended_is_referred_to(body):
    """A message cannot make what is in itself, nor refer to what is not there."""
    with pytest.raises(object_codec.CodecError, match="before it has ended"):
        object_codec.decode(b"\x00" + body, allow_pickle=False)


def test_keys_refer_to_nothing():
    """Else to hash what a short message describes could take for ever: 2**60 ways to one value."""
    count = (2).to_bytes(8, "little")
    tuples = b"t" + count + b"NN"
    for number in range(60):
        again = b"r" + number.to_bytes(8, "little")
        tuples += b"t" + count + again + again
    last = b"r" + (60).to_bytes(8, "little")
    one = (1).to_bytes(8, "little")
    for hashing in b"S" + one + last, b"d" + one + last + b"N":
        message = b"\x00l" + (62).to_bytes(8, "little") + tuples + hashing
        with pytest.raises(object_codec.CodecError, match="tag b'r'"):
            object_codec.decode(message, allow_pickle=False)
    pair = (1, (2, 3))
    value = [pair, {pair: pair}, {pair}, frozenset({pair})]
    assert value == object_codec.decode(
        object_codec.encode(value, allow_pickle=False), allow_pickle=False
    )


@pytest.mark.parametrize(
    "shared", [(), (1, "a"), frozenset({1}), "a", 1.5, np.float32(2)], ids=repr
)
def test_what_never_changes_may_occur_twice(shared):
    """A copy is as good: no pickle is needed."""
    back = object_codec.decode(
        object_codec.encode([shared, shared], allow_pickle=False), allow_pickle=False
    )
    assert [shared, shared] == back


def test_other_objects_need_pickle():
    """A custom object travels by pickle, and only if both sides allow it."""
    data = object_codec.encode({"x": Custom()}, allow_pickle=True)
    assert {"x": Custom()} == object_codec.decode(data, allow_pickle=True)
    with pytest.raises(TypeError, match="Custom needs pickle"):
        object_codec.encode(Custom(), allow_pickle=False)
    with pytest.raises(TypeError, match="pickle is switched off"):
        object_codec.decode(data, allow_pickle=False)


@pytest.mark.parametrize("name", ["bfloat16", "float8_e4m3fn", "float8_e5m2", "int4"])
def test_dtypes_of_others_keep_theirs(name):
    """Though some take numpy's kinds for themselves; they need pickle."""
    array = np.ones(3, getattr(ml_dtypes, name))
    back = object_codec.decode(
        object_codec.encode([array, array[0]], allow_pickle=True), allow_pickle=True
    )
    assert back[0].dtype == array.dtype
    assert back[0].tobytes() == array.tobytes()
    assert type(back[1]) is type(array[0])


class Metres(np.float64):
    """A number that is more than that, and says so to pickle, as numpy's do not."""

    def __reduce__(self):
        return Metres, (float(self),)


def test_a_numpy_scalar_of_a_subclass_keeps_its_type():
    """Only pickle can say it."""
    back = object_codec.decode(
        object_codec.encode(Metres(2.5), allow_pickle=True), allow_pickle=True
    )
    assert type(back) is Metres
    assert back == 2.5


def test_a_subclass_is_not_mistaken_for_its_base():
    """bool and IntEnum and OrderedDict keep their types."""
    from collections import OrderedDict

    back = object_codec.decode(
        object_codec.encode(OrderedDict(a=1), allow_pickle=True), allow_pickle=True
    )
    assert OrderedDict is type(back)


@given(st.binary(max_size=200))
def test_garbage_is_refused_without_harm(data):
    """Random bytes give a CodecError or a plain value, never anything else."""
    try:
        object_codec.decode(b"\x00" + data, allow_pickle=False)
    except object_codec.CodecError:
        pass


@given(plain, st.data())
def test_a_changed_byte_is_refused_or_gives_a_plain_value(value, data):
    """Flipping a byte of a valid message raises CodecError at worst."""
    message = bytearray(object_codec.encode(value, allow_pickle=False))
    at = data.draw(st.integers(1, max(1, len(message) - 1)))
    if at < len(message):
        message[at] ^= data.draw(st.integers(1, 255))
    try:
        object_codec.decode(message, allow_pickle=False)
    except object_codec.CodecError:
        pass


def test_sizes_are_checked_before_memory_is_taken():
    """A message that claims 2**60 items or bytes is refused at once."""
    for tag in b"l", b"d", b"s", b"b":
        with pytest.raises(object_codec.CodecError, match=r"fit|early"):
            object_codec.decode(b"\x00" + tag + (1 << 60).to_bytes(8, "little"), allow_pickle=False)


def test_depth_is_bounded():
    """Nesting cannot exhaust the stack: neither encoding nor decoding."""
    deep: list = []
    for _ in range(10_000):
        deep = [deep]
    with pytest.raises(TypeError, match="nested"):
        object_codec.encode(deep, allow_pickle=False)
    with pytest.raises(object_codec.CodecError, match="nests"):
        object_codec.decode(
            b"\x00" + (b"l" + (1).to_bytes(8, "little")) * 10_000, allow_pickle=False
        )
