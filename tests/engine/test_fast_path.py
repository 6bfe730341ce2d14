"""The short way of a call: taken by plain arrays, left by everything else, with equal results."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cydist as dist
from cydist._native import fast_collectives
from cydist.testing import run_threads

SUM = dist.ReduceOp.SUM
DTYPES = ("bool", "i1", "u1", "i2", "u2", "i4", "u4", "i8", "u8", "f2", "f4", "f8", "c8", "c16")
RANKS = 3


def on_ranks(body: Callable[[int, Any], Any], backend: str = "inproc") -> list[Any]:
    """Run body(rank, group) where the first call, which chooses algorithms, was made."""

    def with_group(rank: int) -> Any:
        group = dist.group.WORLD
        small, large = np.ones(1), np.ones(RANKS)
        dist.all_reduce(small, group=group)
        dist.all_gather_into_tensor(large, small, group)
        dist.reduce_scatter_tensor(small, large, group=group)
        dist.all_to_all_single(np.empty(RANKS), large, group=group)
        dist.barrier(group)
        return body(rank, group)

    return run_threads(with_group, RANKS, backend)


@pytest.fixture(params=["inproc", "tcp", "shm"])
def transport(request: pytest.FixtureRequest) -> str:
    """Where the bytes go."""
    return str(request.param)


def test_results(transport: str) -> None:
    """Each collective takes the short way at its second call, and is right."""

    def body(rank: int, group: Any) -> None:
        one = np.array([rank + 1.0])
        assert fast_collectives.all_reduce(one, SUM, group)
        assert one[0] == 6
        gathered, own = np.zeros(RANKS), np.array([rank + 1.0])
        assert fast_collectives.all_gather_into_tensor(gathered, own, group)
        assert gathered.tolist() == [1, 2, 3]
        part = np.zeros(1)
        assert fast_collectives.reduce_scatter_tensor(part, np.arange(3.0), SUM, group)
        assert part[0] == 3 * rank
        swapped = np.zeros(RANKS)
        assert fast_collectives.all_to_all_single(swapped, 10.0 * rank + np.arange(3), group)
        assert swapped.tolist() == [rank, 10 + rank, 20 + rank]
        assert fast_collectives.barrier(group)

    on_ranks(body, transport)


@pytest.mark.parametrize("dtype", DTYPES)
def test_dtypes_of_numpy(dtype: str) -> None:
    """Every dtype of numpy's that can be reduced is looked at rightly."""

    def body(rank: int, group: Any) -> None:
        x = np.ones(8 // np.dtype(dtype).itemsize or 1, dtype)
        dist.all_reduce(x.copy(), group=group)
        assert fast_collectives.all_reduce(x, SUM, group)
        assert x.tolist() == (np.ones_like(x) * (1 if dtype == "bool" else 3)).tolist()

    on_ranks(body)


def test_tensors_of_torch() -> None:
    """Tensors and parameters take it too, bfloat16 among them."""
    torch = pytest.importorskip("torch")

    def body(rank: int, group: Any) -> None:
        for x in (torch.ones(2), torch.nn.Parameter(torch.ones(2)), torch.ones(4).bfloat16()):
            dist.all_reduce(x.detach().clone(), group=group)
            assert fast_collectives.all_reduce(x, SUM, group)
            assert (x == 3).all()

    on_ranks(body)


def refused() -> dict[str, Any]:
    """Arrays for the long way."""
    read_only = np.ones(1)
    read_only.flags.writeable = False
    return {
        "strided": np.ones((2, 2))[:, 0],
        "empty": np.ones(0),
        "read-only": read_only,
        "other-endian": np.ones(1, ">f8" if sys.byteorder == "little" else "<f8"),
        "unaligned": np.frombuffer(bytearray(9), "u1")[1:].view("f8"),
        "ml_dtypes": np.ones(1, ml_dtypes.bfloat16),
        "structured": np.ones(1, [("a", "f8")]),
        "masked": np.ma.ones(1),
        "bytes": bytearray(8),
        "list": [1.0],
        "none": None,
    }


@pytest.mark.parametrize("name", refused())
def test_what_it_leaves(name: str) -> None:
    """Whatever is not plain goes the long way, and nothing has happened before."""
    group = alone()
    assert not fast_collectives.all_reduce(refused()[name], SUM, group)
    assert group.native.seq == 1


@pytest.mark.parametrize("kind", ["conj", "neg", "strided", "sparse", "meta", "subclass"])
def test_what_it_leaves_of_torch(kind: str) -> None:
    """Lazy, strange and derived tensors go the long way."""
    torch = pytest.importorskip("torch")

    class Derived(torch.Tensor):  # type: ignore[misc, name-defined]
        pass

    tensor = {
        "conj": lambda: torch.ones(1, dtype=torch.complex64).conj(),
        "neg": lambda: torch.ones(1, dtype=torch.complex64).conj().imag,
        "strided": lambda: torch.ones(2, 2)[:, 0],
        "sparse": lambda: torch.ones(2, 2).to_sparse(),
        "meta": lambda: torch.ones(1, device="meta"),
        "subclass": lambda: torch.ones(1).as_subclass(Derived),
    }[kind]()
    assert not fast_collectives.all_reduce(tensor, SUM, alone())


@pytest.mark.parametrize(
    "op", [dist.ReduceOp.PREMUL_SUM(2.0), dist.ReduceOp.PREMUL_SUM, dist.ReduceOp.BAND, 1, None]
)
def test_operations_it_leaves(op: Any) -> None:
    """Factors, what is no operation, and what makes no sense for the dtype."""
    assert not fast_collectives.all_reduce(np.ones(1), op, alone())


def alone() -> Any:
    """A group of one rank, at rest, with its choices made."""
    from cydist.backends.host import create as host_backend
    from cydist.groups.registry import BackendOptions

    options = BackendOptions(dist.HashStore(), 0, 1, 60.0, "alone", [0])
    group = host_backend.create_inproc(options)
    x = np.ones(1)
    dist.all_reduce(x, group=group)
    assert fast_collectives.all_reduce(x, SUM, group)
    group = host_backend.create_inproc(BackendOptions(dist.HashStore(), 0, 1, 60.0, "again", [0]))
    dist.all_reduce(x, group=group)
    return group


def test_overlapping_arrays_are_left() -> None:
    """What overlaps is for the long way to refuse; a rank's own block in place is fine."""

    def body(rank: int, group: Any) -> None:
        whole = np.arange(3.0)
        assert not fast_collectives.all_gather_into_tensor(
            whole, whole[(rank + 1) % 3 :][:1], group
        )
        assert not fast_collectives.reduce_scatter_tensor(whole[:1], whole, SUM, group)
        assert not fast_collectives.all_to_all_single(whole, whole, group)
        mine = np.zeros(3)
        mine[rank] = rank
        assert fast_collectives.all_gather_into_tensor(mine, mine[rank : rank + 1], group)
        assert mine.tolist() == [0, 1, 2]

    on_ranks(body)


def test_sizes_that_do_not_fit_are_left() -> None:
    """The long way says what is wrong with them."""

    def body(rank: int, group: Any) -> None:
        assert not fast_collectives.all_gather_into_tensor(np.ones(4), np.ones(1), group)
        assert not fast_collectives.all_gather_into_tensor(np.ones(3, "f4"), np.ones(1), group)
        assert not fast_collectives.reduce_scatter_tensor(np.ones(2), np.ones(3), SUM, group)
        assert not fast_collectives.all_to_all_single(np.ones(4), np.ones(4), group)
        dist.barrier(group)

    on_ranks(body)


@pytest.mark.parametrize("end", ["destroy", "abort"])
def test_a_group_that_ended_is_left(end: str) -> None:
    """The long way raises what is to be raised."""
    group = alone()
    getattr(group, end)()
    assert not fast_collectives.all_reduce(np.ones(1), SUM, group)


def test_it_waits_for_its_turn(transport: str) -> None:
    """With asynchronous calls outstanding a call takes its place behind them."""

    def body(rank: int, group: Any) -> float:
        total = np.array([1.0])
        works = []
        for _ in range(20):
            works.append(dist.all_reduce(total, group=group, async_op=True))
            dist.all_reduce(total, group=group)
        for work in works:
            work.wait(60)
        return float(total[0])

    assert on_ranks(body, transport) == [3.0**40] * RANKS


def test_a_mismatch_is_found(transport: str) -> None:
    """Its fingerprint is compared like any other; the group has failed then."""

    def body(rank: int, group: Any) -> None:
        x = np.ones(2, "i4" if rank else "f4")
        with pytest.raises(dist.MismatchError) as caught:  # noqa: PT012
            dist.all_reduce(x.view("f8"), group=group)
            for _ in range(100):
                dist.all_reduce(x, group=group)
        assert caught.value.op == "all_reduce"
        assert "of float32" in str(caught.value)
        assert "of int32" in str(caught.value)
        with pytest.raises(dist.GroupFailedError):
            dist.all_reduce(x, group=group)

    on_ranks(body, transport)


def test_a_timeout_is_the_groups(transport: str) -> None:
    """A call that nobody joins ends at the group's timeout, as the others do."""

    def body(rank: int, group: Any) -> None:
        if rank == 0:
            group.timeout = 0.2
            with pytest.raises(dist.DistTimeoutError, match="all_reduce"):
                dist.all_reduce(np.ones(1), group=group)

    on_ranks(body, transport)


def test_changed_settings_are_honoured(monkeypatch: pytest.MonkeyPatch) -> None:
    """After tuning_table.reload the algorithm is chosen again."""
    from cydist.tuning import table as tuning_table

    group = alone()
    monkeypatch.setenv("CYDIST_ALGORITHM", "all_reduce:staged")
    tuning_table.reload()
    assert not fast_collectives.all_reduce(np.ones(1), SUM, group)


PROGRAM = """
import os, numpy as np, cydist as dist
from cydist._native import fast_collectives as short
dist.init_process_group("tcp", timeout=60)
rank, x = dist.get_rank(), np.ones(2)
for _ in range(3):
    dist.broadcast(x, 1)
    dist.all_reduce(x)
assert short.all_reduce(x, dist.ReduceOp.SUM, None)
assert short.broadcast(x, 1, None) and not short.broadcast(x, 5, None)
assert x.tolist() == [16, 16], x
pid = os.fork()
if pid == 0:
    try:
        dist.all_reduce(x)
    except dist.ForkedError:
        os._exit(7)
    os._exit(8)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
dist.barrier()
dist.destroy_process_group()
assert not short.all_reduce(x, dist.ReduceOp.SUM, None)
print("ok", flush=True)
"""


def run_processes(program: str, tmp_path: Any) -> None:
    """Run two ranks whose program ends by printing ok."""
    store = f"file://{tmp_path}/store"
    program = program.replace('"tcp", timeout', f'"tcp", "{store}", timeout')
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", program],
            env={**os.environ, "RANK": str(rank), "WORLD_SIZE": "2"},
            stdout=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        assert [rank.communicate(timeout=60)[0] for rank in ranks] == ["ok\n"] * 2
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def test_the_default_group_of_a_process(tmp_path: Any) -> None:
    """Processes take it without naming a group; a forked child does not, nor who has left."""
    run_processes(PROGRAM, tmp_path)


RECEIVERS = """
import mmap, os, sys, threading, time
import numpy as np, cydist as dist
dist.init_process_group("tcp", timeout=60)
rank, one, other = dist.get_rank(), np.zeros(1), np.zeros(1)
file = os.open("FLAG", os.O_RDWR | os.O_CREAT)
os.ftruncate(file, 1)
flag, errors = mmap.mmap(file, 1), []
deadline = time.monotonic() + 60
def receive():
    try:
        dist.recv(one, 1, tag=1)
    except Exception as error:
        errors.append(error)
dist.barrier()
if rank == 1:
    while not flag[0] and time.monotonic() < deadline:
        pass
    dist.send(np.ones(1), 0, tag=1)
    dist.send(np.ones(1), 0, tag=2)
else:
    usual = sys.getswitchinterval()
    sys.setswitchinterval(60)       # who computes from now on keeps the GIL
    work = dist.irecv(other, 1, tag=2)
    threads = [threading.Thread(target=work.wait), threading.Thread(target=receive)]
    for thread in threads:
        thread.start()
    held = time.monotonic() + 0.1   # five times what the first wait may take
    while time.monotonic() < held:
        pass
    flag[0] = 1
    while not one[0] and time.monotonic() < deadline:
        pass
    sys.setswitchinterval(usual)
    for thread in threads:
        thread.join(60)
    assert not errors, errors
    assert one[0] == other[0] == 1
dist.barrier()
dist.destroy_process_group()
print("ok", flush=True)
"""


def test_a_message_that_another_thread_completes(tmp_path: Any) -> None:
    """A receive whose first wait is over, and that another's wait completes, is no late one."""
    run_processes(RECEIVERS.replace("FLAG", f"{tmp_path}/flag"), tmp_path)


MANY_BYTES = """
import numpy as np, cydist as dist
dist.init_process_group("tcp", timeout=60)
rank, total = dist.get_rank(), 0
for number in range(18000):
    x = np.full(1 + number * 37 % 1024, number, "f8")
    y = np.empty_like(x)
    if rank == 0:
        dist.send(x, 1)
    if number % 4 == 0:
        dist.barrier()      # so that many are there when they are asked for
    if rank == 1:
        dist.recv(y, 0)
        assert (x == y).all(), number
    total += x.nbytes
assert total > 64 << 20            # what a rank may have under way
dist.barrier()
dist.destroy_process_group()
print("ok", flush=True)
"""


def test_many_bytes_of_small_messages(tmp_path: Any) -> None:
    """Of sizes that end anywhere in a ring; more of them than one rank may send ahead."""
    run_processes(MANY_BYTES, tmp_path)


POSTED = """
import numpy as np, cydist as dist
dist.init_process_group("tcp", timeout=60)
rank, ready = dist.get_rank(), np.zeros(1)
for number in range(2000):
    first, second = np.full(1, 1.0), np.full(1, 2.0)
    if rank == 1:
        dist.recv(ready, 0, tag=9)
        dist.send(first, 0)
        dist.send(second, 0)
        continue
    first[0] = second[0] = 0
    work = dist.irecv(first, SOURCE)
    dist.send(ready, 1, tag=9)
    dist.recv(second, 1)
    work.wait(60)
    assert (first[0], second[0]) == (1, 2), number
dist.barrier()
dist.destroy_process_group()
print("ok", flush=True)
"""


@pytest.mark.parametrize("source", ["1", "None"], ids=["named", "any"])
def test_a_receive_that_was_posted_before_comes_first(tmp_path: Any, source: str) -> None:
    """Though a second one looks for itself while the first is the background's."""
    run_processes(POSTED.replace("SOURCE", source), tmp_path)


@pytest.mark.parametrize("made", [list, tuple, np.array], ids=["list", "tuple", "array"])
def test_sizes_of_any_kind(made: Callable[[list[int]], Any]) -> None:
    """Sizes that are given are no question of truth: an array of them is as good as a list."""

    def body(rank: int, group: Any) -> None:
        rows = np.arange(2.0 * RANKS) + 10 * rank
        for sizes in ([2] * RANKS, []):
            swapped = np.zeros(2 * RANKS)
            dist.all_to_all_single(swapped, rows, made(sizes), made(sizes), group)
            assert swapped.tolist() == [
                10.0 * r + 2 * rank + i for r in range(RANKS) for i in (0, 1)
            ]
        with pytest.raises(ValueError, match="output_split_sizes"):
            dist.all_to_all_single(swapped, rows, made([1] * RANKS), None, group)

    on_ranks(body)


def test_a_wait_that_cannot_begin_leaves_no_receive(monkeypatch: pytest.MonkeyPatch) -> None:
    """A receive lies on the stack of its call. Where there is no memory to note that it waits, it
    leaves the queue, and a later one gets the message."""

    def no_memory(group: Any, waiting: object) -> None:
        if waiting is not None:
            raise MemoryError

    def body(rank: int, group: Any) -> tuple[int, int] | None:
        x = np.full(1, float(rank))
        if rank == 1:
            dist.barrier(group)
            dist.send(x, 0, group)
            return None
        with monkeypatch.context() as patch:
            patch.setattr(type(group), "waiting", property(None, no_memory), raising=False)
            with pytest.raises(MemoryError):
                dist.recv(x, 1, group)
        left: tuple[int, int] = group._endpoint.link.pending()
        dist.barrier(group)
        dist.recv(x, 1, group)
        assert x[0] == 1
        return left

    found = on_ranks(lambda rank, group: body(rank, group) if rank < 2 else dist.barrier(group))
    assert found[0] == (0, 0)
