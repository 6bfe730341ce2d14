"""Every row of the table of algorithms, called by name on links between threads."""

from pathlib import Path

import numpy as np
import pytest
from collective_cases import SLOTS, TINY, Case, Ranks
from extra_values import more
from hypothesis import given, settings
from hypothesis import strategies as st

from cydist import _native
from cydist.testing import oracle
from cydist.tuning import table as tuning_table

SIZES = (1, 2, 3, 4, 5, 8, *more(6, 7, 9, 13, 16))
# Those for several hosts have tests of their own.
ROWS = sorted(row for row, needs in tuning_table.NEEDS.items() if not needs & tuning_table.HOSTS)
REDUCING = [row for row in ROWS if row[0] in tuning_table.REDUCING]
ALL_REDUCE = [row for row in ROWS if row[0] == "all_reduce"]
MESSAGES = [row for row in ROWS if not tuning_table.NEEDS[row] & tuning_table.WINDOWS]
WINDOWS = [row for row in ROWS if tuning_table.NEEDS[row] & tuning_table.WINDOWS]
UNEVEN = [
    row for row in ROWS
    if row[0] in ("all_gather", "gather", "scatter", "reduce_scatter", "all_to_all")
    and not tuning_table.NEEDS[row] & tuning_table.EVEN_BLOCKS
]  # fmt: skip
HEADS = 8 * SLOTS  # steps that a window holds


def row_id(row):
    return "-".join(row)


@pytest.fixture(scope="module")
def ranks():
    """ranks(size, transport="inproc"): the ranks of a group, made once."""
    kept = {}

    def get(size, transport="inproc"):
        if (size, transport) not in kept:
            kept[size, transport] = Ranks(size, transport)
        return kept[size, transport]

    yield get
    for group in kept.values():
        group.close()


@pytest.fixture
def fresh():
    """fresh(size): ranks of which nobody expects that they work afterwards."""
    made = []

    def make(size):
        made.append(Ranks(size, "inproc"))
        return made[-1]

    yield make
    for group in made:
        group.close()


def counts(p):
    """Elements, and bytes of a segment: around the number of ranks, in many segments, in one."""
    return [
        *((count, TINY) for count in sorted({0, 1, p - 1, p, p + 1})),
        (1000, TINY * 16),
        (1000, 1 << 20),
    ]


@pytest.mark.parametrize("size", SIZES, ids=lambda size: f"{size}ranks")
@pytest.mark.parametrize("row", ROWS, ids=row_id)
def test_every_size_and_count(ranks, row, size):
    """Any world size, any count: fewer elements than ranks, zero, several segments."""
    collective, name = row
    for count, segment in counts(size):
        case = Case(collective, size, count, root=count % size)
        case.check(ranks(size).run(case, name, segment=segment))


@pytest.mark.parametrize("size", [2, 3, 4], ids=lambda size: f"{size}ranks")
@pytest.mark.parametrize("row", MESSAGES, ids=row_id)
def test_over_sockets(ranks, row, size):
    """What passes between threads passes through sockets too."""
    collective, name = row
    case = Case(collective, size, 3000, root=size - 1)
    case.check(ranks(size, "tcp").run(case, name, segment=1024))


@pytest.mark.parametrize("size", [1, 3, 4], ids=lambda size: f"{size}ranks")
@pytest.mark.parametrize("row", [r for r in ROWS if r[0] not in
                                 ("barrier", "broadcast", "all_to_all")],
                         ids=row_id)  # fmt: skip
def test_in_place(ranks, row, size):
    """An input may be the output, or the output's block that belongs to this rank."""
    collective, name = row
    case = Case(collective, size, 100, root=size - 1, in_place=True)
    case.check(ranks(size).run(case, name))


@pytest.mark.parametrize("size", [1, 3, 4, *more(2, 7)], ids=lambda size: f"{size}ranks")
@pytest.mark.parametrize("row", UNEVEN, ids=row_id)
def test_uneven_blocks(ranks, row, size):
    """Blocks of any sizes, empty ones too."""
    collective, name = row
    sizes = [(7 * r * r + 3) % 23 if r % 3 != 1 else 0 for r in range(size)]
    if collective == "all_to_all":
        sizes = [[(5 * a + 3 * b * b) % 19 for b in range(size)] for a in range(size)]
    case = Case(collective, size, 0, root=size // 2, sizes=sizes)
    case.check(ranks(size).run(case, name))


@pytest.mark.parametrize("size", [1, 3, 4, *more(2, 6)], ids=lambda size: f"{size}ranks")
@pytest.mark.parametrize("row", REDUCING, ids=row_id)
def test_premul_sum_prepares_every_contribution_once(ranks, row, size):
    """The factor is applied to each contribution, a rank that combines it."""
    collective, name = row
    case = Case(collective, size, 50, op="PREMUL_SUM", factor=0.5, root=size - 1)
    case.check(ranks(size).run(case, name))


@pytest.mark.parametrize("size", [1, 3, 4, *more(2, 6)], ids=lambda size: f"{size}ranks")
@pytest.mark.parametrize("row", [r for r in REDUCING if "scan" not in r[0]], ids=row_id)
def test_avg_divides_once(ranks, row, size):
    """The sum of all ranks is divided by their number, after the last addition."""
    collective, name = row
    case = Case(
        collective, size, 50, op="AVG", root=size - 1,
        values=lambda rank, n, salt: (np.arange(n) + rank + salt) * size,
    )  # fmt: skip
    case.check(ranks(size).run(case, name))


def inexact(rank, count, salt):
    """Values whose sum depends on the order, and on where it is rounded."""
    return np.random.default_rng(100 * rank + salt).normal(size=count) * 3.0**rank


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("size", [2, 3, 5, 8, *more(4, 7)], ids=lambda size: f"{size}ranks")
@pytest.mark.parametrize("row", ALL_REDUCE, ids=row_id)
def test_same_bits_on_all_ranks(ranks, row, size, dtype):
    """Whatever the order of the additions, it is one order."""
    collective, name = row
    case = Case(collective, size, 61, dtype=dtype, values=inexact)
    results = ranks(size).run(case, name)
    assert {outputs[0].tobytes() for outputs in results} == {results[0][0].tobytes()}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("size", [2, 3, 5, 8], ids=lambda size: f"{size}ranks")
@pytest.mark.parametrize("row", [r for r in REDUCING if r in tuning_table.ONE_ROUNDING], ids=row_id)
def test_rank_order_and_one_rounding(ranks, row, size, dtype):
    """The algorithms of CYDIST_DETERMINISTIC give the bits of the sum in rank order."""
    collective, name = row
    case = Case(collective, size, 61, dtype=dtype, root=size - 1, values=inexact)
    case.check(ranks(size).run(case, name))


@pytest.mark.parametrize("in_place", [False, True], ids=["apart", "in-place"])
@pytest.mark.parametrize("count", [61, 1_200_000], ids=["short", "long"])
@pytest.mark.parametrize("size", [2, 3, 4], ids=lambda size: f"{size}ranks")
def test_ring_order(ranks, size, count, in_place):
    """A block's sum begins with the rank behind its own and ends with its own, however long it
    is: a long one goes round in stretches."""
    sizes = [count, count // 2, 0, count + 1][:size]
    case = Case("reduce_scatter", size, 0, sizes=sizes, values=inexact, in_place=in_place)
    results = ranks(size).run(case, "ring", segment=1 << 18)
    for rank, (got,) in enumerate(results):
        expected = case.given[(rank + 1) % size][rank].copy()
        for distance in range(2, size + 1):
            expected += case.given[(rank + distance) % size][rank]
        assert oracle.same_bits(expected, got)


def neighbours(arrays):
    """The sum of a power of two of arrays as a balanced tree of neighbours."""
    while len(arrays) > 1:
        arrays = [low + high for low, high in zip(arrays[::2], arrays[1::2], strict=True)]
    return arrays[0]


@pytest.mark.parametrize("size", [2, 4, 8], ids=lambda size: f"{size}ranks")
@pytest.mark.parametrize(
    "row",
    [("all_reduce", "doubling"), ("all_reduce", "halving_doubling"), ("reduce", "tree")],
    ids=row_id,
)
def test_neighbours_are_combined_first(ranks, row, size):
    """Only neighbouring ranges of ranks are combined, so reductions need not commute."""
    collective, name = row
    case = Case(collective, size, 61, values=inexact)
    expected = neighbours([blocks[0] for blocks in case.given])
    assert oracle.same_bits(expected, ranks(size).run(case, name)[0][0])


@pytest.mark.parametrize("row", ROWS, ids=row_id)
def test_a_missing_rank_is_a_timeout_that_leaves_nothing_behind(fresh, row):
    """Ranks that need the missing one time out, and withdraw what they posted."""
    collective, name = row
    group = fresh(4)
    case = Case(collective, 4, 300, root=0)

    def body(rank):
        if rank == 3:
            return "absent"
        try:
            case.run(group.groups[rank], rank, name, 1, TINY, 0.05)
        except _native.CallError as failure:
            return failure.status
        return "ok"

    outcomes = group.each(body)
    assert set(outcomes) <= {"ok", "timeout", "absent"}
    assert [link.pending()[0] for link in group.links] == [0] * 4


@pytest.mark.parametrize("row", WINDOWS, ids=row_id)
def test_windows_notice_another_call(fresh, row):
    """Every rank says so, naming both calls: in this call or, if it waits for nobody, a later one,
    at the latest when it has used up its window."""
    collective, name = row
    group = fresh(3)
    odd = Case("barrier" if collective != "barrier" else "broadcast", 3, 5)

    def body(rank):
        case = odd if rank == 1 else Case(collective, 3, 5)
        how = name if rank != 1 else "flat"
        try:
            for seq in range(1, HEADS + 2):
                case.run(group.groups[rank], rank, how, seq, TINY, 5.0)
        except _native.CallError as failure:
            return failure.status, failure.ours.split()[0], failure.theirs.split()[0]
        return "ok"

    pair = (collective, odd.collective)
    expected = [("mismatch", *pair), ("mismatch", *pair[::-1]), ("mismatch", *pair)]
    assert group.each(body) == expected


@pytest.mark.parametrize("name", ["direct", "flat"])
@pytest.mark.parametrize("collective", ["gather", "scatter", "all_to_all"])
def test_windows_compare_uneven_sizes(fresh, collective, name):
    """A pair that disagrees on the size of a block fails, however it would fit."""
    group = fresh(2)
    alike = [[2, 3], [4, 5]] if collective == "all_to_all" else [2, 3]
    other = [[2, 3], [1, 5]] if collective == "all_to_all" else [2, 4]
    cases = [Case(collective, 2, 0, sizes=sizes) for sizes in (other, alike)]

    def body(rank):
        try:
            cases[rank].run(group.groups[rank], rank, name, 1, TINY, 0.2)
        except _native.CallError as failure:
            return failure.status
        return "ok"

    assert "mismatch" in group.each(body)


CALLS = st.lists(
    st.tuples(st.sampled_from(ROWS), st.sampled_from([0, 1, 7, 40, 300]), st.integers(0, 2)),
    min_size=1,
    max_size=12,
)


@settings(max_examples=40, deadline=None)
@given(calls=CALLS)
def test_calls_in_a_row(ranks, calls):
    """Calls that follow each other without a barrier never see each other's data."""
    group = ranks(3)
    cases = [Case(row[0], 3, count, root=root) for row, count, root in calls]
    first = group.seq + 1
    group.seq += len(calls)

    def body(rank):
        return [
            case.run(group.groups[rank], rank, row[1], first + i, TINY, 30.0)
            for i, (case, (row, _, _)) in enumerate(zip(cases, calls, strict=True))
        ]

    for case, results in zip(cases, zip(*group.each(body), strict=True), strict=True):
        case.check(results)


DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "dev" / "algorithms.md"


@pytest.mark.parametrize("row", ROWS, ids=row_id)
def test_every_algorithm_is_in_the_document(row):
    """Every row of the table of algorithms has one in docs/dev/algorithms.md."""
    collective, name = row
    assert DOCUMENT.read_text().count(f"\n| `{collective}` | `{name}` |") == 1
