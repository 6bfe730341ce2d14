"""A rank of a real job: every public call, each result compared bit for bit with the oracle.

    python every_call.py                    variables of a launcher say which rank this is
    python every_call.py URL RANK SIZE      the command line does; RANK - : the URL counts them
    python every_call.py --spawn SIZE       children of this process are the ranks
    python every_call.py --backend mpi      a launcher's variables, and another backend than tcp

A rank prints "rank R of P: N results as expected" last. What differs is printed with the call,
group and rank, and ends the rank with code 1.
"""

import sys
from pathlib import Path

import numpy as np

import cydist as dist
from cydist.testing import oracle

TESTS = Path(__file__).parents[1]

TIMEOUT = 40.0  # seconds, far below the deadline of the test that starts the job
COUNTS = (0, 1, 3, 1001)
LONG = 400_003  # elements; many segments, windows and socket buffers
LAYOUTS = {
    "contiguous": lambda n, dtype: np.zeros(n, dtype),
    "every second": lambda n, dtype: np.zeros(2 * n, dtype)[::2],
    "reversed": lambda n, dtype: np.zeros(n, dtype)[::-1],
    "column": lambda n, dtype: np.zeros((n, 3), dtype)[:, 1],
    "transposed": lambda n, dtype: (
        np.zeros((n, 1), dtype, order="F") if n % 7 else np.zeros((7, n // 7), dtype).T
    ),
}
MOVED = [oracle.DTYPES[name] for name in ("bool", "int16", "float32", "complex128", "bfloat16")]


class Differs(AssertionError):
    """A result is not the oracle's."""


def laid_out(layout, values):
    """`values` in an array of some layout."""
    array = LAYOUTS[layout](values.size, values.dtype)
    array[...] = values.reshape(array.shape)
    return array


class Checks:
    """Makes calls on one group, at once or overlapping, and compares what they gave."""

    def __init__(self, group, asynchronous):
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.asynchronous = asynchronous
        self.count = 0
        self._pending = []

    def contributions(self, count, dtype):
        """What every rank of the group gives, by group rank."""
        return [oracle.contribution(rank, count, np.dtype(dtype)) for rank in range(self.size)]

    def call(self, function, *arguments, gives, **options):
        """Call it; afterwards `gives` holds pairs of what is expected and the array it is in."""
        work = function(*arguments, group=self.group, async_op=self.asynchronous, **options)
        if self.asynchronous:
            self._pending.append((work, function, gives))
        else:
            self.compare(function.__name__, gives)

    def finish(self):
        """Wait for everything under way."""
        for work, function, gives in self._pending:
            work.wait()
            self.compare(function.__name__ + " async", gives)
        self._pending.clear()

    def compare(self, name, gives):
        """Raise Differs unless every array holds what is expected, bit for bit."""
        for expected, actual in gives:
            actual = np.asarray(actual).reshape(expected.shape)
            if not oracle.same_bits(expected, actual):
                raise Differs(
                    f"{name} of {expected.size} {expected.dtype} on rank {self.rank} of "
                    f"{self.size}: expected {expected!r}, got {actual!r}"
                )
            self.count += 1


def reductions(check):
    """Every operation on every dtype."""
    for dtype in oracle.DTYPES.values():
        given = check.contributions(17, dtype)
        for op in filter(lambda op: oracle.makes_sense(op, dtype), oracle.OPS):
            mine = given[check.rank].copy()
            gives = [(oracle.reduced(op, given), mine)]
            check.call(dist.all_reduce, mine, getattr(dist.ReduceOp, op), gives=gives)
        check.finish()
    given = check.contributions(9, "f4")
    scaled = [array * np.float32(2.0**rank) for rank, array in enumerate(given)]
    mine, factor = given[check.rank].copy(), 2.0**check.rank
    gives = [(oracle.reduced("SUM", scaled), mine)]
    check.call(dist.all_reduce, mine, dist.ReduceOp.PREMUL_SUM(factor), gives=gives)


def one_array(check, layout, count, dtype):
    """The calls that take one array: broadcast, all_reduce, reduce, scan, exscan."""
    given = check.contributions(count, dtype)
    op = dist.ReduceOp.MAX if dtype.kind == "b" else dist.ReduceOp.SUM
    total = [oracle.reduced(op.name, given[: r + 1]) for r in range(check.size)]

    def mine():
        return laid_out(layout, given[check.rank])

    for root in range(check.size):
        a, b = mine(), mine()
        check.call(dist.broadcast, a, group_src=root, gives=[(given[root], a)])
        expected = total[-1] if check.rank == root else given[check.rank]
        check.call(dist.reduce, b, op=op, group_dst=root, gives=[(expected, b)])
    a, b, c = mine(), mine(), mine()
    check.call(dist.all_reduce, a, op, gives=[(total[-1], a)])
    check.call(dist.scan, b, op, gives=[(total[check.rank], b)])
    before = given[0] if check.rank == 0 else total[check.rank - 1]
    check.call(dist.exscan, c, op, gives=[(before, c)])


def lists(check, layout, count, dtype):
    """The calls that take lists, every rank with another size: (g)ather, scatter, exchange."""
    p, me = check.size, check.rank
    sent = [
        [oracle.contribution(s + 2 * r, count + s + 2 * r, dtype) for r in range(p)]
        for s in range(p)
    ]
    uneven = [oracle.contribution(rank, count + rank, dtype) for rank in range(p)]

    def filled(values):
        return laid_out(layout, values)

    def empty(values):
        return laid_out(layout, np.zeros_like(values))

    outputs = [empty(values) for values in uneven]
    gives = list(zip(uneven, outputs, strict=True))
    check.call(dist.all_gather, outputs, filled(uneven[me]), gives=gives)
    for root in range(p):
        here = me == root
        outputs = [empty(values) for values in uneven]
        gives = list(zip(uneven, outputs, strict=True)) if here else []
        check.call(
            dist.gather, filled(uneven[me]), outputs if here else None, group_dst=root, gives=gives
        )
        output = empty(uneven[me])
        inputs = [filled(values) for values in uneven] if here else None
        check.call(dist.scatter, output, inputs, group_src=root, gives=[(uneven[me], output)])
    outputs = [empty(sent[s][me]) for s in range(p)]
    gives = [(sent[s][me], outputs[s]) for s in range(p)]
    check.call(dist.all_to_all, outputs, [filled(values) for values in sent[me]], gives=gives)
    blocks = [
        [oracle.contribution(s + r, count + r, dtype) for r in range(p)] for s in range(p)
    ]  # entry r has one size on all ranks
    op = dist.ReduceOp.MIN if dtype.kind == "b" or dtype.name == "int16" else dist.ReduceOp.SUM
    if dtype.kind != "c" or op is dist.ReduceOp.SUM:
        output = empty(blocks[0][me])
        gives = [(oracle.reduced(op.name, [row[me] for row in blocks]), output)]
        check.call(
            dist.reduce_scatter, output, [filled(values) for values in blocks[me]], op, gives=gives
        )


def single_tensors(check, layout, count, dtype):
    """The *_tensor and *_single calls: blocks of one array."""
    p, me = check.size, check.rank
    given = check.contributions(p * count, dtype)
    parts = [slice(r * count, (r + 1) * count) for r in range(p)]
    whole, block = laid_out(layout, np.zeros(p * count, dtype)), given[me][parts[0]]
    gives = [(np.concatenate([array[parts[0]] for array in given]), whole)]
    check.call(dist.all_gather_into_tensor, whole, laid_out(layout, block), gives=gives)
    swapped, mine = np.zeros((p * count, 2), dtype), np.repeat(given[me], 2).reshape(-1, 2)
    expected = np.concatenate([np.repeat(array[parts[me]], 2).reshape(-1, 2) for array in given])
    check.call(dist.all_to_all_single, swapped, mine, gives=[(expected, swapped)])
    if dtype.kind != "b":
        output = laid_out(layout, np.zeros(count, dtype))
        gives = [(oracle.reduced("SUM", [array[parts[me]] for array in given]), output)]
        check.call(dist.reduce_scatter_tensor, output, laid_out(layout, given[me]), gives=gives)


def split_sizes(check):
    """all_to_all_single with rows of its own for each pair."""
    p, me = check.size, check.rank
    rows = [[(s + 2 * r) % 3 for r in range(p)] for s in range(p)]
    given = [oracle.contribution(s, sum(rows[s]) * 3, np.dtype("i4")) for s in range(p)]
    given = [array.reshape(-1, 3) for array in given]
    taken = [rows[s][me] for s in range(p)]
    output = np.zeros((sum(taken), 3), "i4")
    cuts = [np.split(given[s], np.cumsum(rows[s])[:-1])[me] for s in range(p)]
    gives = [(np.concatenate(cuts), output)]
    check.call(dist.all_to_all_single, output, given[me], taken, rows[me], gives=gives)


def coalesced(check):
    """Many arrays in one call."""
    p, me = check.size, check.rank
    counts = (5, 0, 1, 300)
    given = [
        [oracle.contribution(rank + i, n, np.dtype("f4")) for i, n in enumerate(counts)]
        for rank in range(p)
    ]
    totals = [oracle.reduced("SUM", [arrays[i] for arrays in given]) for i in range(len(counts))]
    mine = [laid_out("every second", array) for array in given[me]]
    gives = list(zip(totals, mine, strict=True))
    check.call(dist.all_reduce_coalesced, mine, gives=gives)
    outputs = [[np.zeros(n, "f4") for n in counts] for _ in range(p)]
    gives = [(given[r][i], outputs[r][i]) for r in range(p) for i in range(len(counts))]
    check.call(dist.all_gather_coalesced, outputs, given[me], gives=gives)
    outputs = [np.zeros(p * n, "f4") for n in counts]
    joined = [np.concatenate([arrays[i] for arrays in given]) for i in range(len(counts))]
    gives = list(zip(joined, outputs, strict=True))
    check.call(dist.all_gather_into_tensor_coalesced, outputs, given[me], gives=gives)
    outputs = [np.zeros(n, "f4") for n in counts]
    gives = [
        (oracle.reduced("SUM", [own] * p), out) for own, out in zip(given[0], outputs, strict=True)
    ]
    repeated = [np.tile(own, p) for own in given[0]]
    check.call(dist.reduce_scatter_tensor_coalesced, outputs, repeated, gives=gives)


def messages(check):
    """Every pair of ranks, both ways at once: isend and irecv, tags, strides, batches."""
    p, me, group = check.size, check.rank, check.group
    others = [rank for rank in range(p) if rank != me]
    for count in (0, 7, 1000, LONG):
        data = [oracle.contribution(rank, count, np.dtype("f4")) for rank in range(p)]
        inputs = {peer: laid_out("column", np.zeros_like(data[peer])) for peer in others}
        works = [dist.irecv(inputs[r], group=group, tag=r, group_src=r) for r in others]
        works += [dist.isend(data[me], group=group, tag=me, group_dst=r) for r in others]
        for work in works:
            work.wait()
        check.compare("isend and irecv", [(data[peer], inputs[peer]) for peer in others])
    right, left = (me + 1) % p, (me - 1) % p
    if p > 1:
        box = np.zeros(3, "i8")
        ops = [
            dist.P2POp(dist.isend, np.arange(3) + me, group=group, group_peer=right),
            dist.P2POp(dist.irecv, box, group=group, group_peer=left),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        check.compare("batch_isend_irecv", [(np.arange(3) + left, box)])
    blocking(check, right, left)


def blocking(check, right, left):
    """send and recv, from a named rank and from anyone, round the ring."""
    if check.size == 1:
        return
    token = np.zeros(2, "u1")
    ranks = dist.get_process_group_ranks(check.group)
    for step in range(2):
        if check.rank == 0:
            dist.send(np.full(2, 40 + step, "u1"), group=check.group, group_dst=right)
        named = {"group_src": left} if step else {}
        source = dist.recv(token, group=check.group, **named)
        if check.rank:
            dist.send(token + np.uint8(1), group=check.group, group_dst=right)
        hops = (check.rank or check.size) - 1
        gives = [(np.full(2, 40 + step + hops, "u1"), token)]
        check.compare("send and recv", [*gives, (np.array(ranks[left]), np.array(source))])


def objects(check):
    """The object calls, with what the codec and what pickle says."""
    p, me, group = check.size, check.rank, check.group
    given = [{"rank": rank, "text": "é" * 1000 * rank, "at": Path(f"/{rank}")} for rank in range(p)]
    found = [None] * p
    dist.all_gather_object(found, given[me], group)
    agree(check, "all_gather_object", given, found)
    last = p - 1
    values = [given[last], None, 3.5] if me == last else [None] * 3
    dist.broadcast_object_list(values, group=group, group_src=last)
    agree(check, "broadcast_object_list", [given[last], None, 3.5], values)
    found = [None] * p if me == last else None
    dist.gather_object(given[me], found, group=group, group_dst=last)
    agree(check, "gather_object", given if me == last else None, found)
    found = [None]
    dist.scatter_object_list(found, given if me == last else None, group=group, group_src=last)
    agree(check, "scatter_object_list", [given[me]], found)
    if p > 1 and me == 0:
        dist.send_object_list([given[0], 1], group=group, group_dst=1)
    if p > 1 and me == 1:
        found = [None, None]
        dist.recv_object_list(found, group=group, group_src=0)
        agree(check, "recv_object_list", [given[0], 1], found)


def agree(check, name, expected, actual):
    """Raise Differs unless two objects are equal."""
    if expected != actual:
        raise Differs(f"{name} on rank {check.rank}: expected {expected!r}, got {actual!r}")
    check.count += 1


def everything(group, asynchronous):
    """Every call on one group; how many results were compared."""
    check = Checks(group, asynchronous)
    reductions(check)
    for number, dtype in enumerate(MOVED):
        for count in COUNTS:
            for layout in LAYOUTS if number == 2 else list(LAYOUTS)[number::3]:
                one_array(check, layout, count, dtype)
                lists(check, layout, count, dtype)
                single_tensors(check, layout, count, dtype)
                check.finish()
    for family in (one_array, lists, single_tensors):
        family(check, "contiguous", LONG, np.dtype("f4"))
        check.finish()
    split_sizes(check)
    coalesced(check)
    check.call(dist.barrier, gives=[])
    if asynchronous:
        messages(check)  # overlapping with what is still under way
    check.finish()
    if not asynchronous:
        messages(check)
        objects(check)
        dist.monitored_barrier(group)
    return check.count


def rank_main(url=None, rank=-1, size=-1, backend="tcp"):
    """One rank, from joining to leaving."""
    dist.init_process_group(backend, init_method=url, rank=rank, world_size=size, timeout=TIMEOUT)
    me, p = dist.get_rank(), dist.get_world_size()
    compared = everything(None, asynchronous=False) + everything(None, asynchronous=True)
    # All but rank 0, last rank first; and one in which every rank is alone.
    others = dist.new_group(range(p - 1, 0, -1), sort_ranks=False) if p > 1 else None
    if others:
        compared += everything(others, asynchronous=True)
    alone = [dist.new_group([rank]) for rank in range(p)][me]
    compared += everything(alone, asynchronous=False)
    dist.destroy_process_group()
    print(f"rank {me} of {p}: {compared} results as expected", flush=True)


def child(rank):
    """One of the ranks that --spawn starts."""
    rank_main()


def main(arguments):
    """Find out which rank this is, and be it."""
    if arguments[:1] == ["--spawn"]:
        dist.spawn(child, nprocs=int(arguments[1]))
    elif arguments[:1] == ["--backend"]:
        rank_main(backend=arguments[1])
    elif arguments:
        url, rank, size = arguments
        rank_main(url, -1 if rank == "-" else int(rank), int(size))
    else:
        rank_main()


if __name__ == "__main__":
    main(sys.argv[1:])
