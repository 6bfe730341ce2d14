"""Memory that the ranks of a host share: who gets some, and what a death leaves of it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from transport_ranks import DEADLINE, Group, Ranks, free_port, run, soon
from two_process_job import TwoProcessJob

import cydist as dist
from cydist import _native
from cydist.backends.host import shm_setup
from cydist.errors import RendezvousError
from cydist.testing import run_threads

TOKEN = bytes(range(32))
SUM = 1
LEAST = 2000 // 16  # looks at a flag in a wait, where no other process needs the core
WINDOW = 1 << 20  # bytes of one rank's slots in a group's windows


def memory(ranks: int = 2, nbytes: int = 8 << 20) -> _native.SharedMemory:
    """New memory."""
    return _native.SharedMemory.create(ranks, nbytes, TOKEN)


@pytest.fixture
def world() -> Iterator[Ranks]:
    """Two ranks that share memory."""
    with closing(Ranks("shm", 2)) as ranks:
        yield ranks


def sums(groups: list[Group], seq: int) -> list[float]:
    """An all_reduce of ones through the windows."""
    arrays = [np.ones(3) for _ in groups]

    def one(rank: int) -> None:
        array = _native.asarray(arrays[rank])
        groups[rank].run(
            "all_reduce", [array], [array], algorithm=b"flat", op=SUM, count=3,
            deadline_ns=soon(), seq=seq,
        )  # fmt: skip

    run(*[lambda r=r: one(r) for r in range(len(groups))])
    return [float(array[0]) for array in arrays]


# The memory


def test_it_is_sealed_and_closed_to_others() -> None:
    """It cannot shrink under a reader, and no other user may open it."""
    made = memory()
    seals = fcntl.fcntl(made.fd, fcntl.F_GET_SEALS)
    assert seals & fcntl.F_SEAL_SHRINK
    assert seals & fcntl.F_SEAL_GROW
    assert seals & fcntl.F_SEAL_SEAL
    assert os.fstat(made.fd).st_mode & 0o777 == 0o600


def test_it_has_no_name() -> None:
    """It is in no folder, so nothing can be left in one."""
    assert os.fstat(memory().fd).st_nlink == 0


def test_unsealed_memory_is_refused() -> None:
    """A memfd that its maker could truncate is not mapped: reading it could kill us."""
    fd = os.memfd_create("other", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 8 << 20)
    with pytest.raises(ValueError, match="sealed"):
        _native.SharedMemory.attach(fd, TOKEN)


def test_memory_that_is_open_to_others_is_refused() -> None:
    """A rank maps only what its own user made, closed to all others."""
    made = memory()
    os.fchmod(made.fd, 0o640)
    with pytest.raises(ValueError, match="open to others"):
        _native.SharedMemory.attach(os.dup(made.fd), TOKEN)


def test_memory_of_another_job_is_refused() -> None:
    """Who does not find the token in it is looking at something else."""
    made = memory()
    with pytest.raises(ValueError, match="another job"):
        _native.SharedMemory.attach(os.dup(made.fd), bytes(32))


def test_memory_of_another_version_is_refused() -> None:
    """Ranks of two versions do not take each other's tables and rings for their own."""
    made = memory()
    layout = int.from_bytes(os.pread(made.fd, 8, 0), sys.byteorder)
    os.pwrite(made.fd, (layout - 1).to_bytes(8, sys.byteorder), 0)
    with pytest.raises(ValueError, match="another version"):
        _native.SharedMemory.attach(os.dup(made.fd), TOKEN)


@pytest.mark.parametrize(("ranks", "nbytes"), [(0, 8 << 20), (2, 100), (2, (8 << 20) + 1)])
def test_sizes(ranks: int, nbytes: int) -> None:
    """A size that cannot hold the table, or no whole pages, is refused."""
    with pytest.raises(ValueError, match="no shared memory"):
        memory(ranks, nbytes)


# Windows out of it


def test_only_a_first_collective_takes_memory(world: Ranks) -> None:
    """Groups that are made and never used cost nothing."""
    used = world.links[0].memory.used()
    groups = world.group()
    assert world.links[0].memory.used() == used
    assert sums(groups, 1) == [2, 2]
    assert world.links[0].memory.used() >= used + 2 * WINDOW


def test_destroyed_groups_give_it_back(world: Ranks) -> None:
    """However many groups come and go, they share the memory of those that live at a time."""
    assert sums(world.group(context=1), 1) == [2, 2]
    used = world.links[0].memory.used()
    for context in range(2, 40):
        groups = world.group(context=context)
        assert sums(groups, 1) == [2, 2]
        for group in groups:
            group.close()
    assert world.links[0].memory.used() <= used + 2 * WINDOW + (1 << 16)


def test_windows_that_are_used_again_are_clean(world: Ranks) -> None:
    """A group in the place of an earlier one meets none of its flags."""
    for context in range(1, 6):
        groups = world.group(context=context)
        for seq in range(1, 20):
            assert sums(groups, seq) == [2, 2]
        for group in groups:
            group.close()


def test_when_memory_is_spent_groups_do_without() -> None:
    """All members of a later group find that there is none, and their calls go over messages."""

    def body(rank: int) -> list[bool]:
        groups = [dist.new_group() for _ in range(4)]
        for group in groups:
            x = np.full(3, rank + 1.0)
            dist.all_reduce(x, group=group)
            assert (x == 3).all()
        return [group.native.windows for group in groups]

    original = shm_setup.BYTES_PER_RANK
    shm_setup.BYTES_PER_RANK = 3 << 20
    try:
        had = run_threads(body, 2, "tcp")
    finally:
        shm_setup.BYTES_PER_RANK = original
    assert had[0] == had[1] == [True, True, False, False]


def test_more_groups_than_the_table_holds(world: Ranks) -> None:
    """The table of groups is bounded too; beyond it calls go over messages."""
    views = [world.group(context=context) for context in range(1, 1100)]
    had = [[group.native.windows for group in groups] for groups in views]
    assert all(first == second for first, second in had)
    assert had[0] == [True, True]
    assert had[-1] == [False, False]


INTERRUPTED = """
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
int posix_fallocate(int fd, off_t offset, off_t length) {
    static int calls;
    if (calls++ % 3 < 2)
        return EINTR;
    return fallocate(fd, 0, offset, length) == 0 ? 0 : errno;
}
int posix_fallocate64(int fd, off64_t offset, off64_t length) {
    return posix_fallocate(fd, offset, length);
}
"""

SHARING = """
from contextlib import closing
from transport_ranks import Ranks
with closing(Ranks("shm", 2)) as ranks:
    print(*(group.native.windows for group in ranks.group()))
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_signals_leave_groups_their_windows(tmp_path: Path) -> None:
    """Memory is asked for again when a signal came, a profiler's say, until it is there."""
    (tmp_path / "interrupted.c").write_text(INTERRUPTED)
    library = str(tmp_path / "interrupted.so")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, f"{library[:-2]}c"], check=True)
    # A sanitizer's library comes first, where there is one.
    preload = " ".join([*os.environ.get("LD_PRELOAD", "").split(), library])
    here = Path(__file__).parents[1]
    answer = subprocess.run(
        [sys.executable, "-c", SHARING], timeout=DEADLINE, capture_output=True, text=True,
        env={**os.environ, "LD_PRELOAD": preload, "PYTHONPATH": f"{here.parent}:{here}/support"},
    )  # fmt: skip
    assert answer.stdout == "True True\n", answer.stderr


# Who shares


def test_ranks_of_one_host_share() -> None:
    """Without any setting, ranks of one host have windows."""

    def body(rank: int) -> bool:
        return bool(dist.group.WORLD.native.windows)

    assert run_threads(body, 3, "tcp") == [True] * 3


def test_sockets_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """CYDIST_TRANSPORT=tcp: no windows, same sums."""
    monkeypatch.setenv("CYDIST_TRANSPORT", "tcp")

    def body(rank: int) -> tuple[bool, float]:
        x = np.ones(1)
        dist.all_reduce(x)
        return bool(dist.group.WORLD.native.windows), float(x[0])

    assert run_threads(body, 2, "tcp") == [(False, 2.0)] * 2


def test_a_rank_that_cannot_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups with it use sockets, groups without it windows."""
    places = iter([b"here", b"here", b"elsewhere"])
    monkeypatch.setattr(shm_setup, "memory_domain", lambda: next(places))

    def body(rank: int) -> tuple[int, bool, bool]:
        x = np.ones(1)
        dist.all_reduce(x)
        pair = dist.new_group([0, 1])
        mixed = dist.group.WORLD.native.windows
        return int(x[0]), bool(mixed), bool(pair and pair.native.windows)

    results = run_threads(body, 3, "tcp")
    assert [(total, mixed) for total, mixed, _ in results] == [(3, False)] * 3
    assert sorted(pair for _, _, pair in results).count(True) in (0, 2)


def test_shm_is_a_demand(monkeypatch: pytest.MonkeyPatch) -> None:
    """CYDIST_TRANSPORT=shm among ranks that cannot share is an error that names them."""
    monkeypatch.setenv("CYDIST_TRANSPORT", "shm")
    places = iter([b"here", b"there"])
    monkeypatch.setattr(shm_setup, "memory_domain", lambda: next(places))
    places_differ = "cannot share memory with rank [01]: .* in other containers"
    with pytest.raises(RendezvousError, match=places_differ) as caught:
        run_threads(lambda rank: None, 2, "tcp")
    assert caught.value.ranks in ((0,), (1,))


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("fails", ["create", "attach"])
def test_shm_is_a_demand_for_memory(fails: str, size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """CYDIST_TRANSPORT=shm is an error too where the memory cannot be made, or not be mapped."""
    monkeypatch.setenv("CYDIST_TRANSPORT", "shm")

    def refused(*_: object) -> None:
        raise OSError(12, "no memory")

    found = {"create": _native.SharedMemory.create, "attach": _native.SharedMemory.attach}
    monkeypatch.setattr(shm_setup, "SharedMemory", SimpleNamespace(**found | {fails: refused}))
    said = {
        "create": "rank 0 has no memory to share: .*no memory",
        "attach": "rank 0's memory cannot be opened here: .*no memory|they cannot open the memory",
    }
    with pytest.raises(RendezvousError, match=said[fails]):
        run_threads(lambda rank: None, size, "tcp")


def test_one_rank_shares_with_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """CYDIST_TRANSPORT=shm demands nothing of a rank that is alone."""
    monkeypatch.setenv("CYDIST_TRANSPORT", "shm")
    assert run_threads(lambda rank: rank, 1, "tcp") == [0]


def test_a_transport_that_does_not_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    """The setting is checked before anybody waits."""
    monkeypatch.setenv("CYDIST_TRANSPORT", "infiniband")
    with pytest.raises(ValueError, match="none of auto, shm, tcp"):
        dist.init_process_group("tcp", rank=0, world_size=2, store=dist.HashStore(), timeout=5)


def test_memory_that_cannot_be_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where /proc does not let a rank in, all go on with sockets."""
    opened = os.open

    def refused(path: str, *rest: int) -> int:
        if str(path).startswith("/proc/"):
            raise PermissionError(13, "no", path)
        return opened(path, *rest)

    monkeypatch.setattr(shm_setup.os, "open", refused)

    def body(rank: int) -> tuple[bool, float]:
        x = np.ones(1)
        dist.all_reduce(x)
        return bool(dist.group.WORLD.native.windows), float(x[0])

    assert run_threads(body, 2, "tcp") == [(False, 2.0)] * 2


# Who is there, and who is not any more


def waits_alone(link: _native.Link) -> str:
    """How a collective of two ranks ends in which the other does nothing: a CallError's status."""
    group = _native.Group(link, [0, 1], 0, 7)
    array = _native.asarray(np.ones(3))
    with pytest.raises(_native.CallError) as caught:
        group.run(
            "all_reduce", [array], [array], algorithm=b"flat", op=SUM, count=3,
            deadline_ns=soon(0.2), seq=1,
        )  # fmt: skip
    group.close()
    return str(caught.value.status)


def test_a_rank_that_has_not_come_yet_is_not_dead() -> None:
    """A rank that is first waits for one whose process has not mapped the memory yet."""
    with closing(Ranks("tcp", 2)) as ranks:
        link = _native.ShmLink(ranks.links[0], memory(), dict.fromkeys((0, 1), os.getpid()))
        assert waits_alone(link) == "timeout"
        assert link.lost(1) == ""
        link.close()


def test_the_cores_of_all_ranks_count() -> None:
    """A launcher that binds each rank to a core leaves none without one, so waits may spin."""
    before = os.sched_getaffinity(0)
    lowest, highest = {min(before)}, {max(before)}
    with (
        closing(Ranks("tcp", 2)) as ranks,
        subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as child,
    ):
        os.sched_setaffinity(child.pid, highest)
        os.sched_setaffinity(0, lowest)
        try:
            link = _native.ShmLink(ranks.links[0], memory(), {0: os.getpid(), 1: child.pid})
        finally:
            os.sched_setaffinity(0, before)
        assert link.cores == len(lowest | highest)
        link.close()
        child.kill()


@pytest.mark.parametrize("what", ["flag", "message"])
def test_a_wait_does_not_spin_on_a_core_that_another_process_needs(world: Ranks, what: str) -> None:
    """A yield that lets another run tells so, also where there seem to be cores for all ranks."""
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("waits spin only where each rank has a core")
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as busy:
        os.sched_setaffinity(busy.pid, {min(before)})
        os.sched_setaffinity(0, {min(before)})
        try:
            for group, other in (world.group(context) for context in range(1, 6)):
                assert group.native.windows
                wait_in_vain(group, what)
                spins = spins_of(group, what)
                group.close()
                other.close()
                if spins < LEAST:  # the first yields need not let the other process run
                    break
        finally:
            os.sched_setaffinity(0, before)
            busy.kill()
    assert 0 < spins < LEAST


def spins_of(group: Group, what: str) -> int:
    """How often a wait looks before it yields its core."""
    if what == "flag":
        return group.native.spins
    return group.native.link.messages.statistics()["spins"]


def wait_in_vain(group: Group, what: str) -> None:
    """Wait for the other rank, which does nothing, for longer than a wait yields."""
    array = _native.asarray(np.ones(3))
    if what == "flag":
        with pytest.raises(_native.CallError):
            group.native.run(
                "all_reduce", [array], [array], algorithm=b"flat", op=SUM, count=3,
                deadline_ns=soon(0.01), seq=1,
            )  # fmt: skip
    else:
        assert not group.irecv(np.ones(3), 1, 0).wait(soon(0.01))


NEIGHBOUR = """
x, group = np.ones(4), dist.new_group([0, 1])
dist.all_reduce(x)
dist.send(x, 0)
dist.recv(x, 0)
dist.barrier()
sys.stdin.readline()
dist.destroy_process_group()
"""


def descriptors() -> set[tuple[str, str]]:
    """What this process has open."""
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the one that lists them
            found.add((name, os.readlink(f"/proc/self/fd/{name}")))
    return found


def test_looking_for_dead_ranks_opens_nothing(tmp_path: Path) -> None:
    """A neighbour's process is known from the beginning, before its number can be another's."""

    def body() -> set[tuple[str, str]]:
        x, group = np.ones(4), dist.new_group([0, 1])
        dist.all_reduce(x)
        dist.recv(x, 1)
        dist.send(x, 1)
        dist.barrier()
        before = descriptors()
        with pytest.raises(dist.DistTimeoutError):
            dist.irecv(x, 1).wait(0.2)
        with pytest.raises(dist.DistTimeoutError):
            dist.all_reduce(x, group=group, timeout=0.2)
        assert other.process.stdin is not None
        opened = descriptors() - before
        print(file=other.process.stdin, flush=True)
        return opened

    with TwoProcessJob(tmp_path, NEIGHBOUR) as other:
        assert other.rank_0(body) == set()


def test_without_descriptors_no_rank_is_dead(world: Ranks) -> None:
    """A rank that cannot open another's process, for lack of descriptors, goes on waiting."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    probe = os.dup(0)
    os.close(probe)
    resource.setrlimit(resource.RLIMIT_NOFILE, (probe, hard))
    try:
        ended = waits_alone(world.links[0])
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert ended == "timeout"


# Deaths

PROGRAM = """
import os, signal, sys
import numpy as np
import cydist as dist

how, rank = sys.argv[1], int(os.environ["RANK"])
dist.init_process_group("tcp", timeout=60)
assert dist.group.WORLD.native.windows
x = np.ones(1 << 20)
dist.all_reduce(x)
if rank == 1:
    if how == "exit":
        os._exit(3)
    if how == "child" and os.fork() == 0:
        signal.pause()
    if how == "leave":
        dist.destroy_process_group()
        sys.exit()
    os.kill(os.getpid(), signal.SIGKILL)
try:
    while True:
        dist.all_reduce(x)
except dist.PeerFailedError as error:
    known = "on " + os.uname().nodename in str(error) and "died, left" not in str(error)
    print(error.ranks, known, flush=True)
"""


@pytest.mark.parametrize("how", ["kill", "exit", "leave", "child"])
def test_a_death_ends_the_wait(how: str, tmp_path: Path) -> None:
    """A rank that dies, or leaves, ends the collectives of those that wait for its flags.

    The error names its host, and whether it died or left.
    """
    environment = {
        **os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()),
        "WORLD_SIZE": "3", "CYDIST_TRANSPORT": "shm",
    }  # fmt: skip
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, how],
            env={**environment, "RANK": str(rank)},
            stdout=subprocess.PIPE, text=True, start_new_session=True,
        )
        for rank in range(3)
    ]  # fmt: skip
    try:
        printed = [ranks[rank].communicate(timeout=DEADLINE * 2)[0] for rank in (0, 2)]
    finally:
        for rank in ranks:
            kill_session(rank)
    assert printed == ["(1,) True\n", "(1,) True\n"]


def kill_session(process: subprocess.Popen[str]) -> None:
    """End a process that we started, and its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(DEADLINE)
    if process.stdout is not None:
        process.stdout.close()
