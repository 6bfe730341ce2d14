"""GPU arrays on backends of CPU memory.

A `StagedGroup` stands in front of a `HostGroup` for device arrays. It cuts a call into chunks, lets
a pinned pipeline copy each to CPU memory and back, and passes them to the host group as calls of
its own. So fingerprints, deadlines and failures are the host group's. Every rank computes the chunk
sizes from the sizes of the call and the group alone.

A blocking call returns when the last copy to the device is enqueued, and the streams that were
current wait for it. An asynchronous call ends when that copy has ended.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from cydist import _native
from cydist._native import CallRecord, runs_in_background
from cydist.backends.host.chunking import CHUNK
from cydist.backends.host.pinned_pipeline import Chunk, PinnedPipeline, StagedCall, slot_view
from cydist.backends.host.staging_p2p import StagedP2PCalls, current_streams
from cydist.devices import array_libraries
from cydist.errors import MismatchError, counted
from cydist.groups.derived import UserOpReducer, elements_dtype
from cydist.groups.process_group import ProcessGroup
from cydist.reduce_ops import Op, UserReduction
from cydist.work import Work

if TYPE_CHECKING:
    from cydist._native import Array
    from cydist.backends.host.group import HostGroup

SLOTS = 3
SLOT_BYTES = 4 << 20

_CREATING = threading.Lock()  # guards pipelines, which several threads may create at first use


class StagedGroup(ProcessGroup):
    """The device arrays' side of a host group."""

    devices = ("cuda",)
    folds = True
    means = "copied through pinned memory of the host"  # for logs

    def __init__(self, host: HostGroup) -> None:
        super().__init__(
            host.rank(), host.size(), timeout=host.timeout, name=host.group_name,
            ranks=host.ranks, backend=host.backend,
        )  # fmt: skip
        self.host = host
        self._pipelines: dict[int, PinnedPipeline] = {}
        self._chosen: PinnedPipeline | None = None  # of the running call
        self._numbered: CallRecord | None = None  # the call whose number is already used
        self._cut = False  # cut into several calls of the host group, on all ranks alike
        self._messages = StagedP2PCalls(host)

    # Shared with the host group.

    def check_usable(self, name: str) -> None:
        self.host.check_usable(name)

    def fail(self, error: BaseException, call: str = "") -> None:
        self.host.fail(error, call)

    def close(self) -> None:
        for pipeline in self._pipelines.values():
            pipeline.close()
        self._pipelines.clear()
        self._messages.close()

    def check_accepts(self, name: str, array: Array) -> None:
        current_streams(array, name, self.group_name)

    # Running calls.

    def execute(
        self,
        name: str,
        body: Callable[[CallRecord], None],
        *,
        async_op: bool = False,
        timeout: float | timedelta | None = None,
        result: object = None,
        array: Array | None = None,
    ) -> Work | None:
        """As the base class, in the host group's turn. Raises UnsupportedError, before anything is
        sent, if no library can copy, and while a CUDA graph is captured."""
        assert array is not None
        self.check_usable(name)
        streams = current_streams(array, name, self.group_name)
        pipeline = self._pipeline(array)
        events = pipeline.record(streams)

        def staged(call: CallRecord) -> None:
            if runs_in_background():
                pipeline.lib.adopt(pipeline.device)
            self._chosen, self._cut = pipeline, False
            pipeline.wait_for_streams(events)
            with array_libraries.on_stream(pipeline.device, pipeline.into):
                body(call)
            if async_op:
                pipeline.finish(StagedCall(self.host, name, call.deadline))

        work = self.host.execute(name, staged, async_op=async_op, timeout=timeout, result=result)
        if not async_op:
            pipeline.make_streams_wait(streams)
        return work

    def _pipeline(self, array: Array) -> PinnedPipeline:
        """Return the pipeline of the array's device."""
        index = array.device_index
        with _CREATING:
            if index not in self._pipelines:
                lib = array_libraries.copying_library_of(array)
                self._pipelines[index] = PinnedPipeline(lib, index, SLOTS, SLOT_BYTES)
            return self._pipelines[index]

    # Point to point.

    def isend(self, array: Array, peer: int, tag: int) -> Work:
        return self._messages.isend(array, peer, tag)

    def irecv(self, array: Array, peer: int | None, tag: int) -> Work:
        return self._messages.irecv(array, peer, tag)

    # Collectives on one array, of equal size on every rank.

    def run_broadcast(self, call: CallRecord, array: Array, root: int) -> None:
        here = self._rank == root
        self._run_in_place(call, "broadcast", array, out=here, into=not here, root=root)

    def run_all_reduce(self, call: CallRecord, array: Array, op: Op) -> None:
        self._run_in_place(call, "all_reduce", array, op=op)

    def run_reduce(self, call: CallRecord, array: Array, root: int, op: Op) -> None:
        self._run_in_place(call, "reduce", array, into=self._rank == root, op=op, root=root)

    def run_scan(self, call: CallRecord, array: Array, op: Op, inclusive: bool) -> None:
        self._run_in_place(call, "scan" if inclusive else "exscan", array, op=op)

    def _run_in_place(
        self, call: CallRecord, name: str, array: Array, *, out: bool = True, into: bool = True,
        op: Op | None = None, root: int = -1,
    ) -> None:  # fmt: skip
        """Return the chunks of one array, each in place."""

        def exchange(slot: list[Array]) -> None:
            outputs = slot if into or name == "broadcast" else []
            self._run(call, name, slot, outputs, op=op, root=root, count=array.size)

        each = chunk_size(1, array)
        self._run_rounds(call, round_count(each, [array]), each, [array], [out], [into], exchange)

    # Collectives on blocks, whose sizes every rank knows.

    def run_all_gather(self, call: CallRecord, outputs: Sequence[Array], array: Array) -> None:
        count = sum(block.size for block in outputs)

        def exchange(slot: list[Array]) -> None:
            self._run(call, "all_gather", [slot[self._rank]], slot, count=count)

        if not outputs[self._rank].same_memory(array):
            outputs[self._rank].copy_from(array)
        blocks = [*outputs]
        blocks[self._rank] = array  # the copy above is already ordered with the streams
        each = chunk_size(self._size, array)
        own = [rank == self._rank for rank in range(self._size)]
        self._run_rounds(
            call,
            round_count(each, outputs),
            each,
            blocks,
            own,
            [not here for here in own],
            exchange,
        )

    def run_reduce_scatter(
        self, call: CallRecord, output: Array, inputs: Sequence[Array], op: Op
    ) -> None:
        count = sum(block.size for block in inputs)

        def exchange(slot: list[Array]) -> None:
            self._run(call, "reduce_scatter", slot[:-1], slot[-1:], op=op, count=count)

        each = chunk_size(self._size + 1, output)
        last = [False] * self._size + [True]
        first = [not is_last for is_last in last]
        self._run_rounds(
            call, round_count(each, inputs), each, [*inputs, output], first, last, exchange
        )

    # Collectives on blocks whose sizes only the root, or only pairs of ranks, know.

    def run_gather(
        self, call: CallRecord, array: Array, outputs: Sequence[Array] | None, root: int
    ) -> None:
        sends, receives = [0] * self._size, [block.size for block in outputs or ()]
        sends[root] = array.size
        each = chunk_size(self._size + 1, array)
        most = self._compare_counts(call, "gather", array, root, each, sends, receives)

        def exchange(slot: list[Array]) -> None:
            self._run(call, "gather", slot[:1], slot[1:], root=root, uneven=True)

        into = [False] + [True] * len(receives)
        self._run_rounds(
            call, most, each, [array, *(outputs or ())], [not i for i in into], into, exchange
        )

    def run_scatter(
        self, call: CallRecord, output: Array, inputs: Sequence[Array] | None, root: int
    ) -> None:
        sends, receives = [block.size for block in inputs or ()], [0] * self._size
        receives[root] = output.size
        each = chunk_size(self._size + 1, output)
        most = self._compare_counts(call, "scatter", output, root, each, sends, receives)

        def exchange(slot: list[Array]) -> None:
            self._run(call, "scatter", slot[1:], slot[:1], root=root, uneven=True)

        out = [False] + [True] * len(sends)
        self._run_rounds(
            call, most, each, [output, *(inputs or ())], out, [not o for o in out], exchange
        )

    def run_all_to_all(
        self, call: CallRecord, outputs: Sequence[Array], inputs: Sequence[Array], even: bool
    ) -> None:
        each = chunk_size(2 * self._size, outputs[0])
        if even:
            most, count = round_count(each, outputs), outputs[0].size
        else:
            sends, receives = [block.size for block in inputs], [block.size for block in outputs]
            most, count = (
                self._compare_counts(call, "all_to_all", outputs[0], -1, each, sends, receives),
                0,
            )

        def exchange(slot: list[Array]) -> None:
            given, taken = slot[: self._size], slot[self._size :]
            self._run(call, "all_to_all", given, taken, count=count, uneven=not even)

        out = [True] * self._size + [False] * self._size
        into = [not o for o in out]
        self._run_rounds(call, most, each, [*inputs, *outputs], out, into, exchange)

    def run_barrier(self, call: CallRecord) -> None:
        self.host.run_barrier(call)

    # Shared parts.

    def _run_rounds(
        self, call: CallRecord, count: int, each: int, arrays: Sequence[Array], out: Sequence[bool],
        into: Sequence[bool], exchange: Callable[[list[Array]], None],
    ) -> None:  # fmt: skip
        """Cut the arrays into `count` rounds of at most `each` elements. In each round their pieces
        share one slot.

        Args:
            out, into: Whether an array is copied from the device before, and to it after, the
                exchange.
        """
        cut = [split_rounds(array, each, count) for array in arrays]
        self._cut = count > 1

        def chunk(i: int) -> Chunk:
            row = [parts[i] for parts in cut]
            starts = [sum(piece.nbytes for piece in row[:k]) for k in range(len(row))]
            placed = list(zip(starts, row, strict=True))

            def on_slot(memory: Array) -> None:
                exchange([slot_view(memory, start, piece) for start, piece in placed])

            return Chunk(
                sum(piece.nbytes for piece in row),
                [place for place, moves in zip(placed, out, strict=True) if moves],
                [place for place, moves in zip(placed, into, strict=True) if moves],
                on_slot,
            )

        assert self._chosen is not None
        staged = StagedCall(self.host, call.name, call.deadline)
        self._chosen.run([chunk(i) for i in range(count)], staged)

    def _run(
        self, call: CallRecord, name: str, inputs: list[Array], outputs: list[Array], *,
        op: Op | None = None, root: int = -1, count: int = 0, uneven: bool = False,
    ) -> None:  # fmt: skip
        """Run a chunk's collective on the host, under its own number. `count` is the whole call's,
        so that ranks that disagree about it find out in the first chunk."""
        if self._numbered is call:
            call.seq = self.host.next_seq()
        self._numbered = call
        if isinstance(op, UserReduction):
            self._reduce_by_function(call, name, inputs, outputs, op, root, count)
            return
        blocks = outputs if name == "all_gather" else inputs
        _, nbytes, even = (0, 0, False) if uneven else _native.totals(blocks)
        self.host.run_collective(
            call, name, inputs, outputs, nbytes, op=op, root=root, count=count, even=even,
            flags=CHUNK if self._cut else 0,
        )  # fmt: skip

    def _reduce_by_function(
        self, call: CallRecord, name: str, inputs: list[Array], outputs: list[Array],
        op: UserReduction, root: int, count: int,
    ) -> None:  # fmt: skip
        """Run a chunk of a user-defined reduction on the host."""
        folding = UserOpReducer(self.host, op, elements_dtype(inputs[0]), count)
        if name == "all_reduce":
            folding.run_all_reduce(call, inputs[0], op)
        elif name == "reduce":
            folding.run_reduce(call, inputs[0], root, op)
        elif name == "reduce_scatter":
            folding.run_reduce_scatter(call, outputs[0], inputs, op)
        else:
            folding.run_scan(call, inputs[0], op, name == "scan")

    def _compare_counts(
        self, call: CallRecord, name: str, array: Array, root: int, each: int, sends: list[int],
        receives: list[int],
    ) -> int:  # fmt: skip
        """Exchange the numbers of elements that each rank sends to and receives from each other.
        Returns the number of rounds. Raises MismatchError, on every rank, if two ranks do not fit
        together."""
        p, none = self._size, [0] * self._size
        head = [NAMES.index(name), root, array.dtype, array.dtype_hash, array.itemsize]
        mine = struct.pack(f"<{5 + 2 * p}q", *head, *(sends or none), *(receives or none))
        rows = [_native.empty(len(mine)) for _ in range(p)]
        memoryview(rows[self._rank])[:] = mine
        self._run(call, "all_gather", [rows[self._rank]], rows, count=p * len(mine))
        table = [struct.unpack(f"<{5 + 2 * p}q", memoryview(row)) for row in rows]
        for a in range(p):
            if table[a][:5] != table[0][:5]:
                raise self._mismatch(
                    call, 0, a, describe_counts(table[0]), describe_counts(table[a])
                )
            for b in range(p):
                sent, expected = table[a][5 + b], table[b][5 + p + a]
                if sent != expected:
                    raise self._mismatch(
                        call,
                        a,
                        b,
                        f"sends {counted(sent, 'element')}",
                        f"expects {expected} of them",
                    )
        most: int = max(size for row in table for size in row[5:])
        return max(1, -(-most // each))

    def _mismatch(self, call: CallRecord, a: int, b: int, first: str, second: str) -> MismatchError:
        ranks = (self.ranks[a], self.ranks[b])
        return MismatchError(
            f"{call.name} #{call.seq} on {self.title}: rank {ranks[0]} {first}, and "
            f"rank {ranks[1]} {second}",
            op=call.name, seq=call.seq, group=self.group_name, ranks=ranks,
        )  # fmt: skip


NAMES = ("gather", "scatter", "all_to_all")


def describe_counts(row: Sequence[int]) -> str:
    """Describe a row of the table that ranks compare, for messages."""
    root = f" with root {row[1]}" if row[1] >= 0 else ""
    return f"is in {NAMES[row[0]]}{root} of elements of {row[4]} bytes (dtype {row[2]})"


def chunk_size(parts: int, array: Array) -> int:
    """Return the number of elements of each of `parts` pieces that share a slot; at least one."""
    return int(max(1, SLOT_BYTES // (parts * array.itemsize)))


def round_count(each: int, arrays: Sequence[Array]) -> int:
    """Return the number of rounds of `each` elements for the largest array; at least one."""
    return max(1, *(-(-array.size // each) for array in arrays))


def split_rounds(array: Array, each: int, count: int) -> list[Array]:
    """Return an array cut into `count` rounds of `each` elements; the last ones may have fewer."""
    return array.split([max(0, min(each, array.size - i * each)) for i in range(count)])
