"""Events by CUDA's driver: asked without Python's lock, and while other threads capture graphs.

cupy asks holding the lock, so that a device which does not answer would stop every thread; and
CUDA's own way of asking ends a graph that another thread captures in the mode "global", torch's.
"""

from __future__ import annotations

import ctypes
from typing import Any

RELAXED = 2  # cudaStreamCaptureModeRelaxed: this thread's questions end nobody's capture
NOT_READY = 600  # cudaErrorNotReady


class Driver:
    """Some of the functions of libcuda.so.1."""

    def __init__(self, library: Any) -> None:
        self._query = library.cuEventQuery
        self._query.argtypes = [ctypes.c_void_p]
        self._exchange = library.cuThreadExchangeStreamCaptureMode
        self._exchange.argtypes = [ctypes.POINTER(ctypes.c_int)]

    def query(self, event: int) -> int:
        """CUDA's answer about an event: 0 when it is over, NOT_READY, or an error. Any thread
        may ask, whatever its device."""
        mode = ctypes.c_int(RELAXED)
        self._exchange(ctypes.byref(mode))
        status: int = self._query(event)
        self._exchange(ctypes.byref(mode))  # as it was
        return status


def load() -> Driver | None:
    """The driver; None where there is none."""
    try:
        return Driver(ctypes.CDLL("libcuda.so.1"))
    except (OSError, AttributeError):
        return None
