"""Meeting through what users and launchers leave in the environment."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from queue import Empty, Queue
from typing import Any

import pytest
from thread_rendezvous import HOST, WAIT, check_met, meet, stand_alone, together
from transport_ranks import free_port

from cydist.errors import DistNetworkError, RendezvousError
from cydist.net import auth
from cydist.rendezvous import handlers, launcher_env, mpi_address
from cydist.stores import TCPStore


@pytest.fixture(autouse=True)
def alone(secret: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No launcher, a secret, announcements that stay on this host."""
    stand_alone(monkeypatch, tmp_path)


def test_query_gives_rank_and_size() -> None:
    """The URL may carry what the call does not say."""
    url = f"tcp://{HOST}:{free_port()}"
    check_met(
        together(
            lambda: handlers.rendezvous(f"{url}?rank=1&world_size=2", timeout=WAIT),
            lambda: handlers.rendezvous(f"{url}?world_size=2", rank=0, timeout=WAIT),
        )
    )


def test_env_reads_the_four_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are enough."""
    port = free_port()
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("MASTER_ADDR", HOST)
    monkeypatch.setenv("MASTER_PORT", str(port))
    store, rank, size = handlers.rendezvous(timeout=timedelta(seconds=WAIT))
    assert (rank, size) == (0, 1)
    assert TCPStore(HOST, port, timeout=WAIT).check(["cydist//1/job"])
    assert store.check(["job"])


def test_mpi_takes_torchs_placeholders(monkeypatch: pytest.MonkeyPatch) -> None:
    """rank=0 and world_size=0 on every rank, as torch's tutorial calls it: the launcher numbers the
    ranks."""
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")
    _, rank, size = handlers.rendezvous(timeout=WAIT, rank=0, world_size=0, backend="mpi")
    assert (rank, size) == (0, 1)


def test_other_backends_take_no_placeholders() -> None:
    """There world_size=0 is a mistake."""
    with pytest.raises(ValueError, match="rank must be from 0 to -1"):
        handlers.rendezvous(timeout=WAIT, rank=0, world_size=0, backend="tcp")


def test_arguments_win_over_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """rank and world_size of the call count, address and port come from the variables."""
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("WORLD_SIZE", "9")
    monkeypatch.setenv("MASTER_ADDR", HOST)
    monkeypatch.setenv("MASTER_PORT", str(free_port()))
    check_met(meet("env://", [0, 1]))


def test_cydists_own_variables_win(monkeypatch: pytest.MonkeyPatch) -> None:
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
        (
            {
                "MASTER_ADDR": HOST,
                "MASTER_PORT": "0",
                "TORCHELASTIC_USE_AGENT_STORE": "True",
            },
            "not '0': name a port to torchrun",
        ),
        ({}, "MASTER_ADDR and MASTER_PORT"),
    ],
    ids=["no port", "no address", "no number", "torchrun --master-port 0", "nothing"],
)
def test_missing_variables_are_named(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], says: str
) -> None:
    """env:// says which variable it lacks."""
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=says):
        handlers.rendezvous(rank=1, world_size=2, timeout=0)


def launched(monkeypatch: pytest.MonkeyPatch) -> socket.socket:
    """What a launcher sets, and the socket by which it listens."""
    listener = socket.create_server((HOST, 0))
    master = f"{HOST}:{free_port()}"
    monkeypatch.setenv("MASTER_ADDR", HOST)
    monkeypatch.setenv("MASTER_PORT", master.split(":")[1])
    monkeypatch.setenv("CYDIST_STORE_PORT", f"{listener.getsockname()[1]} {master}")
    monkeypatch.setenv("CYDIST_STORE_FD", str(listener.fileno()))
    return listener


def store_of(outcome: Any) -> TCPStore:
    """The job's store, in which these ranks met."""
    store = outcome[0]
    while not isinstance(store, TCPStore):
        store = store.underlying_store
    return store


def test_the_launchers_socket_is_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 serves by the socket of its launcher, the variable is used up, and MASTER_PORT is left
    alone; a second meeting is at the same place."""
    listener = launched(monkeypatch)
    port = listener.getsockname()[1]
    listener.detach()
    with socket.create_server((HOST, int(os.environ["MASTER_PORT"]))) as other:
        other.setblocking(False)
        for _ in range(2):
            outcomes = meet("env://", [0, 1])
            check_met(outcomes)
            assert "CYDIST_STORE_FD" not in os.environ
            for outcome in outcomes:
                assert store_of(outcome).port == port
                store_of(outcome).close()
        with pytest.raises(BlockingIOError):
            other.accept()


def test_a_copy_of_the_launchers_socket_keeps_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that rank 0 forked before its first meeting holds the socket: rank 0 can serve the
    next one at the same place."""
    listener = launched(monkeypatch)
    port = listener.getsockname()[1]
    with listener.dup():
        listener.detach()
        for _ in range(2):
            outcomes = meet("env://", [0, 1])
            check_met(outcomes)
            for outcome in outcomes:
                assert store_of(outcome).port == port
                store_of(outcome).close()


def test_the_launchers_socket_is_for_its_port(monkeypatch: pytest.MonkeyPatch) -> None:
    """A URL may name another port: rank 0 serves there, and the socket stays for env://."""
    launched(monkeypatch).detach()
    check_met(meet(f"tcp://{HOST}:{free_port()}", [0, 1]))
    check_met(meet("env://", [0, 1]))
    assert "CYDIST_STORE_FD" not in os.environ


@pytest.mark.parametrize("name", ["MASTER_PORT", "CYDIST_MASTER_PORT"])
def test_a_program_may_set_another_port(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The store is where the program says since, and not where the launcher listens."""
    with launched(monkeypatch):
        monkeypatch.setenv(name, str(free_port()))
        outcomes = meet("env://", [0, 1])
        check_met(outcomes)
        assert store_of(outcomes[0]).port == int(os.environ[name])


def test_a_wrong_port_of_the_store_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """As what it is: MASTER_PORT is right."""
    with launched(monkeypatch):
        place = os.environ["CYDIST_STORE_PORT"].partition(" ")[2]
        monkeypatch.setenv("CYDIST_STORE_PORT", f"70000 {place}")
        with pytest.raises(ValueError, match=r"CYDIST_STORE_PORT must be a number.*'70000'"):
            handlers.rendezvous("env://", rank=0, world_size=2, timeout=WAIT)


def test_a_rank_waits_where_the_launcher_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that comes before rank 0 waits for it until its own timeout, which may be longer than
    a server may be silent elsewhere; then it says who is missing."""
    monkeypatch.setattr(auth, "HANDSHAKE_TIMEOUT", 0.05)
    with launched(monkeypatch), pytest.raises(RendezvousError, match="rank 0 is missing") as caught:
        handlers.rendezvous("env://", rank=1, world_size=2, timeout=0.5)
    assert "timeout after 0." in str(caught.value)
    assert caught.value.ranks == (0,)


def test_a_lost_descriptor_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a program between launcher and rank 0 closed the descriptor and holds a copy, the port
    can't be bound: the error says what to do."""
    with launched(monkeypatch):
        lost = os.dup(0)
        os.close(lost)
        monkeypatch.setenv("CYDIST_STORE_FD", str(lost))
        with pytest.raises(DistNetworkError, match=rf"STORE_FD={lost} is not it.*close_fds=False"):
            handlers.rendezvous("env://", rank=0, world_size=2, timeout=WAIT)


@pytest.mark.parametrize("stale", ["closed", "file", "unix", "no number"])
def test_a_stale_descriptor_is_passed_over(monkeypatch: pytest.MonkeyPatch, stale: str) -> None:
    """Rank 0 opens a socket of its own where the variable names none, or one of another kind."""
    one, other = socket.socketpair()
    with one, other, open(os.devnull) as file:
        closed = os.dup(0)
        os.close(closed)
        said = {"closed": closed, "file": file.fileno(), "unix": one.fileno(), "no number": "x"}
        launched(monkeypatch).close()
        monkeypatch.setenv("CYDIST_STORE_FD", str(said[stale]))
        check_met(meet("env://", [0, 1], timeout=10))
        one.send(b"x")
        assert other.recv(1) == b"x"


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
    monkeypatch.setattr(launcher_env, "has_mpi4py", lambda: False)
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
    monkeypatch.setattr(launcher_env, "has_mpi4py", lambda: False)
    with pytest.raises(ValueError, match=r"MASTER_ADDR.*hydra"):
        handlers.rendezvous(timeout=0)


class FakeMPI:
    """MPI's messages among threads, between rank 0 and all others: what the meeting needs of
    mpi4py."""

    BYTE = ANY_SOURCE = object()

    def __init__(self, size: int) -> None:
        self.size = size
        self.sent: Queue[bytes] = Queue()
        self.answers: Queue[bytes] = Queue()
        self.carried = b""  # all that was sent
        self.COMM_WORLD = self

    def Get_size(self) -> int:
        return self.size

    def Get_rank(self) -> int:
        return 0

    def Issend(self, content: list[Any], to: int, tag: int) -> FakeRequest:
        queue = self.sent if to else self.answers
        queue.put(bytes(content[0]))
        self.carried += bytes(content[0])
        return FakeRequest(queue.empty)

    def Irecv(self, into: list[Any], source: object, tag: int) -> FakeRequest:
        queue = self.sent if source in (0, self.ANY_SOURCE) else self.answers

        def arrived() -> bool:
            try:
                into[0][:] = queue.get_nowait()
            except Empty:
                return False
            return True

        return FakeRequest(arrived)

    def Iprobe(self) -> bool:
        return False


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
    monkeypatch.setattr(launcher_env, "import_mpi", lambda: fake)
    monkeypatch.setattr(mpi_address, "public_address", lambda: HOST)
    with pytest.warns(RuntimeWarning, match="CYDIST_SECRET_FILE"):
        check_met(meet("env://", [0, 1, 2]))
    assert bytes(auth.secret()) in fake.carried


@pytest.mark.parametrize("same", [True, False])
def test_a_secret_that_all_share_does_not_travel(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, same: bool
) -> None:
    """Where all ranks have the same user's secret it stays where it is; a keyed hash shows it."""
    auth.forget_secret()
    fake = FakeMPI(3)
    monkeypatch.setenv("PMI_RANK", "0")
    monkeypatch.setenv("PMI_SIZE", "3")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setattr(launcher_env, "import_mpi", lambda: fake)
    monkeypatch.setattr(mpi_address, "public_address", lambda: HOST)
    found = auth.user_secret_tag
    if not same:
        monkeypatch.setattr(
            auth,
            "user_secret_tag",
            lambda nonce, create=False: found(nonce, create=True) if create else b"x" * 32,
        )
    with contextlib.ExitStack() as stack:
        if not same:
            stack.enter_context(pytest.warns(RuntimeWarning, match="share no"))
        check_met(meet("env://", [0, 1, 2]))
    kept = bytes.fromhex(auth.user_secret_path().read_text())
    assert (auth.secret() == kept) is same
    assert (bytes(auth.secret()) in fake.carried) is not same
    assert kept not in fake.carried


@pytest.mark.parametrize(("rank", "late"), [(0, (1, 2)), (1, (0,))], ids=["rank 0", "rank 1"])
def test_ranks_missing_from_mpi_are_named(
    monkeypatch: pytest.MonkeyPatch, rank: int, late: tuple[int, ...]
) -> None:
    """Over MPI, too, nobody waits longer than the timeout, and the error says for whom."""
    monkeypatch.setenv("PMI_RANK", str(rank))
    monkeypatch.setenv("PMI_SIZE", "3")
    monkeypatch.setattr(launcher_env, "import_mpi", lambda: FakeMPI(3))
    monkeypatch.setattr(mpi_address, "public_address", lambda: HOST)
    with pytest.raises(RendezvousError, match="timeout") as caught:
        handlers.rendezvous(timeout=0.05)
    assert caught.value.ranks == late
