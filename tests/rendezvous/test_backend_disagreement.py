"""Ranks that ask for different backends, each of which would wait for its own ranks."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import pytest
from thread_rendezvous import HOST, WAIT, stand_alone, together
from transport_ranks import free_port

import cydist as dist
from cydist import _native
from cydist.api import process_groups
from cydist.backends.host import endpoint
from cydist.backends.host.group import HostGroup
from cydist.devices import array_libraries
from cydist.errors import MismatchError, RendezvousError, StoreTimeoutError
from cydist.groups import registry
from cydist.rendezvous import check_in
from cydist.stores import HashStore, MembershipStore
from cydist.testing import run_threads


@pytest.fixture(autouse=True)
def alone(secret: bytes, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No launcher, a secret."""
    stand_alone(monkeypatch, tmp_path)


def started(asked: list[str | None], **where: Any) -> list[Any]:
    """What init_process_group gives on ranks that ask for these: an error, or a backend's name."""

    def rank(number: int, backend: str | None) -> str:
        process_groups.thread_is_rank()
        dist.init_process_group(backend, rank=number, world_size=len(asked), timeout=WAIT, **where)
        try:
            return dist.get_backend()
        finally:
            dist.destroy_process_group()

    return together(*(partial(rank, number, each) for number, each in enumerate(asked)))


def refusal(outcomes: list[Any]) -> str:
    """Every rank's one error."""
    assert {type(outcome) for outcome in outcomes} == {RendezvousError}, outcomes
    (text,) = {str(outcome) for outcome in outcomes}
    return text


WAYS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "tcp": lambda _: {"init_method": f"tcp://{HOST}:{free_port()}"},
    "file": lambda folder: {"init_method": f"file://{folder}/meeting"},
    "store": lambda _: {"store": HashStore()},
}


@pytest.mark.parametrize("way", WAYS)
def test_different_backends_are_refused_at_the_start(way: str, tmp_path: Path) -> None:
    """Every rank hears at once who asked for what, and none waits for its timeout."""
    text = refusal(started(["tcp", "tcp", "mpi"], **WAYS[way](tmp_path)))
    assert "the ranks ask for different backends: 'tcp' on ranks 0, 1; 'mpi' on rank 2" in text


def test_a_choice_that_differs_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """backend=None comes to NCCL on a rank that has cupy and a GPU, and to TCP on the other."""
    found = iter([True, False])
    monkeypatch.setattr(array_libraries, "has_nccl", lambda: next(found))
    text = refusal(started([None, None], store=HashStore()))
    assert "'cpu:tcp,cuda:nccl' on rank" in text
    assert "'tcp' on rank" in text
    assert "None stands for what a process finds" in text


def test_a_choice_may_be_what_another_rank_names() -> None:
    """What counts is what was chosen."""
    assert started([None, "tcp"], store=HashStore()) == ["tcp", "tcp"]


def test_the_ranks_of_a_large_job_are_not_all_listed() -> None:
    """Sixteen of each kind are."""
    said = check_in.differences([b"tcp"] * 40 + [b"mpi"], range(41), "rendezvous")
    assert "14, 15 and 24 more; 'mpi' on rank 40. " in said


def test_spelling_is_no_difference() -> None:
    """Capitals, spaces, and the devices of a backend that has all that it takes."""
    assert started(["tcp", "cpu:tcp, cuda:TCP"], store=HashStore()) == ["tcp", "tcp"]


def test_options_on_one_rank_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a group with options meets the others, and one without shares what a part of the
    default group has."""
    monkeypatch.setattr(HostGroup, "splits_without_peers", False)

    def body(rank: int) -> None:
        with pytest.raises(RendezvousError, match="'tcp' on rank 0; 'tcp with pg_options' on rank"):
            dist.new_group(backend="tcp", pg_options=object() if rank else None)
        dist.barrier(dist.new_group())

    run_threads(body, 2, "cpu:gloo,cuda:tcp", timeout=60)


def test_who_does_not_come_is_named() -> None:
    """By the rank that judges, and by those that wait for its judgement."""
    store = HashStore()

    def come(rank: int) -> str:
        part = MembershipStore("here", store, range(3))
        part.set_timeout(0.3)
        with pytest.raises(StoreTimeoutError) as error:
            part.meet("topic", rank, range(3))
        return str(error.value)

    assert (
        together(partial(come, 0), partial(come, 1))
        == ["rendezvous: timeout after 0.3 s, rank 2 did not come"] * 2
    )


@pytest.mark.parametrize(
    ("first", "second", "says"),
    [
        ({"backend": "gloo"}, {"backend": "cpu:tcp,cuda:gloo"}, "'gloo' on rank 0; 'cpu:tcp,"),
        ({"backend": "gloo"}, {"backend": "plain"}, "'gloo' on rank 0; 'plain' on rank 1"),
    ],
    ids=["routed", "registered"],
)
def test_different_backends_of_a_new_group_are_refused(
    monkeypatch: pytest.MonkeyPatch, first: dict[str, Any], second: dict[str, Any], says: str
) -> None:
    """As at the start; and the next group is made."""
    monkeypatch.setitem(registry._plugins, "plain", registry._plugins["tcp"])

    def body(rank: int) -> str:
        with pytest.raises(RendezvousError, match=says) as error:
            dist.new_group(**(second if rank else first))
        dist.barrier(dist.new_group(backend="gloo"))
        return str(error.value)

    one, other = run_threads(body, 2, "tcp", timeout=60)
    assert one == other


def test_options_that_tcp_does_not_know_change_nothing() -> None:
    """A rank that gives some has the same group as one that gives none."""

    def body(rank: int) -> None:
        told = pytest.warns(RuntimeWarning, match="has no options") if rank else nullcontext()
        with told:
            group = dist.new_group(pg_options=object() if rank else None)
        dist.barrier(group)

    run_threads(body, 2, "tcp", timeout=60)


@pytest.mark.parametrize("first", range(3))
@pytest.mark.parametrize("local", [False, True], ids=["all", "local"])
@pytest.mark.parametrize("default", ["tcp", "inproc"])
def test_another_backend_than_the_default_groups(default: str, local: bool, first: int) -> None:
    """The others have met nobody: a rank that asks for another hears so at once, and they learn in
    the next call on that group, whatever it is. All other groups work."""
    odd = (first + 2) % 3

    def body(rank: int) -> str:
        ranks = [(first + each) % 3 for each in range(3)]
        asked = {"ranks": ranks, "sort_ranks": False, "use_local_synchronization": local}
        if rank == odd:
            with pytest.raises(RendezvousError) as refused:
                dist.new_group(backend="gloo", **asked)
            said = str(refused.value)
        else:
            group = dist.new_group(**asked)
            with pytest.raises(MismatchError) as told:
                dist.recv(np.zeros(1), odd, group)
            both = f"new_group of backend 'gloo' in place of {default!r} rank {odd} "
            assert both in str(told.value)
            said = ""
        dist.barrier()
        dist.barrier(dist.new_group())
        return said

    said = run_threads(body, 3, default, timeout=60)
    assert f"'gloo' on rank {odd}" in said[odd]
    assert f"{default!r} on rank" in said[odd]


def test_a_late_member_is_no_other() -> None:
    """Who waits for it asks it, and goes on to wait: it may yet ask for the same."""
    asked = threading.Event()

    def body(rank: int) -> None:
        default = process_groups.current_world().groups[process_groups.DEFAULT_GROUP]
        if rank == 0:
            assert asked.wait(WAIT)
        else:
            ask = default.peer_requests

            def noted(name: str, ranks: Sequence[int]) -> dict[int, str]:
                found = ask(name, ranks)
                asked.set()
                return found

            default.peer_requests = noted  # type: ignore[method-assign]
        dist.barrier(dist.new_group(backend="gloo"))

    run_threads(body, 2, "tcp", timeout=60)


@pytest.mark.parametrize("odd", range(3))
@pytest.mark.parametrize("member", [True, False], ids=["members", "another"])
def test_who_is_no_member_asks_for_the_same_where_all_ranks_are_needed(
    monkeypatch: pytest.MonkeyPatch, odd: int, member: bool
) -> None:
    """By a backend whose first group is made by all ranks of the job: those that ask for it hear at
    once of one that does not, be they the members or the one that is none."""
    tcp = registry._plugins["tcp"]
    plugin = registry.Plugin(tcp.create, tcp.extended_api, tcp.devices, of_all=True)
    monkeypatch.setitem(registry._plugins, "shared", plugin)

    def body(rank: int) -> str:
        ranks = [each for each in range(3) if each != odd]
        said = ""
        if (rank != odd) == member:
            with pytest.raises(RendezvousError) as refused:
                dist.new_group(ranks, backend="shared")
            said = str(refused.value)
        elif group := dist.new_group(ranks):
            dist.barrier(group)
        dist.barrier(dist.new_group(backend="shared"))
        return said

    for rank, said in enumerate(run_threads(body, 3, "tcp", timeout=60)):
        asking = (rank != odd) == member
        assert asking == ("the ranks ask for different backends: " in said)
        assert asking == ("'shared' on rank" in said)
        assert asking == ("'tcp' on rank" in said)


def test_only_some_ask_the_one_that_all_wait_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be late, and could not come if each of a thousand asked it again and again; those that
    do not ask hear of a difference from those that do."""
    monkeypatch.setattr(check_in, "MOST_LOOKING", 1)
    store, asking = HashStore(), set[int]()
    looking, waiting = threading.Barrier(3), threading.Semaphore(0)

    def come(rank: int) -> str:
        part = MembershipStore("here", store, range(4))
        part.set_timeout(WAIT)
        meet = part.meet

        def watched(*what: Any) -> None:
            def look() -> None:
                if rank not in looked:
                    looking.wait(WAIT)
                    looked.append(rank)
                what[-1]()
                waiting.release()

            looked: list[int] = []
            meet(*what[:-1], look)

        def ask(ranks: Sequence[int]) -> dict[int, str]:
            asking.add(rank)
            for _ in range(2):  # until the others have looked, and go on to wait
                waiting.acquire(timeout=WAIT)
            return dict.fromkeys(ranks, "tcp")

        monkeypatch.setattr(part, "meet", watched)
        with pytest.raises(RendezvousError) as refused:
            check_in.agree_on_backend(part, rank, range(4), "gloo", "new_group", ask)
        return str(refused.value)

    said = together(*(partial(come, rank) for rank in range(1, 4)))
    assert all("'tcp' on rank 0" in each for each in said), said
    assert len(asking) == 1


def test_threads_may_make_groups_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each notes what it asked for, of which only the last are kept."""
    monkeypatch.setattr(endpoint, "REMEMBERED", 10)
    here = endpoint.Endpoint(_native.InprocLink(_native.hub(uuid4().hex, 1), 0), lambda: None)

    def ask(thread: int) -> None:
        for i in range(5000):
            here.announce_request(f"{thread}/{i}", (0,), "tcp")

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        assert together(*(partial(ask, thread) for thread in range(4))) == [None] * 4
    finally:
        sys.setswitchinterval(before)
    here.announce_request("last", (0,), "gloo")
    assert here.report(endpoint.comm_id_of("last:asked", (0,))).state.endswith("gloo")
