"""NCCL functions that cupy's binding lacks, looked up in the library that cupy has loaded.

NCCL's version decides which exist. A missing function raises when it is called.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

from cydist.errors import UnsupportedError

LIBRARY = "libnccl.so.2"
ON_HOST = 1  # ncclScalarHostImmediate


class LibNccl:
    """Some of NCCL's functions, on a communicator's address."""

    def __init__(self) -> None:
        try:
            # The copy that is loaded, or none: a second one would know nothing of the first.
            self._library: Any = ctypes.CDLL(LIBRARY, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        except OSError:
            self._library = None

    def _find(self, name: str, *arguments: Any, result: Any = ctypes.c_int) -> Any:
        function = getattr(self._library, name, None)
        if function is not None:
            function.argtypes = arguments
            function.restype = result
        return function

    def text(self, code: int) -> str:
        """Return NCCL's text for a result."""
        find = self._find("ncclGetErrorString", ctypes.c_int, result=ctypes.c_char_p)
        return f"result {code}" if find is None else str(find(code).decode())

    def last_error(self) -> str:
        """Return NCCL's last error in more words than a result has; "" where nothing is known."""
        find = self._find("ncclGetLastError", ctypes.c_void_p, result=ctypes.c_char_p)
        return "" if find is None else str((find(None) or b"").decode(errors="replace")).strip()

    def async_error(self, comm: int) -> int | None:
        """Return the result that a communicator has come to since its last call; None: cannot
        tell."""
        find = self._find("ncclCommGetAsyncError", ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))
        code = ctypes.c_int()
        if find is None or find(comm, ctypes.byref(code)):
            return None
        return code.value

    def premul(self, comm: int, type_code: int, scalar: bytes) -> int:
        """ncclRedOpCreatePreMulSum, for an element of that type in host memory."""
        find = self._find(
            "ncclRedOpCreatePreMulSum",
            ctypes.POINTER(ctypes.c_int), ctypes.c_char_p, ctypes.c_int, ctypes.c_int,
            ctypes.c_void_p,
        )  # fmt: skip
        if find is None:
            raise UnsupportedError("PREMUL_SUM needs NCCL 2.11 or later, loaded by cupy")
        op = ctypes.c_int()
        if code := find(ctypes.byref(op), scalar, type_code, ON_HOST, comm):
            raise UnsupportedError(
                f"NCCL makes no PREMUL_SUM of type {type_code}: {self.text(code)} "
                f"({self.last_error()})"
            )
        return op.value

    def drop_premul(self, comm: int, op: int) -> None:
        """ncclRedOpDestroy: no call that was given the operation may be on its way to NCCL."""
        find = self._find("ncclRedOpDestroy", ctypes.c_int, ctypes.c_void_p)
        if find is not None:
            find(op, comm)

    def finalize(self, comm: int) -> None:
        """ncclCommFinalize, where there is one: what was begun is brought to its end."""
        find = self._find("ncclCommFinalize", ctypes.c_void_p)
        if find is not None:
            find(comm)
