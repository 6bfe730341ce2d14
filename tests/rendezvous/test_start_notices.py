"""What a job's start says on stderr while something is missing, on both sides."""

from __future__ import annotations

import errno
import re
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
from transport_ranks import free_port

from cydist import waiting
from cydist.backends.host.addresses import Address, check_reachable
from cydist.errors import (
    AuthenticationError,
    DistTimeoutError,
    RendezvousError,
    StoreTimeoutError,
)
from cydist.net.interfaces import why_unreachable
from cydist.rendezvous import handlers, launcher_env
from cydist.stores import HashStore, TCPStore
from cydist.stores.tcp import _Pool

pytestmark = pytest.mark.usefixtures("secret", "soon")

HOST = "127.0.0.1"
TIMEOUT = 0.5  # of what is to fail
WAIT = 30


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Notices come almost at once, and often."""
    monkeypatch.setattr(waiting, "FIRST_NOTICE", 0.02)
    monkeypatch.setattr(waiting, "NEXT_NOTICE", 0.05)


def said_meanwhile(capsys: pytest.CaptureFixture[str], host: str, port: int) -> list[str]:
    """What a user of a store that is not there says until it gives up."""
    with pytest.raises(StoreTimeoutError):
        TCPStore(host, port, timeout=TIMEOUT)
    return capsys.readouterr().err.splitlines()


def test_notices_are_repeated() -> None:
    """The first comes after one time, the next ones after another, with the seconds waited."""
    said: list[object] = []
    notices = waiting.WaitNotices(said.append)
    end = time.monotonic() + WAIT
    while len(said) < 3 and time.monotonic() < end:
        notices.say_if_due(lambda seconds: f"waited {seconds:.1f}")
    assert len(said) == 3
    assert all(re.fullmatch(r"waited \d+\.\d\n", str(each)) for each in said)


def test_nobody_listens(capsys: pytest.CaptureFixture[str]) -> None:
    """A refused connection to a name is called so, and the name is not blamed."""
    port = free_port()
    lines = said_meanwhile(capsys, "localhost", port)
    assert lines
    assert re.match(
        rf"cydist: {socket.gethostname()} \(process \d+\) has waited \d+ s for the store at "
        rf"localhost:{port}: .*Connection refused: localhost is this host itself, and no process "
        "listens",
        lines[0],
    )


def test_a_name_that_nobody_knows(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is named, and taken for misspelt."""
    ask = socket.getaddrinfo

    def unknown(host: object, port: int, *rest: int) -> object:
        if not rest[-1] & socket.AI_NUMERICHOST:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return ask(host, port, *rest)  # type: ignore[call-overload]

    monkeypatch.setattr(socket, "getaddrinfo", unknown)
    lines = said_meanwhile(capsys, "hots0", free_port())
    assert lines
    assert "knows no 'hots0': is it misspelt?" in lines[0]


@pytest.fixture
def blocked_port() -> Iterator[int]:
    """The kernel drops every further packet to it, as a firewall does: its queue is full."""
    with socket.socket() as listener:
        listener.bind((HOST, 0))
        listener.listen(0)
        with socket.create_connection(listener.getsockname(), WAIT):
            yield listener.getsockname()[1]


def test_a_blocked_port(capsys: pytest.CaptureFixture[str], blocked_port: int) -> None:
    """A port that answers nothing is told apart from one without a listener, long before the
    timeout."""
    with pytest.raises(StoreTimeoutError, match="a firewall drops packets"):
        TCPStore(HOST, blocked_port, timeout=1.5)
    assert "nothing answers: the host is off, or a firewall drops" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (OSError(errno.ENETUNREACH, "Network is unreachable"), "no route there"),
        (OSError(errno.EHOSTUNREACH, "No route to host"), "no route there"),
        (OSError(errno.EINVAL, "Invalid argument"), "a route or a firewall of this host forbids"),
        (OSError(errno.EACCES, "Permission denied"), "a route or a firewall of this host forbids"),
        (OSError(errno.EPERM, "Not permitted"), "a route or a firewall of this host forbids"),
        (ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused"), "no process listens"),
        (TimeoutError("timed out"), "nothing answers"),
        (DistTimeoutError("no handshake in time"), "what listens there has accepted"),
        (socket.gaierror(socket.EAI_AGAIN, "Temporary failure"), "the name service of this host"),
    ],
)
def test_each_reason_has_words_of_its_own(error: Exception, words: str) -> None:
    """The system's text stays, and what may be the reason follows."""
    text = why_unreachable("host0", error)
    assert text.startswith(str(error))
    assert words in text


@pytest.mark.parametrize(
    ("host", "itself"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("host0", False)],
)
def test_a_host_that_takes_itself_for_host_0(host: str, itself: bool) -> None:
    """An address that each host has for itself is told apart from another host."""
    error = ConnectionRefusedError(errno.ECONNREFUSED, "Connection refused")
    text = why_unreachable(host, error)
    assert (f"{host} is this host itself" in text, "the host is there" in text) == (
        itself,
        not itself,
    )


def test_rank_0_says_who_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    """With the number of ranks that are here."""
    with pytest.raises(RendezvousError, match="missing: ranks 1, 2"):
        handlers.rendezvous(
            f"tcp://{HOST}:{free_port()}", rank=0, world_size=3, timeout=TIMEOUT
        )  # fmt: skip
    lines = capsys.readouterr().err.splitlines()
    assert lines
    where = re.escape(socket.gethostname())
    assert re.fullmatch(
        rf"cydist: rank 0 on {where} has waited \d+ s for ranks 1, 2: 1 of 3 ranks is here",
        lines[0],
    )


def test_the_launchers_queue(capsys: pytest.CaptureFixture[str]) -> None:
    """A rank that a launcher lets wait for rank 0 says so, though its connection stands."""
    with socket.create_server((HOST, 0)) as launcher:
        port = launcher.getsockname()[1]
        with pytest.raises(StoreTimeoutError, match="is the master"):
            TCPStore(HOST, port, timeout=TIMEOUT, awaited=True)
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 1
    here = re.escape(socket.gethostname())
    assert re.fullmatch(
        rf"cydist: {here} \(process \d+\) has waited \d+ s for rank 0, in whose place the launcher "
        rf"listens at {HOST}:{port}: rank 0 has not come to init_process_group",
        lines[0],
    )


def test_an_address_in_a_shared_store(capsys: pytest.CaptureFixture[str]) -> None:
    """A rank that waits for rank 0's address says so, and where it looks."""
    before = threading.enumerate()  # a rank of another test may still wait
    with pytest.raises(RendezvousError, match="rank 0 has not said where its store is"):
        handlers.rendezvous_through(
            HashStore(), lambda deadline: HOST, rank=1, world_size=2, timeout=TIMEOUT
        )
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) > 1
    assert re.fullmatch(
        rf"cydist: rank 1 on {re.escape(socket.gethostname())} has waited \d+ s for rank 0, whose "
        "address is not in torch's store yet",
        lines[0],
    )
    left = [each for each in threading.enumerate() if each not in before]
    assert not [each for each in left if each.name == "cydist-notices"]


def test_a_secret_that_differs_is_told_on_both_sides(capsys: pytest.CaptureFixture[str]) -> None:
    """The rank that has it fails at once; rank 0 says whom it refused, while it waits and in its
    error."""
    port = free_port()
    with ThreadPoolExecutor() as threads:
        zero = threads.submit(
            handlers.rendezvous, f"tcp://{HOST}:{port}", rank=0, world_size=2, timeout=2.0
        )
        other = _Pool(HOST, port, b"another secret of thirty-two bytes"[:32], launcher_env.job_id())
        with pytest.raises(AuthenticationError, match="do not share one secret"):
            other.connect(time.monotonic() + WAIT, patient=True)
        with pytest.raises(RendezvousError, match=r"missing: rank 1\. .*do not share one secret"):
            zero.result(WAIT)
    said = capsys.readouterr().err
    here = re.escape(socket.gethostname())
    assert re.search(
        rf"1 of 2 ranks is here\. A missing rank may be one that was refused: {here} and "
        r"127\.0\.0\.1:\d+ refused each other's connection: the two do not share one secret",
        said,
    )


def test_only_a_few_refusals_are_kept() -> None:
    """Unauthenticated clients fill no memory; the latest of one address replaces its earlier."""
    import selectors

    from cydist.net.acceptor import MOST_REFUSALS, Acceptor

    with selectors.DefaultSelector() as selector:
        acceptor = Acceptor(selector, bytes(32), b"test", "job")
        try:
            for number in range(100):
                acceptor._keep_refusal(f"10.0.0.{number}", f"{number}")
            acceptor._keep_refusal("10.0.0.98", "again")
            assert [*acceptor.refusals.values()] == ["96", "97", "99", "again"]
            assert len(acceptor.refusals) == MOST_REFUSALS
        finally:
            acceptor.close()


@pytest.mark.parametrize("loopback", ["127.0.0.1", "127.1.2.3", "::1"])
def test_a_loopback_address_of_another_host(loopback: str) -> None:
    """Is an error of the start, and no lost rank in the first call. Ranks of one host may use it,
    and so may containers of one host, whose names differ."""
    near = Address(0, "host0/boot0", [[("10.0.0.1", 4)]])
    far = Address(1, "host1/boot1", [[("10.0.0.2", 5)], [(loopback, 5)]])
    with pytest.raises(RendezvousError, match=r"rank 1 on host1 .*CYDIST_SOCKET_IFNAME") as found:
        check_reachable([near, far])
    assert found.value.ranks == (1,)
    assert "where rank 0 on host0 cannot reach it" in str(found.value)
    check_reachable([near._replace(host="host0/boot1"), far])
    check_reachable([near._replace(host="host0/"), far])
    check_reachable([near, far._replace(lanes=[[(loopback, 5), ("10.0.0.2", 5)]])])


@pytest.mark.parametrize("address", ["fe80::1%eth0", "fe80::1"])
def test_a_link_local_address(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As MASTER_ADDR it is refused, on every rank, with what to do."""
    monkeypatch.setenv("MASTER_ADDR", address)
    monkeypatch.setenv("MASTER_PORT", "29500")
    for rank in range(2):
        with pytest.raises(ValueError, match=r"link-local address.*or its name"):
            handlers.rendezvous(rank=rank, world_size=2, timeout=TIMEOUT)
