"""The flight recorder: the last calls of each rank, always kept, written when they are needed.

`dump()` returns this process's last 2,048 calls and messages, or writes them as JSON or in the
format that torch's analyser reads. `python -m cydist.recorder` converts and checks such files.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from mmap import mmap
from typing import TYPE_CHECKING, Any

from cydist import _native, config
from cydist.recorder import sent_counts

if TYPE_CHECKING:
    from cydist._native import TcpLink

__all__ = ["dump"]

# Writes Python's stacks into a file of cydistrun's, for reports. Nobody else uses this signal.
_BELOW_THE_LAST_SIGNAL = 2

_lock = threading.Lock()
_begun_by = 0  # the process that began its ring
_groups = 0  # explained in it
_MOST_KEPT = 100  # groups that stay explained when the text is full: the newest, and the first
_lines: list[str] = []  # which explain them
_links = 0  # that were counted
_counts: list[mmap] = []  # of those that are open
_of_parent: list[mmap] = []  # of a forked child: its parent's, into which its copies of links write
_closed: Counter[int] = Counter()  # bytes by global rank, through links that are closed


def dump(path: str | os.PathLike[str] | None = None, *, format: str = "json") -> dict[str, Any]:
    """Return this process's last calls and messages; write them to a file too, if one is named.

    Calls of all groups are in one list, oldest first. The times of a call that did not wait are
    only its begin: on the fast path a call reads the clock once.

    Args:
        path: The file, which is replaced as a whole; None: write nothing.
        format: What the file holds: "json", as docs/recorder.schema.json describes it, or "torch",
            which torch's flight recorder analyser reads.

    Returns:
        What a JSON file holds, as a dictionary. Times are nanoseconds of CLOCK_MONOTONIC.

    Raises:
        ValueError: The format is neither.
        OSError: The file cannot be written.

    Examples:
        >>> _ = dist.all_reduce(np.ones(4))
        >>> [call["call"] for call in dist.recorder.dump()["calls"]][-1]
        'all_reduce'
    """
    from cydist.recorder import snapshot  # needs json, which many programs never load

    if format not in ("json", "torch"):
        raise ValueError(f'recorder.dump: format must be "json" or "torch", not {format!r}')
    found = snapshot.of_memory(_native.own_ring(), sent_bytes())
    if path is not None:
        snapshot.write(found, os.fspath(path), format)
    return found


def add_group(name: str, backend: str, rank: int, ranks: Sequence[int]) -> int:
    """Return the number of a new group in this process's records.

    Args:
        name: The group's name.
        backend: The backend's name.
        rank: This rank's number in the group.
        ranks: Global rank of each member.
    """
    global _groups
    with _lock:
        if _begun_by != os.getpid():
            _begin()
        _groups += 1
        words = " ".join(f"{name}".split())
        line = f"group {_groups} {rank} {len(ranks)} {backend or '-'} {spans_of(ranks)} {words}"
        _lines.append(line)
        del _lines[1:-_MOST_KEPT]
        if not _native.add_text(line):
            while not _native.replace_text(_lines) and len(_lines) > 1:
                del _lines[1]  # names or ranks are long
        return min(_groups, (1 << 16) - 1)


def add_link(link: TcpLink, ranks: Sequence[int]) -> Callable[[], None]:
    """Count what a link sends: in a file that cydistrun reads, if that has started this process.

    Args:
        ranks: Global rank of each peer.

    Returns:
        A function to call when the link is closed.
    """
    global _links
    with _lock:
        if _begun_by != os.getpid():
            _begin()
        _links += 1
        path = _counts_file(_links)
        memory = sent_counts.make(path, ranks)
        _counts.append(memory)
        link.count_sent_in(sent_counts.counters_in(memory))

    def end() -> None:
        with _lock:
            if memory not in _counts:  # of the parent of this process
                return
            link.count_sent_in(sent_counts.spare(len(ranks)))
            _counts.remove(memory)
            _closed.update(sent_counts.total([memory]))
            if path:
                with contextlib.suppress(OSError):  # the launcher has ended
                    sent_counts.write(_counts_file(0), _closed)
                    os.unlink(path)

    return end


def _counts_file(number: int) -> str:
    """Return the name of a link's counts; 0: of those of closed links. "": none are to be kept."""
    directory = config.RUN_FILES.get()
    return os.path.join(directory, f"sent-{os.getpid()}-{number}") if directory else ""


def sent_bytes() -> dict[int, int]:
    """Return how many bytes this process has sent to each global rank, if any."""
    if _begun_by != os.getpid():
        return {}
    with _lock:
        return dict(sorted((_closed + Counter(sent_counts.total(_counts))).items()))


def last_calls(number: int, most: int = 4) -> list[str]:
    """Return the last calls of a group, each in words, oldest first.

    Args:
        number: Of the group, as `add_group` returned it.
        most: How many calls.
    """
    from cydist.recorder import snapshot

    head, text, calls = _native.read_ring(_native.own_ring())
    # First, since a rank that asks does not wait for long.
    ours = [call for call in calls if call[snapshot.GROUP] == number][-most:]
    found = snapshot.of_ring(head, text, ours)["calls"]
    return [snapshot.describe_call(call) for call in found]


def on_failure() -> None:
    """Write this process's calls because a group has failed, if CYDIST_RECORDER asks for files."""
    if directory := config.RECORDER.get():
        _write(directory)


def spans_of(ranks: Sequence[int]) -> str:
    """Return ranks as "0-3,7"."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    return ",".join(f"{a}-{b}" if a != b else str(a) for a, b in spans)


def _begin() -> None:
    """Begin this process's records: in a file that cydistrun reads, if that has started it."""
    global _begun_by, _groups
    _begun_by, _groups = os.getpid(), 0
    _lines.clear()
    _of_parent.extend(_counts)
    _counts.clear()
    _closed.clear()
    _native.replace_text([])  # a forked child has the parent's names of calls
    if directory := config.RUN_FILES.get():
        try:
            os.makedirs(directory, 0o700, exist_ok=True)
            _native.open_ring(os.path.join(directory, f"ring-{os.getpid()}"))
            _let_signal_write_stacks(os.path.join(directory, f"stacks-{os.getpid()}"))
        except OSError:
            pass  # the launcher has ended, or its files are another container's
    if config.RECORDER.get():
        _write_on_signal()
        atexit.register(on_failure)


def _let_signal_write_stacks(path: str) -> None:
    """Let a signal write Python's stacks, also while a thread holds Python's lock for long."""
    import faulthandler
    import signal

    number = signal.SIGRTMAX - _BELOW_THE_LAST_SIGNAL
    if signal.getsignal(number) != signal.SIG_DFL:
        return
    fd = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC, 0o600)
    faulthandler.register(number, file=fd, all_threads=True)
    _native.set_stack_signal(number)


def _write_on_signal() -> None:
    """Write the calls on SIGUSR2, unless the program has a handler of its own."""
    import signal

    if (
        threading.current_thread() is threading.main_thread()
        and signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL
    ):
        signal.signal(signal.SIGUSR2, lambda number, frame: on_failure())


def _write(directory: str) -> None:
    """Write the calls to a file for this rank. A failure is told, and changes nothing else."""
    from cydist.recorder import snapshot

    try:
        found = snapshot.of_memory(_native.own_ring(), sent_bytes())
        os.makedirs(directory, exist_ok=True)
        snapshot.write(found, snapshot.path_in(directory, found), "json")
    except (OSError, MemoryError) as error:
        print(f"cydist: CYDIST_RECORDER: {error}", file=sys.stderr, flush=True)
