"""cydist.interop.torch.Group: what it refuses, messages, subgroups, futures, timeouts, errors."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

import cydist

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
import torch_thread_job  # noqa: E402
from torch.distributed import ReduceOp  # noqa: E402

from cydist._native import fast_torch  # noqa: E402
from cydist.interop.torch import bootstrap  # noqa: E402
from cydist.interop.torch.options import REDUCTIONS  # noqa: E402
from cydist.stores.tcp_server import servers  # noqa: E402

if TYPE_CHECKING:
    from torch_thread_job import Job

SECONDS = 30


def blocking() -> Any:
    """Options of an allreduce that blocks, as torch passes them."""
    options = dist.AllreduceOptions()
    options.asyncOp = False
    return options


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda g: g.allreduce([torch.ones(1), torch.ones(1)]), "list of one entry, found 2"),
        (lambda g: g.allreduce([torch.ones(1)] * 2, blocking()), "list of one entry, found 2"),
        (lambda g: g.allreduce([], blocking()), "list of one entry, found 0"),
        (lambda g: g.allreduce([torch.ones(1, device="meta")]), "meta"),
        (lambda g: g.allreduce([torch.ones(1).to_sparse()], ReduceOp.MAX), "SUM only, not MAX"),
        (lambda g: g._get_backend(torch.device("mps")), "on cpu, cuda, and this one is on mps"),
        (lambda g: g.send([torch.ones(1)], g.rank()), "itself"),
    ],
    ids=[
        "two tensors",
        "two tensors, options",
        "no tensors",
        "no memory",
        "sparse",
        "another device",
        "to itself",
    ],
)
def test_refused(call: Callable[[Any], Any], message: str, shared: Job) -> None:
    """What cannot work is refused before any traffic, and the group stays usable."""

    def body(group: Any) -> bool:
        group.allreduce([torch.ones(1)], blocking()).wait()  # later ones take the short way
        with pytest.raises((ValueError, TypeError, RuntimeError), match=message):
            call(group)
        return bool(group.barrier().wait())

    assert shared.run(body) == [True] * shared.size


def changed(options: Any, **fields: Any) -> Any:
    for name, value in fields.items():
        setattr(options, name, value)
    return options


WANTED: dict[str, Callable[[Any, Any], Any]] = {
    "SUM": torch.add, "AVG": lambda a, b: (a + b) / 2, "PRODUCT": torch.mul,
    "MIN": torch.minimum, "MAX": torch.maximum, "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or, "BXOR": torch.bitwise_xor,
}  # fmt: skip


@pytest.mark.parametrize("op", REDUCTIONS, ids=[ours.name for ours in REDUCTIONS.values()])
def test_options_are_read_in_place(op: Any, pair: Job) -> None:
    """The short way takes a blocking call, and reduces as its options say."""
    name = REDUCTIONS[op].name
    dtype = torch.float64 if name == "AVG" else torch.int64
    given = [torch.tensor([6, 5 + 3 * rank], dtype=dtype) for rank in range(2)]

    def body(group: Any) -> tuple[bool, Any]:
        group.allreduce([torch.ones(2, dtype=dtype)], blocking()).wait()  # an algorithm is chosen
        x = given[group.rank()].clone()
        taken = fast_torch.all_reduce([x], changed(blocking(), reduceOp=op), group.host)
        return taken, x

    for taken, x in pair.run(body):
        assert taken
        assert torch.equal(x, WANTED[name](*given))


@pytest.mark.parametrize(
    "options",
    [
        lambda: changed(blocking(), asyncOp=True),
        lambda: changed(blocking(), timeout=timedelta(seconds=30)),
        lambda: changed(blocking(), timeout=timedelta(0)),
        lambda: changed(blocking(), reduceOp=dist._make_nccl_premul_sum(2.0)),
        lambda: None,
        lambda: ReduceOp.SUM,
        dist.BarrierOptions,
    ],
    ids=["async", "a limit", "a limit of zero", "a factor", "none", "an operation", "another's"],
)
def test_the_fast_path_leaves_others_alone(options: Callable[[], Any], pair: Job) -> None:
    """Asynchronous calls, those with a limit of their own, and whatever it does not know."""

    def body(group: Any) -> tuple[bool, float]:
        x = torch.ones(1)
        group.allreduce([x], blocking()).wait()
        return fast_torch.all_reduce([x], options(), group.host), float(x)

    assert pair.run(body) == [(False, 2.0)] * 2


class Lookalike:
    """Options as a class of Python's, which lie elsewhere."""

    asyncOp, timeout, reduceOp = True, timedelta(milliseconds=-1), ReduceOp.SUM


@pytest.mark.parametrize(
    ("kind", "reductions"),
    [
        (Lookalike, REDUCTIONS),
        (dist.BarrierOptions, REDUCTIONS),
        (dist.AllreduceOptions, {ReduceOp.SUM: REDUCTIONS[ReduceOp.SUM]}),
    ],
    ids=["another language", "another class", "one reduction"],
)
def test_what_cannot_be_found_is_not_read(kind: type, reductions: dict[Any, Any]) -> None:
    """A class whose fields have no clear places is refused, and the one that is known stays."""
    assert fast_torch.learn_layout(dist.AllreduceOptions, REDUCTIONS)
    assert not fast_torch.learn_layout(kind, reductions)


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


@pytest.mark.parametrize("shared", [2, 3], ids="{} ranks".format, indirect=True)
def test_callbacks_do_not_record_gradients(shared: Job) -> None:
    """Grad mode belongs to a thread; callbacks run on one where it is off. (Those of a future that
    is done already run on the thread that adds them.)"""
    added = threading.Event()

    def body(group: Any) -> bool:
        if group.rank() == 1:
            assert added.wait(SECONDS)
        future = group.allreduce([torch.ones(1)]).get_future()
        callback = future.then(lambda _: torch.is_grad_enabled())
        if group.rank() == 0:
            added.set()
        return bool(callback.wait()) and group.rank() == 0

    assert shared.run(body) == [False] * shared.size


@pytest.mark.parametrize("shared", [2, 3], ids="{} ranks".format, indirect=True)
def test_tags_tell_messages_apart(shared: Job) -> None:
    """A receive takes the message with its tag, though another came first."""

    def body(group: Any) -> list[float]:
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


@pytest.mark.parametrize("shared", [3], ids="{} ranks".format, indirect=True)
def test_source_is_a_rank_of_the_group(shared: Job) -> None:
    """A receive from anyone says who sent, by the group's numbers."""

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


def test_subgroups_of_one_name_are_apart(shared: Job) -> None:
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


def test_subgroups_of_subgroups_of_one_name_are_apart() -> None:
    """Their parents have one name, and other ranks or the same."""
    job = torch_thread_job.Job(3)

    def body(group: Any) -> list[float]:
        parents = [
            group.split_group(ranks, group_name="x") for ranks in ([0, 1, 2], [0, 1], [0, 1])
        ]
        found: list[float] = []
        if group.rank() == 2:
            return found
        parts = [parent.split_group([0, 1]) for parent in parents]
        if group.rank() == 0:
            for number, part in enumerate(parts):
                part.send([torch.full((1,), float(number))], 1, 0).wait()
        else:
            for part in reversed(parts):
                x = torch.zeros(1)
                part.recv([x], 0, 0).wait()
                found.append(float(x))
        return found

    assert job.run(body) == [[], [2.0, 1.0, 0.0], []]
    job.close()


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
            other = torch_thread_job.create(
                torch_thread_job.options(pair.store, group.rank(), 2, name="again")
            )
            x = torch.ones(1)
            other.allreduce([x]).wait()
            found.append(float(x))
            other.shutdown()
        return found

    assert pair.run(body) == [[2.0] * 4] * 2


def test_a_batch_is_complete_with_its_calls(pair: Job) -> None:
    """The Work at its end waits for all calls since its start, and for no later ones."""
    asked = threading.Event()

    def body(group: Any) -> tuple[bool, list[float], bool]:
        x, y, z = (torch.full((2,), float(group.rank() + 1)) for _ in range(3))
        if group.rank() == 1:
            assert asked.wait(SECONDS)
        group._start_coalescing(torch.device("cpu"))
        group.allreduce_coalesced([x])
        group.broadcast([y], root=1)
        (group.recv if group.rank() == 0 else group.send)([z], 1 - group.rank())
        work = group._end_coalescing(torch.device("cpu"))
        at_once = group.rank() == 0 and work.is_completed()
        asked.set()
        work.wait()
        group.allreduce([torch.ones(1)]).wait()
        group._start_coalescing(torch.device("cpu"))
        empty = group._end_coalescing(torch.device("cpu"))
        return at_once, [float(each[0]) for each in (x, y, z)], empty.is_completed()

    assert pair.run(body) == [(False, [3.0, 2.0, 2.0], True)] * 2


def test_torchs_group_in_a_call_of_cydist(pair: Job) -> None:
    """Is refused with the group to pass, which works."""

    def body(group: Any) -> float:
        x = torch.ones(1)
        with pytest.raises(TypeError, match=r"group is torch's, not cydist's: pass its attribute"):
            cydist.all_reduce(x, group=group)
        cydist.all_reduce(x, group=group.host)
        return float(x)

    assert pair.run(body) == [2.0] * 2


def test_a_group_of_gloo_in_a_call_of_cydist() -> None:
    """Is refused as the group of another library."""
    store = dist.HashStore()
    gloo = dist.ProcessGroupGloo(store, 0, 1, timedelta(seconds=SECONDS))
    with pytest.raises(TypeError, match="group must come from cydist's new_group, not "):
        cydist.all_reduce(torch.ones(1), group=gloo)  # type: ignore[arg-type]


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


OTHERS = {
    "shape": lambda: torch.sparse_coo_tensor([[0], [0]], [1.0], (2, 3), check_invariants=True),
    "dtype": lambda: torch.sparse_coo_tensor([[0], [0]], [1], (2, 2), check_invariants=True),
    "dimensions": lambda: torch.sparse_coo_tensor(
        [[0]], torch.ones(1, 2), (2, 2), check_invariants=True
    ),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_sparse_tensors_that_differ(other: Callable[[], Any], pair: Job) -> None:
    """Sparse tensors of other shapes, dtypes or sparse dimensions are a MismatchError that shows
    both, on every rank; they are as they were, and the group stays usable."""
    ours = torch.sparse_coo_tensor([[0], [0]], [1.0], (2, 2), check_invariants=True)

    def body(group: Any) -> bool:
        cydist.destroy_process_group()  # torch's programs have none
        x = (other() if group.rank() else ours).clone()
        before = x.to_dense()
        with pytest.raises(cydist.MismatchError, match=r"float32 \(2, 2\)") as caught:
            group.allreduce([x])
        assert caught.value.ranks == (1 - group.rank(),)
        group.barrier().wait()
        return torch.equal(x.to_dense(), before)

    assert pair.run(body) == [True, True]


def test_an_error_that_is_kept_holds_no_store(
    secret: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The store that rank 0 opened for a group that cannot be made ends at once."""
    monkeypatch.setenv("CYDIST_SOCKET_IFNAME", "nowhere0")
    before = set(servers)
    options = SimpleNamespace(
        store=dist.HashStore(), group_rank=0, group_size=1, timeout=timedelta(seconds=SECONDS),
        group_id="default", global_ranks_in_group=[],
    )  # fmt: skip
    with pytest.raises(cydist.DistNetworkError, match="nowhere0") as kept:
        bootstrap.create(options)
    left = set(servers) - before
    for server in left:
        server.wait(SECONDS)
    assert not any(server._thread.is_alive() for server in left), kept


@pytest.mark.parametrize("description", ["tensor parallel", "default_pg", "undefined"])
def test_errors_call_a_group_by_torchs_description(description: str, pair: Job) -> None:
    """The user's; torch gives each group one of its own, which says nothing."""

    def body(group: Any) -> str:
        part = group.split_group([0, 1], group_desc=description)
        title: str = part.host.title
        return title

    for title in pair.run(body):
        assert (title == f"group '{description}'") is (description == "tensor parallel")
