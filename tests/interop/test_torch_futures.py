"""Work.get_future on tensors: torch's own Future, which DDP's communication hooks must return."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

import cydist as dist
from cydist.testing import run_threads


def test_methods_of_torchs_class() -> None:
    """wait, value and then; the value is the list that torch's own has."""

    def body(rank: int) -> None:
        x = torch.full((3,), rank + 1.0)
        future = dist.all_reduce(x, async_op=True).get_future()
        assert isinstance(future, torch._C.Future)
        halved = future.then(lambda done: done.value()[0] / 2)
        assert future.wait()[0] is x
        assert halved.wait().tolist() == [1.5] * 3
        both = torch.futures.collect_all([future, halved]).wait()
        assert len(both) == 2

    run_threads(body, 2)


def test_lists_of_tensors() -> None:
    """The result of all_gather, as torch's."""

    def body(rank: int) -> None:
        into = [torch.zeros(2) for _ in range(2)]
        future = dist.all_gather(into, torch.full((2,), float(rank)), async_op=True).get_future()
        assert torch.equal(torch.stack(future.wait()), torch.tensor([[0.0, 0], [1, 1]]))

    run_threads(body, 2)


def test_a_failed_call() -> None:
    """wait raises a RuntimeError with the text, and so does what follows."""

    def body(rank: int) -> None:
        if rank == 0:
            return
        work = dist.all_reduce(torch.ones(2), async_op=True, timeout=0.2)
        future = work.get_future()
        following = future.then(lambda done: done.value())
        for each in (future, following):
            with pytest.raises(RuntimeError, match="timeout"):
                each.wait()

    run_threads(body, 2)


def test_await_still_gives_the_arrays() -> None:
    """asyncio waits for the call on tensors as on other arrays."""
    import asyncio

    def body(rank: int) -> None:
        async def main() -> None:
            x = torch.full((3,), rank + 1.0)
            assert (await dist.all_reduce(x, async_op=True))[0] is x
            assert x.tolist() == [3.0] * 3

        asyncio.run(main())

    run_threads(body, 2)


HOOK = """
import torch, torch.distributed as td
import cydist as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("tcp", torch=True)
rank = dist.get_rank()
torch.manual_seed(0)
model = torch.nn.Linear(4, 2)
ddp, own = DistributedDataParallel(model), torch.nn.Linear(4, 2)
own.load_state_dict(model.state_dict())
calls = []
def hook(state, bucket):
    calls.append(bucket.index())
    work = dist.all_reduce(bucket.buffer().div_(2), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])
ddp.register_comm_hook(None, hook)
x = torch.arange(8.0).reshape(2, 4)
ddp(x[rank:rank + 1]).sum().backward()
own(x).sum().div(2).backward()
assert calls and torch.allclose(model.weight.grad, own.weight.grad), (model.weight, own.weight)
print("same gradients")
dist.destroy_process_group()
"""


def test_a_communication_hook(tmp_path: Path) -> None:
    """A hook of torch's DDP that reduces by cydist gives DDP's gradients."""
    (tmp_path / "hook.py").write_text(HOOK)
    ended = subprocess.run(
        [sys.executable, "-m", "cydist.run", "--nproc-per-node", "2", str(tmp_path / "hook.py")],
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert ended.stdout.count("same gradients") == 2
