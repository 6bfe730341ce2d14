"""Split a group's communicator.

NCCL's split is a call of all the parent's ranks: it has no deadline, and no other call may be under
way. So the ranks first agree that each of them can split. If one cannot, all make communicators by
unique ids instead. A split that then fails, or does not return, fails the parent, since nothing
else ends it.

The parts share no resources with the parent, and its end is not theirs.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Protocol

from cydist.backends.nccl.binding import NO_COLOR
from cydist.backends.nccl.bootstrap import SLICE, current_gpu
from cydist.errors import (
    DistBackendError,
    DistError,
    DistTimeoutError,
    MismatchError,
    disagreement,
)

if TYPE_CHECKING:
    from cydist.backends.nccl.binding import Binding, Communicator
    from cydist.backends.nccl.bootstrap import Exchange
    from cydist.backends.nccl.cuda import Gpu
    from cydist.backends.nccl.failure import FailureHandler
    from cydist.group_names import GroupName

IDLE_SECONDS = 1.0  # most seconds to wait for the parent's calls to be over


class Parent(Protocol):
    """The group that is split, an NcclGroup."""

    group_name: GroupName
    ranks: tuple[int, ...]
    comm: Communicator
    binding: Binding
    gpu: Gpu
    failures: FailureHandler

    @property
    def title(self) -> str:
        """Return the group's name, for messages."""

    @property
    def error(self) -> BaseException | None:
        """Return the error that the group has failed with; None: it has not."""

    def rank(self) -> int:
        """Return this rank's group rank."""

    def fail(self, error: BaseException, call: str = "") -> None:
        """Fail the group on all ranks, and end its communicator."""


class SplitThread:
    """Splits a communicator on a thread of its own, which NCCL may keep.

    The thread is in the parent's calls from before the ranks agree until NCCL has returned, so no
    other thread of this rank can make one.
    """

    def __init__(self, parent: Parent, color: int, key: int) -> None:
        self._parent = parent
        self._color, self._key = color, key
        self._ready = self._wanted = False
        self._known, self._decided = threading.Event(), threading.Event()
        self.made: Communicator | None = None
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self._run, name="cydist-nccl-split", daemon=True)
        self.thread.start()

    def is_ready(self) -> bool:
        """Return whether this rank can split: its GPU has passed all of the parent's calls."""
        self._known.wait(2 * IDLE_SECONDS)
        return self._ready

    def decide(self, wanted: bool) -> None:
        """Let the thread split, or end."""
        self._wanted = wanted
        self._decided.set()

    def _run(self) -> None:
        try:
            if self._parent.comm.calls.acquire(timeout=IDLE_SECONDS):
                try:
                    self._split()
                finally:
                    self._parent.comm.calls.release()
        except BaseException as error:
            self.error = error
        finally:
            self._known.set()

    def _split(self) -> None:
        end = time.monotonic() + IDLE_SECONDS
        while not self._parent.failures.is_idle():
            if time.monotonic() > end:
                return
            time.sleep(0.001)
        self._ready = True
        self._known.set()
        self._decided.wait()
        if self._wanted:
            self.made = self._parent.comm.split(self._color, self._key)


def split_comm(
    parent: Parent, exchange: Exchange, parts: Sequence[Sequence[int]], name: str,
    deadline: float,
) -> Communicator | None:  # fmt: skip
    """Split a group's communicator, if all its ranks can. Each of them calls it.

    Args:
        exchange: Between the ranks of the parent.
        parts: Group ranks of each part, in the part's order.
        name: Of the call, for messages.

    Returns:
        The part's communicator; None if this rank is in none, or the ranks have not split.

    Raises:
        RendezvousError: A rank does not come. The parent still works.
        MismatchError: The ranks ask for different parts. The parent still works.
        DistTimeoutError: NCCL does not return. The parent has failed.
        DistError: A rank is lost, or NCCL makes no communicator. The parent has failed.
    """
    try:
        return _split_comm(parent, exchange, parts, name, deadline)
    except DistError as error:
        with contextlib.suppress(DistError):
            exchange.failed(f"{type(error).__name__}: {error}")
        raise


def _split_comm(
    parent: Parent, exchange: Exchange, parts: Sequence[Sequence[int]], name: str,
    deadline: float,
) -> Communicator | None:  # fmt: skip
    # NCCL puts the part on the parent's GPU, and a group belongs to the current one.
    on_gpu = current_gpu().index == parent.gpu.index
    able = on_gpu and parent.error is None and parent.comm.can_split()
    wanted = f"{name} {[list(part) for part in parts]}"
    own = f"{int(able)} {sha256(wanted.encode()).hexdigest()} {wanted:.400}"
    found = exchange.all_ranks("able", own.encode(), deadline)
    said = [text.decode().split(" ", 2) for text in found]
    rank = parent.rank()
    other = next((i for i, each in enumerate(said) if each[1] != said[rank][1]), rank)
    if other != rank:
        here, there = said[rank][2], said[other][2]
        raise MismatchError(
            f"{name} on {parent.title}: {disagreement([here, there])}. This rank "
            f"({parent.ranks[rank]}): {here}. Rank {parent.ranks[other]}: {there}",
            group=parent.group_name, ranks=(parent.ranks[other],),
        )  # fmt: skip
    if not all(each[0] == "1" for each in said):
        return None
    color = next((i for i, part in enumerate(parts) if rank in part), NO_COLOR)
    split = SplitThread(parent, color, 0 if color == NO_COLOR else list(parts[color]).index(rank))
    try:
        # All ranks are here, so this takes no longer than a rank's wait for its GPU.
        ready = exchange.all_ranks("split", b"1" if split.is_ready() else b"", deadline)
        if not all(ready):
            return None
        split.decide(True)
        _wait(parent, split.thread, name, deadline)
        if split.error is not None:
            raise _backend_error(parent, split.error, name)
        try:
            exchange.all_ranks("made", b"", deadline)  # NCCL may have failed on another rank only
        except BaseException:
            if split.made is not None:
                split.made.abort()
            raise
        return split.made
    finally:
        split.decide(False)


def _wait(parent: Parent, thread: threading.Thread, name: str, deadline: float) -> None:
    """Wait for NCCL. If it does not return, or a rank is lost, the parent fails, which ends the
    split."""
    while thread.is_alive():
        thread.join(SLICE)
        if not thread.is_alive():
            return
        parent.failures.check_peers(name)
        if time.monotonic() > deadline:
            error = DistTimeoutError(
                f"{name} on {parent.title}: NCCL does not come back from splitting the "
                f"communicator on rank {parent.ranks[parent.rank()]}, though all ranks were here; "
                "NCCL_DEBUG=INFO says what it waits for",
                group=parent.group_name,
            )
            parent.fail(error, name)
            raise error


def _backend_error(parent: Parent, found: BaseException, name: str) -> BaseException:
    """Fail the parent for an error of NCCL: other ranks may wait in the split. Return the error."""
    parent.failures.check_peers(name)
    nccl_error = parent.binding.as_nccl_error(found)
    if nccl_error is None:
        parent.fail(found, name)
        return found
    error = DistBackendError(
        f"{name} on {parent.title}: rank {parent.ranks[parent.rank()]}: NCCL splits no "
        f"communicator: {nccl_error}. NCCL_DEBUG=WARN says why",
        group=parent.group_name,
    )
    error.__cause__ = found
    parent.fail(error, name)
    return error
