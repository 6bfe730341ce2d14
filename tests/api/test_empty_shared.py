"""empty_shared: what arrays it makes, how long they live, and where there is no memory to share."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from threading import current_thread

import ml_dtypes
import numpy as np
import pytest
from transport_ranks import DEADLINE, free_port

import cydist as dist
from cydist.backends.host import shm_setup
from cydist.testing import run_threads

DTYPES = [
    np.float64, "float32", np.dtype(">i4"), bool, "S7", "datetime64[ns]", ml_dtypes.bfloat16,
    np.dtype([("a", "i4"), ("b", "f8")]),
]  # fmt: skip


def left() -> int:
    """Bytes that this rank may still take for arrays."""
    return int(dist.group.WORLD._endpoint.link.heap.left())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [3, (), (0,), (2, 0, 3), (5, 7), [2, 3, 4]], ids=str)
def test_it_is_like_numpys_empty(shape: object, dtype: object) -> None:
    """Shape, strides, dtype and flags are those of numpy.empty, and it can be written."""

    def body(rank: int) -> None:
        made, expected = dist.empty_shared(shape, dtype), np.empty(shape, dtype)
        assert type(made) is np.ndarray
        assert made.dtype == expected.dtype
        assert (made.shape, made.strides) == (expected.shape, expected.strides)
        assert made.flags.writeable
        assert made.flags.aligned
        made[...] = np.zeros((), dtype)
        assert (made == np.zeros(shape, dtype)).all()

    run_threads(body, 2, "tcp")


def test_float64_unless_told_otherwise() -> None:
    """The dtype is that of numpy.empty."""
    assert run_threads(lambda rank: dist.empty_shared(2).dtype, 2, "tcp") == [np.float64] * 2


@pytest.mark.parametrize("shape", [(4, 5), (), (0, 3)], ids=str)
@pytest.mark.parametrize("name", ["float32", "bfloat16", "int64", "bool"])
def test_a_torch_dtype_makes_a_tensor(shape: tuple[int, ...], name: str) -> None:
    """torch's dtypes make torch's tensors in the same memory."""
    torch = pytest.importorskip("torch")

    def body(rank: int) -> None:
        made = dist.empty_shared(shape, getattr(torch, name))
        assert (made.dtype, tuple(made.shape)) == (getattr(torch, name), shape)
        assert dist.is_shared(made) == bool(made.numel())
        made.fill_(1)
        assert made.sum().item() == made.numel()

    run_threads(body, 2, "tcp")


def test_torch_takes_it_without_a_copy() -> None:
    """torch.from_dlpack sees the same memory, and keeps it."""
    torch = pytest.importorskip("torch")

    def body(rank: int) -> None:
        before = left()
        made = dist.empty_shared(1000, "float32")
        tensor = torch.from_dlpack(made)
        made[:] = range(1000)
        assert tensor.sum().item() == 499500
        assert dist.is_shared(tensor)
        del made
        assert left() < before
        tensor += 1
        assert tensor.sum().item() == 500500
        del tensor
        gc.collect()
        assert left() == before

    run_threads(body, 2, "tcp")


def test_views_keep_it_alive() -> None:
    """The memory goes back with the last view, not with the array."""

    def body(rank: int) -> None:
        before = left()
        made = dist.empty_shared((100, 100))
        made[:] = 3
        column = made[:, 7]
        del made
        assert left() == before - 81920
        assert (column == 3).all()
        del column
        assert left() == before

    run_threads(body, 2, "tcp")


def test_who_is_shared() -> None:
    """Contiguous views are, at any offset; strided ones and private arrays are not."""

    def body(rank: int) -> list[bool]:
        made = dist.empty_shared(100, "uint8")
        return [dist.is_shared(x) for x in (made, made[3:50], made[::2], np.ones(3), made.copy())]

    assert run_threads(body, 2, "tcp") == [[True, True, False, False, False]] * 2


def test_groups_say_what_they_share(monkeypatch: pytest.MonkeyPatch) -> None:
    """An array is shared for a group on one host, and private for one with a rank elsewhere."""
    monkeypatch.setattr(
        shm_setup,
        "memory_domain",
        lambda: b"elsewhere" if current_thread().name == "rank 2" else b"here",
    )

    def body(rank: int) -> dict[tuple[int, ...], bool]:
        made = dist.empty_shared(100)
        pairs = [pair for pair in ([0, 1], [0, 2], [1, 2]) if rank in pair]
        groups = [None, *(dist.new_group(p, use_local_synchronization=True) for p in pairs)]
        return {
            tuple(dist.get_process_group_ranks(group)): dist.is_shared(made, group)
            for group in groups
        }

    assert run_threads(body, 3, "tcp") == [
        {(0, 1, 2): False, (0, 1): True, (0, 2): False},
        {(0, 1, 2): False, (0, 1): True, (1, 2): False},
        {(0, 1, 2): False, (0, 2): False, (1, 2): False},
    ]


def test_without_shared_memory(backend: str) -> None:
    """Every backend makes arrays that its collectives take."""

    def body(rank: int) -> tuple[bool, float]:
        made = dist.empty_shared((3, 4), "float32")
        made[:] = rank + 1
        dist.all_reduce(made)
        return dist.is_shared(made), float(made.sum())

    shared = backend == "shm"
    assert run_threads(body, 2, backend) == [(shared, 36.0)] * 2


def test_few_addresses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the parts for arrays cannot be mapped, groups keep their windows."""
    create = shm_setup.SharedMemory.create

    class Few:
        @staticmethod
        def create(ranks: int, nbytes: int, token: bytes, part: int = 0) -> object:
            if part:
                raise OSError(12, "cannot map")
            return create(ranks, nbytes, token, part)

        attach = shm_setup.SharedMemory.attach

    monkeypatch.setattr(shm_setup, "SharedMemory", Few)

    def body(rank: int) -> tuple[bool, bool]:
        made = dist.empty_shared(3)
        return bool(dist.group.WORLD.windows), dist.is_shared(made)

    assert run_threads(body, 2, "tcp") == [(True, False)] * 2


def test_memory_that_is_spent() -> None:
    """More than the host has is a MemoryError, and the group stays usable."""

    def body(rank: int) -> float:
        for count in (1 << 60, sys.maxsize, 1 << 64):
            with pytest.raises(MemoryError):
                dist.empty_shared(count, "uint8")
        made = dist.empty_shared(3)
        made[:] = 1
        dist.all_reduce(made)
        return float(made[0])

    assert run_threads(body, 2, "tcp") == [2.0] * 2


def test_memory_that_is_spent_on_a_tensor() -> None:
    """More bytes than there are addresses are a MemoryError for torch's dtypes, too."""
    torch = pytest.importorskip("torch")

    def body(rank: int) -> None:
        with pytest.raises(MemoryError):
            dist.empty_shared(1 << 62, torch.float64)

    run_threads(body, 2, "tcp")


WRONG = {
    "negative": ((-1,), float, ValueError, "negative dimension"),
    "text": ("ab", float, TypeError, "empty_shared: shape"),
    "fraction": (2.5, float, TypeError, "empty_shared: shape"),
    "none": (None, float, TypeError, "empty_shared: shape"),
    "objects": (3, object, TypeError, "cannot lie in shared memory"),
    "nothing": (3, "S0", TypeError, "cannot lie in shared memory"),
    "no dtype": (3, "float33", TypeError, "float33"),
}


@pytest.mark.parametrize(("shape", "dtype", "error", "words"), WRONG.values(), ids=WRONG)
def test_wrong_arguments(shape: object, dtype: object, error: type, words: str) -> None:
    """They are found at once, and say what is wrong."""

    def body(rank: int) -> None:
        with pytest.raises(error, match=words):
            dist.empty_shared(shape, dtype)

    run_threads(body, 1, "inproc")


def test_a_group_of_others() -> None:
    """A rank that is not in the group gets a ValueError, not an array of some other group."""

    def body(rank: int) -> None:
        group = dist.new_group([0])
        if rank == 1:
            with pytest.raises(ValueError, match="not in the group"):
                dist.empty_shared(3, group=group)
            with pytest.raises(ValueError, match="not in the group"):
                dist.is_shared(np.ones(3), group)

    run_threads(body, 2, "tcp")


def test_it_outlives_its_group() -> None:
    """After destroy_process_group the array is as it was; a new group takes it as a private one."""

    def body(rank: int) -> np.ndarray:
        made = dist.empty_shared(1000)
        made[:] = rank + 1
        dist.all_reduce(made)
        dist.destroy_process_group()
        made += 1
        return made

    arrays = run_threads(body, 2, "tcp")
    assert [array.tolist() for array in arrays] == [[4.0] * 1000] * 2

    def again(rank: int) -> bool:
        dist.all_reduce(arrays[rank])
        return dist.is_shared(arrays[rank])

    assert run_threads(again, 2, "tcp") == [False, False]
    assert [array.tolist() for array in arrays] == [[8.0] * 1000] * 2


FORKS = """
import os
import numpy as np
import cydist as dist

rank = int(os.environ["RANK"])
dist.init_process_group("tcp", timeout=60)
x = dist.empty_shared(5000)
x[:] = rank
child = os.fork()
if child == 0:
    try:
        dist.empty_shared(3)
    except dist.ForkedError:
        del x
        os._exit(0)
    os._exit(1)
assert os.waitpid(child, 0)[1] == 0
if rank == 1:
    os._exit(0)             # killed with its arrays held
try:
    while True:
        dist.all_reduce(x)
except dist.PeerFailedError:
    y = dist.empty_shared(5000)
    y[:] = 1
    print(y.sum(), x.shape, flush=True)
"""


def test_forks_and_deaths() -> None:
    """A child makes no arrays and takes none away; a dead rank's arrays harm nobody else's."""
    environment = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    environment |= {"WORLD_SIZE": "2", "CYDIST_TRANSPORT": "shm"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", FORKS], env={**environment, "RANK": f"{rank}"},
            stdout=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    try:
        printed = [rank.communicate(timeout=DEADLINE * 2)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert printed == ["5000.0 (5000,)\n", ""]
