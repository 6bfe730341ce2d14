"""Calls on several arrays per process, one for each GPU that it drives: see `deprecated`.

Entry i of rank r's list is rank r * k + i of an additional group. That group is made when a group
first gets lists of k entries, and ends with it. Its calls run on one thread per entry.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

from cydist.api import arguments, objects, process_groups
from cydist.devices import array_libraries
from cydist.errors import MismatchError, counted
from cydist.executor import THREADS, TaskWork
from cydist.groups import registry
from cydist.groups.process_group import ProcessGroup
from cydist.groups.registry import BackendOptions
from cydist.waiting import countdown
from cydist.work import CombinedWork, Work

if TYPE_CHECKING:
    from cydist._native import Array

T = TypeVar("T")


class MultiGpuCall:
    """The lists of one call, checked, and the groups of their entries.

    Raises ValueError and TypeError for lists that are wrong on this rank (nothing was sent), and
    MismatchError on every rank if the ranks' lists differ in length. (A list of one entry makes the
    plain call. If other ranks pass longer lists, they are in a different call, and the group
    fails.)
    """

    def __init__(self, group: ProcessGroup, name: str, arrays: Sequence[Array]) -> None:
        self._name = name
        self._arrays = arrays
        _check(name, arrays)
        told: list[Any] = [None] * group.size()
        objects.all_gather_object(told, [(a.device, a.device_index) for a in arrays], group)
        counts = [len(places) for places in told]
        if len(set(counts)) > 1:
            raise MismatchError(
                f"{name} on {group.title}: the ranks' lists have {counts} entries, "
                "by rank, and must have as many each; the group goes on",
                op=name, group=group.group_name, ranks=group.ranks,
            )  # fmt: skip
        made = _made.setdefault(group, {})
        where = repr(told)
        if where not in made:
            _tries[group] = number = _tries.get(group, 0) + 1
            made[where] = self._groups(group, number)
            group.with_it.append(partial(_end, made[where]))
        self._each = made[where]

    def _groups(self, group: ProcessGroup, number: int) -> list[ProcessGroup]:
        """Return a group for each entry."""
        each, array = len(self._arrays), self._arrays[0]
        backend = group.for_device(array.device).backend
        if backend == "mpi":  # one rank per process
            backend = "tcp"
        ranks = range(group.size() * each)
        title = f"{group.group_name} with {counted(each, 'array')} a rank"
        store = process_groups.current_world().store.part(
            f"{group.group_name}/entries/{number}/{backend}", group.ranks,
            f"making group {title!r}", group.timeout,
        )  # fmt: skip

        def make(i: int) -> ProcessGroup:
            rank = group.rank() * each + i
            options = BackendOptions(store, rank, len(ranks), group.timeout, title, list(ranks))
            return registry.create(backend, options, None)

        with store.report_error(process_groups.current_world().rank):
            return self._for_each(make)

    def run(self, body: Callable[[ProcessGroup, int], Work | None], result: object) -> Work | None:
        """Call `body(group, i)` for all entries at once, each with its stream as the current
        one."""
        try:
            works = self._for_each(lambda i: body(self._each[i], i))
        except BaseException:
            for group in self._each:
                group.abort()
            raise
        if works[0] is None:
            return None
        return MultiGpuWork([work for work in works if work is not None], self._arrays, result)

    def _for_each(self, body: Callable[[int], T]) -> list[T]:
        """Return the function's result for each entry. Raises the exception of one of them."""
        found: dict[int, T] = {}
        tasks = []
        for i, array in enumerate(self._arrays):
            stream = None if array.device == "cpu" else array_libraries.stream_of(array)

            def run(i: int = i, array: Array = array, stream: int | None = stream) -> None:
                with _on_stream(array, stream):
                    found[i] = body(i)

            tasks.append(TaskWork(self._name, run, None))
            THREADS.run(tasks[-1].run)
        for task in tasks:
            task.wait()
        return [found[i] for i in range(len(tasks))]


# A group's groups of entries, by the devices of all ranks' entries.
_made: WeakKeyDictionary[ProcessGroup, dict[str, list[ProcessGroup]]] = WeakKeyDictionary()
# How often such groups were requested; each time uses its own part of the store.
_tries: WeakKeyDictionary[ProcessGroup, int] = WeakKeyDictionary()


def end_entry_groups(group: ProcessGroup) -> None:
    """End the groups of entries that calls on this group have made. Every member calls this."""
    for groups in _made.pop(group, {}).values():
        _end(groups)


def _end(groups: Sequence[ProcessGroup]) -> None:
    """Destroy all at once: one may wait for another to leave."""
    tasks = [TaskWork("destroy_process_group", group.destroy, None) for group in groups]
    for task in tasks:
        THREADS.run(task.run)
    for task in tasks:
        task.wait()


def _check(name: str, arrays: Sequence[Array]) -> None:
    places: dict[tuple[str, int], int] = {}
    for i, array in enumerate(arrays):
        arguments.check_same_size(array, arrays[0], name, f"entry {i}", "entry 0")
        if (array.dtype_name, array.device) != (arrays[0].dtype_name, arrays[0].device):
            raise TypeError(
                f"{name}: entry {i} is {array.dtype_name} on {array.device}, and entry 0 "
                f"{arrays[0].dtype_name} on {arrays[0].device}: all must be alike"
            )
        other = places.setdefault((array.device, array.device_index), i)
        if other != i and array.device != "cpu":
            raise ValueError(
                f"{name}: entries {other} and {i} are both on GPU {array.device_index}: each needs "
                "one of its own"
            )
    arguments.check_disjoint(arrays, [], name)


def _on_stream(array: Array, stream: int | None) -> AbstractContextManager[object]:
    """Make an array's device and this stream the current ones, for a while."""
    if stream is None:
        return nullcontext()
    return array_libraries.library_of(array).on_stream(array.device_index, stream)


@contextmanager
def _on_current(array: Array) -> Iterator[None]:
    """Make an array's device the current one, for a while."""
    with _on_stream(array, None if array.device == "cpu" else array_libraries.stream_of(array)):
        yield


class MultiGpuWork(CombinedWork):
    """The calls of all entries."""

    def __init__(self, works: Sequence[Work], arrays: Sequence[Array], result: object) -> None:
        super().__init__(works, result)
        self._arrays = arrays

    def _wait(self, timeout: float | None) -> None:
        left = countdown(timeout)
        for work, array in zip(self._works, self._arrays, strict=True):
            with _on_current(array):
                work.wait(left())

    def synchronize(self) -> None:
        for work, array in zip(self._works, self._arrays, strict=True):
            with _on_current(array):
                work.synchronize()
