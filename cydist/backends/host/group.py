"""A group of ranks over one link: the backends "tcp" (alias "gloo") and "inproc".

The compiled engine does the work. A HostGroup gives it arrays and an algorithm, and turns failures
into exceptions. create.py makes the link.
"""

from __future__ import annotations

import atexit
import math
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING
from weakref import ref

from cydist import _native, recorder
from cydist._native import ANY_SOURCE, CallRecord, ShmLink
from cydist.backends.host import traffic
from cydist.backends.host.chunking import EVEN, WHOLE_BYTES, chunks
from cydist.backends.host.endpoint import DRAIN_SECONDS, Endpoint, comm_id_of, opened
from cydist.backends.host.membership import Membership
from cydist.backends.host.peer_report import (
    GONE,
    LAST_CALLS,
    SILENT,
    PeerReport,
    describe_report,
    gather,
    is_late,
    silent_here,
    stacks,
)
from cydist.backends.host.traffic import Traffic
from cydist.backends.host.work import P2PWork, timed_out, wire_tag
from cydist.errors import (
    DistError,
    DistTimeoutError,
    GroupDestroyedError,
    GroupFailedError,
    MismatchError,
    PeerFailedError,
    from_call_error,
    listed,
    rank_text,
    status_of,
)
from cydist.group_names import GroupName
from cydist.groups.derived import other_ranks
from cydist.groups.process_group import ProcessGroup
from cydist.logs import DEBUG, Log
from cydist.reduce_ops import Op, RedOpType, op_and_factor
from cydist.tuning import table as tuning_table
from cydist.waiting import duration
from cydist.work import Work

if TYPE_CHECKING:
    from datetime import timedelta

    from cydist._native import Array, Message
    from cydist.backends.host.staging_group import StagedGroup
    from cydist.executor import PollHook

MOST_ASKED = 16  # ranks that are queried after a deadline
MOST_COMPARED = 3  # ranks whose last calls a mismatch shows
MOST_LOGGED = 16  # hosts that a log line names

_log = Log("group")
_CREATING = threading.Lock()  # several threads may call with a first device array


class HostGroup(ProcessGroup):
    """A group of ranks over one link (src/transports).

    Modules beside this one serve a part of its calls: device arrays, chunks, messages, and MPI.
    They and compiled code use the names without an underscore, which are no interface for others:
    `native`, `run_collective`, `open_windows`, `poll_hook`, `failures`, and what messages need.

    Attributes:
        native: The group's compiled half.
    """

    devices = ("cpu", "cuda")
    packs = splits_without_peers = True
    fast_messages = fast_calls = True  # whether src/fastpath makes all checks that its calls need
    library = ""  # the name of a library below the link with its own collectives

    authenticated = True

    def __init__(
        self,
        endpoint: Endpoint,
        rank: int,
        peers: Sequence[int],
        *,
        timeout: float,
        name: str,
        ranks: Sequence[int] | None = None,
        backend: str = "tcp",
    ) -> None:
        self._endpoint = endpoint.share()
        self._peers = tuple(peers)
        self._comm_id = comm_id_of(name, self._peers)
        self.native = _native.Group(endpoint.link, self._peers, rank, self._comm_id)
        self.placement = ""  # a key of measurements: see tuning_table.placement_of
        if endpoint.hosts:
            hosts = [endpoint.hosts[peer] for peer in self._peers]
            self.native.place_on_hosts(hosts)
            self.placement = tuning_table.placement_of(hosts)
        super().__init__(rank, len(peers), timeout=timeout, name=name, ranks=ranks, backend=backend)
        self.native.call_queue = self.call_queue
        if self.checks is not None:  # the fast path makes none
            self.fast_calls = self.fast_messages = False
        self._thread = threading.get_ident()
        endpoint.groups[self._comm_id] = ref(self)
        endpoint.note_members(name, self.ranks)
        self._drain_until = math.inf  # set by leave_job: how long `drain` waits
        self._membership: Membership | None = None
        self._shrunk: HostGroup | None = None  # until shrink returns
        self._messages: set[Message] = set()  # under way, or completed since the last sweep
        self._sweep_at = 4
        self._staged: StagedGroup | None = None  # made at the first device array

    def for_device(self, device: str) -> ProcessGroup:
        if device not in self.devices:
            return super().for_device(device)
        if device == "cpu":
            return self
        if self._staged is None:
            staged_class = self.staged_class()
            with _CREATING:
                if self._staged is None:
                    _log.debug("arrays on %s on %s: %s", device, self.title, staged_class.means)
                    self._staged = staged_class(self)
        return self._staged

    def staged_class(self) -> type[StagedGroup]:
        """Return the class of the group that serves device arrays, if they are usable here."""
        from cydist.backends.host.staging_group import StagedGroup  # rarely needed

        return StagedGroup

    @property
    def poll_hook(self) -> PollHook | None:
        """Return the function that waits for background calls and runs them meanwhile; None: they
        progress without a waiting thread."""
        return self._serial.poll_hook

    @property
    def timeout(self) -> float:
        """Return the default time limit of a call, in seconds."""
        return self.native.timeout  # the fast path reads it there without calling Python

    @timeout.setter
    def timeout(self, timeout: float | timedelta) -> None:
        self.native.timeout = duration(timeout)  # compiled code converts it to nanoseconds

    @property
    def windows(self) -> bool:
        """Return whether the ranks can map each other's memory."""
        with self.failures("the first call", None, self.deadline(None)):
            return self.native.windows

    def share(self, nbytes: int) -> memoryview | None:
        link = self._endpoint.link
        if not isinstance(link, _native.ShmLink) or link.heap.nbytes == 0:
            return None
        return memoryview(link.heap.allocate(nbytes))

    def chosen(self) -> dict[str, str]:
        words = {"transport": self._transport()}
        if hosts := self._hosts_text():
            words["hosts"] = hosts
        if listens := self._endpoint.listens():
            words["listens at"] = listens
        algorithms = tuning_table.chosen(self._size, self.native.hosts, self.placement)
        return {**words, "algorithms": algorithms}

    def _transport(self) -> str:
        """Return how bytes reach the other ranks, for logs."""
        link = self._endpoint.link
        if isinstance(link, _native.InprocLink):
            return "memory of this process, whose threads are the ranks"
        messages = self.library or "tcp"
        others = other_ranks(self)
        sharing = []
        if isinstance(link, ShmLink):
            sharing = [rank for rank in others if link.process_of(self._peers[rank])]
        if len(sharing) == len(others):
            return "shared memory" if others else "none, this rank is alone"
        if not sharing:
            return messages
        shared = listed("rank", [self.ranks[rank] for rank in sharing])
        return f"shared memory with {shared}, {messages} with the others"

    def _hosts_text(self) -> str:
        """Return which global ranks are on which host, for logs; "": it is not known."""
        hosts: dict[int, list[int]] = {}
        for rank, peer in enumerate(self._peers):
            if self._endpoint.hosts:
                hosts.setdefault(self._endpoint.hosts[peer], []).append(rank)
        texts = [
            f"{self.host_of(members[0]) or 'a host'} with "
            f"{listed('rank', [self.ranks[rank] for rank in members])}"
            for members in list(hosts.values())[:MOST_LOGGED]
        ]
        more = len(hosts) - len(texts)
        return ", ".join(texts) + (f" and {more} more" if more else "")

    def shares(self, array: Array) -> bool:
        link = self._endpoint.link
        return (
            isinstance(link, _native.ShmLink)
            and array.contiguous
            and link.memory.holds(array.address, array.nbytes)
            and self.windows
        )

    def subgroup(self, ranks: Sequence[int], name: str, timeout: float) -> HostGroup:
        return type(self)(
            self._endpoint,
            list(ranks).index(self._rank),
            [self._peers[rank] for rank in ranks],
            timeout=timeout,
            name=name,
            ranks=[self.ranks[rank] for rank in ranks],
            backend=self.backend,
        )

    def shrink(
        self,
        excluded: Sequence[int],
        deadline: float,
        *,
        abort: bool = False,
        pg_options: object = None,
    ) -> ProcessGroup:
        if abort:
            self.abort()
        if self._shrunk is None:
            self._shrunk = self._of_members(excluded, deadline)
        found = self._shrunk
        made: ProcessGroup = found
        out = {self._peers[rank] for rank in excluded}
        try:
            limit = max(0.0, deadline - time.monotonic())
            found.execute("shrink_group", found.run_barrier, timeout=limit)
        except (PeerFailedError, GroupFailedError):
            # Made now, or in an earlier attempt. Other ranks may already have the new group: they
            # find it failed, and shrink it too.
            left = [rank for rank, peer in enumerate(found._peers) if peer in out]
            made = found.shrink(left, deadline)
            found.destroy()
        self._shrunk = None
        return made

    def _of_members(self, excluded: Sequence[int], deadline: float) -> HostGroup:
        if self._membership is None:
            self._membership = Membership(
                self._endpoint.link, self._peers, self._rank,
                comm_id_of(f"{self.group_name}:survivors", self._peers),
                self.group_name, self.ranks,
            )  # fmt: skip
        members = self._membership.agree(excluded, deadline)
        # It takes this one's place, so it is called the same.
        name = GroupName(f"{self.group_name}:shrunk", self.group_desc)
        return self.subgroup(members, name, self.timeout)

    def leave_job(self, now: float) -> None:
        self._drain_until = now + DRAIN_SECONDS

    def drain(self) -> None:
        """Compare the group's last call with the other members', at the end of the group. Wait
        briefly for members that have not made it. Raises MismatchError.

        A rank that leaves early, to shrink the group or because of an exception, only sends its
        last call.
        """
        call = self.last_call()
        if self.error is not None or call is None:
            return
        leaves = self._membership is not None or sys.exc_info()[0] is not None
        deadline = min(self.deadline(DRAIN_SECONDS), self._drain_until, self._endpoint.drain_until)
        try:
            with self.failures(call.name, call.seq, deadline):
                self.compare_last(deadline, leaves)
        except BaseException as error:
            self.fail(error, f"{call.name} #{call.seq}")
            if not (leaves and isinstance(error, MismatchError)):
                raise

    def compare_last(self, deadline: float, leaves: bool) -> None:
        """Run the part of `drain` that raises CallError."""
        self.native.compare_last(int(deadline * 1e9), leaves)

    def close(self) -> None:
        try:
            self.drain()
        finally:
            self._close()

    def _close(self) -> None:
        """Release the group's resources."""
        if self._staged is not None:
            self._staged.close()
        self._endpoint.groups.pop(self._comm_id, None)
        self.native.close()
        self._messages.clear()
        if self._membership is not None:
            self._membership.close()
        if self._shrunk is not None:
            self._shrunk.destroy()
        self._endpoint.release()

    def abort(self) -> None:
        self.native.abort()
        super().abort()

    def check_usable(self, name: str) -> None:
        """As the base class. Raises ValueError for bad settings before anything is sent."""
        if not self.group_state.is_usable():  # so that most calls need no second function
            super().check_usable(name)
        tuning_table.check()

    def run_as_part_of(self, call: CallRecord | None) -> None:
        self.native.run_as_part_of(call)

    def announce_call(self, call: CallRecord) -> None:
        with self.failures(call.name, call.seq, call.deadline):
            self.native.announce_call(call.name, call.seq)

    def fail(self, error: BaseException, call: str = "") -> None:
        """As the base class. Also notifies the other members, unless the engine has, and ends every
        message here."""
        if self.error is not None:
            return
        super().fail(error, call)
        if isinstance(error, GroupDestroyedError):
            return
        try:
            if isinstance(error, DistTimeoutError) and not self.native.failure_is_known:
                # First, so that ranks that learn of it leave their calls.
                awaited = [self.ranks.index(rank) for rank in error.ranks if rank in self.ranks]
                moved = traffic.snapshot(self._traffic_with, awaited)
                late = self._describe_late(awaited)
                error.args = (f"{error}{late}{traffic.describe(moved, self._named)}",)
        finally:
            self._broadcast_failure(error, call)
        if isinstance(error, MismatchError):  # after that: no rank waits for the answers
            error.args = (f"{error}{self._describe_calls(error.ranks)}",)

    def _broadcast_failure(self, error: BaseException, call: str) -> None:
        about = error.ranks[:1] if isinstance(error, DistError) else ()
        self.native.fail(
            status_of(error),
            self.ranks.index(about[0]) if about and about[0] in self.ranks else -1,
            call,
        )
        for message in list(self._messages):
            message.test()

    # Reports on the ranks, for messages.

    def report(self) -> PeerReport:
        """Return what this rank is doing, for a rank that has given up on it."""
        failed = "" if self.error is None else f"; the group has failed on it: {self.error}"
        own_process = self._endpoint.own_process
        lines = [self._last_calls(), stacks([self._thread], own_process)]
        return PeerReport(
            f"{self.doing()}{failed}".partition("\n")[0], "\n".join(filter(None, lines))
        )

    def _describe_calls(self, ranks: Sequence[int]) -> str:
        """Return lines on the last calls of this rank and of some global ranks, as far as these
        still answer: they show where ranks took different ways. Return "" in the first call of the
        group, which the error names."""
        query = self._endpoint.query
        if len(recorder.last_calls(self.call_queue.group_number, most=2)) < 2:
            return ""
        theirs = [self.ranks.index(rank) for rank in ranks if rank in self.ranks]
        asked = [rank for rank in theirs if rank != self._rank][:MOST_COMPARED]
        found: dict[int, PeerReport] = {}
        if query is not None:
            found = gather(
                lambda rank, deadline: query(self._peers[rank], self._comm_id, deadline), asked
            )
        lines = [f"\n{self._named(self._rank)} (here): {self._last_calls()}"]
        for rank, report in found.items():
            lines += [
                f"\n{self._named(rank)}: {line}"
                for line in report.stacks.splitlines()
                if line.startswith(LAST_CALLS)
            ]
        return "".join(lines)

    def _last_calls(self) -> str:
        """Return a line on this rank's last calls of the group; "": it has made none."""
        calls = recorder.last_calls(self.call_queue.group_number)
        return f"{LAST_CALLS}{', '.join(calls)}" if calls else ""

    def _traffic_with(self, rank: int) -> Traffic | None:
        found = self._endpoint.traffic(self._peers[rank])
        return None if found is None else Traffic(*found)

    def _named(self, rank: int) -> str:
        return rank_text(rank, self.ranks, self.host_of(rank))

    def _silence_of(self, rank: int) -> PeerReport:
        """Return what is known of a group rank that gives no answer."""
        link, peer = self._endpoint.link, self._peers[rank]
        if link.rank not in self._endpoint.ranks_beside(peer):
            return SILENT
        return silent_here(link.process_of(peer) if isinstance(link, ShmLink) else 0)

    def _describe_late(self, awaited: Sequence[int]) -> str:
        """Return lines on what the late ranks are doing. If all of the awaited ones wait in this
        rank's call themselves, also report other late ranks."""
        query = self._endpoint.query
        if query is None:
            return ""

        def asked_of(rank: int, deadline: float) -> PeerReport:
            return query(self._peers[rank], self._comm_id, deadline)

        call = self.last_call()
        here = self.doing() if call is not None and not call.over else ""
        asked = awaited[:MOST_ASKED]
        found = gather(asked_of, asked)
        if not any(is_late(report, here) for report in found.values()):
            others = [rank for rank in other_ranks(self) if rank not in asked][:MOST_ASKED]
            found |= gather(asked_of, others)
        late = {
            rank: self._silence_of(rank) if each is SILENT else each
            for rank, each in found.items()
            if is_late(each, here)
        }
        late |= gather(
            lambda rank, deadline: self._endpoint.absence(
                self._peers[rank], self.group_name, self.ranks, deadline
            ),
            [rank for rank, each in late.items() if each == GONE],
        )
        if found and not late:
            return f"\nall ranks that were asked are {here} too, or were"
        return "".join(
            describe_report(self._named(rank), late[rank], self._traffic_with(rank))
            for rank in sorted(late)
        )

    def host_of(self, rank: int) -> str:
        """Return the name of a group rank's host; "" if all ranks are in one process."""
        return self._endpoint.host_of(self._peers[rank])

    def announce_request(self, name: str, backend: str) -> None:
        self._endpoint.announce_request(name, self._peers, backend)

    def peer_requests(self, name: str, ranks: Sequence[int]) -> dict[int, str]:
        return self._endpoint.peer_requests(name, self._peers, ranks)

    # Point to point.

    def isend(self, array: Array, peer: int, tag: int, about: Array | None = None) -> Work:
        """As the base class. `about`: an array that this message announces, to a receive that
        expects that."""
        return self._start_message("send", array, peer, tag, about)

    def irecv(self, array: Array, peer: int | None, tag: int, about: Array | None = None) -> Work:
        return self._start_message("recv", array, ANY_SOURCE if peer is None else peer, tag, about)

    def _start_message(
        self, name: str, array: Array, peer: int, tag: int, about: Array | None
    ) -> Work:
        post = _native.isend if name == "send" else _native.irecv
        message = post(
            self.native, array, peer, wire_tag(tag), about=about, layout=self.layout_of(array)
        )
        return P2PWork(self, name, peer, self._keep(message))

    def layout_of(self, array: Array) -> int:
        """Return the link's handle for the layout of a strided array; 0: none."""
        return 0

    def _keep(self, message: Message) -> Message:
        """Keep a message until it is over, because it goes on when its Work is dropped."""
        if len(self._messages) >= self._sweep_at:
            self._messages.difference_update([m for m in list(self._messages) if m.over])
            self._sweep_at = 2 * len(self._messages) + 4
        self._messages.add(message)
        return message

    def forget_message(self, message: Message) -> None:
        """Drop a message that is over."""
        self._messages.discard(message)

    # Failed messages, of both paths.

    def late_message(self, name: str, peer: int, waited: float) -> DistError:
        """Fail the group because of a message that is withdrawn: it did not complete within
        `waited` seconds. Return the error to raise."""
        late = timed_out(self, name, peer, waited)
        self.fail(late, name)
        return late

    def failed_message(self, name: str, message: Message, deadline: float) -> BaseException | None:
        """Fail the group because of a message that is over, if that has failed. Return the error to
        raise; None: it has not failed."""
        try:
            with self.failures(name, None, deadline):
                message.check()
        except Exception as error:
            message.fail()
            self.fail(error, name)
            return error
        return None

    # Collectives: name the blocks, and the values that must be equal on all ranks.

    def run_broadcast(self, call: CallRecord, array: Array, root: int) -> None:
        here = self._rank == root
        self._run_on_array(call, "broadcast", array, None, root, reads=here, writes=not here)

    def run_all_reduce(self, call: CallRecord, array: Array, op: Op) -> None:
        self._run_on_array(call, "all_reduce", array, op)

    def run_reduce(self, call: CallRecord, array: Array, root: int, op: Op) -> None:
        self._run_on_array(call, "reduce", array, op, root, writes=self._rank == root)

    def run_scan(self, call: CallRecord, array: Array, op: Op, inclusive: bool) -> None:
        self._run_on_array(call, "scan" if inclusive else "exscan", array, op)

    def _run_on_array(
        self, call: CallRecord, name: str, array: Array, op: Op | None, root: int = -1, *,
        reads: bool = True, writes: bool = True,
    ) -> None:  # fmt: skip
        """Run a call on one array that has the same size on every rank.

        Args:
            reads, writes: Whether the call reads, and writes, the array here.
        """
        parts: Iterable[Array] = (array,)
        if not array.contiguous or array.nbytes > WHOLE_BYTES:
            parts = chunks(self, call, name, array, op=op, root=root, reads=reads, writes=writes)
        for part in parts:
            outputs = [part] if writes or name == "broadcast" else []
            self.run_collective(call, name, [part], outputs, part.nbytes, op, root, part.size)

    def run_reduce_scatter(
        self, call: CallRecord, output: Array, inputs: Sequence[Array], op: Op
    ) -> None:
        blocks = list(inputs)
        count, nbytes, even = _native.totals(blocks)
        self.run_collective(call, "reduce_scatter", blocks, [output], nbytes, op, -1, count, even)

    def run_all_gather(self, call: CallRecord, outputs: Sequence[Array], array: Array) -> None:
        blocks = list(outputs)
        count, nbytes, even = _native.totals(blocks)
        self.run_collective(call, "all_gather", [array], blocks, nbytes, None, -1, count, even)

    # A size that only the root, or only a pair, knows does not affect the choice of an algorithm.

    def run_gather(
        self, call: CallRecord, array: Array, outputs: Sequence[Array] | None, root: int
    ) -> None:
        self.run_collective(call, "gather", [array], list(outputs or ()), 0, root=root, even=False)

    def run_scatter(
        self, call: CallRecord, output: Array, inputs: Sequence[Array] | None, root: int
    ) -> None:
        self.run_collective(call, "scatter", list(inputs or ()), [output], 0, root=root, even=False)

    def run_all_to_all(
        self, call: CallRecord, outputs: Sequence[Array], inputs: Sequence[Array], even: bool
    ) -> None:
        blocks = list(outputs)
        nbytes, count = (_native.totals(blocks)[1], blocks[0].size) if even else (0, 0)
        self.run_collective(call, "all_to_all", list(inputs), blocks, nbytes, None, -1, count, even)

    def run_barrier(self, call: CallRecord) -> None:
        self.run_collective(call, "barrier", [], [], 0)

    def run_collective(
        self,
        call: CallRecord,
        collective: str,
        inputs: list[Array],
        outputs: list[Array],
        nbytes: int,
        op: Op | None = None,
        root: int = -1,
        count: int = 0,
        even: bool = True,
        flags: int = 0,
        algorithm: str = "",
    ) -> None:
        """Run one collective of a call.

        Args:
            nbytes: Of the whole array, or of all blocks together, if every rank knows it; else 0.
            even: Whether all ranks know that all blocks have the same size.
            flags: Fingerprint.flags besides EVEN.
            algorithm: "": the table chooses.
        """
        code: int = 0
        factor: complex | None = None
        if type(op) is RedOpType:  # nearly all of them
            code = op
        elif op is not None:
            code, factor = op_and_factor(op)
        flags |= EVEN if even else 0
        native = self.native
        # Otherwise sizes differ, or a rank does not know all.
        known = not algorithm and (even or collective in tuning_table.UNSIZED)
        try:
            if known and nbytes <= WHOLE_BYTES and native.run_as_chosen(
                call, collective, inputs, outputs, nbytes, code, factor, root, count, flags
            ):  # fmt: skip
                return
            self.prepare_first(call)
            windows = native.open_windows(call.deadline_ns)
            library = self.library if native.library_comm != 0 and not windows else ""
            placement = "" if library else self.placement
            segment_bytes = tuning_table.segment_bytes(
                self._size, windows, library, native.hosts, placement
            )
            if native.hosts:
                placed = (self._size, windows, placement)
                native.prepare_parts(
                    choose_for_part,
                    partial(tuning_table.part_segment_bytes, placed, library),
                )
            if not algorithm:
                algorithm = tuning_table.choose(
                    collective, nbytes, self._size, windows,
                    even=even, commutative=True,
                    library=library,
                    hosts=native.hosts,
                    consecutive=native.consecutive,
                    placement=self.placement,
                )  # fmt: skip
                keeps = known and self.fast_calls and nbytes <= WHOLE_BYTES
            else:
                keeps = False
            fallback = tuning_table.fallback(
                collective, algorithm, nbytes, self._size, even=even, commutative=True
            ).encode()
            if _log.shows(DEBUG):
                whole = native.whole or call
                _log.debug(
                    "%s #%d on %s, %d bytes: algorithm %s through %s%s, %s", whole.name,
                    whole.seq, self.title, nbytes, algorithm,
                    "windows" if windows else "messages",
                    f", where that cannot run {fallback.decode()}" if fallback else "",
                    "also for later calls of its size" if keeps else "for this call",
                )  # fmt: skip
            if keeps:
                native.keep_choice(
                    collective, nbytes, algorithm.encode(), fallback, segment_bytes
                )  # fmt: skip
            native.run(
                collective, inputs, outputs,
                algorithm=algorithm.encode(),
                fallback=fallback,
                deadline_ns=call.deadline_ns,
                seq=call.seq,
                op=code,
                factor=factor,
                root=root,
                count=count,
                sizes=call.sizes,
                flags=flags,
                segment_bytes=segment_bytes,
            )  # fmt: skip
        except _native.CallError as ended:
            whole = native.whole or call
            raise self._error_of(ended, whole.name, whole.seq, whole.deadline, whole.began) from (
                self.error
            )

    def prepare_first(self, call: CallRecord) -> None:
        """Prepare what the group's first call needs, before an algorithm is chosen."""

    def open_windows(self, call: CallRecord) -> bool:
        """Return whether the group has windows; its first call may wait for that."""
        with self.failures(call.name, call.seq, call.deadline, call.began):
            return self.native.open_windows(call.deadline_ns)

    def failed_call(self, name: str, seq: int, ended: BaseException) -> None:
        """Fail the group after a call on the fast path, and raise the error for how it ended."""
        try:
            with self.failures(name, seq, self.deadline(None)):
                raise ended
        except BaseException as error:
            self.fail(error, f"{name} #{seq}")
            raise
        finally:
            del ended  # its traceback leads to this frame

    @contextmanager
    def failures(
        self, name: str, seq: int | None, deadline: float, began: float = 0.0
    ) -> Iterator[None]:
        """Turn the engine's failures into exceptions. `began` is the start of the call; 0: now."""
        started = began or time.monotonic()
        try:
            yield
        except _native.CallError as ended:
            raise self._error_of(ended, name, seq, deadline, started) from self.error

    def _error_of(
        self, ended: _native.CallError, name: str, seq: int | None, deadline: float, began: float
    ) -> DistError:
        """Return the exception for a failure of the engine."""
        failure = self.native.explain(ended)
        why = self.peer_error(failure.peer)
        host, beside = "", []
        if failure.status == "peer_lost":
            host = self.host_of(failure.peer)
            beside = self._lost_with_host(failure)
        return from_call_error(
            failure, name, self.group_name, self.ranks, seq, max(0.0, deadline - began),
            self._endpoint.silence() if beside else why, host, beside, self.title, self._rank,
        )  # fmt: skip

    def _lost_with_host(self, failure: _native.CallError) -> list[int]:
        """Return the members on the host with which a member was lost; none if its host may live.

        This rank knows, or the teller does. If that finds this rank's own host silent, the network
        has parted, and nothing is known of the other ranks.
        """
        endpoint, peer = self._endpoint, self._peers[failure.peer]
        gone = endpoint.ranks_beside(peer)
        known = endpoint.vanished(peer) or failure.host_lost
        if not known or self._peers[self._rank] in gone:
            return []
        return [rank for rank, each in enumerate(self._peers) if each in gone]

    def peer_error(self, rank: int) -> str:
        """Return why a group rank is silent, for messages; "" if unknown."""
        if not 0 <= rank < self._size:
            return ""
        peer = self._peers[rank]
        parted = "it has left the group" if self.native.has_left(rank) else ""
        return self._endpoint.link.lost(peer) or parted or self._endpoint.peer_error(peer)


def choose_for_part(
    collective: str, nbytes: int, ranks: int, windows: bool, between_hosts: bool
) -> tuple[bytes, bytes]:
    """Return the names of the algorithm and its fallback for a part of a group."""
    even = collective not in (*tuning_table.UNSIZED, "all_to_all")
    name = tuning_table.choose(
        collective, nbytes, ranks, windows, even=even, commutative=True, between_hosts=between_hosts
    )
    other = tuning_table.fallback(collective, name, nbytes, ranks, even=even, commutative=True)
    return name.encode(), other.encode()


@atexit.register
def _drain_all() -> None:
    """Compare the last calls of groups that still exist at the end of the process, as `destroy`
    does, all within one wait. After an exception this is left out, since this rank reports that
    itself.

    It does not wait for ranks that are threads of this process, since they have ended.
    """
    if getattr(sys, "last_type", None) is not None:
        return
    endpoints = [each for each in list(opened) if each.drains_at_exit()]
    for endpoint in endpoints:
        endpoint.end_together(DRAIN_SECONDS if endpoint.own_process else 0.0)
    for endpoint in endpoints:
        for known in tuple(endpoint.groups.values()):
            if (group := known()) is not None:
                try:
                    group.drain()
                except MismatchError as error:  # atexit would print the traceback
                    print(f"cydist: {error}", file=sys.stderr, flush=True)
