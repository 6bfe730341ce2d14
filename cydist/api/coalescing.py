"""Few calls out of many: _coalescing_manager, under torch's name and with its arguments."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple

from cydist._native import observe_calls
from cydist.api.coalesced import (
    all_gather_into_tensor_coalesced,
    all_reduce_coalesced,
    reduce_scatter_tensor_coalesced,
)
from cydist.api.dispatch import Timeout
from cydist.api.process_groups import AnyGroup, usable_group
from cydist.reduce_ops import Op
from cydist.work import Work

if TYPE_CHECKING:
    from cydist._native import Array
    from cydist.groups.process_group import ProcessGroup


class _Collected(Work):
    """A collected call, which starts when the block ends."""

    inner: Work | None = None
    done = False

    def _wait(self, timeout: float | None) -> None:
        if self.inner is not None:
            self.inner.wait(timeout)
        elif not self.done:
            raise ValueError(
                "wait: the call starts when the block of _coalescing_manager ends: wait after it"
            )

    def _poll(self) -> bool:
        if self.inner is None:
            return self.done
        self._error = self.inner.exception()
        return self.inner.is_completed()


class _Call(NamedTuple):
    """One collected call."""

    name: str
    op: Op | None
    timeout: Timeout
    inputs: Sequence[Array]
    outputs: Sequence[Array]
    work: _Collected

    def goes_with(self) -> tuple[object, ...]:
        """Return what is equal among calls that can be one."""
        array = self.outputs[0]
        return self.name, self.op, self.timeout, array.dtype_name, array.device


class CoalescingManager:
    """The calls that a _coalescing_manager has collected, and started.

    Attributes:
        works: Those of the calls that it has made of them.
    """

    NAMES = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor")

    def __init__(self) -> None:
        self.works: list[Work] = []
        self._calls: list[_Call] = []

    def append(self, work: Work | None = None) -> None:
        """Let `wait` wait for this call too.

        Args:
            work: Of the call; None: nothing.
        """
        if work is not None:
            self.works.append(work)

    def wait(self) -> None:
        """Wait for all calls.

        Raises:
            DistError: A call failed.
        """
        for work in self.works:
            work.wait()

    def add(
        self, name: str, op: Op | None, inputs: Sequence[Array], outputs: Sequence[Array],
        result: object, async_op: bool, timeout: Timeout,
    ) -> Work | None:  # fmt: skip
        """Collect a call; its arguments have been checked."""
        work = _Collected(result)
        self._calls.append(_Call(name, op, timeout, inputs, outputs, work))
        return work if async_op else None

    def start(self, group: ProcessGroup, async_op: bool) -> None:
        """Make one call of each row of calls that go together."""
        for _, calls in groupby(self._calls, _Call.goes_with):
            row = list(calls)
            made = _start(group, row, async_op)
            self.append(made)
            for call in row:
                call.work.inner, call.work.done = made, True
        self._calls.clear()


def _start(group: ProcessGroup, row: list[_Call], async_op: bool) -> Work | None:
    name, op, timeout = row[0][:3]
    outputs = [call.outputs[0] for call in row]
    inputs = [call.inputs[0] for call in row]
    if name == "all_gather_into_tensor":
        return all_gather_into_tensor_coalesced(outputs, inputs, group, async_op, timeout=timeout)
    assert op is not None
    if name == "all_reduce":
        return all_reduce_coalesced(outputs, op, group, async_op, timeout=timeout)
    return reduce_scatter_tensor_coalesced(outputs, inputs, op, group, async_op, timeout=timeout)


@contextmanager
def _coalescing_manager(
    group: AnyGroup = None, device: Any = None, async_ops: bool = False
) -> Iterator[CoalescingManager]:
    """Make one call of the calls inside the block, when it ends.

    It collects all_reduce, all_gather_into_tensor and reduce_scatter_tensor on this group. Calls in
    a row with one dtype and operation become one. Other calls are made at once, and
    the manager does not wait for them. If the block raises, none of those that it has collected is
    made.

    Args:
        group: A group from `new_group`; None is the default group.
        device: Accepted for compatibility with torch.
        async_ops: The calls may go on after the block; the manager's `wait` waits for them.

    Yields:
        The manager.

    Raises:
        ValueError: The group collects already, or two calls use one array.
        DistError: A call failed.

    Examples:
        >>> x, y = np.ones(2), np.ones(3)
        >>> with dist._coalescing_manager(async_ops=True) as manager:
        ...     dist.all_reduce(x)
        ...     dist.all_reduce(y)
        >>> manager.wait()
        >>> x, y
        (array([2., 2.]), array([2., 2., 2.]))
    """
    manager = CoalescingManager()
    chosen = usable_group(group, "_coalescing_manager")
    if chosen is None:
        yield manager
        return
    if chosen.collected is not None:
        raise ValueError(f"_coalescing_manager: {chosen.title} is in such a block already")
    chosen.collected = manager
    observe_calls(1)
    try:
        yield manager
    finally:
        observe_calls(-1)
        chosen.collected = None
    manager.start(chosen, async_ops)
