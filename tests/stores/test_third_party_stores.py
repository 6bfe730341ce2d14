"""A store of another kind than ours: ranks that meet in it learn of deaths as they do in ours."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from third_party_stores import LedgerStore, WrappedStore

import cydist as dist
from cydist.errors import PeerFailedError, StoreTimeoutError
from cydist.stores import HashStore, MembershipStore, PrefixStore, Store, TCPStore
from cydist.stores.membership_store import release

DEADLINE = 50
SUPPORT = Path(__file__).parents[1] / "support"


@pytest.fixture(params=["wrapped", "ledger"])
def store(request: pytest.FixtureRequest) -> Store:
    """A third party's store, which notices the end of a process."""
    if request.param == "wrapped":
        return WrappedStore(request.getfixturevalue("master").clone())
    return LedgerStore()


def waits(part: MembershipStore) -> Callable[[], Exception | None]:
    """Wait on a thread for what never comes; what is returned says how that ended."""
    ended: list[Exception] = []

    def wait() -> None:
        try:
            part.wait(["never"], DEADLINE)
        except Exception as error:
            ended.append(error)

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()

    def outcome() -> Exception | None:
        thread.join(DEADLINE / 2)
        return ended[0] if ended else None

    return outcome


def test_who_gives_up_is_missed_at_once(store: Store) -> None:
    """A wait ends with the rank that left, long before its deadline; others go on."""
    outcome = waits(MembershipStore("p", store, range(3)))
    MembershipStore("p", store.clone(), range(3)).leave(1, "reason")
    error = outcome()
    assert isinstance(error, PeerFailedError), error
    assert error.ranks == (1,)
    with pytest.raises(StoreTimeoutError):
        MembershipStore("p", store, [0, 2]).wait(["late"], 0.05)


def test_who_ends_is_missed_at_once() -> None:
    """So does a wait for a rank whose end the store has noticed, but not for one that left the job
    before."""
    store = LedgerStore()
    users = [store.clone() for _ in range(2)]
    parts = [MembershipStore("p", user, range(3)) for user in users]
    parts[0].join(1)
    parts[1].join(2)
    parts[1].unregister()
    outcome = waits(MembershipStore("p", store, range(3)))
    for user in users:
        user.end()
    error = outcome()
    assert isinstance(error, PeerFailedError), error
    assert error.ranks == (1,)


def test_the_death_of_a_process_is_told_at_once(master: TCPStore) -> None:
    """Of three ranks one is killed while the job comes together in a store of another kind: the
    others raise PeerFailedError with its rank, long before the timeout."""
    program = f"""
import os, signal, sys
sys.path.insert(0, {str(SUPPORT)!r})
import cydist as dist
from cydist.net import auth
from cydist.stores import MembershipStore
from third_party_stores import WrappedStore
auth.set_secret(bytes(range(32)))
store, rank = WrappedStore(dist.TCPStore('127.0.0.1', {master.port})), int(sys.argv[1])
if rank == 2:
    def join(self, rank, join=MembershipStore.join):
        join(self, rank)
        self.wait(['here/0', 'here/1'])
        os.kill(os.getpid(), signal.SIGKILL)
    MembershipStore.join = join
try:
    dist.init_process_group('tcp', store=store, rank=rank, world_size=3, timeout=600)
except dist.PeerFailedError as error:
    print('told of', *error.ranks)
"""
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program, str(rank)],
            stdout=subprocess.PIPE, text=True, env={**os.environ, "CYDIST_TRANSPORT": "tcp"},
        )
        for rank in range(3)
    ]  # fmt: skip
    try:
        said = [rank.communicate(timeout=DEADLINE)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert said == ["told of 2\n", "told of 2\n", ""]
    assert ranks[2].returncode == -signal.SIGKILL


def test_a_group_comes_together_in_it(store: Store) -> None:
    """Ranks that meet there make groups, and let go of it."""
    dist.init_process_group("inproc", store=store, rank=0, world_size=1)
    assert dist.new_group().size() == 1
    dist.destroy_process_group()
    store.set("key", "it is still open")


def test_a_queue_is_taken_from_in_a_part(store: Store) -> None:
    """A part of a store takes from queues as the store does, also by methods of the store's own."""
    part = MembershipStore("p", store, range(2))
    part.queue_push("queue", "v")
    assert part.queue_pop("queue") == b"v"
    with pytest.raises(dist.QueueEmptyError):
        part.queue_pop("queue", block=False)


def test_release_closes_what_has_no_release_of_its_own(master: TCPStore) -> None:
    """`release` of a part lets go of the store at the bottom."""
    store = WrappedStore(master.clone())
    release(PrefixStore("a", MembershipStore("p", store, range(2))))
    assert store.closed


def test_a_prefix_forwards_watch_and_will(store: Store) -> None:
    """Under a prefix keys are watched with the prefix, and wills are about such keys."""
    part = PrefixStore("p", store)
    assert part.reports_disconnects()
    part.multi_set(["a", "lost"], ["1", "news"])
    assert part.watch("lost", b"", ["a"], DEADLINE) == [b"1"]
    assert part.watch("lost", b"", ["a", "never"], DEADLINE) == b"news"
    part.will("lost", "gone")
    store.withdraw_will("p/lost", "gone")


def test_a_store_that_says_nothing_reports_nothing() -> None:
    """A store reports no end of a process unless it says so; nor does another library's."""
    assert not Store().reports_disconnects()
    assert not PrefixStore("p", HashStore()).reports_disconnects()
    assert not PrefixStore("p", object()).reports_disconnects()
    for missing in ("watch('k', b'', [], 1)", "will('k', '')", "withdraw_will('k', '')"):
        with pytest.raises(NotImplementedError, match="Store does not implement"):
            eval(f"Store().{missing}")
