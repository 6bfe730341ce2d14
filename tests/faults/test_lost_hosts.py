"""Hosts that vanish, and hosts that only seem to: two hosts with two ranks each, in namespaces."""

from __future__ import annotations

import json
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from machine_stalls import MachineStalls
from network_hosts import Host, Network, Process, network_of, require_hosts

PROGRAM = "tests/programs/lost_host.py"
PORT = 29800
SHORT, DEFAULT = 3, 15  # CYDIST_PEER_TIMEOUT
LONG_ONES = [pytest.param(timeout, marks=pytest.mark.long) for timeout in (SHORT, DEFAULT)]
TIMEOUTS = [SHORT, LONG_ONES[1]]
LIMIT = 150.0  # of a job, and for each line of its ranks: more than any verdict takes

HERE, THERE = (0, 1), (2, 3)  # ranks of host0 and host1


class Job:
    """Four ranks that run one function of tests/programs/lost_host.py."""

    def __init__(
        self, network: Network, hosts: list[Host], key: Path, stalls: MachineStalls
    ) -> None:
        self.network = network
        self._stalls = stalls
        self.here, self.there = hosts
        self._hosts = hosts
        self._key = key
        self.ranks: list[Process] = []
        self._timeout = SHORT
        self._since = 0.0

    def start(self, *arguments: object, timeout: int = SHORT, **environ: object) -> None:
        """Start the ranks, and wait until they are ready."""
        self._timeout = timeout
        common = {"WORLD_SIZE": "4", "MASTER_ADDR": self.here.address, "MASTER_PORT": str(PORT),
                  "CYDIST_SECRET_FILE": str(self._key), "CYDIST_PEER_TIMEOUT": str(timeout),
                  "LIMIT": str(LIMIT)}  # fmt: skip
        common |= {name: str(value) for name, value in environ.items()}
        for rank in range(4):
            self.ranks.append(self._hosts[rank // 2].start(
                [PROGRAM, *map(str, arguments)],
                {**common, "RANK": str(rank), "LOCAL_RANK": str(rank % 2)},
            ))  # fmt: skip
        self.await_line("ready")

    def await_line(self, line: str) -> None:
        """Wait until every rank has printed a line."""
        assert [rank.line(LIMIT) for rank in self.ranks] == [line] * 4

    def ends(self, ranks: Sequence[int] = (*HERE, *THERE)) -> list[dict[str, Any]]:
        """Return how these ranks' calls ended."""
        return [json.loads(self.ranks[rank].line(LIMIT)) for rank in ranks]

    def lose(self, fault: Callable[[], None]) -> None:
        """Let a host vanish. It has by the end of the command, which a busy machine starts late."""
        fault()
        self._since = time.monotonic()

    def go_on(self, *, first: bool = False) -> None:
        """Let the ranks call; `first`: they have never heard of the host that vanished."""
        if first:
            self._since = time.monotonic()
        for rank in self.ranks:
            rank.tell("go on")

    def assert_lost(
        self, ranks: tuple[int, ...], host: str, lost: tuple[int, ...]
    ) -> list[dict[str, Any]]:
        """Each of the ranks names the host, once, with all its ranks, in the promised time. Returns
        how their calls ended."""
        assert_lost(ends := self.ends(ranks), host, lost)
        # This time is asserted because it is the claim: docs/guide/failures.md promises the
        # verdict within CYDIST_PEER_TIMEOUT. At the default it is due 2 s before that, which a busy
        # machine does not use up; below it there is less room, and what counts is who is named.
        if self._timeout >= DEFAULT:
            late = [self.late(end["at"]) for end in ends]
            assert max(late) <= self._timeout, (late, self._stalls.found)
        return ends

    def late(self, at: float) -> float:
        """Return the seconds from the loss until then in which the machine ran: kernels that do
        not run ask nothing."""
        return at - self._since - self._stalls.seconds(self._since, at)

    def end(self) -> None:
        for rank in self.ranks:
            rank.end()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    require_hosts()
    key = tmp_path / "key"
    key.write_text("ab" * 32)
    key.chmod(0o600)
    with ExitStack() as stack:
        network, hosts = stack.enter_context(network_of(2, tmp_path))
        made = Job(network, hosts, key, stack.enter_context(MachineStalls()))
        stack.callback(made.end)
        yield made


def test_stalls_of_the_machine() -> None:
    """Only what lies in the time that was asked for counts, and only pauses that are long."""
    stalls = MachineStalls()
    for now in (1.0, 1.1, 1.5, 4.5, 4.6, 6.0):
        stalls.awake(now)
    assert stalls.found == [(1.5, 4.5), (4.6, 6.0)]
    assert stalls.seconds(2.0, 5.6) == pytest.approx(2.5 + 1.0)
    assert stalls.seconds(0.0, 1.4) == 0.0


def assert_lost(ends: list[dict[str, Any]], host: str, lost: tuple[int, ...]) -> None:
    """Each rank names the host, once, with all its ranks."""
    for end in ends:
        assert end["kind"] == "PeerFailedError", end
        named = ", ".join(map(str, lost))
        assert f"host {host} with ranks {named} was lost" in end["text"]
        assert "it has not answered for" in end["text"]
        assert end["ranks"] == list(lost)


@pytest.mark.slow
@pytest.mark.parametrize("timeout", TIMEOUTS)
@pytest.mark.parametrize(
    "doing", ["reduce_for_ever", pytest.param("receive", marks=pytest.mark.long)]
)
def test_a_host_without_power(job: Job, doing: str, timeout: int) -> None:
    """The others name it and all its ranks, and go on without."""
    job.start(doing, "shrink", timeout=timeout)
    job.lose(job.there.power_off)
    ends = job.assert_lost(HERE, "host1", THERE)
    assert [(end["left"], end["sum"]) for end in ends] == [(2, 2.0)] * 2


@pytest.mark.slow
@pytest.mark.parametrize("timeout", TIMEOUTS)
@pytest.mark.parametrize(
    "doing",
    ["receive", pytest.param("reduce_for_ever", marks=pytest.mark.long)],
)
@pytest.mark.parametrize(
    "cut", [Host.black_hole, pytest.param(Host.link_down, marks=pytest.mark.long)],
    ids=["black hole", "link down"],
)  # fmt: skip
def test_a_network_that_is_cut(
    job: Job, doing: str, cut: Callable[[Host], None], timeout: int
) -> None:
    """Each side names the other, whether bytes are under way or none."""
    job.start(doing, timeout=timeout)
    job.lose(lambda: cut(job.there))
    job.assert_lost(HERE, "host1", THERE)
    job.assert_lost(THERE, "host0", HERE)


@pytest.mark.slow
@pytest.mark.parametrize("timeout", TIMEOUTS)
def test_a_host_that_vanishes_while_it_reads_nothing(job: Job, timeout: int) -> None:
    """A closed window does not hide it: the senders name it."""
    job.start("send_to_deaf", 3 * timeout, timeout=timeout)
    job.await_line("full")
    job.lose(job.there.black_hole)
    job.assert_lost(HERE, "host1", THERE)


@pytest.mark.slow
@pytest.mark.parametrize("timeout", [DEFAULT])
def test_a_call_long_after_its_host_vanished(job: Job, timeout: int) -> None:
    """Every connection is idle until then: what the kernels have asked in vain counts."""
    job.start("late_call", timeout=timeout)
    job.await_line("computing")
    assert job.ranks[0].is_silent(0.5)  # so that the kernels have acknowledged everything
    job.lose(job.there.black_hole)
    assert job.ranks[0].is_silent(0.7 * timeout)
    job.go_on()
    job.assert_lost(HERE, "host1", THERE)
    job.assert_lost(THERE, "host0", HERE)


@pytest.mark.slow
@pytest.mark.parametrize("doing", ["idle", "full"])
def test_a_process_that_begins_to_look_late(job: Job, doing: str) -> None:
    """It learns as early as one that has looked all the time, of a connection that was idle, or
    whose other end reads nothing."""
    timeout = 6
    ends = []
    for host, what in ((job.there, "listen"), (job.here, doing)):
        program = ["tests/programs/late_look.py", what, str(PORT)]
        ends.append(host.start(program, {"CYDIST_PEER_TIMEOUT": str(timeout)}))
        job.ranks.append(ends[-1])
        assert ends[-1].line(LIMIT) == "ready"
    job.lose(job.there.black_hole)
    assert ends[1].is_silent(0.7 * timeout)
    ends[1].tell("go on")
    # The docs promise the timeout; 0.2 of it more is for a busy machine. A process that counts from
    # its first look on, and not from what the kernel has asked in vain before, takes 1.57 of it.
    assert job.late(float(ends[1].line(LIMIT))) <= 1.2 * timeout


@pytest.mark.slow
@pytest.mark.parametrize("timeout", LONG_ONES)
@pytest.mark.parametrize("doing", ["compute", "first_message"])
def test_a_host_that_vanished_before_the_call(job: Job, doing: str, timeout: int) -> None:
    """Ranks that computed meanwhile learn in their next call; so do ranks that have no connection
    to it yet."""
    job.start(doing, timeout=timeout)
    if doing == "compute":
        job.await_line("computing")
    job.lose(job.there.black_hole)
    if doing == "compute":
        assert job.ranks[0].is_silent(timeout / 4)
    job.go_on(first=doing == "first_message")
    job.assert_lost(HERE, "host1", THERE)
    job.assert_lost(THERE, "host0", HERE)


# TCP sends again after 0.2, 0.6, 1.4 and 3 s: on a busy machine the hole may last a second longer.
@pytest.mark.slow
@pytest.mark.parametrize("timeout", [2 * SHORT, *TIMEOUTS[1:]])
def test_a_black_hole_that_ends(job: Job, timeout: int) -> None:
    """A third of the timeout is survived, without a wrong sum."""
    job.start("reduce_for_ever", timeout=timeout)
    job.there.black_hole()
    assert job.ranks[0].is_silent(timeout / 3)
    job.there.plug()
    job.ranks[0].tell("stop")
    assert [end["kind"] for end in job.ends()] == ["ended well"] * 4


@pytest.mark.slow
@pytest.mark.parametrize("timeout", TIMEOUTS)
def test_a_stopped_rank_is_alive(job: Job, timeout: int) -> None:
    """Its peers' calls end at their own deadlines, and say that its host answers."""
    job.start("receive", timeout=timeout, LIMIT=timeout + 2)
    for rank in THERE:
        job.ranks[rank].signal(signal.SIGSTOP)
    for end in job.ends(HERE):
        assert end["kind"] == "DistTimeoutError", end
        assert "is giving no answer, though its host does: it is stopped" in end["text"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("timeout", "deaf"), [(SHORT, SHORT + 2), pytest.param(DEFAULT, 60, marks=pytest.mark.long)]
)
def test_a_rank_that_reads_nothing_is_alive(job: Job, timeout: int, deaf: int) -> None:
    """It holds Python's lock for longer than the timeout, with megabytes unread, and then reads."""
    job.start("send_to_deaf", deaf, timeout=timeout)
    job.await_line("full")
    assert [end["kind"] for end in job.ends()] == ["ended well"] * 4


@pytest.mark.slow
@pytest.mark.parametrize("timeout", TIMEOUTS)
def test_a_host_that_came_back_without_its_ranks(job: Job, timeout: int) -> None:
    """Connections of before it lost power are half open: its new kernel ends them."""
    job.start("receive", timeout=timeout)
    job.there.power_off()
    job.network.host(job.there.number)
    ends = job.ends(HERE)
    for end, peer in zip(ends, THERE, strict=True):
        assert end["kind"] == "PeerFailedError", end
        # A rank may hear of the other one's loss before its own connection ends.
        told = f"rank {peer} on host1 was lost" in end["text"]
        assert told or re.search(r"rank [23] on host1 was lost, says rank [01]", end["text"]), end
    assert any(", says rank" not in end["text"] for end in ends), ends


@pytest.mark.slow
@pytest.mark.long
def test_a_firewall_that_resets(job: Job) -> None:
    """Connections that something in between resets are lost at once."""
    job.start("reduce_for_ever")
    job.there.impostor()
    for end in job.ends(HERE):
        assert end["kind"] == "PeerFailedError", end
        assert "on host1 was lost" in end["text"]


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("timeout", [SHORT, DEFAULT])
def test_a_network_that_drops_large_packets(job: Job, timeout: int) -> None:
    """Nobody waits for ever, and the error says what may be wrong."""
    for host in (job.here, job.there):
        host.grow_packets()
    job.start("reduce_for_ever", timeout=timeout)
    ends = job.ends()
    assert [end["kind"] for end in ends] == ["PeerFailedError"] * 4
    assert any("large packets (MTU)" in end["text"] for end in ends)


@pytest.mark.slow
def test_a_slow_network_is_alive(job: Job) -> None:
    """A call that it makes late says how much has come or gone, how fast, and when the last did."""
    for host in (job.here, job.there):
        host.slow_down("20mbit")
    job.start("send", LIMIT=3)
    for rank in THERE:
        job.ranks[rank].tell("receive")
    ends = job.ends()
    assert [end["kind"] for end in ends] == ["DistTimeoutError"] * 4
    found = r"bytes move to and from rank \d on host\d: \S+ \S+ have come, the last \S+ s ago "
    assert any(re.search(found, end["text"]) for end in ends), ends


@pytest.mark.slow
@pytest.mark.parametrize("timeout", LONG_ONES)
def test_a_store_whose_host_vanishes(job: Job, timeout: int) -> None:
    """Ranks that wait for a key learn of it."""
    job.start("wait_in_store", timeout=timeout)
    job.there.black_hole()
    for end in job.ends(THERE):
        assert end["kind"] == "DistStoreError", end
        assert f"its host has not answered for {timeout} s (CYDIST_PEER_TIMEOUT)" in end["text"]


@pytest.mark.slow
@pytest.mark.parametrize("timeout", TIMEOUTS)
def test_a_host_that_vanishes_while_the_ranks_meet(job: Job, timeout: int) -> None:
    """The store's server tells the ranks that wait; ranks cut off from it lose rank 0."""
    job.start("come_together", timeout=timeout, WORLD_SIZE=5)
    job.here.await_connections(PORT, 8)  # of each rank one for its requests and one for its will
    job.there.black_hole()
    for end in job.ends(HERE):
        assert end["kind"] == "PeerFailedError", end
        assert set(end["ranks"]) <= set(THERE)
        assert "died, ended or was cut off, before all 5 had met" in end["text"]
    for end in job.ends(THERE):
        assert end["kind"] == "PeerFailedError", end
        assert "rank 0, which serves the store, died or was cut off" in end["text"]


@pytest.mark.slow
def test_the_system_chooses_the_congestion_control_between_hosts(job: Job) -> None:
    """Only connections inside a host have one of cydist's choice."""
    chosen = job.here.run("cat", "/proc/sys/net/ipv4/tcp_congestion_control").strip()
    job.start("congestion", CYDIST_TRANSPORT="tcp")
    for end in job.ends():
        assert end["found"] == {"between": [chosen], "inside": ["reno"]}
