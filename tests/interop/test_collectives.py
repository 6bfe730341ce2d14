"""Every collective of cydist.interop.torch.Group, called as torch calls it."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from functools import reduce as fold
from itertools import chain
from typing import TYPE_CHECKING, Any

import pytest

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from torch.distributed import distributed_c10d as c10d  # noqa: E402

if TYPE_CHECKING:
    from torch_thread_job import Job

ReduceOp = dist.ReduceOp
# torch before 2.13 says this of tensors that were told to check them.
pytestmark = pytest.mark.filterwarnings("ignore:Sparse invariant checks")


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


def gather_single(g: Any, blocking: bool) -> Started:
    root = g.size() - 1
    out = [torch.zeros(g.size(), 2, 2)] if g.rank() == root else []
    opts = set_up(c10d.GatherOptions, blocking, rootRank=root)
    work = g.gather_single(*out or [torch.zeros(0)], row(g.rank(), 2, 2), opts)
    return work, out, [torch.stack(rows(g.size(), 2, 2))] if out else []


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
    """Rank r sends r + 1 rows to every rank: blocks of different sizes."""
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
    """Every rank has element 0, and one of its own."""
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
    all_gather_single_coalesced, allgather_coalesced, gather, gather_single, scatter,
    reduce_scatter, reduce_scatter_single, reduce_scatter_single_coalesced, alltoall,
    all_to_all_single, all_to_all_uneven, sparse,
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


@pytest.mark.parametrize("wait", ["synchronize", "block_current_stream"])
@pytest.mark.parametrize("start", COLLECTIVES, ids=lambda start: start.__name__)
def test_waits_without_a_limit(
    start: Callable[[Any, bool], Started], wait: str, shared: Job
) -> None:
    """The CPU has no streams: what torch calls for them ends when the call has."""

    def body(group: Any) -> bool:
        work, found, wanted = start(group, False)
        getattr(work, wait)()
        return work.is_completed() and same(found, wanted)

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


def premul_sum(factor: Any) -> Any:
    """As torch 2.13 makes it, or those before."""
    if callable(ReduceOp.PREMUL_SUM):
        return ReduceOp.PREMUL_SUM(factor)
    return dist._make_nccl_premul_sum(factor)


@pytest.mark.parametrize(
    ("op", "wanted"),
    [
        (ReduceOp.AVG, lambda all: sum(all) / len(all)),
        (ReduceOp.PRODUCT, lambda all: torch.stack(all).prod(0)),
        (ReduceOp.MIN, lambda all: torch.stack(all).min(0).values),
        (ReduceOp.MAX, lambda all: torch.stack(all).max(0).values),
        (premul_sum(0.5), lambda all: sum(all) / 2),
        (premul_sum(torch.tensor([2.0])), lambda all: sum(all) * 2),
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
