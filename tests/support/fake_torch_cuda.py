"""torch's tensors on the GPU that there is not (fake_cuda.py): torch.cuda's own classes over its
streams. Tensors that are made on "cuda" lie in its memory; what torch computes it computes at
once, when its current stream has come so far, and copies come late."""

from __future__ import annotations

import ctypes
import functools
import importlib
import os
import re
import threading
import weakref
from pathlib import Path
from typing import Any

import fake_cuda
import numpy as np

NAME = b"dlpack_exchange_api"
COMPUTED = (
    "__add__", "__mul__", "__matmul__", "__iadd__", "__imul__", "__setitem__", "__eq__",
    "contiguous", "clone", "min", "max", "sum", "item", "tolist",
)  # fmt: skip
_here = threading.local()  # the current stream


def shown(path: Path) -> Any:
    """The library that says of tensors where they are: torch's own interface goes by it from now
    on. Before cydist looks at any tensor."""
    library: Any = ctypes.CDLL(str(path))
    library.tensors_table.restype = ctypes.c_void_p
    read, make = ctypes.pythonapi.PyCapsule_GetPointer, ctypes.pythonapi.PyCapsule_New
    read.restype, read.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    make.restype = ctypes.py_object
    make.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    kind: Any = importlib.import_module("torch").Tensor
    real = ctypes.c_void_p(read(kind.__dlpack_c_exchange_api__, NAME))
    kind.__dlpack_c_exchange_api__ = make(library.tensors_table(real), NAME, None)
    return library


def current() -> int:
    """The number of torch's current stream."""
    return int(getattr(_here, "stream", 0))


class StreamBase:
    """torch._C._CudaStreamBase. Numbers of streams are their identities, as for external ones."""

    def __new__(
        cls, priority: int = 0, stream_id: int = 0, device_index: int = 0, device_type: int = 0,
        stream_ptr: int = 0,
    ) -> Any:  # fmt: skip
        made = object.__new__(cls)
        assert priority <= 0
        number = stream_id if device_type else stream_ptr or _runtime().streamCreateWithFlags(1)
        made.cuda_stream = made.stream_id = number
        made.device_index, made.device_type = device_index, 1
        made.device = importlib.import_module("torch").device("cuda", device_index)
        return made

    def query(self) -> bool:
        return bool(_runtime().streamQuery(self.cuda_stream) == 0)

    def synchronize(self) -> None:
        _runtime().streamSynchronize(self.cuda_stream)

    cuda_stream: int


class EventBase:
    """torch._C._CudaEventBase, which makes its event when it is recorded."""

    def __new__(
        cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False,
        external: bool = False,
    ) -> Any:  # fmt: skip
        made = object.__new__(cls)
        made.cuda_event = 0
        return made

    def record(self, stream: Any) -> None:
        self.cuda_event = self.cuda_event or _runtime().eventCreateWithFlags(2)
        _runtime().eventRecord(self.cuda_event, stream.cuda_stream)

    def wait(self, stream: Any) -> None:
        if self.cuda_event:
            _runtime().streamWaitEvent(stream.cuda_stream, self.cuda_event)

    def query(self) -> bool:
        return not self.cuda_event or _runtime().eventQuery(self.cuda_event) == 0

    def synchronize(self) -> None:
        if self.cuda_event:
            _runtime().eventSynchronize(self.cuda_event)

    cuda_event: int


def _runtime() -> Any:
    return importlib.import_module("cupy_backends.cuda.api.runtime")


def install(folder: Path) -> Any:
    """torch works on the GPU from now on. After fake_cuda.install."""
    torch: Any = importlib.import_module("torch")
    streams: Any = importlib.import_module("torch.cuda.streams")
    streams.Stream.__bases__, streams.Event.__bases__ = (StreamBase,), (EventBase,)
    in_c = {
        "getDeviceCount": lambda: 1, "getDevice": lambda: 0, "setDevice": _only,
        "exchangeDevice": _only, "maybeExchangeDevice": _only,
        "getCurrentStream": lambda device: (current(), device, 1),
        "getDefaultStream": lambda device: (0, device, 1),
        "setStream": _set_stream, "getCurrentRawStream": lambda device: current() + _only(device),
        "synchronize": lambda: _runtime().deviceSynchronize(),
        "isCurrentStreamCapturing": lambda: bool(_runtime().streamIsCapturing(current())),
    }  # fmt: skip
    for name, function in in_c.items():
        setattr(torch._C, f"_cuda_{name}", function)
    for name in ("exchangeDevice", "maybeExchangeDevice"):  # which torch.cuda has looked up by now
        held = re.sub("([A-Z])", r"_\1", f"_{name}").lower()
        assert hasattr(torch.cuda, held)
        setattr(torch.cuda, held, _only)
    torch.cuda.device_count = lambda: 1
    torch.cuda.get_device_capability = lambda device=None: (9, 0)
    torch.cuda.get_device_properties = lambda device=None: _Properties()
    torch.cuda.graphs._cuda_isCurrentStreamCapturing = in_c["isCurrentStreamCapturing"]
    torch.cuda._initialized = torch._C._has_cuda = True
    torch.cuda.default_generators = (torch.Generator(),)
    library = shown(folder / fake_cuda.TENSORS)
    library.tensors_known(ctypes.cast(fake_cuda.cuda.host_is_device, ctypes.c_void_p))
    _Tensors(torch).install()
    if os.environ.get("STANDIN_TORCH_NCCL"):
        _instead_of_nccl(importlib.import_module("torch.distributed"))
    return library


class _Properties:
    """Of the GPU."""

    name, pci_domain_id, pci_bus_id, pci_device_id = "stand-in", 0, 0, 0


def _instead_of_nccl(c10d: Any) -> None:
    """torch's own groups are gloo's, which takes the memory for the CPU's, as it is."""
    begin = c10d.init_process_group
    c10d.init_process_group = lambda backend, **options: begin("gloo", **options)


def _only(device: int) -> int:
    assert device in (0, -1), device
    return 0


def _set_stream(stream_id: int, device_index: int, device_type: int) -> None:
    _only(device_index)
    _here.stream = stream_id


class _Tensors:
    """What torch does with tensors on the GPU."""

    def __init__(self, torch: Any) -> None:
        self.torch = torch

    def install(self) -> None:
        torch = self.torch
        for name in ("empty", "ones", "zeros", "tensor", "as_tensor"):
            setattr(torch, name, self._made(getattr(torch, name)))
        for name in ("bitwise_and", "bitwise_or", "bitwise_xor", "mul", "div"):
            setattr(torch, name, self._synchronized(getattr(torch, name)))
        torch.Tensor.cuda = lambda tensor, *given: self.on_device(tensor)
        torch.Tensor.to = self._to(torch.Tensor.to)
        torch.Tensor.copy_ = self._copy(torch.Tensor.copy_)
        torch.Tensor.cpu = self._synchronized(torch.Tensor.clone)
        for name in COMPUTED:
            setattr(torch.Tensor, name, self._synchronized(getattr(torch.Tensor, name)))

    def _synchronized(self, function: Any) -> Any:
        @functools.wraps(function)
        def later(tensor: Any, *given: Any, **options: Any) -> Any:
            if isinstance(tensor, self.torch.Tensor) and self.is_there(tensor):
                _runtime().streamSynchronize(current())
            return function(tensor, *given, **options)

        return later

    def is_there(self, tensor: Any) -> bool:
        address = ctypes.c_void_p(tensor.data_ptr())
        return bool(fake_cuda.cuda.host_is_device(address))

    def on_device(self, tensor: Any) -> Any:
        """A copy there, written by the current stream; its memory is used again behind that."""
        if not tensor.numel():
            return tensor
        stream = current()
        nbytes = tensor.numel() * tensor.element_size()
        address = _runtime().malloc(nbytes)
        memory = np.frombuffer((ctypes.c_ubyte * nbytes).from_address(address), "u1")[:]

        def release() -> None:
            block = ctypes.c_void_p(address)
            fake_cuda.launch(
                stream, lambda: fake_cuda.cuda.host_release(block, ctypes.c_size_t(nbytes))
            )

        weakref.finalize(memory, release)
        made = self.torch.from_numpy(memory).view(tensor.dtype).reshape(tensor.shape)
        return made.copy_(tensor)

    def _made(self, function: Any) -> Any:
        @functools.wraps(function)
        def make(*given: Any, device: Any = None, pin_memory: bool = False, **options: Any) -> Any:
            if given and (shown := getattr(given[0], "__cuda_array_interface__", None)):
                assert device is not None
                place = (ctypes.c_ubyte * shown["shape"][0]).from_address(shown["data"][0])
                return self.torch.from_numpy(np.frombuffer(place, "u1"))
            made = function(*given, **options)
            there = device is not None and str(device).startswith("cuda")
            return self.on_device(made) if there and not self.is_there(made) else made

        return make

    def _to(self, function: Any) -> Any:
        @functools.wraps(function)
        def to(tensor: Any, *given: Any, **options: Any) -> Any:
            if given and str(given[0]).startswith("cuda"):
                return self.on_device(tensor)
            return synchronized(tensor, *given, **options)

        synchronized = self._synchronized(function)
        return to

    def _copy(self, function: Any) -> Any:
        @functools.wraps(function)
        def copy_(into: Any, source: Any, non_blocking: bool = False) -> Any:
            if not (self.is_there(into) or self.is_there(source)):
                return function(into, source)
            if not non_blocking and not self.is_there(source):
                source = source.detach().clone()  # the caller may write over it
            target, given = into.detach(), source.detach()
            fake_cuda.launch(current(), lambda: function(target, given))
            if not non_blocking and not self.is_there(into):
                _runtime().streamSynchronize(current())
            return into

        return copy_
