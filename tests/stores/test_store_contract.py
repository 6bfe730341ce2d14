"""Stores: one contract, tested on every kind."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
from transport_ranks import has_ipv6

from cydist.errors import DistStoreError, QueueEmptyError, StoreTimeoutError
from cydist.stores import FileStore, HashStore, MembershipStore, PrefixStore, Store, TCPStore

pytestmark = pytest.mark.usefixtures("secret")

WAIT = 30  # seconds within which things that must happen happen


KINDS = ["hash", "file", "tcp4", "tcp6", "tls", "prefix-hash", "prefix-file", "prefix-tcp4"]
KINDS += ["members-hash", "members-file", "members-tcp4"]


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty store of each kind."""
    prefix, _, kind = request.param.rpartition("-")
    if kind == "tcp6" and not has_ipv6():
        pytest.skip("no IPv6")
    makers: dict[str, Callable[[], Store]] = {
        "hash": HashStore,
        "file": lambda: FileStore(str(tmp_path / "store")),
        "tcp4": lambda: TCPStore("127.0.0.1", 0, 1, True),
        "tcp6": lambda: TCPStore("::1", 0, 1, True),
        "tls": lambda: TCPStore("127.0.0.1", 0, 1, True),  # conftest.py sets CYDIST_ENCRYPT
    }
    made = makers[kind]()
    made.set_timeout(WAIT)
    if prefix == "members":
        return MembershipStore("all", made, [0, 1]).part("some", [0, 1], "a test", WAIT)
    return PrefixStore("part", made) if prefix else made


def in_thread(call: Callable[[], object]) -> Callable[[], object]:
    """Start `call` on a thread; what is returned waits for its result."""
    results: list[object] = []

    def run() -> None:
        try:
            results.append(call())
        except Exception as error:
            results.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def result() -> object:
        thread.join(WAIT)
        assert results, "still waiting"
        return results[0]

    return result


# Keys and values


@pytest.mark.parametrize(
    "value",
    ["text", b"bytes", "", b"\x00\xff", "\u00fc", bytearray(b"array"), memoryview(b"view")],
    ids=["str", "bytes", "empty", "binary", "unicode", "bytearray", "memoryview"],
)
def test_get_returns_what_was_set(store: Store, value: str | bytes) -> None:
    """str goes in as UTF-8, bytes as they are; bytes come out."""
    store.set("key", value)
    expected = value.encode() if isinstance(value, str) else bytes(value)
    assert expected == store.get("key")


@pytest.mark.parametrize("key", ["", "a/b", "\u00fc", "k" * 1000, "with space\n"])
def test_any_text_is_a_key(store: Store, key: str) -> None:
    """Empty, long and non-ASCII keys are keys like any other."""
    store.set(key, "v")
    assert store.get(key) == b"v"
    assert store.list_keys() == [key]


def test_set_overwrites(store: Store) -> None:
    """The last value counts."""
    store.set("key", "first")
    store.set("key", "second")
    assert store.get("key") == b"second"


def test_a_large_value_survives(store: Store) -> None:
    """A value of 4 MiB comes back whole."""
    value = bytes(range(256)) * (16 * 1024)
    store.set("key", value)
    assert store.get("key") == value


@pytest.mark.parametrize("value", [1, None, ["v"], 1.0])
def test_other_values_are_type_errors(store: Store, value: object) -> None:
    """Numbers and lists are refused before anything is stored."""
    with pytest.raises(TypeError):
        store.set("key", value)  # type: ignore[arg-type]
    assert store.list_keys() == []


def test_one_string_is_no_list_of_keys(store: Store) -> None:
    """wait("ab") would wait for "a" and "b": it is refused."""
    with pytest.raises(TypeError, match="list"):
        store.wait("ab")


# Waiting


def test_get_waits_for_the_key(store: Store) -> None:
    """get returns when another thread sets the key, through the same object."""
    value = in_thread(lambda: store.get("key"))
    store.set("key", "v")
    assert value() == b"v"


def test_wait_needs_every_key(store: Store) -> None:
    """wait returns after the last of its keys, whatever their order."""
    store.set("b", "")
    done = in_thread(lambda: store.wait(["a", "b", "c"]))
    store.set("c", "")
    store.add("a", 1)
    assert done() is None


@pytest.mark.parametrize("timeout", [0.05, timedelta(milliseconds=50), 0])
def test_get_times_out(store: Store, timeout: float | timedelta) -> None:
    """get gives up after the store's timeout; the error names the key, and the store lives."""
    store.set_timeout(timeout)
    with pytest.raises(StoreTimeoutError, match=r" timeout .*absent"):
        store.get("absent")
    store.set_timeout(WAIT)
    store.set("absent", "here")
    assert store.get("absent") == b"here"


def test_wait_times_out_and_names_what_is_missing(store: Store) -> None:
    """The error lists the missing keys and not the ones that were there."""
    store.set("present", "")
    with pytest.raises(StoreTimeoutError) as caught:
        store.wait(["present", "absent", "missing"], timedelta(milliseconds=50))
    assert "absent" in str(caught.value)
    assert "missing" in str(caught.value)
    assert "present" not in str(caught.value)


def test_a_timeout_is_a_builtin_timeout_too(store: Store) -> None:
    """except TimeoutError and except DistStoreError both catch it."""
    with pytest.raises(TimeoutError):
        store.wait(["absent"], 0)
    with pytest.raises(DistStoreError):
        store.wait(["absent"], 0)


@pytest.mark.parametrize("timeout", [-1, math.nan, timedelta(seconds=-1)])
def test_negative_timeouts_are_refused(store: Store, timeout: float | timedelta) -> None:
    """A timeout below zero is a mistake of the caller."""
    with pytest.raises(ValueError, match="timeout"):
        store.set_timeout(timeout)


def test_timeout_can_be_read(store: Store) -> None:
    """The timeout comes back as a timedelta, whatever it was given as."""
    store.set_timeout(1.5)
    assert store.timeout == timedelta(seconds=1.5)


def test_check_does_not_wait(store: Store) -> None:
    """check says whether all keys are there now."""
    store.set("a", "")
    assert store.check(["a"])
    assert not store.check(["a", "b"])
    assert store.check([])


# Counters


def test_add_counts_from_zero(store: Store) -> None:
    """A missing counter starts at 0; the value is an ASCII decimal."""
    assert store.add("n", 1) == 1
    assert store.add("n", 6) == 7
    assert store.add("n", -10) == -3
    assert store.get("n") == b"-3"


def test_add_works_on_a_number_that_was_set(store: Store) -> None:
    """A decimal that was set() counts as a counter."""
    store.set("n", "41")
    assert store.add("n", 1) == 42


@pytest.mark.parametrize("value", ["xx", "1x", "", " 1", "1.5", b"\xff"])
def test_add_to_no_number_is_an_error(store: Store, value: str | bytes) -> None:
    """The error is typed, the value stays, and the store goes on working."""
    store.set("key", value)
    with pytest.raises(DistStoreError, match="key"):
        store.add("key", 1)
    assert store.get("key") == (value.encode() if isinstance(value, str) else value)
    assert store.add("other", 1) == 1


def test_add_does_not_wrap(store: Store) -> None:
    """A sum beyond 64 bits is refused and nothing changes."""
    assert store.add("n", 2**63 - 1) == 2**63 - 1
    with pytest.raises(DistStoreError, match="64 bits"):
        store.add("n", 1)
    assert store.get("n") == str(2**63 - 1).encode()


def test_adds_of_many_threads_all_count(store: Store) -> None:
    """No increment is lost, and each caller sees a different sum."""
    sums = [in_thread(lambda: [store.add("n", 1) for _ in range(25)]) for _ in range(4)]
    seen = [value for result in sums for value in result()]  # type: ignore[attr-defined]
    assert sorted(seen) == list(range(1, 101))


# compare_set, append, deletion


@pytest.mark.parametrize(
    ("before", "expected", "after"),
    [
        ("old", "old", b"new"),
        ("old", "other", b"old"),
        ("old", "", b"old"),
        ("", "", b"new"),
    ],
)
def test_compare_set_of_a_present_key(
    store: Store, before: str, expected: str, after: bytes
) -> None:
    """The value changes only if it is the expected one; the value afterwards is returned."""
    store.set("key", before)
    assert store.compare_set("key", expected, "new") == after
    assert store.get("key") == after


def test_compare_set_of_a_missing_key(store: Store) -> None:
    """A missing key is set when nothing is expected; otherwise `expected` comes back."""
    assert store.compare_set("key", "something", "new") == b"something"
    assert not store.check(["key"])
    assert store.compare_set("key", "", "new") == b"new"
    assert store.get("key") == b"new"


def test_one_of_many_wins_compare_set(store: Store) -> None:
    """Of racing threads exactly one sets the key, and all learn which."""
    winners = [in_thread(lambda i=i: store.compare_set("key", "", f"{i}")) for i in range(4)]
    assert len({winner() for winner in winners}) == 1


def test_compare_set_loses_no_step(store: Store) -> None:
    """Threads that count by comparing and setting, each value signed, miss none of 40 steps."""
    store.set("n", "0 start")

    def count(name: int) -> None:
        for _ in range(10):
            while True:
                seen = store.get("n")
                mine = f"{int(seen.split()[0]) + 1} {name}".encode()
                if store.compare_set("n", seen, mine) == mine:
                    break

    for result in [in_thread(lambda i=i: count(i)) for i in range(4)]:
        assert result() is None
    assert store.get("n").split()[0] == b"40"


def test_append_grows_a_value(store: Store) -> None:
    """append creates a key, then adds to its end."""
    store.append("key", "ab")
    store.append("key", b"c")
    assert store.get("key") == b"abc"


def test_delete_key_says_whether_it_was_there(store: Store) -> None:
    """Deleting returns True once, and the key is gone."""
    store.set("key", "v")
    assert store.delete_key("key") is True
    assert store.delete_key("key") is False
    assert not store.check(["key"])


def test_num_keys_counts_keys(store: Store) -> None:
    """Each new key counts once; deleting takes it away."""
    fresh = store.num_keys()
    store.set("a", "")
    store.set("a", "again")
    store.add("b", 1)
    assert store.num_keys() == fresh + 2
    store.delete_key("a")
    assert store.num_keys() == fresh + 1


@pytest.mark.parametrize(
    ("kind", "extra"), [("hash", 0), ("file", 1), ("tcp4", 1)], ids=["hash", "file", "tcp4"]
)
def test_num_keys_of_a_fresh_store(kind: str, extra: int, tmp_path: Path) -> None:
    """Stores that count their workers have one key for it, as torch's have."""
    makers: dict[str, Callable[[], Store]] = {
        "hash": HashStore,
        "file": lambda: FileStore(str(tmp_path / "store"), 1),
        "tcp4": lambda: TCPStore("127.0.0.1", 0, 1, True),
    }
    assert makers[kind]().num_keys() == extra


def test_list_keys_lists_the_users(store: Store) -> None:
    """All keys of the user are listed, and none of ours; queues are no keys."""
    store.multi_set(["a", "b"], ["1", "2"])
    store.queue_push("q", "v")
    assert sorted(store.list_keys()) == ["a", "b"]


# Several at once


def test_multi_set_and_get_keep_the_order(store: Store) -> None:
    """Values come back in the order of the keys asked for."""
    store.multi_set(["a", "b", "c"], ["1", b"2", ""])
    assert store.multi_get(["c", "a", "b"]) == [b"", b"1", b"2"]
    assert store.multi_get([]) == []


def test_multi_set_needs_pairs(store: Store) -> None:
    """Keys and values of different number are refused and nothing is stored."""
    with pytest.raises(ValueError, match=r"2 keys but 1 value$"):
        store.multi_set(["a", "b"], ["1"])
    assert store.list_keys() == []


def test_multi_get_waits(store: Store) -> None:
    """multi_get waits for the last of its keys."""
    values = in_thread(lambda: store.multi_get(["a", "b"]))
    store.multi_set(["b", "a"], ["2", "1"])
    assert values() == [b"1", b"2"]


# Queues


def test_a_queue_is_first_in_first_out(store: Store) -> None:
    """Values leave in the order in which they came; the length follows."""
    for value in ("a", b"b", ""):
        store.queue_push("q", value)
    assert store.queue_len("q") == 3
    assert [store.queue_pop("q") for _ in range(3)] == [b"a", b"b", b""]
    assert store.queue_len("q") == 0


def test_an_empty_queue_is_an_error_without_waiting(store: Store) -> None:
    """block=False raises QueueEmptyError at once."""
    with pytest.raises(QueueEmptyError):
        store.queue_pop("q", block=False)


def test_queue_pop_waits(store: Store) -> None:
    """A waiting pop gets the next value that is pushed."""
    value = in_thread(lambda: store.queue_pop("q"))
    store.queue_push("q", "v")
    assert value() == b"v"


def test_queue_pop_times_out(store: Store) -> None:
    """A pop that waits in vain ends at the store's timeout and names the queue."""
    store.set_timeout(0.05)
    with pytest.raises(StoreTimeoutError, match="queue-name"):
        store.queue_pop("queue-name")


def test_each_value_is_popped_once(store: Store) -> None:
    """Racing consumers share the values and none is lost or doubled."""
    popped = [in_thread(lambda: [store.queue_pop("q") for _ in range(5)]) for _ in range(4)]
    for i in range(20):
        store.queue_push("q", str(i))
    values = [int(value) for result in popped for value in result()]  # type: ignore[attr-defined]
    assert sorted(values) == list(range(20))


def test_queues_and_keys_do_not_meet(store: Store) -> None:
    """A queue and a key of one name are two things."""
    store.queue_push("x", "q")
    assert not store.check(["x"])
    store.set("x", "k")
    assert (store.queue_pop("x"), store.get("x")) == (b"q", b"k")


# Objects


def test_a_parts_timeout_is_its_own(store: Store) -> None:
    """What a part for some ranks is told holds for it and for parts of it, and nowhere else."""
    whole = MembershipStore("whole", store, [0, 1])
    part = whole.part("part", [0], "a test")
    part.set_timeout(0.05)
    for each in (part, part.part("of it", [0], "a test"), part.clone()):
        assert each.timeout == timedelta(milliseconds=50)
        for wait in (each.get, lambda key, each=each: each.wait([key]), each.queue_pop):
            with pytest.raises(StoreTimeoutError, match=r"after 0\.0[45]"):
                wait("absent")
    assert whole.timeout == store.timeout == timedelta(seconds=WAIT)


def test_a_clone_shares_data_but_not_the_timeout(store: Store) -> None:
    """What one sets the other finds; each has its own timeout."""
    twin = store.clone()
    store.set("key", "v")
    twin.set_timeout(0.05)
    assert twin.get("key") == b"v"
    assert store.timeout == timedelta(seconds=WAIT)


def test_the_extended_api_is_there(store: Store) -> None:
    """append, multi_get and multi_set are announced."""
    assert store.has_extended_api()


def test_a_prefix_hides_other_keys() -> None:
    """Two prefixes over one store do not see each other; the store sees both."""
    whole = HashStore()
    left, right = PrefixStore("l", whole), PrefixStore("r", whole)
    left.set("key", "1")
    assert not right.check(["key"])
    assert whole.get("l/key") == b"1"
    assert left.underlying_store is whole


def test_a_prefix_serves_another_librarys_store() -> None:
    """PrefixStore over torch's HashStore takes our timeouts and returns bytes."""
    torch_dist = pytest.importorskip("torch.distributed")
    store = PrefixStore("p", torch_dist.HashStore())
    store.set("key", b"v")
    assert store.get("key") == b"v"
    assert store.add("n", 2) == 2
    store.set_timeout(2)
    assert store.timeout == timedelta(seconds=2)
    with pytest.raises(RuntimeError, match="timeout"):
        store.wait(["absent"], 0.01)


def test_an_own_store_may_implement_little() -> None:
    """A subclass without __init__ has a timeout, and says which operation it lacks."""

    class Little(Store):
        def __init__(self) -> None:
            pass

    assert Little().timeout == timedelta(seconds=300)
    with pytest.raises(NotImplementedError, match="Little does not implement GET"):
        Little().get("key")


def test_barrier_lets_all_pass(store: Store) -> None:
    """Once the last has come; a key serves for several rounds."""
    for _ in range(2):
        other = in_thread(lambda: store.barrier("b", 2, WAIT))
        store.barrier("b", 2, WAIT)
        assert other() is None
    assert store.get("b") == b"4"


def test_barrier_of_one_returns(store: Store) -> None:
    store.barrier("alone", 1)
    store.barrier("alone", 1, timedelta(seconds=WAIT))


def test_barrier_says_how_many_came(store: Store) -> None:
    with pytest.raises(StoreTimeoutError, match=r"barrier 'b': 1 of 3 users have come"):
        store.barrier("b", 3, 0.01)


def test_barrier_needs_a_user(store: Store) -> None:
    with pytest.raises(ValueError, match="world_size must be 1 or more, not 0"):
        store.barrier("b", 0)
