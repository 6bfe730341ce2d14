"""Arrays of every library and layout through every call: what goes in comes out, bit for bit."""

from __future__ import annotations

import array
import contextlib
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import cydist as dist
from cydist.testing import oracle

SIZE = 3
N = 12  # elements of one rank's block
Maker = Callable[[np.ndarray], Any]


def torch_tensor(values: np.ndarray) -> Any:
    """A new tensor of the same bits."""
    torch = pytest.importorskip("torch")
    plain = values.view(np.uint8 if values.dtype == bool else f"i{values.itemsize}")
    return torch.from_numpy(plain.copy()).view(getattr(torch, values.dtype.name))


def torch_transposed(values: np.ndarray) -> Any:
    return torch_tensor(np.ascontiguousarray(values.reshape(-1, 3).T)).T


def torch_every_second(values: np.ndarray) -> Any:
    return torch_tensor(np.repeat(values, 2))[::2]


def torch_leaf(values: np.ndarray) -> Any:
    return torch_tensor(values).requires_grad_()


def torch_parameter(values: np.ndarray) -> Any:
    torch = pytest.importorskip("torch")
    return torch.nn.Parameter(torch_tensor(values))


def strided_memoryview(values: np.ndarray) -> memoryview:
    return memoryview(np.repeat(values, 2).copy())[::2]


class Dlpack:
    """An array of a library that speaks DLPack only."""

    def __init__(self, values: np.ndarray) -> None:
        self.values = values.reshape(-1, 3).copy(order="F")

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.values.__dlpack_device__()

    def __dlpack__(self, *, stream: Any = None, max_version: Any = None) -> Any:
        return self.values.__dlpack__(max_version=max_version)


def from_buffer(make: Callable[[bytes], Any]) -> Maker:
    return lambda values: make(values.tobytes())


F4, BF16 = np.dtype("f4"), np.dtype(ml_dtypes.bfloat16)
KINDS: dict[str, tuple[Maker, np.dtype]] = {
    "numpy column": (lambda values: np.repeat(values, 3).reshape(-1, 3)[:, 1], F4),
    "torch": (torch_tensor, F4),
    "torch transposed": (torch_transposed, F4),
    "torch every second": (torch_every_second, F4),
    "torch leaf": (torch_leaf, F4),
    "torch parameter": (torch_parameter, F4),
    "torch bfloat16": (torch_tensor, BF16),
    "torch bfloat16 transposed": (torch_transposed, BF16),
    "torch float8": (torch_tensor, np.dtype(ml_dtypes.float8_e4m3fn)),
    "torch bool": (torch_tensor, np.dtype(bool)),
    "torch complex64": (torch_every_second, np.dtype("c8")),
    "ml_dtypes bfloat16": (np.copy, BF16),
    "ml_dtypes float8 reversed": (lambda x: x[::-1].copy()[::-1], np.dtype(ml_dtypes.float8_e5m2)),
    "bytearray": (from_buffer(bytearray), np.dtype("u1")),
    "memoryview": (from_buffer(lambda data: memoryview(bytearray(data))), np.dtype("u1")),
    "memoryview strided": (strided_memoryview, np.dtype("f8")),
    "array.array": (from_buffer(lambda data: array.array("d", data)), np.dtype("f8")),
    "dlpack": (Dlpack, np.dtype("i4")),
}


def content(obj: Any) -> np.ndarray:
    """What an object of any kind holds, as bytes in C order."""
    if isinstance(obj, Dlpack):
        obj = obj.values
    if hasattr(obj, "detach"):
        torch = pytest.importorskip("torch")
        obj = obj.detach().contiguous().view(torch.uint8).numpy()
    return np.frombuffer(np.ascontiguousarray(obj).tobytes(), np.uint8)


class Rank:
    """One rank that makes a call with arrays of one kind."""

    def __init__(self, rank: int, make: Maker, dtype: np.dtype) -> None:
        self.rank, self.make, self.dtype = rank, make, dtype

    def given(self, rank: int, blocks: int = 1) -> np.ndarray:
        """What a rank contributes."""
        return oracle.contribution(rank, blocks * N, self.dtype)

    def mine(self, blocks: int = 1) -> Any:
        return self.make(self.given(self.rank, blocks))

    def empty(self, blocks: int = 1) -> Any:
        return self.make(np.zeros(blocks * N, self.dtype))

    def everyone(self, blocks: int = 1) -> list[np.ndarray]:
        return [self.given(rank, blocks) for rank in range(SIZE)]

    def total(self, blocks: int = 1) -> np.ndarray:
        return oracle.reduced("SUM", self.everyone(blocks))


Gives = list[tuple[np.ndarray, Any]]


def broadcast(r: Rank) -> Gives:
    x = r.mine()
    dist.broadcast(x, 1)
    return [(r.given(1), x)]


def all_reduce(r: Rank) -> Gives:
    x = r.mine()
    dist.all_reduce(x)
    return [(r.total(), x)]


def all_reduce_async(r: Rank) -> Gives:
    x, y = r.mine(), r.mine()
    works = [dist.all_reduce(x, async_op=True), dist.broadcast(y, 2, async_op=True)]
    for work in works:
        work.wait()
    return [(r.total(), x), (r.given(2), y)]


def reduce(r: Rank) -> Gives:
    x = r.mine()
    dist.reduce(x, 2)
    return [(r.total() if r.rank == 2 else r.given(r.rank), x)]


def scan(r: Rank) -> Gives:
    x = r.mine()
    dist.scan(x)
    return [(oracle.reduced("SUM", r.everyone()[: r.rank + 1]), x)]


def all_gather(r: Rank) -> Gives:
    outputs = [r.empty() for _ in range(SIZE)]
    dist.all_gather(outputs, r.mine())
    return list(zip(r.everyone(), outputs, strict=True))


def all_gather_into_tensor(r: Rank) -> Gives:
    output = r.empty(SIZE)
    dist.all_gather_into_tensor(output, r.mine())
    return [(np.concatenate(r.everyone()), output)]


def gather(r: Rank) -> Gives:
    outputs = [r.empty() for _ in range(SIZE)] if r.rank == 1 else None
    dist.gather(r.mine(), outputs, 1)
    return list(zip(r.everyone(), outputs, strict=True)) if outputs else []


def scatter(r: Rank) -> Gives:
    output = r.empty()
    dist.scatter(output, [r.make(each) for each in r.everyone()] if r.rank == 1 else None, 1)
    return [(r.given(r.rank), output)]


def reduce_scatter(r: Rank) -> Gives:
    output = r.empty()
    dist.reduce_scatter(output, [r.make(r.given(r.rank + entry)) for entry in range(SIZE)])
    return [(oracle.reduced("SUM", [r.given(rank + r.rank) for rank in range(SIZE)]), output)]


def reduce_scatter_tensor(r: Rank) -> Gives:
    output = r.empty()
    dist.reduce_scatter_tensor(output, r.mine(SIZE))
    return [(r.total(SIZE)[r.rank * N : (r.rank + 1) * N], output)]


def all_to_all(r: Rank) -> Gives:
    outputs = [r.empty() for _ in range(SIZE)]
    dist.all_to_all(outputs, [r.make(r.given(r.rank + 2 * to)) for to in range(SIZE)])
    return [(r.given(frm + 2 * r.rank), output) for frm, output in enumerate(outputs)]


def all_to_all_single(r: Rank) -> Gives:
    output = r.empty(SIZE)
    dist.all_to_all_single(output, r.mine(SIZE))
    part = slice(r.rank * N, (r.rank + 1) * N)
    return [(np.concatenate([each[part] for each in r.everyone(SIZE)]), output)]


def coalesced(r: Rank) -> Gives:
    x, y = r.mine(), r.mine(2)
    dist.all_reduce_coalesced([x, y])
    return [(r.total(), x), (r.total(2), y)]


def all_gather_coalesced(r: Rank) -> Gives:
    outputs = [[r.empty(), r.empty(2)] for _ in range(SIZE)]
    dist.all_gather_coalesced(outputs, [r.mine(), r.mine(2)])
    return [
        pair
        for rank, (one, two) in enumerate(outputs)
        for pair in ((r.given(rank), one), (r.given(rank, 2), two))
    ]


def messages(r: Rank) -> Gives:
    output, right, left = r.empty(), (r.rank + 1) % SIZE, (r.rank - 1) % SIZE
    receiving = dist.irecv(output, left)
    sending = dist.isend(r.mine(), right)
    receiving.wait()
    sending.wait()
    return [(r.given(left), output)]


CALLS = (
    broadcast, all_reduce, all_reduce_async, reduce, scan, all_gather, all_gather_into_tensor,
    gather, scatter, reduce_scatter, reduce_scatter_tensor, all_to_all, all_to_all_single,
    coalesced, all_gather_coalesced, messages,
)  # fmt: skip


@pytest.mark.parametrize(("make", "dtype"), KINDS.values(), ids=KINDS)
def test_every_call_takes_every_array(jobs, backend, make, dtype):
    """The bits are the oracle's whatever the library, the layout and the dtype."""
    make(np.zeros(N, dtype))  # skips here, not in the ranks, where torch is missing

    def body(rank):
        with no_grad():
            return [
                (call.__name__, want, content(obj))
                for call in CALLS
                for want, obj in call(Rank(rank, make, dtype))
            ]

    for gives in jobs.get(backend, SIZE).run(body):
        for call, expected, actual in gives:
            assert oracle.same_bits(content(expected), actual), call


def no_grad() -> contextlib.AbstractContextManager[Any]:
    """As torch's users update leaves; nothing without torch."""
    try:
        import torch
    except ImportError:
        return contextlib.nullcontext()
    return torch.no_grad()


def test_one_call_may_mix_libraries(jobs, backend):
    """Outputs of different libraries, as long as they have one dtype."""
    torch = pytest.importorskip("torch")

    def body(rank):
        outputs = [array.array("f", bytes(16)), np.zeros((2, 4), "f4")[:, ::2], torch.zeros(4)]
        dist.all_gather(outputs, memoryview(np.full(4, rank + 1, "f4")))
        return [content(obj).view("f4").tolist() for obj in outputs]

    expected = [[rank + 1.0] * 4 for rank in range(SIZE)]
    assert [expected] * SIZE == jobs.get(backend, SIZE).run(body)
