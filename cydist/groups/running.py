"""How the calls of a group run, one at a time, and how a group fails."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from cydist.errors import (
    DistTimeoutError,
    GroupDestroyedError,
    GroupFailedError,
    UnsupportedError,
    check_process,
)
from cydist.executor import Serial
from cydist.waiting import DEFAULT_TIMEOUT, LONGEST_TIMEOUT, duration, seconds
from cydist.work import Work

if TYPE_CHECKING:
    from cydist._native import Array


class Call:
    """One call on a group, as backends, error messages and hooks see it.

    name        "all_reduce"
    seq         its number among the collectives of the group; 0 for point to point
    deadline    on time.monotonic(), in seconds
    began       on the same clock
    agreed      the ranks have compared it (derived collectives)
    sizes       hash of the sizes of arrays that go as one, on which all ranks must agree
    over        it has ended, well or badly
    """

    __slots__ = ("agreed", "began", "deadline", "name", "over", "seq", "sizes")

    def __init__(self, name: str, seq: int, deadline: float, over: bool = False) -> None:
        self.name = name
        self.seq = seq
        self.deadline = deadline
        self.began = time.monotonic()
        self.agreed = False
        self.sizes = 0
        self.over = over

    @property
    def deadline_ns(self) -> int:
        """The deadline on CLOCK_MONOTONIC, in nanoseconds, for compiled code."""
        return int(self.deadline * 1e9)

    def remaining(self) -> float:
        """Seconds left; never negative."""
        return max(0.0, self.deadline - time.monotonic())

    def wait(self, part: Work) -> None:
        """Wait for a message of this call, which has the call's deadline and no other."""
        part.due(None)
        part.wait(self.remaining())


class Running:
    """The part of a ProcessGroup that runs its calls, and that fails."""

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
        self.group_name = name
        self.group_desc = name
        self.ranks: tuple[int, ...] = tuple(range(size)) if ranks is None else tuple(ranks)
        self.backend = backend
        self.timeout: float = duration(timeout)
        self._serial = Serial()
        self._seq = 0
        self._call: Call | None = None  # the last collective that has begun
        self.waiting: tuple[str, int] | None = None  # for a message: "recv", and whose
        self._failed: BaseException | None = None
        self._destroyed = False
        self.with_it: list[Callable[[], None]] = []  # what to end when this group does
        self._pid = os.getpid()

    def __repr__(self) -> str:
        return (
            f"<{type(self).__name__} {self.group_name!r} backend={self.backend} "
            f"rank={self._rank} size={self._size}>"
        )

    @property
    def error(self) -> BaseException | None:
        """What failed the group, as it was raised; None while the group takes calls."""
        return self._failed

    def close(self) -> None:
        """Let go of what the group holds. Called once, by destroy."""

    def leave_job(self, now: float) -> None:
        """All groups of this rank are destroyed next: what each would wait for, all wait for
        together, from now on, which is on time.monotonic()."""

    def abort(self) -> None:
        """End every call under way with an error, now. The group has failed then."""
        self.fail(GroupFailedError(f"group {self.group_name!r} was aborted", group=self.group_name))

    # How calls run.

    def execute(
        self,
        name: str,
        body: Callable[[Call], None],
        *,
        async_op: bool = False,
        timeout: float | timedelta | None = None,
        result: object = None,
        array: Array | None = None,
    ) -> Work | None:
        """Run one collective in its turn: now, on this thread, or in the background. Returns a
        Work when async_op is set, else None when the call is complete.

        array   one of the call's arrays, which are all on one device; None: it has none
        """
        self.check_usable(name)
        deadline = self.deadline(timeout, name)
        begun = False

        def run() -> None:
            nonlocal begun
            begun = True
            self.check_usable(name)
            call = Call(name, 0, deadline)
            try:
                call.seq = self.next_seq()  # if a signal handler raises now, others must hear
                self._call = call
                body(call)
            except UnsupportedError:
                raise
            except BaseException as error:
                self.fail(error, f"{name} #{call.seq}")
                raise
            finally:
                call.over = True

        try:
            if async_op:
                return self._serial.start(name, run, result)
            if not self._serial.run(name, run, deadline, lambda error: self._give_up(error, name)):
                raise DistTimeoutError(
                    f"{name} on group {self.group_name!r}: timeout: calls that were issued before "
                    "it are still under way",
                    op=name,
                    group=self.group_name,
                )
        except BaseException as error:
            # It ended before its turn, which other ranks count, or an interrupt ended it.
            if not begun or not isinstance(error, Exception):
                self.fail(error, name)
            raise
        return None

    def _give_up(self, error: BaseException, name: str) -> None:
        """Fail the group and end the call that runs on it, on whatever thread."""
        self.fail(error, name)
        self.abort()

    def next_seq(self) -> int:
        """The number of the collective that begins: they run one at a time, in order."""
        self._seq += 1
        return self._seq

    def deadline(self, timeout: float | timedelta | None, call: str = "") -> float:
        """When a call that starts now must be over, on time.monotonic(). `seconds` says what a
        wrong timeout raises."""
        limit = seconds(timeout, call)
        # A group of a third party may have been given any.
        return time.monotonic() + min(self.timeout if limit is None else limit, LONGEST_TIMEOUT)

    # How a group fails, and ends.

    def fail(self, error: BaseException, call: str = "") -> None:
        """The first error fails the group for good; later ones change nothing.

        A backend that can tells the other members, so that none waits for this rank.

        call    what this rank was doing, for people
        """
        if self._failed is None:
            self._failed = error

    def check_process(self, name: str) -> None:
        """Raise ForkedError in a forked child."""
        check_process(self._pid, name, self.group_name)

    def doing(self) -> str:
        """Which call of the group this rank is in, for people: "in all_reduce #12"."""
        call = self.last_call()
        if call is not None and not call.over:
            return f"in {call.name} #{call.seq}"
        if self.waiting is not None:
            name, peer = self.waiting
            way = "to" if name == "send" else "from"
            return f"in {name} {way} " + ("anyone" if peer < 0 else f"rank {self.ranks[peer]}")
        last = "and has made none" if call is None else f"its last was {call.name} #{call.seq}"
        return f"in no call of the group{',' if call is None else ';'} {last}"

    def last_call(self) -> Call | None:
        """The collective that this rank is in, or was in last."""
        return self._call

    def check_usable(self, name: str) -> None:
        """Raise if the group was destroyed or has failed, or belongs to another process."""
        if os.getpid() != self._pid:
            self.check_process(name)
        if self._destroyed:
            raise GroupDestroyedError(
                f"{name}: group {self.group_name!r} was destroyed", op=name, group=self.group_name
            )
        if self._failed is not None:
            raise GroupFailedError(
                f"{name}: group {self.group_name!r} failed earlier and takes no more calls "
                f"({type(self._failed).__name__}: {self._failed}). Other groups still work; "
                "shrink_group makes one of the ranks that are left",
                op=name,
                group=self.group_name,
                ranks=getattr(self._failed, "ranks", ()),
            ) from self._failed

    def hear(self, name: str) -> None:
        """Raise if the group has failed, also if another rank is about to say so.

        For who has received what makes no sense: the ranks may have been in different calls.
        """
        self.check_usable(name)

    def destroy(self) -> None:
        """End the group. Idempotent. In a forked child the parent's group goes on."""
        if not self._destroyed:
            self._destroyed = True
            if os.getpid() == self._pid:
                try:
                    for end in self.with_it:
                        end()
                finally:
                    self.close()
