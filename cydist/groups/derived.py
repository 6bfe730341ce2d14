"""Collectives that are made of others.

The functions make a collective of messages, for backends without their own: `ProcessGroup` calls
them. `UserOpReducer` makes a reduction by a user's function of the group's collectives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from cydist import _native
from cydist._native import CallRecord
from cydist.errors import DistBackendError, DistError, UnsupportedError
from cydist.groups.consistency import check_consistency, name_call_in
from cydist.reduce_ops import UserReduction, op_and_factor

if TYPE_CHECKING:
    import numpy as np

    from cydist._native import Array
    from cydist.groups.process_group import ProcessGroup
    from cydist.reduce_ops import Elements, Op

SPACE_BYTES = 8 << 20  # memory of a reduction by a user's function


def even_sizes(count: int, parts: int) -> list[int]:
    """Cut `count` into `parts`: the first count % parts get one more than the rest."""
    whole, rest = divmod(count, parts)
    return [whole + (part < rest) for part in range(parts)]


def other_ranks(group: ProcessGroup) -> list[int]:
    """Return every other rank, nearest first, so that not all start with rank 0."""
    return [(group.rank() + step) % group.size() for step in range(1, group.size())]


# Made of messages. `exchange_arrays` is their only step.


def broadcast(group: ProcessGroup, call: CallRecord, array: Array, root: int) -> None:
    """Send along a binomial tree: log2 p steps."""
    check_consistency(group, call, "broadcast", array, root=root)
    relative = (group.rank() - root) % group.size()
    mask = 1
    while mask < group.size() and not relative & mask:
        mask <<= 1
    if relative:
        group.exchange_arrays(call, [], [(array, (group.rank() - mask) % group.size())])
    mask >>= 1
    while mask:
        if relative + mask < group.size():
            group.exchange_arrays(call, [(array, (group.rank() + mask) % group.size())], [])
        mask >>= 1


def all_reduce(group: ProcessGroup, call: CallRecord, array: Array, op: Op) -> None:
    """Reduce one block on each rank, and send it to all.

    Every block is reduced by one rank, in rank order with one rounding, so the bits are the same on
    all ranks.
    """
    check_consistency(group, call, "all_reduce", array, op=op)
    blocks = array.split(even_sizes(array.size, group.size()))
    mine = blocks[group.rank()]
    reduced = mine.empty_like()
    group.run_reduce_scatter(call, reduced, blocks, op)
    mine.copy_from(reduced)
    group.run_all_gather(call, blocks, mine)


def reduce(group: ProcessGroup, call: CallRecord, array: Array, root: int, op: Op) -> None:
    """Reduce one block on each rank, and gather the blocks at the root."""
    check_consistency(group, call, "reduce", array, op=op, root=root)
    blocks = array.split(even_sizes(array.size, group.size()))
    reduced = blocks[group.rank()].empty_like()
    group.run_reduce_scatter(call, reduced, blocks, op)
    group.run_gather(call, reduced, blocks if group.rank() == root else None, root)


def reduce_scatter(
    group: ProcessGroup, call: CallRecord, output: Array, inputs: Sequence[Array], op: Op
) -> None:
    """Exchange blocks with all ranks, and reduce this rank's in rank order."""
    check_consistency(
        group, call, "reduce_scatter", output, op=op, sizes=[block.size for block in inputs]
    )
    kind, factor = op_and_factor(op)
    sources = [output.empty_like() for _ in range(group.size())]
    own = list(inputs)
    if factor is not None:
        own = [block.empty_like() for block in inputs]
        for scaled, block in zip(own, inputs, strict=True):
            _native.prepare(kind, block.dtype, scaled, block, factor)
    sources[group.rank()].copy_from(own[group.rank()])
    others = other_ranks(group)
    group.exchange_arrays(
        call,
        [(own[peer], peer) for peer in others],
        [(sources[peer], peer) for peer in others],
    )
    _native.combine_all(kind, output.dtype, output, sources, factor, group.size())


def all_gather(
    group: ProcessGroup, call: CallRecord, outputs: Sequence[Array], array: Array
) -> None:
    """Send this rank's array to each other rank."""
    check_consistency(group, call, "all_gather", array, sizes=[output.size for output in outputs])
    if not outputs[group.rank()].same_memory(array):
        outputs[group.rank()].copy_from(array)
    others = other_ranks(group)
    group.exchange_arrays(
        call,
        [(array, peer) for peer in others],
        [(outputs[peer], peer) for peer in others],
    )


def gather(
    group: ProcessGroup, call: CallRecord, array: Array, outputs: Sequence[Array] | None, root: int
) -> None:
    """Send this rank's array to the root."""
    check_consistency(group, call, "gather", typed=array, root=root)
    if outputs is None:
        group.exchange_arrays(call, [(array, root)], [])
        return
    if not outputs[root].same_memory(array):
        outputs[root].copy_from(array)
    group.exchange_arrays(call, [], [(outputs[peer], peer) for peer in other_ranks(group)])


def scatter(
    group: ProcessGroup, call: CallRecord, output: Array, inputs: Sequence[Array] | None, root: int
) -> None:
    """Send each rank its array from the root."""
    check_consistency(group, call, "scatter", typed=output, root=root)
    if inputs is None:
        group.exchange_arrays(call, [], [(output, root)])
        return
    if not inputs[root].same_memory(output):
        output.copy_from(inputs[root])
    group.exchange_arrays(call, [(inputs[peer], peer) for peer in other_ranks(group)], [])


def all_to_all(
    group: ProcessGroup,
    call: CallRecord,
    outputs: Sequence[Array],
    inputs: Sequence[Array],
    even: bool,
) -> None:
    """Exchange arrays with all ranks at once."""
    check_consistency(group, call, "all_to_all", typed=outputs[0])
    outputs[group.rank()].copy_from(inputs[group.rank()])
    others = other_ranks(group)
    group.exchange_arrays(
        call,
        [(inputs[peer], peer) for peer in others],
        [(outputs[peer], peer) for peer in others],
    )


def scan(group: ProcessGroup, call: CallRecord, array: Array, op: Op, inclusive: bool) -> None:
    """Gather all arrays on every rank, and reduce those below this one.

    This is simple, and suitable for the small arrays of scans.
    """
    check_consistency(group, call, "scan" if inclusive else "exscan", array, op=op)
    kind, factor = op_and_factor(op)
    own = array.empty_like()
    if factor is None:
        own.copy_from(array)
    else:
        _native.prepare(kind, array.dtype, own, array, factor)
    sources = [array.empty_like() for _ in range(group.size())]
    group.run_all_gather(call, sources, own)
    count = group.rank() + inclusive
    if count:
        _native.combine_all(kind, array.dtype, array, sources[:count], factor, group.size())


def barrier(group: ProcessGroup, call: CallRecord) -> None:
    """Compare the call with all ranks: dissemination, log2 p steps (Hensgen, Finkel and Manber,
    Int. J. Parallel Programming 17(1), 1988)."""
    check_consistency(group, call, "barrier")


# Made of collectives.


def elements_dtype(array: Array) -> np.dtype[Any]:
    """Return numpy's dtype for the elements of a user's array.

    Raises TypeError if there is none.
    """
    import numpy as np

    dtype: np.dtype[Any]
    if isinstance(array.owner, np.ndarray):
        dtype = array.owner.dtype
        return dtype
    try:
        return np.dtype(array.dtype_name)
    except TypeError:
        pass
    why = f"a reduction by a function needs a numpy dtype, and {array.dtype_name} has none: "
    try:
        import ml_dtypes
    except ImportError:
        raise TypeError(f"{why}pip install ml_dtypes") from None
    try:
        dtype = np.dtype(getattr(ml_dtypes, array.dtype_name))
    except (AttributeError, TypeError):
        raise TypeError(f"{why}pass a numpy array") from None
    return dtype


class UserOpReducer:
    """Reduces with a user's function, in place of a group: the same calls with the same meaning.

    Every rank sends block r of its array to rank r, which folds p contributions. Then the results
    go to the ranks that need them. Only unreduced contributions are combined, so any function is
    applied in rank order. A rank whose function raises sends nothing. So the other ranks' next wait
    ends with an error, and not with wrong numbers.

        all_reduce      bytes sent per rank 2 n (p-1)/p     n function calls' elements per rank
        reduce          n (p-1)/p, and to the root n/p      n
        reduce_scatter  n (p-1)/p                           n
        scan, exscan    2 n (p-1)/p                         n

    n is the whole array, which is processed in pieces. Besides the user's memory and the function's
    own, a call takes at most SPACE_BYTES, or one or two elements for each rank if that is more.

    Args:
        op: The only reduction that the calls may name.
        dtype: numpy's, of the elements.
        count: Elements of the longer call of which this one reduces a part; 0: it is not a part.
    """

    def __init__(
        self, group: ProcessGroup, op: UserReduction, dtype: np.dtype[Any], count: int = 0
    ) -> None:
        self._group = group
        self._op = op
        self._dtype = dtype
        self._count = count
        self._where = ""  # the call, for messages

    def run_all_reduce(self, call: CallRecord, array: Array, op: Op) -> None:
        """Reduce in place on every rank."""
        with self._parts_of(call):
            self._start_step(call, "all_reduce", array)
            blocks = self._blocks(array)
            mine = blocks[self._group.rank()]
            self._fold(call, mine, blocks)
            self._group.run_all_gather(self._part_of(call), blocks, mine)

    def run_reduce(self, call: CallRecord, array: Array, root: int, op: Op) -> None:
        """Reduce into the root's array; other ranks' arrays keep their contents."""
        with self._parts_of(call):
            self._start_step(call, "reduce", array, root=root)
            at_root = self._group.rank() == root
            for pieces, sources in self._exchange_pieces(call, self._blocks(array)):
                self._write(sources[0], self._fold_all(sources))
                self._group.run_gather(
                    self._part_of(call), sources[0], pieces if at_root else None, root
                )

    def run_reduce_scatter(
        self, call: CallRecord, output: Array, inputs: Sequence[Array], op: Op
    ) -> None:
        """Reduce block r of all ranks' inputs into rank r's output."""
        with self._parts_of(call):
            self._start_step(call, "reduce_scatter", output, sizes=[block.size for block in inputs])
            self._fold(call, output, inputs)

    def run_scan(self, call: CallRecord, array: Array, op: Op, inclusive: bool) -> None:
        """Reduce over the ranks below this one, and this one if `inclusive`, in place."""
        with self._parts_of(call):
            self._start_step(call, "scan" if inclusive else "exscan", array)
            for pieces, sources in self._exchange_pieces(call, self._blocks(array), banks=2):
                prefixes = [source.empty_like() for source in sources]
                for rank, folded in enumerate(self._prefixes(sources)):
                    if inclusive:
                        self._write(prefixes[rank], folded)
                    elif rank + 1 < len(prefixes):
                        self._write(prefixes[rank + 1], folded)
                    if rank == 0 and not inclusive:  # rank 0 keeps its array
                        self._write(prefixes[0], folded)
                self._exchange(call, pieces, prefixes, pieces)

    @contextmanager
    def _parts_of(self, call: CallRecord) -> Iterator[None]:
        """Let errors of the collectives and messages inside name the call, as the program knows no
        other."""
        self._group.run_as_part_of(call)
        try:
            yield
        except DistError as error:
            name_call_in(error, call)
            raise
        finally:
            self._group.run_as_part_of(None)

    def _start_step(
        self, call: CallRecord, name: str, array: Array, *, root: int | None = None,
        sizes: Sequence[int] = (),
    ) -> None:  # fmt: skip
        here = self._group.ranks[self._group.rank()]
        self._where = f"{call.name} #{call.seq} on {self._group.title}, rank {here}"
        self._group.announce_call(CallRecord(name, call.seq, call.deadline))
        known = [self._count] if self._count else sizes
        check_consistency(self._group, call, name, array, op=self._op, root=root, sizes=known)

    def _part_of(self, call: CallRecord) -> CallRecord:
        """Return the record of a collective that this one is made of."""
        part = CallRecord(call.name, self._group.next_seq(), call.deadline)
        part.agreed = True
        return part

    def _blocks(self, array: Array) -> list[Array]:
        return array.split(even_sizes(array.size, self._group.size()))

    def _fold(self, call: CallRecord, output: Array, inputs: Sequence[Array]) -> None:
        """Fold block r of all ranks' inputs into rank r's output, which may be that block."""
        done = 0
        for _, sources in self._exchange_pieces(call, inputs):
            count = sources[0].size
            _, into, _ = output.split([done, count, output.size - done - count])
            self._write(into, self._fold_all(sources))
            done += count

    def _exchange_pieces(
        self, call: CallRecord, inputs: Sequence[Array], banks: int = 1
    ) -> Iterator[tuple[list[Array], list[Array]]]:
        """Iterate over pieces: a piece of each of this rank's blocks, and all ranks' contributions
        to that piece of its own block.

        Every rank knows all sizes, so all ranks run the same number of rounds. The caller uses
        `banks` - 1 times as much memory of its own.
        """
        most = max(1, SPACE_BYTES // banks // len(inputs) // max(1, inputs[0].itemsize))
        mine = inputs[self._group.rank()]
        for begin in range(0, max(block.size for block in inputs), most):
            pieces = [_piece(block, begin, most) for block in inputs]
            own = _piece(mine, begin, most)
            sources = [own.empty_like() for _ in inputs]
            self._exchange(call, sources, pieces, pieces)
            yield pieces, sources

    def _exchange(
        self, call: CallRecord, outputs: Sequence[Array], inputs: Sequence[Array],
        pieces: Sequence[Array],
    ) -> None:  # fmt: skip
        even = all(piece.size == pieces[0].size for piece in pieces)
        self._group.run_all_to_all(self._part_of(call), outputs, inputs, even)

    def _prefixes(self, sources: Sequence[Array]) -> Iterator[Elements]:
        """Yield the first contribution, then the result of folding in each further one."""
        folded = self._elements(sources[0])
        yield folded
        for source in sources[1:]:
            folded = self._apply(folded, self._elements(source))
            yield folded

    def _fold_all(self, sources: Sequence[Array]) -> Elements:
        """Return all contributions folded; intermediate results are not kept."""
        (total,) = deque(self._prefixes(sources), maxlen=1)
        return total

    def _apply(self, low: Elements, high: Elements) -> Elements:
        import numpy as np

        if low.size == 0:
            return low
        try:
            folded = np.asarray(self._op.function(low, high))
        except UnsupportedError as error:  # on this rank alone it would leave the group usable
            raise DistBackendError(f"{self._where}: the function raised: {error}") from error
        if folded.shape != low.shape or not np.can_cast(folded.dtype, low.dtype, "same_kind"):
            raise TypeError(
                f"{self._where}: {self._op}: the function was given two arrays {low.shape} of "
                f"{low.dtype} and returned {folded.dtype} {folded.shape}; it must return an array "
                "like them. The group has failed"
            )
        # Without a copy if it is an array already.
        return folded.astype(low.dtype, copy=False)

    def _elements(self, array: Array) -> Elements:
        import numpy as np

        return np.asarray(memoryview(array)).view(self._dtype)

    def _write(self, array: Array, folded: Elements) -> None:
        self._elements(array)[...] = folded


def _piece(block: Array, begin: int, most: int) -> Array:
    begin = min(begin, block.size)
    count = min(most, block.size - begin)
    return block.split([begin, count, block.size - begin - count])[1]
