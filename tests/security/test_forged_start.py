"""Two ranks start in a store in which another process writes, too: whatever it writes there, a rank
takes no value for a peer's that no peer has written, and each ends with a typed error, in words.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from extra_values import more
from hypothesis import given, settings
from hypothesis import strategies as st
from thread_rendezvous import HOST, stand_alone, together

from cydist.api import process_groups
from cydist.backends.host import directory
from cydist.backends.host.connections import Connections
from cydist.backends.host.directory import Peers, encode_partition
from cydist.errors import AuthenticationError, DistError, RendezvousError
from cydist.net.signed_notes import signed
from cydist.rendezvous import launcher_env
from cydist.stores import FileStore, HashStore
from cydist.stores.store import Value, as_bytes

Change = Callable[[str, bytes], bytes]
WAIT = 2.0  # seconds, of a rank whose peer has given up
LONG = 30.0

# All keys of a start of two ranks, without what is before them, and a reader of each.
KEYS = {
    "here/0": 0,
    "here/1": 0,
    "job": 1,
    "fresh/1": 1,
    "0/tcp/job": 1,
    "0/tcp/peers/0": 0,
    "0/tcp/peers/1": 0,
    "0/tcp/peers/all": 1,
    "0/tcp/memory/0": 1,
    "0/tcp/shares/0/0": 0,
    "0/tcp/shares/0/1": 0,
    "0/tcp/shares/0/all": 1,
    "0/made/tcp/0": 0,
    "0/made/tcp/1": 0,
    "0/made/tcp/all": 1,
    "crossings": 1,  # codespell:ignore crossings
}
PREFIX = "cydist//1/"  # of the first meeting


@pytest.fixture(autouse=True)
def alone(secret: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No launcher, a secret."""
    stand_alone(monkeypatch, tmp_path)


def nothing(key: str, value: bytes) -> bytes:
    return value


class OthersWrite:
    """A store of another library, in which a process changes values as soon as they are set."""

    in_process = False

    def __init__(self, below: Any, change: Change) -> None:
        self._below, self._change = below, change

    def set(self, key: str, value: Value) -> None:
        self._below.set(key, self._change(key, as_bytes(value)))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._below, name)


def joined(rank: int, timeout: float = WAIT, **where: Any) -> Callable[[], None]:
    """A rank that joins, on a thread of its own, and leaves."""

    def run() -> None:
        process_groups.thread_is_rank()
        process_groups.init_process_group("tcp", rank=rank, world_size=2, timeout=timeout, **where)
        with suppress(DistError):
            process_groups.destroy_process_group()

    return run


def in_a_store(change: Change, timeout: float = WAIT) -> list[Exception | None]:
    """How the start of two ranks ends in a store of the user's."""
    store = OthersWrite(HashStore(timeout), change)
    return together(*(joined(rank, store=store, timeout=timeout) for rank in range(2)))


def in_a_file(change: Change, timeout: float, path: Path) -> list[Exception | None]:
    """The same in a file that ranks find by a URL."""
    with pytest.MonkeyPatch.context() as patch:

        def write(self: FileStore, key: str, value: Any, write: Any = FileStore.set) -> None:
            write(self, key, change(key, as_bytes(value)))

        patch.setattr(FileStore, "set", write)
        url = f"file://{path}"
        return together(*(joined(rank, init_method=url, timeout=timeout) for rank in range(2)))


def in_torchs_store(change: Change, timeout: float) -> list[Exception | None]:
    """The same in a TCPStore of torch's, such as torchrun's."""
    torch_distributed = pytest.importorskip("torch.distributed")
    wait = timedelta(seconds=timeout)
    served = torch_distributed.TCPStore(HOST, 0, None, True, wait, wait_for_workers=False)

    def store() -> OthersWrite:
        client = torch_distributed.TCPStore(HOST, served.port, None, False, wait)
        return OthersWrite(client, change)

    return together(*(joined(rank, store=store(), timeout=timeout) for rank in range(2)))


Start = Callable[[Change, float], list[Exception | None]]


@pytest.fixture(params=["store", "file", "torch"])
def start(request: pytest.FixtureRequest, tmp_path: Path) -> Start:
    """How two ranks start: in a store of the user's, a file, or a store of torch's."""
    ways: dict[str, Start] = {
        "store": in_a_store,
        "file": lambda change, timeout: in_a_file(change, timeout, tmp_path / "meeting"),
        "torch": in_torchs_store,
    }
    return ways[request.param]


def only(wanted: str, change: Callable[[bytes], bytes]) -> Change:
    """Change the value of this key."""
    return lambda key, value: change(value) if key == PREFIX + wanted else value


def check_refused(ended: list[Exception | None], key: str) -> None:
    """The reader of the key says which rank, which key, and what to do; the other ends in words."""
    reader = KEYS[key]
    error = ended[reader]
    assert isinstance(error, AuthenticationError), ended
    assert re.search(f"rank {reader} .*'{PREFIX}{key}' .*CYDIST_SECRET_FILE", str(error)), error
    if key != "0/made/tcp/all":  # which rank 0 writes when it has made its group
        assert isinstance(ended[1 - reader], DistError)


def test_these_are_all_keys(start: Start) -> None:
    """KEYS lists them, and no rank is refused where no value is changed."""
    seen = set()

    def look(key: str, value: bytes) -> bytes:
        seen.add(key)
        return value

    assert start(look, LONG) == [None, None]
    assert {key.removeprefix(PREFIX) for key in seen if "/seats/" not in key} == KEYS.keys()


def test_the_docs_list_all_keys() -> None:
    """docs/guide/security.md has a row for each."""
    docs = (Path(__file__).parents[2] / "docs/guide/security.md").read_text()
    for key in KEYS:
        row = re.sub(r"\b\d+\b", "N", key).removeprefix("N/tcp/").removeprefix("N/")
        row = row.replace("made/tcp", "made/BACKEND")
        assert f"`{row}`" in docs, row


def hosts_apart(value: bytes) -> bytes:
    """Say of two ranks that they are on two hosts; which share memory stays as it is."""
    hosts, domains = directory._SIZES.unpack_from(value, 1)
    rest = value[1 + directory._SIZES.size + hosts :]
    part = encode_partition([0, 1])
    return value[:1] + directory._SIZES.pack(len(part), domains) + part + rest


TABLES = {
    "empty": lambda value: b"",
    "nothing made": lambda value: b"+",
    "cut": lambda value: value[:-1],
    "no text": lambda value: b"\xff\xfe\0",
    "an error": lambda value: b"0\nrank 0 is not here",
    "hosts apart": hosts_apart,
    "its end": lambda value: value[:-1] + bytes([value[-1] ^ 1]),
}


@pytest.mark.parametrize(
    "kind", ["nothing made", "no text", "hosts apart", *more("empty", "cut", "an error", "its end")]
)
def test_a_forged_table_of_peers_is_refused(kind: str, start: Start) -> None:
    """It says who shares a host, and so whose silence is the end of a host."""
    check_refused(start(only("0/tcp/peers/all", TABLES[kind]), WAIT), "0/tcp/peers/all")


@pytest.mark.filterwarnings("ignore:CYDIST_INSECURE=1")
def test_without_authentication_a_forged_table_of_peers_is_believed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Anyone can sign with a public key. Ranks on one host then take each other for far away, and
    the loss of one does not tell them of the other's."""
    monkeypatch.setenv("CYDIST_INSECURE", "1")
    meeting, believed = "", []

    def resign(key: str, note: bytes) -> bytes:
        nonlocal meeting
        value = note.rpartition(b" ")[0]
        if key == PREFIX + "job":
            meeting = value.decode().split(" ")[1]
        if key != PREFIX + "0/tcp/peers/all":
            return note
        return signed(hosts_apart(value), f"meeting {meeting} {key}")

    def know(self: Connections, peers: Peers, know: Any = Connections.know) -> None:
        believed.append(list(peers.hosts))
        know(self, peers)

    monkeypatch.setattr(Connections, "know", know)
    assert in_a_store(resign, LONG) == [None, None]
    assert [0, 1] in believed


def test_a_name_of_links_that_is_no_text_is_refused(
    start: Start,
) -> None:
    """All connections of the job have it."""
    check_refused(start(only("0/tcp/job", lambda value: b"\xff\xfe"), WAIT), "0/tcp/job")


@pytest.mark.parametrize("key", KEYS)
def test_other_bytes_are_refused_under_each_key(key: str) -> None:
    """And a value that was written under another key, which ranks have signed for that one."""
    check_refused(in_a_store(only(key, lambda value: b"+\xff\0 1")), key)
    seen: dict[str, bytes] = {}

    def moved(name: str, value: bytes) -> bytes:
        seen[name] = value
        elsewhere = [seen[each] for each in seen if each != name]
        return elsewhere[-1] if elsewhere and name == PREFIX + key else value

    if key not in ("here/0", "here/1"):  # which may be the first
        check_refused(in_a_store(moved), key)


def values_of_a_start() -> dict[str, bytes]:
    """The values that two ranks have written, by key."""
    recorded: dict[str, bytes] = {}

    def record(name: str, value: bytes) -> bytes:
        recorded[name] = value
        return value

    assert in_a_store(record, LONG) == [None, None]
    return recorded


@pytest.mark.parametrize("key", KEYS)
def test_a_value_of_an_earlier_start_is_refused_under_each_key(key: str) -> None:
    """One note of it. What ranks write before they have met is of this start by another check."""
    recorded = values_of_a_start()
    ended = in_a_store(only(key, lambda value: recorded[PREFIX + key]))
    assert any(isinstance(error, AuthenticationError) for error in ended) or key == "here/0", ended
    assert all(error is None or isinstance(error, DistError) for error in ended)


def test_an_earlier_start_as_a_whole_is_refused() -> None:
    """Somebody repeats to rank 1 all that an earlier start's ranks wrote and signed: otherwise it
    would join that one, whose ranks may still be there."""
    recorded = values_of_a_start()
    below = HashStore(WAIT)
    for name, value in recorded.items():
        below.set(name, value)
    (error,) = together(joined(1, store=OthersWrite(below, nothing)))
    assert isinstance(error, AuthenticationError)
    assert re.search("rank 0 has read another note of rank 1 .*earlier start", str(error))


@pytest.mark.parametrize("kind", ["file", "store"])
def test_ranks_of_two_jobs_do_not_meet(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """One user's launchers have started both, with one secret, and somebody shows a rank of one
    the notes of the other."""
    jobs = threading.local()
    monkeypatch.setattr(launcher_env, "job_id", lambda: jobs.name)
    store = OthersWrite(HashStore(WAIT), nothing)
    where = {"store": store} if kind == "store" else {"init_method": f"file://{tmp_path}/meeting"}

    def rank(number: int, job: str) -> Callable[[], None]:
        def run() -> None:
            jobs.name = job
            joined(number, **where)()

        return run

    ended = together(rank(0, "torchrun a"), rank(1, "torchrun b"))
    assert all(isinstance(error, DistError) for error in ended)
    assert any(
        isinstance(error, AuthenticationError) and "another job did (this one is" in str(error)
        for error in ended
    )
    assert together(rank(0, "torchrun a"), rank(1, "torchrun a")) == [None, None]


def test_who_stands_between_jobs_without_names_mixes_them() -> None:
    """They have one secret, one size, and nothing that tells them apart: rank 1 of one is shown the
    store of the other, whose rank 1 has not come."""
    one, other = HashStore(LONG), HashStore(WAIT)
    rank_1s = OthersWrite(other, nothing)
    rank_1s._below = one
    first, missed, led = together(
        joined(0, LONG, store=OthersWrite(one, nothing)),
        joined(0, WAIT, store=OthersWrite(other, nothing)),
        joined(1, LONG, store=rank_1s),
    )
    assert (first, led) == (None, None)
    assert isinstance(missed, RendezvousError)
    assert missed.ranks == (1,)


@pytest.mark.parametrize("returned", [None, "text", 1 << 62, [300]], ids=str)
def test_what_is_no_value_ends_in_words(returned: Any) -> None:
    """A store of another library returns it; a number is not a size of memory to take."""

    class Strange(OthersWrite):
        def multi_get(self, keys: list[str]) -> list[Any]:
            return [returned for _ in self._below.multi_get(keys)]

    store = Strange(HashStore(WAIT), nothing)
    ended = together(*(joined(rank, store=store) for rank in range(2)))
    assert all(isinstance(error, DistError) for error in ended), ended
    assert "must return bytes" in str(ended[0])


@pytest.mark.parametrize(
    "returned", [None, "no number", "9" * 5000], ids=lambda each: str(each)[:9]
)
def test_a_count_that_is_none_ends_in_words(returned: Any) -> None:
    """The same of a counter."""

    class Strange(OthersWrite):
        def add(self, key: str, amount: int) -> Any:
            return returned

    store = Strange(HashStore(WAIT), nothing)
    (error,) = together(joined(1, store=store))
    assert isinstance(error, DistError)
    assert "in place of a number" in str(error)


@pytest.mark.parametrize("call", ["add", "set", "check", "multi_get"])
def test_what_another_librarys_store_raises_is_a_typed_error(call: str) -> None:
    """torch's server hangs up on a rank whose counter somebody has made no number."""

    class Failing(OthersWrite):
        def fail(self, *args: Any) -> Any:
            raise RuntimeError("Failed to recv, got 0 bytes")

    setattr(Failing, call, Failing.fail)
    store = Failing(HashStore(WAIT), nothing)
    ended = together(*(joined(rank, store=store) for rank in range(2)))
    assert all(isinstance(error, DistError) for error in ended), ended
    assert any("Failed to recv" in str(error) for error in ended)


@pytest.mark.parametrize("kind", ["file", "store"])
def test_counters_that_are_no_numbers_end_in_words(kind: str, tmp_path: Path) -> None:
    """Counters are not signed: a forged one leads a rank to a meeting of its own."""
    path = tmp_path / "meeting"
    below: Any = FileStore(str(path), -1, WAIT) if kind == "file" else HashStore(WAIT)
    for value in (b"no number", b"7", b"-1"):
        below.set("cydist//arrivals/1", value)
        ended = together(*(joined(rank, store=OthersWrite(below, nothing)) for rank in range(2)))
        assert all(isinstance(error, DistError) for error in ended)
        below.delete_key("cydist//arrivals/0")


@pytest.mark.fuzz
@settings(max_examples=25)
@given(st.sampled_from(sorted(KEYS)), st.binary(max_size=99) | st.integers(0, 10**4), st.booleans())
def test_any_bytes_end_in_a_typed_error(key: str, put: bytes | int, before: bool) -> None:
    """In place of a value, before it, or with one bit flipped."""

    def change(value: bytes) -> bytes:
        if isinstance(put, int):
            at = put % (8 * len(value))
            return value[: at // 8] + bytes([value[at // 8] ^ 1 << at % 8]) + value[at // 8 + 1 :]
        return put + value if before else put

    changed: list[bool] = []

    def once(value: bytes) -> bytes:
        changed.append(change(value) != value)
        return change(value)

    ended = in_a_store(only(key, once), timeout=0.5)
    assert all(error is None or isinstance(error, DistError) for error in ended), ended
    assert not any(changed) or any(ended)
