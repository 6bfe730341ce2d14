"""NCCL functions that cupy's binding lacks, looked up in the library that cupy or torch has loaded.

Which functions exist depends on NCCL's version. A missing function raises when it is called.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any

from cydist.errors import UnsupportedError

LIBRARY = "libnccl.so.2"
ALL_TO_ALL_SINCE = 22800  # NCCL 2.28
ON_HOST = 1  # ncclScalarHostImmediate


class NcclError(Exception):
    """A call of NCCL did not return "success".

    Args:
        status: ncclResult_t; None: unknown to the binding.
    """

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status


class LibNccl:
    """Some of NCCL's functions; they take a communicator's address."""

    def __init__(self) -> None:
        try:
            # Use the loaded copy, or none: a second copy would not share its state.
            self._library: Any = ctypes.CDLL(LIBRARY, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        except OSError:
            self._library = None

    @property
    def found(self) -> bool:
        """Return whether this process has loaded NCCL."""
        return self._library is not None

    def version(self) -> int:
        """Return 20000 + 100 * minor + patch of the library."""
        version = ctypes.c_int()
        self.find("ncclGetVersion", ctypes.POINTER(ctypes.c_int))(ctypes.byref(version))
        return version.value

    def find(self, name: str, *arguments: Any, result: Any = ctypes.c_int) -> Any:
        """Return a function that takes these types; None if the library lacks it."""
        function = getattr(self._library, name, None)
        if function is not None:
            function.argtypes = arguments
            function.restype = result
        return function

    def text(self, code: int) -> str:
        """Return NCCL's text for a result."""
        find = self.find("ncclGetErrorString", ctypes.c_int, result=ctypes.c_char_p)
        return f"result {code}" if find is None else str(find(code).decode())

    def last_error(self) -> str:
        """Return NCCL's description of its last error, which is longer than a result's text; "" if
        unknown."""
        find = self.find("ncclGetLastError", ctypes.c_void_p, result=ctypes.c_char_p)
        return "" if find is None else str((find(None) or b"").decode(errors="replace")).strip()

    def error(self, code: int) -> NcclError:
        """Return the error of a result."""
        more = self.last_error()
        return NcclError(f"{self.text(code)}{f' ({more})' if more else ''}", code)

    def async_error(self, comm: int) -> int | None:
        """Return a communicator's asynchronous result since its last call; None: unknown."""
        find = self.find("ncclCommGetAsyncError", ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))
        code = ctypes.c_int()
        if find is None or find(comm, ctypes.byref(code)):
            return None
        return code.value

    def premul(self, comm: int, type_code: int, scalar: bytes) -> int:
        """Call ncclRedOpCreatePreMulSum for an element of that type in host memory."""
        find = self.find(
            "ncclRedOpCreatePreMulSum",
            ctypes.POINTER(ctypes.c_int), ctypes.c_char_p, ctypes.c_int, ctypes.c_int,
            ctypes.c_void_p,
        )  # fmt: skip
        if find is None:
            raise UnsupportedError("PREMUL_SUM needs an NCCL that this process has loaded")
        op = ctypes.c_int()
        if code := find(ctypes.byref(op), scalar, type_code, ON_HOST, comm):
            raise UnsupportedError(
                f"NCCL makes no PREMUL_SUM of type {type_code}: {self.text(code)} "
                f"({self.last_error()})"
            )
        return op.value

    def drop_premul(self, comm: int, op: int) -> None:
        """Call ncclRedOpDestroy. No call that uses the operation may still be entering NCCL."""
        find = self.find("ncclRedOpDestroy", ctypes.c_int, ctypes.c_void_p)
        if find is not None:
            find(op, comm)

    def all_to_all(self) -> Any:
        """Return ncclAlltoAll, of addresses, a count, a type, a communicator and a stream; None:
        this NCCL is older than 2.28."""
        if self._library is None or self.version() < ALL_TO_ALL_SINCE:
            return None
        pointer = ctypes.c_void_p
        return self.find(
            "ncclAlltoAll", pointer, pointer, ctypes.c_size_t, ctypes.c_int, pointer, pointer
        )

    def can_split(self) -> bool:
        """Return whether there is an ncclCommSplit."""
        return self._library is not None and hasattr(self._library, "ncclCommSplit")

    def split(self, comm: int, color: int, key: int) -> tuple[int, int]:
        """Call ncclCommSplit, with the parent's configuration. Return its result, and the address
        of the new communicator; 0: this rank gets none."""
        pointer = ctypes.c_void_p
        find = self.find(
            "ncclCommSplit", pointer, ctypes.c_int, ctypes.c_int, ctypes.POINTER(pointer), pointer
        )
        made = pointer()
        code: int = find(comm, color, key, ctypes.byref(made), None)
        return code, made.value or 0

    def revoke(self, comm: int) -> bool:
        """Call ncclCommRevoke, which NCCL has from 2.28 on; return whether it has succeeded."""
        find = self.find("ncclCommRevoke", ctypes.c_void_p, ctypes.c_int)
        return find is not None and find(comm, 0) == 0

    def finalize(self, comm: int) -> None:
        """Call ncclCommFinalize, if it exists: started calls are completed."""
        find = self.find("ncclCommFinalize", ctypes.c_void_p)
        if find is not None:
            find(comm)
