"""cupy's own arrays on a machine without a GPU: their memory is numpy's."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # that there is no CUDA
    cupy: Any = pytest.importorskip("cupy")


def pointer(memory: np.ndarray, index: int = 0) -> Any:
    """Where an array of numpy's lies, as memory of GPU `index`."""
    first, end = np.lib.array_utils.byte_bounds(memory)
    owned = cupy.cuda.UnownedMemory(first, max(end - first, 1), memory, index)
    return cupy.cuda.MemoryPointer(owned, memory.ctypes.data - first)


def on_gpu(memory: np.ndarray, index: int = 0) -> Any:
    """A cupy.ndarray, of that very class, over the memory."""
    return cupy.ndarray(memory.shape, memory.dtype, pointer(memory, index), memory.strides)
