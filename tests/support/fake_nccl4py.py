"""In the place of nccl4py where it is not installed: the functions of `nccl.bindings.nccl` that we
call, with the arguments of version 0.6.0, over the library that is loaded."""

from __future__ import annotations

import ctypes
from types import ModuleType
from typing import Any

ID_BYTES = 128

# Names there and in NCCL, and what each takes: addresses, counts and numbers.
CALLS = {
    "all_reduce": ("ncclAllReduce", "ppniicp"),
    "reduce": ("ncclReduce", "ppniiicp"),
    "broadcast": ("ncclBroadcast", "ppniicp"),
    "reduce_scatter": ("ncclReduceScatter", "ppniicp"),
    "all_gather": ("ncclAllGather", "ppnicp"),
    "send": ("ncclSend", "pniicp"),
    "recv": ("ncclRecv", "pniicp"),
    "red_op_destroy": ("ncclRedOpDestroy", "ic"),
    "comm_abort": ("ncclCommAbort", "c"),
    "comm_finalize": ("ncclCommFinalize", "c"),
    "comm_destroy": ("ncclCommDestroy", "c"),
    "group_start": ("ncclGroupStart", ""),
    "group_end": ("ncclGroupEnd", ""),
}


class NCCLError(Exception):
    """What a call that was refused raises."""

    def __init__(self, status: int) -> None:
        super().__init__(f"NCCL result {status}")
        self.status = status


class Id(ctypes.Structure):
    """ncclUniqueId, which is passed by value."""

    _fields_ = (("internal", ctypes.c_char * ID_BYTES),)


class UniqueId:
    """Its memory, and where that is."""

    def __init__(self, memory: Any) -> None:
        self._memory = memory
        self.ptr = ctypes.addressof(memory)

    @classmethod
    def from_buffer(cls, buffer: bytearray) -> UniqueId:
        """On the memory of another object."""
        return cls(Id.from_buffer(buffer))


class Comm:
    """ncclComm_t. Calls take these, and no plain integer."""

    def __init__(self, handle: int = 0) -> None:
        self.handle = handle

    def __int__(self) -> int:
        return self.handle


def pointer(comm: Comm) -> ctypes.c_void_p:
    """A communicator, as an argument."""
    if not isinstance(comm, Comm):
        raise TypeError(f"Cannot convert {type(comm).__name__} to nccl.bindings.nccl.Comm")
    return ctypes.c_void_p(comm.handle)


KINDS: dict[str, Any] = {
    "p": ctypes.c_void_p, "c": pointer, "n": ctypes.c_size_t, "i": ctypes.c_int,
}  # fmt: skip


def module(library: Any) -> ModuleType:
    """`nccl.bindings.nccl`, over a library."""

    def checked(status: int) -> None:
        if status:
            raise NCCLError(status)

    def call(symbol: str, kinds: str) -> Any:
        function = getattr(library, symbol)

        def run(*arguments: Any) -> None:
            assert len(arguments) == len(kinds), (symbol, arguments)
            checked(
                function(*(KINDS[kind](each) for kind, each in zip(kinds, arguments, strict=True)))
            )

        return run

    def number(symbol: str, *arguments: Any) -> int:
        found = ctypes.c_int()
        checked(getattr(library, symbol)(*arguments, ctypes.byref(found)))
        return found.value

    def get_unique_id() -> UniqueId:
        made = Id()
        checked(library.ncclGetUniqueId(ctypes.byref(made)))
        return UniqueId(made)

    def comm_init_rank(nranks: int, comm_id: int, rank: int) -> Comm:
        comm = ctypes.c_void_p()
        given = Id.from_address(comm_id)
        checked(library.ncclCommInitRank(ctypes.byref(comm), nranks, given, rank))
        return Comm(comm.value or 0)

    def red_op_create_pre_mul_sum(scalar: int, datatype: int, residence: int, comm: Comm) -> int:
        op = ctypes.c_int()
        into, place, where = ctypes.byref(op), ctypes.c_void_p(scalar), pointer(comm)
        checked(library.ncclRedOpCreatePreMulSum(into, place, datatype, residence, where))
        return op.value

    def get_error_string(result: int) -> str:
        find = library.ncclGetErrorString
        find.restype = ctypes.c_char_p
        return str(find(result).decode())

    made: Any = ModuleType("nccl.bindings.nccl")
    made.NCCLError, made.UniqueId, made.Comm = NCCLError, UniqueId, Comm
    made.get_version = lambda: number("ncclGetVersion")
    made.comm_get_async_error = lambda c: number("ncclCommGetAsyncError", pointer(c))
    made.get_unique_id, made.comm_init_rank = get_unique_id, comm_init_rank
    made.red_op_create_pre_mul_sum = red_op_create_pre_mul_sum
    made.get_error_string = get_error_string
    for name, (symbol, kinds) in CALLS.items():
        setattr(made, name, call(symbol, kinds))
    return made
