"""Forked children cannot use their parent's groups, and do them no harm."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from transport_ranks import descriptors
from two_process_job import TwoProcessJob

import cydist as dist
from cydist import _native

SUPPORT = Path(__file__).parents[1] / "support"

# Rank 0 is the main thread, rank 1 another. What is under way when rank 0 forks is finished
# by the parent afterwards.
CHILD = """
import os, sys, threading
import numpy as np
import cydist as dist
from cydist.api import process_groups as world
from valid_calls import CALLS, OBJECT_CALLS

backend, = sys.argv[1:]
store = dist.HashStore()
forked = threading.Event()
results = []

def rank_1():
    world.thread_is_rank()
    dist.init_process_group(backend, rank=1, world_size=2, store=store)
    group = dist.new_group([0, 1])
    assert forked.wait(50)
    x = np.full(3, 2.0)
    dist.all_reduce(x, group=group)
    dist.send(x, 0, group)
    dist.barrier()
    dist.destroy_process_group()
    results.append(x[0])

other = threading.Thread(target=rank_1, daemon=True)
other.start()
dist.init_process_group(backend, rank=0, world_size=2, store=store)
group = dist.new_group([0, 1])
x, into = np.ones(3), np.zeros(3)
collective = dist.all_reduce(x, group=group, async_op=True)
receive = dist.irecv(into, 1, group)
pid = os.fork()
if pid == 0:
    refused = {
        **{name: lambda n=name, a=arguments: getattr(dist, n)(**a())
           for name, arguments in {**CALLS, **OBJECT_CALLS}.items()},
        "barrier": dist.barrier,
        "monitored_barrier": dist.monitored_barrier,
        "batch_isend_irecv": lambda: dist.batch_isend_irecv([dist.P2POp(dist.irecv, into, 1)]),
        "async": lambda: dist.all_reduce(x, async_op=True),
        "subgroup": lambda: dist.all_reduce(x, group=group),
        "new_group": lambda: dist.new_group([0, 1]),
        "abort": dist.abort,
        "wait": collective.wait,
        "is_completed": collective.is_completed,
        "wait for a message": receive.wait,
        "is a message completed": receive.is_completed,
    }
    for name, call in refused.items():
        try:
            call()
        except dist.ForkedError as error:
            assert "forked" in str(error), error
        else:
            print(name, "is not refused")
            os._exit(3)
    dist.destroy_process_group()
    dist.init_process_group("inproc", rank=0, world_size=1, store=dist.HashStore())
    y = np.full(2, 5.0)
    dist.all_reduce(y, async_op=True).wait(30)
    dist.destroy_process_group()
    sys.exit(0 if y[0] == 5.0 else 4)
_, status = os.waitpid(pid, 0)
forked.set()
collective.wait(30)
receive.wait(30)
dist.barrier()
dist.destroy_process_group()
other.join(30)
assert [3.0] * 3 == [x[0], into[0], results[0]]
sys.exit(os.waitstatus_to_exitcode(status))
"""


@pytest.mark.parametrize("backend", ["tcp", "shm", "inproc"])
def test_a_forked_child_gets_forked_error_and_the_parent_goes_on(backend: str) -> None:
    """Every call raises, and so does every Work; the child may join a job of its own, and ends
    like any process; what the parent had under way completes."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", CHILD, backend.replace("shm", "tcp")],
        cwd=SUPPORT, capture_output=True, text=True, timeout=55, check=False,
    )  # fmt: skip
    assert (0, "", "") == (done.returncode, done.stdout, done.stderr)


FORKS = {
    "os": "pid = os.fork()",
    "multiprocessing": """
import multiprocessing
pid, fd = 1, os.dup(0)
multiprocessing.get_context("fork").Process(target=os.read, args=(fd, 1)).start()
""",
    # Its child stays in C, behind cydist's own handler: Python would wait there for ever for a
    # thread that the parent has, if that one had asked for the interpreter's lock.
    "C": """
import ctypes
libc = ctypes.CDLL(None)
for step in (libc.getchar, libc._exit):
    assert libc.__register_atfork(None, None, step, None) == 0
pid = ctypes.PyDLL(None).fork()
""",
}
DEATH = """
if pid == 0:
    os.read(0, 1)
    os._exit(0)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    ("how", "transport"),
    [("os", "tcp"), ("os", "shm"), ("multiprocessing", "tcp"), ("C", "tcp"), ("C", "shm")],
)
def test_a_dead_rank_is_noticed_although_its_child_lives(
    tmp_path: Path, how: str, transport: str
) -> None:
    """The child holds none of the connections open, a rank that forked it."""
    with TwoProcessJob(tmp_path, "dist.barrier()\n" + FORKS[how] + DEATH) as other:

        def body() -> None:
            dist.barrier()
            with pytest.raises(dist.PeerFailedError, match="rank 1"):
                dist.recv(np.zeros(1), 1)

        other.rank_0(body)


def test_a_dead_rank_that_was_never_connected_is_noticed_although_its_child_lives(
    tmp_path: Path,
) -> None:
    """The child does not listen in its place either."""
    with TwoProcessJob(tmp_path, FORKS["os"] + DEATH) as other:

        def body() -> None:
            other.process.wait(30)
            with pytest.raises(dist.PeerFailedError, match="rank 1"):
                dist.recv(np.zeros(1), 1)

        other.rank_0(body)


def test_a_child_with_no_descriptor_left_does_not_listen() -> None:
    """What it cannot replace it closes."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        fd = listener.fileno()
        _native.replace_in_child(fd)
        try:
            with descriptors(0):
                pid = os.fork()
                if pid == 0:
                    with contextlib.suppress(OSError):
                        os._exit(stat.S_ISSOCK(os.fstat(fd).st_mode))
                    os._exit(0)
            _, status = os.waitpid(pid, 0)
        finally:
            _native.keep_in_child(fd)
    assert os.waitstatus_to_exitcode(status) == 0


LEAVES = """
dist.barrier()
pid = os.fork()
if pid == 0:
    sys.exit(0)
os.waitpid(pid, 0)
dist.barrier()
dist.barrier()
dist.destroy_process_group()
"""


def test_a_child_that_ends_says_no_goodbye_in_its_parents_name(tmp_path: Path) -> None:
    """Interpreter and all end in the child; the other rank goes on with the parent."""
    with TwoProcessJob(tmp_path, LEAVES) as other:

        def body() -> None:
            for _ in range(3):
                dist.barrier()

        other.rank_0(body)
        assert (0, "") == other.ended()


LOADS = """
import torch
from torch.utils.data import DataLoader
loader = DataLoader(torch.arange(8.0), 2, num_workers=2, multiprocessing_context="fork")
for _ in range(2):
    for batch in loader:
        dist.all_reduce(batch)
dist.destroy_process_group()
"""


def test_a_data_loader_with_workers_beside_collectives(tmp_path: Path) -> None:
    """torch's workers are forked while the job goes on."""
    pytest.importorskip("torch")
    with TwoProcessJob(tmp_path, LOADS) as other:

        def body() -> list[float]:
            sums = []
            for _ in range(8):
                batch = np.zeros(2, "f4")
                dist.all_reduce(batch)
                sums.append(float(batch[0]))
            return sums

        assert [0.0, 2.0, 4.0, 6.0] * 2 == other.rank_0(body)
        assert (0, "") == other.ended()
