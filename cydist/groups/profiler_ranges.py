"""Ranges in torch.profiler: each call while a profiler runs.

A range is named like gloo's, "cydist:all_reduce". With `record_shapes=True` it has the call's
fields as well, under the names that torch's profiler gives those of NCCL.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from cydist._native import is_profiling
from cydist.executor import COMPLETIONS

if TYPE_CHECKING:
    from cydist._native import Array
    from cydist.groups.process_group import ProcessGroup
    from cydist.work import Work

__all__ = ["call_range", "is_profiling", "until_completed", "until_work_ends"]


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


def until_work_ends(name: str) -> Callable[[Work], None]:
    """Show a message from now until it has ended, as a range of its own.

    Args:
        name: Of the call, "isend".

    Returns:
        Takes the message's Work, once a thread may wait for it. A thread of its own then waits.
    """
    end = _begin_whole(name)
    return lambda work: work.get_future().add_done_callback(lambda _: end())


def _begin_whole(name: str) -> Callable[[], None]:
    """Begin the range of a whole asynchronous call; return what ends it, on any thread."""
    import torch

    completed: Any = torch.futures.Future()
    whole = torch.profiler.record_function(f"cydist:{name} until completed")
    whole.__enter__()
    whole._call_end_callbacks_on_future(completed)
    return lambda: COMPLETIONS.run(lambda: completed.set_result(None))
