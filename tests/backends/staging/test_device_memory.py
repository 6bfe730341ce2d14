"""Arrays on a GPU: what is known of them, and strided ones packed on the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from fake_gpu_delayed import LateArray, LateDevice

from cydist import asarray
from cydist._native import empty
from cydist.devices import array_libraries

LAYOUTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.T,
    "every other": lambda x: x[::2, 1::2],
    "reversed": lambda x: x[::-1],
    "0-d": lambda x: x[2, 3, ...],
    "empty": lambda x: x[:0],
    "broadcast": lambda x: np.broadcast_to(x[:1], x.shape),
}
DTYPES = ["?", "u1", "f2", ml_dtypes.bfloat16, "f4", "i8", "c16", "V3", "V40", "i4,f8"]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> LateDevice:
    """A GPU that cydist copies on."""
    made = LateDevice()
    monkeypatch.setattr(array_libraries, "_libraries", {})
    monkeypatch.setattr(array_libraries, "_others", set())
    array_libraries.register(made)
    return made


def values(dtype: Any) -> np.ndarray:
    kind = np.dtype(dtype)
    return np.arange(24 * kind.itemsize, dtype=np.uint8).view(kind).reshape(4, 6)


@pytest.fixture(params=LAYOUTS.values(), ids=LAYOUTS.keys())
def layout(request: pytest.FixtureRequest) -> Callable[[np.ndarray], np.ndarray]:
    return request.param


@pytest.fixture(params=DTYPES, ids=lambda dtype: np.dtype(dtype).name)
def dtype(request: pytest.FixtureRequest) -> Any:
    return request.param


def test_dense_packs_on_the_device(device: LateDevice, layout: Any, dtype: Any) -> None:
    """A strided array becomes a contiguous one on its device, in the order of its stream."""
    whole = device.array(values(dtype), index=2)
    array = asarray(whole.view(layout(whole.memory)))
    packed = array.dense()
    assert (packed.device, packed.device_index, packed.contiguous) == ("cuda", 2, True)
    assert (packed.shape, packed.dtype_name) == (array.shape, array.dtype_name)
    device.synchronize(device.current_stream(2))
    found = packed.owner.memory
    wanted = layout(values(dtype))
    assert found.tobytes()[: wanted.nbytes] == wanted.tobytes()


def test_take_unpacks_on_the_device(device: LateDevice, dtype: Any) -> None:
    """What is strided takes the elements of what is contiguous, and nothing else changes."""
    whole = device.array(np.zeros((8, 12), dtype))
    given = device.array(values(dtype))
    asarray(whole[::2, ::2]).copy_from(asarray(given))
    wanted = np.zeros((8, 12), dtype)
    wanted[::2, ::2] = values(dtype)
    assert whole.get().tobytes() == wanted.tobytes()


def test_new_memory_is_on_the_device_of_its_like(device: LateDevice) -> None:
    """empty_like and empty make device memory for device arrays, of their library."""
    array = asarray(device.array(np.zeros((2, 3), "f4"), index=1))
    for made in (array.empty_like(), empty(7, array)):
        assert (made.device, made.device_index, made.dtype_name) == ("cuda", 1, "float32")
        assert isinstance(made.owner, LateArray)
    assert array.empty_like().shape == (2, 3)
    assert empty(7, array).size == 7


def test_host_and_device_do_not_take_from_each_other(device: LateDevice) -> None:
    """`take` between memory of two kinds, or of two devices, raises and names both."""
    here = asarray(np.zeros(3))
    there, elsewhere = (asarray(device.array(np.zeros(3), index=i)) for i in (0, 1))
    for into, source, message in (
        (here, there, "cpu:0 cannot take what is on cuda:0"),
        (there, here, "cuda:0 cannot take what is on cpu:0"),
        (there, elsewhere, "cuda:0 cannot take what is on cuda:1"),
    ):
        with pytest.raises(ValueError, match=message):
            into.copy_from(source)


def test_bytes_get_a_dtype() -> None:
    """`typed` shows bytes as elements of another array's dtype, and no more than there are."""
    memory = asarray(np.zeros(64, np.uint8))
    like = asarray(np.zeros(5, ml_dtypes.bfloat16))
    typed = memory.typed(like)
    assert (typed.dtype_name, typed.size, typed.address) == ("bfloat16", 5, memory.address)
    assert typed.owner is memory.owner
    with pytest.raises(ValueError, match="64 bytes cannot hold 72"):
        memory.typed(asarray(np.zeros(9)))


def test_the_stream_is_that_of_the_arrays_library(device: LateDevice) -> None:
    """An array's own library says which stream is current; a foreign array may say it itself."""

    class Foreign:
        def __init__(self, stream: int | None) -> None:
            self.__cuda_array_interface__ = {
                "version": 3, "shape": (1,), "typestr": "<f4", "data": (4096, False),
                "stream": stream,
            }  # fmt: skip

    array = asarray(device.array(np.zeros(1), index=3))
    with device.on_stream(3, 77):
        assert array_libraries.stream_of(array) == 77
    with pytest.raises(ValueError, match="cuda:0, and neither cupy nor torch"):
        array_libraries.stream_of(asarray(Foreign(2)))
    array_libraries._libraries["cupy"] = device
    assert array_libraries.stream_of(asarray(Foreign(2))) == 2
    assert array_libraries.stream_of(asarray(Foreign(None))) == device.current_stream(0)


# torch's copies are the same on CPU tensors; cupy's need a GPU.


@pytest.mark.parametrize(
    "view",
    [
        lambda x: x, lambda x: x.T, lambda x: x[::2, 1::2], lambda x: x[2, 3],
        lambda x: x[:1].expand(4, 6),
    ],
    ids=["contiguous", "transposed", "every other", "0-d", "broadcast"],
)  # fmt: skip
@pytest.mark.parametrize(
    "kind", ["bool", "uint8", "float16", "bfloat16", "float32", "int64", "complex128"]
)
def test_torch_copies_between_any_strides(view: Any, kind: str) -> None:
    """Torch's copies preserve every bit, whatever the strides and the offset, and autograd
    does not see them."""
    torch = pytest.importorskip("torch")
    source = view(torch.arange(24, dtype=torch.uint8).to(getattr(torch, kind)).reshape(4, 6))
    into = torch.zeros(source.shape, dtype=source.dtype, requires_grad=kind == "float32")
    array_libraries.Torch().copy(asarray(into), asarray(source))
    assert into.tolist() == source.tolist()
    assert into.is_leaf


def test_torch_sees_parts_of_tensors() -> None:
    """A part of an Array is the same part for torch, also of a tensor that has an offset."""
    torch = pytest.importorskip("torch")
    library = array_libraries.Torch()
    tensor = torch.arange(20, dtype=torch.int32)[4:]
    part = asarray(tensor).split([3, 5, 8])[1]
    library.copy(part, asarray(torch.full((5,), 9, dtype=torch.int32)))
    assert tensor.tolist() == [*range(4, 7), *[9] * 5, *range(12, 20)]


def test_torch_is_not_asked_for_stream_0_as_an_external_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The legacy default stream is torch's default stream: of 0 torch makes another one."""
    torch = pytest.importorskip("torch")
    for name in ("default_stream", "ExternalStream"):
        monkeypatch.setattr(torch.cuda, name, lambda *given, name=name, **more: (name, given, more))
    library: Any = array_libraries.Torch()
    assert library._external(3, 0) == ("default_stream", (3,), {})
    assert library._external(3, 7) == ("ExternalStream", (7,), {"device": 3})


def test_torch_is_asked_for_a_streams_number_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the function that torch's own compiled programs ask, of the array's device."""
    torch = pytest.importorskip("torch")
    asked = {3: 0x77}.__getitem__
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", asked, raising=False)
    assert array_libraries.Torch().current_stream(3) == 0x77


def test_cupy_borrows_streams_without_destroying_them() -> None:
    """What makes a stream current for a while does not own it."""
    cupy = pytest.importorskip("cupy")
    borrowed = cupy.cuda.stream._BaseStream(7, 3)
    assert (borrowed.ptr, borrowed.device_id) == (7, 3)
    assert not hasattr(borrowed, "__del__")


def test_cupy_has_what_we_call() -> None:
    """cupy's runtime has every function that is used, with the arguments that we pass."""
    pytest.importorskip("cupy")
    from cupy.cuda import runtime

    expected = {
        "memcpyAsync": "(intptr_t dst, intptr_t src, size_t size, int kind, intptr_t stream)",
        "eventCreateWithFlags": "(unsigned int flags)",
        "eventRecord": "(intptr_t event, intptr_t stream)",
        "eventQuery": "(intptr_t event)",
        "eventDestroy": "(intptr_t event)",
        "streamWaitEvent": "(intptr_t stream, intptr_t event, unsigned int flags=0)",
        "streamIsCapturing": "(intptr_t stream)",
        "streamCreateWithFlags": "(unsigned int flags)",
        "streamCreateWithPriority": "(unsigned int flags, int priority)",
        "streamDestroy": "(intptr_t stream)",
        "getDevice": "()",
    }
    found = {name: getattr(runtime, name).__doc__ or "" for name in expected}
    assert [name for name in expected if f"{name}{expected[name]}" not in found[name]] == []
    assert (runtime.memcpyHostToDevice, runtime.memcpyDeviceToHost) == (1, 2)
    assert (runtime.streamNonBlocking, runtime.eventDisableTiming) == (
        array_libraries.NON_BLOCKING, array_libraries.NO_TIMING,
    )  # fmt: skip
