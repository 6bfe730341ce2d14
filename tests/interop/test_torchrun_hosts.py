"""torchrun's agents on several hosts: hosts that join, leave, die, and have different numbers of
ranks.

The same program runs over gloo, torch's own library, and over cydist, which must come through all
that gloo comes through. The hosts are namespaces (tests/support/network_hosts.py).
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from network_hosts import Host, Process, call, network_of, require_hosts

pytest.importorskip("torch.distributed.run")

PROGRAM = "tests/programs/elastic.py"
PORT = 29700
LINE = 120.0  # seconds for a line, most of which torch's imports and agents take

pytestmark = [
    pytest.mark.long,
    pytest.mark.timeout(500),
    pytest.mark.parametrize("library", ["gloo", "cydist"]),
]


class Agents:
    """The agents of one elastic job over a library, and a folder for its ranks."""

    def __init__(self, hosts: list[Host], directory: Path, library: str) -> None:
        self._hosts = hosts
        self._library = library
        self.folder = directory / "told"
        self.folder.mkdir()
        self._key = directory / "key"
        self._key.touch(0o600)
        self._key.write_text("ab" * 32)
        self.started: list[Process] = []

    def start(self, host: int, nodes: str, size: int) -> Process:
        """Start the agent of a host with so many ranks."""
        agent = self._hosts[host].start(
            ["-m", "torch.distributed.run", f"--nnodes={nodes}", f"--nproc-per-node={size}",
             "--max-restarts=3", "--monitor-interval=0.2", "--rdzv-backend=c10d", "--rdzv-id=job",
             f"--rdzv-endpoint={self._hosts[0].address}:{PORT}",
             f"--local-addr={self._hosts[host].address}",
             "--rdzv-conf=last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3",
             PROGRAM, self._library, str(self.folder)],
            {"CYDIST_SECRET_FILE": str(self._key), "OMP_NUM_THREADS": "1",
             "GLOO_SOCKET_IFNAME": "eth",
             # torch 2.13's own agents wait for each other for ever when a host joins without it.
             "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        )  # fmt: skip
        self.started.append(agent)
        return agent

    def tell(self, what: str) -> None:
        """Tell the ranks."""
        (self.folder / what).touch()

    def kill(self, host: int, pid: int) -> None:
        """Kill a process of a host, by its number there."""
        call(*self._hosts[host].enter("kill", "-KILL", str(pid)))

    def end(self) -> None:
        for agent in self.started:
            agent.end()


@pytest.fixture
def agents(library: str, tmp_path: Path) -> Iterator[Agents]:
    require_hosts()
    with ExitStack() as stack:
        hosts: list[Host] = []
        made = Agents(hosts, tmp_path, library)
        stack.callback(made.end)  # after the hosts, on which ranks may outlive their agent
        network, found = stack.enter_context(network_of(2, tmp_path))
        hosts += found
        network.name_hosts(hosts)
        yield made


def said(agent: Process, *lines: str) -> list[str]:
    """Wait until an agent's ranks have printed these lines, in any order; return all that they
    printed until then."""
    missing, seen = list(lines), []
    end = time.monotonic() + LINE
    while missing:
        line = agent.line(max(0.0, end - time.monotonic()))
        seen.append(line)
        assert line, f"the agent has ended, without {missing}: {seen}"
        if line in missing:
            missing.remove(line)
    return seen


def test_hosts_that_join_and_leave(agents: Agents) -> None:
    """1 host, then 2, and 1 again when the second is told to end."""
    zero = agents.start(0, "1:2", 1)
    said(zero, "world 1 rank 0")
    one = agents.start(1, "1:2", 1)
    said(zero, "world 2 rank 0")
    said(one, "world 2 rank 1")
    one.signal(signal.SIGTERM)
    said(zero, "world 1 rank 0")
    agents.tell("stop")
    said(zero, "end 0")
    assert zero.ended() == 0


def test_uneven_hosts(agents: Agents) -> None:
    """Three ranks on one host and one on the other, of which one fails."""
    both = agents.start(0, "2", 3), agents.start(1, "2", 1)
    for order in ("fail", "stop"):
        said(both[0], *(f"world 4 rank {rank}" for rank in range(3)))
        said(both[1], "world 4 rank 3")
        agents.tell(order)
    said(both[0], "end 0", "end 1", "end 2")
    said(both[1], "end 3")
    assert [agent.ended() for agent in both] == [0, 0]


@pytest.mark.parametrize("alone", [False, True], ids=["with its rank", "alone"])
def test_an_agent_that_is_killed(agents: Agents, alone: bool) -> None:
    """With its rank: the other host goes on alone, and again with it when it comes back. Alone: the
    ranks go on, until the host comes back and all start again."""
    zero, one = agents.start(0, "1:2", 1), agents.start(1, "1:2", 1)
    said(zero, "world 2 rank 0")
    lines = said(one, "world 2 rank 1")
    started = [line.split()[1] for line in lines if line.startswith("start ")]
    one.signal(signal.SIGKILL)
    if not alone:
        agents.kill(1, int(started[-1]))
        said(zero, "world 1 rank 0")
    again = agents.start(1, "1:2", 1)
    said(zero, "world 2 rank 0")
    said(again, "world 2 rank 1")
    agents.tell("stop")
    said(zero, "end 0")
    said(again, "end 1")
    assert [agent.ended() for agent in (zero, again)] == [0, 0]
