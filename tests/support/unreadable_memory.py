"""Memory that the kernel reads for nobody."""

from __future__ import annotations

import ctypes
import mmap
import os

import numpy as np
import pytest

SECRET = 447  # memfd_secret, on every architecture


def unreadable(count: int) -> np.ndarray:
    """An array of zeros in memory that the kernel reads for nobody, its owner included."""
    fd = ctypes.CDLL(None).syscall(SECRET, 0)
    if fd < 0:
        pytest.skip("this kernel has no memory out of reach")
    os.ftruncate(fd, 4 * count)
    array = np.frombuffer(mmap.mmap(fd, 4 * count), np.float32)
    os.close(fd)
    return array
