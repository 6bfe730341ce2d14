"""The ProcessGroup of backend "nccl".

A call returns when it is enqueued on a stream: a blocking one on the current stream of the array's
library, an asynchronous one on the group's stream. A group of CPU memory with the same ranks, the
host group, carries everything else: objects, monitored barriers and control messages.

The group knows the collectives. Its parts enqueue them (enqueue.py), order streams (streams.py),
and watch its calls and fail (failure.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from cydist._native import CallRecord
from cydist.backends.host.chunking import adjacent
from cydist.backends.nccl import plans
from cydist.backends.nccl.binding import version_text
from cydist.backends.nccl.bootstrap import HostExchange, current_gpu, join, store_exchange
from cydist.backends.nccl.enqueue import StreamEnqueuer, fast_enqueuer
from cydist.backends.nccl.failure import FailureHandler
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
from cydist.backends.nccl.split import split_comm
from cydist.backends.nccl.streams import GroupStreams
from cydist.backends.nccl.watchdog import StreamCall
from cydist.devices import array_libraries
from cydist.errors import UnsupportedError
from cydist.group_names import group_title
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
    from cydist.backends.nccl.work import StreamWork
    from cydist.stores import MembershipStore

LEAVE_SECONDS = 2.0  # most seconds of a departure notice


class NcclGroup(ProcessGroup):
    """A group of ranks with one GPU each.

    Args:
        host: The group of CPU memory with the same ranks.
        control: Listens on the host group from before any rank has its group; None in a group of
            one rank.

    Attributes:
        comm: The communicator.
        streams: Its own stream, and the order between it and the callers' streams.
        failures: Watches its calls, and fails the group.
        enqueuer: Enqueues its calls.
    """

    coalesces_calls = splits_with_all = True

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
        self.comm = comm
        self._lock = comm.calls
        self.streams = GroupStreams(self, gpu, high_priority)
        self.failures = FailureHandler(self, host, binding, comm, gpu, self.streams, control)
        self.enqueuer = StreamEnqueuer(
            self, gpu, self.streams, self.failures, Runner(binding, comm, gpu)
        )
        self._collected: list[PlannedCall] | None = None  # inside `coalesced`
        self._messages: list[tuple[PlannedCall, StreamWork]] = []
        self._noted: list[str] = []
        self._token: Array | None = None
        self._splits = 0  # calls of `split`: the same on every rank
        self._fast_enqueuer = fast_enqueuer(self, comm, self.streams, self.failures)
        slow = self.enqueuer.blocking_wait or self.checks is not None
        self.fast_streams = None if slow else self._fast_enqueuer

    def chosen(self) -> dict[str, str]:
        of_host = self.host.chosen()
        return {
            "transport": f"NCCL {version_text(self.binding.version())}",
            "hosts": of_host.get("hosts", ""),
            "control messages": of_host["transport"],
        }

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

    # Running calls.

    def _checked(self, name: str, arrays: Sequence[Array]) -> None:
        for array in arrays:
            if array.device_index != self.gpu.index:
                raise ValueError(
                    f"{name}: the array is on GPU {array.device_index}, and "
                    f"{self.title} was made on GPU {self.gpu.index}, which was current then"
                )

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
        """Enqueue one collective. Calls run in the order in which they are issued.

        A blocking call returns when it is on the current stream, like all other GPU work of the
        caller. Raises errors that are known by then.
        """
        deadline = self.deadline(timeout)
        if array is not None:
            self._checked(name, [array])
        with self._lock:
            self.check_usable(name)
            self.gpu.use()
            call = StreamCall(name, 0, deadline)  # it gets its number once its streams are known
            if async_op or array is None or self.enqueuer.blocking_wait:
                work = self.enqueuer.start_work(
                    call, array, async_op or array is None, body, result
                )
            else:
                stream, own = array_libraries.stream_and_capture(array)
                flight, capturing = self.enqueuer.enqueue(
                    call, array, [stream], stream, body, result
                )
                if own and not capturing:
                    # Later work of this stream runs after the call, so the library may reuse the
                    # memory.
                    flight.keep = None
                return None
        if async_op:
            return work
        work.wait()
        return None

    # Failing.

    def fail(self, error: BaseException, call: str = "") -> None:
        """As the base class. Also ends the communicator, which ends the work on the GPU, and
        notifies the other ranks."""
        self.failures.fail(error, call)

    def on_refused(self, call: StreamCall, error: BaseException) -> None:
        """Fail the group for an exception during enqueuing on the fast path."""
        self.failures.on_refused(call, error)

    def abort(self) -> None:
        """End every call under way now, here and on the other ranks."""
        super().abort()
        self.host.abort()

    def check_usable(self, name: str) -> None:
        """As the base class. Also reads failures that the host group has received."""
        if self.error is None and self.host.error is not None:
            self.failures.on_host_error(name)
        super().check_usable(name)

    def last_call(self) -> CallRecord | None:
        """Return the first call that the GPU has not completed, or the last one."""
        return self.failures.watch.oldest or super().last_call()

    # The note of a call for other ranks, and its NCCL calls.

    def _note(
        self, call: CallRecord, what: tuple[object, ...] = (), op: str = "", root: int | None = None
    ) -> None:
        """Note a call that the next rank must make too, with what `describe` says of it."""
        if self._collected is not None:
            self._noted.append(describe("", what, op, root))
            return
        call.agreed = True
        call_check = self.failures.watch.call_check
        if call_check is not None and not self.enqueuer.capturing:
            call_check.note(call.seq, (call.name, what, op, root))

    def _run(
        self, plan: plans.Plan, arrays: Sequence[Array], factor: complex | None = None
    ) -> None:
        item = PlannedCall(plan, arrays, factor)
        if self._collected is not None:
            self._collected.append(item)
            return
        self.enqueuer.run([item])

    @contextmanager
    def coalesced(self) -> Iterator[None]:
        """Make the calls inside one NCCL group, which starts at the end."""
        with self._lock:
            self._fast_enqueuer.paused, self._collected = True, []
            try:
                yield
            except BaseException:
                self._collected, self._messages, self._noted = None, [], []
                raise
            finally:
                self._fast_enqueuer.paused = False
            items, self._collected = self._collected, None
            messages, self._messages = self._messages, []
            texts, self._noted = self._noted, []
            if messages or items:
                self.check_usable("a coalesced call")
            if messages:
                self.enqueuer.start_messages(messages)
            elif items and (call := self.call_queue.last_call()) is not None:
                self._note(call, (" and".join(texts).removeprefix(" of "),))
                self.enqueuer.run(items)

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
            source = self.ranks[peer] if kind == "recv" else None
            call = StreamCall(name, 0, self.deadline(None))
            work = self.enqueuer.message_work(call, array, packed, source)
            if self._collected is not None:
                self._messages.append((item, work))
            else:
                self.enqueuer.start_messages([(item, work)])
        return work

    # Collectives. The values that must be equal on all ranks are noted first.

    def run_broadcast(self, call: CallRecord, array: Array, root: int) -> None:
        self._note(call, (array.size, array.dtype_name), root=root)
        self._run(plans.broadcast(array.nbytes, root), [array])

    def _reduction_for(
        self, call: CallRecord, array: Array, op: Op
    ) -> tuple[NcclReduction, complex | None]:
        kind, factor = op_and_factor(op)
        how = reduction(kind, array.dtype_name, self._size == 1)
        if self._size == 1:
            if how.scale:
                check_factor(call.name, how.scale, self.gpu.lib)
        elif array.dtype_name in FLOAT8:  # CUDA and NCCL are slow to report their versions
            check_fp8(call.name, array.dtype_name, self.binding.version(), self.comm.capability)
        return how, factor

    def run_all_reduce(self, call: CallRecord, array: Array, op: Op) -> None:
        how, factor = self._reduction_for(call, array, op)
        self._note(call, (array.size, array.dtype_name), how.name)
        self._run(plans.all_reduce(self._rank, self._size, array.size, how), [array], factor)

    def run_reduce(self, call: CallRecord, array: Array, root: int, op: Op) -> None:
        how, factor = self._reduction_for(call, array, op)
        self._note(call, (array.size, array.dtype_name), how.name, root)
        self._run(plans.reduce(self._rank, self._size, array.size, root, how), [array], factor)

    def run_reduce_scatter(
        self, call: CallRecord, output: Array, inputs: Sequence[Array], op: Op
    ) -> None:
        how, factor = self._reduction_for(call, output, op)
        counts = tuple(each.size for each in inputs)
        self._note(call, (plans.describe_counts(counts), output.dtype_name), how.name)
        plan = plans.reduce_scatter(self._rank, counts, how, adjacent(inputs))
        self._run(plan, [output, *inputs], factor)

    def run_all_gather(self, call: CallRecord, outputs: Sequence[Array], array: Array) -> None:
        counts = [each.size for each in outputs]
        self._note(call, (plans.describe_counts(counts), array.dtype_name))
        sizes = tuple(each.nbytes for each in outputs)
        self._run(plans.all_gather(self._rank, sizes, adjacent(outputs)), [array, *outputs])

    def run_gather(
        self, call: CallRecord, array: Array, outputs: Sequence[Array] | None, root: int
    ) -> None:
        self._note(call, root=root)
        given = list(outputs or ())
        own = bool(given) and given[root].same_memory(array)
        sizes = tuple(each.nbytes for each in given)
        self._run(plans.gather(self._rank, sizes, array.nbytes, root, own), [array, *given])

    def run_scatter(
        self, call: CallRecord, output: Array, inputs: Sequence[Array] | None, root: int
    ) -> None:
        self._note(call, root=root)
        given = list(inputs or ())
        own = bool(given) and given[root].same_memory(output)
        sizes = tuple(each.nbytes for each in given)
        self._run(plans.scatter(self._rank, sizes, output.nbytes, root, own), [output, *given])

    def run_all_to_all(
        self, call: CallRecord, outputs: Sequence[Array], inputs: Sequence[Array], even: bool
    ) -> None:
        sent = (outputs[0].size, "for each,") if even else ("any sizes,",)
        self._note(call, (*sent, outputs[0].itemsize, "bytes an element"))
        sizes = [tuple(each.nbytes for each in arrays) for arrays in (outputs, inputs)]
        self._run(plans.all_to_all(*sizes), [*outputs, *inputs])

    def run_scan(self, call: CallRecord, array: Array, op: Op, inclusive: bool) -> None:
        raise UnsupportedError(
            f"{call.name}: backend 'nccl' has none: use backend 'tcp' or 'mpi', which take GPU "
            "arrays too",
            op=call.name, group=self.group_name,
        )  # fmt: skip

    def run_barrier(self, call: CallRecord) -> None:
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
        # Splitting is a call of all ranks, and only the members of a new group call this.
        if len(ranks) == self._size:
            return self._split([ranks], name, name, timeout, "new_group")
        return self._part(ranks, name, timeout, None)

    def split(
        self, parts: Sequence[Sequence[int]], name: str, timeout: float
    ) -> ProcessGroup | None:
        self._splits += 1
        meeting = f"{self.group_name}/split/{self._splits}"
        return self._split(parts, meeting, name, timeout, "split_group")

    def _split(
        self, parts: Sequence[Sequence[int]], meeting: str, name: str, timeout: float, call: str
    ) -> ProcessGroup | None:
        exchange: Exchange = HostExchange(self.host)
        if self.store is not None:
            title = f"{call} on {self.title}"
            store = self.store.part(f"{meeting}/ranks", self.ranks, title)
            exchange = store_exchange(store, self.host)
        comm = split_comm(self, exchange, parts, call, time.monotonic() + timeout)
        mine = next((part for part in parts if self._rank in part), None)
        return None if mine is None else self._part(mine, name, timeout, comm)

    def _part(
        self, ranks: Sequence[int], name: str, timeout: float, comm: Communicator | None
    ) -> ProcessGroup:
        """Make a group of some of the ranks, which all call this.

        Args:
            comm: Its communicator; None: the ranks make one.
        """
        host: Any = self.host.subgroup(ranks, name, timeout)  # of the host group's own class
        if self.store is None:
            return make(self.binding, host, HostExchange(host), None, self.high_priority, comm)
        members = [self.ranks[rank] for rank in ranks]
        store = self.store.part(f"{name}/nccl", members, f"making {group_title(name)}")
        with store.report_error(self.ranks[self._rank]):
            exchange = store_exchange(store, host)
            return make(self.binding, host, exchange, store, self.high_priority, comm)

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
        self.failures.abandon()
        host: Any = self.host.shrink(excluded, deadline, abort=abort)
        return make(self.binding, host, HostExchange(host), None, wanted)

    def renumber(self, ranks: Sequence[int]) -> None:
        super().renumber(ranks)
        self.host.renumber(ranks)

    def close(self) -> None:
        """Wait for calls under way until their deadlines, then leave."""
        watch = self.failures.watch
        while watch.oldest is not None and self.error is None:
            watch.poll()
            time.sleep(0.001)
        if self.error is None:
            watch.end_group(LEAVE_SECONDS)
        if self.failures.end_comm(abort=self.error is not None):
            # Wait for calls through their events, since a lost device has lost its streams, too.
            with suppress(Exception):
                self.streams.drop()
        with self.failures.broadcasting:  # ended by the thread that detected the failure
            self.host.destroy()


def make(
    binding: Binding,
    host: ControlGroup,
    exchange: Exchange,
    store: MembershipStore | None,
    priority: bool,
    split: Communicator | None = None,
) -> NcclGroup:
    """Make the GPU group of a host group. If that fails, the host group ends.

    Args:
        split: Its communicator, if that was split off another.
    """
    try:
        gpu = current_gpu()
        deadline = time.monotonic() + host.timeout
        # Before the ranks meet: the first one may fail before the last one has its group.
        control = ControlListener(host) if host.size() > 1 else None
        comm = join(
            binding, gpu, exchange, host.rank(), host.ranks, host.group_name, deadline, split
        )
        return NcclGroup(binding, comm, gpu, host, store, priority, control)
    except BaseException:
        host.destroy()
        raise
