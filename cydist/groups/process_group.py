"""ProcessGroup: the interface that a backend implements, and the parts that it inherits.

A backend implements `isend` and `irecv`. Every collective is derived from them, and a backend
overrides those that it does better. All arrays that reach a backend are `Array` objects: checked,
contiguous memory of one known dtype (strided arrays were packed before) with the buffer protocol,
so that `memoryview(array)` is its bytes. Outputs share no memory with inputs, except that this
rank's own block in all_gather, gather and scatter may be both.

Ranks here are group ranks. Collectives block; `execute` decides which thread runs them.

The file is long because a backend's author reads the class as one interface. The bodies of derived
collectives are in derived.py, the calls under torch's names in group_calls.py.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import partial
from types import FunctionType
from typing import TYPE_CHECKING, Any, NoReturn

from cydist import config, recorder
from cydist._native import CallRecord, GroupState, is_profiling
from cydist.errors import (
    DistTimeoutError,
    GroupDestroyedError,
    GroupFailedError,
    UnsupportedError,
    check_process,
    without_traceback,
)
from cydist.executor import Serial
from cydist.group_names import GroupName
from cydist.groups import derived
from cydist.groups.group_calls import GroupCalls
from cydist.reduce_ops import Op
from cydist.waiting import DEFAULT_TIMEOUT, LONGEST_TIMEOUT, duration
from cydist.work import Work

if TYPE_CHECKING:
    from cydist._native import Array
    from cydist.groups.call_checks import CallChecks

# What a backend's collectives were called in version 1 of the interface.
FORMER_NAMES = (
    "broadcast", "all_reduce", "reduce", "reduce_scatter", "all_gather", "gather", "scatter",
    "all_to_all", "scan", "barrier",
)  # fmt: skip

# The tag of messages that belong to derived collectives. Users' tags are not negative.
DERIVED_TAG = -1


def _checks_asked_for() -> CallChecks | None:
    if config.debug_level() != "DETAIL" and not config.CHECK_NAN.is_on():
        return None
    from cydist.groups.call_checks import checks_asked_for  # most jobs need none

    return checks_asked_for()


class ProcessGroup(GroupCalls):
    """A set of ranks that communicate, from the view of one rank.

    A backend must implement two methods, `isend` and `irecv`; all collectives are derived from
    them, and a backend overrides those that it does better. Messages with one tag between two ranks
    keep their order. DERIVED_TAG (-1) is reserved for the derived collectives.

    Users call a group as they call torch's: `group.allreduce([x])`, `broadcast`, `reduce`,
    `allgather`, `gather`, `scatter`, `reduce_scatter`, `alltoall`, `barrier`, `send`, `recv` and
    others take arrays and ranks of the group, and return a `Work`. A backend's own methods are
    called `run_broadcast`, `run_all_reduce` and so on.

    Args:
        rank: This process's rank in the group.
        size: How many ranks it has.
        timeout: Default time limit of a call, in seconds or as a timedelta.
        name: Of the group, for messages.
        ranks: Global rank of each member, by group rank; None: 0 to size - 1.
        backend: The backend's name.

    Attributes:
        ranks: Global rank of each member, by group rank.
        timeout: Default time limit of a call, in seconds.
        devices: Kinds of memory that the group takes: "cpu", "cuda".

    Examples:
        >>> pair = dist.new_group([0, 1])
        >>> pair.rank() == rank, pair.size(), pair.ranks
        (True, 2, (0, 1))
        >>> x = np.ones(1)
        >>> assert pair.allreduce([x]).wait() and x == 2
    """

    __module__ = "cydist"

    devices: tuple[str, ...] = ("cpu",)
    coalesces_calls = False
    authenticated = False  # True: no outsider can send on its connections, so objects may pickle
    packs = False  # packs strided arrays of calls on one array itself; else its callers do
    folds = False  # user-defined reductions of arrays outside the CPU's memory
    collected: Any = None  # the calls of a _coalescing_manager, while it collects
    splits_without_peers = False  # `subgroup` asks no other rank, and takes no backend options
    splits_with_all = False  # it has `split`, which all its ranks call

    def __init_subclass__(cls, **rest: object) -> None:
        super().__init_subclass__(**rest)
        for name in FORMER_NAMES:
            own = vars(cls).get(name)
            if isinstance(own, FunctionType) and "call" in own.__code__.co_varnames[1:2]:
                raise TypeError(
                    f"{cls.__qualname__}.{name} is a method of a backend for version 1 of cydist's "
                    f"interface: call it run_{name}, and state interface_version = 2"
                )

    def __init__(
        self,
        rank: int,
        size: int,
        *,
        timeout: float | timedelta = DEFAULT_TIMEOUT,
        name: str = "",
        ranks: Sequence[int] | None = None,
        backend: str = "",
    ) -> None:
        self._rank = rank
        self._size = size
        self.group_name = GroupName(name)
        self.ranks: tuple[int, ...] = tuple(range(size)) if ranks is None else tuple(ranks)
        self.backend = backend
        self.timeout: float = duration(timeout)
        self._serial = Serial()
        self.call_queue = self._serial.call_queue
        self.call_queue.group_number = recorder.add_group(name, backend, rank, self.ranks)
        self.waiting: tuple[str, int] | None = None  # for a message: "recv" and its peer
        self.with_it: list[Callable[[], None]] = []  # objects to end with this group
        # Calls on objects so far: messages by (sender, receiver), collectives by None.
        self.object_calls: dict[tuple[int, int] | None, int] = {}
        self.companion: tuple[ProcessGroup, Serial] | None = None  # for asynchronous object calls
        self.group_state = GroupState()
        self.checks = _checks_asked_for()
        is_profiling()  # looks for torch

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.group_name!r} backend={self.backend} "
            f"rank={self._rank} size={self._size}>"
        )

    @property
    def error(self) -> BaseException | None:
        """Return the error that failed the group, as it was raised.

        Returns:
            The error; None while the group takes calls.
        """
        return self.group_state.error

    # Implemented by a backend.

    def isend(self, array: Array, peer: int, tag: int) -> Work:
        """Start sending `array` to group rank `peer`.

        Args:
            array: Contiguous, unless `accepts_strided` says otherwise.
            peer: A group rank.
            tag: Distinguishes messages between the same ranks.

        Returns:
            A `Work`.
        """
        raise UnsupportedError(f"backend {self.backend!r} does not send")

    def irecv(self, array: Array, peer: int | None, tag: int) -> Work:
        """Start receiving into `array` from group rank `peer`.

        Args:
            array: Contiguous, unless `accepts_strided` says otherwise.
            peer: A group rank; None: any rank, which a backend need not support.
            tag: Of the message to take.

        Returns:
            A `Work` whose `source_rank` is known when it is complete.
        """
        raise UnsupportedError(f"backend {self.backend!r} does not receive")

    def check_accepts(self, name: str, array: Array) -> None:
        """Raise UnsupportedError if a call cannot take this array now.

        Callers ask before they pack arrays, since that might already enqueue copies into a CUDA
        graph under capture.

        Args:
            name: Of the call, for messages.
            array: One of its arrays.

        Raises:
            UnsupportedError: The backend cannot take it. The group stays usable.
        """

    def accepts_strided(self, array: Array, peer: int | None) -> bool:
        """Return whether `isend` and `irecv` take this strided array for a message to or from this
        peer. Otherwise their callers pack it.

        Args:
            array: A strided array.
            peer: A group rank; None: any.

        Returns:
            True or False.
        """
        return False

    def share(self, nbytes: int) -> memoryview | None:
        """Return memory for an array that the members' collectives need not copy.

        Args:
            nbytes: How many bytes.

        Returns:
            The memory; None: this group has none.

        Raises:
            MemoryError: It is spent.
        """
        return None

    def shares(self, array: Array) -> bool:
        """Return whether this group's members share this memory.

        Args:
            array: Any array.

        Returns:
            True or False.
        """
        return False

    def chosen(self) -> dict[str, str]:
        """Return what was chosen for this group, for logs. Asks no rank.

        Returns:
            Words by subject, such as {"transport": "shared memory"}.
        """
        return {}

    def close(self) -> None:
        """Release the group's resources. Called once, by destroy."""

    def leave_job(self, now: float) -> None:
        """Prepare to destroy all groups of this rank. They share one wait, instead of waiting one
        after the other.

        Args:
            now: When that wait starts, on time.monotonic().
        """

    def abort(self) -> None:
        """End every call under way with an error, now. The group has failed then."""
        self.fail(GroupFailedError(f"{self.title} was aborted", group=self.group_name))

    # Groups by kind of memory. Calls on plain arrays take the fast path: on GPUs that of
    # `fast_streams` if there is one, in CPU memory that of `native`, the compiled half of a
    # HostGroup.

    fast_streams: object = None

    def for_device(self, device: str) -> ProcessGroup:
        """Return the group that serves arrays of `device`: this one, unless it routes by device.

        Args:
            device: "cpu" or "cuda".

        Returns:
            A group of the same ranks.
        """
        if device not in self.devices:
            raise UnsupportedError(
                f"backend {self.backend!r} takes arrays on {', '.join(self.devices)}, and this one "
                f"is on {device}: copy it there, or name a backend for it, as in "
                f"init_process_group('cpu:{self.backend},{device}:BACKEND')",
                group=self.group_name,
            )
        return self

    def as_host_group(self) -> ProcessGroup:
        """Return the group of these ranks that carries data in CPU memory, such as objects.

        Returns:
            A group of the same ranks.
        """
        return self.for_device("cpu")

    def backend_groups(self) -> tuple[ProcessGroup, ...]:
        """Return the groups that this one routes to, or only itself.

        Returns:
            At least one group.
        """
        return (self,)

    def renumber(self, ranks: Sequence[int]) -> None:
        """Give the members new global ranks.

        Args:
            ranks: Global ranks, by group rank.
        """
        self.ranks = tuple(ranks)

    def coalesced(self) -> AbstractContextManager[None]:
        """Start the calls inside together at the end, if `coalesces_calls`; else each at once.

        Returns:
            A context manager.
        """
        return nullcontext()

    def announce_call(self, call: CallRecord) -> None:
        """Announce a derived collective that starts. A backend that compares calls overrides this.

        Args:
            call: The call.
        """

    def run_as_part_of(self, call: CallRecord | None) -> None:
        """Let collectives be parts of a call from now on: errors on all ranks name that call.

        A backend whose collectives tell other ranks of errors overrides this.

        Args:
            call: The call; None: collectives are whole calls again.
        """

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
        """Run one collective in its turn: now on this thread, or in the background.

        Args:
            name: Of the call.
            body: Does the call's work; gets the call's record.
            async_op: Return a `Work` at once.
            timeout: Seconds or a timedelta; None takes the group's.
            result: What the Work's `result` returns.
            array: One of the call's arrays, which are all on one device; None: the call has none.

        Returns:
            A `Work` with `async_op`; otherwise None, after the call has completed.
        """
        self.check_usable(name)
        call = CallRecord(name, 0, self.deadline(timeout, name))
        try:
            if not async_op and self.call_queue.run_call_now(self, call, body):
                return None
            return self._execute_queued(call, body, async_op, result)
        except BaseException as error:
            # The call ended before its turn, which other ranks count, or by an interrupt; or a
            # signal handler raised in `call_failed` before the group had failed.
            unsent = call.seq == 0 or isinstance(error, UnsupportedError)
            if not (call.begun and unsent and isinstance(error, Exception)):
                self.fail(error, name)
            raise

    def _execute_queued(
        self, call: CallRecord, body: Callable[[CallRecord], None], async_op: bool, result: object
    ) -> Work | None:
        """Run a call after those that were issued before it."""
        name = call.name

        def run() -> None:
            call.begun = True
            call.began = time.monotonic()
            self.check_usable(name)  # much may have happened
            self.call_queue.run_call(self, call, body)

        if async_op:
            call.asynchronous = True
            return self._serial.start(name, run, result, call)
        if not self._serial.run(name, run, call.deadline, partial(self._give_up, name)):
            raise DistTimeoutError(
                f"{name} on {self.title}: timeout: calls that were issued before it "
                "are still under way",
                op=name,
                group=self.group_name,
            )
        return None

    def call_failed(self, call: CallRecord, error: BaseException) -> None:
        """Fail the group because a call raised in its turn; an interrupt, too, must end the other
        ranks' calls. UnsupportedError comes before anything was sent, on every rank.

        Args:
            call: The call.
            error: What it raised.
        """
        if not isinstance(error, UnsupportedError):
            self.fail(error, f"{call.name} #{call.seq}")

    def _give_up(self, name: str, error: BaseException) -> None:
        """Fail the group and end its running call, on any thread."""
        self.fail(error, name)
        self.abort()

    def next_seq(self) -> int:
        """Return the number of the collective that starts now. Collectives run one at a time, in
        order.

        Returns:
            The number, from 1.
        """
        return self.call_queue.next_seq()

    def deadline(self, timeout: float | timedelta | None, call: str = "") -> float:
        """Return the deadline of a call that starts now.

        Args:
            timeout: Seconds or a timedelta; None takes the group's.
            call: Its name, for messages.

        Returns:
            A time on time.monotonic().

        Raises:
            TypeError: The timeout is neither.
            ValueError: It is negative or not a number.
        """
        # A third party's group may have been given any value.
        limit = min(self.timeout, LONGEST_TIMEOUT) if timeout is None else duration(timeout, call)
        return time.monotonic() + limit

    # Failure and end of a group.

    def fail(self, error: BaseException, call: str = "") -> None:
        """Fail the group for good with this error. Later errors change nothing.

        A backend that can do so notifies the other members, so that none waits for this rank.

        Args:
            error: Why.
            call: What this rank was doing, for messages.
        """
        if self.group_state.error is None:
            self.group_state.error = error
            recorder.on_failure()

    def check_process(self, name: str) -> None:
        """Raise ForkedError in a forked child.

        Args:
            name: Of the call, for messages.

        Raises:
            ForkedError: This process is a forked child of the rank.
        """
        check_process(self.group_state.pid, name, self.group_name, self.title)

    def doing(self) -> str:
        """Return the call of the group that this rank is in, for messages.

        Returns:
            Words such as "in all_reduce #12".
        """
        call = self.last_call()
        if call is not None and not call.over:
            return f"in {call.name} #{call.seq}"
        if self.waiting is not None:
            name, peer = self.waiting
            way = "to" if name == "send" else "from"
            return f"in {name} {way} " + ("anyone" if peer < 0 else f"rank {self.ranks[peer]}")
        last = "and has made none" if call is None else f"its last was {call.name} #{call.seq}"
        return f"in no call of the group{',' if call is None else ';'} {last}"

    def last_call(self) -> CallRecord | None:
        """Return the collective that this rank is in, or was in last.

        Returns:
            The call; None before the first.
        """
        return self.call_queue.last_call()

    def check_usable(self, name: str) -> None:
        """Raise if the group was destroyed, has failed, or belongs to another process.

        Args:
            name: Of the call, for messages.

        Raises:
            GroupDestroyedError: It was destroyed.
            GroupFailedError: It has failed; the error's cause says why.
            ForkedError: This process is a forked child of the rank.
        """
        state = self.group_state
        if state.is_usable():
            return
        self.check_process(name)
        if state.destroyed:
            raise GroupDestroyedError(
                f"{name}: {self.title} was destroyed", op=name, group=self.group_name
            )
        if (failed := state.error) is not None:
            raise GroupFailedError(
                f"{name}: {self.title} failed earlier and takes no more calls "
                f"({type(failed).__name__}: {failed}). Other groups still work; "
                "shrink_group makes one of the ranks that are left",
                op=name,
                group=self.group_name,
                ranks=getattr(failed, "ranks", ()),
            ) from failed

    def raise_pending_failure(self, name: str) -> None:
        """Raise if the group has failed, or if another rank is about to report that it has.

        Call this after receiving data that makes no sense: another rank may have been in a
        different call, and be about to report it.

        Args:
            name: Of the call, for messages.

        Raises:
            DistError: The failure.
        """
        self.check_usable(name)

    def destroy(self) -> None:
        """Destroy the group. Idempotent. In a forked child the parent's group goes on."""
        if not self.group_state.destroyed:
            self.group_state.destroyed = True
            if os.getpid() == self.group_state.pid:
                try:
                    for end in self.with_it:
                        end()
                finally:
                    try:
                        self.close()
                    finally:
                        self._release_frames()

    def _release_frames(self) -> None:
        """Keep a copy of the error that failed the group, without its traceback. That leads to the
        frames of the failed call, to their arrays, and to this group: all of it would stay until
        the next full garbage collection."""
        state = self.group_state
        if state.error is not None:
            state.error = without_traceback(state.error)

    # Collectives, made of messages unless a backend has its own; see derived.py.

    def exchange_arrays(
        self,
        call: CallRecord,
        sends: Sequence[tuple[Array, int]],
        receives: Sequence[tuple[Array, int]],
    ) -> None:
        """Exchange arrays with peers, all at once; return when everything has arrived.

        Args:
            call: The call that this is a part of.
            sends: Arrays and the group ranks that get them.
            receives: Arrays and the group ranks that fill them.
        """
        works = [self.irecv(array, peer, DERIVED_TAG) for array, peer in receives]
        works += [self.isend(array, peer, DERIVED_TAG) for array, peer in sends]
        for work in works:
            call.wait(work)

    def run_broadcast(self, call: CallRecord, array: Array, root: int) -> None:
        """Copy the root's array to all ranks.

        Args:
            call: The call.
            array: Contiguous, of the same size and dtype on every rank.
            root: A group rank.
        """
        derived.broadcast(self, call, array, root)

    def run_all_reduce(self, call: CallRecord, array: Array, op: Op) -> None:
        """Reduce in place on every rank.

        Args:
            call: The call.
            array: Contiguous, of the same size and dtype on every rank.
            op: The operation.
        """
        derived.all_reduce(self, call, array, op)

    def run_reduce(self, call: CallRecord, array: Array, root: int, op: Op) -> None:
        """Reduce into the root's array; other ranks' arrays keep their contents.

        Args:
            call: The call.
            array: Contiguous, of the same size and dtype on every rank.
            root: A group rank.
            op: The operation.
        """
        derived.reduce(self, call, array, root, op)

    def run_reduce_scatter(
        self, call: CallRecord, output: Array, inputs: Sequence[Array], op: Op
    ) -> None:
        """Reduce block r of all ranks' inputs into rank r's output, in rank order.

        Args:
            call: The call.
            output: Contiguous, as large as this rank's block.
            inputs: p blocks.
            op: The operation.
        """
        derived.reduce_scatter(self, call, output, inputs, op)

    def run_all_gather(self, call: CallRecord, outputs: Sequence[Array], array: Array) -> None:
        """Send every rank's array to all ranks: outputs[r] is rank r's.

        Args:
            call: The call.
            outputs: p contiguous arrays.
            array: This rank's.
        """
        derived.all_gather(self, call, outputs, array)

    def run_gather(
        self, call: CallRecord, array: Array, outputs: Sequence[Array] | None, root: int
    ) -> None:
        """Send every rank's array to the root: outputs[r] is rank r's.

        Args:
            call: The call.
            array: This rank's.
            outputs: On the root p contiguous arrays; elsewhere None.
            root: A group rank.
        """
        derived.gather(self, call, array, outputs, root)

    def run_scatter(
        self, call: CallRecord, output: Array, inputs: Sequence[Array] | None, root: int
    ) -> None:
        """Send inputs[r] of the root to rank r.

        Args:
            call: The call.
            output: This rank's.
            inputs: On the root p contiguous arrays; elsewhere None.
            root: A group rank.
        """
        derived.scatter(self, call, output, inputs, root)

    def run_all_to_all(
        self, call: CallRecord, outputs: Sequence[Array], inputs: Sequence[Array], even: bool
    ) -> None:
        """Send inputs[r] to rank r and receive outputs[r] from it.

        Args:
            call: The call.
            outputs: p contiguous arrays.
            inputs: p contiguous arrays.
            even: All blocks have one size.
        """
        derived.all_to_all(self, call, outputs, inputs, even)

    def run_scan(self, call: CallRecord, array: Array, op: Op, inclusive: bool) -> None:
        """Reduce over the ranks below this one, and this one if `inclusive`, in place.

        Args:
            call: The call.
            array: Contiguous, of the same size and dtype on every rank.
            op: The operation.
            inclusive: Whether this rank's own contribution is part of its result.
        """
        derived.scan(self, call, array, op, inclusive)

    def run_barrier(self, call: CallRecord) -> None:
        """Wait until every rank has made this call.

        Args:
            call: The call.
        """
        derived.barrier(self, call)

    # Groups that ranks make, or are not part of, without meeting; optional.

    def announce_request(self, name: str, backend: str) -> None:
        """Announce that this rank does not meet others for the group of this name and backend.
        Other ranks may wait for it, and ask.

        Args:
            name: Of the group.
            backend: What this rank asks for.
        """

    def peer_requests(self, name: str, ranks: Sequence[int]) -> dict[int, str]:
        """Return what each reachable one of these group ranks announced with `announce_request`.

        Args:
            name: Of the group.
            ranks: Group ranks.

        Returns:
            Backends by group rank. Ranks that do not answer promptly are left out.
        """
        return {}

    def shrink(
        self,
        excluded: Sequence[int],
        deadline: float,
        *,
        abort: bool = False,
        pg_options: object = None,
    ) -> ProcessGroup:
        """Make a group of the members that are neither excluded nor lost; optional.

        Every remaining member calls this, also when this group has failed. All must agree on the
        same members.

        Args:
            excluded: Group ranks; may differ between members.
            deadline: On time.monotonic().
            abort: First end all calls under way on this group, which is destroyed later.
            pg_options: For the backend.

        Returns:
            The new group.

        Raises:
            UnsupportedError: It is not possible. Nothing has happened then.
        """
        raise UnsupportedError(
            f"shrink_group: backend {self.backend!r} cannot make a group of those that are left: "
            "start the job again, or use backend 'tcp'",
            op="shrink_group", group=self.group_name,
        )  # fmt: skip

    # A group's properties, under torch.distributed's names.

    def __reduce__(self) -> NoReturn:
        raise TypeError(
            f"{self.title} cannot be pickled or copied: it is of this process. Send "
            "get_process_group_ranks(group) instead, and let the ranks call new_group"
        )

    def rank(self) -> int:
        """Return this process's rank in the group.

        Returns:
            0 to size - 1.
        """
        return self._rank

    def size(self) -> int:
        """Return how many ranks the group has.

        Returns:
            The number.
        """
        return self._size

    def name(self) -> str:
        """Return the backend's name.

        Returns:
            The name, in lower case.
        """
        return self.backend

    def subgroup(self, ranks: Sequence[int], name: str, timeout: float) -> ProcessGroup | None:
        """Make a group of these group ranks, including this one, that shares this group's
        resources.

        Args:
            ranks: Group ranks.
            name: Of the new group.
            timeout: Its default time limit, in seconds.

        Returns:
            The group; None (the default): the registry makes a group from scratch.
        """
        return None

    def split(
        self, parts: Sequence[Sequence[int]], name: str, timeout: float
    ) -> ProcessGroup | None:
        """Make a group of each of these lists of group ranks. All ranks of the group call it.

        Args:
            parts: Group ranks of each part.
            name: Of this rank's part.
            timeout: Its default time limit, in seconds.

        Returns:
            This rank's part; None if it is in none.
        """
        raise NotImplementedError

    def get_group_rank(self, global_rank: int) -> int:
        """Return the group rank of a global one.

        Args:
            global_rank: A rank of the world.

        Returns:
            The member's rank in the group.

        Raises:
            ValueError: It is not a member.
        """
        try:
            return self.ranks.index(global_rank)
        except ValueError:
            raise ValueError(
                f"global rank {global_rank} is not in {self.title}, whose ranks are "
                f"{list(self.ranks)}"
            ) from None
