"""asarray on DLPack, byte by byte: an exporter whose every field is ours."""

from __future__ import annotations

import ctypes
import gc
from typing import Any

import pytest

from cydist._native import asarray


class DLTensor(ctypes.Structure):
    _fields_ = (
        ("data", ctypes.c_void_p),
        ("device", ctypes.c_int32 * 2),
        ("ndim", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    )


Deleter = ctypes.PYFUNCTYPE(None, ctypes.c_void_p)


class NdarrayView(ctypes.Structure):
    _fields_ = (("tensor", DLTensor), ("context", ctypes.c_void_p), ("deleter", Deleter))


class Versioned(ctypes.Structure):
    _fields_ = (
        ("version", ctypes.c_uint32 * 2),
        ("context", ctypes.c_void_p),
        ("deleter", Deleter),
        ("flags", ctypes.c_uint64),
        ("tensor", DLTensor),
    )


new_capsule = ctypes.pythonapi.PyCapsule_New
new_capsule.restype = ctypes.py_object
new_capsule.argtypes = (ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p)


class Capsule:
    """An exporter whose every field is ours: six bytes, as three int16 after one of offset."""

    def __init__(
        self,
        *,
        versioned: bool = True,
        version: tuple[int, int] = (1, 0),
        flags: int = 0,
        device: tuple[int, int] = (1, 0),
        dtype: tuple[int, int, int] = (0, 16, 1),
        strides: list[int] | None = None,
    ) -> None:
        self.deleted = 0
        self.stream: Any = None
        self.device = device
        self.memory = (ctypes.c_int16 * 4)(9, 1, 2, 3)
        self.shape = (ctypes.c_int64 * 1)(3)
        self.strides = (ctypes.c_int64 * 1)(*strides) if strides else None
        self.managed = Versioned() if versioned else NdarrayView()
        self.deleter = Deleter(self.delete)
        self.managed.deleter = self.deleter
        if versioned:
            self.managed.version[:] = version
            self.managed.flags = flags
        tensor = self.managed.tensor
        tensor.data = ctypes.addressof(self.memory)
        tensor.device[:] = device
        tensor.ndim = 1
        tensor.code, tensor.bits, tensor.lanes = dtype
        tensor.shape = self.shape
        if self.strides is not None:
            tensor.strides = self.strides
        tensor.byte_offset = 2
        self.name = b"dltensor_versioned" if versioned else b"dltensor"

    def delete(self, managed: int) -> None:
        assert managed == ctypes.addressof(self.managed)
        self.deleted += 1

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device

    def __dlpack__(self, *, stream: Any = None, max_version: Any = None) -> Any:
        self.stream = stream
        return new_capsule(ctypes.addressof(self.managed), self.name, None)


@pytest.fixture(params=[True, False], ids=["versioned", "old"])
def versioned(request: pytest.FixtureRequest) -> bool:
    return request.param


def test_deleter_is_called_once(versioned: bool) -> None:
    """A DLPack tensor is given back when the Array goes, not before, and once."""
    exporter = Capsule(versioned=versioned)
    found = asarray(exporter)
    part = found.blocks(3)[2]
    del found
    gc.collect()
    assert exporter.deleted == 0
    del part
    gc.collect()
    assert exporter.deleted == 1


def test_offset_and_absent_strides(versioned: bool) -> None:
    """The byte offset counts, and no strides mean C order."""
    found = asarray(Capsule(versioned=versioned))
    assert (found.strides, bytes(memoryview(found))) == ((2,), b"\1\0\2\0\3\0")


def test_strides_count_elements() -> None:
    """DLPack's strides are turned into bytes."""
    assert asarray(Capsule(strides=[-1])).strides == (-2,)


@pytest.mark.parametrize(("flags", "writable"), [(0, True), (1, False), (2, True)])
def test_read_only_flag(flags: int, writable: bool) -> None:
    """Of the flags, the first says that memory is read-only."""
    assert asarray(Capsule(flags=flags)).writable == writable


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        pytest.param({"version": (2, 0)}, "DLPack 2 is not understood", id="version"),
        pytest.param({"device": (8, 0)}, "device type 8", id="device"),
        pytest.param({"dtype": (17, 4, 1)}, "4 bits", id="sub-byte"),
        pytest.param({"dtype": (2, 32, 4)}, "x 4", id="lanes"),
        pytest.param({"dtype": (3, 64, 1)}, "type 3", id="handles"),
    ],
)
def test_refused_tensor_is_given_back(wrong: dict[str, Any], message: str) -> None:
    """What is not understood raises TypeError, and its deleter is called all the same."""
    exporter = Capsule(**wrong)
    with pytest.raises(TypeError, match=message):
        asarray(exporter)
    gc.collect()
    assert exporter.deleted == 1


def test_pinned_memory_is_the_cpus() -> None:
    """Memory pinned for CUDA is CPU memory."""
    assert asarray(Capsule(device=(3, 1))).device == "cpu"


def test_cuda_by_dlpack() -> None:
    """A device tensor by DLPack is taken with its device, and asked to order nothing."""
    exporter = Capsule(device=(2, 5))
    found = asarray(exporter)
    assert (found.device, found.device_index, exporter.stream) == ("cuda", 5, -1)
