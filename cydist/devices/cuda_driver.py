"""Call CUDA's driver without the GIL: events, captures, streams, contexts and names of GPUs.

cupy queries with the GIL held, so a device that does not answer would stop every thread. And CUDA's
runtime query ends a graph that another thread captures in the mode "global", which torch uses.
Choosing a device through the runtime may wait for a lock of CUDA, again with the GIL held. Making a
context current, which is a value of the thread, waits for nothing.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator

Relaxed = Callable[[], AbstractContextManager[object]]
RELAXED = 2  # cudaStreamCaptureModeRelaxed: this thread's calls end no capture
NOT_READY = 600  # cudaErrorNotReady
ACTIVE = 1  # cudaStreamCaptureStatusActive


class Driver:
    """Some of the functions of libcuda.so.1."""

    def __init__(self, library: Any) -> None:
        self._query = library.cuEventQuery
        self._query.argtypes = [ctypes.c_void_p]
        self._exchange = library.cuThreadExchangeStreamCaptureMode
        self._exchange.argtypes = [ctypes.POINTER(ctypes.c_int)]
        self._capture = library.cuStreamGetCaptureInfo_v2
        self._capture.argtypes = [
            ctypes.c_void_p, ctypes.POINTER(ctypes.c_int), ctypes.POINTER(ctypes.c_uint64),
            ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p,
        ]  # fmt: skip
        self._get_context = library.cuCtxGetCurrent
        self._get_context.argtypes = [ctypes.POINTER(ctypes.c_void_p)]
        self._set_context = library.cuCtxSetCurrent
        self._set_context.argtypes = [ctypes.c_void_p]
        self._uuid = library.cuDeviceGetUuid
        self._uuid.argtypes = [ctypes.c_void_p, ctypes.c_int]

    def context(self) -> int:
        """Return this thread's context; 0: it has none."""
        found = ctypes.c_void_p()
        return 0 if self._get_context(ctypes.byref(found)) else found.value or 0

    def make_current(self, context: int) -> None:
        """Make a context this thread's. Takes no lock."""
        self._set_context(context)

    def uuid(self, device: int) -> str:
        """Return the identity of a GPU, or of a part of one that MIG makes; "" if it is unknown."""
        found = ctypes.create_string_buffer(16)
        return "" if self._uuid(found, device) else found.raw.hex()

    def query(self, event: int) -> int:
        """Return CUDA's status of an event: 0 when it is over, NOT_READY, or an error. Any thread
        may call it, with any device."""
        with self.relaxed():
            status: int = self._query(event)
        return status

    @contextmanager
    def relaxed(self) -> Iterator[None]:
        """Run this thread's calls inside so that they neither end another thread's capture nor are
        refused because of one."""
        mode = ctypes.c_int(RELAXED)
        self._exchange(ctypes.byref(mode))
        try:
            yield
        finally:
            self._exchange(ctypes.byref(mode))  # as it was

    def capture(self, stream: int) -> int | None:
        """Return the number of the capture that a stream takes part in; None: unknown to CUDA."""
        active, number = ctypes.c_int(), ctypes.c_uint64()
        refs = ctypes.byref(active), ctypes.byref(number)
        status = self._capture(stream, *refs, None, None, None)
        return None if status or active.value != ACTIVE else number.value


def load() -> Driver | None:
    """Return the driver, or None without one."""
    try:
        return Driver(ctypes.CDLL("libcuda.so.1"))
    except (OSError, AttributeError):
        return None


def relaxed() -> Relaxed:
    """Return `Driver.relaxed`, or a context that does nothing without a driver."""
    found = load()
    return nullcontext if found is None else found.relaxed


def loaded_nccl_version() -> int:
    """Return the version of the NCCL that this process has loaded: 22809 is 2.28.9; 0: none."""
    version = ctypes.c_int()
    try:
        library = ctypes.CDLL("libnccl.so.2", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except OSError:
        return 0
    return 0 if library.ncclGetVersion(ctypes.byref(version)) else version.value
