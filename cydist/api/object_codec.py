"""Python objects as bytes: a tagged codec for plain values and arrays, pickle for the rest.

Decoding a tagged message creates only plain values, whatever the sender. Pickle can run code:
`decode` refuses it unless the caller says that the sender is trusted. No other module unpickles.

A part that occurs twice in an object is sent once. Containers, arrays, bytearrays and scalars of
more than SHORT bytes are numbered when they end, and a repeated one is sent as its number. So it
stays one object. A container that holds itself has no number yet, and is pickled.

Items of sets and keys are not numbered: a copy is as good there, and hashing what a few bytes
describe takes no longer than reading them. Copies of more than SHORT bytes are counted. If they
would make the message more than 1 + COPIES times as long as numbers would, the object is pickled.

So a message is at most that multiple of the object, in which each part counts once, arrays and
their views count with all elements, and each repetition counts SHORT bytes.
"""

from __future__ import annotations

import pickle
import re
import struct
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

TAGGED, PICKLED = b"\x00", b"\x01"
DEPTH_LIMIT = 64  # of nested containers; deeper ones are pickled
SHORT = 64  # bytes that a scalar, or a part of a set or key, may take at each occurrence
COPIES = 16  # most bytes of copies in sets and keys for each byte of the rest
_REFERENCE = 9  # bytes of a number that refers to a part
# The form of numpy's dtype.str; numpy itself accepts much more than it writes.
_DTYPE = re.compile(rb"[<>|][biufcSUmM][0-9]+(\[[0-9]*[A-Za-z]+\])?")


class NotPlain(Exception):
    """The tagged codec cannot encode the object."""


class CodecError(ValueError):
    """The bytes are not a message of this codec."""


def encode(value: object, *, allow_pickle: bool) -> bytes:
    """Encode `value` as bytes.

    Raises TypeError for an object that needs pickle when pickle is not allowed, and pickle's own
    exception for an object that pickle cannot encode.
    """
    writer = _Writer()
    try:
        writer.value(value, 0)
    except NotPlain as error:
        if not allow_pickle:
            raise TypeError(
                f"{error} needs pickle, which is switched off (allow_pickle=False, or "
                "connections that are not authenticated); send plain values and arrays"
            ) from None
        return PICKLED + pickle.dumps(value, protocol=5)
    return b"".join(writer.parts)


def decode(data: bytes | bytearray | memoryview, *, allow_pickle: bool) -> Any:
    """Return the object that `encode` was given.

    Raises CodecError, and TypeError for a pickle when pickle is not allowed.
    """
    view = memoryview(data)
    if view[:1] == PICKLED:
        if not allow_pickle:
            raise TypeError(
                "a rank sent a pickled object, and pickle is switched off here "
                "(allow_pickle=False, or connections that are not authenticated)"
            )
        try:
            return pickle.loads(view[1:])
        except Exception as error:  # its classes may raise anything, or be missing here
            raise CodecError(f"unpickling it raised {type(error).__name__}: {error}") from error
    if view[:1] != TAGGED:
        raise CodecError("an object message begins with an unknown byte")
    reader = _Reader(view[1:])
    value = reader.value(0)
    if reader.left:
        raise CodecError(f"too many bytes in an object message: {reader.left}")
    return value


def _plain(dtype: np.dtype[Any]) -> bool:
    """Return whether these are numpy's own numbers, strings and times of a fixed size. Other dtypes
    (2) may claim their kinds."""
    return dtype.kind in "biufcSUmM" and dtype.isbuiltin != 2


def _sized(tag: bytes, body: bytes) -> bytes:
    return tag + struct.pack("<Q", len(body)) + body


def _int(value: int) -> bytes:
    return _sized(b"i", value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True))


def _str(value: str) -> bytes:
    return _sized(b"s", value.encode("utf-8", "surrogatepass"))


_SCALARS: dict[type, Callable[[Any], bytes]] = {
    type(None): lambda value: b"N",
    bool: lambda value: b"T" if value else b"F",
    int: _int,
    float: lambda value: b"f" + struct.pack("<d", value),
    complex: lambda value: b"c" + struct.pack("<dd", value.real, value.imag),
    str: _str,
    bytes: lambda value: _sized(b"b", value),
}
_CONTAINERS: dict[type, bytes] = {
    list: b"l", tuple: b"t", set: b"S", frozenset: b"Z", dict: b"d",
}  # fmt: skip
_SETS = (set, frozenset)
_NUMBERED_KINDS = {*_CONTAINERS, bytearray, np.ndarray}  # and scalars of more than SHORT bytes


class _Writer:
    """Writes values to the parts of a message; raises NotPlain for values it cannot encode."""

    def __init__(self) -> None:
        self.parts: list[bytes] = [TAGGED]
        self._nbytes = len(TAGGED)  # of all parts
        self._open: set[int] = set()  # ids of the containers that are being written
        self._met: dict[int, int] = {}  # the number of each part that can be referred to, by its id
        self._hashed: dict[int, int] = {}  # bytes of each part longer than SHORT, by its id
        self._copied = 0  # bytes of copies of those parts, beyond the bytes of references

    def put(self, part: bytes) -> None:
        self.parts.append(part)
        self._nbytes += len(part)

    def value(self, value: Any, depth: int, *, hashed: bool = False) -> None:
        if not hashed and id(value) in self._met:
            self.put(b"r" + struct.pack("<Q", self._met[id(value)]))
            return
        copied = self._count(value) if hashed and id(value) in self._hashed else None
        start = self._nbytes
        kind = type(value)  # exact type: a subclass would be decoded as its base
        if kind in _SCALARS:
            self.put(_SCALARS[kind](value))
        elif kind in _CONTAINERS:
            self._container(value, depth, hashed)
        elif kind is bytearray:
            self.put(_sized(b"B", bytes(value)))
        elif kind is np.ndarray and _plain(value.dtype) and value.itemsize > 0:
            self._array(value)
        elif isinstance(value, np.generic) and kind is value.dtype.type and _plain(value.dtype):
            name = value.dtype.str.encode()
            data = value.tobytes()[: value.itemsize]  # numpy gives an empty str_ four bytes
            self.put(b"G" + struct.pack("<B", len(name)) + name + data)
        else:
            raise NotPlain(f"an object of type {kind.__module__}.{kind.__qualname__}")
        nbytes = self._nbytes - start
        if copied is not None:
            self._copied = copied  # its parts were counted with it
        elif hashed and nbytes > SHORT:
            self._hashed[id(value)] = nbytes
        elif not hashed and (nbytes > SHORT or kind in _NUMBERED_KINDS):
            self._met[id(value)] = len(self._met)

    def _count(self, value: Any) -> int:
        """Return the bytes of copies with one more of `value`. Raises NotPlain if they are too
        many."""
        nbytes = self._hashed[id(value)]
        copied = self._copied + nbytes - _REFERENCE
        if copied > COPIES * (self._nbytes + nbytes - copied):
            raise NotPlain(f"a {type(value).__name__} that occurs too often in sets or keys")
        return copied

    def _container(self, value: Any, depth: int, hashed: bool) -> None:
        kind = type(value)
        if id(value) in self._open:
            raise NotPlain(f"a {kind.__name__} in itself")
        if depth == DEPTH_LIMIT:
            raise NotPlain(f"a container nested {DEPTH_LIMIT} deep")
        self._open.add(id(value))
        self.put(_CONTAINERS[kind] + struct.pack("<Q", len(value)))
        if kind is dict:
            for key, item in value.items():
                self.value(key, depth + 1, hashed=True)
                self.value(item, depth + 1, hashed=hashed)
        else:
            for item in value:
                self.value(item, depth + 1, hashed=hashed or kind in _SETS)
        self._open.remove(id(value))

    def _array(self, value: np.ndarray[Any, Any]) -> None:
        name = value.dtype.str.encode()
        shape = struct.pack(f"<{value.ndim}Q", *value.shape)
        self.put(b"A" + struct.pack("<BB", len(name), value.ndim) + name + shape)
        self.put(np.ascontiguousarray(value).tobytes())


class _Reader:
    """Reads values from a message; every size is checked against the bytes that are left."""

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self._at = 0
        self._met: list[Any] = []  # parts that can be referred to, by number

    @property
    def left(self) -> int:
        return len(self._view) - self._at

    def take(self, nbytes: int) -> memoryview:
        if nbytes > self.left:
            raise CodecError(f"an object message ends {nbytes - self.left} bytes too early")
        self._at += nbytes
        return self._view[self._at - nbytes : self._at]

    def unpack(self, layout: str) -> tuple[Any, ...]:
        return struct.unpack(layout, self.take(struct.calcsize(layout)))

    def sized(self) -> memoryview:
        return self.take(self.unpack("<Q")[0])

    def value(self, depth: int, *, hashed: bool = False) -> Any:
        start = self._at
        tag = bytes(self.take(1))
        if tag == b"r" and not hashed:
            return self._again()
        if tag in _CONTAINER_OF:
            value = self._container(_CONTAINER_OF[tag], depth, hashed)
        elif tag in _READERS:
            try:
                value = _READERS[tag](self)
            except (UnicodeDecodeError, TypeError, OverflowError) as error:
                raise CodecError(f"a broken value in an object message: {error}") from None
        else:
            raise CodecError(f"unknown tag {tag!r} in an object message")
        if not hashed and (self._at - start > SHORT or tag in _NUMBERED):
            self._met.append(value)
        return value

    def _again(self) -> Any:
        (number,) = self.unpack("<Q")
        if number >= len(self._met):
            raise CodecError(f"an object message refers to part {number} before it has ended")
        return self._met[number]

    def _container(self, kind: type, depth: int, hashed: bool) -> Any:
        if depth == DEPTH_LIMIT:
            raise CodecError(f"an object message nests more than {DEPTH_LIMIT} deep")
        (length,) = self.unpack("<Q")
        if length * (2 if kind is dict else 1) > self.left:  # every item takes a byte or more
            raise CodecError(f"a container of {length} items does not fit an object message")
        each = range(length)
        try:
            if kind is dict:
                return {
                    self.value(depth + 1, hashed=True): self.value(depth + 1, hashed=hashed)
                    for _ in each
                }
            return kind([self.value(depth + 1, hashed=hashed or kind in _SETS) for _ in each])
        except TypeError as error:
            raise CodecError(f"a broken container in an object message: {error}") from None

    def dtype(self, length: int) -> np.dtype[Any]:
        name = bytes(self.take(length))
        try:
            if _DTYPE.fullmatch(name):
                return np.dtype(name.decode())
        except (TypeError, ValueError):
            pass
        raise CodecError(f"unknown dtype {name!r} in an object message")

    def elements(self, dtype: np.dtype[Any], count: int) -> bytearray:
        """Return the bytes of `count` elements; raise for text with invalid characters."""
        data = bytearray(self.take(count * dtype.itemsize))
        if dtype.kind == "U" and (np.frombuffer(data, dtype.str[0] + "u4") > sys.maxunicode).any():
            raise CodecError("invalid Unicode text in an object message")
        return data

    def array(self) -> Any:
        length, ndim = self.unpack("<BB")
        dtype = self.dtype(length)
        shape = self.unpack(f"<{ndim}Q")
        size = 1
        for extent in shape:
            size *= extent
        if dtype.itemsize == 0:
            raise CodecError("an array of zero-size elements in an object message")
        data = self.elements(dtype, size)
        try:
            return (
                np.frombuffer(data, np.uint8).view(dtype).reshape(shape)
                if data
                else np.empty(shape, dtype)
            )
        except (ValueError, MemoryError) as error:
            raise CodecError(f"a broken array in an object message: {error}") from None

    def scalar(self) -> Any:
        (length,) = self.unpack("<B")
        dtype = self.dtype(length)
        data = self.elements(dtype, 1)
        # As elements of a numpy array these would lose trailing zeros.
        if dtype.kind == "S":
            return np.bytes_(data)
        if dtype.kind == "U":
            order = "utf-32-be" if dtype.str[0] == ">" else "utf-32-le"
            return np.str_(data.decode(order, "surrogatepass"))
        return np.frombuffer(data, dtype)[0] if data else np.zeros((), dtype)[()]


_CONTAINER_OF = {tag: kind for kind, tag in _CONTAINERS.items()}
_NUMBERED = {*_CONTAINER_OF, b"B", b"A"}
_READERS: dict[bytes, Callable[[_Reader], Any]] = {
    b"N": lambda r: None,
    b"T": lambda r: True,
    b"F": lambda r: False,
    b"i": lambda r: int.from_bytes(r.sized(), "little", signed=True),
    b"f": lambda r: r.unpack("<d")[0],
    b"c": lambda r: complex(*r.unpack("<dd")),
    b"s": lambda r: bytes(r.sized()).decode("utf-8", "surrogatepass"),
    b"b": lambda r: bytes(r.sized()),
    b"B": lambda r: bytearray(r.sized()),
    b"A": _Reader.array,
    b"G": _Reader.scalar,
}
