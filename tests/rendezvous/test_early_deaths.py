"""A rank that dies before the job is together: the others are told at once, and by its number."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator

import pytest
from transport_ranks import free_port

from cydist.errors import PeerFailedError, RendezvousError, StoreTimeoutError
from cydist.rendezvous import multicast
from cydist.stores import MembershipStore, TCPStore

HOST = "127.0.0.1"
DEADLINE = 50
# Nobody may learn of a death by this: it is longer than any test may take.
TIMEOUT = 600

# A rank: joins, and says as one line of JSON how that went. `before` may change what it joins with.
PROGRAM = """
import json, os, signal, sys, threading, time
import cydist as dist
from cydist.net import auth
auth.set_secret(bytes(range(32)))
{before}
try:
    dist.init_process_group('tcp', {how}, timeout={timeout})
    said = ['joined', [], '']
except Exception as error:
    said = [type(error).__name__, list(getattr(error, 'ranks', ())), str(error)]
print(json.dumps(said), flush=True)
sys.stdin.read()  # a rank that ends is missed
"""

# Where the victim ends, in each case when the others are there, else they would find nobody who
# could tell them: rank 2 before it has checked in, rank 0 while the others wait for its word,
# either when all have met, before it says where it listens.
KILL = "os.kill(os.getpid(), signal.SIGKILL)"
CHECKING_IN = """
from cydist.stores import MembershipStore
def join(self, rank, join=MembershipStore.join):
    join(self, rank)
    self.wait(['here/0', 'here/1'])
    dist._native.arm_failpoint('rendezvous:kill')
MembershipStore.join = join
"""
GATHERING = f"""
from cydist.rendezvous import check_in as r
def gather(meeting, *rest):
    meeting.wait(['here/1', 'here/2'])
    {KILL}
r._await_all = gather
"""
CONNECTING = f"""
import cydist.backends.host.connections as c
c.Connections = lambda *a, **k: {KILL}
"""


class Ranks:
    """Processes, one per rank, that the test starts and that end with it."""

    def __init__(self) -> None:
        self.started: list[subprocess.Popen[str]] = []

    def start(
        self, how: str, before: str = "", timeout: float = TIMEOUT, **env: str
    ) -> subprocess.Popen[str]:
        """A process that calls init_process_group with the arguments `how`."""
        clean = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("MASTER_", "TORCHELASTIC_", "CYDIST_"))
        }
        process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM.format(how=how, before=before, timeout=timeout)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**clean, **env},
        )  # fmt: skip
        self.started.append(process)
        return process

    def said(self, process: subprocess.Popen[str]) -> tuple[str, list[int], str]:
        """How joining went for it."""
        assert process.stdout is not None
        name, ranks, text = json.loads(process.stdout.readline())
        return name, ranks, text

    def close(self) -> None:
        for process in self.started:
            process.kill()
            process.communicate(timeout=DEADLINE)


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks()
    yield made
    made.close()


Way = tuple[str, dict[str, str]]


def tcp(request: pytest.FixtureRequest) -> Way:
    """By an URL."""
    return f"'tcp://{HOST}:{free_port()}', rank={{rank}}, world_size=3", {}


def env(request: pytest.FixtureRequest) -> Way:
    """By the environment."""
    where = {"MASTER_ADDR": HOST, "MASTER_PORT": str(free_port())}
    return "rank={rank}, world_size=3", where


def torchrun(request: pytest.FixtureRequest) -> Way:
    """Through the store of torchrun's agent."""
    torch_dist = pytest.importorskip("torch.distributed")
    agent = torch_dist.TCPStore(HOST, 0, None, True, wait_for_workers=False)
    request.addfinalizer(lambda: agent)  # it lives as long as the test
    return "rank={rank}, world_size=3", {
        "MASTER_ADDR": HOST, "MASTER_PORT": str(agent.port), "WORLD_SIZE": "3",
        "TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_RUN_ID": secrets.token_hex(4),
    }  # fmt: skip


def store(request: pytest.FixtureRequest) -> Way:
    """In a TCPStore that no rank serves."""
    port = request.getfixturevalue("master").port
    return f"rank={{rank}}, world_size=3, store=dist.TCPStore('{HOST}', {port})", {}


@pytest.mark.parametrize(
    ("victim", "before", "way"),
    [
        pytest.param(2, CHECKING_IN, tcp, id="rank 2 checks in"),
        pytest.param(0, GATHERING, tcp, id="rank 0 gathers"),
        pytest.param(2, CONNECTING, tcp, id="rank 2 connects"),
        pytest.param(0, CONNECTING, tcp, id="rank 0 connects"),
        pytest.param(2, CHECKING_IN, env, id="by the environment"),
        pytest.param(2, CHECKING_IN, torchrun, id="under torchrun", marks=pytest.mark.more),
        pytest.param(0, GATHERING, store, id="in a store, rank 0 gathers"),
        pytest.param(2, CONNECTING, store, id="in a store, rank 2 connects"),
    ],
)
def test_death_is_told_at_once(
    ranks: Ranks,
    victim: int,
    before: str,
    way: Callable[[pytest.FixtureRequest], Way],
    request: pytest.FixtureRequest,
) -> None:
    """A rank that waits for a rank that is killed while the job comes together raises
    PeerFailedError with that rank, long before the timeout; also if it served the store."""
    how, env = way(request)
    others = [ranks.start(how.format(rank=rank), **env) for rank in range(3) if rank != victim]
    ranks.start(how.format(rank=victim), before, **env)
    for process in others:
        name, about, text = ranks.said(process)
        assert (name, about) == ("PeerFailedError", [victim]), text
        assert f"rank {victim}" in text


def test_latecomers_are_told(ranks: Ranks) -> None:
    """A rank that comes when another has died already is told as the others were."""
    how = f"'tcp://{HOST}:{free_port()}', rank={{rank}}, world_size=3"
    stay = f"from cydist.rendezvous import check_in as c; c.LATECOMERS_SECONDS = {TIMEOUT}"
    first = ranks.start(how.format(rank=0), stay)
    victim = ranks.start(how.format(rank=2), CHECKING_IN.replace(", 'here/1'", ""))
    victim.wait(DEADLINE)
    late = ranks.start(how.format(rank=1))
    assert ranks.said(late)[:2] == ranks.said(first)[:2] == ("PeerFailedError", [2])


def test_a_forked_child_does_not_hide_a_death(ranks: Ranks) -> None:
    """The death of a rank is noticed though a child that it forked lives on."""
    how = f"'tcp://{HOST}:{free_port()}', rank={{rank}}, world_size=3"
    others = [ranks.start(how.format(rank=rank)) for rank in range(2)]
    fork = CHECKING_IN.replace(
        "    dist._native", "    os.fork() or sys.stdin.read()\n    dist._native"
    )
    ranks.start(how.format(rank=2), fork)
    for process in others:
        assert ranks.said(process)[:2] == ("PeerFailedError", [2])


def test_death_without_a_rank_is_told(ranks: Ranks) -> None:
    """Where ranks are given out, the others learn at once of a process that died before."""
    group = "239.255.77.3"
    try:
        multicast._own_address(group, 9)
    except RendezvousError:
        pytest.skip(f"no route to {group}")
    here = "from cydist.rendezvous import multicast; multicast.HOPS = 0\n"
    die = CHECKING_IN.replace(
        "['here/0', 'here/1']", "[f'wanted/{i}' for i in range(3) if i != rank]"
    )
    die = die.replace("dist._native.arm_failpoint('rendezvous:kill')", KILL)
    how = f"'tcp://{group}:{free_port()}', world_size=3"
    others = [ranks.start(how, here) for _ in range(2)]
    victim = ranks.start(how, here + die)
    for process in others:
        name, about, text = ranks.said(process)
        assert (name, about) in [("RendezvousError", []), ("DistStoreError", [])], text
        assert f"(process {victim.pid}) died" in text or "lost the store" in text


def test_giving_up_is_told_at_once(ranks: Ranks) -> None:
    """A rank that cannot make the group says why to those who wait for it."""
    how = f"'tcp://{HOST}:{free_port()}', rank={{rank}}, world_size=3"
    wrong = {"CYDIST_SOCKET_IFNAME": "nowhere0"}
    processes = [
        ranks.start(how.format(rank=rank), **(wrong if rank == 1 else {})) for rank in range(3)
    ]
    said = [ranks.said(process) for process in processes]
    assert [name for name, _, _ in said] == [
        "PeerFailedError",
        "DistNetworkError",
        "PeerFailedError",
    ]
    assert [about for _, about, _ in said] == [[1], [], [1]]
    assert "nowhere0" in said[0][2]


def test_stopped_rank_zero_costs_the_timeout(ranks: Ranks) -> None:
    """Where the process that serves the store is stopped, the error at the timeout names it."""
    how = f"'tcp://{HOST}:{free_port()}', rank={{rank}}, world_size=3"
    stop = GATHERING.replace("SIGKILL", "SIGSTOP")
    others = [ranks.start(how.format(rank=rank), timeout=3) for rank in (1, 2)]
    ranks.start(how.format(rank=0), stop, timeout=3)
    for process in others:
        name, about, text = ranks.said(process)
        assert (name, about) == ("RendezvousError", [0])
        assert "does not answer" in text


def test_closing_the_store_is_no_death(master: TCPStore) -> None:
    """A process that closes its store is not missed; one that ends in any other way is."""
    script = (
        "from cydist.net import auth; auth.set_secret(bytes(range(32)))\n"
        "from cydist.stores import MembershipStore, TCPStore\n"
        f"store = TCPStore('{HOST}', {master.port}); part = MembershipStore('p', store, [0, 1])\n"
        "part.join(1); store.add('here', 1)\n"
    )
    ends = ("store.close()", "", "raise SystemExit(3)", "1 / 0", "import os; os._exit(0)")
    for count, end in enumerate(ends):
        command = [sys.executable, "-c", script + end]
        subprocess.run(command, timeout=DEADLINE, check=False, stderr=subprocess.DEVNULL)
        assert master.get("here") == b"%d" % (count + 1)
        if count:
            with pytest.raises(PeerFailedError, match="rank 1"):
                MembershipStore("p", master, [0, 1]).wait(["never"], DEADLINE)
            assert master.get("p/lost").count(b"\n") == count
    assert len(ends) == 5


@pytest.mark.parametrize(
    "end", ["1 / 0", "sys.exit(0)", "os._exit(0)"], ids=["exception", "exit", "_exit"]
)
def test_an_end_before_a_group_is_made_is_told_at_once(ranks: Ranks, end: str) -> None:
    """A rank that ends, however, between two groups is named by those who wait for it in the
    second, long before the timeout."""
    how = f"'tcp://{HOST}:{free_port()}', rank={{rank}}, world_size=3"
    two = (
        "init = dist.init_process_group\n"
        "def two(*given, **named):\n"
        "    init(*given, **named)\n"
        "    {then}\n"
        "dist.init_process_group = two\n"
    )
    second = two.format(then="dist.new_group(backend='gloo')")
    others = [ranks.start(how.format(rank=rank), second) for rank in range(2)]
    # What the program catches, it does not catch any more.
    ranks.start(how.format(rank=2), two.format(then=end) + "Exception = OSError\n")
    for process in others:
        assert ranks.said(process)[:2] == ("PeerFailedError", [2])


@pytest.mark.parametrize(
    ("module", "function"),
    [
        pytest.param("tuning.file", "share_from_rank_0", id="before-the-first-group"),
        pytest.param("backends.host.create", "group_of_link", id="after-ranks-have-met"),
    ],
)
def test_trouble_is_told_at_once(ranks: Ranks, module: str, function: str) -> None:
    """A rank that fails says so to those who wait for it: one that cannot use what rank 0's
    host measured, and one that has nothing more to ask the others."""
    how = f"'tcp://{HOST}:{free_port()}', rank={{rank}}, world_size=3"
    wrong = f"import cydist.{module}; cydist.{module}.{function} = lambda *given: int('trouble')"
    others = [ranks.start(how.format(rank=rank)) for rank in range(2)]
    ranks.start(how.format(rank=2), wrong)
    for process in others:
        name, about, text = ranks.said(process)
        assert (name, about) == ("PeerFailedError", [2])
        assert "trouble" in text


def test_ranks_that_are_numbered_anew_are_not_taken_for_the_dead(master: TCPStore) -> None:
    """Of ranks 0, 1, 2, 3 the second has died, so 2 and 3 are 1 and 2 now; then the last gives up,
    and is called by its new number."""
    whole = MembershipStore("p", master, range(4))
    whole.leave(1, "dead")
    whole.renumber([0, 2, 3])
    part = whole.part("q", [0, 1, 2], "making a group")
    with pytest.raises(StoreTimeoutError):
        part.wait(["late"], 0.05)
    whole.leave(2, "reason")
    with pytest.raises(PeerFailedError, match=r"rank 2 .*reason, before all 3") as caught:
        part.wait(["late"], DEADLINE)
    assert caught.value.ranks == (2,)


def test_others_are_not_disturbed(master: TCPStore) -> None:
    """Who does not wait for the lost rank goes on waiting, and gets what comes."""
    whole = MembershipStore("p", master, range(4))
    whole.leave(3, "reason")
    part = whole.part("q", [0, 1], "making a group")
    with pytest.raises(StoreTimeoutError):
        part.wait(["late"], 0.05)
    part.set("late", "v")
    assert part.get("late") == b"v"
    assert whole.part("q", [0, 3], "making a group").multi_get(["late"]) == [b"v"]
    with pytest.raises(PeerFailedError, match=r"making a group: rank 3 .*reason") as caught:
        whole.part("q", [0, 3], "making a group").get("never")
    assert caught.value.ranks == (3,)


def test_a_check_in_that_was_given_up_is_no_other(master: TCPStore) -> None:
    """Who left one meeting is missed there and in its parts, and not in the next."""
    whole = MembershipStore("p", master, range(2))
    failed, other = (whole.part(name, [0, 1], "making a group") for name in ("1", "11"))
    failed.leave(1, "reason")
    for there in (failed, failed.part("tcp", [0, 1], "making a group")):
        with pytest.raises(PeerFailedError, match=r"rank 1 .*reason"):
            there.wait(["never"], DEADLINE)
    for elsewhere in (whole, other):
        with pytest.raises(StoreTimeoutError):
            elsewhere.wait(["late"], 0.05)


def test_watching_brings_the_values(master: TCPStore) -> None:
    """One request waits for keys and has their values, in the order asked for, whatever the
    watched key says; while one of them is missing it has the watched key's new value."""
    master.multi_set(["a", "b", "lost"], ["1", "", "news"])
    assert master.watch("lost", b"", ["b", "a"], DEADLINE) == [b"", b"1"]
    assert master.watch("lost", b"", [], DEADLINE) == []
    assert master.watch("lost", b"", ["a", "never"], DEADLINE) == b"news"


def test_watching_ends_a_wait(master: TCPStore) -> None:
    """A wait that is under way ends when the watched key changes, and leaves the server clean."""
    watched = MembershipStore("p", master, range(2))
    outcome: list[Exception] = []

    def wait() -> None:
        try:
            watched.wait(["never"], DEADLINE)
        except PeerFailedError as error:
            outcome.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    MembershipStore("p", master, range(2)).leave(1, "reason")
    thread.join(DEADLINE)
    assert len(outcome) == 1
    watched.set("never", "v")
    assert watched.get("never") == b"v"


def test_a_lost_rank_stays_reported(master: TCPStore) -> None:
    """Each wait for a rank that is lost says so, the second on one object too."""
    watched = MembershipStore("p", master, range(3))
    watched.leave(1, "reason")
    for _ in range(2):
        with pytest.raises(PeerFailedError, match=r"rank 1 .*reason"):
            watched.wait(["never"], DEADLINE)
    watched.renumber([0, 2])
    with pytest.raises(StoreTimeoutError):
        watched.wait(["never"], 0.05)


def test_an_error_that_is_no_text_is_told(master: TCPStore) -> None:
    """The user's own error is raised though its text is no UTF-8, and the others have it."""
    watched = MembershipStore("p", master, range(2))
    with pytest.raises(OSError, match="no file"), watched.report_error(1):
        raise OSError("no file '/tmp/\udcff'")
    with pytest.raises(PeerFailedError, match=r"rank 1 .*OSError: no file '/tmp/\\udcff'"):
        watched.wait(["never"], DEADLINE)


def test_an_end_after_the_job_is_no_death(master: TCPStore) -> None:
    """A process that has destroyed its job in a store of its own is not missed there when it ends;
    it is in what else it joined over that store."""
    script = (
        "import cydist as dist\n"
        "from cydist.net import auth; auth.set_secret(bytes(range(32)))\n"
        "from cydist.stores import MembershipStore\n"
        f"store = dist.TCPStore('{HOST}', {master.port})\n"
        "MembershipStore('p', store, [0, 1]).join(1)\n"
        "dist.init_process_group('tcp', store=store, rank=0, world_size=1)\n"
        "dist.destroy_process_group()\n"
    )
    subprocess.run([sys.executable, "-c", script], timeout=DEADLINE, check=True)
    with pytest.raises(PeerFailedError, match="rank 1"):
        MembershipStore("p", master, [0, 1]).wait(["never"], DEADLINE)
    assert not master.check(["cydist//1/lost"])
