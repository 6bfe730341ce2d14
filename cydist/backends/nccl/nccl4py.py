"""NVIDIA's own binding, nccl4py, in place of cupy's: CYDIST_NCCL_BINDING=nccl4py.

cupy still provides streams, events and arithmetic.
"""

from __future__ import annotations

import ctypes
import importlib
import re
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from cydist.backends.nccl.binding import (
    IN_PROGRESS,
    INSTALL,
    UNIQUE_ID_BYTES,
    EndsOnce,
)
from cydist.backends.nccl.libnccl import ON_HOST, LibNccl, NcclError
from cydist.errors import UnsupportedError

OLDEST = (0, 6)  # of nccl4py: 0.3.1 has a different comm_init_rank


class Nccl4py:
    """The binding of nccl.bindings.nccl, the part of nccl4py that takes plain integers."""

    name = "nccl4py"

    def __init__(self) -> None:
        try:
            self._nccl: Any = importlib.import_module("nccl.bindings.nccl")
            self._nccl.get_version()
        except (ImportError, RuntimeError) as error:
            raise UnsupportedError(
                f"CYDIST_NCCL_BINDING=nccl4py, and nccl4py cannot be used ({error}): "
                f"`pip install nccl4py`; streams are cupy's: {INSTALL}"
            ) from None
        check_version()
        self.group_start: Callable[[], None] = self._nccl.group_start
        self.group_end: Callable[[], None] = self._nccl.group_end

    def version(self) -> int:
        return int(self._nccl.get_version())

    def unique_id(self) -> bytes:
        made = self._nccl.get_unique_id()
        return ctypes.string_at(made.ptr, UNIQUE_ID_BYTES)

    def init(self, size: int, unique_id: bytes, rank: int) -> Nccl4pyCommunicator:
        given = self._nccl.UniqueId.from_buffer(bytearray(unique_id))
        comm = self._nccl.comm_init_rank(size, given.ptr, rank)
        return Nccl4pyCommunicator(self._nccl, comm)

    def as_nccl_error(self, error: BaseException) -> NcclError | None:
        if isinstance(error, NcclError):
            return error
        if isinstance(error, self._nccl.NCCLError):
            status: int | None = getattr(error, "status", None)
            return NcclError(str(error), status)
        return None


def check_version() -> None:
    """Raise UnsupportedError if the package's metadata shows that it is too old. A package that was
    installed without pip has none."""
    try:
        installed = version("nccl4py")
    except PackageNotFoundError:
        return
    found = re.match(r"(\d+)\.(\d+)", installed)
    if found and tuple(map(int, found.groups())) < OLDEST:
        raise UnsupportedError(
            f"CYDIST_NCCL_BINDING=nccl4py needs nccl4py 0.6 or later, and {installed} is "
            "installed: `pip install --upgrade nccl4py`, or leave CYDIST_NCCL_BINDING unset"
        )


class Nccl4pyCommunicator(EndsOnce):
    """One of nccl4py's communicators."""

    def __init__(self, nccl: Any, comm: Any) -> None:
        self._nccl = nccl
        self._comm = comm
        super().__init__()

        def bound(function: Any) -> Any:
            """Bind an NCCL call, whose second to last argument is the communicator."""

            def call(*arguments: int) -> None:
                self._check()
                function(*arguments[:-1], comm, arguments[-1])

            return call

        self.all_reduce = bound(nccl.all_reduce)
        self.reduce = bound(nccl.reduce)
        self.broadcast = bound(nccl.broadcast)
        self.reduce_scatter = bound(nccl.reduce_scatter)
        self.all_gather = bound(nccl.all_gather)
        self.send = bound(nccl.send)
        self.recv = bound(nccl.recv)
        # Grouped sends and receives do the same.
        self.all_to_all: Callable[[int, int, int, int, int], None] | None = None

    def async_error(self) -> str:
        with self._lock:  # it must not end during this query
            if self._ended:
                return ""
            code = int(self._nccl.comm_get_async_error(self._comm))
        return "" if code in (0, IN_PROGRESS) else str(self._nccl.get_error_string(code))

    def premul(self, type_code: int, scalar: bytes) -> int:
        held = ctypes.create_string_buffer(scalar, len(scalar))
        address = ctypes.addressof(held)
        with self._lock:
            self._check()
            made = self._nccl.red_op_create_pre_mul_sum(address, type_code, ON_HOST, self._comm)
        return int(made)

    def drop_premul(self, op: int) -> None:
        with self._lock:
            if not self._ended:
                self._nccl.red_op_destroy(op, self._comm)

    def can_split(self) -> bool:
        return LibNccl().can_split()

    def split(self, color: int, key: int) -> Nccl4pyCommunicator | None:
        # By the library's own function, since nccl4py's has other arguments in other versions.
        self._check()
        libnccl = LibNccl()
        code, made = libnccl.split(int(self._comm), color, key)
        if code:
            raise libnccl.error(code)
        return Nccl4pyCommunicator(self._nccl, self._nccl.Comm(made)) if made else None

    def revoke(self) -> bool:
        revoke = getattr(self._nccl, "comm_revoke", None)  # NCCL has it from 2.28 on
        with self._lock:
            if self._ended or revoke is None:
                return False
            try:
                revoke(self._comm, 0)
            except Exception:  # the loaded library has none, or refuses it
                return False
        return True

    def abort(self) -> None:
        self._end(lambda: self._nccl.comm_abort(self._comm))

    def destroy(self) -> None:
        self._end(
            lambda: self._nccl.comm_finalize(self._comm),
            lambda: self._nccl.comm_destroy(self._comm),
        )
