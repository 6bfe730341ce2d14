"""Run plans: buffer ranges become addresses, phases become groups of NCCL calls and kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from cydist import _native
from cydist.backends.nccl import gpu_kernels
from cydist.backends.nccl.plans import BufferRange, LocalKernel, Plan, Transfer
from cydist.backends.nccl.reductions import ONES, PREMUL, TYPES
from cydist.errors import UnsupportedError
from cydist.reduce_ops import RedOpType

if TYPE_CHECKING:
    from cydist._native import Array
    from cydist.backends.nccl.binding import Binding, Communicator
    from cydist.backends.nccl.cuda import Gpu

MOST_FACTORS = 32  # factors of PREMUL_SUM, whose operations are kept for later calls
NAME_OF = {code: name for name, code in TYPES.items()}


class PlannedCall(NamedTuple):
    """A plan, with the arrays and the factor of its call."""

    plan: Plan
    arrays: Sequence[Array]
    factor: complex | None


class Runner:
    """Enqueues plans on one communicator."""

    def __init__(self, binding: Binding, comm: Communicator, gpu: Gpu) -> None:
        self.comm = comm
        self._binding = binding
        self._gpu = gpu
        self._premuls: dict[tuple[int, bytes], int] = {}

    def run(self, items: Sequence[PlannedCall], stream: int) -> list[Array]:
        """Enqueue plans that do not depend on each other, and return their scratch memory.

        All k-th phases of NCCL calls begin and end together, as on all other ranks.
        """
        if len(items) == 1 and (alone := items[0].plan.single_call) is not None:
            _, arrays, factor = items[0]
            self._call(alone, _finder(arrays, ()), factor, stream)
            self._drop_premuls()
            return []
        scratch: list[Array] = []
        going = []
        for item in items:
            own = [self._scratch(nbytes, stream) for nbytes in item.plan.scratch]
            scratch += own
            going.append((iter(item.plan.phases), _finder(item.arrays, own), item.factor))
        while going:
            calls: list[tuple[Transfer, Callable[[BufferRange], int], complex | None]] = []
            left = []
            for each in going:
                phases, at, factor = each
                for phase in phases:
                    if not isinstance(phase, LocalKernel):
                        calls += [(transfer, at, factor) for transfer in phase]
                        left.append(each)
                        break
                    self._local(phase, at, factor, stream)
            going = left
            self._together(calls, stream)
        self._drop_premuls()
        return scratch

    def _scratch(self, nbytes: int, stream: int) -> Array:
        """Allocate it before anything is enqueued, so that a failure has no effect."""
        captured = self._gpu.is_captured(stream)  # a failed allocation may end the capture
        try:
            with self._gpu.lib.on_stream(self._gpu.index, stream):
                return self._gpu.lib.allocate(self._gpu.index, max(nbytes, 1))
        except Exception as error:
            if not captured:
                raise
            raise UnsupportedError(
                f"the call needs {nbytes} bytes of scratch memory, which cannot be had while a "
                f"CUDA graph is captured ({type(error).__name__}: {error}): convert to a dtype "
                "that NCCL reduces by itself, or make the call outside of the capture"
            ) from error

    def _local(
        self,
        step: LocalKernel,
        at: Callable[[BufferRange], int],
        factor: complex | None,
        stream: int,
    ) -> None:
        with self._gpu.lib.on_stream(self._gpu.index, stream):
            gpu_kernels.run(step, at, self._gpu.view, self._gpu.functions, factor)

    def _together(self, calls: Sequence[Any], stream: int) -> None:
        if len(calls) == 1:
            transfer, at, factor = calls[0]
            self._call(transfer, at, factor, stream)
        elif calls:
            # Operations are made outside, since a group may contain only calls.
            for transfer, _, factor in calls:
                if transfer.op == PREMUL:
                    self._premul(transfer.type_code, factor)
            self._binding.group_start()
            try:
                for transfer, at, factor in calls:
                    self._call(transfer, at, factor, stream)
            finally:
                self._binding.group_end()

    def _call(
        self,
        transfer: Transfer,
        at: Callable[[BufferRange], int],
        factor: complex | None,
        stream: int,
    ) -> None:
        kind, send, recv, count, type_code, op, peer = transfer
        comm = self.comm
        source = 0 if send is None else at(send)
        into = 0 if recv is None else at(recv)
        if op == PREMUL:
            op = self._premul(type_code, factor)
        if kind == "all_reduce":
            comm.all_reduce(source, into, count, type_code, op, stream)
        elif kind == "reduce_scatter":
            comm.reduce_scatter(source, into, count, type_code, op, stream)
        elif kind == "all_gather":
            comm.all_gather(source, into, count, type_code, stream)
        elif kind == "broadcast":
            comm.broadcast(source, into, count, type_code, peer, stream)
        elif kind == "send":
            comm.send(source, count, type_code, peer, stream)
        elif kind == "recv":
            comm.recv(into, count, type_code, peer, stream)
        else:
            comm.reduce(source, into, count, type_code, op, peer, stream)

    def _premul(self, type_code: int, factor: complex | None) -> int:
        """Return NCCL's operation for a factor, and make it the last in `_premuls`."""
        scalar = scaled_one(NAME_OF[type_code], factor)
        op = self._premuls.pop((type_code, scalar), None)
        if op is None:
            op = self.comm.premul(type_code, scalar)
        self._premuls[type_code, scalar] = op
        return op

    def _drop_premuls(self) -> None:
        """Free the least recently used operations. NCCL allows that after the calls that use them
        have returned, even if these have not run."""
        while len(self._premuls) > MOST_FACTORS:
            self.comm.drop_premul(self._premuls.pop(next(iter(self._premuls))))


def _finder(arrays: Sequence[Array], scratch: Sequence[Array]) -> Callable[[BufferRange], int]:
    addresses = [array.address for array in arrays]
    own = [array.address for array in scratch]

    def at(span: BufferRange) -> int:
        array, start = span
        return (addresses[array] if array >= 0 else own[-1 - array]) + start

    return at


def scaled_one(dtype: str, factor: complex | None) -> bytes:
    """Return the factor as an element of this dtype, rounded as cydist's kernels round."""
    assert factor is not None
    if dtype.startswith(("int", "uint")):
        size = len(ONES[dtype])
        return (int(factor.real) % (1 << 8 * size)).to_bytes(size, "little")
    into = bytearray(len(ONES[dtype]))
    code = _native.DTYPES[dtype]
    _native.prepare(int(RedOpType.PREMUL_SUM), code, into, ONES[dtype], factor)
    return bytes(into)
