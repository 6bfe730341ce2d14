"""The promises about bits, with inputs whose sum depends on order and rounding.

Every algorithm that reduces is forced in turn, through the public calls.
"""

import numpy as np
import pytest
from extra_values import more

import cydist as dist
from cydist.testing import oracle, run_threads
from cydist.tuning import table as tuning_table

COUNT = 1003
FLOATS = ("float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float32", "float64")
ROUNDING = [oracle.DTYPES[name] for name in (*FLOATS, "complex64")]  # dtypes whose sums round
ALGORITHMS = [
    (backend, collective, name)
    for backend in ("inproc", "tcp", "shm")
    for (collective, name), needs in sorted(tuning_table.NEEDS.items())
    if collective in tuning_table.REDUCING
    and not needs & (tuning_table.NATIVE | tuning_table.HOSTS)
    and (backend == "inproc" or bool(needs & tuning_table.WINDOWS) is (backend == "shm"))
]


@pytest.fixture
def setting(monkeypatch):
    """setting(NAME, value): an environment variable, and that ranks read it again."""

    def put(name, value):
        monkeypatch.setenv(name, value)
        tuning_table.reload()

    return put


@pytest.fixture(params=ALGORITHMS, ids="-".join)
def forced(request, setting):
    """(backend, collective) for which one algorithm, in many short segments, is in force."""
    backend, collective, name = request.param
    setting("CYDIST_ALGORITHM", f"{collective}:{name}")
    setting("CYDIST_SEGMENT_BYTES", "448")
    windows = backend != "tcp"
    taken = tuning_table.choose(collective, COUNT, 3, windows, even=True, commutative=True)
    assert name == taken
    return backend, collective


@pytest.fixture(params=[3, 4, *more(2, 5, 8)], ids=lambda size: f"{size}ranks")
def ranks(request):
    """World sizes: powers of two and others."""
    return request.param


def inexact(size, count, dtype):
    """Contributions of all ranks, of very different magnitudes."""
    rng = np.random.default_rng([size, count, dtype.num])
    parts = rng.normal(size=(2, size, count)) * 3.0 ** -np.arange(size)[:, None]
    values = parts[0] + 1j * parts[1] if dtype.kind == "c" else parts[0]
    return list(values.astype(dtype))


@pytest.mark.parametrize("name", FLOATS)
def test_inputs_depend_on_order_and_rounding(name):
    """What is called inexact here gives other bits in another order, and rounded on the way."""
    given = inexact(3, COUNT, oracle.DTYPES[name])
    total = oracle.reduced("SUM", given)
    if name in oracle.SMALL_FLOATS:
        stepwise = oracle.reduced("SUM", [oracle.reduced("SUM", given[:2]), given[2]])
        assert not oracle.same_bits(total, stepwise)
    else:
        assert not oracle.same_bits(total, oracle.reduced("SUM", given[::-1]))


def special(size, dtype):
    """Contributions in which NaN of any payload, infinities and zeros meet."""
    bits = np.random.default_rng(size).integers(0, 256, (size, 4096 * dtype.itemsize), np.uint8)
    return list(bits.view(dtype))


def once(collective, rank, size, given, op=dist.ReduceOp.SUM):
    """What this rank gets from one call."""
    mine = given[rank].copy()
    if collective == "reduce":
        dist.reduce(mine, size - 1, op)
        return mine if rank == size - 1 else mine[:0]
    if collective == "reduce_scatter":
        output = np.zeros_like(np.array_split(mine, size)[rank])
        dist.reduce_scatter(output, np.array_split(mine, size), op)
        return output
    getattr(dist, collective)(mine, op)
    return mine


def expected_of(collective, rank, size, given, reduced):
    """The same from the oracle; `reduced` is the reduction of a list of arrays."""
    if collective == "scan":
        return reduced(given[: rank + 1])
    if collective == "exscan":
        return reduced(given[:rank]) if rank else given[0]
    total = reduced(given)
    if collective == "reduce":
        return total if rank == size - 1 else total[:0]
    return np.array_split(total, size)[rank] if collective == "reduce_scatter" else total


def same(expected, actual):
    """Assert bit equality, and show where it does not hold."""
    if not oracle.same_bits(expected, actual):
        assert (expected.dtype, expected.shape) == (actual.dtype, actual.shape)
        width = f"u{expected.itemsize}" if expected.itemsize <= 8 else "u8"
        at = np.flatnonzero(expected.view(width) != actual.view(width))
        first = f"[{at[0]}] {expected.flat[at[0]]} {actual.flat[at[0]]}"
        pytest.fail(f"{at.size} {expected.dtype}s differ: {first}")


def test_same_bits_on_all_ranks_and_in_every_run(jobs, forced, ranks):
    """all_reduce gives all ranks the same bits; every call, what it gave before."""
    backend, collective = forced
    given = [inexact(ranks, COUNT, dtype) for dtype in ROUNDING]
    given += [special(ranks, dtype) for dtype in ROUNDING]

    def body(rank):
        return [[once(collective, rank, ranks, each) for each in given] for _ in range(2)]

    results = jobs.get(backend, ranks).run(body)
    for before, again in results:
        for first, second, of_rank_0 in zip(before, again, results[0][0], strict=True):
            same(first, second)
            if collective == "all_reduce":
                same(of_rank_0, first)


def test_same_bits_in_another_job(jobs, forced):
    """New ranks on new connections give the bits of those before them."""
    backend, collective = forced
    given = [inexact(3, COUNT, dtype) for dtype in ROUNDING]

    def body(rank):
        return [once(collective, rank, 3, each) for each in given]

    job = jobs.get(backend, 3)
    for before, again in zip(job.run(body), run_threads(body, 3, backend), strict=True):
        for expected, actual in zip(before, again, strict=True):
            same(expected, actual)


def test_same_bits_for_every_layout(jobs, forced):
    """An array of every third element, at an odd place, gives the bits of a contiguous one."""
    backend, collective = forced
    given = [inexact(4, COUNT, dtype) for dtype in ROUNDING]

    def strided(arrays):
        spread = [np.zeros(3 * COUNT + 1, array.dtype)[1::3] for array in arrays]
        for array, values in zip(spread, arrays, strict=True):
            array[...] = values
        return spread

    def body(rank):
        return [
            (once(collective, rank, 4, each), once(collective, rank, 4, strided(each)))
            for each in given
        ]

    for pairs in jobs.get(backend, 4).run(body):
        for plain, spread in pairs:
            same(plain, spread)


def zeros_and_nans(size, dtype):
    """Columns: each choice of signs of zero among the ranks, then one NaN on each rank in turn."""
    signs = (np.arange(2**size) >> np.arange(size)[:, None]) & 1
    zeros = np.where(signs, -0.0, 0.0)
    nans = np.where(np.eye(size, dtype=bool), np.nan, np.arange(size)[:, None] - 1.0)
    return list(np.hstack([zeros, nans, np.copysign(nans, -1.0)]).astype(dtype))


def extreme(op, arrays):
    """MIN or MAX, in which NaN wins, always the same one, and -0 < +0."""
    stack = np.stack(arrays).astype("f8")
    total = stack.min(0) if op == "MIN" else stack.max(0)
    negative = np.signbit(stack) & (stack == 0)
    positive = ~np.signbit(stack) & (stack == 0)
    zero = -0.0 if op == "MIN" else 0.0
    total = np.where((negative if op == "MIN" else positive).any(0) & (total == 0), zero, total)
    return np.where(np.isnan(stack).any(0), np.nan, total).astype(arrays[0].dtype)


@pytest.mark.parametrize("op", ["MIN", "MAX"])
def test_min_and_max_of_nan_and_signed_zero(jobs, forced, op):
    """A NaN on any rank makes the one NaN of the dtype, and -0 < +0, a rank that gives what."""
    backend, collective = forced
    size = 4
    given = [zeros_and_nans(size, oracle.DTYPES[name]) for name in FLOATS]

    def body(rank):
        return [once(collective, rank, size, x, getattr(dist.ReduceOp, op)) for x in given]

    for rank, results in enumerate(jobs.get(backend, size).run(body)):
        if collective in ("scan", "exscan") and rank <= (collective == "exscan"):
            continue  # one contribution, nothing to combine
        for x, actual in zip(given, results, strict=True):
            same(expected_of(collective, rank, size, x, lambda a: extreme(op, a)), actual)


@pytest.mark.parametrize("op", ["SUM", "PRODUCT"])
def test_integers_wrap(jobs, forced, op):
    """Integers of any bits add and multiply modulo 2**bits, in every algorithm."""
    backend, collective = forced
    given = [special(3, oracle.DTYPES[name]) for name in oracle.INTEGERS]

    def body(rank):
        return [once(collective, rank, 3, x, getattr(dist.ReduceOp, op)) for x in given]

    for rank, results in enumerate(jobs.get(backend, 3).run(body)):
        for x, actual in zip(given, results, strict=True):
            same(expected_of(collective, rank, 3, x, lambda a: oracle.reduced(op, a)), actual)


@pytest.fixture
def deterministic(setting):
    """CYDIST_DETERMINISTIC=1, and short segments."""
    setting("CYDIST_DETERMINISTIC", "1")
    setting("CYDIST_SEGMENT_BYTES", "448")


# numpy's complex product and quotient round otherwise than by definition.
SUMS = [("SUM", name) for name in (*FLOATS, "complex64")]
OTHERS = [(op, name) for op in ("PRODUCT", "AVG") for name in ("float16", "bfloat16", "float32")]


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize("count", [7, 9001], ids=lambda count: f"{count}elements")
@pytest.mark.parametrize("collective", sorted(tuning_table.REDUCING))
def test_deterministic_is_rank_order_and_one_rounding(jobs, backend, collective, ranks, count):
    """The bits of the oracle, so equal on windows, on sockets, and where all is derived."""
    calls = [(op, inexact(ranks, count, oracle.DTYPES[name])) for op, name in (*SUMS, *OTHERS)]

    def body(rank):
        return [once(collective, rank, ranks, x, getattr(dist.ReduceOp, op)) for op, x in calls]

    for rank, results in enumerate(jobs.get(backend, ranks).run(body)):
        for (op, given), actual in zip(calls, results, strict=True):
            same(expected_of(collective, rank, ranks, given, scanned(op, ranks)), actual)


def scanned(op, ranks):
    """The oracle's reduction; AVG of a scan divides by the number of ranks."""

    def reduced(arrays):
        if op != "AVG":
            return oracle.reduced(op, arrays)
        dtype = arrays[0].dtype
        wide = np.dtype(np.float32) if dtype.name in oracle.SMALL_FLOATS else dtype
        total = oracle.reduced("SUM", [array.astype(wide) for array in arrays])
        return (total / wide.type(ranks)).astype(dtype)

    return reduced


@pytest.mark.usefixtures("deterministic")
def test_deterministic_premul_sum(jobs, backend, ranks):
    """Each contribution times its rank's factor, rounded, then the sum in rank order."""
    given = [inexact(ranks, COUNT, dtype) for dtype in ROUNDING]
    scaled = [
        [(array * array.dtype.type(0.5**rank)).astype(array.dtype) for rank, array in enumerate(x)]
        for x in given
    ]

    def body(rank):
        mine = [x[rank].copy() for x in given]
        for array in mine:
            dist.all_reduce(array, dist.ReduceOp.PREMUL_SUM(0.5**rank))
        return mine

    for results in jobs.get(backend, ranks).run(body):
        for x, actual in zip(scaled, results, strict=True):
            same(oracle.reduced("SUM", x), actual)


@pytest.mark.usefixtures("deterministic")
def test_deterministic_refuses_another_algorithm(setting):
    """CYDIST_ALGORITHM cannot take the promise back."""
    setting("CYDIST_ALGORITHM", "all_reduce:ring")
    with pytest.raises(ValueError, match="does not reduce in rank order with one rounding"):
        tuning_table.choose("all_reduce", 8, 2, False, even=True, commutative=True)
