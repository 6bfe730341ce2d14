"""cupy as it is, on a machine without a GPU: over a CUDA in host memory
(tests/backends/nccl/fake_cuda.c), with numpy's functions in place of its kernels, and the stand-in
for NCCL on the same streams.

What cydist and the programs of scripts/test-gpu ask of cupy is cupy's own but for these; each of
its runtime's functions is called with the arguments that the installed cupy names.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import inspect
import re
import subprocess
import sys
import sysconfig
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

FOLDER = Path(__file__).parents[1] / "backends/nccl"
FLAGS = ["-std=gnu11", "-O1", "-Wall", "-Wextra", "-Werror", "-fPIC", "-shared", "-fexceptions"]
CUDA, NCCL, TENSORS = "libcuda.so.1", "libnccl.so.2", "tensors.so"
C_TYPES = {
    "intptr_t": ctypes.c_ssize_t, "size_t": ctypes.c_size_t, "int": ctypes.c_int,
    "unsigned int": ctypes.c_uint, "bool": ctypes.c_bool, "PyObject *": ctypes.py_object,
}  # fmt: skip
FUNCTIONS = (
    "add", "multiply", "divide", "bitwise_and", "bitwise_or", "bitwise_xor", "exp", "log", "mean",
    "where",
)  # fmt: skip

cuda: Any = None  # the library, once it is installed
_kept: list[Any] = []  # what C goes on using


def built(name: str, source: str, folder: Path) -> Path:
    """One of the stand-ins."""
    path = folder / name
    include = sysconfig.get_path("include")
    command = ["gcc", *FLAGS, f"-I{include}", f"-Wl,-soname,{name}", "-o", str(path)]
    libraries = ["-lm", "-lpthread", "-lrt"]
    subprocess.run([*command, str(FOLDER / source), *libraries], check=True, timeout=60)
    return path


def build(folder: Path) -> None:
    """All of them."""
    for name, source in ((CUDA, "fake_cuda.c"), (NCCL, "fake_nccl.c"), (TENSORS, "fake_tensors.c")):
        built(name, source, folder)


def install(folder: Path) -> Any:
    """Put the stand-ins that were built into `folder` below cupy, which nobody has imported;
    cupy."""
    global cuda
    ctypes.CDLL(str(folder / NCCL), mode=ctypes.RTLD_GLOBAL)
    cuda = ctypes.PyDLL(str(folder / CUDA), mode=ctypes.RTLD_GLOBAL)
    nccl = ctypes.CDLL(NCCL)
    runtime = importlib.import_module("cupy_backends.cuda.api.runtime")
    cuda.host_begin(ctypes.c_void_p(_pointer(runtime, "check_status")))
    for name in tuple(runtime.__pyx_capi__):
        if hasattr(cuda, f"host_{name}"):
            _replace(runtime, name)
    for name in ("standin_run", "standin_again"):
        _kept.append(ctypes.cast(getattr(nccl, name), ctypes.c_void_p))
    cuda.host_use_nccl(*_kept[-2:])
    nccl.standin_use_streams(ctypes.cast(cuda.host_nccl, ctypes.c_void_p))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that there is no CUDA
        cupy: Any = importlib.import_module("cupy")
    cupy.cuda.is_available = lambda: True
    _kernels(cupy)
    return cupy


def _name(runtime: Any, name: str) -> bytes:
    read = ctypes.pythonapi.PyCapsule_GetName
    read.argtypes, read.restype = [ctypes.py_object], ctypes.c_char_p
    found: bytes = read(runtime.__pyx_capi__[name])
    return found


def _pointer(runtime: Any, name: str) -> int:
    read = ctypes.pythonapi.PyCapsule_GetPointer
    read.argtypes, read.restype = [ctypes.py_object, ctypes.c_char_p], ctypes.c_void_p
    found: int = read(runtime.__pyx_capi__[name], _name(runtime, name))
    return found


def _replace(runtime: Any, name: str) -> None:
    """One of the runtime's functions, for cupy's modules and for Python."""
    function = getattr(cuda, f"host_{name}")
    signature = ctypes.create_string_buffer(_name(runtime, name))
    _kept.append(signature)
    new = ctypes.pythonapi.PyCapsule_New
    new.argtypes, new.restype = [ctypes.c_void_p] * 3, ctypes.py_object
    runtime.__pyx_capi__[name] = new(
        ctypes.cast(function, ctypes.c_void_p), ctypes.addressof(signature), None
    )
    if hasattr(runtime, name):
        setattr(runtime, name, _for_python(getattr(runtime, name), function, signature.value))


def _for_python(real: Any, function: Any, c_signature: bytes) -> Callable[..., Any]:
    """The function, which takes what the real one does."""
    found = re.fullmatch(r"(.*?) ?\((.*)\)", c_signature.decode())
    assert found is not None
    kinds = [C_TYPES[each] for each in found[2].split(", ") if each in C_TYPES]
    function.restype = C_TYPES[found[1]]
    function.argtypes = [*kinds, ctypes.c_int, ctypes.c_void_p]  # no dispatch, no more options
    parameters = re.search(r"\((.*?)\)", real.__doc__ or "")
    assert parameters is not None
    named = [each.split()[-1].split("=") for each in parameters[1].split(", ") if each]
    kind, none = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.empty
    taken = inspect.Signature(
        [inspect.Parameter(n, kind, default=None if more else none) for n, *more in named]
    )

    def call(*given: Any, **options: Any) -> Any:
        bound = taken.bind(*given, **options)
        optional = None
        arguments = [bound.arguments[each] for each in list(taken.parameters)[: len(kinds)]]
        rest = [bound.arguments.get(each) for each in list(taken.parameters)[len(kinds) :]]
        if rest and rest[0] is not None:  # one number more, as cupy's C passes it
            optional = (ctypes.c_int * 2)(1, rest[0])
        return function(*arguments, 0, optional)

    return call


# Kernels.


def view(array: Any) -> np.ndarray:
    """An array's memory, as numpy sees it."""
    if not array.size:
        return np.empty(array.shape, array.dtype)
    reach = [(n - 1) * stride for n, stride in zip(array.shape, array.strides, strict=True)]
    low, high = (sum(limit(0, each) for each in reach) for limit in (min, max))
    memory = (ctypes.c_ubyte * (high - low + array.itemsize)).from_address(array.data.ptr + low)
    return np.ndarray(array.shape, array.dtype, memory, -low, array.strides)


def launch(stream: int, kernel: Callable[[], object]) -> None:
    """Something that a stream has to do."""
    cuda.host_launch(ctypes.c_void_p(stream), ctypes.py_object(kernel))


def _kernels(cupy: Any) -> None:
    """numpy's functions for cupy's arrays, on the current stream. They keep no array alive, as
    kernels do not."""
    kind = cupy.ndarray

    def enqueue(into: Any, function: Callable[..., Any], given: tuple[Any, ...]) -> Any:
        target = view(into)
        read = [view(each) if isinstance(each, kind) else each for each in given]
        launch(
            cupy.cuda.get_current_stream().ptr,
            lambda: np.copyto(target, function(*read), casting="unsafe"),
        )
        return into

    def made(function: Callable[..., Any]) -> Callable[..., Any]:
        def kernel(*given: Any, out: Any = None, dtype: Any = None) -> Any:
            chosen = functions(function, dtype)
            if out is None:
                like = [np.ones(each.shape, each.dtype) if isinstance(each, kind) else each
                        for each in given]  # fmt: skip
                with np.errstate(all="ignore"):
                    result = np.asarray(chosen(*like))
                out = cupy.empty(result.shape, result.dtype)
            return enqueue(out, chosen, given)

        return kernel

    def functions(function: Callable[..., Any], dtype: Any) -> Callable[..., Any]:
        return function if dtype is None else functools.partial(function, dtype=dtype)

    def backwards(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda array, other: function(other, array)

    def in_place(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda array, other: function(array, other, out=array)

    operators = {
        "add": "add", "sub": "subtract", "mul": "multiply", "truediv": "divide", "matmul": "matmul",
    }  # fmt: skip
    for short, name in operators.items():
        function = made(getattr(np, name))
        setattr(kind, f"__{short}__", function)
        setattr(kind, f"__r{short}__", backwards(function))
        setattr(kind, f"__i{short}__", in_place(function))
    for name in FUNCTIONS:
        setattr(cupy, name, made(getattr(np, name)))
    for name, function in {"neg": np.negative, "gt": np.greater}.items():
        setattr(kind, f"__{name}__", made(function))
    for name in ("min", "max", "sum"):
        setattr(kind, name, made(getattr(np, name)))

    def copyto(dst: Any, src: Any, casting: str = "same_kind") -> None:
        if isinstance(src, kind) and not np.can_cast(src.dtype, dst.dtype, casting):  # type: ignore[arg-type]
            raise TypeError(f"Cannot cast {src.dtype} to {dst.dtype} in {casting} casting mode")
        enqueue(dst, np.asarray, (src,))

    def fill(array: Any, value: Any) -> None:
        enqueue(array, np.asarray, (value,))

    def copy(array: Any, order: str = "C") -> Any:
        return enqueue(cupy.empty(array.shape, array.dtype), np.asarray, (array,))

    def set_item(array: Any, key: Any, value: Any) -> None:
        enqueue(array[key], np.asarray, (value,))

    def get(array: Any, *given: Any, **options: Any) -> np.ndarray:
        found: np.ndarray = real_get(
            array if array.flags.c_contiguous else array.copy(), *given, **options
        )
        return found

    def as_type(array: Any, dtype: Any) -> Any:
        return enqueue(cupy.empty(array.shape, dtype), np.asarray, (array,))

    class RandomState(np.random.RandomState):
        """Numbers of numpy's, on the GPU."""

        def standard_normal(self, *given: Any) -> Any:
            return cupy.asarray(super().standard_normal(*given))

    def random(size: Any, dtype: Any = float) -> Any:
        return cupy.asarray(np.random.default_rng().random(size, dtype))

    real_get = kind.get
    cupy.copyto, cupy.random.random, cupy.random.RandomState = copyto, random, RandomState
    kind.fill, kind.copy, kind.__setitem__, kind.get = fill, copy, set_item, get
    kind.astype = as_type


if __name__ == "__main__":
    build(Path(sys.argv[1]))
