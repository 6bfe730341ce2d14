"""Arrays in the memory of other processes, and what happens where they cannot be reached."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import closing
from functools import partial
from pathlib import Path

import collective_cases
import numpy as np
import pytest
from collective_cases import Case
from transport_ranks import Ranks, run, soon
from unreadable_memory import unreadable

import cydist as dist
from cydist import _native
from cydist.testing import run_threads
from cydist.tuning import table as tuning_table

ROOT = Path(__file__).parents[2]
COUNT = 100_000
SUM = 1
EVEN = 1


Worlds = Callable[[int], collective_cases.Ranks]


@pytest.fixture(scope="module")
def worlds() -> Iterator[Worlds]:
    """worlds(size): ranks that share memory, made once."""
    kept: dict[int, collective_cases.Ranks] = {}

    def get(size: int) -> collective_cases.Ranks:
        if size not in kept:
            kept[size] = collective_cases.Ranks(size, "shm")
        return kept[size]

    yield get
    for world in kept.values():
        world.close()


# Elements around pages, segments, slots and pieces (float32), and then some.
EDGES = (0, 1, 1023, 1025, 8 * 1024 - 1, 32 * 1024, 32 * 1024 + 1, 64 * 1024 + 3, 256 * 1024 - 1,
         256 * 1024 + 1)  # fmt: skip


@pytest.mark.parametrize("count", EDGES)
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8], ids=lambda size: f"{size}ranks")
@pytest.mark.parametrize("collective", sorted(tuning_table.DIRECT))
def test_arrays_of_another_process(worlds: Worlds, collective: str, size: int, count: int) -> None:
    """Reached through the kernel, as if each rank were a process, at every boundary."""
    if collective not in ("broadcast", "all_reduce", "reduce", "scan", "exscan"):
        count //= size
    in_place = count % 2 == 1 and collective not in ("broadcast", "all_to_all")
    case = Case(collective, size, count, root=size - 1, in_place=in_place)
    case.check(worlds(size).run(case, "direct", segment=1 << 18))


@pytest.mark.parametrize("dtype", ["int8", "bool", "float16", "complex128", "float8_e4m3fn"])
@pytest.mark.parametrize("collective", sorted(tuning_table.DIRECT & tuning_table.REDUCING))
def test_elements_of_another_process(worlds: Worlds, collective: str, dtype: str) -> None:
    """Elements of any size are reduced where they are, whole."""
    case = Case(collective, 3, 150_001, dtype=dtype, root=1)
    case.check(worlds(3).run(case, "direct", segment=1 << 18))


@pytest.mark.parametrize("size", [1, 2, 3], ids=lambda size: f"{size}ranks")
@pytest.mark.parametrize("collective", sorted(tuning_table.DIRECT - tuning_table.UNSIZED))
def test_adaptive_choice(worlds: Worlds, collective: str, size: int) -> None:
    """The first two of equal calls of a group go one way each; results are right whichever a call
    takes, in place or not."""
    world = worlds(size)
    groups = world.groups
    world.groups = [
        _native.Group(link, list(range(size)), rank, 9 + size)
        for rank, link in enumerate(world.links)
    ]
    try:
        for count in (8 * 1024 + 3, 70_001):
            for in_place in [False, collective not in ("broadcast", "all_to_all")] * 3:
                case = Case(collective, size, count, root=size - 1, in_place=in_place)
                case.check(world.run(case, "adaptive", segment=1 << 18))
    finally:
        for group in world.groups:
            group.close()
        world.groups = groups


@pytest.mark.parametrize("size", [2, 3], ids=lambda size: f"{size}ranks")
def test_adaptive_choices_agree(worlds: Worlds, size: int) -> None:
    """Ranks go the same way in hundreds of calls, of other lengths and collectives in between: some
    begin with a step to agree and some with none, as the rank that decides has measured."""
    world = worlds(size)
    cases = [
        Case(collective, size, count, root=size - 1)
        for collective in ("all_reduce", "all_gather", "broadcast")
        for count in (9_000, 20_001)
    ]
    for turn in range(60):
        for case in cases if turn % 5 == 0 else [cases[turn % len(cases)]] * 8:
            case.check(world.run(case, "adaptive", segment=1 << 18))


def test_a_root_runs_ahead_where_that_is_faster() -> None:
    """On one core a step to agree costs more than direct saves. So most such broadcasts take
    the fallback without agreement, and a root need not wait for the others."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        world = collective_cases.Ranks(2, "shm")
    finally:
        os.sched_setaffinity(0, before)
    case = Case("broadcast", 2, 10_000)
    ran_ahead = False
    with closing(world):
        while not ran_ahead and world.seq < 1000:
            for _ in range(40):
                case.check(world.run(case, "adaptive", segment=1 << 18))
            world.seq += 1
            root, other = (
                partial(case.run, group, rank, "adaptive", world.seq, 1 << 18, 30.0)
                for rank, group in enumerate(world.groups)
            )
            sent = world.pool.submit(root)
            ran_ahead = not wait([sent], 0.2).not_done
            got = other()
            case.check([sent.result(30), got])
    assert ran_ahead


def all_reduce(group: _native.Group, array: np.ndarray, seq: int) -> None:
    native = _native.asarray(array)
    group.run(
        "all_reduce", [native], [native], algorithm=b"direct", fallback=b"staged", op=SUM,
        count=array.size, flags=EVEN, deadline_ns=soon(), seq=seq, segment_bytes=1 << 18,
    )  # fmt: skip


def test_arrays_out_of_reach() -> None:
    """One rank's array is a device's, say: the call goes well, and so do those before and after."""
    with closing(Ranks("shm", 2)) as world:
        groups = world.group()

        def body(rank: int) -> None:
            for seq in (1, 2, 3):
                odd = rank == 0 and seq == 2
                array = unreadable(COUNT) if odd else np.empty(COUNT, np.float32)
                array[:] = np.arange(COUNT) % 1000 + rank
                all_reduce(groups[rank], array, seq)
                assert np.array_equal(array, 2 * (np.arange(COUNT) % 1000) + 1)

        run(lambda: body(0), lambda: body(1))


# A rank in whose process the two system calls fail, as they do in some containers.
PROGRAM = """
import ctypes, os, struct
import numpy as np
import cydist as dist

FORBIDDEN = {"x86_64": (310, 311), "aarch64": (270, 271)}[os.uname().machine]
LOAD, EQUAL, RETURN, EPERM = 0x20, 0x15, 0x06, 0x00050001
code = b"".join(
    struct.pack("HBBI", *row)
    for row in [
        (LOAD, 0, 0, 0),
        (EQUAL, 1, 0, FORBIDDEN[0]),
        (EQUAL, 0, 1, FORBIDDEN[1]),
        (RETURN, 0, 0, EPERM),
        (RETURN, 0, 0, 0x7FFF0000),
    ]
)
memory = ctypes.create_string_buffer(code, len(code))
rule = ctypes.create_string_buffer(struct.pack("HxxxxxxP", 5, ctypes.addressof(memory)))
libc = ctypes.CDLL(None)
rank = int(os.environ["RANK"])
if rank == 1:
    assert libc.prctl(38, 1, 0, 0, 0) == 0      # PR_SET_NO_NEW_PRIVS
    assert libc.prctl(22, 2, rule) == 0         # PR_SET_SECCOMP, SECCOMP_MODE_FILTER
dist.init_process_group("tcp", timeout=20)
for count, make in ((100_000, np.empty), (300_000, np.empty), (100_000, dist.empty_shared)):
    x, y = make(count), make(2 * count)
    x[:] = np.arange(count) % 1000 + rank
    dist.all_reduce(x)
    assert np.array_equal(x, 2.0 * (np.arange(count) % 1000) + 1)
    x += rank
    dist.all_gather_into_tensor(y, x)
    assert np.array_equal(y, np.concatenate([x - rank, x - rank + 1]))
dist.destroy_process_group()
"""


@pytest.mark.skipif(os.uname().machine not in ("x86_64", "aarch64"), reason="other numbers")
def test_a_rank_that_may_not(tmp_path: Path) -> None:
    """Where one rank is kept from the others' memory, all agree to go through windows."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("CYDIST_")}
    env = {**inherited, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "cydist.run", "-n", "2", str(program)],
        capture_output=True, text=True, timeout=60, check=False, env=env,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


# Rank 1 stops where it reads rank 0's array, or before or after that; rank 0 gives up, has its
# array back, changes it, and lets rank 1 go on.
STOPPED = """
import os, signal, sys
import numpy as np
import cydist as dist
from cydist._native import arm_failpoint
dist.init_process_group("tcp")
rank, count = dist.get_rank(), 1 << 20
pids = np.zeros(2, np.int64)
dist.all_gather_into_tensor(pids, np.array([os.getpid()]))
out = np.zeros(count)
given = [dist.empty_shared(count) if sys.argv[2] == "shared" else np.empty(count) for _ in "01"]
for each in given:
    each[:] = 1
dist.scatter(out, given if rank == 0 else None, src=0)
out[:] = 0
if rank == 1:
    arm_failpoint("send.mid:stop:" + sys.argv[1])
try:
    dist.scatter(out, given if rank == 0 else None, src=0, timeout=1 if rank == 0 else 60)
    assert np.all(out == 1), "data that was not given"
    print("right", flush=True)
except dist.DistError as error:
    print(type(error).__name__, flush=True)
if rank == 0:
    for each in given:
        each[:] = 2
    os.kill(pids[1], signal.SIGCONT)
"""


@pytest.mark.parametrize("memory", ["private", "shared"])
def test_a_reader_that_was_stopped(tmp_path: Path, memory: str) -> None:
    """A rank that is not waited for any longer does not take what its peer has there later."""
    program = tmp_path / "program.py"
    program.write_text(STOPPED)
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("CYDIST_")}
    env = {
        **inherited, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(tmp_path),
        "CYDIST_ALGORITHM": "scatter:direct",
    }  # fmt: skip
    done = subprocess.run(
        [sys.executable, "-m", "cydist.run", "-n", "2", str(program), "3", memory],
        capture_output=True, text=True, timeout=60, check=False, env=env,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 2, done.stdout


@pytest.mark.parametrize("trial", range(5))
def test_a_reader_that_comes_too_late(trial: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a rank writes into its array after its call has failed is read by nobody: who reads
    meanwhile either gets what the call gave, or raises."""
    count = 1 << 23
    monkeypatch.setenv("CYDIST_ALGORITHM", "scatter:direct")
    tuning_table.reload()

    def body(rank: int) -> None:
        out = np.zeros(8 if rank == 0 else count, np.float32)
        given = [np.ones(8, np.float32), np.ones(count, np.float32)]
        dist.barrier()
        try:
            dist.scatter(out, given if rank == 0 else None, src=0, timeout=60 if rank else 0.001)
        except dist.DistError:
            given[1][-(count // 16) :] = 2
        else:
            assert np.all(out == 1)

    try:
        run_threads(body, 2)
    except dist.DistError:
        pass  # of the reader
