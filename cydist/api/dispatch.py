"""Resolve a public call once: the group that serves its arrays' memory, and what reduces there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from cydist import _native
from cydist._native import CallRecord, is_observed
from cydist.api.arguments import check_op
from cydist.devices import array_libraries
from cydist.errors import NonFiniteError, UnsupportedError
from cydist.groups.call_checks import CheckedCall
from cydist.groups.derived import UserOpReducer, elements_dtype
from cydist.groups.hooks import ObservedCall, are_installed, observed
from cydist.groups.process_group import ProcessGroup
from cydist.groups.profiler_ranges import call_range, is_profiling, until_completed
from cydist.reduce_ops import Op, UserReduction
from cydist.work import FinishedWork

if TYPE_CHECKING:
    from cydist._native import Array
    from cydist.work import Work

Timeout = float | timedelta | None
NO_OP = object()  # of calls that reduce nothing

_native.use_memory("cuda", array_libraries)


class Prepared:
    """A call that may run: its arguments are checked, and its group is chosen.

    Attributes:
        name: "all_reduce".
        group: The group that serves the arrays' memory: one backend's.
        reducer: What reduces there: the group or, for a user-defined operation, that one's reducer.
        array: One of the call's arrays, which are all on one device; None: the call has none.
        op: The reduction; None: the call has none.
        whole: The group that the user named, which may route by device.
    """

    __slots__ = ("array", "group", "name", "op", "reducer", "whole")

    group: ProcessGroup
    reducer: ProcessGroup | UserOpReducer

    def __init__(
        self, group: ProcessGroup, name: str, array: Array | None = None, op: Op | Any = NO_OP
    ) -> None:
        """Choose for `array`, or any group of `group` if there is none.

        Raises TypeError and ValueError for a reduction that the dtype does not have, and
        UnsupportedError for memory that the group or the reduction cannot access. Nothing has been
        packed or counted by then.
        """
        self.name = name
        self.array = array
        self.op = None if op is NO_OP else op
        self.whole = group
        if array is None:
            self.group = group.for_device(group.devices[0])
            return
        if op is not NO_OP:  # a user's None is an error
            check_op(name, op, array)
        device = array.device
        self.group = self.reducer = group.for_device(device)
        if device != "cpu":
            self.group.check_accepts(name, array)
        if isinstance(op, UserReduction) and (array.device == "cpu" or not self.group.folds):
            self.reducer = _reducer_of(self.group, op, array)

    def packed(self) -> Array:
        """Return the array of a call on one array that has the same size on every rank, packed
        unless the group packs strided arrays itself."""
        assert self.array is not None
        packs = self.group.packs and not isinstance(self.op, UserReduction)
        return self.array if packs else self.array.dense()

    def run(
        self, body: Callable[[CallRecord], None], result: object, async_op: bool, timeout: Timeout,
        inputs: Sequence[Array] = (), outputs: Sequence[Array] = (), root: int | None = None,
        splits: tuple[Sequence[Array], Sequence[Array]] | None = None,
    ) -> Work | None:  # fmt: skip
        """Run `body(call)` in the call's turn. Returns a Work whose result is `result` if
        `async_op` is set, else None.

        Args:
            inputs: The user's arrays that the call reads on this rank, for CYDIST_DEBUG=DETAIL and
                CYDIST_CHECK_NAN=1; likewise the other arguments.
            outputs: Those that it writes here.
            root: A group rank.
            splits: Parts of them, for each rank and from each.
        """
        checks = self.whole.checks
        if checks is None and not is_observed():  # nearly always: without a function in between
            return self.group.execute(
                self.name, body, async_op=async_op, timeout=timeout, result=result, array=self.array
            )
        collected = self.whole.collected
        if collected is not None and self.name in collected.NAMES:
            later: Work | None = collected.add(
                self.name, self.op, inputs, outputs, result, async_op, timeout
            )
            return later
        if checks is None:
            return self._start(body, result, async_op, timeout)
        checks.count += 1
        if self.name == "monitored_barrier":  # it must not wait without limit
            return self._start(body, result, async_op, timeout)
        sizes = None
        if splits is not None:
            sizes = ([part.size for part in splits[0]], [part.size for part in splits[1]])
        call = CheckedCall(self.name, self.op, root, inputs, outputs, sizes)
        checks.before(self.whole, call, timeout)
        work = self._start(body, result, async_op, timeout)
        if not checks.nonfinite:
            return work
        if work is None:
            checks.after(self.whole, call)
            return None
        return CheckedWork(work, lambda: checks.after(self.whole, call), result)

    def _start(
        self, body: Callable[[CallRecord], None], result: object, async_op: bool, timeout: Timeout
    ) -> Work | None:
        start = self._run_profiled if is_profiling() else self._execute
        if not are_installed():
            return start(body, result, async_op, timeout)
        members = self.group.ranks
        if not async_op:
            with observed(self.group, self.name, self.array, peers=members) as call:
                return start(call.numbered(body), result, async_op, timeout)
        call = ObservedCall(self.group, self.name, self.array, async_op=True, peers=members)
        try:
            work = start(call.numbered(body), result, async_op, timeout)
        except BaseException as error:
            call.end(error)
            raise
        call.end_if_never_run(work)
        return work

    def _execute(
        self, body: Callable[[CallRecord], None], result: object, async_op: bool, timeout: Timeout
    ) -> Work | None:
        return self.group.execute(
            self.name, body, async_op=async_op, timeout=timeout, result=result, array=self.array
        )

    def _run_profiled(
        self, body: Callable[[CallRecord], None], result: object, async_op: bool, timeout: Timeout
    ) -> Work | None:
        with call_range(self.group, self.name, self.array, async_op=async_op):
            shown = until_completed(self.name, body) if async_op else body
            return self._execute(shown, result, async_op, timeout)


class CheckedWork(FinishedWork):
    """A Work whose outputs are searched for NaN and infinity when it has completed."""

    def _poll(self) -> bool:
        try:
            return super()._poll()
        except NonFiniteError as error:
            self._error = error
            return True


def _reducer_of(group: ProcessGroup, op: UserReduction, array: Array) -> UserOpReducer:
    if array.device != "cpu":
        raise UnsupportedError(
            f"{op} reduces arrays in CPU memory, this one is on {array.device}, and backend "
            f"{group.backend!r} does not bring it there: copy it, or use backend 'tcp' or 'mpi'",
            group=group.group_name,
        )
    return UserOpReducer(group, op, elements_dtype(array))
