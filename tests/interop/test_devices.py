"""cydist.interop.torch with the memory of a GPU: through the host, where torch left it to us.

The GPU is a stand-in (tests/support/fake_gpu_delayed.py), whose arrays have as much of a tensor as
groups ask.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

import cydist

torch = pytest.importorskip("torch")
import torch.distributed as dist  # noqa: E402
from fake_gpu_delayed import LateArray, LateDevice, install  # noqa: E402
from torch.distributed import distributed_c10d as c10d  # noqa: E402

if TYPE_CHECKING:
    from torch_thread_job import Job

COUNT = 600  # elements of 4 bytes: several chunks of the stand-in's


class Tensor(LateArray):
    """An array on the stand-in that says of itself what groups ask of tensors."""

    layout = torch.strided


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> LateDevice:
    made = install(monkeypatch, "late", 1 << 10)
    monkeypatch.setattr(made, "kind", Tensor, raising=False)
    return made


def values(rank: int, blocks: int = 1) -> np.ndarray:
    return np.arange(blocks * COUNT, dtype=np.int32) * (rank + 1)


def blocking(options: Any) -> Any:
    options.asyncOp = False
    return options


CALLS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "allreduce": lambda g, x, _: g.allreduce([x]),
    "allreduce, blocking": lambda g, x, _: g.allreduce([x], blocking(dist.AllreduceOptions())),
    "broadcast": lambda g, x, _: g.broadcast([x], 1),
    "all_gather_single": lambda g, x, y: g.all_gather_single(y, x),
    "reduce_scatter_single": lambda g, x, y: g.reduce_scatter_single(x, y),
    "messages": lambda g, x, _: g.send([x], 0) if g.rank() else g.recv([x], 1),
}
WANTED: dict[str, Callable[[int], tuple[np.ndarray, np.ndarray]]] = {
    "allreduce": lambda _: (values(0) + values(1), values(0, 2)),
    "allreduce, blocking": lambda _: (values(0) + values(1), values(0, 2)),
    "broadcast": lambda _: (values(1), values(0, 2)),
    "all_gather_single": lambda rank: (values(rank), np.concatenate([values(0), values(1)])),
    "reduce_scatter_single": lambda rank: (
        2 * values(0, 2)[rank * COUNT :][:COUNT], values(0, 2)
    ),
    "messages": lambda _: (values(1), values(0, 2)),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
def test_calls(name: str, device: LateDevice, pair: Job) -> None:
    """A call on a GPU's tensors gives what it gives on the CPU's."""

    def body(group: Any) -> None:
        rank = group.rank()
        x, y = device.array(values(rank), rank), device.array(values(0, 2), rank)
        CALLS[name](group, x, y).wait()
        for found, wanted in zip((x, y), WANTED[name](rank), strict=True):
            assert np.array_equal(found.get(), wanted)

    pair.run(body)


@pytest.mark.parametrize(
    ("config", "devices"),
    [
        ("cpu:cydist,cuda:cydist", ["cpu", "cuda"]),
        ("cpu:cydist,cuda:nccl", ["cpu"]),
        ("cpu:cydist", ["cpu"]),
    ],
)
def test_only_what_torch_gave_to_cydist(
    config: str, devices: list[str], device: LateDevice, pair: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tensors whose device has another backend in torch's string are refused, not staged."""
    for group in pair.groups:
        monkeypatch.setitem(c10d._world.pg_backend_config, group, config)

    def body(group: Any) -> list[str]:
        x = device.array(values(0), group.rank())
        if "cuda" in devices:
            assert group._get_backend("cuda") is group
            group.allreduce([x]).wait()
        else:
            for call in (lambda: group.allreduce([x]), lambda: group._get_backend("cuda")):
                with pytest.raises(cydist.UnsupportedError, match="takes arrays on cpu, and"):
                    call()
        part = group.split_group([0, 1], group_name="part")
        assert list(part.host.devices) == devices
        return [str(each) for each in group._device_types]

    assert pair.run(body) == [devices] * 2


def test_no_devices_before_torch_has_made_the_group(pair: Job) -> None:
    """torch 2.15 attaches its recorder to a group that names devices, which fails with ours."""
    assert [group._device_types for group in pair.groups] == [[], []]
