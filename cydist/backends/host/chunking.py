"""Strided arrays in calls on one array of equal size on all ranks.

Such an array is packed. A long one would need a large copy, so all ranks run the call in chunks,
each through the same few MiB. A rank does not know the layout of the others' arrays, so the ranks
first agree on whether to do so.
"""

from __future__ import annotations

import array as arrays
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from cydist import _native
from cydist._native import FLAG_BITS
from cydist.reduce_ops import Op, RedOpType, op_and_factor
from cydist.tuning import table as tuning_table

if TYPE_CHECKING:
    from cydist._native import Array, CallRecord
    from cydist.backends.host.group import HostGroup

WHOLE_BYTES = (
    16 << 20
)  # bytes up to which an array is packed as one; a power of two, see tuning_table.choose
CHUNK_BYTES = 4 << 20  # of a piece
# Fingerprint.flags in abi.pxd
EVEN, CHUNK = FLAG_BITS["EVEN"], FLAG_BITS["CHUNK"]
PRELIMINARY, JOINED = FLAG_BITS["PRELIMINARY"], FLAG_BITS["JOINED"]


def chunks(
    group: HostGroup,
    call: CallRecord,
    name: str,
    array: Array,
    *,
    op: Op | None = None,
    root: int = -1,
    reads: bool = True,
    writes: bool = True,
) -> Iterator[Array]:
    """Yield the array or, if any rank's array has gaps, contiguous pieces of it one after the
    other. The caller runs each as a collective. A piece is written back when the next one is
    requested.

    Args:
        name, op, root: Of the collective, for errors.
        reads, writes: Whether the call reads, and writes, the array here.
    """
    if array.nbytes <= WHOLE_BYTES:
        each = array.size or 1
    elif true_on_all_ranks(group, call, array.contiguous, (name, array, _code(op)), root):
        yield array
        return
    else:
        each = CHUNK_BYTES // array.itemsize or 1
    if array.contiguous and each >= array.size:
        yield array
        return
    slot = None if array.contiguous else _native.empty(each, array)
    for start in range(0, array.size, each):
        count = min(each, array.size - start)
        if start:
            call.seq = group.next_seq()
        if slot is None:
            yield array.split([start, count, array.size - start - count])[1]
            continue
        piece = slot.split([count, each - count])[0]
        if reads:
            _native.pack_part(piece, array, start)
        yield piece
        if writes:
            _native.unpack_part(array, piece, start)


def true_on_all_ranks(
    group: HostGroup,
    call: CallRecord,
    here: bool,
    about: tuple[str, Array, int] | None = None,
    root: int = -1,
) -> bool:
    """Return whether `here` is true on all ranks.

    This is itself a collective, made before the call's own, and consumes a sequence number.

    Args:
        about, root: The call that ranks must agree on, as Group.run takes it; None: any call, as
            when ranks ask how MPI serves the group.
    """
    bits = _native.asarray(arrays.array("B", [here]))
    with group.failures(call.name, call.seq, call.deadline, call.began):
        group.native.run(
            "all_reduce", [bits], [bits],
            algorithm=b"flat" if group.open_windows(call) else b"doubling",
            deadline_ns=call.deadline_ns,
            seq=call.seq,
            op=int(RedOpType.BAND),
            count=about[1].size if about else 0,
            root=root,
            flags=EVEN | PRELIMINARY,
            segment_bytes=tuning_table.segment_bytes(),
            about=about,
        )  # fmt: skip
    call.seq = group.next_seq()
    return memoryview(bits)[0] != 0


def _code(op: Op | None) -> int:
    return 0 if op is None else int(op_and_factor(op)[0])


def adjacent(arrays: Sequence[Array]) -> bool:
    """Return whether each array begins where the previous one ends. Empty arrays may be
    anywhere."""
    end = arrays[0].address if arrays else 0
    for each in arrays:
        if each.address != end and each.nbytes:
            return False
        end += each.nbytes
    return True
