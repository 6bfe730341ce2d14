"""Read what a job's launcher and ranks leave for reports (run_files.py)."""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from cydist import _native
from cydist.launch.processes import started_at
from cydist.launch.run_files import JOB_FILE, JobFile
from cydist.recorder import sent_counts, snapshot

PREFIX = "cydistrun-"


class RankRecord(NamedTuple):
    """One process of a rank.

    Attributes:
        rank: Its global rank.
        pid: Of the process that made the rank's groups; until then, of the one that was started.
        dump: Its last calls, as the recorder writes them; None: it has made no group.
        stack_signal: The signal that lets it write its stacks; 0: none.
    """

    rank: int
    pid: int
    dump: dict[str, Any] | None
    stack_signal: int


def read_job(directory: str) -> JobFile:
    """Return the note of the job in a directory; of ranks that another launcher has started, what
    their own files say. Raises OSError, and ValueError if it is none, or another user's."""
    path = os.path.join(directory, JOB_FILE)
    if os.stat(directory).st_uid != os.getuid():
        raise ValueError(f"{directory} is another user's")
    if not os.path.exists(path):
        return _job_without_note(directory)
    with open(path) as file:
        note = json.load(file)
    try:
        return JobFile(
            directory,
            str(note["run_id"]),
            int(note["launcher"]),
            int(note["started"]),
            int(note["manager"]),
            int(note["manager_started"]),
            int(note["world_size"]),
            int(note["node"]),
            int(note["nodes"]),
            [str(word) for word in note["command"]],
            {int(rank): int(pid) for rank, pid in note["pids"].items()},
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is no note of a launcher: {error}") from None


def _job_without_note(directory: str) -> JobFile:
    sizes = [
        snapshot.of_ring(head, text, [])["world_size"] for _, (head, text, _) in _rings(directory)
    ]
    if not sizes:
        raise ValueError(f"{directory} has no files of a running job")
    name = os.path.basename(os.path.abspath(directory))
    return JobFile(directory, name, 0, 0, 0, 0, max(sizes), 0, 1, [], {})


def jobs() -> list[JobFile]:
    """Return the user's jobs on this host, by the launcher's pid."""
    found = []
    place = tempfile.gettempdir()
    for name in os.listdir(place):
        if name.startswith(PREFIX):
            with contextlib.suppress(OSError, ValueError):
                job = read_job(os.path.join(place, name))
                # Another process may have its pid by now, or it ran in a container. The outer
                # process of one that was killed counts as the host's first, which lives on.
                if (
                    started_at(job.launcher) == job.started
                    and started_at(job.manager) == job.manager_started
                ):
                    found.append(job)
    return sorted(found, key=lambda job: job.launcher)


def find_job(name: str) -> JobFile:
    """Return the user's job of this name: the beginning of its run id, its launcher's pid, its
    directory, or "" for the only one.

    Raises ValueError if there is none, or several.
    """
    if name and os.path.isdir(name):
        return read_job(name)
    every = jobs()
    found = [
        job for job in every if not name or job.run_id.startswith(name) or name == str(job.launcher)
    ]
    if len(found) == 1:
        return found[0]
    listed = "".join(f"\n  {describe_job(job)}" for job in found or every)
    place = tempfile.gettempdir()
    if not every:
        raise ValueError(
            f"no job of yours runs on this host: none has files in {place} (with another TMPDIR, "
            "give the job's directory there)"
        )
    what = "several jobs fit, name one" if found else f"no job fits {name!r}, there are"
    raise ValueError(f"{what}:{listed}")


def describe_job(job: JobFile) -> str:
    """Return a job in one line."""
    hosts = f", host {job.node} of {job.nodes}" if job.nodes > 1 else ""
    ranks = f"{job.world_size} ranks{hosts}"
    if not job.launcher:
        return f"{job.run_id}: {ranks}"
    return f"{job.run_id} (cydistrun, pid {job.launcher}): {ranks}: {' '.join(job.command)}"


def pids(job: JobFile) -> set[int]:
    """Return the processes of the ranks of this host, as far as they are known."""
    rings = {int(name[5:]) for name in os.listdir(job.directory) if name.startswith("ring-")}
    return rings | set(job.pids.values())


def read_ranks(job: JobFile) -> list[RankRecord]:
    """Return what is known of each rank of this host."""
    found: dict[int, RankRecord] = {}
    for pid, (head, text, calls) in _rings(job.directory):
        dump = snapshot.of_ring(head, text, calls, sent_counts.of_process(job.directory, pid))
        rank = dump["rank"]
        # A rank's program may have started another one that makes groups, too.
        if rank not in found or pid == job.pids.get(rank):
            found[rank] = RankRecord(rank, pid, dump, head["stack_signal"])
    for rank, pid in job.pids.items():
        found.setdefault(rank, RankRecord(rank, pid, None, 0))
    return [found[rank] for rank in sorted(found)]


def running_calls(directory: str) -> list[tuple[int, int, float]]:
    """Return the calls that the ranks of this host are in: pid, number, and age in seconds."""
    found = []
    for pid, (head, _, calls) in _rings(directory):
        running = [each for each in calls if each[snapshot.STATE] == _native.RUNNING]
        if running and os.path.exists(f"/proc/{pid}"):
            to_ns = snapshot.clock(head)
            now = time.monotonic_ns()
            found += [
                (pid, each[snapshot.NUMBER], (now - to_ns(each[snapshot.BEGAN])) / 1e9)
                for each in running
            ]
    return found


_Ring = tuple[dict[str, int], str, list[tuple[int, ...]]]


def _rings(directory: str) -> Iterator[tuple[int, _Ring]]:
    """Yield the pid, and what its ring holds, of each process that has begun one."""
    for name in sorted(os.listdir(directory)):
        if not name.startswith("ring-"):
            continue
        with contextlib.suppress(OSError, ValueError):
            with open(os.path.join(directory, name), "rb") as file:
                memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            with memory:
                found = _native.read_ring(memory)
            yield int(name[5:]), found


def write_dumps(ranks: Sequence[RankRecord], directory: str) -> None:
    """Write the last calls of ranks that have ended, also of those that were killed. Raises
    OSError."""
    os.makedirs(directory, exist_ok=True)
    for each in ranks:
        if each.dump is not None:
            snapshot.write(each.dump, snapshot.path_in(directory, each.dump), "json")
