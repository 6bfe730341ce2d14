"""A job of two real processes, of which this one is rank 0 and the other runs a test's program."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cydist as dist
from cydist.api import process_groups

ROOT = Path(__file__).parents[2]
DEADLINE = 50.0  # seconds for what takes one

JOIN = """
import os, signal, sys, threading
import numpy as np
import cydist as dist
dist.init_process_group(
    "tcp", init_method=sys.argv[1], rank=1, world_size=2, timeout=60, group_name="beside"
)
"""


class TwoProcessJob:
    """Rank 1, a process that joins the job and then runs `program` (with JOIN's imports).

    Use as a context manager: in the end the process is gone, and its pipes are closed.
    """

    def __init__(self, directory: Path, program: str, *arguments: str) -> None:
        self.init_method = f"file://{directory}/meeting"
        self.process = subprocess.Popen(
            [sys.executable, "-W", "ignore", "-c", JOIN + program, self.init_method, *arguments],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def __enter__(self) -> TwoProcessJob:
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.communicate()

    def rank_0(self, body: Callable[[], Any], *, leaves: bool = False) -> Any:
        """Join, run `body`, leave, unless it `leaves` itself: on a thread that is a rank of its
        own. What `body` returns."""
        outcome: list[Any] = []
        errors: list[BaseException] = []

        def run() -> None:
            process_groups.thread_is_rank()
            try:
                dist.init_process_group(
                    "tcp", init_method=self.init_method, rank=0, world_size=2, timeout=60,
                    group_name="beside",
                )  # fmt: skip
                outcome.append(body())
                if not leaves:
                    dist.destroy_process_group()
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=run, daemon=True)
        thread.start()
        thread.join(DEADLINE)
        assert not thread.is_alive(), "rank 0 hangs"
        if errors:
            raise errors[0]
        return outcome[0]

    def ended(self) -> tuple[int, str]:
        """How the process ended by itself: its exit code, and what it said of errors."""
        _, said = self.process.communicate(timeout=DEADLINE)
        return self.process.returncode, said
