"""Fail a group: make one error, end the communicator, notify the other ranks."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
import weakref
from typing import TYPE_CHECKING

from cydist import config
from cydist._native import CallRecord
from cydist.backends.nccl.binding import CALL_SECONDS, REMOTE, REVOKE_SECONDS
from cydist.backends.nccl.call_check import CallCheck, CallsDiffer, HostNoteChannel
from cydist.backends.nccl.watchdog import WATCHDOG, GroupWatch
from cydist.errors import (
    DistBackendError,
    DistError,
    DistTimeoutError,
    GroupFailedError,
    MismatchError,
    PeerFailedError,
    disagreement,
)
from cydist.group_names import group_title
from cydist.groups.process_group import ProcessGroup

if TYPE_CHECKING:
    from cydist.backends.nccl.binding import Binding, Communicator
    from cydist.backends.nccl.cuda import Gpu
    from cydist.backends.nccl.host_group import ControlGroup, ControlListener
    from cydist.backends.nccl.streams import GroupStreams
    from cydist.backends.nccl.watchdog import InFlight, StreamCall

LOST_SECONDS = 1.0  # for the host group to notice the rank that NCCL has lost
ABORT_SECONDS = 10.0  # most seconds to wait for the end of a communicator


class FailureHandler:
    """The failures of one group, and the watch of its calls.

    The watchdog reports here (`watchdog.WatchedGroup`), and so do calls that NCCL refuses.

    Args:
        group: The group that fails.
        host: Its group of CPU memory.
        control: Receives other ranks' failures; None in a group of one rank.

    Attributes:
        watch: The calls that are under way.
        broadcasting: Lock held while the other ranks are notified; a thread that sees the failure
            may leave after that.
        is_over: Returns whether the stream has passed a call; `GroupStreams.is_over`.
    """

    def __init__(
        self,
        group: ProcessGroup,
        host: ControlGroup,
        binding: Binding,
        comm: Communicator,
        gpu: Gpu,
        streams: GroupStreams,
        control: ControlListener | None,
    ) -> None:
        self._group = group
        self._host = host
        self._binding = binding
        self._comm = comm
        self._lock = comm.calls  # a thread holds it during a call, after `check_usable`
        self._gpu = gpu
        self._control = control
        self._ending_began: float | None = None
        self._ended_by: StreamCall | None = None  # the call in which this rank saw the failure
        self.broadcasting = threading.RLock()
        self.is_over = streams.is_over
        self.watch = GroupWatch(
            self, CallCheck(HostNoteChannel(host)) if group.size() > 1 else None
        )
        WATCHDOG.add(self.watch)
        idle = weakref.WeakMethod(self.is_idle)
        comm.is_idle = lambda: (ask := idle()) is not None and ask()

    # Events from the watchdog.

    def prepare_thread(self) -> None:
        """Prepare one of cydist's threads, which is on GPU 0 at first, to poll this group."""
        self._gpu.adopt()

    def control_error(self) -> DistError | None:
        """Return the failure that another rank reported; None if there is none."""
        return None if self._control is None else self._control.received()

    def async_error(self) -> str:
        """Return NCCL's asynchronous error since the last call; "" for none."""
        return self._comm.async_error()

    def on_timeout(self, call: StreamCall) -> None:
        """Fail the group because the call's deadline has passed."""
        call_check = self.watch.call_check
        text = f"{self._describe(call)}: timeout: the GPU has not come past it"
        if blocked := WATCHDOG.blocked_seconds:
            text += f", and CUDA has not answered for {blocked:.3g} s"
        ranks: tuple[int, ...] = ()
        if call_check is not None and call.seq > call_check.before_reached:
            before = self._rank_before()
            ranks = (before,)
            text += f"; rank {before} has reached call #{call_check.before_reached} only"
        self.fail(
            DistTimeoutError(
                text, op=call.name, seq=call.seq, group=self._group.group_name, ranks=ranks
            ),
            describe_call(call),
            call,
        )

    def on_device_error(self, call: StreamCall, why: BaseException | str) -> None:
        """Fail the group because NCCL or the device reported an error."""
        if isinstance(why, str) and "remote" in why:
            self._on_unnamed_loss(call, f"NCCL says: {why}")
            return
        error = DistBackendError(
            f"{self._describe(call)}: "
            f"{'NCCL' if isinstance(why, str) else 'the GPU'} says: {why}",
            op=call.name, seq=call.seq, group=self._group.group_name,
        )  # fmt: skip
        if isinstance(why, BaseException):
            error.__cause__ = why
        self.fail(error, describe_call(call), call)

    def _on_unnamed_loss(self, call: StreamCall, text: str) -> None:
        """Fail the group because NCCL has lost a rank without naming it. Another rank's report or
        the host group's loss names it. The watchdog does not poll meanwhile."""
        found = self._find_lost()
        if isinstance(found, DistError):
            self.on_control_error(found)
            return
        error = PeerFailedError(
            f"{self._describe(call)}: {text}",
            op=call.name, seq=call.seq, group=self._group.group_name, ranks=found,
        )  # fmt: skip
        self.fail(error, describe_call(call), call)

    def _find_lost(self) -> tuple[int, ...] | DistError:
        """Wait a moment until the host group's connections, or another rank, name lost ranks.

        Returns their ranks; () if none is known to be lost.
        """
        end = time.monotonic() + LOST_SECONDS
        call_check = self.watch.call_check
        while time.monotonic() < end and call_check is not None:
            if (told := self.control_error()) is not None:
                return told
            lost = None if self._control is None else self._control.lost
            for error in (lost, call_check.lost, self._host.error):
                if isinstance(error, PeerFailedError) and error.ranks:  # others name living ranks
                    return tuple(error.ranks)
            with contextlib.suppress(CallsDiffer):
                call_check.poll()
            time.sleep(0.01)
        return ()

    def on_mismatch(self, found: CallsDiffer) -> None:
        """Fail the group because this rank and the previous one are in different calls."""
        before = self._rank_before()
        name = found.ours.partition(" ")[0]
        self.fail(
            MismatchError(
                f"{name} #{found.seq} on {self._group.title}: "
                f"{disagreement([found.ours, found.theirs])}. "
                f"This rank ({self._own_rank()}): {found.ours}. Rank {before}: {found.theirs}",
                op=name, seq=found.seq, group=self._group.group_name, ranks=(before,),
            ),
            f"{name} #{found.seq}",
        )  # fmt: skip

    def on_lost_peer(self, call: StreamCall, error: BaseException) -> None:
        """Fail the group because the previous rank is lost, or has reported a failure."""
        kind = type(error) if isinstance(error, DistError) else PeerFailedError
        self.fail(
            kind(
                f"{self._describe(call)}: {error}",
                op=call.name, seq=call.seq, group=self._group.group_name,
                ranks=getattr(error, "ranks", ()),
            ),
            describe_call(call), call,
        )  # fmt: skip

    def on_refused(self, call: StreamCall, error: BaseException) -> None:
        """Fail the group for an exception during enqueuing, and raise cydist's error for it."""
        if self._group.error is not None:  # it was ended by another thread
            raise self.failure_of(call) from error
        nccl_error = self._binding.as_nccl_error(error)
        if nccl_error is None:
            self.fail(error, describe_call(call), call)
            return
        # as `on_device_error`, which an immediate next call precedes
        if nccl_error.status == REMOTE:
            self._refused_by_remote(call, f"NCCL refuses it: {nccl_error}")
            raise self.failure_of(call) from error
        failed = DistBackendError(
            f"{self._describe(call)}: NCCL refuses it: {nccl_error}",
            op=call.name, seq=call.seq, group=self._group.group_name,
        )  # fmt: skip
        self.fail(failed, describe_call(call), call)
        raise failed from error

    def _refused_by_remote(self, call: StreamCall, text: str) -> None:
        """Make sure that the group has failed. The watchdog may already be failing it."""
        if not self.watch.take_over():
            end = time.monotonic() + 2 * LOST_SECONDS
            while self._group.error is None and time.monotonic() < end:
                time.sleep(0.01)
        if self._group.error is None:
            self._on_unnamed_loss(call, text)

    # Failing.

    def fail(
        self, error: BaseException, call: str = "", ended_by: StreamCall | None = None
    ) -> None:
        """Fail the group, end its communicator, which ends the work on the GPU, and notify the
        other ranks.

        Args:
            call: What this rank was doing, for messages.
            ended_by: The call in which this rank saw the failure.
        """
        with self.broadcasting:
            if self._group.error is not None:
                return
            self._ended_by = ended_by
            self._set_error(error, call)
            self.watch.stop()
            ending = self._ending(abort=True)  # this may take long
            if self._control is not None:
                self._control.broadcast(error)
            self._host.fail(error, call)
        self._join(ending)
        self._end_process(error)

    def _set_error(self, error: BaseException, call: str = "") -> None:
        # By the base class: the group's own method calls this object's `fail`.
        ProcessGroup.fail(self._group, error, call)

    def _end_process(self, error: BaseException) -> None:
        """End the process if the user has chosen that, so that no program goes on with a failed
        call's results."""
        if _ends_process():
            here = self._own_rank()
            sys.stderr.write(
                f"cydist: rank {here} ends, as asked: {type(error).__name__}: {error}\n"
            )
            sys.stderr.flush()
            os._exit(1)

    def on_control_error(self, error: DistError) -> None:
        """Fail this rank because another one has failed, which itself notifies all ranks."""
        if self._group.error is None:
            self._set_error(error)
            self.watch.stop()
            self.end_comm(abort=True)
            self._end_process(error)

    def check_peers(self, name: str) -> None:
        """Raise if the group has failed, or a rank is lost. The watchdog does not look while no
        call is under way.

        Args:
            name: Of what this rank does, for messages.
        """
        if (told := self.control_error()) is not None:
            self.on_control_error(told)
        lost = None if self._control is None else self._control.lost
        if lost is not None:
            self.fail(lost, name)
        self._group.check_usable(name)

    def abandon(self) -> None:
        """End the calls under way here, and take no more, without notifying the other ranks."""
        if self._group.error is None:
            name = self._group.group_name
            self._set_error(GroupFailedError(f"{group_title(name)} is replaced", group=name))
        self.watch.stop()
        self.end_comm(abort=True)

    def end_comm(self, *, abort: bool) -> bool:
        """End the communicator, and return whether NCCL has returned within ABORT_SECONDS."""
        ending = self._ending(abort=abort)
        self._join(ending)
        return ending.is_set()

    def is_idle(self) -> bool:
        """Return whether no call is under way and the group is well. Graphs with captured calls may
        run at any time."""
        with contextlib.suppress(Exception):
            self._gpu.adopt()
        self.watch.query()
        watch = self.watch
        return self._group.error is None and watch.oldest is None and watch.captured is None

    def _ending(self, *, abort: bool) -> threading.Event:
        """End the communicator on its own thread. Return the event of its end."""
        comm, gpu = self._comm, self._gpu
        if self._ending_began is None:
            self._ending_began = time.monotonic()
        # Checked here, since this thread may itself be in a call.
        empty = self._wait_until_left(0.0)

        def end() -> None:
            # An abort frees the communicator, so no thread may be in one of its calls. A thread
            # that hangs in NCCL returns only if the call is ended: by a revoke, which frees
            # nothing, or, with an older NCCL, by the abort.
            left = empty or self._wait_until_left(CALL_SECONDS)
            if abort and not left and comm.revoke():
                self._wait_until_left(REVOKE_SECONDS)
            # A new thread is on GPU 0 at first, and would leave a context there.
            with contextlib.suppress(Exception):  # the thread goes on if that fails
                gpu.adopt()
            if abort:
                comm.abort()
            else:
                comm.destroy()

        return comm.end_on_thread(end)

    def _join(self, ending: threading.Event) -> None:
        """Wait for the communicator's end, except in the watchdog's thread, which has other groups.
        The ends of several groups that hang take no longer than one."""
        if threading.current_thread().name != "cydist-nccl-watch":
            began = time.monotonic() if self._ending_began is None else self._ending_began
            ending.wait(max(0.0, began + ABORT_SECONDS - time.monotonic()))

    def _wait_until_left(self, seconds: float) -> bool:
        """Wait until no other thread is in a call. New calls are refused by now."""
        left = self._lock.acquire(timeout=seconds)
        if left:
            self._lock.release()
        return left

    def on_host_error(self, name: str) -> None:
        """Fail the group because its host group has failed.

        Args:
            name: Of the call that looks, for messages.
        """
        if (told := self.control_error()) is not None:
            self.on_control_error(told)
        elif (error := self._host.error) is not None:
            self.fail(error, name)

    def failure(self, flight: InFlight) -> BaseException | None:
        """Return the error of an unfinished call; None while it may still succeed."""
        if flight.over or self._group.error is None:
            return None
        return self.failure_of(flight.call)

    def failure_of(self, call: StreamCall) -> BaseException:
        """Return the group's failure for one of the calls that it ended."""
        cause = self._group.error
        assert cause is not None
        if isinstance(cause, DistError):
            # Messages have no number, and several may have the same name.
            numbered = call.seq and (cause.op, cause.seq) == (call.name, call.seq)
            if numbered or call is self._ended_by:
                return cause
        error = GroupFailedError(
            f"{self._describe(call)}: the group failed while it was under way "
            f"({type(cause).__name__}: {cause})",
            op=call.name, seq=call.seq, group=self._group.group_name,
            ranks=getattr(cause, "ranks", ()),
        )  # fmt: skip
        error.__cause__ = cause
        return error

    # For messages.

    def _own_rank(self) -> int:
        return self._group.ranks[self._group.rank()]

    def _rank_before(self) -> int:
        return self._group.ranks[(self._group.rank() - 1) % self._group.size()]

    def _describe(self, call: StreamCall) -> str:
        """Return the call's name, its group, its rank and its start time, for messages."""
        here = self._own_rank()
        waited = max(0.0, time.monotonic() - call.began)
        return (
            f"{describe_call(call)} on {self._group.title} (rank {here}, "
            f"{waited:.3g} s after it began)"
        )


def _ends_process() -> bool:
    """Return whether the user wants a failed group to end its process. torchrun sets torch's
    variable to 1 by itself, which is no choice of the user's."""
    ours, torchs, old = config.NCCL_ERROR_HANDLING.names
    by_torchrun = (
        os.environ.get(torchs) == "1"
        and "TORCHELASTIC_RUN_ID" in os.environ
        and config.RUN_ID.names[0] not in os.environ  # cydistrun has it, and leaves torch's alone
    )
    names = (ours, old) if by_torchrun else (ours, torchs, old)
    value = next((os.environ[each] for each in names if each in os.environ), "")
    return value.strip() in ("1", "3")


def describe_call(call: CallRecord) -> str:
    """Return "all_reduce #12"; messages have no number."""
    return f"{call.name} #{call.seq}" if call.seq else call.name
