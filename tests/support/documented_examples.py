"""What the examples of torch.distributed's documents do, on numpy arrays and on torch's tensors.

Each has the documented number of ranks, and gives what the documents print. The first documents'
examples are in tests/api/test_deprecated_names.py, those of stores in tests/stores, those of starts
in tests/rendezvous, and those of launchers in tests/launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cydist as dist

Example = Callable[["Arrays", int], Any]


class Arrays:
    """numpy's functions or torch's, under one name each."""

    def __init__(self, kind: str) -> None:
        self.torch = pytest.importorskip("torch") if kind == "torch" else None

    def new(self, values: Any, dtype: str = "int64") -> Any:
        if self.torch is None:
            return np.array(values, dtype)
        return self.torch.tensor(values, dtype=getattr(self.torch, dtype))

    def arange(self, count: int) -> Any:
        return self.new(list(range(count)))

    def zeros(self, *shape: int, dtype: str = "int64") -> Any:
        return self.new(np.zeros(shape).tolist(), dtype)

    def split(self, x: Any, sizes: list[int]) -> list[Any]:
        if self.torch is None:
            return list(np.split(x, np.cumsum(sizes)[:-1]))
        return list(x.split(sizes))

    def device(self) -> Any:
        return "cpu" if self.torch is None else self.torch.device("cpu")


def listed(found: Any) -> Any:
    """Arrays as lists, in lists and tuples too."""
    if isinstance(found, list | tuple):
        return [listed(each) for each in found]
    return found.tolist() if hasattr(found, "tolist") else found


def sum_of(dtype: str, *values: complex) -> Example:
    """all_reduce of two numbers of each rank."""

    def example(arrays: Arrays, rank: int) -> Any:
        x = arrays.new(values, dtype)
        x += 2 * rank * values[0]
        dist.all_reduce(x, op=dist.ReduceOp.SUM)
        return x

    return example


def gathered(dtype: str, *values: complex) -> Example:
    """all_gather of two numbers of each rank."""

    def example(arrays: Arrays, rank: int) -> Any:
        parts = [arrays.zeros(2, dtype=dtype) for _ in range(2)]
        x = arrays.new(values, dtype)
        x += 2 * rank * values[0]
        dist.all_gather(parts, x)
        return parts

    return example


def concatenated_and_stacked(arrays: Arrays, rank: int) -> Any:
    x = arrays.arange(2) + 1 + 2 * rank
    both = arrays.zeros(4), arrays.zeros(2, 2)
    for each in both:
        dist.all_gather_into_tensor(each, x)
    return both


def reduced_parts(arrays: Arrays, rank: int) -> Any:
    both = arrays.zeros(2), arrays.zeros(2)
    dist.reduce_scatter_tensor(both[0], arrays.arange(4))
    dist.reduce_scatter_tensor(both[1], arrays.arange(4).reshape((2, 2)))
    return both


def scattered(arrays: Arrays, rank: int) -> Any:
    x = arrays.zeros(2, dtype="float32")
    lists = [arrays.new([1, 1], "float32"), arrays.new([5, 5], "float32")]
    dist.scatter(x, lists if rank == 0 else None, src=0)
    return x


def ring(arrays: Arrays, rank: int) -> Any:
    x, y = arrays.new([2 * rank, 2 * rank + 1], "float32"), arrays.zeros(2, dtype="float32")
    send = dist.P2POp(dist.isend, x, (rank + 1) % 2)
    receive = dist.P2POp(dist.irecv, y, (rank - 1 + 2) % 2)
    for work in dist.batch_isend_irecv([send, receive]):
        work.wait()
    return y


OBJECTS = ["foo", 12, {1: 2}]


def broadcast_objects(arrays: Arrays, rank: int) -> Any:
    objects = list(OBJECTS) if rank == 0 else [None] * 3
    dist.broadcast_object_list(objects, src=0, device=arrays.device())
    return objects


def gathered_objects(arrays: Arrays, rank: int) -> Any:
    found: tuple[list[Any], list[Any]] = [None] * 3, [None] * 3
    dist.all_gather_object(found[0], OBJECTS[rank])
    dist.gather_object(OBJECTS[rank], found[1] if rank == 0 else None, dst=0)
    return found


def scattered_objects(arrays: Arrays, rank: int) -> Any:
    found: list[Any] = [None]
    dist.scatter_object_list(found, OBJECTS if rank == 0 else [None] * 3, src=0)
    return found


def exchanged(arrays: Arrays, rank: int) -> Any:
    """By one array, by lists, and by a scatter of each rank, whose others give an empty list."""
    x, single = arrays.arange(4) + 4 * rank, arrays.zeros(4)
    dist.all_to_all_single(single, x)
    parts = [arrays.zeros(1) for _ in range(4)]
    dist.all_to_all(parts, arrays.split(x, [1] * 4))
    pieces = arrays.split(arrays.zeros(4), [1] * 4)
    for root in range(4):
        dist.scatter(pieces[root], arrays.split(x, [1] * 4) if root == rank else [], src=root)
    return single, parts, pieces


def exchanged_complex(arrays: Arrays, rank: int) -> Any:
    x = arrays.new([(1 + 1j) * (4 * rank + i + 1) for i in range(4)], "complex64")
    single = arrays.zeros(4, dtype="complex64")
    dist.all_to_all_single(single, x)
    parts = [arrays.zeros(1, dtype="complex64") for _ in range(4)]
    dist.all_to_all(parts, arrays.split(x, [1] * 4))
    return single, parts


SIZES = [6, 9, 5, 7]
SENT = [[2, 2, 1, 1], [3, 2, 2, 2], [2, 1, 1, 1], [2, 2, 2, 1]]
UNEVEN = [
    [[0, 1], [10, 11, 12], [20, 21], [30, 31]],
    [[2, 3], [13, 14], [22], [32, 33]],
    [[4], [15, 16], [23], [34, 35]],
    [[5], [17, 18], [24], [36]],
]


def exchanged_unevenly(arrays: Arrays, rank: int) -> Any:
    received = [sizes[rank] for sizes in SENT]
    x, single = arrays.arange(SIZES[rank]) + 10 * rank, arrays.zeros(sum(received))
    dist.all_to_all_single(single, x, received, SENT[rank])
    parts = [arrays.zeros(size) for size in received]
    dist.all_to_all(parts, arrays.split(x, SENT[rank]))
    return single, parts


def of_mesh(arrays: Arrays, rank: int) -> Any:
    """Two hosts with four devices each: sums over columns, and over rows."""
    mesh = dist.DeviceMesh(device_type="cpu", mesh=[[0, 1, 2, 3], [4, 5, 6, 7]])
    found = []
    for dim in range(2):
        x = arrays.new([rank])
        dist.all_reduce(x, group=mesh.get_group(dim))
        found.append(x)
    return found


def of_meshes(arrays: Arrays, rank: int) -> Any:
    flat = dist.init_device_mesh("cpu", mesh_shape=(4,))
    both = dist.init_device_mesh("cpu", mesh_shape=(2, 2), mesh_dim_names=("dp", "tp"))
    x = arrays.new([rank])
    dist.all_reduce(x, group=both["tp"].get_group())
    return flat.size(), both["dp"].get_local_rank(), both["tp"].get_local_rank(), x


COLUMNS = [[rank + 4 * i for i in range(4)] for rank in range(4)]
COMPLEX = [[(1 + 1j) * (each + 1) for each in column] for column in COLUMNS]

# An example, and what each rank has afterwards.
EXAMPLES: dict[str, tuple[Example, list[Any]]] = {
    "all_reduce": (sum_of("int64", 1, 2), [[4, 6]] * 2),
    "all_reduce of complex": (sum_of("complex64", 1 + 1j, 2 + 2j), [[4 + 4j, 6 + 6j]] * 2),
    "all_gather": (gathered("int64", 1, 2), [[[1, 2], [3, 4]]] * 2),
    "all_gather of complex": (
        gathered("complex64", 1 + 1j, 2 + 2j), [[[1 + 1j, 2 + 2j], [3 + 3j, 4 + 4j]]] * 2,
    ),
    "all_gather_into_tensor": (concatenated_and_stacked, [[[1, 2, 3, 4], [[1, 2], [3, 4]]]] * 2),
    "reduce_scatter_tensor": (reduced_parts, [[[0, 2]] * 2, [[4, 6]] * 2]),
    "scatter": (scattered, [[1.0, 1.0], [5.0, 5.0]]),
    "batch_isend_irecv": (ring, [[2.0, 3.0], [0.0, 1.0]]),
    "broadcast_object_list": (broadcast_objects, [OBJECTS] * 3),
    "all_gather_object and gather_object": (
        gathered_objects, [[OBJECTS, OBJECTS if rank == 0 else [None] * 3] for rank in range(3)],
    ),
    "scatter_object_list": (scattered_objects, [[each] for each in OBJECTS]),
    "all_to_all": (exchanged, [[c, [[x] for x in c], [[x] for x in c]] for c in COLUMNS]),
    "all_to_all of complex": (exchanged_complex, [[c, [[x] for x in c]] for c in COMPLEX]),
    "all_to_all of uneven parts": (
        exchanged_unevenly, [[[x for part in parts for x in part], parts] for parts in UNEVEN],
    ),
    "DeviceMesh": (of_mesh, [[[2 * (r % 4) + 4], [6 if r < 4 else 22]] for r in range(8)]),
    "init_device_mesh": (of_meshes, [[4, r // 2, r % 2, [1 if r < 2 else 5]] for r in range(4)]),
}  # fmt: skip
