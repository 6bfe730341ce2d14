"""Objects that say wrong things about their memory: a typed error, and no access to it."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from cydist._native import asarray

pytestmark = pytest.mark.fuzz

MEMORY = np.arange(4096, dtype=np.uint8)
ADDRESS = MEMORY.__array_interface__["data"][0]

edges = st.sampled_from([0, 1, 2, 3, -1, -8, 2**31, 2**62, 2**63 - 1, -(2**63), 2**64, 10**30])
nonsense = st.none() | st.text(max_size=3) | st.floats() | st.just(()) | st.just([]) | edges
extents = st.lists(st.integers(0, 4) | edges | nonsense, max_size=6)
typestrs = st.sampled_from(
    ["<f4", ">f8", "|b1", "<c16", "<V3", "|O8", "<f-4", "<f", "<", "", "f4", "<U" + "9" * 20]
) | st.text(max_size=6)
interfaces = st.fixed_dictionaries(
    {},
    optional={
        "shape": extents.map(tuple) | extents | nonsense,
        "typestr": typestrs | nonsense,
        "data": st.sampled_from([(ADDRESS, False), (ADDRESS, True), (0, False), (None, 1)])
        | st.tuples(edges, st.booleans())
        | st.tuples(edges)
        | nonsense,
        "strides": extents.map(tuple) | nonsense,
        "mask": st.none() | nonsense,
        "version": st.just(3),
    },
)
fitting = st.fixed_dictionaries(
    {"shape": st.just((2, 3)), "typestr": st.just("<f4"), "data": st.just((ADDRESS, False))},
    optional={"strides": extents.map(tuple)},
)


class Exporter:
    """Says what it is told to."""

    def __init__(self, **said: Any) -> None:
        self.__dict__.update(said)


def look_at(obj: object) -> None:
    """Find its memory and ask everything about it, without touching it."""
    try:
        array = asarray(obj)
    except (TypeError, ValueError, MemoryError):
        return
    assert array.nbytes == array.size * array.itemsize
    assert len(array.shape) == len(array.strides) == array.ndim
    assert int(np.prod([int(n) for n in array.shape], dtype=object)) == array.size
    first, end = array.extent
    assert end - first >= array.itemsize or array.size == 0
    assert array.overlaps(array) == (array.size > 0)
    assert array.self_overlapping in (True, False)
    repr(array)


@settings(max_examples=3 * settings.default.max_examples)
@given(interfaces | fitting, st.booleans())
@example({"shape": (2, 2), "typestr": "<f4", "data": ()}, False)
@example({"shape": (2, 2), "typestr": "<f4", "data": (ADDRESS,)}, False)
@example({"shape": (2, 2, 2), "typestr": "<f4", "data": (ADDRESS, False), "strides": ()}, False)
@example({"shape": (2, 2), "typestr": "<f4", "data": (8, 0), "strides": (2**62, 2**62)}, False)
@example({"shape": (2,), "typestr": f"<V{2**63}", "data": (ADDRESS, False)}, False)
@example({"shape": (2**62, 2**62, 0), "typestr": "<f4", "data": (ADDRESS, False)}, False)
def test_interfaces(said: dict[str, Any], cuda: bool) -> None:
    """Whatever stands in an `__array_interface__`, memory is described or refused."""
    name = "__cuda_array_interface__" if cuda else "__array_interface__"
    look_at(Exporter(**{name: said}))


@given(st.sampled_from(["__array_interface__", "__cuda_array_interface__"]), nonsense)
def test_interfaces_that_are_none(name: str, said: object) -> None:
    """What is no dictionary is no interface."""
    look_at(Exporter(**{name: said}))


class Tensor(ctypes.Structure):
    """DLTensor, between the fields that a versioned capsule has around it."""

    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("byte_offset", ctypes.c_uint64),
    )


class Managed(ctypes.Structure):
    """DLManagedTensor."""

    _fields_ = (("tensor", Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p))


class Versioned(ctypes.Structure):
    """DLManagedTensorVersioned."""

    _fields_ = (
        ("major", ctypes.c_uint32),
        ("minor", ctypes.c_uint32),
        ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p),
        ("flags", ctypes.c_uint64),
        ("tensor", Tensor),
    )


new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype = ctypes.py_object
new_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]

words = st.sampled_from([0, 1, 2, 3, 8, -1, -8, 2**31, 2**62, 2**63 - 1, -(2**63)])
tensors = st.fixed_dictionaries(
    {
        "data": st.sampled_from([None, ADDRESS, 2**64 - 8]),
        "device_type": st.sampled_from([1, 1, 2, 3, 13, 0, 4, -1]),
        "ndim": st.sampled_from([0, 1, 2, 5, 5, -1, 65, 2**31 - 1, -(2**31)]),
        "code": st.integers(0, 20),
        "bits": st.sampled_from([8, 16, 32, 64, 128, 0, 1, 4, 255]),
        "lanes": st.sampled_from([1, 1, 1, 0, 2, 65535]),
        "byte_offset": st.sampled_from([0, 8, 2**63, 2**64 - 1]),
    }
)


@settings(max_examples=3 * settings.default.max_examples)
@given(
    said=tensors,
    shape=st.none() | st.lists(words, min_size=65, max_size=65),
    strides=st.none() | st.lists(words, min_size=65, max_size=65),
    version=st.sampled_from([None, 0, 1, 1, 2]),
    name=st.sampled_from([None, None, None, b"used_dltensor", b""]),
)
def test_dlpack(
    said: dict[str, Any],
    shape: list[int] | None,
    strides: list[int] | None,
    version: int | None,
    name: bytes | None,
) -> None:
    """Whatever a DLPack tensor says of itself, it is described or refused."""
    managed = Managed() if version is None else Versioned()
    rows = []
    for field, values in (("shape", shape), ("strides", strides)):
        if values is not None:
            row = (ctypes.c_int64 * len(values))(*values)
            rows.append(row)
            setattr(managed.tensor, field, ctypes.addressof(row))
    for field, value in said.items():
        setattr(managed.tensor, field, value)
    if isinstance(managed, Versioned):
        managed.major = version
    right = b"dltensor" if version is None else b"dltensor_versioned"
    held = right if name is None else name
    capsule = new_capsule(ctypes.addressof(managed), held, None)
    kind = type("Fuzzed", (), {"__dlpack__": lambda self, **options: capsule})
    look_at(kind())


@given(nonsense)
def test_dlpack_that_is_no_capsule(said: object) -> None:
    """What is no capsule is refused."""
    kind = type("Fuzzed", (), {"__dlpack__": lambda self, **options: said})
    look_at(kind())


formats = st.sampled_from(["B", "b", "<f", ">d", "?", "c", "P", "=q", "@n", "!H", "Zf", "e"])


@given(formats, st.integers(0, 3), st.data())
def test_buffers(form: str, ndim: int, data: st.DataObject) -> None:
    """Any cast of a buffer is described or refused."""
    view = memoryview(MEMORY)
    try:
        view = view.cast(form, data.draw(st.lists(st.integers(0, 8), min_size=ndim, max_size=ndim)))
    except (TypeError, ValueError):
        view = view[data.draw(st.integers(-9, 9)) :: data.draw(st.sampled_from([1, 2, -1, -3]))]
    look_at(view)
