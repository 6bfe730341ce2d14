"""Meeting by an address that rank 0 writes where the others look: another store, or a file.

What they find there may be left from an earlier start of the same job.
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest
from thread_rendezvous import HOST, WAIT, check_met, meet, stand_alone, together

from cydist.errors import AuthenticationError, DistStoreError, RendezvousError
from cydist.net import auth
from cydist.rendezvous import handlers, launcher_env
from cydist.rendezvous.address_note import Address, signed_address
from cydist.stores import FileStore, HashStore, Store, TCPStore
from cydist.stores.membership_store import release


@pytest.fixture(autouse=True)
def alone(secret: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No launcher, a secret."""
    stand_alone(monkeypatch, tmp_path)


class WatchedStore(HashStore):
    """A store that says when a rank has read an address off it."""

    def __init__(self) -> None:
        super().__init__()
        self.read = threading.Event()

    def get(self, key: str) -> bytes:
        value = super().get(key)
        self.read.set()
        return value


def met(shared_store: Store, rank: int, size: int = 2, timeout: float = WAIT) -> Any:
    return handlers.rendezvous_through(
        shared_store, lambda deadline: HOST, rank=rank, world_size=size, timeout=timeout
    )


def note(
    port: int, size: int = 2, purpose: str = "torch ", job: str = "", host: str = HOST
) -> bytes:
    """What a rank 0 of this secret writes, or has written at an earlier start."""
    return signed_address(Address(size, host, port, "0a0b0c0d"), purpose, job)


@contextmanager
def unused_port() -> Iterator[int]:
    """The port of a start whose ranks are gone: nobody listens."""
    with socket.socket() as closed:  # bound, so that nobody is given it
        closed.bind((HOST, 0))
        yield closed.getsockname()[1]


@contextmanager
def something_else() -> Iterator[int]:
    """Another program has the port by now, and answers in a language of its own."""
    with socket.create_server((HOST, 0)) as server:

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    connection.sendall(b"220 mail.example.org ESMTP")

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


@contextmanager
def an_earlier_start() -> Iterator[int]:
    """Rank 0 of an earlier start still serves its store."""
    store = TCPStore(HOST, 0, 2, True, WAIT, wait_for_workers=False, job="torchrun none 0a")
    yield store.port
    store.close()


@pytest.mark.parametrize("left", [unused_port, something_else, an_earlier_start])
def test_an_address_that_was_left_is_read_again(left: Callable[[], Any]) -> None:
    """Rank 1 comes first and finds an old address; it meets rank 0 all the same."""
    shared_store = WatchedStore()
    with left() as port:
        shared_store.set("address", note(port))

        def rank_0() -> Any:
            assert shared_store.read.wait(WAIT)
            return met(shared_store, 0)

        check_met(together(rank_0, lambda: met(shared_store, 1)))


def test_ranks_meet_again_by_the_same_shared_store() -> None:
    """Three meetings in a row, for which each rank comes when it has time."""
    shared_store = HashStore()

    def rank(number: int) -> Callable[[], Any]:
        def all_check_ins() -> Any:
            for _ in range(2):
                store, _, _ = met(shared_store, number)
                release(store)
            return met(shared_store, number)

        return all_check_ins

    check_met(together(rank(0), rank(1)))


def test_a_new_rank_meets_those_that_were_there_before() -> None:
    """A world that grew: its last rank has never looked at the store."""
    shared_store = HashStore()
    check_met(together(lambda: met(shared_store, 0), lambda: met(shared_store, 1)))
    check_met(together(*(lambda rank=rank: met(shared_store, rank, 3) for rank in range(3))))


def test_rank_zero_that_never_comes_is_named() -> None:
    """An address that nobody answers is an error at the deadline, which names rank 0."""
    shared_store = HashStore()
    with unused_port() as port:
        shared_store.set("address", note(port))
        with pytest.raises(RendezvousError, match="rank 0 is missing") as found:
            met(shared_store, 1, timeout=0.3)
    assert found.value.ranks == (0,)


def test_a_store_of_another_secret_is_an_error_before_the_deadline() -> None:
    """An address that stays and where another secret is known: nobody waits for the timeout."""
    shared_store = HashStore()
    ours = auth.secret()
    auth.forget_secret()
    auth.set_secret(bytes(auth.SECRET_BYTES))
    other = TCPStore(HOST, 0, 2, True, WAIT, wait_for_workers=False, job="0a0b0c0d")
    auth.forget_secret()
    auth.set_secret(ours)
    shared_store.set("address", note(other.port))
    try:
        with pytest.raises(AuthenticationError, match="secret"):
            met(shared_store, 1)
    finally:
        other.close()


def forged() -> dict[str, Callable[[int], str]]:
    """Notes that rank 0 of this job did not write for this purpose, each with an address at which
    nothing answers: to believe it would be to wait for the timeout."""

    def of_another_secret(port: int) -> str:
        ours = auth.secret()
        auth.forget_secret()
        auth.set_secret(bytes(auth.SECRET_BYTES))
        written = note(port)
        auth.forget_secret()
        auth.set_secret(ours)
        return written

    return {
        "unsigned": lambda port: f"{HOST} {port} 0a0b0c0d",
        "other secret": of_another_secret,
        "other job": lambda port: note(port, job="torchrun another"),
        "other purpose": lambda port: note(port, purpose="torch another group"),
        "other address": lambda port: note(port, host="127.0.0.9").replace(
            b"127.0.0.9", HOST.encode()
        ),
        "other world size": lambda port: note(port, size=3).replace(b"3 ", b"2 ", 1),
        "cut": lambda port: note(port)[:-1],
        "empty": lambda port: "",
        "no text": lambda port: "\N{SNOWMAN} \N{SNOWMAN}",
    }


@pytest.mark.parametrize("kind", forged())
def test_a_forged_address_is_refused_at_once(kind: str) -> None:
    """It leads the rank nowhere, and the error names the rank, the board and the secret."""
    shared_store = HashStore()
    with unused_port() as port:
        shared_store.set("address", forged()[kind](port))
        with pytest.raises(AuthenticationError, match=r"rank 1 .*rank 0 in torch's store.*secret"):
            met(shared_store, 1)


class ChangingStore(HashStore):
    """A store in which somebody writes another address before each look."""

    def get(self, key: str) -> bytes:
        self.set(key, os.urandom(8))
        return super().get(key)


def test_addresses_that_change_again_and_again_end_at_the_deadline() -> None:
    """Each is new, so none has been wrong for long."""
    shared_store = ChangingStore()
    shared_store.set("address", "")
    (error,) = together(lambda: met(shared_store, 1, timeout=0.3))
    assert isinstance(error, AuthenticationError)


def test_an_address_that_is_gone_again_is_a_typed_error() -> None:
    """Somebody removes it from another library's store when the rank has seen that it is there."""

    class Gone(HashStore):
        def get(self, key: str) -> bytes:
            raise RuntimeError("Socket Timeout")

    shared_store = Gone()
    shared_store.set("address", "")
    with pytest.raises(DistStoreError, match="the store failed: Socket Timeout"):
        met(shared_store, 1)


def test_a_forged_address_is_refused_without_authentication_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With a public key anybody can sign; what is damaged, or unsigned, is refused all the same."""
    monkeypatch.setenv("CYDIST_INSECURE", "1")
    shared_store = HashStore()
    shared_store.set("address", f"{HOST} 1 0a0b0c0d")
    with pytest.warns(RuntimeWarning), pytest.raises(AuthenticationError, match="rank 1"):
        met(shared_store, 1)


def test_an_address_for_a_world_of_another_size_is_read_again() -> None:
    """Until the deadline: rank 0 of a new start may come. The error tells both sizes."""
    shared_store = HashStore()
    with unused_port() as port:
        shared_store.set("address", note(port, size=3))
        with pytest.raises(RendezvousError, match=r"a world of 3 ranks, and rank 1 was told 2"):
            met(shared_store, 1, timeout=0.3)


def test_a_forged_address_that_rank_zero_replaces_does_no_harm() -> None:
    """Rank 1 comes first and reads it; it meets rank 0 all the same."""
    shared_store = WatchedStore()
    shared_store.set("address", "192.0.2.1 1 0a0b0c0d")

    def rank_0() -> Any:
        assert shared_store.read.wait(WAIT)
        return met(shared_store, 0)

    check_met(together(rank_0, lambda: met(shared_store, 1)))


@pytest.mark.parametrize("counts", [("0", "1"), ("3", "0")], ids="{0[0]} and {0[1]}".format)
def test_agents_that_counted_different_restarts_are_one_job(counts: tuple[str, str]) -> None:
    """Each agent of torchrun counts the restarts of its own workers."""
    common = {"RANK": "0", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "r"}
    names = {launcher_env.job_id(common | {"TORCHELASTIC_RESTART_COUNT": n}) for n in counts}
    assert names == {"torchrun r"}


def test_a_failed_start_does_not_stop_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of one host meet in a file, to which a rank of a start that was killed had written."""
    slurm = {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}
    slurm |= {"SLURM_PROCID": "0", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}
    for name, value in slurm.items():
        monkeypatch.setenv(name, value)
    path = str(launcher_env.job_file(launcher_env.job_id()))
    with ExitStack() as leftovers, unused_port() as port:
        left = FileStore(path, 3)
        leftovers.callback(left.close)
        job = launcher_env.job_id()
        left.set("address", note(port, purpose="host ", job=job))
        left.add("calls/0", 1)
        check_met(meet(None, [0, 1]))
