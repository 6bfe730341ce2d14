"""Meeting by every URL and by a store."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from thread_rendezvous import HOST, WAIT, Outcome, check_met, meet, stand_alone, together
from transport_ranks import free_port

from cydist.errors import (
    AuthenticationError,
    PeerFailedError,
    RendezvousError,
)
from cydist.net import auth
from cydist.rendezvous import check_in, handlers, multicast
from cydist.stores import HashStore, TCPStore
from cydist.stores.membership_store import release


@pytest.fixture(autouse=True)
def alone(secret: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No launcher, a secret, announcements that stay on this host."""
    stand_alone(monkeypatch, tmp_path)


def test_an_error_that_is_kept_does_not_hold_the_port() -> None:
    """Rank 0 calls again after each timeout, though what it caught refers to all that it had."""
    url, caught = f"tcp://{HOST}:{free_port()}", []
    for _ in range(3):
        with pytest.raises(RendezvousError, match="missing: rank 1") as error:
            handlers.rendezvous(url, rank=0, world_size=2, timeout=0.05)
        caught.append(error)
    assert len(caught) == 3


def refusals(outcomes: list[Outcome]) -> list[RendezvousError]:
    """Nobody met: every rank's error."""
    refused = [outcome for outcome in outcomes if isinstance(outcome, RendezvousError)]
    assert refused == outcomes
    return refused


# A way to meet, as a URL that is new for each test


def tcp4(tmp_path: Path) -> str:
    return f"tcp://{HOST}:{free_port()}"


def tcp6(tmp_path: Path) -> str:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
            return f"tcp://[::1]:{probe.getsockname()[1]}"
    except OSError:
        pytest.skip("no IPv6")


def file(tmp_path: Path) -> str:
    return f"file://{tmp_path}/meeting"


def multicast4(tmp_path: Path) -> str:
    return _multicast("239.255.77.1", f"239.255.77.1:{free_port()}")


def multicast6(tmp_path: Path) -> str:
    group = "ff15:1e18:5d4c:4cf0:d02d:b659:53ba:b0a7"
    return _multicast(group, f"[{group}]:{free_port()}")


def _multicast(group: str, where: str) -> str:
    try:
        multicast._own_address(group, 9)
    except RendezvousError:
        pytest.skip(f"no route to {group}")
    return f"tcp://{where}"


Way = Callable[[Path], str]
FIXED = [tcp4, tcp6, file, multicast4, multicast6]
AUTOMATIC = [file, multicast4, multicast6]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
@pytest.mark.parametrize("way", FIXED)
def test_given_ranks_meet(way: Way, size: int, tmp_path: Path) -> None:
    """Every rank gets the rank it asked for, and all reach one store."""
    ranks = list(reversed(range(size)))
    check_met(meet(way(tmp_path), ranks), ranks)


@pytest.mark.parametrize("way", FIXED)
def test_store_waits_as_long_as_told(way: Way, tmp_path: Path) -> None:
    """The store's timeout is the call's, however long the meeting took."""
    for outcome in meet(way(tmp_path), [0, 1]):
        assert isinstance(outcome, tuple), outcome
        assert outcome[0].timeout == timedelta(seconds=WAIT)


@pytest.mark.parametrize("way", AUTOMATIC)
def test_ranks_are_given_out(way: Way, tmp_path: Path) -> None:
    """Without ranks every process gets a different one."""
    check_met(meet(way(tmp_path), [-1, -1, -1, -1]))


@pytest.mark.parametrize("way", AUTOMATIC)
def test_fixed_and_automatic_ranks_do_not_collide(way: Way, tmp_path: Path) -> None:
    """Who asks for a rank has it, a rank that comes first; the others share the rest."""
    ranks = [-1, 0, -1, 2]
    check_met(meet(way(tmp_path), ranks), ranks)


@pytest.mark.parametrize("way", AUTOMATIC)
def test_group_names_keep_jobs_apart(way: Way, tmp_path: Path) -> None:
    """Two jobs at one address with different names do not see each other."""
    url = way(tmp_path)

    def join(name: str) -> Callable[[], Outcome]:
        return lambda: handlers.rendezvous(url, world_size=2, timeout=WAIT, group_name=name)

    outcomes = together(join("a"), join("b"), join("a"), join("b"))
    check_met(outcomes[0::2])
    check_met(outcomes[1::2])


@pytest.mark.parametrize("way", AUTOMATIC)
def test_a_rank_asked_for_twice_is_an_error(way: Way, tmp_path: Path) -> None:
    """Two processes that want one rank both learn of it."""
    for outcome in refusals(meet(way(tmp_path), [1, 1, -1])):
        assert "rank 1 was asked for by two" in str(outcome)
        assert outcome.ranks == (1,)


@pytest.mark.parametrize("way", [file, multicast4])
def test_missing_processes_are_counted(way: Way, tmp_path: Path) -> None:
    """Where ranks are given out, the error says how many processes came."""
    for outcome in refusals(meet(way(tmp_path), [-1, -1], size=3, timeout=1.5)):
        assert "2 of 3 processes" in str(outcome)


@pytest.mark.parametrize("way", AUTOMATIC)
@pytest.mark.parametrize("sizes", [(2, 3), (3, 2)], ids=str)
def test_different_world_sizes_are_named(way: Way, sizes: tuple[int, ...], tmp_path: Path) -> None:
    """Where ranks are given out, every process learns the sizes at once, in whatever order they
    come."""
    url = way(tmp_path)

    def join(size: int) -> Callable[[], Outcome]:
        return lambda: handlers.rendezvous(url, world_size=size, timeout=WAIT)

    for outcome in refusals(together(*map(join, sizes))):
        assert "different world sizes: [2, 3]" in str(outcome)


def test_a_file_that_is_in_use_need_not_be_removed(tmp_path: Path) -> None:
    """The next start empties what a dead job left, so the error speaks of living processes."""
    url = file(tmp_path)
    (outcome,) = refusals(meet(url, [-1], size=2, timeout=0.2))
    assert "remove it" not in str(outcome)
    assert f"processes of an earlier job may still use {url}" in str(outcome)


def test_missing_ranks_are_listed_in_a_file(tmp_path: Path) -> None:
    """Where every rank asked for a rank, those that nobody asked for are listed."""
    for outcome in refusals(meet(file(tmp_path), [3, 0], size=4, timeout=0.3)):
        assert outcome.ranks == (1, 2)
        assert "missing: ranks 1, 2" in str(outcome)


def test_dirty_file_serves_again(tmp_path: Path) -> None:
    """A file that a complete meeting left behind serves the next one."""
    url = file(tmp_path)
    first = meet(url, [0, 1])
    check_met(first)
    check_met(meet(url, [-1, -1]))


def test_file_of_a_dead_job_serves_again(tmp_path: Path) -> None:
    """What ranks that were killed on the way left in the file does not disturb the next job."""
    url = file(tmp_path)
    script = (
        "import os, signal, threading; from cydist.rendezvous import handlers as rendezvous\n"
        "from cydist.stores import FileStore\n"
        "add = FileStore.add\n"
        "def die(self, key, amount):\n"
        "    number = add(self, key, amount)\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "FileStore.add = die\n"
        f"rendezvous.rendezvous({url!r}, rank=1, world_size=3)"
    )
    died = subprocess.run([sys.executable, "-c", script], timeout=WAIT, check=False)
    assert died.returncode == -signal.SIGKILL
    assert (tmp_path / "meeting").stat().st_size > 8
    check_met(meet(url, [0, 1, 2]))


# The meeting


def test_explicit_store_serves_twice(master: TCPStore) -> None:
    """A second meeting in one store sees nothing of the first."""
    first = meet(None, [0, 1, 2], store=master)
    check_met(first)
    second = meet(None, [2, 1, 0], store=master)
    for store, _, _ in second:  # type: ignore[misc]
        assert not store.check(["from/0"])
    check_met(second)
    assert first[0][0].nonce != second[0][0].nonce  # type: ignore[index]


@pytest.mark.parametrize("here", [[0, 3], [1, 2]], ids=["with rank 0", "without rank 0"])
def test_missing_ranks_are_listed(here: list[int]) -> None:
    """Every rank that came learns which did not, by number."""
    missing = tuple(rank for rank in range(4) if rank not in here)
    for outcome in refusals(meet(None, here, size=4, store=HashStore(), timeout=0.2)):
        assert outcome.ranks == missing
        assert f"missing: ranks {', '.join(map(str, missing))}" in str(outcome)


@pytest.mark.parametrize("scheme", ["tcp", "env"])
def test_missing_ranks_are_listed_over_tcp(monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    """The ranks that wait at rank 0's store hear its list before the store closes."""
    port = free_port()
    monkeypatch.setenv("MASTER_ADDR", HOST)
    monkeypatch.setenv("MASTER_PORT", str(port))
    url = f"tcp://{HOST}:{port}" if scheme == "tcp" else "env://"
    for outcome in refusals(meet(url, [0, 2], size=4, timeout=0.5)):
        assert outcome.ranks == (1, 3)


def test_missing_rank_zero_is_named() -> None:
    """Where rank 0 holds the store and is absent, the others say so."""
    for outcome in refusals(meet(f"tcp://{HOST}:{free_port()}", [1, 2], size=3, timeout=0.2)):
        assert outcome.ranks == (0,)


def test_rank_taken_twice_is_hinted_at(master: TCPStore) -> None:
    """Two processes with one rank: the one that finds no meeting is told of the possibility."""
    outcomes = meet(None, [0, 1, 1], size=2, store=master, timeout=0.5)
    errors = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    assert len(errors) == 1
    assert "same rank" in str(errors[0])


def rank_in_a_process(port: int, rank: int, size: int, timeout: float) -> subprocess.Popen[str]:
    """A rank as a user starts it by hand; it prints how its start ended."""
    script = (
        "from cydist.rendezvous import handlers\n"
        "try:\n"
        f"    met = handlers.rendezvous('tcp://{HOST}:{port}', rank={rank}, world_size={size}, "
        f"timeout={timeout})\n"
        "    input()\n"
        "except RuntimeError as error:\n"
        "    print(error, flush=True)\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("complete", [False, True], ids=["a rank is missing", "all ranks are here"])
def test_two_processes_with_one_rank_are_named(
    complete: bool, monkeypatch: pytest.MonkeyPatch, secret: bytes, tmp_path: Path
) -> None:
    """The second process names the first; where the start fails for want of another rank, all
    ranks name both."""
    (tmp_path / "key").write_text(bytes(secret).hex())
    (tmp_path / "key").chmod(0o600)
    monkeypatch.setenv("CYDIST_SECRET_FILE", str(tmp_path / "key"))
    port, size = free_port(), 2 if complete else 3
    ranks = [rank_in_a_process(port, rank, size, 5) for rank in range(2)]
    seen = TCPStore(HOST, port, wait_for_workers=False, timeout=WAIT)
    seen.wait(["cydist//1/job" if complete else "cydist//1/here/1"])
    second = rank_in_a_process(port, 1, size, 1)
    said = second.communicate(timeout=WAIT)[0]
    first = f"process {ranks[1].pid} on {socket.gethostname()}"
    assert f"{first} has rank 1" in said
    for each in ranks:
        text = each.communicate("\n", timeout=WAIT)[0]
        assert (f"Rank 1 was started twice, as {first}" in text) is not complete
        assert (f"process {second.pid}" in text) is not complete
    seen.close()


def test_a_second_process_with_a_rank_says_so_after_rank_0_has_ended(
    monkeypatch: pytest.MonkeyPatch, secret: bytes, tmp_path: Path
) -> None:
    """It finds no store any more, and still names the process that has its rank."""
    (tmp_path / "key").write_text(bytes(secret).hex())
    (tmp_path / "key").chmod(0o600)
    monkeypatch.setenv("CYDIST_SECRET_FILE", str(tmp_path / "key"))
    port = free_port()
    ranks = [rank_in_a_process(port, rank, 2, WAIT) for rank in range(2)]
    seen = TCPStore(HOST, port, wait_for_workers=False, timeout=WAIT)
    seen.wait(["cydist//1/job"])
    second = rank_in_a_process(port, 1, 2, 3)
    for came in (b"1", b"2"):  # it has come again
        seen.watch("cydist//arrivals/1", came, ["never"], WAIT)
    seen.close()
    for each in ranks:
        each.kill()
        each.communicate(timeout=WAIT)
    said = second.communicate(timeout=WAIT)[0]
    assert f"another meeting: process {ranks[1].pid} on {socket.gethostname()} has rank 1" in said


def test_a_rank_of_another_world_size_says_so() -> None:
    """It finds rank 0's meeting, which is for another number of ranks, and names both numbers."""
    url = f"tcp://{HOST}:{free_port()}"
    zero, one = together(
        lambda: handlers.rendezvous(url, rank=0, world_size=3, timeout=0.5),
        lambda: handlers.rendezvous(url, rank=1, world_size=2, timeout=0.3),
    )
    assert "missing: ranks 1, 2" in str(zero)
    assert "rank 0 was told a world_size of 3, and rank 1 one of 2" in str(one)


@pytest.mark.parametrize("scheme", ["tcp", "env"])
def test_a_rank_may_be_ahead_of_rank_zero(monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    """A rank that meets again before rank 0 has left the last meeting waits for the next one."""
    port = free_port()
    monkeypatch.setenv("MASTER_ADDR", HOST)
    monkeypatch.setenv("MASTER_PORT", str(port))
    url = f"tcp://{HOST}:{port}" if scheme == "tcp" else "env://"
    first = meet(url, [0, 1])
    check_met(first)
    (served, _, _), (joined, _, _) = first  # type: ignore[misc]
    release(joined)
    root = served.underlying_store.underlying_store  # type: ignore[attr-defined]

    def follow() -> Outcome:
        root.watch("cydist//arrivals/1", b"1", ["never"], WAIT)  # until rank 1 has come again
        release(served)
        return handlers.rendezvous(url, rank=0, world_size=2, timeout=WAIT)

    def lead() -> Outcome:
        return handlers.rendezvous(url, rank=1, world_size=2, timeout=WAIT)

    check_met(together(follow, lead), [0, 1])


@pytest.mark.parametrize(
    ("ahead", "size", "name"),
    [pytest.param(1, 2, "next", id="another name"), pytest.param(2, 3, "", id="more ranks")],
)
def test_a_rank_of_the_next_job_waits_for_it(
    monkeypatch: pytest.MonkeyPatch, ahead: int, size: int, name: str
) -> None:
    """A rank that comes while rank 0 still serves another meeting does not join that one."""
    url = f"tcp://{HOST}:{free_port()}"
    first = meet(url, [0, 1])
    check_met(first)
    (served, _, _), (joined, _, _) = first  # type: ignore[misc]
    release(joined)
    came = threading.Event()
    come_again = handlers._retry

    def notice(*given: Any) -> None:
        came.set()
        come_again(*given)

    monkeypatch.setattr(handlers, "_retry", notice)

    def join(rank: int) -> Outcome:
        if rank != ahead:
            assert came.wait(WAIT)
        if rank == 0:
            release(served)
        return handlers.rendezvous(url, rank=rank, world_size=size, timeout=WAIT, group_name=name)

    check_met(together(*(partial(join, rank) for rank in range(size))), list(range(size)))


def test_a_rank_that_times_out_ends_the_check_in(master: TCPStore) -> None:
    """Ranks that have more time do not wait for it, nor meet without it."""
    longest: dict[int, Any] = {}
    thread = threading.Thread(
        target=lambda: longest.update(enumerate(meet(None, [0], 3, store=master.clone())))
    )
    thread.start()
    master.wait(["cydist//1/here/0"])
    late = meet(None, [1], 3, store=master, timeout=0.1) + meet(None, [2], 3, store=master)
    thread.join(2 * WAIT)
    for error in (*late, longest[0]):
        assert isinstance(error, RendezvousError), error
        assert error.ranks == (2,)


def test_a_rank_interrupted_in_check_in_is_missed(
    master: TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It had checked in, and does not come: the others are told."""

    def interrupted(*given: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(check_in, "_await_verdict", interrupted)
    with pytest.raises(KeyboardInterrupt):
        handlers.rendezvous(rank=1, world_size=3, store=master)
    (error,) = meet(None, [0], 3, store=master)
    assert isinstance(error, PeerFailedError)
    assert error.ranks == (1,)


def test_a_rank_that_rank_zero_does_not_follow_says_so() -> None:
    """Its timeout names rank 0, and the possibility that another process has its rank."""
    url = f"tcp://{HOST}:{free_port()}"
    first = meet(url, [0, 1])
    check_met(first)
    with pytest.raises(RendezvousError, match="each process has its own RANK") as caught:
        handlers.rendezvous(url, rank=1, world_size=2, timeout=0.1)
    assert caught.value.ranks == (0,)


def test_other_secret_is_refused() -> None:
    """A rank with another secret does not join, and is told what to share."""
    port = free_port()
    with_secret = TCPStore(HOST, port, None, True)
    auth.forget_secret()
    auth.set_secret(auth.new_secret())
    with pytest.raises(AuthenticationError, match="CYDIST_SECRET_FILE"):
        handlers.rendezvous(f"tcp://{HOST}:{port}", rank=1, world_size=2, timeout=WAIT)
    with_secret.close()
