"""Ranges in torch.profiler: each call while a profiler runs.

A range is named like gloo's, "cydist:all_reduce". With `record_shapes=True` it has the call's
fields as well, under the names that torch's profiler gives those of NCCL.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from cydist._native import is_profiling
from cydist.executor import COMPLETIONS
from cydist.work import Work

if TYPE_CHECKING:
    from cydist._native import Array
    from cydist.groups.process_group import ProcessGroup

__all__ = ["RangedWork", "call_range", "is_profiling", "until_completed"]

# Futures of ranges that began before the profiler stopped. Ending such a range, also by freeing its
# future, lets torch write into memory that the profiler has freed.
_ABANDONED: list[object] = []


@contextmanager
def call_range(
    group: ProcessGroup, name: str, array: Array | None, *, async_op: bool = False,
    peer: int | None = None,
) -> Iterator[None]:  # fmt: skip
    """Show a call in the profiler that runs, from here to the end of the block.

    Args:
        group: The call's.
        name: Of the call, "all_reduce".
        array: One of its arrays: this rank's part; None: it has none.
        async_op: Whether the block only starts the call.
        peer: Of a message: the group rank of the other side.
    """
    import torch

    fields: dict[str, int | str | bool] = {
        "Collective name": name,
        "Process Group Name": group.group_name,
        "Process Group Description": group.group_desc,
        "Group size": group.size(),
        "Backend": group.backend,
        "Async": async_op,
    }
    tensors: list[Any] = []
    if array is not None:
        fields |= {"dtype": array.dtype_name, "bytes": array.nbytes}
        tensors += [array.owner] if isinstance(array.owner, torch.Tensor) else []
    if peer is not None:
        fields["Peer"] = group.ranks[peer]
    with torch._C._profiler._RecordFunctionFast(f"cydist:{name}", tensors, fields):
        yield


def until_completed(name: str, body: Callable[..., None]) -> Callable[..., None]:
    """Show an asynchronous call from now until its work is done, as a range of its own. On backend
    nccl that is when it is enqueued.

    Args:
        name: Of the call, "all_reduce".
        body: Does the call's work, on any thread.

    Returns:
        What does the same, and ends the range then.
    """
    end = _begin_whole(name)

    def run(*arguments: object) -> None:
        try:
            body(*arguments)
        finally:
            end()

    return run


class RangedWork(Work):
    """A message whose range in the profiler ends with it, on the first thread that sees its end.

    The rank that waits for it goes on once the range has ended, and may stop the profiler then.

    Args:
        name: Of the call, "isend". The range begins now.
        start: Starts the message.
    """

    def __init__(self, name: str, start: Callable[[], Work]) -> None:
        super().__init__()
        self._end = _begin_whole(name)
        try:
            self._inner = start()
        except BaseException:
            self._end()
            raise
        self._result = self._inner._result

    def watch(self) -> None:
        """End the range even if no caller waits. A thread of its own then does, so call this when a
        thread may wait for the message."""
        self._python_future()

    def due(self, timeout: float | None) -> None:
        self._inner.due(timeout)

    def _wait(self, timeout: float | None) -> None:
        try:
            self._inner.wait(timeout)
        finally:
            self._poll()

    def _poll(self) -> bool:
        if not self._inner.is_completed():
            return False
        self._error = self._inner.exception()
        self._end()
        return True

    def synchronize(self) -> None:
        self._inner.synchronize()
        self._end()

    def source_rank(self) -> int:
        self.wait()
        return self._inner.source_rank()


def _begin_whole(name: str) -> Callable[[], None]:
    """Begin the range of a whole asynchronous call. Return what ends it, on any thread: when that
    returns, the range has ended."""
    import torch

    completed: Any = torch.futures.Future()
    whole = torch.profiler.record_function(f"cydist:{name} until completed")
    whole.__enter__()
    whole._call_end_callbacks_on_future(completed)
    lock = threading.Lock()
    ended = False

    def end() -> None:
        nonlocal ended
        with lock:
            if ended:
                return
            ended = True
            if is_profiling():
                COMPLETIONS.run(lambda: completed.set_result(None))
            else:
                _ABANDONED.append(completed)

    return end
