"""cydist.interop.torch.Group, called as torch calls it: right results, Works and futures."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import reduce as fold
from itertools import chain
from types import SimpleNamespace
from typing import Any

import pytest

import cydist
from cydist.testing import ThreadJob

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from torch.distributed import distributed_c10d as c10d  # noqa: E402

from cydist.interop.torch import create  # noqa: E402

ReduceOp = dist.ReduceOp
SECONDS = 30


def options(
    store: Any, rank: int, size: int, ranks: tuple[int, ...] = (), name: str = "0"
) -> SimpleNamespace:
    """What torch passes to the function that makes a group."""
    return SimpleNamespace(
        store=dist.PrefixStore(f"{name}/", store),
        group_rank=rank,
        group_size=size,
        timeout=timedelta(seconds=SECONDS),
        group_id=name,
        global_ranks_in_group=list(ranks),
    )


class Job:
    """Ranks that are threads, each with a torch group of all of them."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.threads = ThreadJob(size)
        self.store = dist.HashStore()
        self.groups = self.threads.run(lambda rank: create(options(self.store, rank, size)))

    def run(self, body: Callable[[Any], Any]) -> list[Any]:
        """Call `body(group)` on every rank; what they return, by rank."""
        return self.threads.run(lambda rank: body(self.groups[rank]))

    def close(self) -> None:
        for group in self.groups:
            group.shutdown()
        self.threads.close()


@pytest.fixture(scope="module", params=[1, 2, 3], ids="{} ranks".format)
def shared(request: pytest.FixtureRequest) -> Iterator[Job]:
    """A job that tests use in turn and leave whole."""
    job = Job(request.param)
    yield job
    job.close()


@pytest.fixture
def pair() -> Iterator[Job]:
    """Two ranks for a test that breaks their group."""
    job = Job(2)
    yield job
    job.close()


def row(rank: int, *shape: int) -> Any:
    """Small whole numbers that differ by rank and by element."""
    return (torch.arange(torch.Size(shape).numel()).reshape(shape) + 10 * rank).float()


def rows(size: int, *shape: int) -> list[Any]:
    return [row(rank, *shape) for rank in range(size)]


def zeros(count: int, *shape: int) -> list[Any]:
    return [torch.zeros(shape) for _ in range(count)]


# Each collective: starts it on a group, and returns its Work, what it wrote, and what that
# should be.
Started = tuple[Any, Any, Any]


def set_up(kind: Any, blocking: bool, **fields: Any) -> Any:
    made = kind()
    made.asyncOp = not blocking
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def allreduce(g: Any, blocking: bool) -> Started:
    x = row(g.rank(), 3, 2)
    work = g.allreduce([x], set_up(c10d.AllreduceOptions, blocking))
    return work, [x], [sum(rows(g.size(), 3, 2))]


def allreduce_coalesced(g: Any, blocking: bool) -> Started:
    xs = [row(g.rank(), 3), row(g.rank(), 2, 2)]
    work = g.allreduce_coalesced(xs, set_up(c10d.AllreduceCoalescedOptions, blocking))
    return work, xs, [sum(rows(g.size(), 3)), sum(rows(g.size(), 2, 2))]


def broadcast(g: Any, blocking: bool) -> Started:
    x = row(g.rank(), 5)
    root = g.size() - 1
    work = g.broadcast([x], set_up(c10d.BroadcastOptions, blocking, rootRank=root))
    return work, [x], [row(root, 5)]


def reduce(g: Any, blocking: bool) -> Started:
    x = row(g.rank(), 5)
    root = g.size() - 1
    work = g.reduce([x], set_up(c10d.ReduceOptions, blocking, rootRank=root))
    return work, [x], [sum(rows(g.size(), 5)) if g.rank() == root else row(g.rank(), 5)]


def allgather(g: Any, blocking: bool) -> Started:
    out = zeros(g.size(), 4)
    work = g.allgather([out], [row(g.rank(), 4)], set_up(c10d.AllgatherOptions, blocking))
    return work, out, rows(g.size(), 4)


def all_gather_single(g: Any, blocking: bool) -> Started:
    out = torch.zeros(g.size(), 4)
    work = g.all_gather_single(out, row(g.rank(), 4), set_up(c10d.AllgatherOptions, blocking))
    return work, [out], [torch.stack(rows(g.size(), 4))]


def all_gather_single_coalesced(g: Any, blocking: bool) -> Started:
    outs = [torch.zeros(g.size() * 4), torch.zeros(g.size() * 2, dtype=torch.int64)]
    ins = [row(g.rank(), 4), row(g.rank(), 2).long()]
    work = g.all_gather_single_coalesced(outs, ins, set_up(c10d.AllgatherOptions, blocking))
    return work, outs, [torch.cat(rows(g.size(), 4)), torch.cat(rows(g.size(), 2)).long()]


def allgather_coalesced(g: Any, blocking: bool) -> Started:
    outs = [[torch.zeros(4), torch.zeros(2, 1)] for _ in range(g.size())]
    ins = [row(g.rank(), 4), row(g.rank(), 2, 1)]
    work = g.allgather_coalesced(outs, ins, set_up(c10d.AllgatherOptions, blocking))
    wanted = [[row(rank, 4), row(rank, 2, 1)] for rank in range(g.size())]
    return work, list(chain(*outs)), list(chain(*wanted))


def gather(g: Any, blocking: bool) -> Started:
    out = zeros(g.size(), 4) if g.rank() == 0 else []
    work = g.gather([out] if out else [], [row(g.rank(), 4)], set_up(c10d.GatherOptions, blocking))
    return work, out, rows(g.size(), 4) if out else []


def scatter(g: Any, blocking: bool) -> Started:
    out = torch.zeros(4)
    given = [rows(g.size(), 4)] if g.rank() == 0 else []
    work = g.scatter([out], given, set_up(c10d.ScatterOptions, blocking))
    return work, [out], [row(g.rank(), 4)]


def reduce_scatter(g: Any, blocking: bool) -> Started:
    out = torch.zeros(4)
    given = [row(g.rank(), 4) * (to + 1) for to in range(g.size())]
    work = g.reduce_scatter([out], [given], set_up(c10d.ReduceScatterOptions, blocking))
    return work, [out], [sum(rows(g.size(), 4)) * (g.rank() + 1)]


def reduce_scatter_single(g: Any, blocking: bool) -> Started:
    out = torch.zeros(4)
    given = torch.cat([row(g.rank(), 4) * (to + 1) for to in range(g.size())])
    work = g.reduce_scatter_single(out, given, set_up(c10d.ReduceScatterOptions, blocking))
    return work, [out], [sum(rows(g.size(), 4)) * (g.rank() + 1)]


def reduce_scatter_single_coalesced(g: Any, blocking: bool) -> Started:
    outs = [torch.zeros(4), torch.zeros(2, dtype=torch.int32)]
    ins = [row(g.rank(), g.size() * 4), row(g.rank(), g.size() * 2).int()]
    opts = set_up(c10d.ReduceScatterOptions, blocking)
    work = g.reduce_scatter_single_coalesced(outs, ins, opts)
    sums = [sum(rows(g.size(), g.size() * 4)), sum(rows(g.size(), g.size() * 2)).int()]
    wanted = [each.chunk(g.size())[g.rank()] for each in sums]
    return work, outs, wanted


def alltoall(g: Any, blocking: bool) -> Started:
    """Rank r sends r + 1 rows to everybody: blocks of different sizes."""
    out = [torch.zeros(rank + 1) for rank in range(g.size())]
    given = [row(g.rank(), g.rank() + 1) + 100 * to for to in range(g.size())]
    work = g.alltoall(out, given, set_up(c10d.AllToAllOptions, blocking))
    return work, out, [row(rank, rank + 1) + 100 * g.rank() for rank in range(g.size())]


def all_to_all_single(g: Any, blocking: bool) -> Started:
    out = torch.zeros(g.size(), 2)
    given = torch.cat([row(g.rank(), 1, 2) + 100 * to for to in range(g.size())])
    work = g.all_to_all_single(out, given, [], [], set_up(c10d.AllToAllOptions, blocking))
    return work, [out], [torch.cat([r + 100 * g.rank() for r in rows(g.size(), 1, 2)])]


def all_to_all_uneven(g: Any, blocking: bool) -> Started:
    out = torch.zeros(sum(range(1, g.size() + 1)))
    given = torch.cat([row(g.rank(), g.rank() + 1) + 100 * to for to in range(g.size())])
    work = g.all_to_all_single(
        out, given, list(range(1, g.size() + 1)), [g.rank() + 1] * g.size(),
        set_up(c10d.AllToAllOptions, blocking),
    )  # fmt: skip
    wanted = [row(rank, rank + 1) + 100 * g.rank() for rank in range(g.size())]
    return work, [out], [torch.cat(wanted)]


def sparse(g: Any, blocking: bool) -> Started:
    """Everybody has element 0, and one of its own."""
    own = torch.tensor([[0, g.rank() + 1]])
    values = torch.tensor([1.0, 2.0])
    x = torch.sparse_coo_tensor(own, values, (5,), check_invariants=True)
    work = g.allreduce([x], set_up(c10d.AllreduceOptions, blocking))
    wanted = torch.zeros(5)
    wanted[0] = g.size()
    wanted[1 : g.size() + 1] = 2
    return work, [x.to_dense()], [wanted]


COLLECTIVES = (
    allreduce, allreduce_coalesced, broadcast, reduce, allgather, all_gather_single,
    all_gather_single_coalesced, allgather_coalesced, gather, scatter, reduce_scatter,
    reduce_scatter_single, reduce_scatter_single_coalesced, alltoall, all_to_all_single,
    all_to_all_uneven, sparse,
)  # fmt: skip


def same(found: list[Any], wanted: list[Any]) -> bool:
    return len(found) == len(wanted) and all(map(torch.equal, found, wanted))


@pytest.mark.parametrize("blocking", [True, False], ids=["blocking", "async"])
@pytest.mark.parametrize("start", COLLECTIVES, ids=lambda start: start.__name__)
def test_collective(start: Callable[[Any, bool], Started], blocking: bool, shared: Job) -> None:
    """Every collective of torch's groups does what torch says."""

    def body(group: Any) -> bool:
        work, found, wanted = start(group, blocking)
        assert work.wait()
        assert work.is_completed()
        assert work.is_success()
        assert work.exception() is None
        return same(found, wanted)

    assert shared.run(body) == [True] * shared.size


@pytest.mark.parametrize("start", COLLECTIVES, ids=lambda start: start.__name__)
def test_future_of(start: Callable[[Any, bool], Started], shared: Job) -> None:
    """A Work's future has the tensors that the call wrote, as a list, and so has `result`."""

    def body(group: Any) -> bool:
        work, _, wanted = start(group, False)
        value = work.get_future().wait()
        assert isinstance(value, list)
        if start is not sparse and start is not allgather_coalesced:
            assert same(value, wanted)
            assert same(work.result(), wanted)
        return True

    assert shared.run(body) == [True] * shared.size


@pytest.mark.parametrize(
    "call",
    [
        lambda g, x: g.allreduce(x),
        lambda g, x: g.allreduce(x, ReduceOp.SUM),
        lambda g, x: g.allreduce([x], op=ReduceOp.SUM, timeout=timedelta(seconds=20)),
        lambda g, x: g.reduce_scatter(x, [x.clone()] * g.size(), ReduceOp.SUM),
    ],
    ids=["tensor", "tensor, op", "list, op, timeout", "reduce_scatter"],
)
def test_short_forms(call: Callable[[Any, Any], Any], shared: Job) -> None:
    """torch's forms without an options object work too."""

    def body(group: Any) -> bool:
        x = torch.ones(3)
        call(group, x).wait()
        return torch.equal(x, torch.full((3,), float(group.size())))

    assert shared.run(body) == [True] * shared.size


@pytest.mark.parametrize(
    "call",
    [
        lambda g, x: g.broadcast(x, 0),
        lambda g, x: g.broadcast(x, root=0, timeout=timedelta(seconds=20)),
        lambda g, x: g.scatter(x, [torch.zeros(3)] * g.size() if g.rank() == 0 else [], 0),
        lambda g, x: g.alltoall([x], [torch.zeros(3)]) if g.size() == 1 else g.broadcast(x, 0),
    ],
    ids=["tensor, root", "root, timeout", "scatter", "alltoall"],
)
def test_short_forms_with_a_root(call: Callable[[Any, Any], Any], shared: Job) -> None:
    """A root may stand where torch's other form has options."""

    def body(group: Any) -> bool:
        x = torch.full((3,), float(group.rank()))
        call(group, x).wait()
        return torch.equal(x, torch.zeros(3))

    assert shared.run(body) == [True] * shared.size


NUMBERS = (
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn,
    torch.float8_e5m2, torch.bool,
)  # fmt: skip


@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
def test_dtype(dtype: Any, shared: Job) -> None:
    """Every dtype of torch's can be summed and moved."""

    def body(group: Any) -> bool:
        x = torch.tensor([0, 1, 1]).to(dtype)
        group.allreduce([x]).wait()
        wanted = torch.tensor([0, 1, 1]) * (1 if dtype is torch.bool else group.size())
        out = torch.zeros(group.size() * 3).to(dtype)
        group.all_gather_single(out, x).wait()
        found = out.to(torch.complex64).view(group.size(), 3)
        return all(torch.equal(each, wanted.to(torch.complex64)) for each in found)

    assert shared.run(body) == [True] * shared.size


@pytest.mark.parametrize(
    ("op", "wanted"),
    [
        (ReduceOp.AVG, lambda all: sum(all) / len(all)),
        (ReduceOp.PRODUCT, lambda all: torch.stack(all).prod(0)),
        (ReduceOp.MIN, lambda all: torch.stack(all).min(0).values),
        (ReduceOp.MAX, lambda all: torch.stack(all).max(0).values),
        (ReduceOp.PREMUL_SUM(0.5), lambda all: sum(all) / 2),
        (ReduceOp.PREMUL_SUM(torch.tensor([2.0])), lambda all: sum(all) * 2),
        (dist._make_nccl_premul_sum(4.0), lambda all: sum(all) * 4),
    ],
    ids=["AVG", "PRODUCT", "MIN", "MAX", "PREMUL_SUM", "PREMUL_SUM of a tensor", "nccl's"],
)
def test_reduction(op: Any, wanted: Callable[[list[Any]], Any], shared: Job) -> None:
    """Every reduction of torch's that has numbers."""

    def body(group: Any) -> bool:
        x = row(group.rank(), 6)
        group.allreduce([x], op).wait()
        return torch.equal(x, wanted(rows(group.size(), 6)))

    assert shared.run(body) == [True] * shared.size


@pytest.mark.parametrize(
    ("op", "wanted"),
    [
        (ReduceOp.BAND, lambda a, b: a & b),
        (ReduceOp.BOR, lambda a, b: a | b),
        (ReduceOp.BXOR, lambda a, b: a ^ b),
    ],
    ids=["BAND", "BOR", "BXOR"],
)
def test_bits(op: Any, wanted: Callable[[int, int], int], shared: Job) -> None:
    """Every reduction of torch's that has bits."""

    def body(group: Any) -> int:
        x = torch.tensor([5 + group.rank()])
        group.allreduce([x], op).wait()
        return int(x)

    found = fold(wanted, [5 + rank for rank in range(shared.size)])
    assert shared.run(body) == [found] * shared.size


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda g: g.allreduce([torch.ones(1), torch.ones(1)]), "list of one entry, found 2"),
        (lambda g: g.allreduce([torch.ones(1, device="meta")]), "meta"),
        (lambda g: g._get_backend(torch.device("cuda")), "on the CPU, not on cuda"),
        (lambda g: g.send([torch.ones(1)], g.rank()), "itself"),
    ],
    ids=["two tensors", "no memory", "another device", "to itself"],
)
def test_refused(call: Callable[[Any], Any], message: str, shared: Job) -> None:
    """What cannot work is refused before any traffic, and the group stays usable."""

    def body(group: Any) -> bool:
        with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
            call(group)
        return bool(group.barrier().wait())

    assert shared.run(body) == [True] * shared.size


def test_callbacks_may_communicate(shared: Job) -> None:
    """A future's callback may make a call on the same group and wait for it."""

    def body(group: Any) -> float:
        def again(future: Any) -> Any:
            [x] = future.value()
            group.allreduce([x]).wait()
            return x

        work = group.allreduce([torch.ones(1)])
        return float(work.get_future().then(again).wait())

    assert shared.run(body) == [float(shared.size**2)] * shared.size


def test_callbacks_do_not_record_gradients(shared: Job) -> None:
    """Grad mode belongs to a thread; callbacks run on one where it is off."""

    def body(group: Any) -> bool:
        future = group.allreduce([torch.ones(1)]).get_future()
        return bool(future.then(lambda _: torch.is_grad_enabled()).wait())

    found = shared.run(body)
    assert True not in found or shared.size == 1  # one rank is done at once, on its own thread


def test_tags_tell_messages_apart(shared: Job) -> None:
    """A receive takes the message with its tag, though another came first."""

    def body(group: Any) -> list[float]:
        if group.size() == 1:
            return [2.0, 1.0]
        if group.rank() == 0:
            for tag in (1, 2):
                group.send([torch.tensor([float(tag)])], 1, tag).wait()
        if group.rank() == 1:
            found = [torch.zeros(1) for _ in range(2)]
            for x, tag in zip(found, (2, 1), strict=True):
                group.recv([x], 0, tag).wait()
            return [float(x) for x in found]
        return [2.0, 1.0]

    assert shared.run(body) == [[2.0, 1.0]] * shared.size


def test_source_is_a_rank_of_the_group(shared: Job) -> None:
    """A receive from anyone says who sent, by the group's numbers."""
    if shared.size < 3:
        return

    def body(group: Any) -> int:
        if group.rank() == 0:
            return 0
        part = group.part([1, 2], "source", SECONDS, shared.store)
        x = torch.zeros(1)
        if part.rank() == 1:
            part.send([torch.ones(1)], 0).wait()
            part.barrier().wait()
            return 0
        work = part.recv_anysource([x])
        work.wait()
        part.barrier().wait()
        return int(work._source_rank())

    assert shared.run(body) == [0, 1, 0]


def test_parts_of_one_name_do_not_meet(shared: Job) -> None:
    """torch may give a group's name again once the group is gone."""

    def body(group: Any) -> list[float]:
        found = []
        for _ in range(3):
            part = group.part(range(group.size()), "again", SECONDS, shared.store)
            x = torch.ones(1)
            part.allreduce([x]).wait()
            found.append(float(x))
            part.shutdown()
        return found

    assert shared.run(body) == [[float(shared.size)] * 3] * shared.size


def test_split_group(shared: Job) -> None:
    """split_group makes a group of some ranks of this one; None where this one is not."""

    def body(group: Any) -> tuple[str, int, float] | None:
        part = group.split_group([group.size() - 1], group_name="last")
        if part is None:
            return None
        x = torch.ones(1)
        part.allreduce([x]).wait()
        return part.getGroupName(), part.size(), float(x)

    assert shared.run(body) == [None] * (shared.size - 1) + [("last", 1, 1.0)]


def test_second_group_in_one_store(pair: Job) -> None:
    """A store may be used for one group after the other: each meets its own keys."""

    def body(group: Any) -> list[float]:
        found = []
        for _ in range(4):
            other = create(options(pair.store, group.rank(), 2, name="again"))
            x = torch.ones(1)
            other.allreduce([x]).wait()
            found.append(float(x))
            other.shutdown()
        return found

    assert pair.run(body) == [[2.0] * 4] * 2


def test_ours_is_left_alone(pair: Job) -> None:
    """A program's own cydist group and torch's do not meet."""

    def body(group: Any) -> tuple[float, float]:
        x, y = torch.ones(1), torch.ones(1)
        work = group.allreduce([x])
        cydist.all_reduce(y)
        work.wait()
        group.shutdown()
        cydist.all_reduce(y)
        return float(x), float(y)

    assert pair.run(body) == [(2.0, 4.0)] * 2


@pytest.mark.parametrize("set_it", [True, False], ids=["of the group", "of the call"])
def test_timeout(set_it: bool, pair: Job) -> None:
    """set_timeout and a call's own limit end a call that nobody else makes."""

    def body(group: Any) -> bool:
        if group.rank() == 1:
            return True
        short = timedelta(milliseconds=50)
        if set_it:
            group.set_timeout(short)
        with pytest.raises(cydist.DistTimeoutError, match=r" timeout "):
            group.barrier(timeout=None if set_it else short).wait()
        return True

    assert pair.run(body) == [True, True]


def test_wait_may_end_early(pair: Job) -> None:
    """A limit given to wait ends the wait, not the call."""

    def body(group: Any) -> float:
        x = torch.ones(1)
        if group.rank() == 0:
            work = group.allreduce([x])
            with pytest.raises(cydist.DistTimeoutError):
                work.wait(timedelta(milliseconds=50))
            group.send([x], 1).wait()
            work.wait()
        else:
            group.recv([torch.zeros(1)], 0).wait()
            group.allreduce([x]).wait()
        return float(x)

    assert pair.run(body) == [2.0, 2.0]


def test_errors_reach_the_future(pair: Job) -> None:
    """abort ends a call under way; wait, exception and the future say so."""

    def body(group: Any) -> bool:
        if group.rank() == 1:
            return True
        work = group.allreduce([torch.ones(1)])
        future = work.get_future()
        group.abort()
        for wait in (work.wait, future.wait):
            with pytest.raises(RuntimeError, match="abort"):
                wait()
        return isinstance(work.exception(), cydist.DistError) and not work.is_success()

    assert pair.run(body) == [True, True]


def test_monitored_barrier(pair: Job) -> None:
    """The group's own monitored_barrier names who did not come."""

    def body(group: Any) -> bool:
        group.monitored_barrier()
        if group.rank() == 0:
            with pytest.raises(cydist.DistTimeoutError, match="Rank 1 failed to pass"):
                group.monitored_barrier(timedelta(milliseconds=50))
        return True

    assert pair.run(body) == [True, True]
