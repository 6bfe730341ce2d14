"""What programs ask about backends and operations, under torch's names."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import numpy as np
import pytest

import cydist as dist
from cydist.groups import registry
from cydist.testing import run_threads

R = dist.ReduceOp


def test_tables_list_what_is_registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """As soon as it is."""
    monkeypatch.setattr(registry, "_plugins", dict(registry._plugins))
    monkeypatch.setattr(dist.Backend, "PIGEON", None, raising=False)
    dist.register_backend("pigeon", lambda *_: None, devices="cpu")
    assert dist.Backend.backend_list[0] == "undefined"
    assert {"tcp", "gloo", "mpi", "nccl", "pigeon"} < set(dist.Backend.backend_list)
    assert dist.Backend.backend_capability["pigeon"] == ["cpu"]
    assert dist.Backend.backend_capability["nccl"] == ["cuda"]


@pytest.mark.parametrize("name", ["UCC", "XCCL", "FAKE"])
def test_torchs_other_names_are_names_alone(name: str) -> None:
    """They can be compared; no group is made of them."""
    assert dist.Backend(name) == getattr(dist.Backend, name)
    assert not dist.is_backend_available(name)


@pytest.mark.parametrize("ask", [dist.is_ucc_available, dist.is_xccl_available])
def test_what_cydist_has_not_is_not_available(ask: Any) -> None:
    assert ask() is False


class Device:
    """What torch.device("cuda:1") looks like."""

    type = "cuda"


@pytest.mark.parametrize(
    ("device", "backend"),
    [("cpu", "tcp"), ("cuda", "nccl"), ("cuda:1", "nccl"), (Device(), "nccl")],
)
def test_default_backend_of_a_device(device: object, backend: str) -> None:
    assert dist.get_default_backend_for_device(device) == backend


def test_other_devices_have_none() -> None:
    with pytest.raises(ValueError, match="no backend serves 'xpu' by default; there are cpu, cuda"):
        dist.get_default_backend_for_device("xpu")


def test_backend_config_of_a_group() -> None:
    """Each kind of memory with its backend, in the form that init_process_group takes."""
    assert run_threads(lambda rank: dist.get_backend_config(), 2) == ["cpu:inproc,cuda:inproc"] * 2


@pytest.mark.parametrize(
    "op",
    [R.SUM, R.PRODUCT, R.MIN, R.MAX, R.BAND, R.BOR, R.BXOR, R.AVG, R.PREMUL_SUM(2.0)],
    ids=str,
)
def test_supports_complex_is_true_of_calls(op: Any) -> None:
    """It says what an all_reduce does."""

    def works(rank: int) -> bool:
        try:
            dist.all_reduce(np.ones(1, complex), op)
        except TypeError:
            return False
        return True

    assert run_threads(works, 1) == [dist.supports_complex(op)]


@pytest.mark.parametrize(
    ("op", "expected"), [(R.PREMUL_SUM, True), (R.MAXLOC, False), (R.create(np.add), True)], ids=str
)
def test_supports_complex_of_other_operations(op: Any, expected: bool) -> None:
    assert dist.supports_complex(op) is expected


def test_default_timeout() -> None:
    """It is what a group gets that asks for none."""
    assert dist.default_pg_timeout == timedelta(minutes=30)


@pytest.mark.parametrize("spec", ["gloo", "cpu:gloo,cuda:nccl"])
def test_backend_config(spec: str) -> None:
    """Devices and backends, as torch's class gives them."""
    torch = pytest.importorskip("torch.distributed")
    ours, theirs = dist.BackendConfig(spec), torch.BackendConfig(torch.Backend(spec))
    for device in ("cpu", "cuda"):
        assert ours.get_device_backend_map()[device] == theirs.get_device_backend_map()[device]
    assert repr(ours).split(",")[0] == repr(theirs).split(",")[0]


def test_backend_config_of_nothing() -> None:
    with pytest.raises(ValueError, match="no backend is called 'pigeon'"):
        dist.BackendConfig("pigeon")


def test_torchs_former_names() -> None:
    """_all_gather_base and _reduce_scatter_base are the calls on one array."""

    def body(rank: int) -> None:
        whole, part = np.zeros(4), np.zeros(1)
        dist._all_gather_base(whole, np.full(2, rank + 1.0))
        assert whole.tolist() == [1, 1, 2, 2]
        dist._reduce_scatter_base(part, np.array([1.0, 5.0]))
        assert part == (2, 10)[rank]

    run_threads(body, 2)
