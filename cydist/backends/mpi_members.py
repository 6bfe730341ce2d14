"""Members of an MPI group: their messages, and how they learn of each other's failures.

The collectives on top are in cydist/backends/mpi.py.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from cydist.backends.mpi_messages import FAILED, HERE, LEFT, Messages, Operation, Receive, advance
from cydist.backends.mpi_process import ExitGuard, Threads, wait_until
from cydist.errors import (
    DistBackendError,
    DistError,
    DistTimeoutError,
    GroupFailedError,
    MismatchError,
    PeerFailedError,
)
from cydist.executor import THREADS
from cydist.group import COLLECTIVE_TAG, Call, ProcessGroup
from cydist.work import CompletedWork, Work

if TYPE_CHECKING:
    from datetime import timedelta

    from cydist._native import Array

GRACE_SECONDS = 1.0  # a message to a rank that has left may still complete
_NOTICES: dict[str, type[DistError]] = {
    "timeout": DistTimeoutError,
    "mismatch": MismatchError,
    "left": PeerFailedError,
    "failed": GroupFailedError,
}


class MpiMembers(ProcessGroup):
    """A group of ranks of one Endpoint.

    peers   rank in the endpoint's communicator of each group rank
    comm    for this group's collectives; None: made when first needed
    """

    def __init__(
        self,
        endpoint: Endpoint,
        rank: int,
        peers: Sequence[int],
        *,
        timeout: float,
        name: str,
        ranks: Sequence[int],
        comm: Any = None,
    ) -> None:
        super().__init__(rank, len(peers), timeout=timeout, name=name, ranks=ranks, backend="mpi")
        self._endpoint = endpoint.share(self)
        self._messages = endpoint.messages
        self._MPI = endpoint.MPI
        self._peers = tuple(peers)
        self._others_peers = [peer for i, peer in enumerate(peers) if i != rank]
        self._group_rank = {peer: i for i, peer in enumerate(peers)}
        digest = hashlib.sha256(f"{endpoint.job}/{name}/{self._peers}".encode()).digest()
        self._id = int.from_bytes(digest[:8], "little")
        self._comm = comm
        self._owns_comm = False
        self._told = False  # do all ranks know already how this group failed?
        self._relayed = False  # and do we know it from one of them?
        self._failed_seq = 0  # the last collective that had begun where it failed
        self._waiting = 0  # number of the collective that this rank waits in for the others
        self._here: dict[int, int] = {}  # group rank -> the collective that it waits in
        self._left: dict[int, tuple[int, float]] = {}  # group rank -> its last collective, when
        self._messages.listen(self._id, self._on_notice)

    def subgroup(self, ranks: Sequence[int], name: str, timeout: float) -> ProcessGroup | None:
        return type(self)(
            self._endpoint,
            list(ranks).index(self._rank),
            [self._peers[rank] for rank in ranks],
            timeout=timeout,
            name=name,
            ranks=[self.ranks[rank] for rank in ranks],
        )

    def close(self) -> None:
        if os.getpid() != self._pid:
            return  # a forked child: its parent's MPI is not to be touched
        self.leave()
        self._messages.forget(self._id)
        # Both Open MPI and MPICH free a communicator without waiting for its other members.
        if self._owns_comm and self._failed is None and not self._MPI.Is_finalized():
            self._comm.Free()
        self._comm = None
        self._endpoint.release(self)

    def leave(self) -> None:
        """Tell the others that this rank starts no more collectives on the group, and how it
        failed, if it did: that may reach them sooner than the news from where it happened."""
        if self._size > 1 and not self._MPI.Is_finalized():
            self._messages.notify(self._id, self._others_peers, LEFT, self._seq, self._report())

    # How calls run.

    @property
    def failure(self) -> BaseException | None:
        """What failed the group, if anything did."""
        return self._failed

    @property
    def concurrent(self) -> bool:
        """May any thread wait for a call?"""
        return self._endpoint.threads.concurrent

    def check_usable(self, name: str) -> None:
        super().check_usable(name)  # before any call of MPI: this may be a forked child
        self._endpoint.threads.check(name)
        advance()
        super().check_usable(name)

    def execute(
        self,
        name: str,
        body: Callable[[Call], None],
        *,
        async_op: bool = False,
        timeout: float | timedelta | None = None,
        result: object = None,
    ) -> Work | None:
        """As the base class; where MPI was initialised without support for threads an
        asynchronous collective has run when its Work is returned."""
        if not async_op or self.concurrent:
            return super().execute(name, body, async_op=async_op, timeout=timeout, result=result)
        self.check_usable(name)
        try:
            super().execute(name, body, timeout=timeout)
        except Exception as error:
            return CompletedWork(result, error)
        return CompletedWork(result)

    def fail(self, error: BaseException, call: str = "") -> None:
        """Also tells the other ranks, which may wait for this one."""
        if self._failed is not None:
            return
        super().fail(error, call)
        self._messages.withdraw_all(self._id)
        if self._told or self._size == 1 or self._MPI.Is_finalized():
            return
        self._messages.notify(self._id, self._others_peers, FAILED, self._seq, self._report())

    def _report(self) -> str:
        """How the group failed, for the others; see _told_of."""
        error = self._failed
        if error is None:
            return ""
        cause = next((c for c, cls in _NOTICES.items() if isinstance(error, cls)), "failed")
        about = getattr(error, "ranks", ()) or (self.ranks[self._rank],)
        where = "" if self._relayed else f"rank {self.ranks[self._rank]}: "
        return f"{cause} {','.join(map(str, about))} {where}{str(error) or type(error).__name__}"

    def _on_notice(self, kind: int, source: int, number: int, text: str) -> None:
        """What another member says: it failed, waits in a collective, or has left."""
        rank = self._group_rank[source]
        if kind != HERE and text and self._failed is None:
            self._told = self._relayed = True
            self._failed_seq = number
            self.fail(self._told_of(number, text))
        if kind == LEFT:
            self._left[rank] = (number, time.monotonic())
        elif kind == HERE:
            self._here[rank] = number
            if text and self._waiting == number:
                self._messages.notify(self._id, [source], HERE, number, "")

    def _told_of(self, seq: int, text: str) -> DistError:
        """The error that another member reports, as the exception that it raised there."""
        cause, about, message = text.split(" ", 2)
        return _NOTICES.get(cause, GroupFailedError)(
            message,
            seq=seq or None,
            group=self.group_name,
            ranks=tuple(map(int, about.split(","))),
        )

    def wait_for(self, done: Callable[[], bool], deadline: float, seq: int | None = None) -> bool:
        """Poll until `done`, False at the deadline; raises when the group fails meanwhile.

        seq     of the collective that waits: one that failed after it leaves it alone, since
                whoever has come so far has done its part of this one
        """

        def over() -> bool:
            advance()
            if done():
                return True
            if self._failed is not None and (seq is None or self._failed_seq <= seq):
                raise self._failed
            return False

        try:
            return wait_until(over, deadline)
        except self._MPI.Exception as error:
            raise self.mpi_error(error) from error

    def mpi_error(self, error: Exception) -> DistBackendError:
        """What MPI raised, as an error of the group."""
        return DistBackendError(f"MPI: {error}", group=self.group_name)

    # Point to point.

    def isend(self, array: Array, peer: int, tag: int) -> Work:
        return MessageWork(self, "send", self.start_send(array, peer, tag))

    def irecv(self, array: Array, peer: int | None, tag: int) -> Work:
        return MessageWork(self, "recv", self.start_receive(array, peer, tag))

    def start_send(self, array: Array, peer: int, tag: int) -> Operation:
        """Start sending to a group rank."""
        return self._messages.send(self._id, self._peers[peer], tag, array)

    def start_receive(self, array: Array, peer: int | None, tag: int) -> Receive:
        """Start receiving from a group rank; None: from any."""
        source = None if peer is None else self._peers[peer]
        return self._messages.receive(self._id, source, tag, array)

    def member(self, operation: Operation) -> int | None:
        """Group rank of the other side; None: not known yet."""
        return None if operation.peer is None else self._group_rank[operation.peer]

    def check(self, name: str, seq: int | None, operation: Operation) -> None:
        """Raise if what came is not what was expected, or if nothing can come any more."""
        peer = self.member(operation)
        if isinstance(operation, Receive) and operation.mismatch is not None:
            here, there = operation.array, operation.mismatch
            assert peer is not None
            raise MismatchError(
                f"{self._where(name, seq)}: the ranks disagree on a message. Rank "
                f"{self.ranks[peer]} sends {there.count} elements of {there.name} "
                f"({there.nbytes} bytes); rank {self.ranks[self._rank]} receives {here.size} of "
                f"{here.dtype_name} ({here.nbytes} bytes)",
                op=name, seq=seq, group=self.group_name, ranks=(self.ranks[peer],),
            )  # fmt: skip
        if operation.test() or not self._gone(peer, started=operation.started):
            return
        raise self._failed or self._lost(name, seq, range(self._size) if peer is None else [peer])

    def _gone(self, peer: int | None, started: bool) -> bool:
        """Has the other side left, so that a message with it will not complete?"""
        if peer is None:
            return len(self._left) == self._size - 1
        if peer not in self._left:
            return False
        return not started or time.monotonic() > self._left[peer][1] + GRACE_SECONDS

    def _lost(self, name: str, seq: int | None, peers: Sequence[int]) -> PeerFailedError:
        gone = [self.ranks[peer] for peer in peers if peer in self._left]
        return PeerFailedError(
            f"{self._where(name, seq)}: rank{'s' * (len(gone) > 1)} "
            f"{', '.join(map(str, gone))} left: the process ended, or destroyed the group",
            op=name, seq=seq, group=self.group_name, ranks=tuple(gone),
        )  # fmt: skip

    def _where(self, name: str, seq: int | None) -> str:
        return f"{name}{'' if seq is None else f' #{seq}'} on group {self.group_name!r}"

    def _swap(
        self,
        call: Call,
        sends: Sequence[tuple[Array, int]],
        receives: Sequence[tuple[Array, int]],
    ) -> None:
        """The step of the derived collectives; an error names the ranks that are missing."""
        left: list[Operation] = [
            self.start_receive(array, peer, COLLECTIVE_TAG) for array, peer in receives
        ]
        left += [self.start_send(array, peer, COLLECTIVE_TAG) for array, peer in sends]

        def done() -> bool:
            nonlocal left
            left = [operation for operation in left if not self._settled(call, operation)]
            return not left

        try:
            if not self.wait_for(done, call.deadline, call.seq):
                raise self._late(call, sorted({self.member(each) or 0 for each in left}))
        except BaseException:
            for operation in left:
                operation.cancel()
            raise

    def _settled(self, call: Call, operation: Operation) -> bool:
        done = operation.test()
        self.check(call.name, call.seq, operation)
        return done

    def _late(self, call: Call, peers: Sequence[int]) -> DistTimeoutError:
        ranks = tuple(self.ranks[peer] for peer in peers)
        return DistTimeoutError(
            f"{self._where(call.name, call.seq)}: timeout: nothing from rank"
            f"{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks)) or 'unknown'} in time",
            op=call.name, seq=call.seq, group=self.group_name, ranks=ranks,
        )  # fmt: skip


class MessageWork(Work):
    """A send or receive that was posted."""

    def __init__(self, group: MpiMembers, name: str, operation: Operation) -> None:
        super().__init__()
        self._group = group
        self._name = name
        self._operation = operation
        self._deadline = group.deadline(None)

    def _wait(self, timeout: float | None) -> None:
        if self._error is None and not self._done():
            own_limit = timeout is None or time.monotonic() + timeout >= self._deadline
            deadline = self._deadline if own_limit else time.monotonic() + (timeout or 0.0)
            if not self._until(deadline):
                self._late(self._group.timeout if timeout is None else timeout, own_limit)
        if self._error is not None:
            raise self._error

    def _until(self, deadline: float) -> bool:
        try:
            return self._group.wait_for(self._done, deadline)
        except Exception as error:
            self._fail(error)
            return True

    def _late(self, waited: float, own_limit: bool) -> None:
        peer = self._group.member(self._operation)
        who = "any rank" if peer is None else f"rank {self._group.ranks[peer]}"
        verb = "to" if self._name == "send" else "from"
        late = DistTimeoutError(
            f"{self._name} on group {self._group.group_name!r}: timeout: {self._name} {verb} {who} "
            f"not complete after {waited:g} s",
            op=self._name,
            group=self._group.group_name,
            ranks=() if peer is None else (self._group.ranks[peer],),
        )
        if not own_limit:
            raise late
        self._fail(late)

    def _fail(self, error: BaseException) -> None:
        self._operation.cancel()
        self._error = error
        self._group.fail(error)

    def _done(self) -> bool:
        """Is it over, well or badly?"""
        if self._error is not None:
            return True
        self._group.check_process(self._name)
        done = self._operation.test()
        try:
            self._group.check(self._name, None, self._operation)
        except DistError as error:
            self._fail(error)
            return True
        if done and isinstance(self._operation, Receive) and self._source is None:
            peer = self._group.member(self._operation)
            assert peer is not None
            self._source = self._group.ranks[peer]
        return done

    def _poll(self) -> bool:
        advance()
        if not self._done() and (error := self._group.failure) is not None:
            self._operation.cancel()
            self._error = error
        return self._error is not None or self._done()

    def _on_thread(self, task: Callable[[], None]) -> None:
        if self._poll() or not self._group.concurrent:
            task()
        else:
            THREADS.run(task)


class Endpoint:
    """This process's end of one communicator, shared by groups and closed by the last."""

    def __init__(self, MPI: Any, comm: Any, job: str) -> None:
        self.MPI = MPI
        self.job = job  # a text that no other endpoint's groups have
        self.messages = Messages(MPI, comm)
        self.threads = Threads(MPI)
        self._groups: list[MpiMembers] = []
        self._guard = ExitGuard(MPI, self._leave)

    def share(self, group: MpiMembers) -> Endpoint:
        """One more group uses it."""
        self._groups.append(group)
        return self

    def release(self, group: MpiMembers) -> None:
        """A group has ended."""
        self._groups.remove(group)
        if self._groups:
            return
        self._guard.remove()
        self.messages.close()

    def _leave(self) -> None:
        """The process ends: tell all members, and go when they do.

        MPI's own finalization would wait for them, deaf to what they ask; and without this
        notice they would wait for us until their deadlines.
        """
        for group in tuple(self._groups):
            group.leave()

        def deserted() -> bool:
            advance()
            return self.messages.deserted

        wait_until(deserted)  # as MPI's finalization, without a deadline
