"""Find the worker that failed first, and report its error."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
from collections.abc import Iterable, Sequence

from cydist.errors import listed
from cydist.launch.causes import is_secondary_failure
from cydist.launch.output import RECENT_SECONDS, TRACEBACK
from cydist.launch.processes import pretty_exit
from cydist.launch.workers import Worker

TAIL_LINES = 20
TRACEBACK_LINES = 60
_ERROR_FILE_BYTES = 1 << 20


def has_raised(worker: Worker) -> bool:
    """Return whether a worker that has ended had just printed a traceback."""
    printed = worker.tail.traceback_at
    return printed is not None and worker.ended - printed < RECENT_SECONDS


def failed_at(worker: Worker) -> float:
    """Return when `worker` failed: when it printed its traceback or, without one, when it ended.

    A process prints an exception before it ends, sometimes seconds before. Ranks that wait for it
    may notice and end sooner. So the order of ends is not the order of causes.
    """
    printed = worker.tail.traceback_at
    return (
        min(printed, worker.ended) if printed is not None and has_raised(worker) else worker.ended
    )


def first_failure(workers: Iterable[Worker]) -> Worker | None:
    """Return the worker whose failure caused the others: the first of those that do not blame
    another rank."""
    failed = [worker for worker in workers if worker.code and not worker.told]
    return min(failed, key=lambda worker: (blames_another(worker), failed_at(worker)), default=None)


def blames_another(worker: Worker) -> bool:
    """Return whether this failed worker only reports the failure of another rank."""
    return is_secondary_failure("\n".join(traceback_tail(worker.last_output())))


def about_to_fail(worker: Worker, now: float) -> bool:
    """Return whether this running worker has just printed a traceback, and so will probably exit
    soon."""
    printed = worker.tail.traceback_at
    return worker.running and printed is not None and now - printed < RECENT_SECONDS


def account(first: Worker, *, whole: bool = False) -> str:
    """Return which rank failed first, how, and its last words, in whole lines.

    Args:
        whole: With its traceback, also if this launcher's console has shown that already.
    """
    assert first.code is not None
    lines = [
        f"cydistrun: rank {first.rank} (local rank {first.local_rank}, pid {first.pid}, host "
        f"{socket.gethostname()}) failed first: {pretty_exit(first.code)}"
    ]
    if first.code == -signal.SIGKILL:
        lines.append(
            "cydistrun: this launcher did not send that signal; when memory runs out, the kernel "
            "does (see dmesg)"
        )
    said = _error_file(first.error_file)
    if not said and len(first.held) <= TRACEBACK_LINES:
        said = first.held  # with the exceptions that caused the last one
    above = ""
    if not said:
        said = traceback_tail(first.last_output())
        start = exception_at(said)
        if first.shown and start is not None and not whole:
            said, above = said[start:], ", whose traceback is above"
    if said:
        lines.append(f"cydistrun: the last words of rank {first.rank}{above}:")
        lines += [f"    {line}" for line in said]
    lines += [f"cydistrun: output of rank {first.rank}: {log.path}" for log in first.logs.values()]
    return "\n".join(lines) + "\n"


def exception_at(lines: Sequence[str]) -> int | None:
    """Return the index of the line that names the exception of the last traceback; None: there is
    none."""
    starts = [i for i, line in enumerate(lines) if line.startswith(TRACEBACK.decode())]
    after = range(starts[-1] + 1, len(lines)) if starts else ()
    return next((i for i in after if lines[i] and not lines[i][0].isspace()), None)


def last_exception(lines: Sequence[str]) -> str:
    """Return the line that names the exception of a traceback; "" if there is none."""
    index = exception_at(lines)
    return "" if index is None else lines[index]


def is_repeated(worker: Worker, said: str) -> bool:
    """Return whether the traceback of a worker only repeats the first failure: it blames another
    rank, or its exception is of the same kind.

    Args:
        said: The account of the first failure.
    """
    exception = last_exception(worker.held)
    words = [line.strip() for line in said.splitlines()]
    kind = exception.partition(":")[0]
    alike = any(line.partition(":")[0] == kind for line in words)
    return bool(exception) and (alike or is_secondary_failure("\n".join(worker.held)))


def aftermath(first: Worker | None, workers: Sequence[Worker], said: str) -> str:
    """Return what became of the other ranks of this host, in whole lines. The tracebacks that were
    held are shown: of those that repeat the first failure only the exception.

    Args:
        first: The rank that failed first; None: it is on another host.
        said: The account of its failure.
    """
    lines = []
    for worker in workers:
        if worker.errors is None or not worker.held:
            continue
        if worker is first and len(worker.held) <= TRACEBACK_LINES:
            worker.errors.drop()  # it is in `said`
        elif worker is not first and is_repeated(worker, said):
            lines.append(f"cydistrun: rank {worker.rank}: {last_exception(worker.held)}")
            worker.errors.drop()
        else:
            worker.errors.release()
    if early := [worker.rank for worker in workers if worker.code == 0 and _misses(said, worker)]:
        lines.append(
            f"cydistrun: {listed('rank', early)} had ended before it, with exit code 0, and others "
            "still needed it"
        )
    others = [
        f"rank {worker.rank} {pretty_exit(worker.code)}"
        for worker in workers
        if worker.code and worker is not first and not worker.told
    ]
    if others:
        lines.append(f"cydistrun: after it: {', '.join(others[:16])}{_more(len(others) - 16)}")
    # A rank that was about to end by an exception, which is shown, has failed.
    if told := [each.rank for each in workers if each.told and not has_raised(each)]:
        lines.append(f"cydistrun: {listed('rank', told)} did not fail and had to end with it")
    return "".join(f"{line}\n" for line in lines)


def _misses(said: str, worker: Worker) -> bool:
    """Return whether the account of a failure says that this rank was lost."""
    lost = re.search(rf"\brank {worker.rank}\b[^\n]* was lost\b", said)
    return lost is not None and is_secondary_failure(said)


def _more(count: int) -> str:
    return f" and {count} more" if count > 0 else ""


def traceback_tail(output: bytes) -> list[str]:
    """Return the last traceback at the end of a worker's stderr, or else its last lines."""
    lines = output.decode(errors="replace").splitlines()
    starts = [i for i, line in enumerate(lines) if TRACEBACK.decode() in line]
    if starts:
        block = lines[starts[-1] :]
        if len(block) <= TRACEBACK_LINES:
            return block
    return lines[-TAIL_LINES:]


def _error_file(path: str) -> list[str]:
    """Return the contents of a worker's error file, from cydist or from torch's @record."""
    with contextlib.suppress(OSError, ValueError, RecursionError):
        with open(path, "rb") as file:
            content = json.loads(file.read(_ERROR_FILE_BYTES))
        while isinstance(content, dict):
            extra = content.get("extraInfo")
            text = content.get("traceback") or (
                extra.get("py_callstack") if isinstance(extra, dict) else None
            )
            content = text if isinstance(text, str) else content.get("message")
        if isinstance(content, str):
            return content.splitlines()[-TRACEBACK_LINES:]
    return []


def remove_files(directory: str) -> None:
    """Remove the directory of error files, if there is one."""
    if not directory:
        return
    with contextlib.suppress(OSError):
        for name in os.listdir(directory):
            os.unlink(os.path.join(directory, name))
        os.rmdir(directory)
