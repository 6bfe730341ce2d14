"""NVIDIA's binding in the place of cupy's: nccl4py where it is installed, and a stand-in for it.

The stand-in shows what our adapter does with the functions that nccl4py 0.6.0 has.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator
from importlib.metadata import distributions
from types import ModuleType
from typing import Any

import fake_nccl4py
import numpy as np
import pytest

import cydist as dist
from cydist.backends.nccl import create, nccl4py
from cydist.backends.nccl.binding import NcclError
from cydist.testing import run_threads

INSTALLED = ["nccl4py"] if any(distributions(name="nccl4py")) else []


@pytest.fixture(params=["stand-in", *INSTALLED])
def binding(
    request: pytest.FixtureRequest, standin: Any, gpus: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """The binding that CYDIST_NCCL_BINDING=nccl4py chooses."""
    if request.param == "stand-in":
        for name in ("nccl", "nccl.bindings"):
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        made = fake_nccl4py.module(standin.lib)
        monkeypatch.setitem(sys.modules, made.__name__, made)
    monkeypatch.setenv("CYDIST_NCCL_BINDING", "nccl4py")
    create.binding.cache_clear()
    found = create.binding()
    assert found.name == "nccl4py"
    yield found
    create.binding.cache_clear()


@pytest.fixture
def alone(binding: Any, standin: Any, gpus: Any) -> Iterator[Any]:
    """A communicator of one rank, whose calls run at once."""
    standin.use_streams(None)
    comm = binding.init(1, binding.unique_id(), 0)
    yield comm
    comm.abort()
    standin.use_streams(gpus)


def test_every_call(binding: Any, gpus: Any, standin: Any) -> None:
    """Each of NCCL's functions, in groups and by itself, with a root, a factor and a sub-group."""
    standin.log()

    def body(rank: int) -> list[list[float]]:
        def ones() -> Any:
            return gpus.array(np.full(2, rank + 1.0))

        summed, rooted, sent, scaled = ones(), ones(), ones(), ones()
        dist.all_reduce(summed)
        dist.reduce(rooted, 1, dist.ReduceOp.MAX)
        dist.broadcast(sent, 1)
        dist.all_reduce(scaled, dist.ReduceOp.PREMUL_SUM(rank + 1))
        gathered, part, swapped = (gpus.array(np.zeros(n)) for n in (4, 1, 2))
        dist.all_gather_into_tensor(gathered, ones())
        dist.reduce_scatter_tensor(part, ones())
        dist.all_to_all_single(swapped, ones())
        group = dist.new_group([1, 0], sort_ranks=False)
        dist.broadcast(summed, group=group, group_src=0)
        dist.barrier()
        arrays = summed, rooted, sent, scaled, gathered, part, swapped
        return [array.get().tolist() for array in arrays]

    common = [[3.0, 3.0], [2.0, 2.0], [5.0, 5.0], [1.0, 1.0, 2.0, 2.0], [3.0], [1.0, 2.0]]
    first, second = run_threads(body, 2, "nccl")
    assert first.pop(1) == [1.0, 1.0]
    assert second.pop(1) == [2.0, 2.0]
    assert first == second == common
    named = {line.split()[1] for line in standin.log()}
    assert {"group_start", "group_end", "init", "premul_create", "split"} <= named


@pytest.mark.parametrize("installed", ["0.3.1", "0.5.9"])
def test_an_old_nccl4py_is_named(
    binding: Any, monkeypatch: pytest.MonkeyPatch, installed: str
) -> None:
    """UnsupportedError with both versions, and not the TypeError of a call's arguments."""
    monkeypatch.setattr(nccl4py, "version", lambda package: installed)
    with pytest.raises(dist.UnsupportedError, match=rf"0\.6 or later, and {installed} is"):
        nccl4py.Nccl4py()


@pytest.mark.parametrize("installed", ["0.6.0", "0.10", "1.0rc1"])
def test_a_newer_nccl4py_is_taken(
    binding: Any, monkeypatch: pytest.MonkeyPatch, installed: str
) -> None:
    """Versions are compared as numbers."""
    monkeypatch.setattr(nccl4py, "version", lambda package: installed)
    assert nccl4py.Nccl4py().name == "nccl4py"


def test_a_refusal_has_nccls_result(alone: Any, binding: Any) -> None:
    """`as_nccl_error` says so of NCCL's errors, and of no others."""
    x = np.ones(3)
    with pytest.raises(Exception, match=r".") as raised:
        alone.all_reduce(x.ctypes.data, x.ctypes.data, 3, 99, 0, 0)
    found = binding.as_nccl_error(raised.value)
    assert found.status == 4
    assert str(found)
    assert binding.as_nccl_error(ValueError("x")) is None


def test_an_asynchronous_error_is_a_text(alone: Any, standin: Any) -> None:
    """NCCL's word for it; nothing once it has ended."""
    assert alone.async_error() == ""
    standin.lib.standin_fail(ctypes.c_void_p(int(alone._comm)), 6)
    assert "remote process exited" in alone.async_error()
    alone.abort()
    assert alone.async_error() == ""


def test_factors_are_made_and_let_go_of(alone: Any, standin: Any) -> None:
    """As elements of the dtype."""
    x = np.array([1.0, 2.0])
    op = alone.premul(8, np.float64(3).tobytes())
    alone.all_reduce(x.ctypes.data, x.ctypes.data, 2, 8, op, 0)
    assert x.tolist() == [3.0, 6.0]
    standin.log()
    alone.drop_premul(op)
    assert standin.log() == ["0 premul_destroy"]


def test_an_ended_communicator_takes_no_calls(alone: Any, standin: Any) -> None:
    """NCCL is not given the address of what it has freed."""
    x = np.ones(2)
    op = alone.premul(8, np.float64(3).tobytes())
    alone.abort()
    standin.log()
    alone.drop_premul(op)
    with pytest.raises(NcclError, match="was ended meanwhile"):
        alone.premul(8, np.float64(2).tobytes())
    with pytest.raises(NcclError, match="was ended meanwhile"):
        alone.all_reduce(x.ctypes.data, x.ctypes.data, 2, 8, 0, 0)
    assert standin.log() == []


def test_the_end_is_nccls(alone: Any, standin: Any) -> None:
    """Finalized and destroyed, once."""
    standin.log()
    alone.destroy()
    alone.abort()
    assert [line.split()[1] for line in standin.log()] == ["finalize", "destroy"]
