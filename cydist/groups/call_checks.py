"""Checks of calls that a user asks for: CYDIST_DEBUG=DETAIL and CYDIST_CHECK_NAN=1.

The members exchange a description of each collective before it runs, in a call of its own. So what
differs is an error on every rank before anything was sent, and the group stays usable. That costs
one more round trip per call. Groups that are made with neither setting have no `CallChecks`.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

from cydist import _native, config
from cydist._native import CallRecord
from cydist.errors import DistError, MismatchError, NonFiniteError, counted, disagreement, listed
from cydist.groups.consistency import Fields, describe_differences
from cydist.groups.nonfinite import first_nonfinite
from cydist.reduce_ops import Op, op_name

if TYPE_CHECKING:
    from cydist._native import Array
    from cydist.groups.process_group import ProcessGroup

FIRST_BYTES = 512  # longer descriptions take a second round
TAG = -1  # of derived collectives
# Frames of these are not the program's: cydist, and what calls the end of a `with` block.
NOT_THE_PROGRAM = (os.path.dirname(os.path.dirname(__file__)) + os.sep, contextlib.__file__)


class CheckedCall(NamedTuple):
    """A call as the checks see it: what is compared, and searched for NaN and infinity.

    Attributes:
        name: "all_reduce".
        op: The reduction; None: the call has none.
        root: A group rank; None: the call has none.
        inputs: The user's arrays that it reads on this rank.
        outputs: Those that it writes here.
        splits: Of all_to_all_single: sizes of the parts for each rank, and from each.
    """

    name: str
    op: Op | None
    root: int | None
    inputs: Sequence[Array]
    outputs: Sequence[Array]
    splits: tuple[Sequence[int], Sequence[int]] | None

    @property
    def arrays(self) -> Sequence[Array]:
        """Return those whose shapes are equal on all ranks, of most calls."""
        return self.inputs or self.outputs


class CallChecks:
    """The checks that a group's calls get.

    Args:
        detail: Compare calls before they run.
        nonfinite: Refuse NaN and infinity in inputs, and report them in outputs.
    """

    def __init__(self, *, detail: bool, nonfinite: bool) -> None:
        self.detail = detail
        self.nonfinite = nonfinite
        # The group's collectives so far. Each has this number without the checks, which make a call
        # of their own before it. Reductions with a user's function are several calls there.
        self.count = 0

    def before(
        self, group: ProcessGroup, call: CheckedCall, timeout: float | timedelta | None
    ) -> None:
        """Check a call that has not begun, together with all members.

        Raises MismatchError if the calls differ, and NonFiniteError if a rank's input has NaN or
        infinity. Both come on every rank, and leave the group usable.
        """
        number = self.count
        bad = _search(call.inputs, "input") if self.nonfinite else None
        arrays = call.arrays
        floats = any(array.dtype_name.startswith(("f", "b", "c", ">")) for array in arrays)
        if not (self.detail or (self.nonfinite and floats)):
            return
        own = _described(call, bad)
        calls = [own] if group.size() == 1 else _exchange(group, call.name, number, own, timeout)
        if self.detail:
            _compare(group, call, number, calls)
        for rank, each in enumerate(calls):
            if each["bad"] is not None:
                raise NonFiniteError(
                    f"{call.name} #{number} on {group.title}: rank "
                    f"{group.ranks[rank]}'s {each['bad']}, in its call at {each['at']}; no lower "
                    "rank has one. Nothing was sent, and the group goes on (CYDIST_CHECK_NAN=1)",
                    op=call.name, seq=number, group=group.group_name, ranks=(group.ranks[rank],),
                )  # fmt: skip

    def after(self, group: ProcessGroup, call: CheckedCall) -> None:
        """Check what a call that has completed left in this rank's outputs. Raises NonFiniteError
        on this rank."""
        bad = _search(call.outputs, "output")
        if bad is not None:
            raise NonFiniteError(
                f"{call.name} on {group.title}: rank {group.ranks[group.rank()]}'s "
                f"{bad}. All inputs were finite, so the call made it, for example by an overflow "
                "of a sum. The group goes on (CYDIST_CHECK_NAN=1)",
                op=call.name, group=group.group_name, ranks=(group.ranks[group.rank()],),
            )  # fmt: skip

    def sent(self, group: ProcessGroup, name: str, array: Array, peer: int) -> None:
        """Check an array that is about to be sent. Raises NonFiniteError on this rank, and fails
        the group, since the receiver waits."""
        bad = _search([array], "array") if self.nonfinite else None
        if bad is None:
            return
        error = NonFiniteError(
            f"{name} on {group.title}: rank {group.ranks[group.rank()]}'s {bad}; it "
            f"was for rank {group.ranks[peer]} and was not sent, so the group has failed "
            "(CYDIST_CHECK_NAN=1)",
            op=name, group=group.group_name, ranks=(group.ranks[group.rank()],),
        )  # fmt: skip
        group.fail(error, name)
        raise error


def checks_asked_for() -> CallChecks | None:
    """Return the checks that the environment asks for; None: none."""
    detail = config.debug_level() == "DETAIL"
    nonfinite = config.CHECK_NAN.is_on()
    return CallChecks(detail=detail, nonfinite=nonfinite) if detail or nonfinite else None


def _search(arrays: Sequence[Array], what: str) -> str | None:
    """Describe the first element that is NaN or infinite."""
    for number, array in enumerate(arrays):
        if (found := first_nonfinite(array)) is not None:
            index, value = found
            which = what if len(arrays) == 1 else f"{what} {number} of {len(arrays)}"
            return f"{which} has {value} at index {index}"
    return None


def _described(call: CheckedCall, bad: str | None) -> dict[str, Any]:
    arrays = call.arrays
    return {
        "call": call.name,
        "dtype": arrays[0].dtype_name if arrays else "",
        "device": arrays[0].device if arrays else "",
        "op": "" if call.op is None else op_name(call.op),
        "root": call.root,
        "in": [array.shape for array in call.inputs],
        "out": [array.shape for array in call.outputs],
        "splits": call.splits and [list(sizes) for sizes in call.splits],
        "bad": bad,
        "at": _place(),
    }


def _place() -> str:
    """Return where the program made the call, "train.py:12"."""
    libraries: tuple[str, ...] = NOT_THE_PROGRAM
    torch = sys.modules.get("torch")
    if torch is not None and torch.__file__:
        libraries += (os.path.dirname(torch.__file__) + os.sep,)
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename.startswith(libraries):
        frame = frame.f_back
    return f"{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}"


def _exchange(
    group: ProcessGroup,
    name: str,
    number: int,
    own: dict[str, Any],
    timeout: float | timedelta | None,
) -> list[dict[str, Any]]:
    """Return all members' descriptions, by group rank. An exception fails the group."""
    import json  # slow to import, and most jobs need none

    host = group.as_host_group()
    text = json.dumps(own).encode()
    parts = [b""] * host.size()

    def body(call: CallRecord) -> None:
        # For a rank that does not compare calls, this is a barrier: it may be in another call.
        host.announce_call(CallRecord("barrier", call.seq, call.deadline))
        first = len(text).to_bytes(8, "little") + text
        heads = _to_all(host, call, first[:FIRST_BYTES], FIRST_BYTES)
        longest = max(int.from_bytes(head[:8], "little") for head in heads) + 8
        tails = [b""] * host.size()
        if longest > FIRST_BYTES:
            tails = _to_all(host, call, first[FIRST_BYTES:], longest - FIRST_BYTES)
        for rank, (head, tail) in enumerate(zip(heads, tails, strict=True)):
            length = int.from_bytes(head[:8], "little")
            parts[rank] = (head[8:] + tail)[:length]

    what = f"comparison before {name}"
    try:
        host.execute(what, body, timeout=timeout)
    except DistError as error:
        # A part of the comparison failed, such as a receive, which the program did not call.
        if error.args and not str(error).startswith(what):
            error.op, error.seq = name, number
            error.args = (f"{what} #{number}: {error.args[0]}", *error.args[1:])
        raise
    return [json.loads(part) for part in parts]


def _to_all(group: ProcessGroup, call: CallRecord, text: bytes, size: int) -> list[bytes]:
    """Send this rank's bytes to all members, padded to `size`; return everybody's."""
    own = _native.empty(size)
    memoryview(own)[:] = text.ljust(size, b"\0")
    peers = [rank for rank in range(group.size()) if rank != group.rank()]
    into = {rank: _native.empty(size) for rank in peers}
    group.exchange_arrays(
        call, [(own, rank) for rank in peers], [(into[rank], rank) for rank in peers]
    )
    return [bytes(memoryview(into.get(rank, own))) for rank in range(group.size())]


def _compare(
    group: ProcessGroup, call: CheckedCall, number: int, calls: list[dict[str, Any]]
) -> None:
    """Raise MismatchError if these calls do not belong together."""
    fields = [_fields(group, each, number) for each in calls]
    if all(_key(each) == _key(calls[0]) for each in calls):
        mismatch = _size_mismatch(group, call.name, calls)
        if mismatch is None:
            return
        why, texts = mismatch, [describe_differences([each])[0] for each in fields]
    else:
        texts = describe_differences(fields)
        why = disagreement(texts)
    alike: dict[str, list[int]] = {}
    for rank, text in enumerate(texts):
        alike.setdefault(text, []).append(group.ranks[rank])
    told = ". ".join(
        f"{listed('Rank', ranks)}: {text} at {calls[group.ranks.index(ranks[0])]['at']}"
        for text, ranks in alike.items()
    )
    others = [group.ranks[rank] for rank, text in enumerate(texts) if text != texts[group.rank()]]
    raise MismatchError(
        f"{call.name} #{number} on {group.title}: {why}. {told}. Nothing was sent, "
        f"and the group goes on ({config.DEBUG.names[0]}=DETAIL)",
        op=call.name, seq=number, group=group.group_name, ranks=tuple(others),
    )  # fmt: skip


# Calls whose arrays may differ in size from rank to rank.
PAIRED = ("gather", "scatter", "all_gather", "all_to_all", "all_to_all_single")


def _key(call: dict[str, Any]) -> tuple[object, ...]:
    """Return what must be equal on all ranks."""
    shapes = None if call["call"] in PAIRED else call["in"] or call["out"]
    if call["call"] == "all_gather_coalesced":
        shapes = call["out"]
    return (*(call[name] for name in ("call", "dtype", "device", "op", "root")), shapes)


def _size_mismatch(group: ProcessGroup, name: str, calls: list[dict[str, Any]]) -> str | None:
    """Describe a block that its sender and its receiver take for two sizes."""
    everyone = range(len(calls))
    for sender in everyone:
        for receiver in everyone:
            gives = _given(name, calls[sender], sender, receiver)
            gets = _expected(name, calls[receiver], sender, receiver)
            if gives is not None and gets is not None and gives != gets:
                return (
                    f"rank {group.ranks[sender]} has {counted(gives, 'element')} for rank "
                    f"{group.ranks[receiver]}, which expects {gets}"
                )
    return None


def _given(name: str, call: dict[str, Any], me: int, receiver: int) -> int | None:
    """Return how many elements rank `me` has for another; None: none."""
    if name in ("gather", "all_gather"):
        return _size(call["in"][0]) if name == "all_gather" or receiver == call["root"] else None
    if name == "all_to_all_single" and call["splits"]:
        return int(call["splits"][0][receiver])
    if name in ("scatter", "all_to_all") and len(call["in"]) > receiver:
        return _size(call["in"][receiver])
    return None


def _expected(name: str, call: dict[str, Any], sender: int, me: int) -> int | None:
    """Return how many elements rank `me` expects of another; None: none."""
    if name == "scatter":
        return _size(call["out"][0]) if sender == call["root"] else None
    if name == "all_to_all_single" and call["splits"]:
        return int(call["splits"][1][sender])
    if name in ("gather", "all_gather", "all_to_all") and len(call["out"]) > sender:
        return _size(call["out"][sender])
    return None


def _size(shape: Sequence[int]) -> int:
    size = 1
    for each in shape:
        size *= each
    return size


def _fields(group: ProcessGroup, call: dict[str, Any], number: int) -> Fields:
    """Return everything that is compared."""
    shapes = [str(tuple(shape)) for shape in call["in"] or call["out"]]
    return [
        f"{call['call']} #{number}",
        f"{', '.join(shapes[:8])}{', ...' if len(shapes) > 8 else ''}",
        f"{call['dtype']} on {call['device']}" if shapes else "",
        *([f"op {call['op']}"] if call["op"] else []),
        *([] if call["root"] is None else [f"root {group.ranks[call['root']]}"]),
    ]
