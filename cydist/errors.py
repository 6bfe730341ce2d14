"""cydist's exceptions, and how warnings are issued.

* DistError(RuntimeError)
  + DistTimeoutError          (TimeoutError)      a deadline passed
  + DistBackendError                              a backend refused or failed
    - UnsupportedError        (NotImplementedError)   this backend cannot do that
    - MismatchError                               ranks are in different calls
    - GroupFailedError                            an earlier error failed this group
    - GroupDestroyedError                         the group was destroyed
    - ForkedError                                 a forked child used its parent's group
  + DistNetworkError
    - PeerFailedError         (ConnectionError)   a rank died or closed its connection
    - AuthenticationError     (PermissionError)   the other side does not know the job's secret
    - RendezvousError                             the job could not be put together
  + DistStoreError
    - StoreTimeoutError       (TimeoutError)      a key did not appear in time
    - QueueEmptyError                             a non-blocking queue_pop found nothing
  + ProcessException                              a process that `spawn` started failed
    - ProcessRaisedException                      its function raised; the traceback is shown
    - ProcessExitedException                      it left with an exit code, or was killed

Bad arguments raise ValueError and TypeError before any traffic, and the group stays usable. Every
DistError of a call has the attributes `op` (the call's name), `seq` (its number in the group),
`group` (the group's name) and `ranks` (global ranks that the error is about), as far as they are
known. After such an error the group has failed for good. Each class has a `code`, which is a
heading of docs/reference/errors.md.
"""

from __future__ import annotations

import os
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from copy import copy
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from cydist import config
from cydist.group_names import group_title

if TYPE_CHECKING:
    from cydist._native import CallError


class _Ground(RuntimeError):
    """The base of DistError, which Python lets get further bases only if this one is in between."""


_joined = False  # whether torch's classes are bases
_joining = threading.Lock()


def _join_torch() -> None:
    """Let torch's exceptions of the same names catch cydist's, if the program has imported them.

    So a library that was written for torch.distributed catches cydist's errors as torch's. It is
    done when an error is made, since torch may be imported after cydist, or never.
    """
    global _joined
    torch = sys.modules.get("torch.distributed")
    kinds = (DistError, DistBackendError, DistNetworkError, DistStoreError, QueueEmptyError)
    theirs: list[Any] = [getattr(torch, kind.__name__, None) for kind in kinds]
    with _joining:
        if _joined or None in theirs:  # it is being imported
            return
        for kind, base in zip(kinds, theirs, strict=True):
            kind.__bases__ = (*kind.__bases__, base)
        _joined = True


class DistError(_Ground):
    """Base class of all run-time errors of cydist.

    Where torch.distributed is imported, `except torch.distributed.DistError` catches these too, and
    likewise DistBackendError, DistNetworkError, DistStoreError and QueueEmptyError.

    Args:
        message: What happened, on which rank, and what to do.
        op: Name of the call, e.g. "all_reduce", or None.
        seq: The call's number in its group, or None.
        group: The group's name, or None.
        ranks: Global ranks that the error is about; may be empty.

    Attributes:
        code: A short name of the kind of error, such as "mismatch". It does not change, and is a
            heading of docs/reference/errors.md.

    Examples:
        >>> try:
        ...     dist.recv(np.empty(1), src=1 - rank, timeout=0.01, group=dist.new_group())
        ... except dist.DistError as error:
        ...     assert error.op == "recv" and error.code == "timeout"
    """

    code = "error"

    def __init__(
        self,
        message: str,
        *,
        op: str | None = None,
        seq: int | None = None,
        group: str | None = None,
        ranks: tuple[int, ...] = (),
    ) -> None:
        if not _joined:
            _join_torch()
        super().__init__(message)
        # Tracebacks show it below the message.
        self.add_note(f"See docs/reference/errors.md#{self.code}")
        self.op = op
        self.seq = seq
        self.group = group
        self.ranks = ranks


class DistTimeoutError(DistError, TimeoutError):
    """A deadline passed; the message names the call and the late ranks."""

    code = "timeout"


class DistBackendError(DistError):
    """A backend refused a call or failed in it."""

    code = "backend"


class UnsupportedError(DistBackendError, NotImplementedError):
    """The backend does not support this; the message names one that does."""

    code = "unsupported"


class MismatchError(DistBackendError):
    """Ranks are in different calls, or disagree on dtype, count, root or reduction."""

    code = "mismatch"


class NonFiniteError(DistBackendError):
    """With CYDIST_CHECK_NAN=1: an array of a call holds NaN or infinity."""

    code = "nonfinite"


class GroupFailedError(DistBackendError):
    """An earlier error failed this group for good; its cause is `__cause__`."""

    code = "group-failed"


class GroupDestroyedError(DistBackendError):
    """The group was destroyed before this call."""

    code = "group-destroyed"


class ForkedError(DistBackendError):
    """A forked child used a group of its parent."""

    code = "forked"


def check_process(pid: int, op: str, group: str | None = None, title: str = "this call") -> None:
    """Raise ForkedError unless this is process `pid`, which made the group of a call.

    Args:
        title: What the message calls the group.
    """
    if os.getpid() != pid:
        raise ForkedError(
            f"{op}: {title} belongs to process {pid}, which forked this one: its connections stay "
            "there. Start workers by spawn, or let them compute and the parent communicate",
            op=op,
            group=group,
        )


class DistNetworkError(DistError):
    """A connection could not be made or kept."""

    code = "network"


class PeerFailedError(DistNetworkError, ConnectionError):
    """A rank died, closed its connection, or vanished with its host."""

    code = "peer-failed"


class AuthenticationError(DistNetworkError, PermissionError):
    """The other side of a connection does not know the job's secret."""

    code = "authentication"


class RendezvousError(DistNetworkError):
    """The ranks of a job could not find each other."""

    code = "rendezvous"


class DistStoreError(DistError):
    """A store refused a request or cannot be reached.

    Args:
        message: What happened, and what to do.
        answered: Whether the store itself reported it; else it is dead, stopped or unreachable.
    """

    code = "store"

    def __init__(self, message: str, *, answered: bool = True) -> None:
        super().__init__(message)
        self.answered = answered


class StoreTimeoutError(DistStoreError, TimeoutError):
    """A key did not appear in the store before the timeout, or the store did not answer.

    Attributes:
        keys: Missing keys, in the order in which they were awaited: all, or the first of them.
    """

    code = "store-timeout"
    keys: tuple[bytes, ...] = ()


class QueueEmptyError(DistStoreError):
    """A non-blocking queue_pop found the queue empty."""

    code = "queue-empty"


# Status of a compiled call (STATUS_NAMES in src/engine/call_errors.pyx) -> exception class.
_CLASSES: dict[str, type[DistError]] = {
    "timeout": DistTimeoutError,
    "peer_lost": PeerFailedError,
    "no_memory": DistBackendError,
    "mismatch": MismatchError,
    "interrupted": DistBackendError,
    "aborted": GroupFailedError,
    "closed": GroupDestroyedError,
    "unreachable": DistBackendError,
}


_STATUS_OF: dict[type[BaseException], str] = {
    DistTimeoutError: "timeout",
    PeerFailedError: "peer_lost",
    GroupFailedError: "aborted",
    MismatchError: "mismatch",
}


def status_of(error: BaseException) -> str:
    """Return the status that reports an error to the other ranks."""
    other = "raised" if isinstance(error, Exception) else "interrupted"
    return _STATUS_OF.get(type(error), other)


def from_call_error(
    failure: CallError,
    op: str,
    group: str,
    ranks: Sequence[int],
    seq: int | None = None,
    waited: float | None = None,
    why: str = "",
    host: str = "",
    beside: Sequence[int] = (),
    title: str = "",
    here: int | None = None,
) -> DistError:
    """Return the exception for a failure that the engine reported.

    Args:
        group: Its name.
        ranks: Global rank of each group rank; the message names both.
        waited: Seconds of the call's timeout.
        why: Why the peer is lost or late, if the backend knows.
        host: The name of the peer's host, if it is known.
        beside: Group ranks that were lost with their whole host, the peer among them.
        title: What the message calls the group, if that is not its name.
        here: This rank, in the group, if it is known.
    """
    if failure.call is not None and failure.call[1] != seq:
        op, seq = failure.call
    lost = why or "it died, left, or was cut off"
    who = host_text(beside, ranks, host) if beside else rank_text(failure.peer, ranks, host)
    where = f"{op}{'' if seq is None else f' #{seq}'} on {title or group_title(group)}"
    text = {
        "timeout": "timeout"  # between spaces, as torch's tests expect it
        + (f" after {waited:.3g} s" if waited is not None else "")
        + (f": {failure.awaited}" if failure.awaited else f" waiting for {who}")
        + (f" ({why})" if why else ""),
        "peer_lost": f"{who} was lost: {lost}",
        "no_memory": "this rank has no memory for the temporaries of this call, or for a message "
        "that came before it" + (f" ({why})" if why else ""),
        "mismatch": f"{disagreement([failure.ours, failure.theirs])}. "
        f"This rank{'' if here is None else f' ({ranks[here]})'}: {failure.ours}. "
        f"{who[0].upper() + who[1:]}: {failure.theirs}",
        "aborted": f"the group failed in {failure.ours}"
        if failure.ours
        else "the group was aborted",
        "closed": "the group was destroyed while the call was under way",
        "unreachable": f"the system keeps this process from the array of {who}, though it did not "
        "at first; CYDIST_ALGORITHM can choose another algorithm than direct",
    }
    # A lack of memory here is no peer's fault.
    blamed = failure.peer >= 0 and failure.status != "no_memory"
    about = [*(beside or [failure.peer])] if blamed else []
    if failure.teller >= 0:
        teller = rank_text(failure.teller, ranks)
        text |= {
            "timeout": f"{teller} gave up waiting"
            + (f" for {who}" if failure.peer >= 0 else "")
            + f" in {failure.ours}",
            "peer_lost": f"{who} was lost, says {teller}: {lost}",
            "no_memory": f"{teller} had no memory for {failure.ours}",
            "mismatch": f"{disagreement([failure.ours, failure.theirs])}. "
            + (
                f"{teller[0].upper() + teller[1:]}: {failure.ours}. "
                f"{who[0].upper() + who[1:]}: {failure.theirs}"
                if failure.theirs
                else f"In {failure.ours} {teller} and {who} differ; the output of {teller} says how"
            ),
            "interrupted": f"{teller} was interrupted in {failure.ours}",
            "aborted": f"{teller} aborted the group",
            "unreachable": f"the system keeps {teller} from the array of {who}, in {failure.ours}",
            "raised": f"{teller} raised an error in {failure.ours}; its output says which",
        }
        if failure.status != "peer_lost":
            about.append(failure.teller)
    return _CLASSES.get(failure.status, DistBackendError)(
        f"{where}: {text.get(failure.status, failure.status)}",
        op=op,
        seq=seq,
        group=group,
        ranks=tuple(ranks[rank] for rank in about),
    )


# The first words of a field of a call, and what it is.
_FIELDS = {
    "op": "the operation", "root": "the root", "algorithm": "the algorithm", "tag": "the tag",
    "sizes": "the sizes of blocks", "all": "the sizes of blocks", "blocks": "the sizes of blocks",
}  # fmt: skip


def disagreement(calls: Sequence[str]) -> str:
    """Return in what calls differ of which each text has the call and the fields that differ.

    >>> disagreement(["reduce #1 of 4 elements, root 0", "reduce #1 of 3 elements, root 1"])
    'the ranks disagree about the number of elements and the root'
    >>> disagreement(["reduce #1, root 0", "barrier #1"])
    'the ranks are in different calls'
    """
    split = [call.split(", ") for call in calls]
    if len({fields[0].partition(" of ")[0] for fields in split}) > 1:
        return "the ranks are in different calls"
    sizes = [fields[0].partition(" of ")[2].split() for fields in split]
    found = []
    counts = {size[0] for size in sizes if size and size[0].isdigit()}
    if len(counts) > 1:
        found.append("the number of elements")
    if len({size[-1] for size in sizes if size} - {"element", "elements"}) > 1:
        found.append("the dtype")
    rest = {field for fields in split for field in fields[1:]}
    for field in sorted(rest):
        if not all(field in fields for fields in split):
            what = _FIELDS.get(field.partition(" ")[0], "their arguments")
            if what not in found:
                found.append(what)
    about = " and ".join(found) or "their arguments"
    return f"the ranks disagree about {about}"


P = ParamSpec("P")
T = TypeVar("T")


def shorten(error: BaseException, frames: int = 1) -> None:
    """Cut the traceback of an error that leaves cydist: of the frames after the last one of other
    code only the first are left, and of a traceback without other code's frames the first.

    Frames of Python's library count as cydist's: they are there because cydist called them.

    Args:
        frames: How many.
    """
    if config.TRACEBACK.get().strip().lower() == "full":
        return
    entry = error.__traceback__
    last, left = None, frames  # the last entry that stays, and how many may follow
    while entry is not None:
        module = str(entry.tb_frame.f_globals.get("__name__", "")).partition(".")[0]
        if module != "cydist" and module not in sys.stdlib_module_names:
            last, left = entry, frames
        elif left:
            last, left = entry, left - 1
        entry = entry.tb_next
    if last is None:
        error.__traceback__ = None
    else:
        last.tb_next = None


def leaves_cydist(function: Callable[P, T]) -> Callable[P, T]:
    """Decorate a public function: errors that leave it show the user's line and then itself."""

    def call(*arguments: P.args, **named: P.kwargs) -> T:
        try:
            return function(*arguments, **named)
        except Exception as error:
            shorten(error)
            raise

    call.__code__ = call.__code__.replace(co_name=function.__name__)  # for tracebacks
    return wraps(function)(call)


_PACKAGE = os.path.dirname(__file__) + os.sep


def without_traceback(error: BaseException) -> BaseException:
    """Return an equal error that keeps no frames alive."""
    try:
        return copy(error)
    except Exception:  # a user's class whose arguments are not those of its constructor
        return RuntimeError(f"{type(error).__name__}: {error}")


def warn_user(text: str, kind: type[Warning] = RuntimeWarning) -> None:
    """Issue a warning at the line that called cydist, however deep this is. On a thread of cydist's
    own, which no user's line called, it is at the thread's first line."""
    level, frame = 1, sys._getframe(1)
    while frame.f_code.co_filename.startswith(_PACKAGE) and frame.f_back is not None:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, kind, stacklevel=level + 1)


def counted(number: int, noun: str) -> str:
    """Return a number of things for messages: "1 rank", "2 ranks"."""
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def listed(noun: str, numbers: Sequence[int]) -> str:
    """Return what these numbers name for messages, shortened if they are many: "rank 3", "ranks 0,
    1"."""
    plural = "" if len(numbers) == 1 else "s"
    more = f" and {len(numbers) - 16} more" if len(numbers) > 16 else ""
    return f"{noun}{plural} {', '.join(map(str, numbers[:16]))}{more}"


def rank_text(rank: int, ranks: Sequence[int], host: str = "") -> str:
    """Return a group rank for messages, by its global number."""
    if rank < 0:
        return "any rank"
    number = f" (group rank {rank})" if ranks[rank] != rank else ""
    return f"rank {ranks[rank]}{number}" + (f" on {host}" if host else "")


def host_text(beside: Sequence[int], ranks: Sequence[int], host: str) -> str:
    """Return a host and its group ranks for messages, by their global numbers."""
    return f"host {host} with {listed('rank', [ranks[rank] for rank in beside])}"


class ProcessException(DistError):
    """A process that `spawn` started failed.

    Args:
        msg: What happened.
        error_index: Its rank.
        error_pid: Its process id.
    """

    code = "process"

    def __init__(self, msg: str, error_index: int, error_pid: int) -> None:
        super().__init__(msg, ranks=(error_index,))
        self.msg = msg
        self.error_index = error_index
        self.error_pid = error_pid

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return type(self), (self.msg, self.error_index, self.error_pid)


class ProcessRaisedException(ProcessException):
    """The function of a process raised an exception; the message holds its traceback."""

    code = "process-raised"


class ProcessExitedException(ProcessException):
    """A process left with an exit code other than 0, or was killed.

    Args:
        msg: What happened.
        error_index: Its rank.
        error_pid: Its process id.
        exit_code: The exit code, or the negative number of the signal.
        signal_name: "SIGKILL", ... or None.
    """

    code = "process-exited"

    def __init__(
        self,
        msg: str,
        error_index: int,
        error_pid: int,
        exit_code: int,
        signal_name: str | None = None,
    ) -> None:
        super().__init__(msg, error_index, error_pid)
        self.exit_code = exit_code
        self.signal_name = signal_name

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        more = (self.msg, self.error_index, self.error_pid, self.exit_code, self.signal_name)
        return type(self), more


def _name_as_users_do(kind: type[DistError]) -> None:
    """Let pickles, tracebacks and help() of these classes name `cydist`, which does not move."""
    kind.__module__ = "cydist"
    for each in kind.__subclasses__():
        _name_as_users_do(each)


_name_as_users_do(DistError)
