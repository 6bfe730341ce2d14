"""Jobs for tests whose ranks are processes of a launcher. This process is one rank of each."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import TypeVar

from cydist.api import object_codec, process_groups
from cydist.errors import StoreTimeoutError
from cydist.group_names import DEFAULT_GROUP
from cydist.groups.world import World

T = TypeVar("T")
DEADLINE = 60.0  # seconds that a body may take, and that the ranks wait for each other
LIMIT = 20.0  # seconds that the others may wait for a failed rank


class Launched:
    """The launcher's ranks, which make one job after the other, all in the same order."""

    def __init__(self, backend: str) -> None:
        process_groups.init_process_group(backend, timeout=LIMIT)
        self.whole = process_groups.current_world()
        self._runs = 0
        self._jobs = 0

    def job(self, size: int) -> LaunchedJob:
        """Return a job of the first `size` ranks."""
        self._jobs += 1
        return LaunchedJob(self, size, f"job{self._jobs}/")

    def exchange(self, mine: tuple[T | None, BaseException | None], ranks: int) -> list[T]:
        """Return the results of the first `ranks` ranks, on all ranks.

        Raises the exception of the lowest one that raised.

        It uses the store, so it does not depend on the backend.
        """
        self._runs += 1
        store, rank = self.whole.store, self.whole.rank
        store.set(f"ran/{self._runs}/{rank}", _dumped(mine, rank))
        all_ranks = [f"ran/{self._runs}/{each}" for each in range(self.whole.size)]
        try:
            store.wait(all_ranks, DEADLINE)
        except StoreTimeoutError as error:
            raise TimeoutError(f"ranks run for over {DEADLINE} s: {error}") from None
        told = [
            object_codec.decode(each, allow_pickle=True)
            for each in store.multi_get(all_ranks[:ranks])
        ]
        # A rank that has written this run's result has read all of the last run's.
        store.delete_key(f"ran/{self._runs - 1}/{rank}")
        for _, raised in told:
            if raised is not None:
                raise raised
        return [result for result, _ in told]

    def close(self) -> None:
        """Leave the job."""
        process_groups.destroy_process_group()


class LaunchedJob:
    """A job of the first `size` ranks of a launcher, in groups of its own."""

    def __init__(self, launched: Launched, size: int, prefix: str) -> None:
        self.size = size
        self.broken = False
        self._launched = launched
        self._mine: World | None = None
        whole = launched.whole
        group = process_groups.resolve_group(process_groups.new_group(range(size)))
        if group is not None:
            self._mine = World(whole.store, whole.rank, size, whole.timeout, whole.spec)
            self._mine.prefix = prefix
            self._mine.groups[DEFAULT_GROUP] = group

    def run(self, body: Callable[[int], T]) -> list[T]:
        """Call `body(rank)` on every rank of the job, and return the results by rank, on all ranks.

        Raises the exception of the lowest rank that raised, with a note of the place.
        """
        result, error = None, None
        if self._mine is not None:
            before = process_groups.swap_world(self._mine)
            try:
                result = body(self._mine.rank)
            except BaseException as raised:
                error = raised
            finally:
                process_groups.swap_world(before)
        try:
            return self._launched.exchange((result, error), self.size)
        except BaseException:
            self.broken = True
            raise

    def close(self) -> None:
        """End the groups of the job."""
        if self._mine is not None:
            first, *others = self._mine.groups.values()
            for group in others:
                group.destroy()
            process_groups.destroy_process_group(first)


def _dumped(mine: tuple[object, BaseException | None], rank: int) -> bytes:
    result, error = mine
    if error is not None:
        where = "".join(traceback.format_exception(error))
        error.add_note(f"on rank {rank}:\n{where}")
    try:
        return object_codec.encode((result, error), allow_pickle=True)
    except Exception as unsaid:
        what = RuntimeError(f"on rank {rank}: {error or unsaid!r}")
        return object_codec.encode((None, what), allow_pickle=True)
