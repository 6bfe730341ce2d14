"""Calls whose output is a part of their input, or the reverse, compared bit for bit with the same
calls on separate memory."""

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest

import cydist as dist
from cydist.testing import oracle
from cydist.testing.contract import Job, Jobs

Array = np.ndarray[Any, Any]

DTYPES = ("int64", "complex64", "bfloat16", "float32")
LAYOUTS: dict[str, Callable[[int, Any], Array]] = {
    "contiguous": lambda rows, dtype: np.zeros((rows, 2), dtype),
    "one dimension": lambda rows, dtype: np.zeros(rows, dtype),
    "every second": lambda rows, dtype: np.zeros(2 * rows, dtype)[::2],
    "reversed": lambda rows, dtype: np.zeros(rows, dtype)[::-1],
    "rows with gaps": lambda rows, dtype: np.zeros((rows, 5), dtype)[:, 1:3],
}
# The dtype, the layout, and the rows of each rank's block: a few, or several segments.
CASES = (
    *((dtype, "contiguous", 5) for dtype in DTYPES),
    *(("float32", layout, rows) for layout in LAYOUTS for rows in (1, 6)),
    *(("float32", layout, 30_000) for layout in ("contiguous", "rows with gaps")),
)
LAST = -1  # the number of a block that is a rank's own on one rank only


class Call:
    """One call on a rank's array of p blocks: in place or on memory of its own.

    Attributes:
        own: The number of this rank's block.
        apart: Whether what is written shares no memory with what is read.
    """

    def __init__(self, rank: int, size: int, apart: bool, async_op: bool) -> None:
        self.own = rank
        self.size = size
        self.apart = apart
        self.async_op = async_op

    def blocks(self, array: Array) -> list[Array]:
        return np.split(array, self.size)

    def run(self, call: Callable[..., Any], *args: Any, **named: Any) -> None:
        work = call(*args, async_op=self.async_op, **named)
        if work is not None:
            work.wait()

    def memory(self, array: Array) -> Array:
        """Return what to write: the array itself, or a new one."""
        return np.zeros_like(array) if self.apart else array

    def copied(self, array: Array) -> Array:
        """Return what to read, if it lies in what is written: the array itself, or a copy."""
        return array.copy() if self.apart else array


# Each form changes `x`, this rank's array, as the call in place does.
Form = Callable[[Call, Array], None]


def reduce_scatter_tensor(call: Call, x: Array, block: int | None = None, **named: Any) -> None:
    into = call.blocks(x)[call.own if block is None else block]
    output = call.memory(into)
    call.run(dist.reduce_scatter_tensor, output, x, **named)
    into[...] = output


def reduce_scatter_of_stacked(call: Call, x: Array) -> None:
    stacked = np.stack(call.blocks(x))
    output = call.memory(stacked[call.own])
    call.run(dist.reduce_scatter_tensor, output, stacked)
    call.blocks(x)[call.own][...] = output


def reduce_scatter(call: Call, x: Array, block: int | None = None, **named: Any) -> None:
    blocks = call.blocks(x)
    into = blocks[call.own if block is None else block]
    output = call.memory(into)
    call.run(dist.reduce_scatter, output, blocks, **named)
    into[...] = output


def reduce_scatter_coalesced(
    call: Call, x: Array, count: int = 3, block: int | None = None
) -> None:
    inputs = [x, *(x * x.dtype.type(i) for i in range(2, count + 1))]
    into = call.own if block is None else block
    parts = [call.blocks(array)[into] for array in inputs]
    outputs = [call.memory(part) for part in parts]
    call.run(dist.reduce_scatter_tensor_coalesced, outputs, inputs)
    whole, own = sum(inputs[1:], inputs[0]), sum(outputs[1:], outputs[0])
    x[...] = whole
    call.blocks(x)[into][...] = own


def all_to_all_single(call: Call, x: Array) -> None:
    output = call.memory(x)
    call.run(dist.all_to_all_single, output, x)
    x[...] = output


def all_to_all_single_uneven(call: Call, x: Array) -> None:
    """Ranks pair up as (0, 1), (2, 3): a pair exchanges more rows than others, and a rank keeps
    fewer."""
    p, me = call.size, call.own
    each = len(x) // p
    sizes = [each] * p
    if me ^ 1 < p:
        sizes[me], sizes[me ^ 1] = each - 1, each + 1
    output = call.memory(x)
    call.run(dist.all_to_all_single, output, x, sizes, sizes)
    x[...] = output


def all_to_all(call: Call, x: Array) -> None:
    blocks = call.blocks(x)
    outputs = [call.memory(block) for block in blocks]
    call.run(dist.all_to_all, outputs, blocks)
    for block, output in zip(blocks, outputs, strict=True):
        block[...] = output


def all_to_all_in_other_order(call: Call, x: Array) -> None:
    """The outputs are the inputs, but not each the one that is sent to the same rank."""
    blocks = call.blocks(x)
    turned = blocks[1:] + blocks[:1]
    outputs = [call.memory(block) for block in turned]
    call.run(dist.all_to_all, outputs, blocks)
    for block, output in zip(turned, outputs, strict=True):
        block[...] = output


def all_gather_into_tensor(call: Call, x: Array) -> None:
    call.run(dist.all_gather_into_tensor, x, call.copied(call.blocks(x)[call.own]))


def all_gather_into_tensor_coalesced(call: Call, x: Array) -> None:
    outputs = [x, x * x.dtype.type(2)]
    inputs = [call.copied(call.blocks(array)[call.own]) for array in outputs]
    call.run(dist.all_gather_into_tensor_coalesced, outputs, inputs)
    x += outputs[1]


def all_gather(call: Call, x: Array) -> None:
    blocks = call.blocks(x)
    call.run(dist.all_gather, blocks, call.copied(blocks[call.own]))


def all_gather_coalesced(call: Call, x: Array) -> None:
    doubled = x * x.dtype.type(2)
    lists = [list(pair) for pair in zip(call.blocks(x), call.blocks(doubled), strict=True)]
    call.run(dist.all_gather_coalesced, lists, [call.copied(each) for each in lists[call.own]])
    x += doubled


def gather(call: Call, x: Array) -> None:
    blocks = call.blocks(x)
    root = call.own == call.size - 1
    call.run(
        dist.gather, call.copied(blocks[call.own]), blocks if root else None, dst=call.size - 1
    )


def scatter(call: Call, x: Array) -> None:
    blocks = call.blocks(x)
    output = call.memory(blocks[call.own])
    call.run(dist.scatter, output, blocks if call.own == 0 else None, src=0)
    blocks[call.own][...] = output


FORMS: dict[str, Form] = {
    "reduce_scatter_tensor into the own block": reduce_scatter_tensor,
    "reduce_scatter_tensor into the first block": lambda c, x: reduce_scatter_tensor(c, x, 0),
    "reduce_scatter_tensor into the last block": lambda c, x: reduce_scatter_tensor(c, x, LAST),
    "reduce_scatter_tensor of stacked blocks": reduce_scatter_of_stacked,
    "reduce_scatter into the own entry": reduce_scatter,
    "reduce_scatter into the first entry": lambda c, x: reduce_scatter(c, x, 0),
    "reduce_scatter_tensor_coalesced of one": lambda c, x: reduce_scatter_coalesced(c, x, 1),
    "reduce_scatter_tensor_coalesced": reduce_scatter_coalesced,
    "reduce_scatter_tensor_coalesced of one into the first block": (
        lambda c, x: reduce_scatter_coalesced(c, x, 1, 0)
    ),
    "all_to_all_single": all_to_all_single,
    "all_to_all_single with split sizes": all_to_all_single_uneven,
    "all_to_all": all_to_all,
    "all_to_all in another order": all_to_all_in_other_order,
    "all_gather_into_tensor": all_gather_into_tensor,
    "all_gather_into_tensor_coalesced": all_gather_into_tensor_coalesced,
    "all_gather": all_gather,
    "all_gather_coalesced": all_gather_coalesced,
    "gather": gather,
    "scatter": scatter,
}


def differences(form: Form, rank: int, size: int) -> list[str]:
    """Return the cases in which the call in place gives other bits than the one on memory of its
    own, or leaves others in what it does not write."""
    found = []
    for case in product(CASES, (False, True)):
        (dtype, layout, rows), async_op = case
        given = LAYOUTS[layout](size * rows, oracle.DTYPES[dtype])
        given[...] = oracle.contribution(rank, given.size, given.dtype).reshape(given.shape)
        for block, array in enumerate(np.split(given, size)):
            array += np.array(block, given.dtype)  # no two are equal
        results = []
        for apart in (True, False):
            x = LAYOUTS[layout](size * rows, given.dtype)
            x[...] = given
            form(Call(rank, size, apart, async_op), x)
            results.append(x)
        if not oracle.same_bits(*results):
            found.append(f"{dtype}, {layout}, {rows} rows, async_op={async_op}")
    return found


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_a_call_in_place_equals_one_on_other_memory(job: Job, size: int, form: Form) -> None:
    """Contiguous and strided arrays, short and long ones, blocking and asynchronous calls."""
    assert [[]] * size == job.run(lambda rank: differences(form, rank, size))


def test_user_defined_reductions_in_place(job: Job, size: int) -> None:
    """A function that reduces gets what the call on other memory gives it."""
    op = dist.ReduceOp.create(np.maximum)

    def body(rank: int) -> list[str]:
        def form(call: Call, x: Array) -> None:
            reduce_scatter_tensor(call, x, op=op)
            reduce_scatter(call, x, op=op)

        return differences(form, rank, size)

    assert [[]] * size == job.run(body)


def test_in_place_on_some_ranks_only(job: Job, size: int) -> None:
    """Ranks need not agree on it: odd ones write elsewhere."""

    def body(rank: int) -> tuple[Array, Array]:
        given = np.arange(size * 6, dtype="i4") + rank
        reduced = given.copy()
        output = np.zeros(6, "i4") if rank % 2 else np.split(reduced, size)[rank]
        dist.reduce_scatter_tensor(output, reduced)
        sent = given.copy()
        received = np.zeros_like(sent) if rank % 2 else sent
        dist.all_to_all_single(received, sent)
        return output, received

    given = np.array([np.arange(size * 6, dtype="i4") + rank for rank in range(size)])
    for rank, (output, received) in enumerate(job.run(body)):
        block = slice(rank * 6, rank * 6 + 6)
        np.testing.assert_array_equal(given.sum(0)[block], output)
        np.testing.assert_array_equal(np.concatenate([x[block] for x in given]), received)


REFUSED: dict[str, tuple[Callable[[Array], Any], str]] = {
    "reduce_scatter_tensor": (
        lambda x: dist.reduce_scatter_tensor(x[1:4], x),
        "only where the output is exactly one rank's block of the input",
    ),
    "reduce_scatter": (
        lambda x: dist.reduce_scatter(x[1:4], [x[:3], x[3:]]),
        "only where the output is exactly one entry of the input",
    ),
    "reduce_scatter_tensor_coalesced": (
        lambda x: dist.reduce_scatter_tensor_coalesced(
            [np.zeros(3), x[:3]],
            [x, np.zeros(6)],
        ),
        "only where the output is exactly one rank's block of the input",
    ),
    "all_to_all_single": (
        lambda x: dist.all_to_all_single(x[:4], x[2:]),
        "only where both are exactly the same memory",
    ),
    "all_to_all": (
        lambda x: dist.all_to_all([x[:2], x[2:4]], [x[1:3], x[3:5]]),
        "only where the output is exactly one entry of the input",
    ),
    "all_gather_into_tensor": (
        lambda x: dist.all_gather_into_tensor(x, x[1:4]),
        "only for this rank's own block",
    ),
}


@pytest.mark.parametrize(("call", "words"), REFUSED.values(), ids=REFUSED)
def test_other_overlaps_are_refused(
    jobs: Jobs, backend: str, call: Callable[[Array], Any], words: str
) -> None:
    """An output across blocks has no meaning. Nothing is sent, and the group stays usable."""

    def body(rank: int) -> float:
        with pytest.raises(ValueError, match=f"share memory.*which this call allows {words}"):
            call(np.zeros(6))
        one = np.ones(1)
        dist.all_reduce(one)
        return float(one[0])

    assert [2.0, 2.0] == jobs.get(backend, 2).run(body)
