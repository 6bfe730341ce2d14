"""Fail a group: make one error, end the communicator, notify the other ranks."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from typing import TYPE_CHECKING

from cydist import config
from cydist._native import CallRecord
from cydist.backends.nccl.binding import CALL_SECONDS, REMOTE
from cydist.backends.nccl.call_check import CallsDiffer
from cydist.errors import (
    DistBackendError,
    DistError,
    DistTimeoutError,
    GroupFailedError,
    MismatchError,
    PeerFailedError,
)
from cydist.groups.process_group import ProcessGroup

if TYPE_CHECKING:
    from cydist.backends.nccl.binding import Binding, Communicator
    from cydist.backends.nccl.cuda import Gpu
    from cydist.backends.nccl.host_group import ControlGroup, ControlListener
    from cydist.backends.nccl.watchdog import GroupWatch, InFlight, StreamCall

LOST_SECONDS = 1.0  # for the host group to notice the rank that NCCL has lost
ABORT_SECONDS = 10.0  # most seconds to wait for the end of a communicator


class FailureMixin(ProcessGroup):
    """The part of NcclGroup that handles failures."""

    binding: Binding
    host: ControlGroup
    gpu: Gpu
    _watch: GroupWatch
    _control: ControlListener | None
    _lock: threading.RLock  # held by a thread during a call, after it has checked `_failed`
    _ended_by: StreamCall | None  # the call in which this rank detected the failure
    # held while the other ranks are notified; a thread that sees the failure may then leave
    _broadcasting: threading.RLock

    @property
    def comm(self) -> Communicator:
        """Return the communicator."""
        raise NotImplementedError

    # Events from the watchdog.

    def prepare_thread(self) -> None:
        """Prepare the watchdog's thread, which is on GPU 0 at first, to watch this group."""
        self.gpu.adopt()

    def control_error(self) -> DistError | None:
        """Return the failure that another rank reported; None if there is none."""
        return None if self._control is None else self._control.received()

    def async_error(self) -> str:
        """Return NCCL's asynchronous error since the last call; "" for none."""
        return self.comm.async_error()

    def on_timeout(self, call: StreamCall) -> None:
        """Fail the group because the call's deadline has passed."""
        call_check = self._watch.call_check
        text = f"{self.describe_stream_call(call)}: timeout: the GPU has not come past it"
        ranks: tuple[int, ...] = ()
        if call_check is not None and call.seq > call_check.before_reached:
            before = self.ranks[(self._rank - 1) % self._size]
            ranks = (before,)
            text += f"; rank {before} has reached call #{call_check.before_reached} only"
        self.fail(
            DistTimeoutError(text, op=call.name, seq=call.seq, group=self.group_name, ranks=ranks),
            self.describe(call),
            call,
        )

    def on_device_error(self, call: StreamCall, why: BaseException | str) -> None:
        """Fail the group because NCCL or the device reported an error."""
        if isinstance(why, str) and "remote" in why:
            self._on_unnamed_loss(call, f"NCCL says: {why}")
            return
        error = DistBackendError(
            f"{self.describe_stream_call(call)}: "
            f"{'NCCL' if isinstance(why, str) else 'the GPU'} says: {why}",
            op=call.name, seq=call.seq, group=self.group_name,
        )  # fmt: skip
        if isinstance(why, BaseException):
            error.__cause__ = why
        self.fail(error, self.describe(call), call)

    def _on_unnamed_loss(self, call: StreamCall, text: str) -> None:
        """Fail the group because NCCL has lost a rank without naming it. Another rank's report or
        the host group's loss names it. The watchdog does not poll meanwhile."""
        found = self._find_lost()
        if isinstance(found, DistError):
            self.on_control_error(found)
            return
        error = PeerFailedError(
            f"{self.describe_stream_call(call)}: {text}",
            op=call.name, seq=call.seq, group=self.group_name, ranks=found,
        )  # fmt: skip
        self.fail(error, self.describe(call), call)

    def _find_lost(self) -> tuple[int, ...] | DistError:
        """Wait a moment until the host group's connections, or another rank, name lost ranks.

        Returns their ranks; () if none is known to be lost.
        """
        end = time.monotonic() + LOST_SECONDS
        call_check = self._watch.call_check
        while time.monotonic() < end and call_check is not None:
            if (told := self.control_error()) is not None:
                return told
            lost = None if self._control is None else self._control.lost
            for error in (lost, call_check.lost, self.host.error):
                if isinstance(error, PeerFailedError) and error.ranks:  # others name living ranks
                    return tuple(error.ranks)
            with contextlib.suppress(CallsDiffer):
                call_check.poll()
            time.sleep(0.01)
        return ()

    def on_mismatch(self, found: CallsDiffer) -> None:
        """Fail the group because this rank and the previous one are in different calls."""
        before = self.ranks[(self._rank - 1) % self._size]
        name = found.ours.partition(" ")[0]
        self.fail(
            MismatchError(
                f"{name} #{found.seq} on group {self.group_name!r}: the ranks are in different "
                f"calls. Here: {found.ours}. Rank {before}: {found.theirs}",
                op=name, seq=found.seq, group=self.group_name, ranks=(before,),
            ),
            f"{name} #{found.seq}",
        )  # fmt: skip

    def on_lost_peer(self, call: StreamCall, error: BaseException) -> None:
        """Fail the group because the previous rank is lost, or has reported a failure."""
        kind = type(error) if isinstance(error, DistError) else PeerFailedError
        self.fail(
            kind(
                f"{self.describe_stream_call(call)}: {error}",
                op=call.name, seq=call.seq, group=self.group_name,
                ranks=getattr(error, "ranks", ()),
            ),
            self.describe(call), call,
        )  # fmt: skip

    def on_refused(self, call: StreamCall, error: BaseException) -> None:
        """Fail the group for an exception during enqueuing, and raise cydist's error for it."""
        if self.error is not None:  # it was ended by another thread
            raise self.failure_of(call) from error
        nccl_error = self.binding.as_nccl_error(error)
        if nccl_error is None:
            self.fail(error, self.describe(call), call)
            return
        # as `on_device_error`, which an immediate next call precedes
        if nccl_error.status == REMOTE:
            self._refused_by_remote(call, f"NCCL refuses it: {nccl_error}")
            raise self.failure_of(call) from error
        failed = DistBackendError(
            f"{self.describe_stream_call(call)}: NCCL refuses it: {nccl_error}",
            op=call.name, seq=call.seq, group=self.group_name,
        )  # fmt: skip
        self.fail(failed, self.describe(call), call)
        raise failed from error

    def _refused_by_remote(self, call: StreamCall, text: str) -> None:
        """Make sure that the group has failed. The watchdog may already be failing it."""
        if not self._watch.take_over():
            end = time.monotonic() + 2 * LOST_SECONDS
            while self.error is None and time.monotonic() < end:
                time.sleep(0.01)
        if self.error is None:
            self._on_unnamed_loss(call, text)

    # Failing.

    def fail(
        self, error: BaseException, call: str = "", ended_by: StreamCall | None = None
    ) -> None:
        """As the base class. Also ends the communicator, which ends the work on the GPU, and
        notifies the other ranks."""
        with self._broadcasting:
            if self.error is not None:
                return
            self._ended_by = ended_by
            super().fail(error, call)
            self._watch.stop()
            ending = self._ending(abort=True)  # this may take long
            if self._control is not None:
                self._control.broadcast(error)
            self.host.fail(error, call)
        _join(ending)
        self._end_process(error)

    def _end_process(self, error: BaseException) -> None:
        """End the process if the user has chosen that, so that no program goes on with a failed
        call's results."""
        if config.NCCL_ERROR_HANDLING.get().strip() in ("1", "3"):
            here = self.ranks[self._rank]
            sys.stderr.write(
                f"cydist: rank {here} ends, as asked: {type(error).__name__}: {error}\n"
            )
            sys.stderr.flush()
            os._exit(1)

    def on_control_error(self, error: DistError) -> None:
        """Fail this rank because another one has failed, which itself notifies all ranks."""
        if self.error is None:
            ProcessGroup.fail(self, error)
            self._watch.stop()
            self.end_comm(abort=True)
            self._end_process(error)

    def abort(self) -> None:
        """End every call under way now, here and on the other ranks."""
        super().abort()
        self.host.abort()

    def abandon(self) -> None:
        """End the calls under way here, and take no more, without notifying the other ranks."""
        if self.error is None:
            ProcessGroup.fail(
                self,
                GroupFailedError(f"group {self.group_name!r} is replaced", group=self.group_name),
            )
        self._watch.stop()
        self.end_comm(abort=True)

    def end_comm(self, *, abort: bool) -> bool:
        """End the communicator, and return whether NCCL has returned within ABORT_SECONDS."""
        ending = self._ending(abort=abort)
        _join(ending)
        return not ending.is_alive()

    def _ending(self, *, abort: bool) -> threading.Thread:
        """Return a thread that ends the communicator."""
        comm, gpu = self.comm, self.gpu
        nobody = self._wait_until_left(
            0.0
        )  # checked here, since this thread may itself be in a call

        def run() -> None:
            # The communicator must not vanish under a thread that is about to call NCCL. But a
            # thread that hangs in NCCL returns only through the abort.
            if not nobody:
                self._wait_until_left(CALL_SECONDS)
            # A new thread is on GPU 0 at first, and would leave a context there.
            with contextlib.suppress(Exception):  # the thread goes on if that fails
                gpu.adopt()
            if abort:
                comm.abort()
            else:
                comm.destroy()

        thread = threading.Thread(target=run, name="cydist-nccl-end", daemon=True)
        thread.start()
        return thread

    def _wait_until_left(self, seconds: float) -> bool:
        """Wait until no other thread is in a call. New calls are refused by now."""
        left = self._lock.acquire(timeout=seconds)
        if left:
            self._lock.release()
        return left

    def check_usable(self, name: str) -> None:
        """As the base class. Also reads failures that the host group has received."""
        if self.error is None and self.host.error is not None:
            if (told := self.control_error()) is not None:
                self.on_control_error(told)
            else:
                self.fail(self.host.error, name)
        super().check_usable(name)

    def failure(self, flight: InFlight) -> BaseException | None:
        """Return the error of an unfinished call; None while it may still succeed."""
        if flight.over or self.error is None:
            return None
        return self.failure_of(flight.call)

    def failure_of(self, call: StreamCall) -> BaseException:
        """Return the group's failure for one of the calls that it ended."""
        cause = self.error
        assert cause is not None
        if isinstance(cause, DistError):
            # Messages have no number, and several may have the same name.
            numbered = call.seq and (cause.op, cause.seq) == (call.name, call.seq)
            if numbered or call is self._ended_by:
                return cause
        error = GroupFailedError(
            f"{self.describe_stream_call(call)}: the group failed while it was under way "
            f"({type(cause).__name__}: {cause})",
            op=call.name, seq=call.seq, group=self.group_name, ranks=getattr(cause, "ranks", ()),
        )  # fmt: skip
        error.__cause__ = cause
        return error

    # For messages.

    def describe(self, call: CallRecord) -> str:
        """Return "all_reduce #12"; messages have no number."""
        return f"{call.name} #{call.seq}" if call.seq else call.name

    def describe_stream_call(self, call: StreamCall) -> str:
        """Return the call's name, its group, its rank and its start time, for messages."""
        here = self.ranks[self._rank]
        waited = max(0.0, time.monotonic() - call.began)
        return (
            f"{self.describe(call)} on group {self.group_name!r} (rank {here}, {waited:.3g} s "
            "after it began)"
        )

    def last_call(self) -> CallRecord | None:
        """Return the first call that the GPU has not completed, or the last one."""
        return self._watch.oldest or super().last_call()


def _join(ending: threading.Thread) -> None:
    """Wait for a communicator's end, except in the watchdog's thread, which has other groups."""
    if threading.current_thread().name != "cydist-nccl-watch":
        ending.join(ABORT_SECONDS)
