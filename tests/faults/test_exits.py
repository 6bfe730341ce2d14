"""A process that ends while calls are under way: at once, with its own exit code, and noticed."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from two_process_job import TwoProcessJob

import cydist as dist

# What rank 1 has under way when it ends; rank 0 takes part in none of it.
PENDING = {
    "nothing": "",
    "a collective": "work = dist.all_reduce(np.ones(4), async_op=True)",
    "a receive": "work = dist.irecv(np.zeros(4), 0)",
    "a long send": "work = dist.isend(np.ones(1_000_000), 0)",
    "a thread": """
calls = threading.Event()
def call():
    calls.set()
    dist.barrier()
threading.Thread(target=call, daemon=True).start()
calls.wait()
""",
}
# How a program can end: its last line, the exit code, the end of what Python says.
ENDS = {
    "return": ("", 0, ""),
    "sys.exit": ("sys.exit(3)", 3, ""),
    "exception": ("raise OSError('mine')", 1, "OSError: mine\n"),
    "os._exit": ("os._exit(4)", 4, ""),
    "SIGTERM": ("os.kill(os.getpid(), signal.SIGTERM)", -15, ""),
}
# Every ending with nothing and everything under way, and each thing with one ending.
PAIRS = [
    *((end, pending) for end in ENDS for pending in ("nothing", "a thread")),
    *((end, pending) for end in ("return", "sys.exit") for pending in list(PENDING)[1:4]),
]


@pytest.mark.parametrize(("end", "pending"), PAIRS)
def test_the_exit_code_is_kept_and_the_others_learn_of_it(
    tmp_path: Path, end: str, pending: str
) -> None:
    """Nothing holds the process back; who waits for it gets PeerFailedError."""
    line, code, words = ENDS[end]
    with TwoProcessJob(tmp_path, f"dist.barrier()\n{PENDING[pending]}\n{line}\n") as other:

        def body() -> None:
            dist.barrier()
            with pytest.raises(dist.PeerFailedError, match="rank 1"):
                dist.recv(np.zeros(1), 1, tag=9)

        other.rank_0(body)
        ended, said = other.ended()
        assert code == ended
        assert said.endswith(words)
        assert bool(words) == bool(said)


def test_who_is_in_a_collective_learns_of_it(tmp_path: Path) -> None:
    """Whether it began before or after the process ended."""
    with TwoProcessJob(tmp_path, "dist.barrier()\nsys.exit(3)\n") as other:

        def body() -> None:
            groups = [dist.new_group([0, 1], use_local_synchronization=True) for _ in range(2)]
            dist.barrier()
            for group in groups:
                with pytest.raises(dist.PeerFailedError, match="rank 1"):
                    dist.all_reduce(np.ones(3), group=group)

        other.rank_0(body)
        assert (3, "") == other.ended()


ALONE = """
import os, signal, sys, threading
import numpy as np
import cydist as dist
from cydist.api import process_groups as world

store = dist.HashStore()

def rank_1():
    world.thread_is_rank()
    dist.init_process_group({backend!r}, rank=1, world_size=2, store=store)
    dist.irecv(np.zeros(1), 0)
    dist.barrier()
    dist.recv(np.zeros(1), 0)

threading.Thread(target=rank_1, daemon=True).start()
dist.init_process_group({backend!r}, rank=0, world_size=2, store=store)
dist.barrier()
works = [dist.irecv(np.zeros(4), 1), dist.isend(np.ones(1_000_000), 1, tag=3)]
works.append(dist.all_reduce(np.ones(4), async_op=True))
works.append(works[-1].get_future())
"""


@pytest.mark.parametrize(
    ("end", "backend"), [*((end, "inproc") for end in ENDS), ("return", "tcp"), ("return", "shm")]
)
def test_ranks_that_are_threads_end_with_their_process(end: str, backend: str) -> None:
    """Everything is under way on both of them, and nothing holds the process back."""
    line, code, words = ENDS[end]
    program = ALONE.format(backend=backend.replace("shm", "tcp")) + line
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=55, check=False
    )
    assert code == done.returncode
    assert done.stderr.endswith(words)
    assert bool(words) == bool(done.stderr)


LAST = """
dist.barrier()
{calls}
"""
NO_THREADS = """
import atexit
def refuse(thread):
    raise RuntimeError("can't create new thread at interpreter shutdown")
atexit.register(setattr, threading.Thread, "start", refuse)
"""
LAST_CALLS = {
    "root": (
        "dist.broadcast(np.zeros(3), 1)\ndist.send(np.zeros(1), 0)",
        "broadcast #2, root 1. Rank 0: broadcast #2, root 0",
    ),
    "a call more": (
        "dist.broadcast(np.zeros(3), 0)\ndist.broadcast(np.zeros(3), 1)",
        "broadcast #3 of 3 float64, root 1. Rank 0: broadcast #2 of 3 float64, root 0",
    ),
    "the same": ("dist.broadcast(np.zeros(3), 0)", ""),
}


@pytest.mark.parametrize("transport", ["tcp", "auto"])
@pytest.mark.parametrize("way", LAST_CALLS)
@pytest.mark.parametrize("end", ["return", "atexit", "no threads"])
def test_a_process_says_that_its_last_call_was_another_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, transport: str, way: str, end: str
) -> None:
    """It ends without destroying its groups, or destroys them in a function of atexit; also where
    CPython starts no thread any more, as 3.12."""
    monkeypatch.setenv("CYDIST_TRANSPORT", transport)
    calls, words = LAST_CALLS[way]
    if end == "atexit":
        calls = f"import atexit\natexit.register(dist.destroy_process_group)\n{calls}"
    if end == "no threads":
        calls = f"{calls}\n{NO_THREADS}"
    with TwoProcessJob(tmp_path, LAST.format(calls=calls)) as other:

        def body() -> None:
            dist.barrier()
            if way == "root":  # its call is over before this one's message comes
                dist.recv(np.zeros(1), 1)
            with suppress(dist.MismatchError):
                dist.broadcast(np.zeros(3), 0)
            with suppress(dist.MismatchError):
                dist.destroy_process_group()

        other.rank_0(body, leaves=True)
        ended, said = other.ended()
        assert ended == 0
        assert words in said
        assert bool(words) == bool(said)


def test_a_forked_child_leaves_the_comparison_to_its_parent(tmp_path: Path) -> None:
    """It ends by Python's end, having inherited a group whose last call nobody has heard."""
    program = """
dist.barrier()
dist.broadcast(np.zeros(3), 1)
child = os.fork()
if child == 0:
    sys.exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
    with TwoProcessJob(tmp_path, program) as other:

        def body() -> None:
            dist.barrier()
            dist.broadcast(np.zeros(3), 1)

        other.rank_0(body)
        assert (0, "") == other.ended()
