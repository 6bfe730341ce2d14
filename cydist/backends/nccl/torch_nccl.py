"""NCCL as torch has loaded it, for programs without cupy: CYDIST_NCCL_BINDING=torch.

torch provides streams, events and arithmetic (cuda.TorchGpu).
"""

from __future__ import annotations

import ctypes
import importlib
from collections.abc import Callable
from typing import Any

from cydist.backends.nccl.binding import (
    IN_PROGRESS,
    INSTALL,
    UNIQUE_ID_BYTES,
    LibCommunicator,
)
from cydist.backends.nccl.libnccl import LibNccl, NcclError
from cydist.errors import UnsupportedError

_SIZE, _INT, _POINTER = ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p
# By Communicator's names; the second to last argument is the communicator.
CALLS = {
    "all_reduce": ("ncclAllReduce", (_POINTER, _POINTER, _SIZE, _INT, _INT)),
    "reduce": ("ncclReduce", (_POINTER, _POINTER, _SIZE, _INT, _INT, _INT)),
    "broadcast": ("ncclBroadcast", (_POINTER, _POINTER, _SIZE, _INT, _INT)),
    "reduce_scatter": ("ncclReduceScatter", (_POINTER, _POINTER, _SIZE, _INT, _INT)),
    "all_gather": ("ncclAllGather", (_POINTER, _POINTER, _SIZE, _INT)),
    "send": ("ncclSend", (_POINTER, _SIZE, _INT, _INT)),
    "recv": ("ncclRecv", (_POINTER, _SIZE, _INT, _INT)),
}


class UniqueId(ctypes.Structure):
    """ncclUniqueId."""

    _fields_ = (("internal", ctypes.c_ubyte * UNIQUE_ID_BYTES),)


class TorchNccl:
    """The library that torch has loaded."""

    name = "torch's NCCL"

    def __init__(self) -> None:
        try:
            importlib.import_module("torch")
        except ImportError as error:
            raise UnsupportedError(
                f"backend 'nccl' needs cupy, or torch with CUDA, and has neither ({error}): "
                f"{INSTALL}; or use backend 'tcp' or 'mpi', which take GPU arrays too"
            ) from None
        self._libnccl = LibNccl()
        if not self._libnccl.found:
            raise UnsupportedError(
                "backend 'nccl' needs NCCL, and this torch has loaded no libnccl.so.2: install a "
                f"torch for CUDA, or cupy: {INSTALL}; or use backend 'tcp' or 'mpi'"
            )
        self.group_start = self._checked("ncclGroupStart")
        self.group_end = self._checked("ncclGroupEnd")

    def _checked(self, name: str, *arguments: Any) -> Callable[..., None]:
        """Return a function of NCCL that raises NcclError for its results."""
        function = self._libnccl.find(name, *arguments)

        def call(*given: Any) -> None:
            if code := function(*given):
                raise self._libnccl.error(code)

        return call

    def version(self) -> int:
        return self._libnccl.version()

    def unique_id(self) -> bytes:
        made = UniqueId()
        self._checked("ncclGetUniqueId", ctypes.POINTER(UniqueId))(ctypes.byref(made))
        return bytes(made.internal)

    def init(self, size: int, unique_id: bytes, rank: int) -> TorchCommunicator:
        comm = _POINTER()
        join = self._checked("ncclCommInitRank", ctypes.POINTER(_POINTER), _INT, UniqueId, _INT)
        join(ctypes.byref(comm), size, UniqueId.from_buffer_copy(unique_id), rank)
        assert comm.value is not None
        return self.communicator(comm.value)

    def communicator(self, pointer: int) -> TorchCommunicator:
        """Return the communicator at an address."""
        functions = {
            ours: self._checked(name, *kinds, _POINTER, _POINTER)
            for ours, (name, kinds) in CALLS.items()
        }
        ends = {
            name: self._checked(f"nccl{name}", _POINTER)
            for name in ("CommAbort", "CommDestroy", "CommFinalize")
        }
        return TorchCommunicator(self, self._libnccl, pointer, functions, ends)

    def as_nccl_error(self, error: BaseException) -> NcclError | None:
        return error if isinstance(error, NcclError) else None


class TorchCommunicator(LibCommunicator):
    """A communicator, by its address."""

    def __init__(
        self,
        binding: TorchNccl,
        libnccl: LibNccl,
        pointer: int,
        functions: dict[str, Callable[..., None]],
        ends: dict[str, Callable[[int], None]],
    ) -> None:
        self._binding = binding
        self._ends = ends
        super().__init__(libnccl, pointer)

        def bound(function: Callable[..., None]) -> Callable[..., None]:
            def call(*arguments: int) -> None:
                self._check()
                function(*arguments[:-1], pointer, arguments[-1])

            return call

        self.all_reduce = bound(functions["all_reduce"])
        self.reduce = bound(functions["reduce"])
        self.broadcast = bound(functions["broadcast"])
        self.reduce_scatter = bound(functions["reduce_scatter"])
        self.all_gather = bound(functions["all_gather"])
        self.send = bound(functions["send"])
        self.recv = bound(functions["recv"])

    def async_error(self) -> str:
        with self._lock:  # it must not end during this query
            code = 0 if self._ended else self._libnccl.async_error(self._pointer)
        return "" if code in (None, 0, IN_PROGRESS) else self._libnccl.text(code)

    def can_split(self) -> bool:
        return self._libnccl.can_split()

    def split(self, color: int, key: int) -> TorchCommunicator | None:
        self._check()
        code, pointer = self._libnccl.split(self._pointer, color, key)
        if code:
            raise self._libnccl.error(code)
        return self._binding.communicator(pointer) if pointer else None

    def abort(self) -> None:
        self._end(lambda: self._ends["CommAbort"](self._pointer))

    def destroy(self) -> None:
        self._end(
            lambda: self._ends["CommFinalize"](self._pointer),
            lambda: self._ends["CommDestroy"](self._pointer),
        )
