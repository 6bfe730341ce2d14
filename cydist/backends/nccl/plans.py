"""Collectives as data: each rank's steps, without access to memory or NCCL.

A plan is a list of phases that follow each other on one stream. A phase is a group of NCCL calls,
or one local step on this rank's own memory. A plan depends on values that all ranks know, and on a
rank's own sizes where only pairs must agree. The tests compare the plans of all ranks.

An array is named by its index in the list that a collective passes. Scratch memory has negative
numbers: -1 is the first of `Plan.scratch`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from cydist._native import ITEMSIZES
from cydist.backends.nccl.reductions import UINT8, NcclReduction


class BufferRange(NamedTuple):
    """A place in one of the call's arrays: the array, and the offset in bytes."""

    array: int
    start: int = 0


class Transfer(NamedTuple):
    """One of NCCL's calls. `peer` is its root, or the rank at the other end."""

    kind: str
    send: BufferRange | None
    recv: BufferRange | None
    elements: int
    type_code: int = UINT8
    op: int = 0
    peer: int = -1


class LocalKernel(NamedTuple):
    """A step on this rank's own memory.

    What `kind` puts into `into`:

    - "copy": bytes of the one source.
    - "cast": elements of the one source, which are of dtype `source_dtype`.
    - "scale": elements of the one source, multiplied by the call's factor.
    - "combine": elements of all sources, in their order, by the operation `name`.
    - "odd": the last bit of each element, in place.
    - "mean": elements of the one source, divided by `ranks` and truncated. Memory of the second
      source, of 4 bytes an element, is overwritten.
    """

    kind: str
    into: BufferRange
    sources: tuple[BufferRange, ...]
    elements: int
    dtype: str = "uint8"
    source_dtype: str = ""
    name: str = ""
    ranks: int = 1


Phase = tuple[Transfer, ...] | LocalKernel


class Plan(NamedTuple):
    """Phases, and the size in bytes of each piece of their scratch memory."""

    phases: tuple[Phase, ...]
    scratch: tuple[int, ...] = ()

    @property
    def single_call(self) -> Transfer | None:
        """Return the plan's only call, if it consists of one."""
        if len(self.phases) == 1 and not self.scratch:
            phase = self.phases[0]
            if not isinstance(phase, LocalKernel) and len(phase) == 1:
                return phase[0]
        return None


def _offsets(sizes: Sequence[int]) -> list[int]:
    starts, total = [], 0
    for size in sizes:
        starts.append(total)
        total += size
    return starts


def _phase(transfers: Sequence[Transfer]) -> tuple[Phase, ...]:
    """Return one phase of the transfers that move data; empty ones are left out on both sides."""
    moving = tuple(each for each in transfers if each.elements)
    return (moving,) if moving else ()


def _copies(pairs: Sequence[tuple[BufferRange, BufferRange, int]]) -> tuple[Phase, ...]:
    """Return a copy for each (into, source, bytes), one after the other."""
    return tuple(LocalKernel("copy", into, (source,), n) for into, source, n in pairs if n)


# Data movement. Sizes are in bytes, and NCCL moves bytes, whatever the dtype.


@lru_cache(1024)
def broadcast(nbytes: int, root: int) -> Plan:
    """Copy array 0 of the root to array 0 of all ranks."""
    here = BufferRange(0)
    return Plan(_phase([Transfer("broadcast", here, here, nbytes, peer=root)]))


@lru_cache(1024)
def all_gather(rank: int, sizes: tuple[int, ...], adjacent: bool) -> Plan:
    """Copy array 0 of all ranks to arrays 1...: the r-th is rank r's.

    Args:
        adjacent: Whether the outputs are adjacent in memory.

    Blocks of one size use NCCL's all-gather; others use a broadcast from each rank, all at once.
    """
    nbytes = sizes[rank]
    if len(set(sizes)) > 1:
        return Plan(
            _phase(
                [
                    Transfer(
                        "broadcast",
                        BufferRange(0) if r == rank else BufferRange(1 + r),
                        BufferRange(1 + r),
                        n,
                        peer=r,
                    )
                    for r, n in enumerate(sizes)
                ]
            )
        )
    if adjacent:
        return Plan(_phase([Transfer("all_gather", BufferRange(0), BufferRange(1), nbytes)]))
    gathered = Transfer("all_gather", BufferRange(0), BufferRange(-1), nbytes)
    copies = [(BufferRange(1 + r), BufferRange(-1, r * nbytes), nbytes) for r in range(len(sizes))]
    return Plan((*_phase([gathered]), *_copies(copies)), (nbytes * len(sizes),))


@lru_cache(1024)
def gather(rank: int, sizes: tuple[int, ...], nbytes: int, root: int, in_place: bool) -> Plan:
    """Copy array 0 of all ranks to arrays 1... of the root.

    Args:
        sizes: Of the root's arrays; () elsewhere.
        nbytes: Of this rank's own array.
        in_place: Whether the root's own block is its array 0.
    """
    own = in_place and rank == root
    transfers = [] if own else [Transfer("send", BufferRange(0), None, nbytes, peer=root)]
    for r, n in enumerate(sizes):
        if not (own and r == rank):
            transfers.append(Transfer("recv", None, BufferRange(1 + r), n, peer=r))
    return Plan(_phase(transfers))


@lru_cache(1024)
def scatter(rank: int, sizes: tuple[int, ...], nbytes: int, root: int, in_place: bool) -> Plan:
    """Copy arrays 1... of the root to array 0 of all ranks; arguments as in `gather`."""
    own = in_place and rank == root
    transfers = [
        Transfer("send", BufferRange(1 + r), None, n, peer=r)
        for r, n in enumerate(sizes)
        if not (own and r == rank)
    ]
    if not own:
        transfers.append(Transfer("recv", None, BufferRange(0), nbytes, peer=root))
    return Plan(_phase(transfers))


@lru_cache(1024)
def all_to_all(outputs: tuple[int, ...], inputs: tuple[int, ...]) -> Plan:
    """Receive array r (an output) from rank r, and send array p + r (an input) to it. The arguments
    are their sizes."""
    p = len(outputs)
    transfers = [
        Transfer("send", BufferRange(p + r), None, n, peer=r) for r, n in enumerate(inputs)
    ]
    transfers += [Transfer("recv", None, BufferRange(r), n, peer=r) for r, n in enumerate(outputs)]
    return Plan(_phase(transfers))


# Reductions. Counts are of the user's elements.


@lru_cache(1024)
def all_reduce(rank: int, p: int, count: int, how: NcclReduction) -> Plan:
    """Reduce array 0 of all ranks into array 0 of all ranks."""
    if how.scale and p == 1:
        return Plan(_prepare_phases(BufferRange(0), BufferRange(0), count, how))
    if how.op is None:
        return _combined_all_reduce(rank, p, count, how)
    before, source, result, after, scratch = _with_scratch(p, count, how)
    transfer = Transfer("all_reduce", source, result, count * how.width, how.type_code, how.op)
    return Plan((*before, *_phase([transfer]), *after), scratch)


@lru_cache(1024)
def reduce(rank: int, p: int, count: int, root: int, how: NcclReduction) -> Plan:
    """Reduce array 0 of all ranks into the root's array 0."""
    if how.scale and p == 1:
        return Plan(_prepare_phases(BufferRange(0), BufferRange(0), count, how))
    if how.op is None:
        return _combined_reduce(rank, p, count, root, how)
    before, source, result, after, scratch = _with_scratch(p, count, how)
    transfer = Transfer("reduce", source, result, count * how.width, how.type_code, how.op, root)
    return Plan((*before, *_phase([transfer]), *(after if rank == root else ())), scratch)


@lru_cache(1024)
def reduce_scatter(rank: int, counts: tuple[int, ...], how: NcclReduction, adjacent: bool) -> Plan:
    """Reduce array 1 + r of all ranks into array 0 of rank r.

    Args:
        adjacent: Whether the inputs are adjacent in memory.

    Blocks of one size use NCCL's reduce-scatter; others use a reduction to each rank, all at once.
    """
    p, size = len(counts), ITEMSIZES[how.dtype] * how.width
    if how.scale and p == 1:
        return Plan(_prepare_phases(BufferRange(0), BufferRange(1), counts[0], how))
    if how.op is None:
        return _combined_reduce_scatter(rank, counts, how)
    even = len(set(counts)) == 1
    phases: list[Phase] = []
    scratch: list[int] = []
    sources = [BufferRange(1 + r) for r in range(p)]
    if how.wide or how.scale or (even and not adjacent):
        starts = _offsets([n * size for n in counts])
        sources = [BufferRange(-1, start) for start in starts]
        scratch.append(sum(counts) * size)
        for r, n in enumerate(counts):
            phases += _prepare_phases(sources[r], BufferRange(1 + r), n, how)
    result = BufferRange(0)
    if how.wide:
        scratch.append(counts[rank] * size)
        result = BufferRange(-2)
    if even:
        transfers = [
            Transfer(
                "reduce_scatter", sources[0], result, counts[0] * how.width, how.type_code, how.op
            )
        ]
    else:
        # Only its root writes a reduction's result, so the other ranks may pass any memory.
        transfers = [
            Transfer(
                "reduce", sources[r], result if r == rank else sources[r], n * how.width,
                how.type_code, how.op, r,
            )
            for r, n in enumerate(counts)
        ]  # fmt: skip
    phases += _phase(transfers)
    phases += _finish_phases(p, BufferRange(0), result, counts[rank], how)
    return Plan(tuple(phases), tuple(scratch))


def _with_scratch(
    p: int, count: int, how: NcclReduction
) -> tuple[tuple[Phase, ...], BufferRange, BufferRange, tuple[Phase, ...], tuple[int, ...]]:
    """Return, for a reduction of array 0 in place, the phases before NCCL's call, its input and
    output, the phases after it, and the scratch bytes."""
    own, other = BufferRange(0), BufferRange(-1)
    scratch = (count * ITEMSIZES[how.dtype] * how.width,)
    if how.wide:
        return (
            _prepare_phases(other, own, count, how),
            other,
            other,
            _finish_phases(p, own, other, count, how),
            scratch,
        )
    if how.scale:
        return _prepare_phases(other, own, count, how), other, own, (), scratch
    return (), own, own, _finish_phases(p, own, own, count, how), ()


def _prepare_phases(
    into: BufferRange, source: BufferRange, count: int, how: NcclReduction
) -> tuple[Phase, ...]:
    """Return the steps that convert the user's elements to those that NCCL reduces."""
    if not count:
        return ()
    if how.wide:
        return (LocalKernel("cast", into, (source,), count, how.dtype, how.wide),)
    if how.scale:
        return (LocalKernel("scale", into, (source,), count, how.scale),)
    return _copies([(into, source, count * ITEMSIZES[how.dtype] * how.width)])


def _finish_phases(
    p: int, into: BufferRange, source: BufferRange, count: int, how: NcclReduction
) -> tuple[Phase, ...]:
    """Return the steps that convert NCCL's elements back to the user's."""
    if not count:
        return ()
    if how.wide:
        narrowed = LocalKernel("cast", into, (source,), count, how.wide, how.dtype)
        mean = LocalKernel("mean", into, (into, source), count, how.wide, how.wide, ranks=p)
        return (narrowed, mean) if how.mean else (narrowed,)
    if how.odd:
        return (LocalKernel("odd", into, (into,), count),)
    return ()


# Reductions that NCCL lacks: each rank sends block r to rank r, which combines it.


def _exchange_phases(
    rank: int,
    inputs: Sequence[BufferRange],
    counts: Sequence[int],
    how: NcclReduction,
    into: BufferRange,
) -> tuple[tuple[Phase, ...], int]:
    """Send input r to rank r and combine the received blocks into `into`; also return the scratch
    bytes."""
    size, own, p = ITEMSIZES[how.dtype], counts[rank], len(counts)
    arrived = [BufferRange(-1, r * own * size) for r in range(p)]
    transfers = [Transfer("send", inputs[r], None, counts[r] * size, peer=r) for r in range(p)] + [
        Transfer("recv", None, arrived[r], own * size, peer=r) for r in range(p)
    ]
    combined = LocalKernel("combine", into, tuple(arrived), own, how.dtype, name=how.name)
    return (*_phase(transfers), *((combined,) if own else ())), p * own * size


def _cut(p: int, count: int, how: NcclReduction) -> tuple[list[int], list[BufferRange]]:
    """Cut array 0 into a block for each rank."""
    whole, rest = divmod(count, p)
    counts = [whole + (r < rest) for r in range(p)]
    return counts, [BufferRange(0, start * ITEMSIZES[how.dtype]) for start in _offsets(counts)]


def _combined_all_reduce(rank: int, p: int, count: int, how: NcclReduction) -> Plan:
    counts, blocks = _cut(p, count, how)
    phases, scratch = _exchange_phases(rank, blocks, counts, how, blocks[rank])
    size = ITEMSIZES[how.dtype]
    if len(set(counts)) == 1:
        spread = [Transfer("all_gather", blocks[rank], BufferRange(0), counts[0] * size)]
    else:
        spread = [
            Transfer("broadcast", blocks[r], blocks[r], n * size, peer=r)
            for r, n in enumerate(counts)
        ]
    return Plan((*phases, *_phase(spread)), (scratch,))


def _combined_reduce(rank: int, p: int, count: int, root: int, how: NcclReduction) -> Plan:
    counts, blocks = _cut(p, count, how)
    size = ITEMSIZES[how.dtype]
    # Ranks other than the root keep their array unchanged.
    result = blocks[rank] if rank == root else BufferRange(-2)
    phases, scratch = _exchange_phases(rank, blocks, counts, how, result)
    transfers = []
    if rank != root:
        transfers.append(Transfer("send", result, None, counts[rank] * size, peer=root))
    else:
        transfers += [
            Transfer("recv", None, blocks[r], n * size, peer=r)
            for r, n in enumerate(counts)
            if r != root
        ]
    return Plan((*phases, *_phase(transfers)), (scratch, counts[rank] * size))


def _combined_reduce_scatter(rank: int, counts: tuple[int, ...], how: NcclReduction) -> Plan:
    inputs = [BufferRange(1 + r) for r in range(len(counts))]
    phases, scratch = _exchange_phases(rank, inputs, counts, how, BufferRange(0))
    return Plan(phases, (scratch,))


def describe_counts(counts: Sequence[int]) -> str:
    """Return the counts of blocks for a note: "3 * 4", or all of them."""
    if len(set(counts)) == 1:
        return f"{len(counts)} * {counts[0]}"
    return "+".join(map(str, counts))
