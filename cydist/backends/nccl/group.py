"""The ProcessGroup of backend "nccl".

A call returns when it is enqueued on a stream: a blocking one on the current stream of the array's
library, an asynchronous one on the group's stream. A group of CPU memory with the same ranks, the
host group, carries everything else: objects, monitored barriers and control messages.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

from cydist import config
from cydist._native import CallRecord
from cydist.backends.host.chunking import adjacent
from cydist.backends.nccl import plans
from cydist.backends.nccl.bootstrap import HostExchange, current_gpu, join, store_exchange
from cydist.backends.nccl.call_check import CallCheck, HostNoteChannel
from cydist.backends.nccl.enqueue import EnqueueMixin
from cydist.backends.nccl.host_group import ControlListener
from cydist.backends.nccl.options import high_priority
from cydist.backends.nccl.plan_runner import PlannedCall, Runner
from cydist.backends.nccl.reductions import (
    FLOAT8,
    NcclReduction,
    check_factor,
    check_fp8,
    reduction,
)
from cydist.backends.nccl.watchdog import WATCHDOG, GroupWatch, InFlight, StreamCall
from cydist.backends.nccl.work import StreamWork, new_enqueuer
from cydist.devices import array_libraries
from cydist.errors import UnsupportedError
from cydist.groups.consistency import describe
from cydist.groups.process_group import ProcessGroup
from cydist.reduce_ops import Op, op_and_factor
from cydist.work import Work

if TYPE_CHECKING:
    from cydist._native import Array
    from cydist.backends.nccl.binding import Binding, Communicator
    from cydist.backends.nccl.bootstrap import Exchange
    from cydist.backends.nccl.cuda import Gpu
    from cydist.backends.nccl.host_group import ControlGroup
    from cydist.stores import MembershipStore

LEAVE_SECONDS = 2.0  # most seconds of a departure notice


class NcclGroup(EnqueueMixin):
    """A group of ranks with one GPU each.

    Args:
        host: The group of CPU memory with the same ranks.
        control: Listens on the host group from before any rank has its group; None in a group of
            one rank.
    """

    coalesces_calls = True

    def __init__(
        self,
        binding: Binding,
        comm: Communicator,
        gpu: Gpu,
        host: ControlGroup,
        store: MembershipStore | None,
        high_priority: bool,
        control: ControlListener | None,
    ) -> None:
        super().__init__(
            host.rank(), host.size(), timeout=host.timeout, name=host.group_name,
            ranks=host.ranks, backend="nccl",
        )  # fmt: skip
        self.devices = ("cuda",)
        self.host = host
        host.speaks_for = self
        self.binding = binding
        self.gpu = gpu
        self.store = store
        self.high_priority = high_priority
        self._runner = Runner(binding, comm, gpu)
        self._stream = gpu.stream(high_priority)
        self._lock = comm.calls
        call_check = CallCheck(HostNoteChannel(host)) if self._size > 1 else None
        self._control = control
        self._broadcasting = threading.RLock()
        self._ended_by: StreamCall | None = None
        self._watch = GroupWatch(self, call_check)
        WATCHDOG.add(self._watch)
        self._flight: InFlight | None = None  # of the call that is being enqueued
        self._stream_now = 0
        self._capturing = False
        self._collected: list[PlannedCall] | None = None  # inside `coalesced`
        self._messages: list[tuple[PlannedCall, StreamWork]] = []
        self._noted: list[str] = []
        self._token: Array | None = None
        self._captured: list[object] = []  # memory that CUDA graphs still use
        self._blocking_wait = config.NCCL_BLOCKING_WAIT.is_on()
        self._enqueuer = new_enqueuer(self, comm, self._watch, self._lock, self._stream)
        self.fast_streams = None if self._blocking_wait else self._enqueuer

    @property
    def comm(self) -> Communicator:
        """Return the communicator."""
        return self._runner.comm

    # Groups by kind of memory.

    def for_device(self, device: str) -> ProcessGroup:
        if device != "cuda":
            raise UnsupportedError(
                f"backend 'nccl' takes arrays on GPUs, and this one is on {device}: copy it there, "
                "or name a backend for it, as in init_process_group('cpu:tcp,cuda:nccl')",
                group=self.group_name,
            )
        return self

    def as_host_group(self) -> ProcessGroup:
        return self.host

    # The note of a call for other ranks, and its NCCL calls.

    def _note(
        self, call: CallRecord, what: tuple[object, ...] = (), op: str = "", root: int | None = None
    ) -> None:
        """Note a call that the next rank must make too, with what `describe` says of it."""
        if self._collected is not None:
            self._noted.append(describe("", what, op, root))
            return
        call.agreed = True
        if self._watch.call_check is not None and not self._capturing:
            self._watch.call_check.note(call.seq, (call.name, what, op, root))

    def _run(
        self, plan: plans.Plan, arrays: Sequence[Array], factor: complex | None = None
    ) -> None:
        item = PlannedCall(plan, arrays, factor)
        if self._collected is not None:
            self._collected.append(item)
            return
        self._start([item])

    def _start(self, items: Sequence[PlannedCall]) -> None:
        scratch = self._runner.run(items, self._stream_now)
        if scratch and self._flight is not None:
            self._flight.keep = (self._flight.keep, scratch)

    @contextmanager
    def coalesced(self) -> Iterator[None]:
        """Make the calls inside one NCCL group, which starts at the end."""
        with self._lock:
            self._enqueuer.paused, self._collected = True, []
            try:
                yield
            except BaseException:
                self._collected, self._messages, self._noted = None, [], []
                raise
            finally:
                self._enqueuer.paused = False
            items, self._collected = self._collected, None
            messages, self._messages = self._messages, []
            texts, self._noted = self._noted, []
            if messages or items:
                self.check_usable("a coalesced call")
            if messages:
                self._start_messages(messages)
            elif items and (call := self.call_queue.last_call()) is not None:
                self._note(call, (" and".join(texts).removeprefix(" of "),))
                self._start(items)

    # Messages. Strided arrays are packed and unpacked here, in the order of the streams.

    def accepts_strided(self, array: Array, peer: int | None) -> bool:
        return True

    def isend(self, array: Array, peer: int, tag: int) -> Work:
        return self._message("isend", "send", array, peer)

    def irecv(self, array: Array, peer: int | None, tag: int) -> Work:
        if peer is None:
            raise UnsupportedError(
                "irecv from anyone: NCCL's receives name their sender. Give src, or receive on a "
                "group of backend 'tcp' or 'mpi', which take GPU arrays too",
                group=self.group_name,
            )
        return self._message("irecv", "recv", array, peer)

    def _message(self, name: str, kind: str, array: Array, peer: int) -> StreamWork:
        """Enqueue one message on the group's stream; inside `coalesced` it starts with the
        others."""
        self._checked(name, [array])
        here = plans.BufferRange(0)
        if kind == "send":
            array = array.dense()
        packed = array if array.contiguous else array.empty_like()
        transfer = plans.Transfer(
            kind, here if kind == "send" else None, here if kind == "recv" else None, array.nbytes,
            peer=peer,
        )  # fmt: skip
        item = PlannedCall(plans.Plan(((transfer,),) if array.nbytes else ()), [packed], None)
        with self._lock:
            self.check_usable(name)
            flight = InFlight(
                StreamCall(name, 0, self.deadline(None)), (array, packed), self._stream
            )
            library = array_libraries.known_library_of(array)
            streams = [array_libraries.stream_of(array)]
            blocking = self._blocking_wait and not self._captured_of(streams)[1]
            source = self.ranks[peer] if kind == "recv" else None
            work = StreamWork(self, flight, [array.owner], streams, library, blocking, source)
            if self._collected is not None:
                self._messages.append((item, work))
            else:
                self._start_messages([(item, work)])
        return work

    def _start_messages(self, messages: Sequence[tuple[PlannedCall, StreamWork]]) -> None:
        self.gpu.use()
        flights = [work.flight for _, work in messages]
        streams = sorted({stream for _, work in messages for stream in work.streams})
        streams, capturing = self._captured_of(streams)
        if not capturing:
            self._check_own_stream(flights[0].call.name)
        try:
            for flight in flights:
                if not capturing:
                    self._watch.add(flight)
            self._order_after(self._stream, streams)
            self._stream_now = self._stream
            self._start([item for item, _ in messages])
            kept: list[Any] = [flight.keep for flight in flights]
            for into, packed in kept:
                if packed is not into:  # on the group's stream, after the receive
                    with self._current(into, self._stream):
                        into.copy_from(packed)
            for flight in flights:
                self._record(flight, self._stream, capturing)
        except BaseException as error:
            for flight in flights:
                self._watch.discard(flight)
            self.on_refused(flights[0].call, error)
            raise

    # Collectives. The values that must be equal on all ranks are noted first.

    def broadcast(self, call: CallRecord, array: Array, root: int) -> None:
        self._note(call, (array.size, array.dtype_name), root=root)
        self._run(plans.broadcast(array.nbytes, root), [array])

    def _reduction_for(
        self, call: CallRecord, array: Array, op: Op
    ) -> tuple[NcclReduction, complex | None]:
        kind, factor = op_and_factor(op)
        how = reduction(kind, array.dtype_name, self._size == 1)
        if self._size == 1:
            if how.scale:
                check_factor(call.name, how.scale)
        elif array.dtype_name in FLOAT8:  # CUDA and NCCL are slow to report their versions
            check_fp8(call.name, array.dtype_name, self.binding.version(), self.comm.capability)
        return how, factor

    def all_reduce(self, call: CallRecord, array: Array, op: Op) -> None:
        how, factor = self._reduction_for(call, array, op)
        self._note(call, (array.size, array.dtype_name), how.name)
        self._run(plans.all_reduce(self._rank, self._size, array.size, how), [array], factor)

    def reduce(self, call: CallRecord, array: Array, root: int, op: Op) -> None:
        how, factor = self._reduction_for(call, array, op)
        self._note(call, (array.size, array.dtype_name), how.name, root)
        self._run(plans.reduce(self._rank, self._size, array.size, root, how), [array], factor)

    def reduce_scatter(
        self, call: CallRecord, output: Array, inputs: Sequence[Array], op: Op
    ) -> None:
        how, factor = self._reduction_for(call, output, op)
        counts = tuple(each.size for each in inputs)
        self._note(call, (plans.describe_counts(counts), output.dtype_name), how.name)
        plan = plans.reduce_scatter(self._rank, counts, how, adjacent(inputs))
        self._run(plan, [output, *inputs], factor)

    def all_gather(self, call: CallRecord, outputs: Sequence[Array], array: Array) -> None:
        counts = [each.size for each in outputs]
        self._note(call, (plans.describe_counts(counts), array.dtype_name))
        sizes = tuple(each.nbytes for each in outputs)
        self._run(plans.all_gather(self._rank, sizes, adjacent(outputs)), [array, *outputs])

    def gather(
        self, call: CallRecord, array: Array, outputs: Sequence[Array] | None, root: int
    ) -> None:
        self._note(call, root=root)
        given = list(outputs or ())
        own = bool(given) and given[root].same_memory(array)
        sizes = tuple(each.nbytes for each in given)
        self._run(plans.gather(self._rank, sizes, array.nbytes, root, own), [array, *given])

    def scatter(
        self, call: CallRecord, output: Array, inputs: Sequence[Array] | None, root: int
    ) -> None:
        self._note(call, root=root)
        given = list(inputs or ())
        own = bool(given) and given[root].same_memory(output)
        sizes = tuple(each.nbytes for each in given)
        self._run(plans.scatter(self._rank, sizes, output.nbytes, root, own), [output, *given])

    def all_to_all(
        self, call: CallRecord, outputs: Sequence[Array], inputs: Sequence[Array], even: bool
    ) -> None:
        sent = (outputs[0].size, "for each,") if even else ("any sizes,",)
        self._note(call, (*sent, outputs[0].itemsize, "bytes an element"))
        sizes = [tuple(each.nbytes for each in arrays) for arrays in (outputs, inputs)]
        self._run(plans.all_to_all(*sizes), [*outputs, *inputs])

    def scan(self, call: CallRecord, array: Array, op: Op, inclusive: bool) -> None:
        raise UnsupportedError(
            f"{call.name}: backend 'nccl' has none: use backend 'tcp' or 'mpi', which take GPU "
            "arrays too",
            op=call.name, group=self.group_name,
        )  # fmt: skip

    def barrier(self, call: CallRecord) -> None:
        """Reduce one byte of each rank; `execute` waits until the GPU has done it."""
        self._note(call)
        if self._token is None:
            self._token = self.gpu.lib.allocate(self.gpu.index, 1)
        sum_ = NcclReduction("SUM", 0, "uint8")
        self._run(plans.all_reduce(self._rank, self._size, 1, sum_), [self._token])

    # Other groups, and the end.

    def subgroup(self, ranks: Sequence[int], name: str, timeout: float) -> ProcessGroup | None:
        if self.store is None:
            return None
        host: Any = self.host.subgroup(ranks, name, timeout)  # of the host group's own class
        members = [self.ranks[rank] for rank in ranks]
        store = self.store.part(f"{name}/nccl", members, f"making group {name!r}")
        with store.report_error(self.ranks[self._rank]):
            return make(self.binding, host, store_exchange(store, host), store, self.high_priority)

    def shrink(
        self,
        excluded: Sequence[int],
        deadline: float,
        *,
        abort: bool = False,
        pg_options: object = None,
    ) -> ProcessGroup:
        """As the base class: the host group determines the remaining ranks, which then join again.
        Calls under way here end with an error, since they may wait for a dead rank."""
        wanted = self.high_priority if pg_options is None else high_priority(pg_options)
        self.abandon()
        host: Any = self.host.shrink(excluded, deadline, abort=abort)
        return make(self.binding, host, HostExchange(host), None, wanted)

    def renumber(self, ranks: Sequence[int]) -> None:
        super().renumber(ranks)
        self.host.renumber(ranks)

    def close(self) -> None:
        """Wait for calls under way until their deadlines, then leave."""
        watch = self._watch
        while watch.oldest is not None and self.error is None:
            watch.poll()
            time.sleep(0.001)
        if self.error is None:
            watch.end_group(LEAVE_SECONDS)
        if self.end_comm(abort=self.error is not None):
            # Wait for calls through their events, since a lost device has lost its streams, too.
            with suppress(Exception):
                self.gpu.drop_stream(self._stream)
        with self._broadcasting:  # ended by the thread that detected the failure
            self.host.destroy()


def make(
    binding: Binding,
    host: ControlGroup,
    exchange: Exchange,
    store: MembershipStore | None,
    priority: bool,
) -> NcclGroup:
    """Make the GPU group of a host group. If that fails, the host group ends."""
    try:
        gpu = current_gpu()
        deadline = time.monotonic() + host.timeout
        # Before the ranks meet: the first one may fail before the last one has its group.
        control = ControlListener(host) if host.size() > 1 else None
        comm = join(binding, gpu, exchange, host.rank(), host.ranks, host.group_name, deadline)
        return NcclGroup(binding, comm, gpu, host, store, priority, control)
    except BaseException:
        host.destroy()
        raise
