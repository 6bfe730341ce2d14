"""all_reduce of torch's sparse COO tensors, such as the gradients of an embedding."""

from __future__ import annotations

from typing import Any

import pytest

import cydist as dist
from cydist.testing import run_threads

torch = pytest.importorskip("torch")


def sparse(rank: int) -> Any:
    """Rank r has r + 1 at index r, and 10 at index 3."""
    return torch.sparse_coo_tensor(
        [[rank, 3]], [rank + 1.0, 10.0], (4,), check_invariants=True
    ).coalesce()


@pytest.mark.parametrize("async_op", [False, True], ids=["blocking", "async"])
@pytest.mark.parametrize("backend", ["inproc", "tcp"])
def test_sum(async_op: bool, backend: str) -> None:
    """Every rank gets the elements of all."""

    def body(rank: int) -> list[float]:
        x = sparse(rank)
        work = dist.all_reduce(x, async_op=async_op)
        assert (work is not None) is async_op
        if work is not None:
            assert work.wait()
            assert work.result()[0] is x
        return x.to_dense().tolist()  # type: ignore[no-any-return]

    assert run_threads(body, 2, backend) == [[1.0, 2.0, 0.0, 20.0]] * 2


def test_torchs_operation() -> None:
    """torch's SUM is taken, too."""

    def body(rank: int) -> float:
        x = sparse(rank)
        dist.all_reduce(x, torch.distributed.ReduceOp.SUM)
        return float(x.to_dense()[3])

    assert run_threads(body, 2) == [20.0, 20.0]


def test_other_reductions_are_refused() -> None:
    """Before any traffic: the group stays usable."""

    def body(rank: int) -> float:
        x = sparse(rank)
        with pytest.raises(ValueError, match="SUM only, not MAX"):
            dist.all_reduce(x, dist.ReduceOp.MAX)
        dist.all_reduce(x)
        return float(x.to_dense()[3])

    assert run_threads(body, 2) == [20.0, 20.0]


def test_tensors_of_other_shapes_are_a_mismatch() -> None:
    """On every rank."""

    def body(rank: int) -> None:
        x = torch.sparse_coo_tensor([[0]], [1.0], (4 + rank,), check_invariants=True)
        with pytest.raises(dist.MismatchError, match="the ranks have different ones"):
            dist.all_reduce(x)

    run_threads(body, 2)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_compressed_tensors_are_refused() -> None:
    """They have another layout than COO."""

    def body(rank: int) -> None:
        with pytest.raises(TypeError, match="no plain layout"):
            dist.all_reduce(torch.eye(2).to_sparse_csr())

    run_threads(body, 1)
