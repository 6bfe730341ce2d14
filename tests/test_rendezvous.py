"""Meeting by every URL, by a store, and through what launchers leave in the environment."""

from __future__ import annotations

import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from cydist import auth, launchers, multicast, rendezvous
from cydist.errors import (
    AuthenticationError,
    RendezvousError,
)
from cydist.stores import HashStore, Store, TCPStore
from cydist.stores.members import release
from transports import free_port

HOST = "127.0.0.1"
WAIT = 30
Outcome = tuple[Store, int, int] | Exception

VARIABLES = {name for each in launchers.LAUNCHERS for name in each.rank + each.size + each.job}
VARIABLES |= {name for each in launchers.LAUNCHERS for name in each.local_rank + each.local_size}
VARIABLES |= {
    "MASTER_ADDR", "MASTER_PORT", "CYDIST_MASTER_ADDR", "CYDIST_MASTER_PORT", "CYDIST_RUN_ID",
    "CYDIST_STORE_FD", "TORCHELASTIC_USE_AGENT_STORE", "PMIX_RANK", "HYDI_CONTROL_FD",
    "CYDIST_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME",
}  # fmt: skip


@pytest.fixture(autouse=True)
def alone(secret: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No launcher, a secret, announcements that stay on this host."""
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(multicast, "HOPS", 0)


def together(*calls: Callable[[], Any]) -> list[Any]:
    """Run the calls at once, each on a thread; results or exceptions, in order."""
    results: list[Any] = [None] * len(calls)

    def run(i: int) -> None:
        try:
            results[i] = calls[i]()
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * WAIT)
    return results


def test_an_error_that_is_kept_does_not_hold_the_port() -> None:
    """Rank 0 calls again after each timeout, though what it caught refers to all that it had."""
    url, caught = f"tcp://{HOST}:{free_port()}", []
    for _ in range(3):
        with pytest.raises(RendezvousError, match="missing: rank 1") as error:
            rendezvous.rendezvous(url, rank=0, world_size=2, timeout=0.05)
        caught.append(error)
    assert len(caught) == 3


def meet(
    method: str | None, ranks: list[int], size: int | None = None, **more: Any
) -> list[Outcome]:
    """All ranks call rendezvous with these arguments; -1 asks for any rank."""
    timeout = more.pop("timeout", WAIT)
    world_size = len(ranks) if size is None else size

    def one(rank: int) -> Callable[[], Outcome]:
        return lambda: rendezvous.rendezvous(
            method, rank=rank, world_size=world_size, timeout=timeout, **more
        )

    return together(*(one(rank) for rank in ranks))


def check_met(outcomes: list[Outcome], ranks: list[int] | None = None) -> None:
    """Everybody met: different ranks (those asked for), one size, one meeting, one store."""
    size = len(outcomes)
    met = []
    for outcome in outcomes:
        assert isinstance(outcome, tuple), outcome
        met.append(outcome)
    assert {their_size for _, _, their_size in met} == {size}
    assert sorted(rank for _, rank, _ in met) == list(range(size))
    if ranks is not None:
        asked = [(want, rank) for want, (_, rank, _) in zip(ranks, met, strict=True) if want >= 0]
        assert all(want == rank for want, rank in asked)
    assert len({store.get("job") for store, _, _ in met}) == 1
    for store, rank, _ in met:
        store.set(f"from/{rank}", str(rank))
    for store, _, _ in met:
        assert store.multi_get([f"from/{r}" for r in range(size)]) == [
            str(r).encode() for r in range(size)
        ]


def refusals(outcomes: list[Outcome]) -> list[RendezvousError]:
    """Nobody met: everybody's error."""
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
    """Who asks for a rank has it, whoever comes first; the others share the rest."""
    ranks = [-1, 0, -1, 2]
    check_met(meet(way(tmp_path), ranks), ranks)


@pytest.mark.parametrize("way", AUTOMATIC)
def test_group_names_keep_jobs_apart(way: Way, tmp_path: Path) -> None:
    """Two jobs at one address with different names do not see each other."""
    url = way(tmp_path)

    def join(name: str) -> Callable[[], Outcome]:
        return lambda: rendezvous.rendezvous(url, world_size=2, timeout=WAIT, group_name=name)

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
    for outcome in refusals(meet(way(tmp_path), [-1, -1], size=3, timeout=0.5)):
        assert "2 of 3 processes" in str(outcome)


def test_missing_ranks_are_listed_in_a_file(tmp_path: Path) -> None:
    """Where everybody asked for a rank, those that nobody asked for are listed."""
    for outcome in refusals(meet(file(tmp_path), [3, 0], size=4, timeout=0.3)):
        assert outcome.ranks == (1, 2)
        assert "missing: rank 1, 2" in str(outcome)


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
        "import os, signal, threading; from cydist import rendezvous\n"
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
    assert first[0][0].get("job") != second[0][0].get("job")  # type: ignore[index]


@pytest.mark.parametrize("here", [[0, 3], [1, 2]], ids=["with rank 0", "without rank 0"])
def test_missing_ranks_are_listed(here: list[int]) -> None:
    """Every rank that came learns which did not, by number."""
    missing = tuple(rank for rank in range(4) if rank not in here)
    for outcome in refusals(meet(None, here, size=4, store=HashStore(), timeout=0.2)):
        assert outcome.ranks == missing
        assert f"missing: rank {', '.join(map(str, missing))}" in str(outcome)


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
        return rendezvous.rendezvous(url, rank=0, world_size=2, timeout=WAIT)

    def lead() -> Outcome:
        return rendezvous.rendezvous(url, rank=1, world_size=2, timeout=WAIT)

    check_met(together(follow, lead), [0, 1])


def test_a_rank_that_rank_zero_does_not_follow_says_so() -> None:
    """Its timeout names rank 0, and the possibility that another process has its rank."""
    url = f"tcp://{HOST}:{free_port()}"
    first = meet(url, [0, 1])
    check_met(first)
    with pytest.raises(RendezvousError, match="same rank") as caught:
        rendezvous.rendezvous(url, rank=1, world_size=2, timeout=0.1)
    assert caught.value.ranks == (0,)


def test_other_secret_is_refused() -> None:
    """A rank with another secret does not join, and is told what to share."""
    port = free_port()
    with_secret = TCPStore(HOST, port, None, True)
    auth.forget_secret()
    auth.set_secret(auth.new_secret())
    with pytest.raises(AuthenticationError, match="CYDIST_SECRET_FILE"):
        rendezvous.rendezvous(f"tcp://{HOST}:{port}", rank=1, world_size=2, timeout=WAIT)
    with_secret.close()


# The environment


def test_query_gives_rank_and_size() -> None:
    """The URL may carry what the call does not say."""
    url = f"tcp://{HOST}:{free_port()}"
    check_met(
        together(
            lambda: rendezvous.rendezvous(f"{url}?rank=1&world_size=2", timeout=WAIT),
            lambda: rendezvous.rendezvous(f"{url}?world_size=2", rank=0, timeout=WAIT),
        )
    )


def test_env_reads_the_four_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are enough."""
    port = free_port()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("MASTER_ADDR", HOST)
    monkeypatch.setenv("MASTER_PORT", str(port))
    store, rank, size = rendezvous.rendezvous(timeout=timedelta(seconds=WAIT))
    assert (rank, size) == (0, 1)
    assert TCPStore(HOST, port, timeout=WAIT).check(["cydist//1/job"])
    assert store.check(["job"])


def test_arguments_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """rank and world_size of the call count, address and port come from the variables."""
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("WORLD_SIZE", "9")
    monkeypatch.setenv("MASTER_ADDR", HOST)
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    check_met(meet("env://", [0, 1]))


def test_our_twins_win(monkeypatch: pytest.MonkeyPatch) -> None:
    """CYDIST_MASTER_PORT is used where MASTER_PORT belongs to another library."""
    with socket.create_server((HOST, 0)) as other:
        monkeypatch.setenv("MASTER_ADDR", HOST)
        monkeypatch.setenv("MASTER_PORT", str(other.getsockname()[1]))
        monkeypatch.setenv("CYDIST_MASTER_PORT", str(free_port()))
        check_met(meet("env://", [0, 1]))


@pytest.mark.parametrize(
    ("variables", "says"),
    [
        ({"MASTER_ADDR": HOST}, "MASTER_PORT"),
        ({"MASTER_PORT": "29500"}, "MASTER_ADDR"),
        ({"MASTER_ADDR": HOST, "MASTER_PORT": "http"}, "MASTER_PORT must be"),
        ({}, "MASTER_ADDR and MASTER_PORT"),
    ],
    ids=["no port", "no address", "no number", "nothing"],
)
def test_missing_variables_are_named(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], says: str
) -> None:
    """env:// says which variable it lacks."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=says):
        rendezvous.rendezvous(rank=1, world_size=2, timeout=0)


def test_launchers_socket_is_listened_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 serves on the socket that the launcher bound, and the variable is used up."""
    listener = socket.socket()
    listener.bind((HOST, 0))
    monkeypatch.setenv("MASTER_ADDR", HOST)
    monkeypatch.setenv("MASTER_PORT", str(listener.getsockname()[1]))
    monkeypatch.setenv("CYDIST_STORE_FD", str(listener.detach()))
    outcomes = meet("env://", [0, 1])
    assert "CYDIST_STORE_FD" not in os.environ
    check_met(outcomes)


def test_launchers_socket_is_for_its_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """A URL may name another port: rank 0 serves there, and the socket stays for env://."""
    listener = socket.socket()
    listener.bind((HOST, 0))
    monkeypatch.setenv("MASTER_ADDR", HOST)
    monkeypatch.setenv("MASTER_PORT", str(listener.getsockname()[1]))
    monkeypatch.setenv("CYDIST_STORE_FD", str(listener.detach()))
    check_met(meet(f"tcp://{HOST}:{free_port()}", [0, 1]))
    check_met(meet("env://", [0, 1]))
    assert "CYDIST_STORE_FD" not in os.environ


def test_under_torchrun_the_agents_store_shows_the_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """MASTER_PORT is held by torch's own store: rank 0's address is published there, and no
    secret; a second meeting works too."""
    torch_dist = pytest.importorskip("torch.distributed")
    agent = torch_dist.TCPStore(HOST, 0, None, True, wait_for_workers=False)
    monkeypatch.setenv("MASTER_ADDR", HOST)
    monkeypatch.setenv("MASTER_PORT", str(agent.port))
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    for _ in range(2):
        check_met(meet("env://", [0, 1, 2]))
    held = b" ".join(agent.get(key) for key in agent.list_keys() if "cydist" in key)
    assert auth.secret() not in held
    assert auth.secret().hex().encode() not in held


def test_one_host_meets_without_an_address(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Under an MPI launcher on one host the ranks meet in the user's directory, twice, and leave
    nothing there."""
    monkeypatch.setenv("PMIX_NAMESPACE", "job-1")
    monkeypatch.setenv("OMPI_COMM_WORLD_RANK", "0")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "3")
    monkeypatch.setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "3")
    monkeypatch.setattr(launchers, "has_mpi4py", lambda: False)
    for _ in range(2):
        check_met(meet("env://", [0, 1, 2]))
    (directory,) = tmp_path.iterdir()
    assert directory.stat().st_mode & 0o777 == 0o700
    assert list(directory.iterdir()) == []


def test_several_hosts_need_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks on several hosts without mpi4py: the error names MASTER_ADDR."""
    monkeypatch.setenv("PMI_RANK", "1")
    monkeypatch.setenv("PMI_SIZE", "4")
    monkeypatch.setenv("MPI_LOCALNRANKS", "2")
    monkeypatch.setattr(launchers, "has_mpi4py", lambda: False)
    with pytest.raises(ValueError, match=r"MASTER_ADDR.*hydra"):
        rendezvous.rendezvous(timeout=0)


class FakeMPI:
    """MPI's messages among threads: what the meeting needs of mpi4py. Rank 0 sends."""

    BYTE = ANY_SOURCE = object()

    def __init__(self, size: int) -> None:
        self.size = size
        self.sent: queue.Queue[bytes] = queue.Queue()
        self.COMM_WORLD = self

    def Get_size(self) -> int:
        return self.size

    def Get_rank(self) -> int:
        return 0

    def Issend(self, content: list[Any], to: int, tag: int) -> FakeRequest:
        self.sent.put(bytes(content[0]))
        return FakeRequest(self.sent.empty)

    def Irecv(self, into: list[Any], source: object, tag: int) -> FakeRequest:
        def arrived() -> bool:
            try:
                into[0][:] = self.sent.get_nowait()
            except queue.Empty:
                return False
            return True

        return FakeRequest(arrived)


class FakeRequest:
    def __init__(self, test: Callable[[], bool]) -> None:
        self.Test = test

    def Cancel(self) -> None:
        pass


def test_mpi_carries_address_and_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """With MPI rank 0's address comes by its messages, and no file of the user is made."""
    auth.forget_secret()
    fake = FakeMPI(3)
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "3")
    monkeypatch.setenv("XDG_STATE_HOME", "/proc/nowhere")
    monkeypatch.setattr(launchers, "import_mpi", lambda: fake)
    monkeypatch.setattr(rendezvous, "public_address", lambda: HOST)
    check_met(meet("env://", [0, 1, 2]))


@pytest.mark.parametrize(("rank", "late"), [(0, (1, 2)), (1, (0,))], ids=["rank 0", "rank 1"])
def test_ranks_missing_from_mpi_are_named(
    monkeypatch: pytest.MonkeyPatch, rank: int, late: tuple[int, ...]
) -> None:
    """Over MPI, too, nobody waits longer than the timeout, and the error says for whom."""
    monkeypatch.setenv("PMI_RANK", str(rank))
    monkeypatch.setenv("PMI_SIZE", "3")
    monkeypatch.setattr(launchers, "import_mpi", lambda: FakeMPI(3))
    monkeypatch.setattr(rendezvous, "public_address", lambda: HOST)
    with pytest.raises(RendezvousError, match="timeout") as caught:
        rendezvous.rendezvous(timeout=0.05)
    assert caught.value.ranks == late
