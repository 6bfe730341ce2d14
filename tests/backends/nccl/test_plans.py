"""Plans on paper: those of all ranks fit together, whatever runs them."""

from __future__ import annotations

import itertools
from collections import defaultdict

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cydist._native import ITEMSIZES
from cydist.backends.nccl import plans
from cydist.backends.nccl.plans import LocalKernel, Plan, Transfer
from cydist.backends.nccl.reductions import ONES, TYPES, reduction
from cydist.reduce_ops import RedOpType
from cydist.testing import oracle

# Of cuda's ncclDataType_t and ncclRedOp_t in nccl.h: what the numbers mean on the wire.
NCCL_TYPES = {
    "ncclInt8": 0, "ncclUint8": 1, "ncclInt32": 2, "ncclUint32": 3, "ncclInt64": 4,
    "ncclUint64": 5, "ncclFloat16": 6, "ncclFloat32": 7, "ncclFloat64": 8, "ncclBfloat16": 9,
    "ncclFloat8e4m3": 10, "ncclFloat8e5m2": 11,
}  # fmt: skip
BYTES = {0: 1, 1: 1, 2: 4, 3: 4, 4: 8, 5: 8, 6: 2, 7: 4, 8: 8, 9: 2, 10: 1, 11: 1}

Arrays = dict[int, int]  # bytes of each array of a call


def test_types_are_numbered_as_in_nccl() -> None:
    """Every dtype's number is that of nccl.h."""
    spelled = {"float8_e4m3fn": "Float8e4m3", "float8_e5m2": "Float8e5m2"}
    ours = {f"nccl{spelled.get(name, name.capitalize())}": code for name, code in TYPES.items()}
    assert ours == NCCL_TYPES


def test_types_have_the_size_of_their_dtypes() -> None:
    """NCCL moves as many bytes for an element as the array has."""
    assert {TYPES[name]: ITEMSIZES[name] for name in TYPES} == BYTES
    assert {name: len(one) for name, one in ONES.items()} == {
        name: ITEMSIZES[name] for name in TYPES
    }
    assert {name: dtype.itemsize for name, dtype in oracle.DTYPES.items()} == ITEMSIZES


@pytest.mark.parametrize("kind", list(RedOpType), ids=lambda kind: kind.name)
def test_every_reduction_of_every_dtype_has_a_way(kind: RedOpType) -> None:
    """What is done is of NCCL's types, or combined here."""
    for name, dtype in oracle.DTYPES.items():
        if oracle.makes_sense(kind.name, dtype) and not (
            kind is RedOpType.PREMUL_SUM and name == "bool"
        ):
            how = reduction(kind, name)
            assert how.op is None or how.dtype in TYPES
            widened = bool(how.wide)
            assert ITEMSIZES[name] == ITEMSIZES[how.dtype] * how.width or widened


def check(all_plans: list[Plan], arrays: list[Arrays]) -> None:
    """Every send has its receive, in one order; all ranks make the same collective calls, in the
    same phases; nothing leaves its array; no call of a phase writes what another one touches."""
    ranks = range(len(all_plans))
    phases = [[p for p in plan.phases if not isinstance(p, LocalKernel)] for plan in all_plans]
    for together in itertools.zip_longest(*phases, fillvalue=()):
        sent, received = defaultdict(list), defaultdict(list)
        for rank, transfers in zip(ranks, together, strict=True):
            for each in transfers:
                if each.kind == "send":
                    sent[rank, each.peer].append(each.elements * BYTES[each.type_code])
                elif each.kind == "recv":
                    received[each.peer, rank].append(each.elements * BYTES[each.type_code])
        assert sent == received
        collective = [
            [
                (t.kind, t.elements, t.type_code, t.op, t.peer)
                for t in transfers
                if t.kind not in ("send", "recv")
            ]
            for transfers in together
        ]
        assert all(calls == collective[0] for calls in collective)
    for rank, plan in zip(ranks, all_plans, strict=True):
        room = dict(arrays[rank]) | {-1 - k: n for k, n in enumerate(plan.scratch)}
        for phase in plan.phases:
            touched = (
                local(phase)
                if isinstance(phase, LocalKernel)
                else moved(phase, rank, len(all_plans))
            )
            for array, start, end, *_ in touched:
                assert 0 <= start <= end <= room[array], (phase, room)
            if not isinstance(phase, LocalKernel):
                apart(touched)


def local(step: LocalKernel) -> list[tuple[int, int, int, bool]]:
    nbytes = step.elements * ITEMSIZES[step.dtype]
    source = step.elements * ITEMSIZES[step.source_dtype or step.dtype]
    return [(step.into.array, step.into.start, step.into.start + nbytes, True)] + [
        (span.array, span.start, span.start + source, False) for span in step.sources
    ]


def moved(phase: tuple[Transfer, ...], rank: int, p: int) -> list:
    touched = []
    for call, each in enumerate(phase):
        nbytes = each.elements * BYTES[each.type_code]
        reads = nbytes * (p if each.kind == "reduce_scatter" else 1)
        writes = nbytes * (p if each.kind == "all_gather" else 1)
        root = each.peer == rank
        if each.send is not None and (each.kind != "broadcast" or root):
            touched.append((each.send.array, each.send.start, each.send.start + reads, False, call))
        if each.recv is not None and (each.kind != "reduce" or root):
            touched.append((each.recv.array, each.recv.start, each.recv.start + writes, True, call))
    return touched


def apart(touched: list) -> None:
    for (a, s, e, w, c), (b, t, f, v, d) in itertools.combinations(touched, 2):
        assert c == d or a != b or not (w or v) or e <= t or f <= s, touched


RANKS = st.integers(1, 8)


@given(st.data(), RANKS)
def test_plans_that_move_fit_together(data: st.DataObject, p: int) -> None:
    """broadcast, all_gather, gather, scatter, all_to_all."""
    sizes = tuple(data.draw(st.lists(st.integers(0, 9), min_size=p, max_size=p)))
    if data.draw(st.booleans()):
        sizes = (sizes[0],) * p
    root = data.draw(st.integers(0, p - 1))
    adjacent = data.draw(st.booleans())
    ranks = range(p)
    check([plans.broadcast(sizes[0], root)] * p, [{0: sizes[0]}] * p)
    outputs = {1 + r: n for r, n in enumerate(sizes)}
    if adjacent and len(set(sizes)) == 1:
        outputs[1] = sum(sizes)
    check(
        [plans.all_gather(r, sizes, adjacent) for r in ranks],
        [outputs | {0: sizes[r]} for r in ranks],
    )
    for make in (plans.gather, plans.scatter):
        check(
            [make(r, sizes if r == root else (), sizes[r], root, adjacent) for r in ranks],
            [{0: sizes[r]} | {1 + i: n for i, n in enumerate(sizes)} for r in ranks],
        )
    table = [data.draw(st.lists(st.integers(0, 5), min_size=p, max_size=p)) for _ in ranks]
    taken = [tuple(table[s][r] for s in ranks) for r in ranks]
    check(
        [plans.all_to_all(taken[r], tuple(table[r])) for r in ranks],
        [dict(enumerate(taken[r])) | {p + i: n for i, n in enumerate(table[r])} for r in ranks],
    )


@given(st.data(), RANKS, st.sampled_from(sorted(oracle.DTYPES)), st.sampled_from(list(RedOpType)))
def test_plans_that_reduce_fit_together(
    data: st.DataObject, p: int, name: str, kind: RedOpType
) -> None:
    """all_reduce, reduce, reduce_scatter, of every dtype and operation."""
    if not oracle.makes_sense(kind.name, oracle.DTYPES[name]) or (
        name == "bool" and kind is RedOpType.PREMUL_SUM
    ):
        return
    how = reduction(kind, name, p == 1 and data.draw(st.booleans()))
    size = ITEMSIZES[name]
    ranks = range(p)
    counts = tuple(data.draw(st.lists(st.integers(0, 9), min_size=p, max_size=p)))
    if data.draw(st.booleans()):
        counts = (counts[0],) * p
    root = data.draw(st.integers(0, p - 1))
    adjacent = data.draw(st.booleans()) and len(set(counts)) == 1
    whole = [{0: counts[0] * size}] * p
    check([plans.all_reduce(r, p, counts[0], how) for r in ranks], whole)
    check([plans.reduce(r, p, counts[0], root, how) for r in ranks], whole)
    inputs = {1 + r: n * size for r, n in enumerate(counts)}
    if adjacent:
        inputs[1] = sum(counts) * size
    check(
        [plans.reduce_scatter(r, counts, how, adjacent) for r in ranks],
        [inputs | {0: counts[r] * size} for r in ranks],
    )
