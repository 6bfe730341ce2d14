"""GPU arrays with an MPI that accesses GPU memory itself.

Calls that MPI has with cydist's semantics use the array in place, once the device has written it.
Other calls are staged.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from cydist import _native
from cydist._native import CallRecord
from cydist.backends.host.chunking import JOINED, adjacent
from cydist.backends.host.pinned_pipeline import StagedCall
from cydist.backends.host.staging_group import StagedGroup
from cydist.reduce_ops import Op

if TYPE_CHECKING:
    from cydist._native import Array
    from cydist.backends.mpi.group import MpiGroup


class DeviceGroup(StagedGroup):
    """The device arrays' side of an MpiGroup. All ranks must enable it, or none."""

    host: MpiGroup
    means = "MPI takes them as they are where it has the call; else copied through pinned memory"

    def run_broadcast(self, call: CallRecord, array: Array, root: int) -> None:
        if not self._by_mpi(call, "broadcast", [array], [array], root=root):
            super().run_broadcast(call, array, root)

    def run_all_reduce(self, call: CallRecord, array: Array, op: Op) -> None:
        if not self._by_mpi(call, "all_reduce", [array], [array], op=op):
            super().run_all_reduce(call, array, op)

    def run_reduce(self, call: CallRecord, array: Array, root: int, op: Op) -> None:
        outputs = [array] if self._rank == root else []
        if not self._by_mpi(call, "reduce", [array], outputs, op=op, root=root):
            super().run_reduce(call, array, root, op)

    def run_all_gather(self, call: CallRecord, outputs: Sequence[Array], array: Array) -> None:
        if not self._by_mpi(call, "all_gather", [array], outputs):
            super().run_all_gather(call, outputs, array)

    def run_reduce_scatter(
        self, call: CallRecord, output: Array, inputs: Sequence[Array], op: Op
    ) -> None:
        if not self._by_mpi(call, "reduce_scatter", inputs, [output], op=op):
            super().run_reduce_scatter(call, output, inputs, op)

    def run_all_to_all(
        self, call: CallRecord, outputs: Sequence[Array], inputs: Sequence[Array], even: bool
    ) -> None:
        if not (even and self._by_mpi(call, "all_to_all", inputs, outputs)):
            super().run_all_to_all(call, outputs, inputs, even)

    def _by_mpi(
        self, call: CallRecord, name: str, inputs: Sequence[Array], outputs: Sequence[Array], *,
        op: Op | None = None, root: int = -1,
    ) -> bool:  # fmt: skip
        """Run the call through MPI; return False, on all ranks, if MPI does not have it."""
        blocks = outputs if len(outputs) > len(inputs) else inputs
        if not (_native.totals(list(blocks))[2] and self.host.has_natively(call, name, blocks, op)):
            return False
        given, taken = ContiguousBlocks(inputs), ContiguousBlocks(outputs)
        given.copy_in()
        assert self._chosen is not None
        self._chosen.finish(StagedCall(self.host, call.name, call.deadline))
        each = blocks[0].size
        self.host.run_collective(
            call, name, given.blocks, taken.blocks, 0, op=op, root=root,
            count=each if name == "all_to_all" else each * len(blocks),
            flags=JOINED, algorithm="native",
        )  # fmt: skip
        taken.copy_out()
        return True


class ContiguousBlocks:
    """Adjacent blocks on a device: the arrays themselves, or memory for copies."""

    def __init__(self, blocks: Sequence[Array]) -> None:
        self._given = blocks
        self.blocks = list(blocks)
        if not adjacent(blocks):
            whole = _native.empty(sum(block.size for block in blocks), blocks[0])
            self.blocks = whole.split([block.size for block in blocks])

    def copy_in(self) -> None:
        """Enqueue the copies into that memory."""
        for block, given in zip(self.blocks, self._given, strict=True):
            block.copy_from(given)

    def copy_out(self) -> None:
        """Enqueue the copies back."""
        for block, given in zip(self.blocks, self._given, strict=True):
            given.copy_from(block)
