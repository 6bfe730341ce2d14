"""Messages between two ranks."""

# mypy: disable-error-code="union-attr"

import threading
import time
from typing import Any

import numpy as np
import pytest

import cydist as dist
from cydist.testing.contract import Job, Jobs


@pytest.fixture
def pair(jobs: Jobs, backend: str) -> Job:
    """Two ranks."""
    return jobs.get(backend, 2)


@pytest.mark.parametrize("count", [0, 1, 1000, 300_000], ids=lambda n: f"{n}elements")
def test_send_and_recv(pair: Job, count: int) -> None:
    """The other rank receives small and large messages; recv returns the sender."""

    def body(rank: int) -> Any:
        data = np.arange(count, dtype="f8")
        if rank == 0:
            return dist.send(data, 1)
        into = np.zeros(count)
        source = dist.recv(into, 0)
        return source, np.array_equal(data, into)

    assert [None, (0, True)] == pair.run(body)


def test_irecv_then_isend_on_both_sides(pair: Job) -> None:
    """Both ranks post their receive first, and neither blocks the other."""

    def body(rank: int) -> Any:
        into, data = np.zeros(100_000), np.full(100_000, rank + 1.0)
        receiving = dist.irecv(into, 1 - rank)
        sending = dist.isend(data, 1 - rank)
        receiving.wait()
        sending.wait()
        assert receiving.is_completed()
        assert receiving.source_rank() == 1 - rank
        return into[-1]

    assert [2.0, 1.0] == pair.run(body)


def test_tags_tell_messages_apart(pair: Job) -> None:
    """A receive takes the message of its tag, whichever came first."""

    def body(rank: int) -> Any:
        if rank == 0:
            works = [dist.isend(np.array([tag]), 1, tag=tag) for tag in (5, 6, 2**31 - 1)]
            for work in works:
                work.wait()
            return None
        into = np.zeros(3, np.int64)
        for i, tag in enumerate((2**31 - 1, 6, 5)):
            dist.recv(into[i : i + 1], 0, tag=tag)
        return into.tolist()

    assert [None, [2**31 - 1, 6, 5]] == pair.run(body)


@pytest.mark.parametrize("late", [False, True], ids=["as-they-come", "when-all-have-come"])
def test_messages_of_one_tag_keep_their_order(pair: Job, late: bool) -> None:
    """First sent, first received, also when sizes differ much, and when none was asked for."""
    sizes = [1, 100_000, 2, 50_000, 3]

    def body(rank: int) -> Any:
        last = np.zeros(1)
        if rank == 0:
            works = [dist.isend(np.full(n, i), 1) for i, n in enumerate(sizes)]
            works.append(dist.isend(last, 1, tag=1))
            for work in works:
                work.wait()
            return None
        if late:
            dist.recv(last, 0, tag=1)
        arrays = [np.zeros(n, np.int64) for n in sizes]
        for work in [dist.irecv(array, 0) for array in arrays]:
            work.wait()
        if not late:
            dist.recv(last, 0, tag=1)
        return [int(array[-1]) for array in arrays]

    assert [None, [0, 1, 2, 3, 4]] == pair.run(body)


def test_recv_from_anyone_names_the_sender(jobs: Jobs, backend: str) -> None:
    """src=None takes from a rank that sends."""
    jobs.need_any_source(backend)

    def body(rank: int) -> Any:
        if rank:
            return dist.send(np.array([rank * 10]), 0)
        into = np.zeros(1, np.int64)
        seen = {}
        for _ in range(2):
            source = dist.recv(into)
            seen[source] = int(into[0])
        return seen

    assert {1: 10, 2: 20} == jobs.get(backend, 3).run(body)[0]


def test_strided_arrays_are_packed_and_unpacked(pair: Job) -> None:
    """A column is sent into every third element."""

    def body(rank: int) -> Any:
        if rank == 0:
            return dist.send(np.arange(12.0).reshape(4, 3)[:, 1], 1)
        into = np.zeros(12)
        dist.recv(into[::3], 0)
        return into.tolist()

    assert [1.0, 0, 0, 4.0, 0, 0, 7.0, 0, 0, 10.0, 0, 0] == pair.run(body)[1]


def test_batch_isend_irecv(jobs: Jobs, backend: str) -> None:
    """A ring of three: every rank sends right and receives from the left."""

    def body(rank: int) -> Any:
        into, data = np.zeros(4), np.full(4, float(rank))
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, data, (rank + 1) % 3),
                dist.P2POp(dist.irecv, into, (rank + 2) % 3),
            ]
        )
        for work in works:
            work.wait()
        return len(works), into[0]

    assert [(2, 2.0), (2, 0.0), (2, 1.0)] == jobs.get(backend, 3).run(body)


def test_a_wrong_entry_of_a_batch_is_found_before_traffic(pair: Job) -> None:
    """The batch's other messages were neither sent nor posted: the next messages are the first."""

    def body(rank: int) -> Any:
        into, first, second = np.zeros(1), np.zeros(1), np.zeros(1)
        wrong = dist.P2POp(dist.isend, np.full(1, 8.0), 1 - rank, tag=-1)
        for right in (
            dist.P2POp(dist.isend, np.full(1, 7.0), 1 - rank),
            dist.P2POp(dist.irecv, into, 1 - rank),
        ):
            with pytest.raises(ValueError, match="tag"):
                dist.batch_isend_irecv([right, wrong])
        works = [dist.irecv(array, 1 - rank) for array in (first, second)]
        works += [dist.isend(np.full(1, number), 1 - rank) for number in (1.0, 2.0)]
        for work in works:
            work.wait()
        return into[0], first[0], second[0]

    assert [(0.0, 1.0, 2.0)] * 2 == pair.run(body)


def test_entries_of_a_batch_may_spell_their_group_otherwise(pair: Job) -> None:
    """None is the group of all ranks."""

    def body(rank: int) -> Any:
        into = np.zeros(1)
        world = dist.group.WORLD
        entries = [
            dist.P2POp(dist.isend, np.full(1, rank + 1.0), 1 - rank, group=world),
            dist.P2POp(dist.irecv, into, 1 - rank),
        ]
        for work in dist.batch_isend_irecv(entries):
            work.wait()
        return into[0]

    assert [2.0, 1.0] == pair.run(body)


def bad_calls() -> Any:
    """Calls with an argument that is wrong on this rank; each with words of its error."""
    x = np.zeros(3)
    frozen = np.zeros(3)
    frozen.flags.writeable = False
    me = dist.get_rank()
    return [
        (lambda: dist.send(x, me), ValueError, "itself"),
        (lambda: dist.send(x, 7), ValueError, "dst=7"),
        (lambda: dist.send(x), ValueError, "dst"),
        (lambda: dist.send(x, 0, group_dst=0), ValueError, "not both"),
        (lambda: dist.isend(x, 1 - me, tag=-1), ValueError, "tag"),
        (lambda: dist.irecv(frozen, 1 - me), ValueError, "read-only"),
        (lambda: dist.send([1.0], 1 - me), TypeError, "list"),  # type: ignore[arg-type]
        (lambda: dist.send(np.array([None]), 1 - me), TypeError, "object"),
        (lambda: dist.batch_isend_irecv([]), ValueError, "non-empty"),
        (lambda: dist.P2POp(print, x, 1), ValueError, "op must be"),
    ]


def test_wrong_arguments_raise_before_traffic_and_the_group_stays_usable(pair: Job) -> None:
    """A clear error each, and the next call works."""

    def body(rank: int) -> Any:
        for call, kind, words in bad_calls():
            with pytest.raises(kind, match=words):
                call()
        x = np.ones(1)
        dist.all_reduce(x)
        return x[0]

    assert [2.0, 2.0] == pair.run(body)


def test_a_message_goes_on_when_its_work_is_dropped(pair: Job) -> None:
    """The Works of a large send and its receive are dropped; both still complete."""

    def body(rank: int) -> Any:
        into, token = np.zeros(200_000), np.zeros(1)
        for _ in range(20):
            if rank == 0:
                dist.isend(np.full(200_000, 3.0), 1)
            else:
                dist.irecv(into, 0)
        last: Any = dist.irecv(token, 0) if rank else dist.isend(token, 1)
        deadline = time.monotonic() + 30
        while not last.is_completed() or (rank and into[-1] != 3):
            assert time.monotonic() < deadline
            threading.Event().wait(0.002)
        dist.barrier()
        return into[-1]

    assert [0.0, 3.0] == pair.run(body)


def test_a_timeout_given_to_wait_leaves_the_receive_under_way(jobs: Jobs, backend: str) -> None:
    """wait(timeout) raises DistTimeoutError; the message can be waited for again."""

    def body(rank: int) -> Any:
        if rank == 1:
            dist.recv(np.zeros(1), 0, tag=1)  # rank 0 has given up waiting once
            return dist.send(np.ones(1), 0)
        into = np.zeros(1)
        work = dist.irecv(into, 1)
        with pytest.raises(dist.DistTimeoutError):
            work.wait(0.05)
        dist.send(np.zeros(1), 1, tag=1)
        work.wait()
        return into[0]

    assert [1.0, None] == jobs.run_once(body, 2, backend)


def test_a_message_of_another_size_is_refused(jobs: Jobs, backend: str) -> None:
    """The receiver gets MismatchError, which names the sender, and no memory is overrun."""

    def body(rank: int) -> Any:
        if rank == 0:
            dist.send(np.ones(4), 1)
            return None
        into = np.zeros(8)
        with pytest.raises(dist.MismatchError) as caught:
            dist.recv(into[2:5], 0)
        return caught.value.ranks, into[[0, 1, 5, 6, 7]].tolist()

    assert [None, ((0,), [0.0] * 5)] == jobs.run_once(body, 2, backend)
