"""What a job does for days, and what its processes hold meanwhile: memory, descriptors, threads.

    long_run.py calls TRANSPORT CALLS        short calls of two ranks, each with a checked result
    long_run.py groups TRANSPORT SECONDS     groups and jobs, made and destroyed by three ranks
    long_run.py shrinks TRANSPORT SECONDS    a third rank is killed in each job, two go on
    long_run.py restarts TRANSPORT SECONDS   a rank fails again and again, cydistrun restarts all

Prints ten lines of figures. Exits with 1 if a process holds more in the last third than in the
first: a descriptor or a thread, or 4 MiB of memory.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

import cydist as dist

PARTS, SAMPLES, LEAST_LOOKS = 10, 100, 30
ALLOWED_KB = 4096
BLOCK = 32  # calls, after which a doubled number is 2**32
TIMEOUT = 120
RANKS = {"calls": 2, "groups": 3, "shrinks": 2}


def held(pid: int | str = "self") -> tuple[int, int, int]:
    """Return what a process holds: resident KiB, descriptors, threads."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    rss = next(int(line.split()[1]) for line in status if line.startswith("VmRSS"))
    return rss, len(os.listdir(f"/proc/{pid}/fd")), len(os.listdir(f"/proc/{pid}/task"))


class Watch:
    """Note what a process holds a hundred times during the work, and print it ten times.

    Args:
        whole: The work: calls or seconds.
        what: What the process is, for the lines; "": print none.
    """

    def __init__(self, whole: float, what: str, pid: int | str = "self") -> None:
        self._whole, self._what, self._pid = whole, what, pid
        self._began = time.monotonic()
        self._held: list[tuple[int, int, int]] = []
        self._looks = 0

    def look(self, done: float, count: int) -> None:
        """Note what is held if another hundredth is done. `count`: what was done so far."""
        if done < len(self._held) * self._whole / SAMPLES:
            return
        now = held(self._pid)
        self._looks += 1
        part = len(self._held)
        self._held += [now] * (int(done * SAMPLES / self._whole) + 1 - part)
        if self._what and part * PARTS // SAMPLES < len(self._held) * PARTS // SAMPLES:
            seconds = time.monotonic() - self._began
            print(
                f"{self._what}: {count} in {seconds:.0f} s; holds {now[0]} KiB, {now[1]} "
                f"descriptors, {now[2]} threads",
                flush=True,
            )

    def check(self) -> None:
        """End the process unless the least of the last third is within the most of the first.

        Threads that are idle end some time later, and keep a descriptor meanwhile.
        """
        if self._looks < LEAST_LOOKS:
            print(f"{self._what or 'a rank'}: too short to compare what was held", flush=True)
            return
        third = len(self._held) // 3
        before = [max(column) for column in zip(*self._held[:third], strict=True)]
        after = [min(column) for column in zip(*self._held[-third:], strict=True)]
        if after[0] > before[0] + ALLOWED_KB or after[1] > before[1] or after[2] > before[2]:
            raise SystemExit(f"{self._what or 'a rank'} holds {after}, and held {before}")


def run_ranks(what: str, transport: str, work: float) -> None:
    """Run ranks of this program. They have one secret, also for a rank that joins later."""
    os.environ["CYDIST_SECRET"] = secrets.token_hex(32)
    os.environ["CYDIST_TRANSPORT"] = transport
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(sock.getsockname()[1])}
    size = RANKS[what]
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, "rank", what, transport, str(work)],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": str(size)},
        )
        for rank in range(size)
    ]
    if codes := [code for rank in ranks if (code := rank.wait()) != 0]:
        raise SystemExit(f"{what} {transport}: ranks ended with {codes}")


def calls(rank: int, transport: str, work: float) -> None:
    """Make short calls of each kind; all results are exact."""
    dist.init_process_group("tcp", timeout=TIMEOUT)
    watch = Watch(work, f"calls {transport}" if rank == 0 else "")
    x, token, both = np.ones(1, np.int64), np.zeros(2, np.int64), np.zeros(2, np.int64)
    done = 0
    while done < work:
        for _ in range(1000):
            x[0] = 1
            for _ in range(BLOCK):
                dist.all_reduce(x)
            assert x[0] == 1 << BLOCK
            token[:] = done if rank == done % 2 else -1
            dist.broadcast(token, done % 2)
            assert token[1] == done
            dist.all_gather_into_tensor(both, token[:1] + rank)
            assert both[1] == both[0] + 1 == done + 1
            if rank == 0:
                dist.send(x, 1)
            else:
                dist.recv(x, 0)
            dist.barrier()
            done += BLOCK + 4
        watch.look(done, done)
    watch.check()
    dist.destroy_process_group()


def groups(rank: int, transport: str, work: float) -> None:
    """Make and destroy groups; every 100th time the whole job."""
    watch = Watch(work, f"groups {transport}" if rank == 0 else "")
    began, count = time.monotonic(), 0
    over = np.zeros(1, np.int64)
    while not over[0]:
        dist.init_process_group("tcp", timeout=TIMEOUT)
        for _ in range(100):
            count += 1
            members = [[0, 1, 2], [0, 2], [1, 2], [0, 1]][count % 4]
            made = dist.new_group(members)
            if rank in members:
                x = np.full(count % 3 * 5000 + 1, count)
                dist.all_reduce(x, group=made)
                assert (x == count * len(members)).all()
                dist.destroy_process_group(made)
        over[0] = rank == 0 and time.monotonic() - began >= work
        dist.broadcast(over, 0)
        dist.destroy_process_group()
        watch.look(time.monotonic() - began, count)
    watch.check()


def victim(url: str) -> None:
    """Be rank 2 of 3, and die in a call."""
    dist.init_process_group("tcp", init_method=url, rank=2, world_size=3, timeout=TIMEOUT)
    for _ in range(5):
        dist.all_reduce(np.ones(1000))
    os.kill(os.getpid(), signal.SIGKILL)


def shrinks(rank: int, transport: str, work: float) -> None:
    """Meet a third rank, lose it, and go on without it."""
    watch = Watch(work, f"shrinks {transport}" if rank == 0 else "")
    folder = os.environ["LONG_RUN_FILES"]
    began, count = time.monotonic(), 0
    over = np.zeros(1, np.int64)
    while not over[0]:
        count += 1
        url = f"file://{folder}/{count}"
        child = None
        if rank == 0:
            child = subprocess.Popen([sys.executable, __file__, "victim", url])
        dist.init_process_group("tcp", init_method=url, rank=rank, world_size=3, timeout=TIMEOUT)
        try:
            while True:
                dist.all_reduce(np.ones(1000))
        except dist.PeerFailedError:
            dist.shrink_group()
        for _ in range(5):
            x = np.ones(1000)
            dist.all_reduce(x)
            assert (x == 2).all()
        over[0] = rank == 0 and time.monotonic() - began >= work
        dist.broadcast(over, 0)
        dist.destroy_process_group()
        if child is not None:
            child.wait()
            Path(folder, str(count)).unlink(missing_ok=True)
        watch.look(time.monotonic() - began, count)
    watch.check()


def failing(until: float) -> None:
    """Be a rank of a job that fails until it is late."""
    dist.init_process_group("tcp", timeout=TIMEOUT)
    x = np.ones(1000)
    dist.all_reduce(x)
    assert (x == dist.get_world_size()).all()
    if time.monotonic() < until and dist.get_rank() == 1:
        os._exit(3)
    dist.barrier()
    if time.monotonic() < until:
        dist.barrier()  # which rank 1 does not make
    dist.destroy_process_group()


def restarts(transport: str, work: float) -> None:
    """Watch a launcher that restarts its ranks."""
    with tempfile.TemporaryFile() as output:
        launcher = subprocess.Popen(
            [sys.executable, "-m", "cydist.run", "--nproc-per-node", "2", "--max-restarts",
             "1000000000", __file__, "failing", str(time.monotonic() + work)],
            env={**os.environ, "CYDIST_TRANSPORT": transport}, stdout=output, stderr=output,
        )  # fmt: skip
        watch = Watch(work, f"restarts {transport}: launcher", launcher.pid)
        began = time.monotonic()
        count = 0
        while launcher.poll() is None and time.monotonic() - began < work:
            time.sleep(min(1.0, work / (2 * PARTS)))
            output.seek(0)
            count = output.read().count(b"restart")
            if launcher.poll() is None:
                watch.look(time.monotonic() - began, count)
        watch.check()
        if launcher.wait(TIMEOUT) != 0:
            output.seek(0)
            raise SystemExit(output.read()[-3000:].decode())
        print(f"restarts {transport}: ended in order after {count} restarts", flush=True)


def main(what: str, *arguments: str) -> int:
    """Do what the arguments ask for."""
    if what == "victim":
        victim(arguments[0])
        return 0
    if what == "failing":
        failing(float(arguments[0]))
        return 0
    if what == "rank":
        body: Callable[[int, str, float], None] = globals()[arguments[0]]
        body(int(os.environ["RANK"]), arguments[1], float(arguments[2]))
        return 0
    transport, work = arguments[0], float(arguments[1])
    # Where ranks meet: a killed one leaves its entry.
    with tempfile.TemporaryDirectory() as files, tempfile.TemporaryDirectory() as folder:
        os.environ |= {"LONG_RUN_FILES": files, "TMPDIR": folder}
        tempfile.tempdir = folder
        if what == "restarts":
            restarts(transport, work)
        else:
            run_ranks(what, transport, work)
        if left := os.listdir(folder):
            print(f"left behind: {left}", file=sys.stderr)
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
