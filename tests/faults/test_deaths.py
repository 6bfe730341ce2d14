"""A rank dies, or stops: every other rank is told which, at once, and goes on without it.

The ranks are processes of tests/programs/fork_server.py, over sockets ("tcp") or shared memory
("shm"). Each trial is a world of its own, in which all ranks make one call over and over until
it raises; one of them, the victim, ends somewhere on the way.
"""

from __future__ import annotations

import itertools
import json
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = Path(__file__).parents[1] / "programs" / "fork_server.py"
DEADLINE = 40.0  # seconds for one trial, whose own is 30
VICTIM = 1
NOT_REACHED = 71
CALLS = (
    "broadcast", "all_reduce", "async_all_reduce", "reduce", "all_gather", "gather", "scatter",
    "reduce_scatter", "all_to_all", "barrier", "monitored_barrier", "scan", "exscan", "send_recv",
    "any_source", "all_gather_object", "broadcast_object_list", "gather_object",
    "scatter_object_list",
)  # fmt: skip
LONG = 100_000  # elements: these messages need more than one write and one read
# "connect": a peer is connected and nothing is proved; "leave": after saying goodbye.
PHASES = {
    "tcp": ("connect", "enter", "send.mid", "recv.mid", "wait", "idle", "destroy", "leave"),
    "shm": ("enter", "send.mid", "wait", "idle", "destroy", "leave"),
}

Event = dict[str, Any]


class Server:
    """The program that runs trials."""

    def __init__(self, directory: Path) -> None:
        inherited = {k: v for k, v in os.environ.items() if not k.startswith("CYDIST_")}
        self._process = subprocess.Popen(
            [sys.executable, str(PROGRAM)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=directory,
            env={**inherited, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(directory)},
        )  # fmt: skip
        self._lines: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)

    def trial(self, call: str, phase: str, **how: Any) -> Outcome:
        """Run one; `how` has further fields of the program's Trial."""
        assert self._process.stdin is not None
        fields = {"call": call, "phase": phase, "victim": VICTIM, **how}
        self._process.stdin.write(json.dumps(fields) + "\n")
        self._process.stdin.flush()
        return Outcome(fields, json.loads(self._lines.get(timeout=DEADLINE)))

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()


class Outcome:
    """What the ranks of a trial saw."""

    def __init__(self, fields: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
        self.call = str(fields["call"])
        self.victim = int(fields["victim"])
        self.codes = [rank["code"] for rank in ranks]
        self.saw: list[dict[str, Event]] = [
            {event["call"]: event for event in rank["saw"]} for rank in ranks
        ]
        self.died = ranks[self.victim]["ended"]

    def survivors(self, call: str) -> list[Event]:
        """How this call went on every rank but the victim; it was made there."""
        others = [saw for rank, saw in enumerate(self.saw) if rank != self.victim]
        assert all(call in saw for saw in others), self.saw
        return [saw[call] for saw in others]

    def errors(self, call: str) -> list[tuple[str | None, list[int] | None]]:
        """Class and ranks of what it raised on each survivor."""
        return [(event.get("error"), event.get("ranks")) for event in self.survivors(call)]


def all_ranks_know(outcome: Outcome, *, quits: bool = False) -> None:
    """Assert that every survivor raised PeerFailedError with the victim's rank, and went on."""
    lost = [("PeerFailedError", [outcome.victim])]
    count = len(outcome.codes) - 1
    assert outcome.errors(outcome.call) == lost * count, outcome.survivors(outcome.call)
    codes = [code for rank, code in enumerate(outcome.codes) if rank != outcome.victim]
    assert [0] * count == codes
    for event in outcome.survivors(outcome.call):
        assert event["op"] is not None
        assert event["group"] == "0"
        assert f"rank {outcome.victim} on {socket.gethostname()} was lost" in event["message"]
    if quits:
        return
    failed = [("GroupFailedError", [outcome.victim])]
    assert outcome.errors("again") == failed * count, outcome.survivors("again")
    assert outcome.errors("unused") == lost * count, outcome.survivors("unused")
    assert outcome.errors("rest") == [(None, None)] * count, outcome.survivors("rest")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """One for all trials."""
    served = Server(tmp_path_factory.mktemp("deaths"))
    yield served
    served.close()


@pytest.mark.parametrize(
    ("transport", "phase"), [(name, phase) for name in PHASES for phase in PHASES[name]]
)
def test_killed_in_every_phase(server: Server, transport: str, phase: str) -> None:
    """Wherever a rank dies, all others learn which rank, on which host; the group has failed;
    another group with that rank fails at its first call; one without it goes on."""
    outcome = server.trial("all_reduce", phase, transport=transport, count=LONG)
    assert outcome.codes[VICTIM] == (0 if phase == "leave" else -9)
    all_ranks_know(outcome)


@pytest.mark.parametrize("call", ["all_reduce", "broadcast", "gather", "reduce", "scan"])
def test_killed_while_it_writes_in_others_arrays(server: Server, call: str) -> None:
    """Who dies in the middle of it harms nobody, and is named."""
    victim = 0 if call == "broadcast" else VICTIM
    how = {"transport": "shm", "algorithm": f"{call}:direct", "victim": victim, "count": LONG}
    all_ranks_know(server.trial(call, "send.mid", **how))


@pytest.mark.parametrize("call", CALLS)
def test_killed_in_every_call(server: Server, call: str) -> None:
    """Whatever the call was, and the rank that a rank waited for in it."""
    all_ranks_know(server.trial(call, "idle"))


def test_waiting_for_any_source_notices_a_rank_never_met(server: Server) -> None:
    """Who waits for a message from any rank learns of one that died before it ever connected."""
    all_ranks_know(server.trial("any_source", "connect"))


@pytest.mark.parametrize("call", ["all_reduce", "broadcast", "send_recv"])
def test_survivors_that_end_at_once_are_not_blamed(server: Server, call: str) -> None:
    """Ranks that leave with their error, without a goodbye, do not hide who died first."""
    all_ranks_know(server.trial(call, "wait", quits=True), quits=True)


@pytest.mark.parametrize("child", ["fork", "multiprocessing"])
@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_a_living_child_does_not_hide_the_death(server: Server, transport: str, child: str) -> None:
    """A child that was forked after init and still runs holds none of its parent's sockets."""
    all_ranks_know(server.trial("all_reduce", "idle", transport=transport, child=child))


def test_the_rank_with_the_store(server: Server) -> None:
    """Rank 0, which holds the store, is a rank like any other once groups are formed."""
    all_ranks_know(server.trial("all_reduce", "idle", victim=0, store="tcp"))


@pytest.mark.parametrize(
    ("transport", "phase"), [("tcp", "wait"), ("tcp", "idle"), ("shm", "wait"), ("shm", "idle")]
)
def test_stopped(server: Server, transport: str, phase: str) -> None:
    """A stopped rank ends the others' calls at their timeout, with its name. When it goes on it
    gets an error, not numbers of a call that the others have given up."""
    how = {"transport": transport, "action": "stop", "timeout": 1.0}
    outcome = server.trial("all_reduce", phase, **how)
    assert [0] * 4 == outcome.codes
    for event in outcome.survivors("all_reduce"):
        assert event["error"] == "DistTimeoutError", event
    named = {rank for event in outcome.survivors("all_reduce") for rank in event["ranks"]}
    assert VICTIM in named
    assert outcome.errors("rest") == [(None, None)] * 3
    ended = outcome.saw[VICTIM]["victim"]
    assert ended["error"] in ("DistTimeoutError", "GroupFailedError", "PeerFailedError"), ended


def test_stopped_while_it_writes_in_others_arrays(server: Server) -> None:
    """The others raise at their timeout though it may still write, and survive that it does."""
    how = {"transport": "shm", "algorithm": "all_reduce:direct", "action": "stop", "timeout": 1.0}
    outcome = server.trial("all_reduce", "send.mid", count=LONG, **how)
    assert [0] * 4 == outcome.codes
    for event in outcome.survivors("all_reduce"):
        assert event["error"] == "DistTimeoutError", event
    assert outcome.errors("rest") == [(None, None)] * 3


# The whole product: scripts/test-heavy.


@pytest.mark.long
@pytest.mark.timeout(900)
@pytest.mark.parametrize("victim", range(4))
@pytest.mark.parametrize("transport", PHASES)
def test_killed_in_every_phase_of_every_call(server: Server, transport: str, victim: int) -> None:
    """Every victim, every phase, every call; a phase that a call does not have counts as a death
    after some calls."""
    for call, phase in itertools.product(CALLS, PHASES[transport]):
        if call == "any_source" and phase == "leave":
            continue  # who left on purpose is not missed by a receive from anybody
        count = LONG if phase.endswith(".mid") else 1000
        all_ranks_know(server.trial(call, phase, victim=victim, transport=transport, count=count))
