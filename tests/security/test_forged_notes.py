"""What a process without the secret writes where the ranks meet: it ends a start, in words.

tests/security/test_forged_start.py goes through all keys of a start, and
tests/rendezvous/test_shared_store.py has the address in another library's store.
"""

from __future__ import annotations

import hmac
import itertools
import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from thread_rendezvous import HOST, WAIT, check_met, meet, stand_alone, together

from cydist import _native
from cydist.backends.host import shm_setup
from cydist.errors import (
    AuthenticationError,
    DistStoreError,
    PeerFailedError,
    RendezvousError,
    StoreTimeoutError,
    UnsupportedError,
)
from cydist.net import auth
from cydist.net.signed_notes import signed
from cydist.rendezvous import handlers, mpi_address, multicast
from cydist.rendezvous.address_note import Address, signed_address
from cydist.rendezvous.check_in import check_in
from cydist.rendezvous.init_arguments import InitArguments
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
    "other meeting": lambda seen: signed(b"+2 " + NAME, "check-in 2  cydist//2/job"),
    "other group": lambda seen: signed(b"+2 " + NAME, "check-in 1 b cydist/b/1/job"),
    "other key": lambda seen: signed(b"+2 " + NAME, "check-in 1  cydist//1/here/0"),
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
    assert all(part in str(second) for part in ("rank 1", "'cydist//1/job'", "secret"))


CONTROLS = b"\x1b]0;title\x07\x1b[2J\xff"  # what a terminal obeys, and no text


@pytest.mark.parametrize(
    "text",
    [b"-", b"-one", b"-1," + b"9" * 5000, b"!", b"!" + CONTROLS],
    ids=["no rank", "no number", "long number", "no text", "no text for terminals"],
)
def test_a_forged_failure_is_refused(text: bytes) -> None:
    """That ranks are missing, or ask for different backends."""
    _, second = meet(None, [0, 1], store=ForeignStore("job", lambda seen: text))
    assert isinstance(second, AuthenticationError)
    assert "\x1b" not in str(second)


@pytest.mark.parametrize(
    "text",
    [CONTROLS, b"x" * 1_000_000, b"9" * 5000 + b"\nwrong"],
    ids=["for terminals", "long", "long number"],
)
def test_a_judgement_is_shown_without_control(text: bytes) -> None:
    """Return the finding of the first of its ranks."""
    store = HashStore()
    store.set("group/asks/all", text)
    with pytest.raises(RendezvousError) as caught:
        MembershipStore("group", store, [0, 1]).meet("asks", 1, [0, 1])
    assert "\x1b" not in str(caught.value)
    assert len(str(caught.value)) < 100_000


def test_a_list_of_missing_ranks_may_be_anything() -> None:
    """What the ranks that ask for all tell the others."""
    part = MembershipStore("group", HashStore(), [0, 1])
    part.set("asks/asking", b"1000")
    part.set("asks/missing", b"9" * 5000 + b",1,x,")
    assert part.missing("asks", [0, 1]) == (1,)


def test_a_forged_list_of_missing_ranks_is_ignored() -> None:
    """The rank asks about all itself."""
    store = ForeignStore()
    part = part_of(store)
    part.set("asks/0", b"")
    store.set("g/asks/asking", b"1000")
    store.set("g/asks/missing", b"0,7")
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


def test_a_repeated_verdict_is_refused() -> None:
    """The signed word of an earlier start names that start, and what follows is of this one."""
    recorded = ForeignStore("job", lambda seen: seen)
    check_met(meet(None, [0, 1], store=recorded))
    first, second = meet(None, [0, 1], store=ForeignStore("job", lambda seen: recorded.seen))
    assert isinstance(first, tuple)
    assert isinstance(second, AuthenticationError)
    assert "rank 1 " in str(second)


def test_a_forged_note_of_a_rank_is_told_to_the_others() -> None:
    """Rank 0 reads them, and the others do not wait for it."""
    store = ForeignStore("here/2", lambda seen: b"")
    first, second, _ = meet(None, [0, 1, 2], store=store)
    assert isinstance(first, AuthenticationError)
    assert isinstance(second, RendezvousError)
    for error in (first, second):
        assert all(part in str(error) for part in ("rank 0", "'cydist//1/here/2'", "secret"))


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


def seat(text: str, number: int = 0, key: str = "1", group: str = "") -> bytes:
    """A note that a process with the secret has signed, where ranks are given out."""
    return signed(text, f"seats {group} {number} cydist/{group}/seats/{number}/wanted/{key}")


def unsigned(key: str) -> dict[str, bytes]:
    """Notes that no process has signed for this key and this start."""
    return {
        "unsigned": b"0 2 00",
        "no numbers": b"one two three",
        "empty": b"",
        "other place": seat("0 2 00", key="7"),
        "other meeting": seat("0 2 00", number=1, key=key),
        "other group": seat("0 2 00", group="b", key=key),
    }


def given_a_rank(path: Path, notes: dict[str, bytes]) -> Any:
    """Join in a file in which another process has written, under the keys of the first meeting
    there."""
    store = FileStore(str(path), 3, WAIT)
    try:
        for key, note in notes.items():
            store.set(f"cydist//seats/{key}", note)
        return handlers.rendezvous(f"file://{path}", world_size=2, timeout=WAIT)
    finally:
        store.close()


@pytest.mark.parametrize("kind", unsigned("1"))
def test_a_forged_seat_is_refused(kind: str, tmp_path: Path) -> None:
    """The rank that another process asked for in a file, which the first process reads."""
    with pytest.raises(AuthenticationError, match=r"number 0 .*wanted/1' in file://.*secret"):
        given_a_rank(tmp_path / "meeting", {"0/wanted/1": unsigned("1")[kind]})


@pytest.mark.parametrize("kind", unsigned("all"))
def test_a_forged_list_of_seats_is_refused(kind: str, tmp_path: Path) -> None:
    """Which the first process makes, and the others read."""
    notes = {"tickets": b"1", "0/wanted/all": unsigned("all")[kind]}
    with pytest.raises(AuthenticationError, match=r"number 1 .*wanted/all' in file://.*secret"):
        given_a_rank(tmp_path / "meeting", notes)


def test_seats_of_an_earlier_start_are_refused(tmp_path: Path) -> None:
    """Another job of the same user has signed them, in another file: by them a process would take
    a rank that it was not given here."""
    notes = {"tickets": b"1", "0/wanted/all": seat("+1 2 00\n-1 2 00", key="all")}
    with pytest.raises(AuthenticationError, match=r"number 1 .*in file://.*earlier start"):
        given_a_rank(tmp_path / "meeting", notes)


def test_an_old_note_of_a_seat_only_ends_the_start(tmp_path: Path) -> None:
    """It is repeated to the first process in place of the second one's: that finds it in the list,
    and the first one misses it."""
    path, old = tmp_path / "meeting", seat("1 2 00")
    with pytest.MonkeyPatch.context() as patch:

        def write(self: FileStore, key: str, value: Any, write: Any = FileStore.set) -> None:
            write(self, key, old if key.endswith("seats/0/wanted/1") else value)

        patch.setattr(FileStore, "set", write)
        ended = meet(f"file://{path}", [-1, -1], timeout=2)
    assert sorted(type(each).__name__ for each in ended) == [
        "AuthenticationError", "RendezvousError",
    ]  # fmt: skip
    assert any("earlier start" in str(each) for each in ended)


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


def part_of(
    store: Store, group: str = "g", name: str = "meeting", rank: int = 1
) -> MembershipStore:
    """A group's part of a store, after the check-in of a rank."""
    part = MembershipStore(group, store, [0, 1])
    part.sign(name, rank)
    return part


MEMORIES: dict[str, Callable[[Store], MembershipStore]] = {
    "another meeting": lambda store: part_of(store, name="another meeting"),
    "another group": lambda store: part_of(store, group="h"),
    "another process": part_of,
}


@pytest.mark.parametrize("kind", MEMORIES)
def test_memory_of_another_job_is_not_mapped_for_a_forged_note(kind: str) -> None:
    """Somebody copies the word of a job's rank 0, which has its token, into another job's place."""
    store = ForeignStore()
    memory = shm_setup._memory(part_of(store, rank=0), 0, [0, 1])
    assert memory is not None
    note = store.get("g/memory/0")
    assert shm_setup._memory(part_of(store), 1, [0, 1]) is not None
    forged = MEMORIES[kind](store)
    if kind == "another process":
        note = note.replace(b"%d" % memory.fd, b"0", 1)
    store.set(f"{forged.path}memory/0", note)
    with pytest.raises(AuthenticationError, match=r"rank 1 .*memory/0' in the ranks' store"):
        shm_setup._memory(forged, 1, [0, 1])


def share(part: MembershipStore, rank: int) -> None:
    """Look for memory to share with the other of two ranks on one host."""
    link = _native.TcpLink(rank, 2)
    try:
        shm_setup.share_memory(part, link, [0, 0], [0, 1])
    finally:
        link.close()


def notes_in_place_of(text: str, key: str) -> dict[str, bytes]:
    """Notes that are not signed, and those that ranks have signed for another meeting, another
    group, and other keys."""
    return {
        "no text": b"",
        "unsigned": text.encode(),
        "of another meeting": signed(text, f"other g/{key}"),
        "of another group": signed(text, f"meeting h/{key}"),
        "of rank 0": signed(text, "meeting g/shares/0/0"),
        "of no rank": signed(text, "meeting g/shares/0"),
    }


@pytest.mark.parametrize("kind", notes_in_place_of("", ""))
def test_no_other_process_is_taken_for_a_peer(kind: str) -> None:
    """Ranks read and write the memory of the processes that they take for their peers."""
    forged = notes_in_place_of("4711", "shares/0/1")[kind]
    store = ForeignStore("shares/0/1", lambda seen: forged)
    store.set("g/shares/0/1", b"")
    with pytest.raises(AuthenticationError, match=r"rank 0 .*shares/0/1' in the ranks' store"):
        share(part_of(store, rank=0), 0)
    with pytest.raises(AuthenticationError, match=r"rank 0 .*shares/0/1' in the ranks' store"):
        share(part_of(store), 1)  # which is told, and does not wait


@pytest.mark.parametrize("kind", notes_in_place_of("", ""))
def test_no_other_list_of_peers_is_taken(kind: str) -> None:
    """Ranks read the list that rank 0 makes of all words, and no other."""
    store = ForeignStore()
    memory = shm_setup._memory(part_of(store, rank=0), 0, [0, 1])
    assert memory is not None
    store.set("g/shares/0/all", notes_in_place_of("+4711 4712", "shares/0/all")[kind])
    with pytest.raises(AuthenticationError, match=r"rank 1 .*shares/0/all' in the ranks' store"):
        share(part_of(store), 1)


# Every kind of value of a part that signs


def test_a_part_that_signs_is_a_store_still() -> None:
    """For backends of others, and torch's, which meet in it."""
    store = ForeignStore()
    here, there = part_of(store, rank=0), part_of(store)
    here.multi_set(["a", "b"], ["1", b"2"])
    assert there.multi_get(["a", "b"]) == [b"1", b"2"]
    assert here.compare_set("new", "", "first") == b"first"
    assert there.compare_set("new", "", "second") == b"first"
    assert there.compare_set("new", "first", "second") == b"second"
    assert there.compare_set("none", "other", "second") == b"other"
    here.queue_push("queue", "v")
    assert there.queue_pop("queue") == b"v"
    assert [here.add("count", 2), there.add("count", 0)] == [2, 2]
    with pytest.raises(ValueError, match=r"2 keys but 1 value$"):
        here.multi_set(["a", "b"], ["1"])
    assert not here.has_extended_api()
    with pytest.raises(UnsupportedError, match="signed as a whole"):
        here.append("a", "more")
    below = here.part("sub", [0, 1], "", None)
    below.set("a", "deeper")
    assert there.part("sub", [0, 1], "").clone().get("a") == b"deeper"


@pytest.mark.parametrize("how", ["compare_set", "queue_pop", "get"])
def test_no_kind_of_value_is_taken_unsigned(how: str) -> None:
    """Somebody else has written it."""
    store = ForeignStore()
    store.set("g/key", "value")
    store.queue_push("g/key", "value")
    part = part_of(store)
    calls: dict[str, Callable[[], bytes]] = {
        "compare_set": lambda: part.compare_set("key", "other", "new"),
        "queue_pop": lambda: part.queue_pop("key"),
        "get": lambda: part.get("key"),
    }
    with pytest.raises(AuthenticationError, match=r"rank 1 .*'g/key'"):
        calls[how]()


def test_values_are_not_signed_where_nobody_else_can_write() -> None:
    """In the memory of one process, and in a store whose clients prove to know the secret."""
    served = TCPStore(HOST, 0, None, True, WAIT, wait_for_workers=False)
    for store in (HashStore(), served):
        assert not part_of(store).signs
    assert part_of(ForeignStore()).signs
    served.close()


class TheirStore:
    """A store of another library, whose waits end in its own errors."""

    def __init__(self, error: str, below: HashStore) -> None:
        self._error, self._below = error, below

    def wait(self, keys: Any, timeout: Any) -> None:
        try:
            self._below.wait(keys, 0 if self._error == "Broken pipe" else timeout)
        except StoreTimeoutError:
            raise RuntimeError(self._error) from None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._below, name)


def test_another_librarys_timeout_names_who_is_missing() -> None:
    """As that of cydist's stores does. An error before it is another one. Both say where."""
    part = MembershipStore("g", TheirStore("Socket Timeout", HashStore()), [0, 1])
    part.set_timeout(0.1)
    with pytest.raises(StoreTimeoutError, match="rank 1 did not come"):
        part.digest("peers", 0, [0, 1], b"", b"".join)
    part.sign("meeting", 0)
    with pytest.raises(StoreTimeoutError, match=r"^rendezvous on rank 0: timeout .* for 'g/key'"):
        part.get("key")
    broken = MembershipStore("g", TheirStore("Broken pipe", HashStore()), [0, 1])
    broken.sign("meeting", 1)
    words = "^rendezvous on rank 1: the store failed: Broken pipe"
    with pytest.raises(DistStoreError, match=words) as caught:
        broken.get("key")
    assert not isinstance(caught.value, StoreTimeoutError)


class Comm:
    """MPI's world of two ranks, from rank 1's side; rank 0 sends `messages`."""

    def __init__(self, messages: list[bytes]) -> None:
        self._messages = messages

    def Irecv(self, buffer: Any, source: int, tag: int) -> Any:
        message = self._messages.pop(0)
        buffer[0][: len(message)] = message
        return SimpleNamespace(Test=lambda: True, Cancel=lambda: None)

    def Iprobe(self) -> bool:
        return False


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
        note = f"2 {HOST} 1 0a0b0c0d".encode()
    elif kind == "cut":
        note = note[:-1]
    messages = [
        mpi_address._OFFER.pack(False, 0, bytes(16), b""),
        mpi_address._ADDRESS.pack(b"", False, note),
    ]
    MPI = SimpleNamespace(COMM_WORLD=Comm(messages), ANY_SOURCE=-1, BYTE=None)
    call = InitArguments(None, 1, 2, "", float("inf"), ExitStack())
    wanted = RendezvousError if kind == "other size" else AuthenticationError
    with pytest.raises(wanted, match=r"rank 0.* in a message over MPI"):
        mpi_address.by_mpi(call, MPI)


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
