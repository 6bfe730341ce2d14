"""An attacker of another user: he has cydist's framing, relays what he can, and lacks the secret.

He is the program tests/programs/attacker.py, which becomes user 65534. Where he stands in the way
of the ranks (`desk`, `relay`), CYDIST_NAT=1 lets him; that is the position of a router between two
hosts. Ranks without a protection, in the same job, show that each of his attacks is one.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from attacks import (
    LEADING,
    LED,
    PROGRAM,
    SETTINGS,
    STAYS,
    TEXT,
    Attack,
    Attacker,
    Job,
    another_user,
    check_unharmed,
    free_port,
)
from extra_values import more
from launched_jobs import await_event, connect_through_him

from cydist.net import auth
from cydist.stores import TCPStore

HOST, WAIT = "127.0.0.1", 20
MORE = pytest.mark.more
LONG = [pytest.mark.long, pytest.mark.timeout(600)]
AUTHENTICATED = ["default", "encrypted", "nat"]


# Who does not know the secret, and comes to a port


def asked_to_join(
    monkeypatch: pytest.MonkeyPatch, settings: dict[str, str]
) -> tuple[bytes, dict[str, str]]:
    """What a store holds after he has tried to write there, and what he was told."""
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    with another_user(**settings) as attacker:
        monkeypatch.setenv("CYDIST_SECRET_FILE", str(attacker.folder / "secret"))
        auth.forget_secret()
        master = TCPStore(HOST, 0, None, True, WAIT)
        try:
            master.set("key", "value")
            told = attacker.ask("join", master.port, "key", "another")
            return master.get("key"), told
        finally:
            master.close()
            auth.forget_secret()


@pytest.mark.parametrize("settings", AUTHENTICATED)
def test_a_stranger_does_not_join(monkeypatch: pytest.MonkeyPatch, settings: str) -> None:
    """He is told that the secrets differ; the store holds what it held."""
    value, told = asked_to_join(monkeypatch, SETTINGS[settings])
    assert value == b"value"
    assert told["error"].startswith("AuthenticationError")
    assert "do not share one secret" in told["error"]


@pytest.mark.filterwarnings("ignore:CYDIST_INSECURE=1")
def test_a_stranger_joins_where_nothing_is_authenticated(monkeypatch: pytest.MonkeyPatch) -> None:
    """With CYDIST_INSECURE=1 the same attempt changes the store."""
    value, told = asked_to_join(monkeypatch, SETTINGS["insecure"])
    assert (value, told) == (b"another", {"set": "key"})


# Who leads a rank to himself


def took_the_port(job: Job, attacker: Attacker, attack: Attack) -> None:
    """Ranks started by hand: he has MASTER_PORT before rank 0."""
    port = free_port()
    attacker.ask("take", port, attack)
    job.rank(1, 2, port)
    await_event(attacker, LED)
    job.rank(0, 2, port)


def in_torchruns_store(
    job: Job, attacker: Attacker, attack: Attack, module: str = "cydist"
) -> None:
    """torchrun: he overwrites rank 0's address in its store, which asks for no proof."""
    port = free_port()
    job.allow("gate.0")
    job.start(
        ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", HOST,
         "--master-port", str(port), PROGRAM],
        GATE=job.gate("gate"), MODULE=module,
    )  # fmt: skip
    assert "overwritten" in attacker.ask("torch", port, "address", attack)
    job.allow("gate.1")


def in_torchs_bridge(job: Job, attacker: Attacker, attack: Attack) -> None:
    """The same for torch.distributed with backend cydist."""
    in_torchruns_store(job, attacker, attack, "torch")


def in_a_file(job: Job, attacker: Attacker, attack: Attack) -> None:
    """file://: the file is open to all users, and he overwrites where rank 0 listens."""
    path = attacker.folder / "meeting"
    path.touch()
    path.chmod(0o666)
    job.allow("gate.0")
    for rank in range(2):
        job.start(
            [PROGRAM, f"file://{path}"],
            RANK=str(rank), WORLD_SIZE="2", GATE_ADDRESS=job.gate("gate"),
            CYDIST_SOCKET_IFNAME="lo",
        )  # fmt: skip
    on_peers = attack.get("peers", attack) | {"public": attack.get("public", False)}
    told = attacker.ask("file", str(path), "tcp/peers/0", on_peers)
    assert "overwritten" in told
    job.allow("gate.1")


WAYS = {
    "port": took_the_port,
    "file": in_a_file,
    "torchrun": in_torchruns_store,
    "bridge": in_torchs_bridge,
}
WITH_TORCH = ("torchrun", "bridge")


def led(way: str, settings: str, attack: Attack, check: Callable[[Attacker, Job], None]) -> None:
    """Run a job in which he leads rank 1 to himself; check how that ended."""
    if way in WITH_TORCH:
        pytest.importorskip("torch.distributed.run")
    environ = SETTINGS[settings]
    # A refused rank is missed until the timeout, but by a launcher. Insecure ranks refuse no other.
    wait = "40" if way in WITH_TORCH or settings == "insecure" else "4"
    with (
        another_user(*(["torch"] if way in WITH_TORCH else []), **environ) as attacker,
        Job(attacker, **environ, **STAYS, WAIT=wait) as job,
    ):
        if settings == "insecure":
            job.environ["GATE_CALLS"] = job.gate("calls")
        WAYS[way](job, attacker, attack)
        check(attacker, job)


@pytest.mark.parametrize("settings", ["default", pytest.param("encrypted", marks=LONG)])
@pytest.mark.parametrize(
    "way",
    [
        "port",
        "file",
        pytest.param("torchrun", marks=pytest.mark.more),
        pytest.param("bridge", marks=LONG),
    ],
)
def test_a_rank_that_was_led_to_him_is_refused(way: str, settings: str) -> None:
    """He is let through nowhere. Rank 1 ends in words, or meets rank 0 in spite of a file."""

    def check(attacker: Attacker, job: Job) -> None:
        check_unharmed(attacker, job, ranks=1 if way in WITH_TORCH else 2)
        events = attacker.events()
        assert not [event for event in events if event.startswith("let through")]
        if way == "port":
            assert events[0] == LED
        assert way == "file" or '"fine"' not in job.said

    led(way, settings, LEADING, check)


@pytest.mark.parametrize(
    "way", ["port", "file", *(pytest.param(way, marks=LONG) for way in WITH_TORCH)]
)
def test_where_addresses_are_translated_he_is_between_and_changes_nothing(way: str) -> None:
    """With CYDIST_NAT=1 he is let through, and what he then changes is found."""

    def check(attacker: Attacker, job: Job) -> None:
        check_unharmed(attacker, job, ranks=1 if way in WITH_TORCH else 2)
        if way in ("port", "file"):
            events = attacker.events()
            # A rank may refuse an address that he wrote, and go nowhere.
            refused_unread = way == "file" and LED not in events
            let_through = {"let through: store", "let through: peer"} & set(events)
            assert let_through or refused_unread, (events, job.said)
            assert '"fine"' not in job.said

    led(way, "nat", LEADING, check)


@pytest.mark.parametrize("way", ["port", pytest.param("file", marks=LONG)])
def test_where_nothing_is_authenticated_he_changes_an_object(way: str) -> None:
    """With CYDIST_INSECURE=1 he makes the tags himself, leads the ranks to each other through
    himself, and a rank gets another value than was sent."""

    def check(attacker: Attacker, job: Job) -> None:
        connect_through_him(attacker, job)
        ends = job.ended()
        assert attacker.did("plain", "peer"), str((attacker.events(), ends, job.said))
        assert ends[1]["end"] == "wrong", ends
        assert TEXT[1:] in ends[1]["text"]

    led(way, "insecure", LEADING | {"public": True, "job": ""}, check)


# Who stands on the path between ranks


def on_the_path(attacker: Attacker, attack: Attack, **environ: str) -> Job:
    """Start two ranks that meet in a store of the program's own. He is on rank 1's way to it, and
    on the ranks' way to each other."""
    desk = attacker.ask("desk", attack)["port"]
    port = free_port()
    led_to = attacker.ask("relay", HOST, port, attack)["port"]
    job = Job(attacker, DESK=str(desk), **({"CYDIST_NAT": "1", "WAIT": "5"} | environ))
    job.rank(0, 2, port, STORE=f"{HOST}:{port}")
    job.rank(1, 2, port, STORE=f"{HOST}:{led_to}")
    return job


# kind -> its details. "drop" and "swap" may leave both sides waiting for a frame.
FRAMES: dict[str, Attack] = {
    "head": {"byte": 20},
    "drop": {},
    "repeat": {},
    "swap": {},
    "again": {},
    "invent": {},
    "cut_off": {},
    "pickle": {"at": 0},
    "plain": {"at": 0, "text": TEXT},
}
RECORDS: dict[str, Attack] = {
    "head": {"byte": 2},
    "body": {"byte": 9},
    "drop": {},
    "repeat": {},
    "swap": {},
    "again": {},
    "invent": {},
    "cut_off": {},
    "value": {"at": 0, "old": "of turn 1", "new": "of turn 7"},
}


def attacks(kinds: dict[str, Attack], quick: tuple[str, ...]) -> list[object]:
    return [kind if kind in quick else pytest.param(kind, marks=LONG) for kind in kinds]


def attacked(on: str, kind: str, details: Attack, at: int) -> None:
    """Run a job in which one frame is attacked."""
    with another_user() as attacker:
        attack = {"on": on, "kind": kind, "at": at, "command": attacker.command()} | details
        with on_the_path(attacker, attack) as job:
            waits = ("DistTimeoutError", "DistStoreError") if kind in ("drop", "swap") else ()
            more_errors = (*waits, "DistStoreError") if on == "store" else waits
            check_unharmed(attacker, job, *more_errors)
        assert [event for event in attacker.events() if event.startswith(kind.replace("_", " "))]


@pytest.mark.parametrize("kind", attacks(FRAMES, ("pickle", "again")))
def test_frames_changed_between_ranks_are_found(kind: str, request: pytest.FixtureRequest) -> None:
    """Whichever frame he changes, drops, repeats or replaces: no value is changed unseen, none of
    his code runs, and the ranks end in words."""
    many = request.node.get_closest_marker("long") is not None
    for at in (0, 3, 8) if many else (2,):
        attacked("peer", kind, FRAMES[kind], at)


@pytest.mark.parametrize("kind", attacks(RECORDS, ("value",)))
def test_records_changed_on_the_way_to_the_store_are_found(
    kind: str, request: pytest.FixtureRequest
) -> None:
    """The same for what the store is asked, and what it answers."""
    many = request.node.get_closest_marker("long") is not None
    for at in (0, 3, 8) if many else (2,):
        attacked("store", kind, RECORDS[kind], at)


@pytest.mark.parametrize("byte", [0, *(pytest.param(byte, marks=LONG) for byte in (20, 50, 100))])
@pytest.mark.parametrize("changes", [True, False], ids=["changed", "as sent"])
def test_control_messages_changed_between_ranks_are_found(byte: int, changes: bool) -> None:
    """A rank that gives up tells the other, which waits. That one does not believe it if he changed
    it: it loses the first rank."""
    with another_user() as attacker:
        attack = {"on": "peer", "kind": "control" if changes else "pass", "byte": byte}
        with on_the_path(attacker, attack, ODD="1", WAIT="20") as job:
            check_unharmed(attacker, job, "DistTimeoutError")
        assert attacker.did("control", "peer") is changes
        assert ("tampered with" in job.said) is changes
        assert ("rank 0 gave up waiting" in job.said) is not changes


@pytest.mark.parametrize(
    ("without", "kind", "ends"),
    [
        pytest.param("frames objects", "pickle", "wrong", id="his code runs"),
        pytest.param("objects", "plain", "wrong", id="an object is another", marks=MORE),
        pytest.param("records", "value", "wrong", id="a value of the store is another", marks=MORE),
        pytest.param("frames", "swap", "wrong", id="messages change places", marks=LONG),
    ],
)
def test_the_same_attacks_win_without_the_protection(without: str, kind: str, ends: str) -> None:
    """Ranks that do not check records, frames or objects take what he says, and run it."""
    on, details = ("store", RECORDS[kind]) if without == "records" else ("peer", FRAMES[kind])
    with another_user() as attacker:
        attack = {"on": on, "kind": kind, "at": 0, "command": attacker.command()} | details
        attack |= {"sealed": "frames" in without, "always": kind == "value"}
        attack |= {"payload": 24} if kind == "swap" else {}
        with on_the_path(attacker, attack, WITHOUT=without) as job:
            found = {end["end"] for end in job.ended()}
        assert ends in found, (found, attacker.events(), job.said)
        assert attacker.ran_as() == ([0] * len(attacker.ran_as()))
        assert (len(attacker.ran_as()) > 0) is (kind == "pickle")


# Elements of arrays carry no tag


def test_elements_of_arrays_are_changed_on_the_path() -> None:
    """Without encryption, as docs/guide/security.md says: a rank gets another sum."""
    with another_user() as attacker:
        attack = {"on": "peer", "kind": "elements", "at": 0, "payload": 40}
        with on_the_path(attacker, attack) as job:
            assert "wrong" in {end["end"] for end in job.ended()}


@pytest.mark.parametrize(
    ("on", "at"),
    [("peer", 700), *(pytest.param(*each, marks=LONG) for each in
     [("peer", 60), ("peer", 500), ("peer", 3000), ("store", 60), ("store", 900)])],
)  # fmt: skip
@pytest.mark.parametrize("way", ["up", pytest.param("down", marks=LONG)])
def test_an_encrypted_connection_is_cut_or_carried(on: str, at: int, way: str) -> None:
    """With CYDIST_ENCRYPT=1 he sees bytes. Whichever he turns, the job ends in words."""
    with another_user() as attacker:
        attack = {"on": on, "kind": "head", "at": at, "way": way}
        with on_the_path(attacker, attack, CYDIST_ENCRYPT="1") as job:
            # Where a greeting is damaged each time, its server never hears from a client.
            check_unharmed(attacker, job, "DistStoreError", *["DistTimeoutError"] * (at == 60))
        assert f"head: {on}" in attacker.events()
        assert '"fine"' not in job.said


@pytest.mark.parametrize("settings", ["nat", *more("encrypted")])
def test_a_job_goes_on_through_a_relay_that_changes_nothing(settings: str) -> None:
    """So what ends the jobs of these tests is what he changes."""
    with another_user() as attacker:
        with on_the_path(attacker, {}, **SETTINGS[settings]) as job:
            assert [end["end"] for end in job.ended()] == ["fine", "fine"], job.said
        assert {"let through: store", "let through: peer"} <= set(attacker.events())


# Objects that torch encodes


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize("encrypts", [True, False])
def test_objects_that_torch_pickles_are_safe_if_encrypted(encrypts: bool) -> None:
    """Inside torch.distributed they are arrays to cydist. On the path he replaces them, and runs
    his command in the ranks, unless all is encrypted."""
    pytest.importorskip("torch.distributed.run")
    with another_user() as attacker:
        attack = {"on": "peer", "kind": "pickle", "torchs": True, "command": attacker.command()}
        desk = attacker.ask("desk", attack)["port"]
        settings = {"CYDIST_NAT": "1", "CYDIST_ENCRYPT": str(int(encrypts)), "WAIT": "40"}
        with Job(attacker, DESK=str(desk), MODULE="torch", **settings) as job:
            job.start(
                ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", HOST,
                 "--master-port", str(free_port()), PROGRAM],
            )  # fmt: skip
            ends = {end["end"] for end in job.ended()}
        assert "let through: peer" in attacker.events()
        assert bool(attacker.ran_as()) is not encrypts
        assert ("fine" in ends) is encrypts, (ends, job.said)


# cydistrun


def test_he_cannot_take_the_port_of_cydistruns_store() -> None:
    """The launcher listens there from the start. He may have MASTER_PORT, which is not cydist's:
    the job goes on."""
    with another_user() as attacker, Job(attacker) as job:
        job.start(["-m", "cydist.run", "--nproc-per-node", "2", PROGRAM], GATE=job.gate("gate"))
        variables = job.variables()
        ports = [int(variables["CYDIST_STORE_PORT"].split()[0]), int(variables["MASTER_PORT"])]
        assert attacker.ask("squat", ports) == {"got": ports[1:]}
        job.allow("gate.0")
        job.allow("gate.1")
        assert [end["end"] for end in job.ended()] == ["fine", "fine"], job.said


@pytest.mark.parametrize(
    "kind", ["pickle", *(pytest.param(k, marks=LONG) for k in ("plain", "head"))]
)
def test_frames_between_ranks_of_cydistrun(kind: str) -> None:
    """On the path between ranks that cydistrun has started he changes nothing unseen."""
    with another_user() as attacker:
        attack = {"on": "peer", "kind": kind, "at": 0, "command": attacker.command()} | FRAMES[kind]
        desk = attacker.ask("desk", attack)["port"]
        with Job(attacker, DESK=str(desk), CYDIST_NAT="1") as job:
            job.start(["-m", "cydist.run", "--nproc-per-node", "2", PROGRAM])
            check_unharmed(attacker, job, ranks=1)
        assert [event for event in attacker.events() if event.startswith(kind)]
        assert '"fine"' not in job.said
