"""GPU memory: its library, that library's stream, and copies to and from the device.

`ArrayLibrary` is all that cydist needs of a GPU, implemented for cupy and for torch. Streams are
CUDA's integers, so each library understands the other's. No library is imported before the program
passes a device array.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import warnings
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

from cydist import _native

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cydist._native import Array
    from cydist.devices.cuda_driver import Relaxed

_NOTHING = nullcontext()
NON_BLOCKING = 1  # cudaStreamNonBlocking: the legacy default stream does not wait for it
NO_TIMING = 2  # cudaEventDisableTiming
# The first version that records events without the GIL; the device may make that block. NCCL's
# unique ids are bytes from 14.0 on.
CUPY_MINIMUM = (14, 1)
NCCL_MINIMUM = 21900  # NCCL 2.19: the first whose abort ends calls of other threads reliably


class ArrayLibrary(ABC):
    """The operations that cydist needs of a library for arrays on a device.

    `device` is a device's number. Methods that enqueue return at once. CUDA's errors are raised as
    the library raises them.
    """

    name: str
    keeps_captured_memory = False  # what is allocated in a capture belongs to the graph
    arrays_like_cupy = False  # the fast path may read its arrays by attributes as cupy has

    @abstractmethod
    def owns(self, owner: object) -> bool:
        """Return whether this is an array of the library."""

    def computes_bfloat16(self) -> bool:
        """Return whether the library's functions take arrays of bfloat16. One that needs another
        package for them looks for that."""
        return True

    @abstractmethod
    def current_stream(self, device: int) -> int:
        """Return this thread's current stream of the device."""

    @abstractmethod
    def on_stream(self, device: int, stream: int) -> AbstractContextManager[object]:
        """Make device and stream the current ones of this thread inside the context."""

    @abstractmethod
    def is_capturing(self, device: int) -> bool:
        """Return whether the current stream is being captured into a CUDA graph."""

    @abstractmethod
    def allocate(self, device: int, nbytes: int) -> Array:
        """Allocate `nbytes` of the device's memory, for the current stream."""

    @abstractmethod
    def copy(self, into: Array, source: Array) -> None:
        """Enqueue a copy within a device, on the current stream, between arrays of any strides.

        Both have the same itemsize and number of elements, and one of them is contiguous.
        """

    # Between the host and a device, on cydist's own streams.

    def adopt(self, device: int) -> None:  # noqa: B027 (torch needs nothing)
        """Prepare the calling thread, one of cydist's own, for work on this device from now on."""

    @abstractmethod
    def pinned(self, nbytes: int) -> Array:
        """Allocate `nbytes` of pinned host memory, which devices access by themselves."""

    @abstractmethod
    def stream(self, device: int) -> int:
        """Return a new stream that lasts as long as the process and does not wait for default
        streams."""

    @abstractmethod
    def event(self, device: int) -> Any:
        """Return a new event, not recorded."""

    @abstractmethod
    def record(self, event: Any, device: int, stream: int) -> None:
        """Record the event: it is over when all present work of the stream is."""

    @abstractmethod
    def wait(self, device: int, stream: int, event: Any) -> None:
        """Make later work on the stream wait until the event is over."""

    @abstractmethod
    def is_over(self, event: Any) -> bool:
        """Return whether the event is over, without blocking. Raises the device's error."""

    @abstractmethod
    def move(self, into: Array, source: Array, device: int, stream: int) -> None:
        """Enqueue a copy between contiguous arrays of as many bytes: one pinned, one there."""


def library_of(array: Array) -> ArrayLibrary:
    """Return the library of a device array: the one that made it, or one that understands it.

    Raises ValueError when there is none.
    """
    global _last
    owner = array.owner
    if _last is not None and _last is _libraries.get(_last.name) and _last.owns(owner):
        return _last
    for library in _loaded():
        if library.owns(owner):
            _last = library
            return library
    return _copying_library(array)


def known_library_of(array: Array) -> ArrayLibrary | None:
    """Return the library that made a device array; None: one that cydist does not know."""
    library = library_of(array)
    return library if library.owns(array.owner) else None


def copying_library_of(array: Array) -> ArrayLibrary:
    """Return the library that copies between the host and an array's device: cupy, or torch without
    cupy. Raises ValueError if there is neither."""
    library = library_of(array)
    return library if library.name in _others else _copying_library(array)


def _copying_library(array: Array) -> ArrayLibrary:
    for name in _KINDS:
        library = _library(name)
        if library is not None:
            return library
    raise ValueError(
        f"the memory is on {array.device}:{array.device_index}, and neither cupy nor torch with "
        "CUDA is here to copy it: install cupy, as in `pip install cupy-cuda13x`"
    )


def stream_of(array: Array) -> int:
    """Return the stream after which a device array may be read or written now."""
    return stream_and_capture(array)[0]


def stream_and_capture(array: Array) -> tuple[int, bool]:
    """Return the stream after which a device array may be read or written now, and whether the
    array's library orders its memory by this stream."""
    library = library_of(array)
    own = library.owns(array.owner)
    if not own:
        interface = getattr(array.owner, "__cuda_array_interface__", None) or {}
        stream: int | None = interface.get("stream")
        if stream is not None:
            return stream, False
    return library.current_stream(array.device_index), own


def current_streams(array: Array) -> list[int]:
    """Return the streams after which the array may be read or written now: that of its
    own library, and those of the others that this process works with."""
    index = array.device_index
    streams = [stream_of(array), *(library.current_stream(index) for library in _loaded())]
    return list(dict.fromkeys(streams))


@contextmanager
def on_stream(device: int, stream: int) -> Iterator[None]:
    """Make device and stream the current ones of this thread, for every library, inside the
    context."""
    with ExitStack() as stack:
        for library in _loaded():
            stack.enter_context(library.on_stream(device, stream))
        yield


def is_capturing(device: int) -> bool:
    """Return whether any library's current stream records a CUDA graph."""
    return any(library.is_capturing(device) for library in _loaded())


def allocate(nbytes: int, like: Array) -> Array:
    """Allocate `nbytes` on the device of an array, with its library."""
    library, device = library_of(like), like.device_index
    made = library.allocate(device, max(nbytes, 1))
    if not library.keeps_captured_memory and library.is_capturing(device):
        _captured.__dict__.setdefault("memory", []).append(made)
    return made


def take_captured_memory() -> list[Array]:
    """Return what this thread has allocated for the CUDA graph that is being captured. The graph
    uses it whenever it runs, so the caller keeps it."""
    found: list[Array] = _captured.__dict__.pop("memory", [])
    return found


def copy(into: Array, source: Array) -> None:
    """Enqueue a copy within a device on the current stream of the library of `into`."""
    library = library_of(into)
    with library.on_stream(into.device_index, library.current_stream(into.device_index)):
        library.copy(into, source)


# cupy.


class _Event:
    """An event of CUDA's runtime, destroyed with this object."""

    def __init__(self, runtime: Any) -> None:
        self._destroy = runtime.eventDestroy
        self.handle: int = runtime.eventCreateWithFlags(NO_TIMING)
        self._pid = os.getpid()

    def __del__(self) -> None:
        # A forked child has no CUDA.
        if not sys.is_finalizing() and os.getpid() == self._pid:
            self._destroy(self.handle)


class Cupy(ArrayLibrary):
    """cupy, which works on addresses, so it copies arrays of any library."""

    name = "cupy"
    arrays_like_cupy = True

    def __init__(self) -> None:
        self._cupy: Any = importlib.import_module("cupy")
        self._runtime: Any = self._cupy.cuda.runtime
        from cydist.devices import cuda_driver  # its ctypes would cost jobs without GPUs time

        found = cuda_driver.load()
        self._not_ready = cuda_driver.NOT_READY
        self._query: Any = self._runtime.eventQuery if found is None else found.query
        self._relaxed = cuda_driver.relaxed()

    def owns(self, owner: object) -> bool:
        return isinstance(owner, self._cupy.ndarray)

    def computes_bfloat16(self) -> bool:
        try:
            importlib.import_module("ml_dtypes")  # gives numpy and cupy a dtype of that name
        except ImportError:
            return False
        return True

    def current_stream(self, device: int) -> int:
        stream: int = self._cupy.cuda.get_current_stream(device).ptr
        return stream

    @contextmanager
    def on_stream(self, device: int, stream: int) -> Iterator[None]:
        # cupy's Stream.from_external finally destroys the stream, which it does not own.
        with self._on(device), self._cupy.cuda.stream._BaseStream(stream, device):
            yield

    def _on(self, device: int) -> AbstractContextManager[object]:
        """Make the device current if it is not; setting costs more than asking."""
        if self._runtime.getDevice() == device:
            return _NOTHING
        chosen: AbstractContextManager[object] = self._cupy.cuda.Device(device)
        return chosen

    def is_capturing(self, device: int) -> bool:
        stream = self.current_stream(device)
        # CUDA refuses this query for the legacy default stream, which is never captured.
        return stream not in (0, 1) and bool(self._runtime.streamIsCapturing(stream))

    def allocate(self, device: int, nbytes: int) -> Array:
        # During a capture CUDA refuses allocations and ends the capture, except in this mode.
        with self._on(device), self._relaxed():
            return _native.asarray(self._cupy.empty(nbytes, "uint8"))

    def copy(self, into: Array, source: Array) -> None:
        target, given = self._view(into), self._view(source)
        if into.contiguous:
            target.reshape(given.shape)[...] = given
        else:
            target[...] = given.reshape(target.shape)

    def _view(self, array: Array) -> Any:
        """Return the array as a cupy array of words or bytes."""
        cuda = self._cupy.cuda
        shape, strides, word = as_words(array)
        start, end = array.extent
        memory = cuda.UnownedMemory(start, end - start, array.owner, array.device_index)
        pointer = cuda.MemoryPointer(memory, array.address - start)
        return self._cupy.ndarray(shape, f"u{word}" if word <= 8 else "c16", pointer, strides)

    def adopt(self, device: int) -> None:
        # Do this even if the device is nominally current: a thread has no context before it sets
        # one. Otherwise each `_on` would make device 0 current again, and leave a context there.
        self._runtime.setDevice(device)

    def pinned(self, nbytes: int) -> Array:
        with self._relaxed():
            memory = self._cupy.cuda.PinnedMemory(nbytes)
        return _native.asarray(_Pinned(memory, nbytes, self._relaxed))

    def stream(self, device: int) -> int:
        with self._on(device):
            stream: int = self._runtime.streamCreateWithFlags(NON_BLOCKING)
            return stream

    def event(self, device: int) -> _Event:
        with self._on(device):
            return _Event(self._runtime)

    def record(self, event: _Event, device: int, stream: int) -> None:
        with self._on(device):
            self._runtime.eventRecord(event.handle, stream)

    def wait(self, device: int, stream: int, event: _Event) -> None:
        with self._on(device):
            self._runtime.streamWaitEvent(stream, event.handle)

    def is_over(self, event: _Event) -> bool:
        status = self._query(event.handle)
        if status not in (0, self._not_ready):
            raise self._runtime.CUDARuntimeError(status)
        return bool(status == 0)

    def move(self, into: Array, source: Array, device: int, stream: int) -> None:
        runtime = self._runtime
        out = source.device != "cpu"
        kind = runtime.memcpyDeviceToHost if out else runtime.memcpyHostToDevice
        with self._on(device):
            runtime.memcpyAsync(into.address, source.address, into.nbytes, kind, stream)


class _Pinned:
    """cupy's pinned memory, as an array of bytes."""

    def __init__(self, memory: Any, nbytes: int, relaxed: Relaxed) -> None:
        self._memory = memory
        self._relaxed = relaxed
        self.__array_interface__ = {
            "version": 3, "shape": (nbytes,), "typestr": "|u1", "data": (memory.ptr, False),
        }  # fmt: skip

    def __del__(self) -> None:
        if not sys.is_finalizing():
            with self._relaxed():  # freeing it ends captures as well
                self._memory = None


def as_words(array: Array) -> tuple[tuple[int, ...], tuple[int, ...], int]:
    """Return shape, strides in bytes and word size of an array as words of 1, 2, 4, 8 or 16 bytes.
    Elements of other sizes become rows of bytes."""
    if array.itemsize in (1, 2, 4, 8, 16):
        return array.shape, array.strides, array.itemsize
    return (*array.shape, array.itemsize), (*array.strides, 1), 1


# torch.


class Torch(ArrayLibrary):
    """torch, which works on tensors that share an array's memory."""

    name = "torch"
    keeps_captured_memory = True  # a capture has a pool of its own

    def __init__(self) -> None:
        self._torch: Any = importlib.import_module("torch")
        kinds = {1: "uint8", 2: "int16", 4: "int32", 8: "int64", 16: "complex128"}
        self._words = {size: getattr(self._torch, kind) for size, kind in kinds.items()}
        from cydist.devices import cuda_driver

        self._relaxed = cuda_driver.relaxed()

    def owns(self, owner: object) -> bool:
        return isinstance(owner, self._torch.Tensor)

    def current_stream(self, device: int) -> int:
        # Only its number: torch.cuda.current_stream makes an object around it, which takes longer
        # than all other queries of a call.
        stream: int = self._torch._C._cuda_getCurrentRawStream(device)
        return stream

    def on_stream(self, device: int, stream: int) -> AbstractContextManager[object]:
        chosen: AbstractContextManager[object] = self._torch.cuda.stream(
            self._external(device, stream)
        )
        return chosen

    def _external(self, device: int, stream: int) -> Any:
        if stream == 0:  # ExternalStream would return some stream of its pool for it
            return self._torch.cuda.default_stream(device)
        return self._torch.cuda.ExternalStream(stream, device=device)

    def is_capturing(self, device: int) -> bool:
        with self._torch.cuda.device(device):
            return bool(self._torch.cuda.is_current_stream_capturing())

    def allocate(self, device: int, nbytes: int) -> Array:
        torch = self._torch
        return _native.asarray(torch.empty(nbytes, dtype=torch.uint8, device=f"cuda:{device}"))

    def copy(self, into: Array, source: Array) -> None:
        target, given = self._view(into), self._view(source)
        if into.contiguous:
            target.view(given.shape).copy_(given)
        else:
            target.copy_(given.view(target.shape))

    def _view(self, array: Array) -> Any:
        """Return a tensor of words or bytes in the memory of the array."""
        torch = self._torch
        owner = array.owner
        if not self.owns(owner):
            owner = torch.as_tensor(owner, device=f"cuda:{array.device_index}")
        storage = owner.untyped_storage()
        shape, strides, word = as_words(array)
        kind = self._words[word]
        offset, rest = divmod(array.address - storage.data_ptr(), word)
        if rest or any(stride % word for stride in strides):
            raise ValueError(f"elements of {word} bytes that do not begin at a multiple of it")
        view = torch.empty(0, dtype=kind, device=owner.device)
        return view.set_(storage, offset, shape, [stride // word for stride in strides])

    def pinned(self, nbytes: int) -> Array:
        torch = self._torch
        with self._relaxed():
            return _native.asarray(torch.empty(nbytes, dtype=torch.uint8, pin_memory=True))

    def stream(self, device: int) -> int:
        stream: int = self._torch.cuda.Stream(device).cuda_stream  # torch's pool keeps it
        return stream

    def event(self, device: int) -> Any:
        return self._torch.cuda.Event()

    def record(self, event: Any, device: int, stream: int) -> None:
        event.record(self._external(device, stream))

    def wait(self, device: int, stream: int, event: Any) -> None:
        self._external(device, stream).wait_event(event)

    def is_over(self, event: Any) -> bool:
        with self._relaxed():
            return bool(event.query())

    def move(self, into: Array, source: Array, device: int, stream: int) -> None:
        with self.on_stream(device, stream):
            self._bytes(into).copy_(self._bytes(source), non_blocking=True)

    def _bytes(self, array: Array) -> Any:
        view = self._view(array).reshape(-1)
        return view if not array.nbytes else view.view(self._torch.uint8)


_KINDS: dict[str, type[ArrayLibrary]] = {"cupy": Cupy, "torch": Torch}
_libraries: dict[str, ArrayLibrary | None] = {}
_last: ArrayLibrary | None = None  # the owner of the last array
_others: set[str] = set()
_captured = threading.local()


def register(library: ArrayLibrary) -> None:
    """Let `library` copy the arrays that it owns, from now on: a library other than cupy and torch
    or, in tests, a simulated device."""
    _libraries[library.name] = library
    _others.add(library.name)


def loaded_torch() -> ArrayLibrary | None:
    """Return torch, if this process has imported it and it has a device."""
    return _library("torch") if "torch" in sys.modules else None


def of_torch() -> ArrayLibrary:
    """Return torch. Raises ValueError if it has no device."""
    library = _library("torch")
    if library is None:
        raise ValueError("torch has no GPU here")
    return library


def torch_works_on_gpus() -> bool:
    """Return whether this process has used torch on a GPU."""
    torch_cuda = getattr(sys.modules.get("torch"), "cuda", None)
    return bool(torch_cuda and torch_cuda.is_initialized())


def _torch_has_nccl() -> bool:
    """Return whether torch has loaded an NCCL that the backend "nccl" takes."""
    from cydist.devices import cuda_driver

    return cuda_driver.loaded_nccl_version() >= NCCL_MINIMUM


def has_nccl() -> bool:
    """Return whether this process works on GPUs, and has cupy, or torch alone, and NCCL in versions
    that the backend "nccl" takes.

    It works on GPUs if it has imported cupy, or has used torch on a GPU. Otherwise nothing is
    imported.
    """
    if "cupy" not in sys.modules and not torch_works_on_gpus():
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # this cupy has no NCCL, so the answer is no
            nccl: Any = importlib.import_module("cupy.cuda.nccl")
    except ImportError:
        return torch_works_on_gpus() and _torch_has_nccl()
    cupy: Any = sys.modules["cupy"]
    return bool(
        nccl.available
        and cupy_version() >= CUPY_MINIMUM
        and nccl.get_version() >= NCCL_MINIMUM
        and cupy.cuda.is_available()
    )


def cupy_version() -> tuple[int, ...]:
    """Return the first two numbers of the imported cupy's version."""
    version = getattr(sys.modules.get("cupy"), "__version__", None)
    return CUPY_MINIMUM if version is None else tuple(map(int, str(version).split(".")[:2]))


def _loaded() -> list[ArrayLibrary]:
    names = (*_others, *(name for name in _KINDS if name in sys.modules))
    return [library for name in names if (library := _library(name)) is not None]


def _library(name: str) -> ArrayLibrary | None:
    """Return the library, if it is installed and has a device."""
    if name not in _libraries:
        _libraries[name] = _KINDS[name]() if _has_devices(name) else None
    return _libraries[name]


def _has_devices(name: str) -> bool:
    try:
        module = importlib.import_module(name)
    except ImportError:
        return False
    return bool(module.cuda.is_available())
