"""`python -m cydist.bench job`: collectives of a job that a launcher has started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from jobs_on_hosts import job_on
from network_hosts import ROOT, network_of, require_hosts

import cydist
from cydist.bench import job
from cydist.bench.peers import Bound, TorchLike, same
from cydist.bench.rank_loop import Session
from cydist.bench.raw_ring import RawRing
from cydist.errors import counted

LIMIT = 100.0
PORT = 29880
ARGUMENTS = ["-m", "cydist.bench", "job", "--ops", "all_reduce,barrier", "--rounds", "2"]


def test_a_job_of_one_host(tmp_path: Path) -> None:
    """Any launcher of one host will do; nothing is sent to others."""
    file = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, "-m", "cydist.run", "--nproc-per-node", "2", *ARGUMENTS, "--sizes", "1Ki",
         "--json", str(file)],
        capture_output=True, text=True, timeout=LIMIT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "2 on 1 host: 0 0" in done.stdout
    found: dict[str, Any] = json.loads(file.read_text())
    assert [cell["op"] for cell in found["cells"]] == ["all_reduce", "barrier"]
    for cell in found["cells"]:
        assert cell["participants"]["cydist"]["wrong"] == 0
        assert len(cell["participants"]["cydist"]["rounds"]) == 2


class Lazy(TorchLike):
    """Does as Open MPI: rank 0's call returns with bytes for rank 1, which the next one sends."""

    arrived = threading.Semaphore(0)
    left = False

    def progress(self) -> None:
        if self.left:
            self.left = False
            self.arrived.release()

    def bind(self, op: str, send: Any, recv: Any) -> Bound:
        function, arguments = super().bind(op, send, recv)

        def call(*given: Any) -> None:
            self.progress()
            function(*given)
            if self.rank == 0:
                self.left = True
            else:
                assert self.arrived.acquire(timeout=LIMIT)

        return call, arguments


def test_a_librarys_messages_move_until_all_ranks_have_them() -> None:
    """A rank that turned to another library at once would let others wait for ever."""

    def body(rank: int) -> Any:
        sessions = {"lazy": Session(Lazy(cydist, same, {}))}
        command = {"do": "case", "op": "all_reduce", "count": 4, "dtype": "float32"}
        return job._answer(sessions, "lazy", command)["wrong"]

    assert cydist.testing.run_threads(body, 2, "inproc") == [0, 0]


def job_of_two_hosts(
    tmp_path: Path, places: list[int], nbytes: int, *more: str
) -> tuple[list[str], list[dict[str, Any]]]:
    """Return what rank 0 prints, and the cells that it saves."""
    require_hosts()
    file = tmp_path / "figures.json"
    command = [*ARGUMENTS, "--sizes", nbytes, "--json", file, *more]
    with ExitStack() as stack:
        _, hosts = stack.enter_context(network_of(2, tmp_path / "hosts"))
        for host in hosts:
            host.use_congestion_control("reno")
        ranks = stack.enter_context(job_on(hosts, places, command, tmp_path, PORT))
        lines = []
        while line := ranks[0].line(LIMIT):
            lines.append(line)
        assert [rank.ended(LIMIT) for rank in ranks] == [0] * len(places)
    cells: list[dict[str, Any]] = json.loads(file.read_text())["cells"]
    return lines, cells


def test_a_job_of_two_hosts(tmp_path: Path) -> None:
    """It says what each host sends for a call, which share of the link that is, and by which
    congestion control."""
    nbytes = 1 << 20
    lines, cells = job_of_two_hosts(tmp_path, [0, 1, 0, 1], nbytes, "--rate", "10gbit")
    assert any(line.endswith("4 on 2 hosts: 0 1 0 1") for line in lines)
    assert any("reno (congestion control" in line for line in lines)
    (row,) = [line.split() for line in lines if line.startswith("all_reduce ")]
    assert row[2:4] == ["cydist", "lanes"]
    assert row[-1].endswith("%")
    sent = cells[0]["host_sends"]["cydist"]
    assert nbytes <= sent <= 1.1 * nbytes


def test_a_congestion_control_that_is_not_allowed() -> None:
    """The script says so before it makes hosts, and where to allow it."""
    require_hosts()
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/bench-hosts", "--congestion", "none_such"],
        capture_output=True, text=True, timeout=LIMIT, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith("--congestion: none_such is none of ")
    assert done.stderr.endswith(
        "root add it to /proc/sys/net/ipv4/tcp_allowed_congestion_control\n"
    )


@pytest.mark.parametrize("shared", [False, True], ids=["own", "shared"])
def test_hosts_have_cores_of_their_own_unless_they_share_them(shared: bool) -> None:
    """As hosts of a network have. The machine of the header is that of rank 0's host."""
    require_hosts()
    cores = len(os.sched_getaffinity(0))
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/bench-hosts", "--places", "0,1,0,1", "--rounds", "1",
         "--ops", "barrier", *(["--shared-cores"] if shared else [])],
        capture_output=True, text=True, timeout=LIMIT, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "4 on 2 hosts: 0 1 0 1" in done.stdout
    assert f", {counted(cores if shared or cores < 2 else cores // 2, 'core')}, " in done.stdout


def test_a_raw_connection_between_two_hosts(tmp_path: Path) -> None:
    """It moves as many bytes, and is no peer: the limit of what sockets can reach."""
    nbytes = 1 << 20
    _, (reduced, _) = job_of_two_hosts(tmp_path, [0, 1], nbytes, "--vs", "raw")
    assert reduced["participants"]["raw"]["wrong"] == 0
    assert all(nbytes <= sent <= 1.1 * nbytes for sent in reduced["host_sends"].values())


def test_raw_connections_from_host_to_host(tmp_path: Path) -> None:
    """Each of several ranks has one, and moves its share of the bytes. A barrier has none."""
    nbytes = 1 << 20
    _, (reduced, barrier) = job_of_two_hosts(tmp_path, [0, 1, 0, 1], nbytes, "--vs", "raw")
    assert reduced["participants"]["raw"]["rounds"]
    assert all(nbytes <= sent <= 1.1 * nbytes for sent in reduced["host_sends"].values())
    assert "no barrier" in barrier["participants"]["raw"]["failure"]


def test_a_broadcast_over_raw_connections(tmp_path: Path) -> None:
    """It is sent once. The last bytes may leave after the call."""
    nbytes = 1 << 20
    only = ("--vs", "raw", "--ops", "broadcast")
    _, (sent,) = job_of_two_hosts(tmp_path, [0, 0, 1, 1], nbytes, *only)
    assert all(nbytes / 2 <= each <= 1.1 * nbytes for each in sent["host_sends"].values())


def test_raw_connections_need_alike_hosts() -> None:
    """Else some ranks have none to talk to."""
    with pytest.raises(ValueError, match="not 2 and 1"):
        RawRing(0, ["a", "a", "b"], "127.0.0.1", lambda thing: [thing] * 3, lambda: None)


RECEIVER = """
import socket
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as here:
    here.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
    here.bind(("", 29890))
    print("ready", flush=True)
    data, sender = here.recvfrom(9)
    here.sendto(data, sender)
    received = 0
    while here.recv(9) == b"counted":
        received += 1
    print(received, flush=True)
"""
SENDER = """
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as here:
    there = sys.argv[1], 29890
    here.sendto(b"first", there)
    print(here.recv(9), flush=True)
    sys.stdin.readline()
    for text in [b"counted"] * 400 + [b"end"] * 100:
        here.sendto(text, there)
"""


def test_hosts_that_lose_packets(tmp_path: Path) -> None:
    """`scripts/bench-hosts --loss` rests on this: of 400 packets half do not arrive, by chance."""
    require_hosts()
    with network_of(2, tmp_path / "hosts") as (_, hosts), ExitStack() as stack:
        receiver = hosts[1].start(["-c", RECEIVER], {})
        stack.callback(receiver.end)
        assert receiver.line() == "ready"
        sender = hosts[0].start(["-c", SENDER, hosts[1].address], {})
        stack.callback(sender.end)
        assert sender.line() == "b'first'"
        hosts[1].lose(50)
        sender.tell("go")
        received = int(receiver.line())
        assert sender.ended() == 0
    assert 100 < received < 300  # ten standard deviations


@pytest.mark.parametrize(("text", "bits"), [("1gbit", 1e9), ("2.5Gbit", 2.5e9), ("100mbit", 1e8)])
def test_rates(text: str, bits: float) -> None:
    """As tc takes them."""
    assert job.rate(text) == bits


@pytest.mark.parametrize("text", ["", "1", "0gbit", "gbit", "1gb"])
def test_wrong_rates(text: str) -> None:
    """Anything else is refused."""
    with pytest.raises(ValueError, match="is not a rate"):
        job.rate(text)
