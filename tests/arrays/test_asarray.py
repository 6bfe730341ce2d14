"""asarray: the memory of arrays of every library, without a copy."""

from __future__ import annotations

import array
import ctypes
import gc
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cydist._native import asarray


def torch_tensor(x: np.ndarray) -> Any:
    torch = pytest.importorskip("torch")
    return torch.from_numpy(x)


def torch_leaf(x: np.ndarray) -> Any:
    return torch_tensor(x).requires_grad_(x.dtype.kind in "fc")


def torch_parameter(x: np.ndarray) -> Any:
    torch = pytest.importorskip("torch")
    return torch.nn.Parameter(torch_tensor(x), requires_grad=x.dtype.kind in "fc")


class Dlpack:
    """Any library's array that shows itself through DLPack alone."""

    def __init__(self, x: np.ndarray) -> None:
        self.x = x

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.x.__dlpack_device__()

    def __dlpack__(self, *, stream: Any = None, max_version: Any = None) -> Any:
        return self.x.__dlpack__(max_version=max_version)


class OldDlpack:
    """One from before DLPack had versions, and devices to ask for."""

    def __init__(self, x: np.ndarray) -> None:
        self.x = x

    def __dlpack__(self) -> Any:
        return self.x.__dlpack__()


class Interface:
    """One that shows itself through `__array_interface__`."""

    def __init__(self, x: np.ndarray) -> None:
        self.x = x

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {**self.x.__array_interface__, "strides": self.x.strides}


class FakeCuda:
    """Host memory that claims to be on a CUDA device."""

    def __init__(self, x: np.ndarray, **claims: Any) -> None:
        self.x = x
        self.claims = claims

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        return {**self.x.__array_interface__, **self.claims}

    def __dlpack_device__(self) -> tuple[int, int]:
        return (2, 3)


LIBRARIES: dict[str, Callable[[np.ndarray], Any]] = {
    "numpy": lambda x: x,
    "memoryview": memoryview,
    "torch": torch_tensor,
    "torch requires_grad": torch_leaf,
    "torch parameter": torch_parameter,
    "dlpack": Dlpack,
    "old dlpack": OldDlpack,
    "array interface": Interface,
}
LAYOUTS: dict[str, Callable[[np.ndarray], np.ndarray]] = {
    "contiguous": lambda x: x,
    "transposed": lambda x: x.T,
    "every other": lambda x: x[::2, 1::2],
    "reversed": lambda x: x[::-1],
    "0-d": lambda x: x[2, 3, ...],
    "five dimensions": lambda x: x.reshape(2, 2, 1, 2, 4).T,
    "empty": lambda x: x[:0],
}


@pytest.fixture(params=LIBRARIES.values(), ids=LIBRARIES.keys())
def export(request: pytest.FixtureRequest) -> Callable[[np.ndarray], Any]:
    """Makes an array of some library that shares memory with a numpy array."""
    return request.param


@pytest.fixture(
    params=[
        pytest.param((library, layout), id=f"{library}, {layout}")
        for library in LIBRARIES
        for layout in LAYOUTS
        if not (library.startswith("torch") and layout == "reversed")  # which torch cannot
    ]
)
def pair(request: pytest.FixtureRequest) -> tuple[Any, np.ndarray]:
    """An array of some library in some layout, and numpy's view of the same memory."""
    library, layout = request.param
    x = LAYOUTS[layout](np.arange(32, dtype="f4").reshape(4, 8))
    return LIBRARIES[library](x), x


def test_memory_is_shared(pair: tuple[Any, np.ndarray]) -> None:
    """Address, shape and strides are those of the exporter."""
    obj, x = pair
    found = asarray(obj)
    assert found.shape == x.shape
    if x.size:
        assert (found.address, found.strides) == (x.__array_interface__["data"][0], x.strides)


def test_elements_arrive(pair: tuple[Any, np.ndarray]) -> None:
    """The elements, in C order, are those of the exporter."""
    obj, x = pair
    assert bytes(memoryview(asarray(obj).dense())) == x.tobytes()


def test_dtype_and_sizes(pair: tuple[Any, np.ndarray]) -> None:
    """dtype, itemsize, size and nbytes follow the exporter; it is on the CPU, and writable."""
    obj, x = pair
    found = asarray(obj)
    assert (found.dtype_name, found.itemsize, found.size, found.nbytes) == (
        "float32",
        4,
        x.size,
        x.nbytes,
    )
    assert (found.ndim, found.device, found.writable) == (x.ndim, "cpu", True)


def test_owner_is_what_was_passed(export: Callable[[np.ndarray], Any]) -> None:
    """`owner` is the object itself, so that results are what the user passed."""
    obj = export(np.zeros(3, "f4"))
    assert asarray(obj).owner is obj


def test_array_keeps_the_memory_alive(export: Callable[[np.ndarray], Any]) -> None:
    """The Array alone keeps the exporter's memory; without it, it goes."""
    held = bytearray(b"\x01" * 64)
    found = asarray(export(np.frombuffer(held, "f4")))
    gc.collect()
    assert bytes(memoryview(found)) == b"\x01" * 64
    with pytest.raises(BufferError):
        held.clear()
    del found
    gc.collect()
    held.clear()


def test_no_leak(export: Callable[[np.ndarray], Any]) -> None:
    """Ten thousand conversions leave no reference and no memory behind."""
    obj = export(np.zeros((2, 3), "f4"))

    def convert() -> None:
        for _ in range(10_000):
            asarray(obj)

    convert()
    references = sys.getrefcount(obj)
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        convert()
        gc.collect()
        after = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert sys.getrefcount(obj) == references
    # The smallest object for each would show; other threads of the session take a little.
    assert after - before < 100_000


def test_an_array_is_itself() -> None:
    """asarray of an Array is that Array."""
    found = asarray(np.zeros(3))
    assert asarray(found) is found


SMALL = ["bfloat16", "float8_e4m3fn", "float8_e5m2"]  # numpy has none of them
INTEGERS = ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"]
FLOATS = ["float16", "bfloat16", "float32", "float64", "complex64", "complex128"]
CODES = ["other", "bool", *INTEGERS, *FLOATS, "float8_e4m3fn", "float8_e5m2"]  # as in kernels.h
NUMERIC = [name for name in CODES if name not in ("other", *SMALL)]


@pytest.mark.parametrize("name", NUMERIC)
def test_numeric_dtypes(export: Callable[[np.ndarray], Any], name: str) -> None:
    """Every numeric dtype has a code, and it is the same from every library."""
    x = np.zeros(3, name)
    found = asarray(export(x))
    assert (found.dtype, found.dtype_name) == (CODES.index(name), name)


@pytest.mark.parametrize("name", SMALL)
def test_ml_dtypes(name: str) -> None:
    """ml_dtypes' arrays, which have no buffer format, share memory and have codes."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    x = np.arange(6).astype(getattr(ml_dtypes, name))[::-2]
    found = asarray(x)
    assert (found.dtype, found.dtype_name, found.strides) == (CODES.index(name), name, x.strides)
    assert bytes(memoryview(found.dense())) == x.tobytes()


def test_ml_dtypes_without_a_code() -> None:
    """A rare small float is moved under ml_dtypes' name."""
    ml_dtypes = pytest.importorskip("ml_dtypes")
    found = asarray(np.zeros(3, ml_dtypes.float8_e8m0fnu))
    assert (found.dtype, found.dtype_name, found.nbytes) == (0, "float8_e8m0fnu", 3)


@pytest.mark.parametrize("name", SMALL)
def test_torch_small_floats(name: str) -> None:
    """torch's small floats have the same codes as ml_dtypes'."""
    torch = pytest.importorskip("torch")
    found = asarray(torch.zeros(3, dtype=getattr(torch, name)))
    assert (found.dtype, found.dtype_name) == (CODES.index(name), name)


@pytest.mark.parametrize("name", ["float8_e8m0fnu", "float4_e2m1fn_x2", "bits16"])
def test_torch_dtypes_without_a_code(name: str) -> None:
    """torch's other fixed-size dtypes are moved under torch's name."""
    torch = pytest.importorskip("torch")
    if not hasattr(torch, name):
        pytest.skip(f"no torch.{name}")
    tensor = torch.empty((3, 4), dtype=getattr(torch, name))[:, ::2]
    found = asarray(tensor)
    size = tensor.element_size()
    assert (found.dtype, found.dtype_name, found.strides) == (0, name, (4 * size, 2 * size))


MOVED = {
    ">f8": ">f8",
    ">i2": ">i2",
    "<M8[ns]": "<M8[ns]",
    "<m8[D]": "<m8[D]",
    "S3": "|S3",
    "U2": "<U2",
    "V5": "|V5",
    "g": np.dtype("g").str,
    "i4,f8": "[('f0', '<i4'), ('f1', '<f8')]",
}


@pytest.mark.parametrize(("dtype", "name"), MOVED.items(), ids=MOVED.keys())
def test_dtypes_that_are_only_moved(dtype: str, name: str) -> None:
    """Any fixed-size numpy dtype can be moved: it has no code, but numpy's text and a hash."""
    x = np.zeros((3, 4), dtype)[:, ::2]
    found = asarray(x)
    assert (found.dtype, found.dtype_name, found.itemsize) == (0, name, x.itemsize)
    assert found.dtype_hash != 0


def test_hash_is_the_same_everywhere() -> None:
    """The hash depends on the name alone, so ranks can compare it."""
    assert asarray(np.zeros(1, ">f8")).dtype_hash == 3390137655


def test_byte_order_of_single_bytes_does_not_matter() -> None:
    """A big-endian byte is a byte."""
    assert asarray((ctypes.c_int8.__ctype_be__ * 2)()).dtype_name == "int8"


BUFFERS = {
    "bytearray": (bytearray(6), "uint8", (6,)),
    "bytes": (b"abc", "uint8", (3,)),
    "array.array": (array.array("d", [1, 2]), "float64", (2,)),
    "array.array of long": (array.array("l", [1, 2]), "int64", (2,)),
    "ctypes": ((ctypes.c_int16 * 3 * 2)(), "int16", (2, 3)),
    "ctypes bool": ((ctypes.c_bool * 2)(), "bool", (2,)),
    "ctypes char": ((ctypes.c_char * 2)(), "uint8", (2,)),
    "ctypes scalar": (ctypes.c_double(1), "float64", ()),
    "ctypes big-endian": ((ctypes.c_int32.__ctype_be__ * 2)(), ">i", (2,)),
    "memoryview of chars": (memoryview(b"abcd").cast("c"), "uint8", (4,)),
    "memoryview reshaped": (memoryview(bytes(12)).cast("H", (2, 3)), "uint16", (2, 3)),
    "memoryview reversed": (memoryview(b"abcd")[::-2], "uint8", (2,)),
    "numpy scalar": (np.complex64(1), "complex64", ()),
}


@pytest.mark.parametrize(("obj", "name", "shape"), BUFFERS.values(), ids=BUFFERS.keys())
def test_buffers(obj: Any, name: str, shape: tuple[int, ...]) -> None:
    """Whatever has the buffer protocol shows its dtype, shape and elements."""
    found = asarray(obj)
    assert (found.dtype_name, found.shape) == (name, shape)
    assert bytes(memoryview(found.dense())) == memoryview(obj).tobytes()


def frozen(x: np.ndarray) -> np.ndarray:
    x.flags.writeable = False
    return x


READ_ONLY = {
    "numpy": frozen(np.zeros(3)),
    "bytes": b"abc",
    "memoryview": memoryview(bytearray(3)).toreadonly(),
    "dlpack": Dlpack(frozen(np.zeros(3))),
    "interface": Interface(frozen(np.zeros(3))),
    "cuda": FakeCuda(frozen(np.zeros(3))),
    "ml_dtypes or datetime": frozen(np.zeros(3, "M8[s]")),
}


@pytest.mark.parametrize("obj", READ_ONLY.values(), ids=READ_ONLY.keys())
def test_read_only(obj: Any) -> None:
    """Memory that the exporter calls read-only is not writable."""
    assert not asarray(obj).writable


# CUDA, by what an array says of itself: its memory is never touched.


def test_cuda_array() -> None:
    """A CUDA array keeps its device, pointer and strides."""
    x = np.zeros((4, 6), "f2")[:, ::2]
    found = asarray(FakeCuda(x))
    assert (found.device, found.device_index, found.dtype_name) == ("cuda", 3, "float16")
    assert (found.address, found.shape, found.strides) == (
        x.__array_interface__["data"][0],
        (4, 3),
        (12, 4),
    )


def test_contiguous_cuda_array_has_no_strides() -> None:
    """Strides of None mean C order."""
    found = asarray(FakeCuda(np.zeros((2, 3), "f4"), strides=None))
    assert (found.strides, found.contiguous) == ((12, 4), True)


@pytest.mark.parametrize(
    "touch", [memoryview, lambda a: a.dense(), lambda a: a.copy_from(asarray(np.zeros((2, 2))))]
)
def test_device_memory_is_not_touched(touch: Callable[[Any], Any]) -> None:
    """What would read or write device memory on the CPU raises, and says where it is."""
    with pytest.raises((BufferError, ValueError), match="cuda:3"):
        touch(asarray(FakeCuda(np.zeros((2, 4))[:, ::2])))


# What is refused.


class Broken:
    def __dlpack__(self, **options: Any) -> Any:
        raise BufferError("on strike")


REFUSED = {
    "list": ([1.0], "not list; put the values into an array"),
    "float": (1.0, "not float; put the values into an array"),
    "None": (None, "expected an array .* not NoneType"),
    "str": ("abc", "not str"),
    "objects": (np.array([None]), "broadcast_object_list"),
    "structure with objects": (np.zeros(1, "i4,O"), "broadcast_object_list"),
    "ctypes objects": ((ctypes.py_object * 1)(), "broadcast_object_list"),
    "no bytes": (np.zeros(3, "V0"), "have no bytes"),
    "masked": (np.ma.array([1.0, 2.0], mask=[0, 1]), "masked array is more than its memory"),
    "masked cuda": (FakeCuda(np.zeros(3), mask=np.zeros(3)), "masked"),
    "unwilling dlpack": (Broken(), "Broken does not show its memory: on strike"),
}


@pytest.mark.parametrize(("obj", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_refused(obj: Any, message: str) -> None:
    """What has no memory to send: TypeError that says why, or what to do."""
    with pytest.raises(TypeError, match=message):
        asarray(obj)


def lazy(name: str) -> Any:
    torch = pytest.importorskip("torch")
    return {
        "conjugated": lambda: torch.ones(3, dtype=torch.complex64).conj(),
        "negated": lambda: torch.ones(3, dtype=torch.complex64).conj().imag,
    }[name]()


@pytest.mark.parametrize("name", ["conjugated", "negated"])
def test_torch_lazy_views(name: str) -> None:
    """Memory that does not hold the values shown is refused, never sent as it is."""
    with pytest.raises(ValueError, match=f"lazily {name} tensor: pass tensor.resolve_"):
        asarray(lazy(name))


TORCH_REFUSED = {
    "sparse": (lambda torch: torch.ones(3).to_sparse(), "sparse_coo tensor has no plain layout"),
    "zeros without memory": (lambda torch: torch._efficientzerotensor((3,)), "shows no memory"),
    "meta": (lambda torch: torch.ones(3, device="meta"), "device 'meta'"),
    "quantized": (
        lambda torch: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.quint8),
        "quantized",
    ),
}


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize(("make", "message"), TORCH_REFUSED.values(), ids=TORCH_REFUSED.keys())
def test_torch_refused(make: Callable[[Any], Any], message: str) -> None:
    """Tensors that are more, or less, than plain memory: TypeError."""
    tensor = make(pytest.importorskip("torch"))
    with pytest.raises(TypeError, match=message):
        asarray(tensor)


def test_torch_transforms() -> None:
    """Inside vmap a tensor has no memory of its own: TypeError."""
    torch = pytest.importorskip("torch")
    with pytest.raises(TypeError, match="shows no memory"):
        torch.vmap(asarray)(torch.zeros(2, 3))


OLD_TORCH = """
import torch
del torch.Tensor.__dlpack_c_exchange_api__
from cydist._native import asarray
for tensor in (
    torch.zeros(3, 4, requires_grad=True), torch.zeros(4, 6)[:, ::2].t(), torch.tensor(1.0),
    torch.zeros(0, 3), torch.zeros(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.bool),
    torch.zeros(2, dtype=torch.float8_e4m3fn), torch.zeros(3).expand(2, 3),
    torch.zeros(2, dtype=torch.complex128), torch.zeros(9)[4:],
):
    found = asarray(tensor)
    strides = tuple(n * tensor.element_size() for n in tensor.stride())
    assert found.address == tensor.data_ptr()
    assert (found.shape, found.strides) == (tuple(tensor.shape), strides)
    assert "torch." + found.dtype_name == str(tensor.dtype) and found.dtype != 0
    assert found.writable and found.owner is tensor
try:
    asarray(torch.zeros(2, dtype=torch.complex64).conj())
except ValueError as error:
    print(error)
"""


def test_torch_without_the_c_interface() -> None:
    """A torch older than DLPack's C interface is read by its attributes."""
    torch = pytest.importorskip("torch")
    if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
        pytest.skip("this torch is an old one")
    run = subprocess.run(
        [sys.executable, "-c", OLD_TORCH], capture_output=True, text=True, timeout=120
    )
    assert (run.stdout, run.stderr) == (
        "a lazily conjugated tensor: pass tensor.resolve_conj()\n",
        "",
    )


class Column:
    """A table's column: numpy sees its memory, nothing else does."""

    def __init__(self, values: np.ndarray, copies: bool = False) -> None:
        self.values, self.copies = values, copies

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if self.copies and copy is False:
            raise RuntimeError("copy not allowed")
        return self.values.copy() if copy or self.copies else self.values

    def to_numpy(self) -> np.ndarray:
        return self.values


class Lazy(Column):
    def __dask_graph__(self) -> dict[str, Any]:
        return {"rows": self.values}

    to_numpy = None
    compute = Column.to_numpy


def test_what_numpy_sees_without_a_copy_can_be_read() -> None:
    """An object whose memory only numpy sees is taken, not for writing, and kept alive."""
    column = Column(np.arange(3.0))
    array = asarray(column)
    assert (array.address, array.dtype_name) == (column.values.ctypes.data, "float64")
    assert array.owner is column
    assert not array.writable


@pytest.mark.parametrize(
    ("column", "remedy"),
    [
        pytest.param(
            Column(np.zeros(1), copies=True), r"only a copy; pass its .to_numpy\(\)", id="copy"
        ),
        pytest.param(Lazy(np.zeros(1)), r"not Lazy; pass its .compute\(\)", id="lazy"),
    ],
)
def test_objects_without_memory_say_which_method_gives_an_array(
    column: Column, remedy: str
) -> None:
    """Memory that numpy would have to make is not taken; the error names the method to call."""
    with pytest.raises(TypeError, match=remedy):
        asarray(column)
