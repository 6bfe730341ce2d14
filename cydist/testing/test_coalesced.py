"""Many arrays in one call."""

from typing import Any

import numpy as np
import pytest

import cydist as dist
from cydist.testing.contract import Job, Jobs

SHAPES = [(3,), (), (2, 2), (0,), (5, 1)]


def arrays(rank: int, dtype: str = "f4") -> Any:
    """Arrays of several shapes, different on each rank; the third is strided."""
    made = [np.full(shape, rank + 1 + i, dtype) for i, shape in enumerate(SHAPES)]
    made[2] = np.asfortranarray(np.arange(4, dtype=dtype).reshape(2, 2) + rank)
    return made


def test_all_reduce_coalesced_equals_one_call_for_each(job: Job, size: int) -> None:
    """Every array is reduced in place, strided and empty ones too."""

    def body(rank: int) -> Any:
        together, apart = arrays(rank), arrays(rank)
        dist.all_reduce_coalesced(together)
        for array in apart:
            dist.all_reduce(array)
        return together, apart

    for together, apart in job.run(body):
        for one, other in zip(together, apart, strict=True):
            np.testing.assert_array_equal(other, one, strict=True)


def test_all_gather_coalesced(job: Job, size: int) -> None:
    """Entry [r][i] is rank r's array i."""

    def body(rank: int) -> Any:
        outputs = [[np.zeros_like(array) for array in arrays(0)] for _ in range(size)]
        dist.all_gather_coalesced(outputs, arrays(rank))
        return outputs

    for outputs in job.run(body):
        for rank in range(size):
            for expected, actual in zip(arrays(rank), outputs[rank], strict=True):
                np.testing.assert_array_equal(expected, actual, strict=True)


def test_all_gather_into_tensor_coalesced(job: Job, size: int) -> None:
    """Output i is the concatenation of all ranks' inputs i."""

    def body(rank: int) -> Any:
        inputs = [np.full(3, rank, "i4"), np.full((2, 2), rank + 10, "i4")]
        outputs = [np.zeros(3 * size, "i4"), np.zeros((2 * size, 2), "i4")]
        dist.all_gather_into_tensor_coalesced(outputs, inputs)
        return outputs

    for first, second in job.run(body):
        np.testing.assert_array_equal(np.repeat(np.arange(size), 3), first)
        np.testing.assert_array_equal(np.repeat(np.arange(size) + 10, 4), second.ravel())


def test_reduce_scatter_tensor_coalesced(job: Job, size: int) -> None:
    """Output i is this rank's part of the reduction of input i."""

    def body(rank: int) -> Any:
        inputs = [np.arange(2 * size, dtype="f8") + rank, np.full((size, 3), rank + 1.0)]
        outputs = [np.zeros(2), np.zeros((1, 3))]
        dist.reduce_scatter_tensor_coalesced(outputs, inputs)
        return outputs

    ranks = size * (size - 1) / 2
    for rank, (first, second) in enumerate(job.run(body)):
        np.testing.assert_array_equal(size * np.arange(2 * rank, 2 * rank + 2) + ranks, first)
        np.testing.assert_array_equal(np.full((1, 3), ranks + size), second)


def test_mixed_dtypes_are_refused(jobs: Jobs, backend: str) -> None:
    """All arrays of a call have one dtype; nothing is sent otherwise."""

    def body(rank: int) -> Any:
        with pytest.raises(TypeError, match="one dtype"):
            dist.all_reduce_coalesced([np.zeros(2, "f4"), np.zeros(2, "f8")])
        dist.barrier()

    jobs.get(backend, 2).run(body)


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ([[4, 2], [2, 4]], r"output_tensor_lists\[RANK\]\[0\] has . elements .* input_tensor_list"),
        ([[2, 4, 1], [2, 4, 1]], r"output_tensor_lists\[0\] has 3 entries, expected 2"),
    ],
    ids=["sizes", "entries"],
)
def test_outputs_that_do_not_fit_are_refused(
    jobs: Jobs, backend: str, sizes: list[list[int]], words: str
) -> None:
    """all_gather_coalesced: each output is compared with its own input, not all with all."""

    def body(rank: int) -> None:
        inputs = [np.full(size, rank + 1.0) for size in ([2, 4] if rank == 0 else [4, 2])]
        outputs = [[np.zeros(size) for size in row] for row in sizes]
        with pytest.raises(ValueError, match=words.replace("RANK", str(rank))):
            dist.all_gather_coalesced(outputs, inputs)
        dist.barrier()

    jobs.get(backend, 2).run(body)


def test_all_gather_coalesced_in_place(job: Job, size: int) -> None:
    """This rank's own outputs may be its inputs."""

    def body(rank: int) -> Any:
        outputs = [[np.zeros(3), np.zeros((2, 2))] for _ in range(size)]
        for array in outputs[rank]:
            array[...] = rank + 1
        dist.all_gather_coalesced(outputs, outputs[rank])
        return outputs

    for outputs in job.run(body):
        for rank, (first, second) in enumerate(outputs):
            np.testing.assert_array_equal(np.full(3, rank + 1.0), first)
            np.testing.assert_array_equal(np.full((2, 2), rank + 1.0), second)


def test_all_gather_into_tensor_coalesced_in_place(job: Job, size: int) -> None:
    """This rank's own parts of the outputs may be its inputs."""

    def body(rank: int) -> Any:
        outputs = [np.zeros((size, 3)), np.zeros((size, 2, 2))]
        inputs = [output[rank] for output in outputs]
        for array in inputs:
            array[...] = rank + 1
        dist.all_gather_into_tensor_coalesced(outputs, inputs)
        return outputs

    ranks = np.arange(1.0, size + 1)
    for first, second in job.run(body):
        np.testing.assert_array_equal(np.repeat(ranks, 3), first.ravel())
        np.testing.assert_array_equal(np.repeat(ranks, 4), second.ravel())


def test_another_ranks_part_is_no_input(jobs: Jobs, backend: str) -> None:
    """all_gather_into_tensor_coalesced: it would be written while it is read. Nothing is sent."""

    def body(rank: int) -> None:
        output = np.zeros((2, 3))
        with pytest.raises(ValueError, match="the output and the input share memory"):
            dist.all_gather_into_tensor_coalesced([output], [output[1 - rank]])
        dist.barrier()

    jobs.get(backend, 2).run(body)


@pytest.mark.parametrize("count", [1, 2])
def test_an_output_for_another_rank_is_no_input(jobs: Jobs, backend: str, count: int) -> None:
    """all_gather_coalesced: it would be written while it is read. Nothing is sent."""

    def body(rank: int) -> None:
        outputs = [[np.zeros(3) for _ in range(count)] for _ in range(2)]
        with pytest.raises(ValueError, match=r"all_gather_coalesced: the output.*share memory"):
            dist.all_gather_coalesced(outputs, outputs[1 - rank])
        dist.barrier()

    jobs.get(backend, 2).run(body)
