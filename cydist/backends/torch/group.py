"""TorchGroup: a torch group with cydist's interface and guarantees.

Collectives that torch's backend has with cydist's semantics are used; the others are derived from
its messages. Ranks compare their calls first, because gloo's collectives return wrong numbers, hang
or end the process when they differ. The comparison takes log2 p short gloo messages per call.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from cydist import _native, config
from cydist._native import CallRecord
from cydist.backends.host.chunking import adjacent
from cydist.backends.torch.work import (
    GRACE,
    ExpectedMessage,
    PostedMessage,
    SentMessage,
    TorchMessage,
    tensor_of,
    torch_timeout,
)
from cydist.errors import (
    DistError,
    GroupDestroyedError,
    MismatchError,
    from_call_error,
    rank_text,
    status_of,
)
from cydist.executor import THREADS, TaskWork
from cydist.groups.consistency import check_consistency
from cydist.groups.process_group import DERIVED_TAG, ProcessGroup
from cydist.reduce_ops import Op, RedOpType, op_and_factor
from cydist.work import Work

if TYPE_CHECKING:
    from cydist._native import Array
    from cydist.groups.registry import BackendOptions

SLICE = timedelta(milliseconds=50)  # between two checks of signals and the clock
FAILED_KEY = "failed"  # the key of a group's first error in the store

# dtype -> torch's, and the operations that gloo has with cydist's semantics. Its MIN and MAX of
# floats lose NaN; it treats bool as bytes.
_FLOATS = {RedOpType.SUM: "SUM", RedOpType.PRODUCT: "PRODUCT"}
_INTEGERS = {
    RedOpType[name]: name for name in ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
}
_BOOL = {
    RedOpType.SUM: "BOR",
    RedOpType.PRODUCT: "BAND",
    RedOpType.MIN: "BAND",
    RedOpType.MAX: "BOR",
    RedOpType.BAND: "BAND",
    RedOpType.BOR: "BOR",
    RedOpType.BXOR: "BXOR",
}
REDUCTIONS: dict[str, tuple[Any, dict[RedOpType, str]]] = {
    **{name: (getattr(torch, name), _INTEGERS) for name in ("int8", "uint8", "int32", "int64")},
    **{
        name: (getattr(torch, name), _FLOATS)
        for name in ("float32", "float64", "float16", "bfloat16")
    },
    "complex64": (torch.float32, {RedOpType.SUM: "SUM"}),
    "complex128": (torch.float64, {RedOpType.SUM: "SUM"}),
    "bool": (torch.uint8, _BOOL),
}

_groups: WeakSet[TorchGroup] = WeakSet()

# torch's groups with calls under way. If a group's own thread drops the last reference to it, torch
# ends the process.
_kept: list[Any] = []


class TorchGroup(ProcessGroup):
    """A group over a torch group that no other code uses.

    Attributes:
        torch_store: The store that torch's group was made with, and still uses.
    """

    torch_store: object
    authenticated = False

    def __init__(self, theirs: Any, name: str, options: BackendOptions) -> None:
        super().__init__(
            options.group_rank,
            options.group_size,
            timeout=options.timeout,
            name=options.group_id,
            ranks=options.global_ranks_in_group,
            backend=f"torch:{name}",
        )
        self._theirs = theirs
        self._store: Any = options.store
        self._under_way: set[object] = set()  # calls that wait, or will wait, in torch
        self._numbers = count()
        _groups.add(self)

    def chosen(self) -> dict[str, str]:
        return {"transport": f"torch's {self.backend.partition(':')[2]}"}

    # The end of the group.

    def fail(self, error: BaseException, call: str = "") -> None:
        """As the base class. Also notifies the other members of the error, and cuts the
        connections, which ends their waits."""
        if self.error is not None:
            return
        super().fail(error, call)
        if isinstance(error, GroupDestroyedError):
            return
        status = status_of(error)
        about = error.ranks[:1] if isinstance(error, DistError) else ()
        peer = self.ranks.index(about[0]) if about and about[0] in self.ranks else -1
        text = str(error) if status == "mismatch" else call
        with contextlib.suppress(Exception):
            self._store.compare_set(FAILED_KEY, "", json.dumps([status, self._rank, peer, text]))
        self._cut_connections()

    def is_of(self, pid: int) -> bool:
        """Return whether this process made the group."""
        return self.group_state.pid == pid

    def _cut_connections(self) -> None:
        """End all calls under way, here and at the other members."""
        with contextlib.suppress(Exception):
            self._theirs.abort()  # gloo's does nothing
        if self._size > 1:
            peer = (self._rank + 1) % self._size
            with contextlib.suppress(Exception):
                # gloo cuts all connections of a group when one of its receives is late.
                self._theirs.recv([torch.empty(1)], peer, 2**31 - 1).wait(torch_timeout(0))

    def close(self) -> None:
        if self.error is None:
            deadline = time.monotonic() + GRACE  # sent messages still arrive
            for each in list(self._under_way):
                if isinstance(each, TorchMessage) and each.sends:
                    each.wait_until(deadline)
        if self._under_way:
            self._cut_connections()
        deadline = time.monotonic() + GRACE
        while self._under_way and time.monotonic() < deadline:
            time.sleep(0.001)  # threads are returning from torch
        if self._under_way or self.error is not None:
            _kept.append(self._theirs)
        # Now, not when errors release this group, because the job's store ends with its last user.
        self._theirs = self._store = self.torch_store = None

    @contextmanager
    def failures(
        self, name: str, seq: int | None, deadline: float, posted: PostedMessage | None = None
    ) -> Iterator[None]:
        """Turn torch's exceptions into cydist's."""
        waited = max(0.0, deadline - time.monotonic())
        token = object()
        try:
            self._under_way.add(token)
            yield
        except DistError as error:
            if error.op is None:  # raised by torch/work.py, which knows no names
                where = f"{name}{'' if seq is None else f' #{seq}'} on {self.title}"
                error.args = (f"{where}: {error}",)
                error.op, error.seq, error.group = name, seq, self.group_name
                if posted is not None and posted.peer is not None:
                    error.ranks = (self.ranks[posted.peer],)
            raise
        except Exception as error:
            if (
                time.monotonic() >= deadline
                and not self.group_state.destroyed
                and self._recorded_failure() is None
            ):
                peer = None if posted is None else posted.peer
                raise self.timeout_error(name, seq, waited, peer) from error
            raise self._as_own_error(error, name, seq, posted) from error
        finally:
            self._under_way.discard(token)

    def timeout_error(
        self, name: str, seq: int | None, waited: float, peer: int | None
    ) -> DistError:
        """Return the error of a call that did not complete within `timeout` seconds."""
        failure = _native.CallError("timeout", -1 if peer is None else peer)
        return from_call_error(
            failure, name, self.group_name, self.ranks, seq, waited, title=self.title
        )

    def _recorded_failure(self) -> tuple[str, int, int, str] | None:
        """Return the group's first error, if it is known: status, reporting rank, failed rank,
        call."""
        with contextlib.suppress(Exception):
            if self._store.check([FAILED_KEY]):
                status, teller, peer, text = json.loads(self._store.get(FAILED_KEY))
                return status, teller, peer, text
        return None

    def _as_own_error(
        self, error: Exception, name: str, seq: int | None, posted: PostedMessage | None
    ) -> DistError:
        """Return cydist's error for torch's, which knows only of cut connections."""
        told = self._recorded_failure()
        why = ""
        if self.group_state.destroyed:
            failure = _native.CallError("closed")
        elif told is None:
            peer = -1 if posted is None or posted.peer is None else posted.peer
            failure = _native.CallError("peer_lost", peer)
            why = re.sub(r"^\[[^]]*\] ", "", str(error)).partition(". ")[0]
        else:
            status, teller, peer, text = told
            elsewhere = teller != self._rank
            if status == "mismatch":
                found = f" (found by {rank_text(teller, self.ranks)})" if elsewhere else ""
                return MismatchError(
                    text + found, op=name, seq=seq, group=self.group_name,
                    ranks=(self.ranks[teller],),
                )  # fmt: skip
            failure = _native.CallError(status, peer, ours=text, teller=teller if elsewhere else -1)
        return from_call_error(
            failure, name, self.group_name, self.ranks, seq, why=why, title=self.title,
            here=self.rank(),
        )  # fmt: skip

    # Messages.

    def isend(self, array: Array, peer: int, tag: int) -> Work:
        return self._start_message("send", lambda: self._sent(array, peer, tag))

    def irecv(self, array: Array, peer: int | None, tag: int) -> Work:
        return self._start_message("recv", lambda: ExpectedMessage(self._theirs, array, peer, tag))

    def _sent(self, array: Array, peer: int, tag: int) -> SentMessage:
        return SentMessage(self._theirs, array, peer, tag, next(self._numbers))

    def _start_message(self, name: str, post: Callable[[], PostedMessage]) -> Work:
        try:
            with self.failures(name, None, self.deadline(None)):
                work = TorchMessage(self, post())
        except DistError as error:
            self.fail(error, name)
            raise
        self._under_way.add(work)

        def run() -> None:
            work.run()
            self._under_way.discard(work)

        THREADS.run(run)
        return work

    def exchange_arrays(
        self,
        call: CallRecord,
        sends: Sequence[tuple[Array, int]],
        receives: Sequence[tuple[Array, int]],
    ) -> None:
        """As the base class, with one thread for all."""
        theirs, tag = self._theirs, DERIVED_TAG
        messages: list[PostedMessage] = []
        with self.failures(call.name, call.seq, call.deadline):
            messages += [ExpectedMessage(theirs, array, peer, tag) for array, peer in receives]
            messages += [self._sent(array, peer, tag) for array, peer in sends]

        def finish() -> None:
            for message in messages:
                with self.failures(call.name, call.seq, call.deadline, message):
                    message.finish(call.deadline + GRACE)

        work = TaskWork(call.name, finish, None)
        given = call.remaining()
        THREADS.run(work.run)
        if not work.wait_until(call.deadline):
            peer = next((message.peer for message in messages if not message.over), None)
            raise self.timeout_error(call.name, call.seq, given, peer)
        work.wait()

    # torch's own collectives.

    def _run(self, call: CallRecord, kind: Any, start: Callable[[Any], Any], **fields: Any) -> None:
        """Run a collective: `start` takes torch's options of `kind` and returns torch's Work."""
        options = kind()
        options.timeout = torch_timeout(call.remaining() + GRACE)
        options.asyncOp = True
        for name, value in fields.items():
            setattr(options, name, value)
        with self.failures(call.name, call.seq, call.deadline):
            work = start(options)
            try:
                self._await(work, call)
            except BaseException as error:
                # The call may write into the caller's arrays until it ends.
                self.fail(error, f"{call.name} #{call.seq}")
                with contextlib.suppress(Exception):
                    work.wait(torch_timeout(GRACE))
                raise

    def _await(self, work: Any, call: CallRecord) -> None:
        given = call.remaining()
        while True:
            try:
                work.wait(min(SLICE, torch_timeout(call.remaining())))
                return
            except Exception:
                if work.is_completed():
                    raise
            if call.remaining() <= 0:
                raise self.timeout_error(call.name, call.seq, given, None)

    def _reduction(self, array: Array, op: Op) -> tuple[Any, Any] | None:
        """Return torch's dtype and reduction if they have cydist's semantics, else None."""
        kind, factor = op_and_factor(op)
        dtype, operations = REDUCTIONS.get(array.dtype_name, (None, {}))
        if factor is not None or kind not in operations or not array.size or self._size == 1:
            return None
        if config.DETERMINISTIC.is_on() and dtype.is_floating_point:
            return None
        return dtype, getattr(dist.ReduceOp, operations[kind])

    def run_broadcast(self, call: CallRecord, array: Array, root: int) -> None:
        check_consistency(self, call, "broadcast", array, root=root)
        if array.nbytes and self._size > 1:
            tensor = [tensor_of(array)]
            self._run(
                call, c10d.BroadcastOptions, lambda o: self._theirs.broadcast(tensor, o),
                rootRank=root,
            )  # fmt: skip

    def run_all_reduce(self, call: CallRecord, array: Array, op: Op) -> None:
        check_consistency(self, call, "all_reduce", array, op=op)
        native = self._reduction(array, op)
        if native is None:
            super().run_all_reduce(call, array, op)
            return
        tensor = [tensor_of(array, native[0])]
        self._run(
            call, c10d.AllreduceOptions, lambda o: self._theirs.allreduce(tensor, o),
            reduceOp=native[1],
        )  # fmt: skip

    def run_reduce(self, call: CallRecord, array: Array, root: int, op: Op) -> None:
        check_consistency(self, call, "reduce", array, op=op, root=root)
        native = self._reduction(array, op)
        if native is None:
            super().run_reduce(call, array, root, op)
            return
        if self._rank != root:  # gloo overwrites it
            copy = array.empty_like()
            copy.copy_from(array)
            array = copy
        tensor = [tensor_of(array, native[0])]
        self._run(
            call, c10d.ReduceOptions, lambda o: self._theirs.reduce(tensor, o),
            reduceOp=native[1], rootRank=root,
        )  # fmt: skip

    def run_reduce_scatter(
        self, call: CallRecord, output: Array, inputs: Sequence[Array], op: Op
    ) -> None:
        check_consistency(
            self, call, "reduce_scatter", output, op=op, sizes=[block.size for block in inputs]
        )
        native = self._reduction(output, op)
        if native is None or not _of_one_size(inputs):
            super().run_reduce_scatter(call, output, inputs, op)
            return
        source = tensor_of(_flatten(inputs, filled=True), native[0])
        self._run(
            call, c10d.ReduceScatterOptions,
            lambda o: self._theirs._reduce_scatter_base(tensor_of(output, native[0]), source, o),
            reduceOp=native[1],
        )  # fmt: skip

    def run_all_gather(self, call: CallRecord, outputs: Sequence[Array], array: Array) -> None:
        check_consistency(
            self, call, "all_gather", array, sizes=[output.size for output in outputs]
        )
        if self._size == 1 or not array.nbytes or not _of_one_size(outputs):
            super().run_all_gather(call, outputs, array)
            return
        into = _flatten(outputs, filled=False)
        self._run(
            call, c10d.AllgatherOptions,
            lambda o: self._theirs._allgather_base(tensor_of(into), tensor_of(array), o),
        )  # fmt: skip
        _unflatten(into, outputs)

    def run_gather(
        self, call: CallRecord, array: Array, outputs: Sequence[Array] | None, root: int
    ) -> None:
        check_consistency(self, call, "gather", typed=array, root=root)
        if not self._all_of_one_size(call, [array, *(outputs or ())]):
            super().run_gather(call, array, outputs, root)
            return
        into = [[tensor_of(block) for block in outputs]] if outputs else []
        self._run(
            call, c10d.GatherOptions,
            lambda o: self._theirs.gather(into, [tensor_of(array)], o), rootRank=root,
        )  # fmt: skip

    def run_scatter(
        self, call: CallRecord, output: Array, inputs: Sequence[Array] | None, root: int
    ) -> None:
        check_consistency(self, call, "scatter", typed=output, root=root)
        if not self._all_of_one_size(call, [output, *(inputs or ())]):
            super().run_scatter(call, output, inputs, root)
            return
        source = [[tensor_of(block) for block in inputs]] if inputs else []
        self._run(
            call, c10d.ScatterOptions,
            lambda o: self._theirs.scatter([tensor_of(output)], source, o), rootRank=root,
        )  # fmt: skip

    def _all_of_one_size(self, call: CallRecord, blocks: Sequence[Array]) -> bool:
        """Return whether all blocks of all ranks have one size. No rank knows all sizes, so the
        ranks compare them."""
        if self._size == 1:
            return False
        sizes = [block.nbytes for block in blocks]
        extremes = torch.tensor([max(sizes), -min(sizes)])
        self._run(
            call, c10d.AllreduceOptions, lambda o: self._theirs.allreduce([extremes], o),
            reduceOp=dist.ReduceOp.MAX,
        )  # fmt: skip
        most, least = extremes.tolist()
        return bool(most == -least != 0)

    def run_all_to_all(
        self, call: CallRecord, outputs: Sequence[Array], inputs: Sequence[Array], even: bool
    ) -> None:
        block = outputs[0]
        check_consistency(
            self, call, "all_to_all", block if even else None, typed=None if even else block
        )
        if not even or self._size == 1 or not block.nbytes:
            super().run_all_to_all(call, outputs, inputs, even)
            return
        into, source = _flatten(outputs, filled=False), _flatten(inputs, filled=True)
        self._run(
            call, c10d.AllToAllOptions,
            lambda o: self._theirs.alltoall_base(tensor_of(into), tensor_of(source), [], [], o),
        )  # fmt: skip
        _unflatten(into, outputs)


@atexit.register
def _leave_all() -> None:
    """Make sure that no thread is in torch when Python ends: its return would end the process."""
    for group in list(_groups):
        if group.is_of(os.getpid()):
            group.destroy()


def _of_one_size(blocks: Sequence[Array]) -> bool:
    """Return whether all blocks hold the same number of elements."""
    return all(block.size == blocks[0].size for block in blocks)


def _flatten(blocks: Sequence[Array], *, filled: bool) -> Sequence[Array]:
    """Return the blocks themselves if they are adjacent in memory, else one array in their
    place."""
    if adjacent(blocks):
        return blocks
    joined = _native.empty(sum(block.size for block in blocks), blocks[0])
    if filled:
        _native.flatten_buffers(joined, blocks)
    return [joined]


def _unflatten(joined: Sequence[Array], blocks: Sequence[Array]) -> None:
    """Copy the array of `_flatten` back into the blocks."""
    if joined is not blocks:
        _native.unflatten_buffers(blocks, joined[0])
