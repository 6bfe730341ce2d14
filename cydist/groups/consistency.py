"""Compare derived collectives before they run, so that no rank mistakes one message for another."""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

from cydist import _native
from cydist.errors import DistError, MismatchError, disagreement
from cydist.reduce_ops import Op, op_name

if TYPE_CHECKING:
    from cydist._native import Array, CallRecord
    from cydist.groups.process_group import ProcessGroup

TEXT_BYTES = 188
PAIR = struct.Struct(f"<i{TEXT_BYTES}si{TEXT_BYTES}s")  # a rank, its call; another rank, its call
NO_RANK = -1

Known = list[tuple[int, bytes]]

# What must be equal on all ranks: the collective, its count or shape, its dtype, and all else.
Fields = list[str]


def check_consistency(
    group: ProcessGroup,
    call: CallRecord,
    collective: str,
    array: Array | None = None,
    *,
    typed: Array | None = None,
    op: Op | None = None,
    root: int | None = None,
    sizes: Sequence[int] = (),
) -> None:
    """Check that all ranks make the same call. Acts as a barrier.

    Args:
        array: An array with the same size and dtype on every rank.
        typed: An array with the same dtype on every rank; its size may differ.
        sizes: Sizes of the blocks, if every rank knows all of them.

    Collectives inside a derived collective are part of it, and are not compared again. After k of
    log2 p rounds a rank knows whether any of the 2**k ranks below it is in a different call. Raises
    MismatchError on every rank.
    """
    if call.agreed or group.size() == 1:
        return
    call.agreed = True
    what: tuple[object, ...] = () if typed is None else (typed.dtype_name,)
    if array is not None:
        what = (sum(sizes) or array.size, array.dtype_name)
    text = describe(f"{collective} #{call.seq}", what, "" if op is None else op_name(op), root)
    if len(set(sizes)) > 1:
        text += f", sizes of blocks hash to {zlib.crc32(repr(list(sizes)).encode()):#x}"
    if call.sizes:
        text += f", sizes of coalesced arrays hash to {call.sizes:#x}"
    known: Known = [(group.rank(), _fitted(text.encode()))]
    distance = 1
    while distance < group.size():
        _merge(known, _exchange_findings(group, call, known, distance))
        distance *= 2
    if len(known) > 1:
        rank, theirs = known[1]
        here, there = describe_difference(text, theirs.decode("utf-8", "replace"))
        raise MismatchError(
            f"{call.name} #{call.seq} on {group.title}: "
            f"{disagreement([here, there])}. This rank ({group.ranks[group.rank()]}): {here}. "
            f"Rank {group.ranks[rank]}: {there}",
            op=call.name,
            seq=call.seq,
            group=group.group_name,
            ranks=(group.ranks[rank],),
        )


def name_call_in(error: DistError, call: CallRecord) -> None:
    """Let the error of a message name the call of which that is a part."""
    head = f"{error.op} on "
    if error.seq is None and error.op in ("send", "recv") and str(error).startswith(head):
        error.op, error.seq = call.name, call.seq
        rest = error.args[0].removeprefix(head)
        error.args = (f"{call.name} #{call.seq} on {rest}", *error.args[1:])


def describe(
    name: str, what: tuple[object, ...] = (), op: str = "", root: int | None = None
) -> str:
    """Return the text of a call that ranks compare, byte for byte.

        >>> describe("reduce", (4, "float32"), "SUM", 0)
        'reduce of 4 float32, op SUM, root 0'

    Args:
        what: Words on the data that must be equal on all ranks, such as a count and a dtype.
    """
    text = f"{name} of {' '.join(map(str, what))}" if what else name
    if op:
        text += f", op {op}"
    return text if root is None else f"{text}, root {root}"


def describe_difference(ours: str, theirs: str) -> tuple[str, str]:
    """Describe two calls that differ. If they are the same collective, name only the fields that
    differ."""
    here, there = describe_differences([_fields(ours), _fields(theirs)])
    return here, there


def describe_differences(calls: Sequence[Fields]) -> list[str]:
    """Describe calls as `describe_difference`; equal ones are described in full."""
    if any(call[0] != calls[0][0] for call in calls) or all(call == calls[0] for call in calls):
        return [_shown_fields(call, []) for call in calls]
    return [_shown_fields(call, calls) for call in calls]


def _fields(text: str) -> Fields:
    """Return the fields of a call that `describe` has described."""
    size, *rest = text.split(", ")
    call, _, what = size.partition(" of ")
    count, _, dtype = what.rpartition(" ")
    return [call, count, dtype, *rest]


def _shown_fields(call: Fields, others: Sequence[Fields]) -> str:
    """Describe a call by the fields that are not equal in all others; all fields if there are no
    others."""
    what = [
        call[field]
        for field in (1, 2)
        if call[field] and not (others and all(call[field] == other[field] for other in others))
    ]
    if what == [call[1]] and what[0].isdigit():
        what.append("element" if what == ["1"] else "elements")
    words = [f"{call[0]} of {' '.join(what)}" if what else call[0]]
    rest = [each for each in call[3:] if not (others and all(each in other for other in others))]
    return ", ".join(words + rest)


def _fitted(text: bytes) -> bytes:
    """Return each text, cut to at most TEXT_BYTES."""
    if len(text) <= TEXT_BYTES:
        return text
    mark = f"... {zlib.crc32(text):08x}".encode()
    return text[: TEXT_BYTES - len(mark)] + mark


def _exchange_findings(group: ProcessGroup, call: CallRecord, known: Known, distance: int) -> Known:
    """Send this rank's findings to the rank `distance` above, and return those of the rank
    `distance` below."""
    out, into = _native.empty(PAIR.size), _native.empty(PAIR.size)
    second = known[1] if len(known) > 1 else (NO_RANK, b"")
    memoryview(out)[:] = PAIR.pack(*known[0], *second)
    above = (group.rank() + distance) % group.size()
    below = (group.rank() - distance) % group.size()
    group.exchange_arrays(call, [(out, above)], [(into, below)])
    first, its_call, other, other_call = PAIR.unpack(memoryview(into))
    return [
        (rank, text.rstrip(b"\0"))
        for rank, text in ((first, its_call), (other, other_call))
        if 0 <= rank < group.size()
    ]


def _merge(known: Known, heard: Known) -> None:
    known += [pair for pair in heard if pair[1] != known[0][1]][: 2 - len(known)]
