"""Starts of many ranks: what the store does for each, and what it takes to serve them all."""

from __future__ import annotations

import resource
import subprocess
import sys
import threading
from contextlib import closing

import pytest
from extra_values import more
from thread_rendezvous import together

from cydist.bench import rendezvous
from cydist.bench.rendezvous import Meeting
from cydist.errors import DistNetworkError, RendezvousError, StoreTimeoutError
from cydist.net import auth, descriptors
from cydist.stores import HashStore, MembershipStore, PrefixStore, TCPStore
from cydist.stores.kv_table import KeyValueTable
from cydist.stores.protocol import Op, StoreRequest

HOST = "127.0.0.1"
WAIT = 30.0
SMALL = 64


@pytest.fixture(scope="module")
def small() -> Meeting:
    return rendezvous.meet(SMALL)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("size", [128, *more(256, 1024)])
def test_the_store_does_as_much_for_each_rank_of_a_larger_job(small: Meeting, size: int) -> None:
    """As many requests, and two addresses more where there are twice as many ranks: the work grows
    as p log p. Ranks meet, and then send their first messages."""
    found = rendezvous.meet(size)
    doublings = (size // SMALL).bit_length() - 1
    assert found.requests / size < small.requests / SMALL + 2
    for larger, smaller in (
        (found.received_bytes, small.received_bytes),
        (found.sent_bytes, small.sent_bytes),
    ):
        assert larger / size < smaller / SMALL + 2 * doublings * 200


def in_order(size: int) -> tuple[KeyValueTable, StoreRequest, list[bytes]]:
    """A table, a request for many keys, and these keys."""
    keys = [b"here/%d" % rank for rank in range(size)]
    return KeyValueTable(), StoreRequest(Op.GET, tuple(keys), (), True, WAIT), keys


class Counted(dict[bytes, bytes]):
    looks = 0

    def __contains__(self, key: object) -> bool:
        self.looks += 1
        return super().__contains__(key)


def test_a_request_for_many_keys_is_not_searched_from_its_start_again() -> None:
    """Rank 0 waits for the notes of N ranks. If these come in order, the table looks at each key
    three times at the most, and not N times."""
    table, request, keys = in_order(500)
    table._values = values = Counted()
    at = 0
    for key in keys:
        found = table.awaits(request, at)
        assert found is not None
        place, at = found
        assert place == (False, key)
        table.execute(StoreRequest(Op.SET, (key,), (b"1",)))
    assert table.awaits(request, at) is None
    assert values.looks <= 3 * len(keys)


def test_a_key_that_is_deleted_meanwhile_is_awaited_again() -> None:
    """Though the search had passed it."""
    table, request, keys = in_order(3)
    for key in keys[:2]:
        table.execute(StoreRequest(Op.SET, (key,), (b"1",)))
    assert table.awaits(request) == ((False, keys[2]), 2)
    table.execute(StoreRequest(Op.DELETE, (keys[0],)))
    table.execute(StoreRequest(Op.SET, (keys[2],), (b"1",)))
    assert table.awaits(request, 2) == ((False, keys[0]), 0)


# Descriptors

SERVE = """
import resource, sys, cydist
soft, hard, users = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
store = cydist.TCPStore("127.0.0.1", 0, users, True, wait_for_workers=False)
others = [store.clone() for _ in range(users - 1)]
for each in others:
    each.set("key", "value")
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0], store.num_keys())
"""


def serve(soft: int, hard: int, users: int) -> subprocess.CompletedProcess[str]:
    """Serve a store to that many users in a process with these limits."""
    command = [sys.executable, "-c", SERVE, *map(str, (soft, hard, users))]
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT)


def test_a_store_makes_room_for_its_users() -> None:
    """A soft limit below their number is raised by what they need, as far as the hard one goes."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    run = serve(100, hard, 150)  # each user has both of its ends in this process
    assert run.returncode == 0, run.stderr
    limit, _ = map(int, run.stdout.split())
    assert 100 + 2 * 150 <= limit < 1000


def test_too_few_descriptors_for_the_ranks_are_told_at_once() -> None:
    """With the number that they need, and how to raise the limit."""
    run = serve(100, 200, 250)
    assert run.returncode != 0
    assert "DistNetworkError: serving a store to 250 users takes 250 descriptors" in run.stderr
    assert "may have 200" in run.stderr
    assert "ulimit -Hn" in run.stderr


def test_small_jobs_leave_the_limit_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs may rely on it, for example with select()."""
    changed: list[object] = []
    monkeypatch.setattr(descriptors.resource, "setrlimit", lambda *given: changed.append(given))
    descriptors.make_room(20, 20, "serving")
    assert not changed
    used = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with pytest.raises(DistNetworkError, match=f"serving takes {used} descriptors"):
        descriptors.make_room(used, used, "serving")


# A busy store


def test_a_client_is_as_patient_as_there_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The store may have to greet all others first: thousands need more than the two seconds that
    are enough for one."""
    seen: list[float] = []
    authenticate = auth.authenticate_client

    def noted(*given: object, **named: object) -> object:
        seen.append(float(str(named["patience"])))
        return authenticate(*given, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(auth, "authenticate_client", noted)
    with closing(TCPStore(HOST, 0, None, True)) as master:
        for users in (None, 4096):
            with closing(TCPStore(HOST, master.port, users)) as one:
                one.will("key", "value")
    alone, crowd = seen[1:3], seen[3:5]
    assert alone == 2 * [auth.HANDSHAKE_TIMEOUT]
    assert min(crowd) > auth.HANDSHAKE_TIMEOUT + 10


# Ranks that do not come


@pytest.mark.parametrize("kind", ["tcp", "hash", "foreign"])
def test_missing_ranks_are_found_by_few_requests(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However many they are: a server names the first 64."""
    calls: list[object] = []
    below = HashStore() if kind != "tcp" else TCPStore(HOST, 0, None, True)
    with closing(below):
        asked: object = below
        if kind == "foreign":
            asked = Foreign(below)
        here = MembershipStore("meeting", asked, range(300))
        for rank in range(0, 300, 3):
            here.set(f"here/{rank}", "")
        expected = tuple(rank for rank in range(300) if rank % 3)
        for call in ("wait", "check"):
            real = getattr(below, call)
            monkeypatch.setattr(
                below, call, lambda *given, real=real: (calls.append(given), real(*given))[1]
            )
        assert here.missing("here", range(300)) == expected
        assert len(calls) <= (300 if kind == "foreign" else 5)


class Foreign:
    """Another library's store."""

    def __init__(self, store: HashStore | TCPStore) -> None:
        for name in ("set", "get", "add", "check", "wait", "multi_get", "multi_set"):
            setattr(self, name, getattr(store, name))
        self.check = lambda keys: store.check(keys)
        self.timeout = store.timeout


def test_few_ranks_look_for_the_missing_ones() -> None:
    """They tell the others: otherwise each of N ranks would look for N."""
    store = HashStore()
    here = MembershipStore("meeting", store, range(100))
    looks: list[int] = []

    class Looking(MembershipStore):
        def absent(self, keys: object) -> list[str]:
            looks.append(1)
            return super().absent(keys)  # type: ignore[arg-type]

    here.set("here/7", "")
    found = [Looking("meeting", store, range(100)).missing("here", range(100)) for _ in range(40)]
    assert {*found} == {tuple(rank for rank in range(100) if rank != 7)}
    assert len(looks) == 16


# A digest of all ranks' words


def digests(size: int, make: object, words: list[str]) -> list[object]:
    """What each rank gets."""
    below = PrefixStore("job", HashStore(WAIT))

    def one(rank: int) -> object:
        here = MembershipStore("meeting", below, range(size))
        return here.digest("topic", rank, range(size), words[rank], make)  # type: ignore[arg-type]

    return together(*(lambda r=r: one(r) for r in range(size)))


def test_all_ranks_get_what_the_first_makes_of_their_words() -> None:
    """It is made once."""
    makers: list[int] = []

    def make(words: list[bytes]) -> bytes:
        makers.append(threading.get_ident())
        return b" ".join(words)

    assert digests(4, make, ["a", "b", "", "d"]) == 4 * [b"a b  d"]
    assert len(makers) == 1


def test_an_error_of_the_first_rank_is_all_ranks_error() -> None:
    """With the ranks that it is about."""

    def make(words: list[bytes]) -> bytes:
        raise RendezvousError("two lines\nof error", ranks=(1, 2))

    for error in digests(3, make, ["", "", ""]):
        assert isinstance(error, RendezvousError)
        assert str(error) == "two lines\nof error"
        assert error.ranks == (1, 2)


def test_a_digest_names_the_ranks_that_did_not_come() -> None:
    """On the ranks that did."""
    here = MembershipStore("meeting", HashStore(), range(4))
    here.set_timeout(0.1)
    here.set("topic/1", "")
    with pytest.raises(StoreTimeoutError, match="ranks 2, 3 did not come"):
        here.digest("topic", 0, range(4), "", lambda words: b"")


def test_the_bench_prints_a_row_for_each_size(capsys: pytest.CaptureFixture[str]) -> None:
    """And refuses what is no number of ranks."""
    assert rendezvous.main(["--ranks", "2,3"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [row[0] for row in rows if row and row[0].isdigit()] == ["2", "3"]
    with pytest.raises(SystemExit):
        rendezvous.main(["--ranks", "1"])
