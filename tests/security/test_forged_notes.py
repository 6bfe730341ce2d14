"""What a process without the secret writes where the ranks meet: it ends a start, in words.

tests/rendezvous/test_shared_store.py has the address in another library's store.
"""

from __future__ import annotations

import hmac
import itertools
import socket
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from thread_rendezvous import HOST, WAIT, check_met, meet, stand_alone, together

from cydist import _native
from cydist.backends.host import shm_setup
from cydist.errors import AuthenticationError, PeerFailedError, RendezvousError
from cydist.net import auth
from cydist.rendezvous import handlers, multicast
from cydist.rendezvous.check_in import check_in
from cydist.rendezvous.signed_notes import Address, signed, signed_address
from cydist.stores import FileStore, HashStore, MembershipStore, Store, TCPStore


@pytest.fixture(autouse=True)
def alone(secret: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No launcher, a secret."""
    stand_alone(monkeypatch, tmp_path)


class ForeignStore(HashStore):
    """A store that other processes can reach, as far as cydist knows, and `changed` changes."""

    in_process = False

    def __init__(self, key: str = "", changed: Callable[[bytes], bytes] | None = None) -> None:
        super().__init__()
        self.seen = b""
        self._key, self._changed = key, changed

    def set(self, key: str, value: Any) -> None:
        if self._changed is not None and key.endswith(self._key):
            self.seen = value if isinstance(value, bytes) else value.encode()
            value = self._changed(self.seen)
        super().set(key, value)


NAME = b"00" * 16
VERDICTS = {
    "unsigned": lambda seen: b"+2 " + NAME,
    "other name": lambda seen: seen[:3] + NAME + seen[35:],
    "other world size": lambda seen: seen.replace(b"+2 ", b"+3 "),
    "other meeting": lambda seen: b"+" + signed(f"2 {NAME.decode()}", "check-in 2 ").encode(),
    "other group": lambda seen: b"+" + signed(f"2 {NAME.decode()}", "check-in 1 b").encode(),
    "cut": lambda seen: seen[:-1],
    "only its mark": lambda seen: b"+",
    "empty": lambda seen: b"",
    "no verdict": lambda seen: b"?",
}


@pytest.mark.parametrize("kind", VERDICTS)
def test_a_forged_verdict_is_refused(kind: str) -> None:
    """Rank 0's word that all are here, and the meeting's name, in a store of the user's."""
    store = ForeignStore("job", VERDICTS[kind])
    first, second = meet(None, [0, 1], store=store)
    assert isinstance(first, tuple)
    assert isinstance(second, AuthenticationError)
    assert all(part in str(second) for part in ("rank 1", "rank 0", "secret"))


CONTROLS = b"\x1b]0;title\x07\x1b[2J\xff"  # what a terminal obeys, and no text


@pytest.mark.parametrize(
    "text",
    [b"-", b"-one", b"-1," + b"9" * 5000, b"!", b"!" + CONTROLS],
    ids=["no rank", "no number", "long number", "no text", "no text for terminals"],
)
def test_a_forged_failure_only_ends_the_start(text: bytes) -> None:
    """It tells of missing ranks or different backends: a process that can write that can also
    remove a rank's note. The terminal that shows it obeys none of it."""
    _, second = meet(None, [0, 1], store=ForeignStore("job", lambda seen: text))
    assert isinstance(second, RendezvousError)
    assert "\x1b" not in str(second)


@pytest.mark.parametrize(
    "text",
    [CONTROLS, b"x" * 1_000_000, b"9" * 5000 + b"\nwrong"],
    ids=["for terminals", "long", "long number"],
)
def test_a_forged_judgement_only_ends_the_making_of_a_group(text: bytes) -> None:
    """What the first of its ranks has found, in a store of another library."""
    store = HashStore()
    store.set("group/asks/all", text)
    with pytest.raises(RendezvousError) as caught:
        MembershipStore("group", store, [0, 1]).meet("asks", 1, [0, 1])
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 100_000


def test_a_forged_list_of_missing_ranks_only_changes_the_message() -> None:
    """What the ranks that ask for all tell the others."""
    part = MembershipStore("group", HashStore(), [0, 1])
    part.set("asks/asking", b"1000")
    part.set("asks/missing", b"9" * 5000 + b",1,x,")
    assert part.missing("asks", [0, 1]) == (1,)


def test_forged_lines_about_lost_ranks_are_shown_without_control() -> None:
    """In a store of another library that reports the ends of processes. A line that is none is
    left aside."""
    part = MembershipStore("group", HashStore(), [0, 1])
    part._check(b"no line\n\n" + b"9" * 5000 + b"\t\tlost\n2\t\tno member\n")
    with pytest.raises(PeerFailedError, match=r"rank 1 on \?\]0;title") as caught:
        part._check(b"no line\n1\t\ton " + CONTROLS + b"\n")
    assert caught.value.ranks == (1,)
    assert "\x1b" not in str(caught.value)


def test_a_repeated_verdict_leaves_its_rank_alone(secret: bytes) -> None:
    """The signed word of an earlier start names that start, and no connection is made by it."""
    recorded = ForeignStore("job", lambda seen: seen)
    check_met(meet(None, [0, 1], store=recorded))
    first, second = meet(None, [0, 1], store=ForeignStore("job", lambda seen: recorded.seen))
    assert isinstance(first, tuple)
    assert isinstance(second, tuple)
    assert first[0].nonce != second[0].nonce  # type: ignore[attr-defined]
    names = [outcome[0].part("0", [0, 1], "").nonce for outcome in (first, second)]  # type: ignore
    assert names == [first[0].nonce, second[0].nonce]  # type: ignore[attr-defined]


def test_ranks_that_were_told_different_sizes_say_so() -> None:
    """Rank 0 has met all of its two; rank 1 was told three."""
    store = ForeignStore()
    calls = [
        lambda rank=rank, size=size: handlers.rendezvous(
            store=store, rank=rank, world_size=size, timeout=WAIT
        )
        for rank, size in ((0, 2), (1, 3))
    ]
    _, second = together(*calls)
    assert isinstance(second, RendezvousError)
    assert "has met 2 ranks, and rank 1 was told a world of 3" in str(second)


SEATS = {
    "unsigned": "0 2",
    "no numbers": "one two",
    "empty": "",
    "other place": lambda: signed("0 2", "seat  0 1"),
    "other meeting": lambda: signed("0 2", "seat  1 0"),
    "other group": lambda: signed("0 2", "seat b 0 0"),
}


@pytest.mark.parametrize("kind", SEATS)
def test_a_forged_seat_is_refused(kind: str, tmp_path: Path) -> None:
    """The rank that another process asked for in a file."""
    path, text = tmp_path / "meeting", SEATS[kind]
    store = FileStore(str(path), 2, WAIT)
    try:
        assert store.add("cydist//seats/tickets", 1) == 1
        store.set("cydist//seats/0/0", text() if callable(text) else text)
        with pytest.raises(AuthenticationError, match=r"process 1 .*process 0 in file://.*secret"):
            handlers.rendezvous(f"file://{path}", world_size=2, timeout=WAIT)
    finally:
        store.close()


def test_an_old_announcement_leads_to_no_other_store() -> None:
    """It was recorded, and its port serves another store of the job now. The job meets without, and
    a process that waits in vain is told who refused it."""
    try:
        address = multicast._own_address("239.255.77.1", 9)
    except RendezvousError:
        pytest.skip("no route to 239.255.77.1")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.bind(("", 0))
        port = probe.getsockname()[1]
    other = TCPStore(address, 0, is_master=True, wait_for_workers=False, job="")
    key = auth.job_key(auth.secret(), "", b"multicast")
    place = hmac.digest(key, b"", "sha256")[:16]
    packed = socket.inet_aton(address) + bytes(12)
    fields = (multicast._MAGIC, place, bytes(16), packed, other.port, b"")
    head = multicast._ANNOUNCEMENT.pack(*fields)[:-32]
    recorded = head + hmac.digest(key, head, "sha256")
    sending, done = multicast._MulticastGroup._announce, itertools.count()

    def announce(group: Any) -> None:
        next(done)
        group._sender.sendto(recorded, group._to)
        sending(group)

    url = f"tcp://239.255.77.1:{port}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(multicast._MulticastGroup, "_announce", announce)
        check_met(meet(url, [0, 1]))
        with pytest.raises(RendezvousError, match=r"1 of 2 processes.*refused each other"):
            handlers.rendezvous(url, rank=0, world_size=2, timeout=1)
    assert next(done)
    other.close()


# Who shares memory, on one host


def part_of(store: Store, group: str = "g", nonce: bytes = b"meeting") -> MembershipStore:
    """A group's part of a store, after the check-in."""
    part = MembershipStore(group, store, [0, 1])
    part.nonce = nonce
    return part


MEMORIES: dict[str, Callable[[Store, bytes], MembershipStore]] = {
    "another meeting": lambda store, note: part_of(store, nonce=b"another meeting"),
    "another group": lambda store, note: part_of(store, group="h"),
    "another process": lambda store, note: part_of(store),
}


@pytest.mark.parametrize("kind", MEMORIES)
def test_memory_of_another_job_is_not_mapped_for_a_forged_note(kind: str) -> None:
    """Somebody copies the word of a job's rank 0, which has its token, into another job's place."""
    store = HashStore()
    memory = shm_setup._memory(part_of(store), 0, [0, 1])
    assert memory is not None
    note = store.get("g/memory/0")
    assert shm_setup._memory(part_of(store), 1, [0, 1]) is not None
    forged = MEMORIES[kind](store, note)
    if kind == "another process":
        note = note.replace(b"%d" % memory.fd, b"0", 1)
    forged.set("memory/0", note)
    with pytest.raises(AuthenticationError, match=r"rank 1 .*rank 0 in the ranks' store"):
        shm_setup._memory(forged, 1, [0, 1])


def share(part: MembershipStore, rank: int) -> None:
    """Look for memory to share with the other of two ranks on one host."""
    link = _native.TcpLink(rank, 2)
    try:
        shm_setup.share_memory(part, link, [0, 0], [0, 1])
    finally:
        link.close()


def signed_elsewhere(text: str, key: str) -> dict[str, Callable[[MembershipStore], str]]:
    """Notes that ranks have signed for another meeting, and for another group."""
    elsewhere = {
        "of another meeting": part_of(HashStore(), nonce=b"other"),
        "of another group": part_of(HashStore(), group="h"),
    }
    notes = {name: signed(text, shm_setup._purpose(part, key)) for name, part in elsewhere.items()}
    return {name: lambda _, note=note: note for name, note in notes.items()}


# Notes in place of rank 1's word "4711", that it shares memory as this process.
WORDS: dict[str, Callable[[MembershipStore], str]] = {
    "a process": lambda part: "1",
    "no process": lambda part: "no",
    "no word": lambda part: "one",
    "of rank 0": lambda part: signed("4711", shm_setup._purpose(part, "shares/0/0")),
    "all words": lambda part: signed("4711", shm_setup._purpose(part, "shares/0")),
    **signed_elsewhere("4711", "shares/0/1"),
}


@pytest.mark.parametrize("kind", WORDS)
def test_no_other_process_is_taken_for_a_peer(kind: str) -> None:
    """Ranks read and write the memory of the processes that they take for their peers."""
    part = part_of(HashStore(WAIT))
    part.set("shares/0/1", WORDS[kind](part))
    with pytest.raises(AuthenticationError, match=r"rank 0 .*rank 1 in the ranks' store"):
        share(part, 0)
    with pytest.raises(RendezvousError, match=r"rank 0 .*rank 1 in the ranks' store"):
        share(part, 1)  # which is told, and does not wait


LISTS: dict[str, Callable[[MembershipStore], str]] = {
    "processes": lambda part: "4711 4712",
    "rank 0's word": lambda part: signed("4711 4712", shm_setup._purpose(part, "shares/0/0")),
    **signed_elsewhere("4711 4712", "shares/0"),
}


@pytest.mark.parametrize("kind", LISTS)
def test_no_other_list_of_peers_is_taken(kind: str) -> None:
    """Ranks read the list that rank 0 makes of all words, and no other."""
    part = part_of(HashStore())
    memory = shm_setup._memory(part, 0, [0, 1])
    assert memory is not None
    part.set("shares/0/all", f"+{LISTS[kind](part)}")
    with pytest.raises(AuthenticationError, match=r"rank 1 .*rank 0 in the ranks' store"):
        share(part, 1)


class Comm:
    """MPI's world of two ranks, from rank 1's side; rank 0 sends `messages`."""

    def __init__(self, messages: list[bytes]) -> None:
        self._messages = messages

    def Irecv(self, buffer: Any, source: int, tag: int) -> Any:
        message = self._messages.pop(0)
        buffer[0][: len(message)] = message
        return SimpleNamespace(Test=lambda: True, Cancel=lambda: None)


@pytest.mark.parametrize("kind", ["unsigned", "other job", "other purpose", "cut", "other size"])
def test_a_forged_address_over_mpi_is_refused(kind: str) -> None:
    """It leads the rank nowhere."""
    address = Address(3 if kind == "other size" else 2, HOST, 1, "0a0b0c0d")
    note = signed_address(
        address,
        "mpi b" if kind == "other purpose" else "mpi ",
        "another" if kind == "other job" else "",
    )
    if kind == "unsigned":
        note = f"2 {HOST} 1 0a0b0c0d"
    elif kind == "cut":
        note = note[:-1]
    messages = [
        handlers._OFFER.pack(False, 0, bytes(16), b""),
        handlers._ADDRESS.pack(b"", False, note.encode()),
    ]
    MPI = SimpleNamespace(COMM_WORLD=Comm(messages), ANY_SOURCE=-1, BYTE=None)
    call = handlers._InitArguments(None, 1, 2, "", float("inf"), handlers.ExitStack())
    wanted = RendezvousError if kind == "other size" else AuthenticationError
    with pytest.raises(wanted, match=r"rank 0.* in a message over MPI"):
        handlers._by_mpi(call, MPI)


class TamperedStore(TCPStore):
    """A store whose connection somebody changes once the ranks wait."""

    def watch(self, *args: Any, **kwargs: Any) -> Any:
        raise AuthenticationError("the connection was tampered with")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_store_that_was_tampered_with_is_not_a_missing_rank(rank: int) -> None:
    """The error of the check-in is the cause, not who has not come."""
    served = TCPStore(HOST, 0, None, True, WAIT, wait_for_workers=False)
    store: Store = TamperedStore(HOST, served.port, None, False, WAIT, wait_for_workers=False)
    try:
        with pytest.raises(AuthenticationError, match=f"rank {rank}: .*tampered with"):
            check_in(store, rank, 2, deadline=float("inf"))
    finally:
        store.close()
        served.close()


def test_jobs_of_one_user_stay_apart_by_group_names() -> None:
    """Started by hand, they have one secret and no job's id: rank 1 of job b, given the port of job
    a, is not taken for job a's rank 1, as it would be without names."""
    port = TCPStore(HOST, 0, None, True, WAIT, wait_for_workers=False)
    url = f"tcp://{HOST}:{port.port}"
    port.close()

    def rank(number: int, name: str, timeout: float) -> Callable[[], Any]:
        return lambda: handlers.rendezvous(
            url, rank=number, world_size=2, group_name=name, timeout=timeout
        )

    first, second = together(rank(0, "a", 1.0), rank(1, "b", 0.5))
    assert isinstance(first, RendezvousError)
    assert "missing: rank 1" in str(first)
    assert isinstance(second, RendezvousError)
    assert "group_name" in str(second)


@pytest.mark.parametrize(
    "meet_by",
    [
        lambda: handlers.rendezvous(f"tcp://{HOST}:1", rank=0, world_size=1),
        lambda: handlers.rendezvous_through(
            HashStore(), lambda deadline: HOST, rank=0, world_size=1, timeout=1
        ),
    ],
    ids=["address", "torch"],
)
def test_a_setting_of_an_old_design_is_not_ignored(
    meet_by: Callable[[], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """CYDIST_TLS=1 asks for protection that there is none of by that name."""
    monkeypatch.setenv("CYDIST_TLS", "1")
    with pytest.raises(ValueError, match="CYDIST_ENCRYPT=1"):
        meet_by()
