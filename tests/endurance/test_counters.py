"""Counters that pass the end of a word during calls: of calls, steps, bytes, messages, frames.

They begin just below 2**16, 2**31, 2**32, 2**39 (where the number of a call in a message's tag
begins again), 2**63 and 2**64, and pass it within each test.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from collective_cases import Case, Ranks
from extra_values import long
from mpi_launchers import ROOT, TOLERANT, binaries

import cydist as dist
from cydist import _native, recorder
from cydist.errors import MismatchError, PeerFailedError
from cydist.net.records import Records
from cydist.testing import Faults, ThreadJob, run_threads
from cydist.tuning import table as tuning_table

BEFORE = 30  # counts from the start of a test to the end of the word
CALLS = 3 * BEFORE
WIDTHS = [32, 64, *long(16, 31, 39, 63)]
TRANSPORTS = ["inproc", "tcp", "tls", "shm"]
LARGE = 600_000  # bytes: announced, and copied by both ranks where they share a host


@pytest.fixture(params=WIDTHS, ids=lambda width: f"2**{width}")
def end(request: pytest.FixtureRequest) -> Iterator[int]:
    """The value that all counters pass: they begin BEFORE counts below it."""
    _native.begin_counters_at((1 << request.param) - BEFORE)
    yield 1 << request.param
    _native.begin_counters_at(0)


@pytest.fixture(params=TRANSPORTS)
def transport(request: pytest.FixtureRequest) -> str:
    """What carries the calls: a backend, or a setting that conftest.py makes."""
    return str(request.param)


def job(size: int, transport: str, body: Callable[[int], Any], **options: Any) -> list[Any]:
    """Run the body on every rank of a new job."""
    backend = "inproc" if transport == "inproc" else "tcp"
    return run_threads(body, size, backend, **options)


def test_counters_begin_where_they_are_set(end: int) -> None:
    """The setting reaches the number of a group's calls, which then is past the word."""

    def body(rank: int) -> int:
        for _ in range(BEFORE + 1):
            dist.barrier()
        return int(dist.group.WORLD.native.seq)

    assert run_threads(body, 2) == [(end + 1) % (1 << 64)] * 2


def test_collectives(end: int, transport: str) -> None:
    """Every call on both sides of the end has its exact result, for short and long arrays."""

    def body(rank: int) -> None:
        world = dist.get_world_size()
        for call in range(CALLS):
            count = (1, 5, 3000, 70_000)[call % 4 if call % 16 < 4 else 0]
            x = np.full(count, rank + call)
            dist.all_reduce(x)
            assert (x == 3 + 3 * call).all(), (call, x)
            root = call % world
            x = np.full(count, call if rank == root else -1)
            dist.broadcast(x, root)
            assert (x == call).all(), (call, x)
            gathered = np.zeros(count * world, np.int64)
            dist.all_gather_into_tensor(gathered, np.full(count, 10 * call + rank))
            assert (gathered.reshape(world, -1).T == 10 * call + np.arange(world)).all(), call
            swapped = np.zeros(world, np.int64)
            dist.all_to_all_single(swapped, 10 * np.arange(world) + rank + call)
            assert (swapped == 10 * rank + np.arange(world) + call).all(), (call, swapped)
            dist.reduce(x, root)
            assert (x == 3 * call).all() or rank != root, (call, x)

    job(3, transport, body)


def test_a_root_that_runs_ahead(end: int, transport: str) -> None:
    """A broadcast's root does not wait: it is many steps ahead of the others when it passes."""

    def body(rank: int) -> None:
        counts = (1, 100, 20_000) * BEFORE
        arrays = [np.full(n, i if rank == 0 else -1) for i, n in enumerate(counts)]
        works = [dist.broadcast(x, 0, async_op=True) for x in arrays]
        for i, (x, work) in enumerate(zip(arrays, works, strict=True)):
            assert work is not None
            work.wait()
            assert (x == i).all(), (i, x)

    job(3, transport, body)


def test_messages(end: int, transport: str) -> None:
    """Messages arrive whole and in order, expected or not, both ways at once."""
    sizes = [8, 0, LARGE, 1000, 66_000, 2_000_000]

    def body(rank: int) -> None:
        for call in range(CALLS):
            nbytes = sizes[call % len(sizes)]
            out = np.full(nbytes, (call + rank) % 251, np.uint8)
            into = np.zeros(nbytes, np.uint8)
            if call % 2 == rank:
                receive = dist.irecv(into, 1 - rank, tag=call % 3)
                send = dist.isend(out, 1 - rank, tag=call % 3)
            else:
                send = dist.isend(out, 1 - rank, tag=call % 3)
                receive = dist.irecv(into, 1 - rank, tag=call % 3)
            receive.wait()
            send.wait()
            assert (into == (call + 1 - rank) % 251).all(), call

    job(2, transport, body)


def test_withdrawn_messages(end: int, transport: str) -> None:
    """An announced message that a timeout takes back leaves the next ones whole."""

    def body(rank: int) -> None:
        for call in range(BEFORE + 5):
            array = np.full(LARGE, call % 251, np.uint8)
            if rank == 0:
                if call % 8 == 0:
                    with pytest.raises(dist.DistTimeoutError):
                        dist.isend(array, 1, tag=9).wait(0.002)
                dist.send(array, 1, tag=1)
            else:
                dist.recv(array, 0, tag=1)
                assert (array == call % 251).all()
        dist.barrier()

    job(2, transport, body)


@pytest.fixture(params=[-1, 0, 1], ids=["before", "at", "after"])
def calls_before(request: pytest.FixtureRequest) -> int:
    """Calls up to shortly before, at or after the end of the word."""
    return BEFORE + int(request.param)


def ends(ranks: int, transport: str, calls: int, differ: Callable[[int, Any], None]) -> list[str]:
    """Return how ranks end that make equal calls and then different ones."""

    def body(rank: int) -> str:
        x = np.ones(3)
        for _ in range(calls):
            dist.all_reduce(x)
        try:
            differ(rank, x)
        except MismatchError:
            return "mismatch"
        return "nothing"

    return job(ranks, transport, body)


def test_a_mismatch(end: int, transport: str, calls_before: int) -> None:
    """Ranks in different calls, at the end of the word, hear of it on all ranks."""

    def differ(rank: int, x: Any) -> None:
        if rank == 0:
            dist.broadcast(x, 1)
        else:
            dist.all_reduce(x)
        dist.barrier()

    assert ends(3, transport, calls_before, differ) == ["mismatch"] * 3


def test_a_rank_that_ends_without_the_last_call(
    end: int, transport: str, calls_before: int
) -> None:
    """A group's end compares the last calls across the end of the word too."""

    def differ(rank: int, x: Any) -> None:
        if rank == 0:
            dist.broadcast(x, 0)
        dist.destroy_process_group()

    assert "mismatch" in ends(2, transport, calls_before, differ)


@pytest.mark.parametrize("transport", ["inproc", "tcp", "shm"])
def test_shrinking(end: int, transport: str) -> None:
    """Survivors of a rank that dies around the end of the word go on, in a new group."""
    backend = "inproc" if transport == "inproc" else "tcp"

    def body(rank: int) -> int:
        done = 0
        while done < CALLS:
            x = np.ones(4, np.int64)
            try:
                dist.all_reduce(x)
            except PeerFailedError:
                dist.shrink_group()
            else:
                assert (x == dist.get_world_size()).all()
                done += 1
        return int(dist.get_world_size())

    job = ThreadJob(3, backend, faults=Faults(1, kill={2: range(BEFORE - 3, BEFORE + 3)}))
    try:
        assert job.run(body)[:2] == [2, 2]
    finally:
        job.close()


def test_groups_and_new_connections(end: int, transport: str) -> None:
    """Each new job and group begins again below the end, with new connections, and passes it."""

    def body(rank: int) -> None:
        for round_ in range(4):
            group = dist.new_group()
            for call in range(BEFORE + 3):
                x = np.full(2, rank + call)
                dist.all_reduce(x, group=group)
                assert (x == 1 + 2 * call).all(), (round_, call)
            dist.destroy_process_group(group)

    for _ in range(3):
        job(2, transport, body)


def test_the_record_of_calls(end: int) -> None:
    """The last calls are kept in their order, with numbers that go on at 0 after 2**64."""

    def body(rank: int) -> list[tuple[str, int]]:
        for call in range(2 * BEFORE):
            dist.all_reduce(np.ones(1)) if call % 2 else dist.barrier()
        dist.barrier()
        calls = dist.recorder.dump()["calls"]
        own = [each["seq"] for each in calls if each["call"] in ("all_reduce", "barrier")]
        dist.barrier()
        return own

    numbers = run_threads(body, 1)[0]
    first = end - BEFORE + 1
    assert numbers == [(first + i) % (1 << 64) for i in range(2 * BEFORE + 1)]


def test_the_65536th_group(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that has made more groups than the record of calls has numbers for goes on."""
    monkeypatch.setattr(recorder, "_groups", (1 << 16) - 3)

    def body(rank: int) -> list[str]:
        for value in range(6):
            group = dist.new_group()
            x = np.full(2, value)
            dist.all_reduce(x, group=group)
            assert x.tolist() == [2 * value] * 2
            dist.destroy_process_group(group)
        return [call["call"] for call in dist.recorder.dump()["calls"]]

    assert [calls.count("all_reduce") >= 6 for calls in run_threads(body, 2)] == [True, True]


ROWS = sorted(row for row, needs in tuning_table.NEEDS.items() if not needs & tuning_table.NATIVE)
WITH_HOSTS = [row for row in ROWS if tuning_table.NEEDS[row] & tuning_table.HOSTS]
ON_ONE_HOST = [row for row in ROWS if row not in WITH_HOSTS]


@pytest.mark.parametrize(
    ("rows", "hosts"), [(ON_ONE_HOST, None), (WITH_HOSTS, [0, 0, 1, 1])], ids=["flat", "two-hosts"]
)
@pytest.mark.parametrize("transport", ["inproc", "shm"])
def test_every_algorithm(end: int, rows: list[Any], hosts: Any, transport: str) -> None:
    """Every algorithm, short and in many segments, while steps, tags and flags pass the end."""
    if hosts and transport == "inproc":
        transport = "tcp"
    for row in rows:
        collective, name = row
        ranks = Ranks(4, transport, hosts)
        try:
            ranks.seq = end - BEFORE
            for call in range(BEFORE + 4 if collective == "barrier" else BEFORE // 2):
                case = Case(collective, 4, (0, 3, 300)[call % 3], root=call % 4)
                if call == 4:
                    ranks.seq = end - 3
                ranks.seq %= 1 << 64
                case.check(ranks.run(case, name))
        finally:
            ranks.close()


PROGRAM = """
import numpy as np
import cydist as dist

def rank_of_job(rank):
    dist.init_process_group("tcp", timeout=30)
    assert dist.group.WORLD.native.seq > 1 << 31
    for call in range(100):
        x = np.full(1 + call % 3 * 5000, rank + call)
        dist.all_reduce(x)
        assert (x == 1 + 2 * call).all(), call
        big = np.full(400_000, call + rank)
        if rank:
            dist.recv(big, 0)
        else:
            dist.send(big, 1)
        assert (big == call).all(), call
    dist.barrier()
    dist.destroy_process_group()

if __name__ == "__main__":
    dist.spawn(rank_of_job, nprocs=2, start_method="fork")
    print("content")
"""


@pytest.mark.parametrize("transport", ["tcp", "tls", "shm"])
def test_processes(transport: str, width: int, tmp_path: Path) -> None:
    """CYDIST_FIRST_COUNT sets the start in a job of processes: rings, windows, sockets."""
    settings = {"CYDIST_FIRST_COUNT": str((1 << width) - BEFORE)}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=os.environ | settings, cwd=tmp_path,
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert (done.stdout, done.returncode) == ("content\n", 0), done.stderr


@pytest.fixture(params=WIDTHS, ids=lambda width: f"2**{width}")
def width(request: pytest.FixtureRequest) -> int:
    """The bits of the word that counters pass."""
    return max(int(request.param), 32)


@pytest.mark.parametrize("transport", ["tcp", "tls"])
@pytest.mark.parametrize("bits", [32, 64], ids=["2**32", "2**64"])
@pytest.mark.usefixtures("secret")
def test_records_of_a_store(monkeypatch: pytest.MonkeyPatch, transport: str, bits: int) -> None:
    """The requests of a store's connection are authentic when their numbers pass the end."""
    monkeypatch.setattr(Records, "first", (1 << bits) - BEFORE)
    store = dist.TCPStore("127.0.0.1", 0, None, True, 30)
    for call in range(CALLS):
        assert store.add("n", 1) == call + 1
    store.close()


MPI_PROGRAM = PROGRAM.partition("if __name__")[0].replace('"tcp"', '"mpi"').replace(
    "(rank)", "(rank=0)").replace("if rank:", "if dist.get_rank():").replace(
    "rank + call", "dist.get_rank() + call").replace(
    "dist.barrier()", "dist.all_gather_into_tensor(np.zeros(4), np.ones(2)); dist.barrier()",
) + """
rank_of_job()
print("content")
"""  # fmt: skip


@pytest.mark.parametrize("mpi", ["openmpi", *long("mpich")])
@pytest.mark.parametrize("transport", ["windows", "mpi"])
def test_over_mpi(mpi: str, transport: str, width: int, tmp_path: Path) -> None:
    """MPI's tags, of which each payload takes the next one, begin again at 1 after the largest."""
    (tmp_path / "program.py").write_text(MPI_PROGRAM)
    place = binaries(mpi)
    settings = {
        **TOLERANT, "CYDIST_FIRST_COUNT": str((1 << width) - BEFORE), "PYTHONPATH": str(ROOT),
        "CYDIST_TRANSPORT": "mpi" if transport == "mpi" else "",
    }  # fmt: skip
    done = subprocess.run(
        [str(place / "mpirun"), "-n", "2", str(place / "python"), "program.py"],
        env=os.environ | settings, cwd=tmp_path, capture_output=True, text=True, timeout=100,
        check=False,
    )  # fmt: skip
    assert (done.stdout.count("content"), done.returncode) == (2, 0), done.stderr
