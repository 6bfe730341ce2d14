"""Values of `op`: isinstance, torch.distributed's own, and the former names."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

import cydist as dist
from cydist.testing import run_threads

R = dist.ReduceOp
NAMES = ["SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "AVG"]


@pytest.fixture(scope="module")
def torch_dist() -> Any:
    return pytest.importorskip("torch").distributed


@pytest.mark.parametrize(
    "op",
    [R.SUM, R.AVG, R.PREMUL_SUM, R.PREMUL_SUM(2), R.MAXLOC, R.create(np.hypot)],
    ids=str,
)
def test_every_operation_is_a_reduce_op(op: object) -> None:
    """As in torch.distributed, where libraries check it."""
    assert isinstance(op, R)


@pytest.mark.parametrize("other", [1, "SUM", None, np.hypot], ids=repr)
def test_nothing_else_is_a_reduce_op(other: object) -> None:
    """A number is none, though operations are numbers."""
    assert not isinstance(other, R)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("made", [False, True], ids=["value", "object"])
def test_torchs_operation_is_the_same(torch_dist: Any, name: str, made: bool) -> None:
    """A value of torch's enumeration, or a ReduceOp made of it."""
    theirs = getattr(torch_dist.ReduceOp, name)
    assert R(torch_dist.ReduceOp(theirs) if made else theirs) is getattr(R, name)


@pytest.mark.parametrize("name", NAMES)
def test_collectives_take_torchs_operation(torch_dist: Any, name: str) -> None:
    """The result is that of cydist's, of every call that reduces."""

    def call(op: Any, rank: int) -> list[list[int]]:
        both = [np.array([rank + 3, 6 - rank]) for _ in range(4)]
        one = np.zeros(1, int)
        dist.all_reduce(both[0], op)
        dist.reduce(both[1], 0, op)
        dist.reduce_scatter_tensor(one, both[2], op)
        dist.all_reduce_coalesced([both[3]], op)
        return [each.tolist() for each in (*both, one)]

    def body(rank: int) -> bool:
        return call(getattr(torch_dist.ReduceOp, name), rank) == call(getattr(R, name), rank)

    assert run_threads(body, 2) == [True, True]


def test_torchs_factor_is_kept(torch_dist: Any) -> None:
    """torch's PREMUL_SUM hides its factor."""
    theirs = torch_dist._make_nccl_premul_sum(0.5)

    def body(rank: int) -> float:
        x = np.array([2.0 + rank])
        dist.all_reduce(x, theirs)
        return float(x[0])

    assert run_threads(body, 2) == [2.5, 2.5]


def test_torchs_premul_sum_needs_its_factor(torch_dist: Any) -> None:
    """As cydist's does."""

    def body(rank: int) -> None:
        with pytest.raises(ValueError, match="needs its factor"):
            dist.all_reduce(np.ones(1), torch_dist.ReduceOp.PREMUL_SUM)

    run_threads(body, 1)


@pytest.mark.parametrize("other", [0, "SUM"], ids=repr)
def test_no_operation_is_made_of_anything_else(other: object) -> None:
    """torch's number of an operation may be another one's here."""
    with pytest.raises(TypeError, match="op must be a ReduceOp"):
        R(other)


def test_batches_take_torchs_functions(torch_dist: Any) -> None:
    """torch.distributed.isend and irecv in a P2POp stand for cydist's."""

    def body(rank: int) -> int:
        theirs = np.zeros(1, int)
        ops = [
            dist.P2POp(torch_dist.isend, np.array([rank]), 1 - rank),
            dist.P2POp(torch_dist.irecv, theirs, 1 - rank),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        return int(theirs[0])

    assert run_threads(body, 2) == [1, 0]


def test_batches_refuse_torchs_other_functions(torch_dist: Any) -> None:
    with pytest.raises(ValueError, match=r"must be cydist\.isend or cydist\.irecv"):
        dist.P2POp(torch_dist.send, np.zeros(1), 0)


def test_torchs_name_of_a_factor() -> None:
    assert dist._make_nccl_premul_sum(3).factor == 3


@pytest.mark.parametrize("name", [*NAMES, "PREMUL_SUM"])
def test_attributes_of_an_operation(torch_dist: Any, name: str) -> None:
    """Its name, and its kind, which prints as torch's."""
    ours, theirs = getattr(R, name), getattr(torch_dist.ReduceOp, name)
    assert ours.name == theirs.name
    assert ours.op is getattr(R.RedOpType, name)
    assert ours.value == ours
    assert f"{ours} {ours!s}" == f"{theirs} {theirs!s}"


def test_the_kind_of_a_factor() -> None:
    assert dist._make_nccl_premul_sum(3).op == R.PREMUL_SUM


@pytest.mark.parametrize("name", NAMES[:-1])
def test_former_name_warns(name: str) -> None:
    """reduce_op.SUM is ReduceOp.SUM, as in the first versions of torch.distributed."""
    with pytest.warns(FutureWarning, match=rf"use ReduceOp\.{name}"):
        assert getattr(dist.reduce_op, name) is getattr(R, name)


def test_former_name_has_no_others() -> None:
    with pytest.raises(AttributeError, match="reduce_op has no 'AVG': use ReduceOp"):
        dist.reduce_op.AVG  # noqa: B018


def test_operations_do_not_load_torch() -> None:
    """Neither does a refused one."""
    program = (
        "import sys, cydist as d\n"
        "try: d.ReduceOp(7)\n"
        "except TypeError: print('torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=50, check=True
    )
    assert done.stdout == "False\n"
