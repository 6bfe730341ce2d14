"""One rank of the step "torch" of scripts/test-gpu: torch's streams, hooks and graphs.

Tensors are torch's alone; with ONLY=torch cupy is not used by cydist either. A check that fails is
a line of JSON, and the next one runs. STANDIN as in gpu.py, without the graphs.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path
from typing import Any

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import gpu_arrays  # noqa: E402
from gpu_arrays import SIDE, Torch, check, give_stacks_in_time, say, share_a_gpu, stand_in  # noqa: E402

import cydist as dist  # noqa: E402

STANDIN = "STANDIN" in os.environ
torch: Any = None


def order() -> None:
    """A call behind a kernel that takes long, on a stream of the program's."""
    slow = torch.ones(SIDE, SIDE, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x = torch.zeros(1 << 20, device="cuda")
        for _ in range(5):
            slow = slow @ slow * 1e-4
        x += 1
        work = dist.all_reduce(x, async_op=True)
        assert work is not None
        work.wait()
        y = x * 1
        side.synchronize()
    say("order", float(y.min()) == float(y.max()) == SIZE)


def dropped() -> None:
    """Tensors of asynchronous calls that the program drops."""
    reused = 0
    for _ in range(50):
        x = torch.ones(1 << 18, device="cuda")
        kept = x.data_ptr()
        work: Any = dist.all_reduce(x, async_op=True)
        work._result = None
        del x
        other = torch.zeros(1 << 18, device="cuda")
        reused += other.data_ptr() == kept and not work.is_completed()
        work.synchronize()
    say("dropped", not reused, reused=reused)


def hooks() -> None:
    """Gradients, reduced during the backward pass."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Linear(64, 1)).cuda()
    works: list[Any] = []
    for each in model.parameters():
        each.register_post_accumulate_grad_hook(
            lambda p: works.append(dist.all_reduce(p.grad, dist.ReduceOp.AVG, async_op=True))
        )
    model(torch.full((8, 64), RANK + 1.0, device="cuda")).sum().backward()
    for work in works:
        work.wait()
    found = model[1].bias.grad.item()
    say("hooks", found == 8.0 and len(works) == 4, found=found)


def captured(mode: str) -> None:
    """Blocking and asynchronous calls in a graph of torch's; is memory given back with it?"""
    x = torch.ones(1 << 20, device="cuda")
    warm = x.clone()
    dist.all_reduce(warm)
    work: Any = dist.all_reduce(warm, async_op=True)
    work.wait()
    torch.cuda.synchronize()
    del warm, work
    gc.collect()
    before = torch.cuda.memory_allocated()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        y = x * 2
        dist.all_reduce(y)
        work = dist.all_reduce(y, async_op=True)
        work.wait()
        z = y + 1
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    say(f"graph {mode}", bool((z == 2 * SIZE * SIZE + 1).all()), first=float(z[0]))
    graph.reset()
    del y, z, work, graph
    gc.collect()
    torch.cuda.synchronize()
    left = torch.cuda.memory_allocated() - before
    say(f"graph {mode} gives its arrays back", left <= 0, bytes_left=left)


def main() -> None:
    global torch
    give_stacks_in_time()
    share_a_gpu()
    stand_in()
    if os.environ.get("ONLY") == "torch":
        sys.modules["cupy"] = None  # type: ignore[assignment]
    arrays = Torch()
    torch = arrays.torch
    dist.init_process_group("nccl", timeout=60.0)
    dist.all_reduce(torch.ones(3, device="cuda"))
    for part in (order, dropped, *(() if STANDIN else (hooks,))):
        with check(part.__name__):
            part()
    for mode in () if STANDIN else ("global", "thread_local", "relaxed"):
        with check(f"graph {mode}"):
            captured(mode)
    dist.destroy_process_group()
    said = {"rank": RANK, "failed": gpu_arrays.failed, **arrays.versions()}
    print(json.dumps(said), flush=True)
    sys.exit(bool(gpu_arrays.failed))


main()
