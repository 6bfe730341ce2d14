"""The files of a running job: what its launcher and its ranks leave for reports.

They are in the launcher's directory, which only its user may enter: job.json from the launcher, and
from each rank `ring-PID`, its last calls (cydist/recorder), `sent-PID-N`, the bytes that its links
send, and `stacks-PID`. Another process of that user reads the rings and the counts while the ranks
run, compute, are stopped, or are dead: rank_records.py.
"""

from __future__ import annotations

import contextlib
import json
import os
from typing import NamedTuple

from cydist.launch.options import LaunchOptions
from cydist.launch.processes import parent_of, started_at

JOB_FILE = "job.json"
QUESTIONS = "questions"  # a fifo, in a job over several hosts


class JobFile(NamedTuple):
    """A launcher's note about its job.

    Attributes:
        directory: Where the job's files are.
        run_id: The job's name.
        launcher: The pid of the process that the user started; 0: it is no cydistrun.
        started: When it began, in the system's clock ticks.
        manager: The pid of the process that manages the ranks; 0: it is no cydistrun.
        manager_started: When that began, in the same ticks.
        world_size: Ranks on all hosts.
        node: This host's number, of `nodes`.
        command: What the ranks run.
        pids: The process that the launcher started for each rank of this host.
    """

    directory: str
    run_id: str
    launcher: int
    started: int
    manager: int
    manager_started: int
    world_size: int
    node: int
    nodes: int
    command: list[str]
    pids: dict[int, int]


def write_job(
    directory: str, options: LaunchOptions, world_size: int, pids: dict[int, int]
) -> None:
    """Write the launcher's note. Without a directory, or if that is full, there is none."""
    if not directory:
        return
    launcher = _outer_process()
    note = {
        "run_id": options.run_id,
        "launcher": launcher,
        "started": started_at(launcher),
        "manager": os.getpid(),
        "manager_started": started_at(os.getpid()),
        "world_size": world_size,
        "node": options.node_rank,
        "nodes": options.nodes,
        "command": list(options.command),
        "pids": pids,
    }
    path = os.path.join(directory, JOB_FILE)
    with contextlib.suppress(OSError):
        with open(f"{path}.new", "w") as file:
            json.dump(note, file)
        os.replace(f"{path}.new", path)


def open_questions(directory: str) -> int | None:
    """Return a descriptor from which the questions of `cydist ps` come; None: there is no place for
    them."""
    if not directory:
        return None
    path = os.path.join(directory, QUESTIONS)
    try:
        os.mkfifo(path, 0o600)
        # Open for writing, too: else it would be at its end after each writer.
        return os.open(path, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None


def _outer_process() -> int:
    """Return the pid of the process that the user started, two above this one (supervisor.py)."""
    process = parent_of(os.getppid())
    return os.getpid() if process is None else process


def remove_rings(directory: str) -> None:
    """Remove what the ranks of an earlier generation left."""
    with contextlib.suppress(OSError):
        for name in os.listdir(directory or "."):
            if directory and name.startswith(("ring-", "stacks-", "sent-")):
                os.unlink(os.path.join(directory, name))
