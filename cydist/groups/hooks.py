"""Hooks of programs and tools: functions that are called before and after each call.

While there is one, all calls leave the fast path, as while a profiler runs. So hooks cost nothing
when there are none: the fast path looks at one number for all who observe it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from cydist._native import CallRecord, observe_calls
from cydist.executor import TaskWork

if TYPE_CHECKING:
    from cydist._native import Array
    from cydist.groups.process_group import ProcessGroup
    from cydist.work import Work


class CallInfo(NamedTuple):
    """A call, as hooks get it.

    Attributes:
        name: "all_reduce", "isend".
        group: The group's name.
        backend: The backend's name.
        seq: The call's number among the collectives of its group, as in errors; 0 of messages. It
            is 0 in `before`, too: a collective gets its number when its turn in the group comes,
            after the calls that other threads have issued before.
        nbytes: Of this rank's array; 0: the call has none.
        dtype: Of its elements, "float32"; "": the call has no array.
        peers: Global ranks: of a message the other side, () for any rank; of a collective all
            members.
        async_op: Whether the program got a `Work`.

    Examples:
        >>> calls = []
        >>> hook = dist.add_hook(before=calls.append)
        >>> dist.broadcast(np.ones(3, "float32"), src=0)
        >>> hook.remove()
        >>> calls[0].name, calls[0].nbytes, calls[0].dtype, calls[0].peers
        ('broadcast', 12, 'float32', (0, 1))
    """

    name: str
    group: str
    backend: str
    seq: int
    nbytes: int
    dtype: str
    peers: tuple[int, ...]
    async_op: bool


CallInfo.__module__ = "cydist"

Before = Callable[[CallInfo], Any]
After = Callable[[CallInfo, Any, BaseException | None], object]


class HookHandle:
    """A hook that `add_hook` has made, which you can remove.

    Args:
        before: As `add_hook`'s.
        after: As `add_hook`'s.

    Examples:
        >>> handle = dist.add_hook(after=lambda call, state, error: None)
        >>> handle.remove()
    """

    __module__ = "cydist"

    def __init__(self, before: Before | None, after: After | None) -> None:
        self._hook = before, after

    def remove(self) -> None:
        """Remove the hook. Idempotent. Calls that it has seen begin still tell it of their end."""
        global _installed
        with _lock:
            if self in _installed:
                _installed = tuple(each for each in _installed if each is not self)
                observe_calls(-1)


_lock = threading.Lock()
_installed: tuple[HookHandle, ...] = ()


def add_hook(before: Before | None = None, after: After | None = None) -> HookHandle:
    """Call functions before and after each collective and message of this process.

    Calls take the general path while there is a hook: small ones take some microseconds longer. A
    call that is made of others, such as `all_gather_object`, shows those.

    Args:
        before: `before(call)`, with a `CallInfo`, on the thread that makes the call, before the
            call begins. What it returns is the state that `after` gets.
        after: `after(call, state, error)` when the call has completed, with None or the exception
            that it raises. An asynchronous call may complete on another thread. On backend nccl a
            call has completed when it is enqueued.

    An exception of a function goes to `sys.unraisablehook`, and the call goes on: other ranks wait
    for it.

    Returns:
        A `HookHandle`, whose `remove()` removes both functions.

    Raises:
        TypeError: An argument is not callable.

    Examples:
        >>> seen = []
        >>> hook = dist.add_hook(after=lambda call, state, error: seen.append(call.name))
        >>> dist.all_reduce(np.ones(3))
        >>> hook.remove()
        >>> seen
        ['all_reduce']
    """
    global _installed
    for function in (before, after):
        if function is not None and not callable(function):
            raise TypeError(f"add_hook: {function!r} cannot be called: pass a function or None")
    made = HookHandle(before, after)
    with _lock:
        observe_calls(1)
        _installed = (*_installed, made)
    return made


def are_installed() -> bool:
    """Return whether there is a hook."""
    return bool(_installed)


class ObservedCall:
    """One call, from before it begins to its completion, for the hooks that were there then."""

    def __init__(
        self, group: ProcessGroup, name: str, array: Array | None, *, async_op: bool,
        peers: tuple[int, ...],
    ) -> None:  # fmt: skip
        self._call = CallInfo(
            name, group.group_name, group.backend, 0, 0 if array is None else array.nbytes,
            "" if array is None else array.dtype_name, peers, async_op,
        )  # fmt: skip
        self._waiting: list[tuple[After, Any]] = []
        for hook in _installed:
            before, after = hook._hook
            state = None if before is None else _guarded(before, self._call)
            if after is not None:
                self._waiting.append((after, state))
        self._lock = threading.Lock()

    def numbered(self, body: Callable[[CallRecord], None]) -> Callable[[CallRecord], None]:
        """Return what runs the call's `body`, and learns the call's number. An asynchronous call
        ends then."""

        def run(record: CallRecord) -> None:
            self._call = self._call._replace(seq=record.seq)
            try:
                body(record)
            except BaseException as error:
                self.end(error)
                raise
            if self._call.async_op:
                self.end()

        return run

    def end(self, error: BaseException | None = None) -> None:
        """Tell the hooks, the last one first. Only the first time counts."""
        with self._lock:
            waiting, self._waiting = self._waiting, []
        for after, state in reversed(waiting):
            _guarded(after, self._call, state, error)

    def end_with(self, work: Work) -> None:
        """Tell the hooks when a message has completed. A thread of its own waits for it."""
        work.get_future().add_done_callback(lambda _: self.end(work.exception()))

    def end_if_never_run(self, work: Work | None) -> None:
        """Tell the hooks, too, of an asynchronous call whose turn does not come."""
        if isinstance(work, TaskWork):
            work.when_ended(lambda: self.end(work.exception()))


@contextmanager
def observed(
    group: ProcessGroup, name: str, array: Array | None, *, peers: tuple[int, ...]
) -> Iterator[ObservedCall]:
    """Show a blocking call to the hooks, from here to the end of the block."""
    call = ObservedCall(group, name, array, async_op=False, peers=peers)
    try:
        yield call
    except BaseException as error:
        call.end(error)
        raise
    call.end()


def _guarded(function: Callable[..., Any], *arguments: object) -> Any:
    """Call a hook's function; report its exception and go on, because other ranks wait."""
    try:
        return function(*arguments)
    except Exception as error:
        sys.unraisablehook(
            SimpleNamespace(
                exc_type=type(error), exc_value=error, exc_traceback=error.__traceback__,
                object=function, err_msg="Exception ignored in a hook of cydist",
            )
        )  # fmt: skip
        return None
