"""Report a rank's state to a peer that has waited for it until the peer's deadline.

A rank that gives up queries each late rank over a separate short connection (channel "report"), or
directly if ranks are threads of one process. The thread that accepts connections answers. So a rank
answers while it computes or waits, unless it is stopped or holds the GIL. Without authentication
there is no answer, because stacks are for members of the job only.
"""

from __future__ import annotations

import contextlib
import gc
import linecache
import os
import re
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from types import FrameType
from typing import NamedTuple

from cydist.backends.host.addresses import SocketAddress
from cydist.backends.host.queries import MOST_ANSWER_BYTES, ask, tell
from cydist.backends.host.traffic import Traffic
from cydist.errors import DistError
from cydist.executor import THREADS
from cydist.net.acceptor import PendingPeer

CHANNEL = b"report"
CLAIM = struct.Struct("<IIQ")  # source, destination, the group's comm id
PATIENCE = 0.3  # seconds for all ranks that are queried together
MOST_REPORT_BYTES = MOST_ANSWER_BYTES
LAST_CALLS = "last calls: "  # begins the line of a report that lists them
MOST_FRAMES = 24  # innermost frames of one thread

PACKAGE = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep
BELOW_USERS = (PACKAGE + "testing", PACKAGE + "launch", threading.__file__)


class PeerReport(NamedTuple):
    """A rank's answer to a query.

    Attributes:
        state: "in all_reduce #12"; or why nothing is known.
        stacks: Of its Python threads, for messages; may be empty.
    """

    state: str
    stacks: str


def encode(report: PeerReport) -> bytes:
    """Encode it for sending, cut if it is too long."""
    return "\n".join(report).encode()[:MOST_REPORT_BYTES]


def decode(data: bytes) -> PeerReport:
    """Return the status that `encode` was given."""
    state, _, stacks = data.decode("utf-8", "replace").partition("\n")
    return PeerReport(state, stacks)


def is_late(report: PeerReport, here: str) -> bool:
    """Return whether that rank has not reached the call `here`.

    A rank is not late if it is in the call, has left it, or has given up on it too.
    """
    call = here.removeprefix("in ")
    return not (call and re.search(rf"{re.escape(call)}(?!\d)", report.state))


def describe_report(who: str, report: PeerReport, heard: Traffic | None = None) -> str:
    """Return a report as lines of an error's message.

    Args:
        heard: The traffic with that rank; None: not known.
    """
    if report is SILENT and heard is not None and heard.is_heard:
        report = BUSY
    return f"\n{who} is {report.state}" + "".join(
        f"\n    {line}" for line in report.stacks.splitlines()
    )


# Asking


def gather(
    query: Callable[[int, float], PeerReport], ranks: Sequence[int]
) -> dict[int, PeerReport]:
    """Query all ranks at once with query(rank, deadline). Takes PATIENCE at most."""
    from queue import Empty, SimpleQueue  # slow to import and rarely needed

    deadline = time.monotonic() + PATIENCE
    answers: SimpleQueue[tuple[int, PeerReport]] = SimpleQueue()

    def put(rank: int) -> None:
        try:
            answers.put((rank, query(rank, deadline)))
        except (TimeoutError, DistError, OSError) as error:
            late = isinstance(error, TimeoutError)
            answers.put((rank, SILENT if late else PeerReport(f"not to be asked: {error}", "")))

    for rank in ranks:
        THREADS.run(lambda rank=rank: put(rank))  # type: ignore[misc]
    found = dict.fromkeys(ranks, SILENT)
    with contextlib.suppress(Empty):
        for _ in ranks:
            rank, report = answers.get(timeout=max(0.01, deadline - time.monotonic()))
            found[rank] = report
    return found


GONE = PeerReport("not in the group: it has not made it, or destroyed it", "")
SILENT = PeerReport(
    "giving no answer: it is stopped, or in code that holds Python's lock, or its host is cut off",
    "",
)


BUSY = PeerReport(
    "giving no answer, though its host does: it is stopped, or in code that holds Python's lock, "
    "or the network is slow",
    "",
)


_STATES = {"T": "is stopped (SIGSTOP, Ctrl-Z): SIGCONT lets it go on", "t": "is in a debugger"}


def silent_here(pid: int) -> PeerReport:
    """Return what is known of a rank on this host that gives no answer.

    Args:
        pid: Its process, if this process sees it; else 0.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            state = file.read().rpartition(b")")[2].split()[0].decode()
    except (OSError, IndexError):
        return PeerReport(
            "giving no answer: it is stopped, or in code that holds Python's lock", ""
        )
    how = _STATES.get(state, "is in code that holds Python's lock, or gets no time on a processor")
    return PeerReport(f"giving no answer: its process {pid} {how}", "")


def query(
    addresses: Sequence[SocketAddress], *, secret: bytes, job: str, claim: bytes, deadline: float
) -> PeerReport:
    """Query the rank that listens at one of these addresses. Raises OSError or DistError."""
    return decode(
        ask(addresses, channel=CHANNEL, secret=secret, job=job, claim=claim, deadline=deadline)
    )


# Answering


def answer(peer: PendingPeer, rank: int, of: Callable[[int], PeerReport] | None) -> None:
    """Complete the handshake with a member, send it the requested report, and hang up.

    Args:
        of: Returns this rank's report on the group with a comm_id.
    """
    # The answering thread must go on connecting after any error.
    with peer.sock, contextlib.suppress(Exception):
        _, destination, comm_id = CLAIM.unpack(peer.handshake.claim)
        if destination == rank and of is not None:
            tell(peer, encode(of(comm_id)))


def stacks(first: Sequence[int], others: bool) -> str:
    """Return the stacks of this process's Python threads, without cydist's own threads.

    Args:
        first: Identifiers of the first threads; the main thread follows.
        others: Whether to add all other threads.
    """
    frames = _frames()
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    order = [*first]
    if others:
        order += [threading.main_thread().ident or 0, *frames]
    lines: list[str] = []
    for ident in dict.fromkeys(order):
        shown = _stack(frames[ident]) if ident in frames else []
        if shown:
            lines += [f"thread {names.get(ident, ident)}:", *shown]
    frames.clear()  # this frame is in it: a cycle that would keep the frames of all threads
    return "\n".join(lines)


def _frames() -> dict[int, FrameType]:
    """Return the top frame of each thread.

    Python before 3.11.8 and 3.12.1 holds a lock of the interpreter meanwhile. If the garbage
    collector runs a finalizer there that releases the GIL, for example to close a socket, the
    process deadlocks: another thread may take the GIL and wait for that lock.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        return sys._current_frames()
    finally:
        if collects:
            gc.enable()


def _stack(frame: FrameType | None) -> list[str]:
    """Return a stack, outermost call first, down to the call of cydist that it is in; [] for one of
    cydist's own threads."""
    calls: list[tuple[str, int, str]] = []
    while frame is not None:
        code = frame.f_code
        calls.append((code.co_filename, frame.f_lineno, code.co_name))
        frame = frame.f_back
    calls.reverse()
    while calls and calls[0][0].startswith(BELOW_USERS):
        del calls[0]
    ours = next((i for i, call in enumerate(calls) if call[0].startswith(PACKAGE)), len(calls))
    if ours == 0:
        return []
    public = getattr(sys.modules.get("cydist"), "__all__", ())
    called = next((name for _, _, name in calls[ours:] if name in public), None)
    lines = []
    for file, line, name in calls[:ours][-MOST_FRAMES:]:
        lines.append(f'  File "{file}", line {line}, in {name}')
        if source := linecache.getline(file, line).strip():
            lines.append(f"    {source}")
    if ours < len(calls):
        lines.append(f"  cydist.{called or calls[ours][2]}")
    return lines
