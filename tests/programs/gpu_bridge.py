"""One rank of the step "bridge" of scripts/test-gpu: torch.distributed's backend "cydist" on CUDA
tensors, which go through the host.

Values are whole numbers, and each result is compared bit for bit. A check that fails is a line of
JSON, and the next one runs. With STANDIN the tensors are the CPU's.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from datetime import timedelta
from pathlib import Path
from typing import Any

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import gpu_arrays  # noqa: E402
import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from gpu_arrays import SIDE, check, say  # noqa: E402
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks  # noqa: E402
from torch.nn.parallel import DistributedDataParallel  # noqa: E402

import cydist.interop.torch  # noqa: E402, F401

DEVICE = "cpu" if "STANDIN" in os.environ else "cuda"
SIZES = (0, 1, 1000, 40_001 if DEVICE == "cpu" else 3_000_001)
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool)


def values(rank: int, count: int, dtype: torch.dtype) -> Any:
    return ((torch.arange(count, device=DEVICE) + rank) % 3).to(dtype)


def same(what: object, expected: Any, found: Any) -> None:
    if not torch.equal(expected, found):
        say(str(what), False, expected=str(expected)[:200], found=str(found)[:200])


def late(given: Any) -> Any:
    """A copy that is made after a kernel that takes long: a call must not read it before."""
    slow, made = torch.ones(SIDE, SIDE, device=DEVICE), torch.ones_like(given)
    for _ in range(3):
        slow = slow @ slow * 1e-4
    return made.copy_(given)


def calls(count: int, dtype: torch.dtype, blocking: bool) -> None:
    """Every collective, on what a kernel that takes long makes first."""
    given = [values(r, count, dtype) for r in range(SIZE)]
    total = sum(each.to(torch.int64) for each in given).to(dtype)  # of bool: or
    most = torch.stack([each.to(torch.int64) for each in given]).amax(0).to(dtype)
    whole = torch.cat(given)

    def done(call: Any, *arguments: Any, **options: Any) -> None:
        work = call(*arguments, async_op=not blocking, **options)
        if not blocking:
            work.wait()

    def empty(blocks: int = 1) -> Any:
        return torch.zeros(blocks * count, dtype=dtype, device=DEVICE)

    def shown(what: str, expected: Any, found: Any) -> None:
        same((what, count, dtype, blocking), expected, found)

    done(dist.all_reduce, x := late(given[RANK]))
    shown("all_reduce", total, x)
    done(dist.all_reduce, x := late(given[RANK]), dist.ReduceOp.MAX)
    shown("all_reduce, MAX", most, x)
    done(dist.reduce, x := late(given[RANK]), SIZE - 1)
    if RANK == SIZE - 1:
        shown("reduce", total, x)
    done(dist.broadcast, x := late(given[RANK]), SIZE - 1)
    shown("broadcast", given[-1], x)
    done(dist.all_gather, parts := [empty() for _ in given], late(given[RANK]))
    shown("all_gather", whole, torch.cat(parts))
    done(dist.all_gather_into_tensor, x := empty(SIZE), late(given[RANK]))
    shown("all_gather_into_tensor", whole, x)
    summed = (given[RANK].to(torch.int64) * SIZE).to(dtype)
    done(dist.reduce_scatter_tensor, x := empty(), late(whole))
    shown("reduce_scatter_tensor", summed, x)
    done(dist.reduce_scatter, x := empty(), [late(each) for each in given])
    shown("reduce_scatter", summed, x)
    done(dist.all_to_all_single, x := empty(SIZE), late(whole))
    shown("all_to_all_single", given[RANK].repeat(SIZE), x)
    done(dist.all_to_all, parts := [empty() for _ in given], [late(each) for each in given])
    shown("all_to_all", given[RANK].repeat(SIZE), torch.cat(parts))
    into = [empty() for _ in given] if RANK == 0 else None
    done(dist.gather, late(given[RANK]), into, 0)
    if into is not None:
        shown("gather", whole, torch.cat(into))
    out = [late(each) for each in given] if RANK == 0 else None
    done(dist.scatter, x := empty(), out, 0)
    shown("scatter", given[RANK], x)
    done(dist.barrier)


def messages() -> None:
    sent, taken = values(RANK, 1000, torch.float32), torch.zeros(1000, device=DEVICE)
    work = dist.isend(sent, (RANK + 1) % SIZE)
    dist.recv(taken, (RANK - 1) % SIZE)
    work.wait()
    same("messages", values((RANK - 1) % SIZE, 1000, torch.float32), taken)
    ops = [
        dist.P2POp(dist.isend, sent, (RANK + 1) % SIZE),
        dist.P2POp(dist.irecv, taken.zero_(), (RANK - 1) % SIZE),
    ]
    for each in dist.batch_isend_irecv(ops):
        each.wait()
    same("batch", values((RANK - 1) % SIZE, 1000, torch.float32), taken)


def futures() -> None:
    """A future's callback sees the result, and what it returns is the next future's value."""
    x = values(RANK, 1 << 20, torch.float32)
    expected = sum(values(r, 1 << 20, torch.float32) for r in range(SIZE)) + 1
    work: Any = dist.all_reduce(x, async_op=True)
    found = work.get_future().then(lambda future: future.value()[0] + 1).wait()
    same("futures", expected, found)


def side_stream() -> None:
    """A call behind a kernel on a stream of the program's, and work behind the call."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        slow, x = torch.ones(SIDE, SIDE, device="cuda"), torch.zeros(1 << 22, device="cuda")
        for _ in range(5):
            slow = slow @ slow * 1e-4
        x += RANK + 1
        work: Any = dist.all_reduce(x, async_op=True)
        work.wait()
        y = x * 2
        stream.synchronize()
    same("side stream", torch.full_like(y, SIZE * (SIZE + 1)), y)


def trained(hook: Any) -> None:
    """DistributedDataParallel's gradients are the mean of those that each rank has alone."""
    torch.manual_seed(7)
    width = 64 if DEVICE == "cpu" else 1024
    bare = torch.nn.Sequential(
        torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, 8)
    ).to(DEVICE)
    alone = [copy.deepcopy(bare) for _ in range(SIZE)]
    wrapped = DistributedDataParallel(bare, bucket_cap_mb=1)
    if hook is not None:
        wrapped.register_comm_hook(None, hook)
    rows = [torch.full((8, width), (r + 1) / 4, device=DEVICE) for r in range(SIZE)]
    for step in range(3):
        wrapped.zero_grad()
        wrapped(rows[RANK]).sum().backward()
        for model, each in zip(alone, rows, strict=True):
            model.zero_grad()
            model(each).sum().backward()
        for i, found in enumerate(wrapped.parameters()):
            parts: Any = [list(model.parameters())[i].grad for model in alone]
            mean: Any = sum(part / SIZE for part in parts)
            assert found.grad is not None
            tolerance = 1e-2 if hook is default_hooks.fp16_compress_hook else 0.0
            if not torch.allclose(found.grad, mean, rtol=tolerance, atol=tolerance):
                say(f"DDP, step {step}, parameter {i}", False, hook=str(hook))


def main() -> None:
    gpu_arrays.give_stacks_in_time()
    if DEVICE == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())
        torch.backends.cuda.matmul.allow_tf32 = False
    dist.init_process_group("cydist", timeout=timedelta(seconds=60))
    for count in SIZES:
        for dtype in DTYPES:
            for blocking in (True, False):
                with check(f"{count} of {dtype}, blocking={blocking}"):
                    calls(count, dtype, blocking)
    parts = (
        futures,
        *(() if SIZE == 1 else (messages,)),
        *(() if DEVICE == "cpu" else (side_stream,)),
    )
    for part in parts:
        with check(part.__name__):
            part()
    for hook in (None, default_hooks.allreduce_hook, default_hooks.fp16_compress_hook):
        with check(f"DDP with {hook}"):
            trained(hook)
    dist.destroy_process_group()
    said = {"rank": RANK, "failed": gpu_arrays.failed, "torch": torch.__version__}
    print(json.dumps(said), flush=True)
    sys.exit(bool(gpu_arrays.failed))


if __name__ == "__main__":
    main()
