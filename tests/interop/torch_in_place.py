"""Rank program: calls in place on "cydist", compared with gloo.

    torchrun --nproc-per-node 3 tests/interop/torch_in_place.py FOLDER

Each rank writes FOLDER/RANK.json. It has for every form the cases in which cydist's call in place
differs from gloo's call on separate memory, and those in which gloo's call in place does. What the
call leaves in its input is compared too.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

import cydist.interop.torch  # noqa: F401

warnings.simplefilter("ignore")
RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])

dist.init_process_group("cydist")
GLOO = dist.new_group(backend="gloo")


def finish(call: Callable[..., Any], *args: Any, **named: Any) -> None:
    work = call(*args, **named)
    if work is not None:
        work.wait()


# Each form changes x, this rank's tensor, as the call in place does. `memory` returns what it
# writes: the tensor itself, or another.


def reduce_scatter_tensor(x: Any, memory: Any, block: int = RANK, **named: Any) -> None:
    into = x.chunk(SIZE)[block]
    output = memory(into)
    finish(dist.reduce_scatter_tensor, output, x, **named)
    into.copy_(output)


def reduce_scatter_tensor_into_the_first(x: Any, memory: Any, **named: Any) -> None:
    reduce_scatter_tensor(x, memory, 0, **named)


def reduce_scatter(x: Any, memory: Any, block: int = RANK, **named: Any) -> None:
    blocks = list(x.chunk(SIZE))
    output = memory(blocks[block])
    finish(dist.reduce_scatter, output, blocks, **named)
    blocks[block].copy_(output)


def reduce_scatter_into_the_first(x: Any, memory: Any, **named: Any) -> None:
    reduce_scatter(x, memory, 0, **named)


def reduce_scatter_coalesced(x: Any, memory: Any, group: Any, async_op: bool) -> None:
    """Two tensors in one call."""
    tensors = [x, x * 2]
    blocks = [tensor.chunk(SIZE)[RANK] for tensor in tensors]
    outputs = [memory(block) for block in blocks]
    with c10d._coalescing_manager(group, async_ops=async_op) as together:
        for output, tensor in zip(outputs, tensors, strict=True):
            dist.reduce_scatter_tensor(output, tensor, group=group, async_op=async_op)
    if async_op:
        together.wait()
    blocks[0].copy_(outputs[0] + outputs[1])


def all_to_all_single(x: Any, memory: Any, **named: Any) -> None:
    output = memory(x)
    finish(dist.all_to_all_single, output, x, **named)
    x.copy_(output)


def all_to_all(x: Any, memory: Any, **named: Any) -> None:
    blocks = list(x.chunk(SIZE))
    outputs = [memory(block) for block in blocks]
    finish(dist.all_to_all, outputs, blocks, **named)
    for block, output in zip(blocks, outputs, strict=True):
        block.copy_(output)


def all_gather_into_tensor(x: Any, memory: Any, **named: Any) -> None:
    own = x.chunk(SIZE)[RANK]
    finish(dist.all_gather_into_tensor, x, own if memory is in_place else own.clone(), **named)


def all_gather(x: Any, memory: Any, **named: Any) -> None:
    blocks = list(x.chunk(SIZE))
    own = blocks[RANK]
    finish(dist.all_gather, blocks, own if memory is in_place else own.clone(), **named)


def scatter(x: Any, memory: Any, **named: Any) -> None:
    blocks = list(x.chunk(SIZE))
    output = memory(blocks[RANK])
    finish(dist.scatter, output, blocks if RANK == 0 else None, src=0, **named)
    blocks[RANK].copy_(output)


def gather(x: Any, memory: Any, **named: Any) -> None:
    blocks = list(x.chunk(SIZE))
    own = blocks[RANK]
    given = own if memory is in_place else own.clone()
    finish(dist.gather, given, blocks if RANK == 0 else None, dst=0, **named)


def in_place(tensor: Any) -> Any:
    return tensor


FORMS: tuple[Callable[..., None], ...] = (
    reduce_scatter_tensor,
    reduce_scatter_tensor_into_the_first,
    reduce_scatter,
    reduce_scatter_into_the_first,
    reduce_scatter_coalesced,
    all_to_all_single,
    all_to_all,
    all_gather_into_tensor,
    all_gather,
    scatter,
    gather,
)
DTYPES = (torch.float32, torch.float64, torch.int64, torch.float16)


def given(dtype: Any, layout: str) -> Any:
    """Whole numbers, whose sums are exact."""
    rows = 2000
    values = (torch.arange(SIZE * rows) * 7 + RANK * 3) % 13
    if layout == "strided":
        wide = torch.zeros(SIZE * rows, 2, dtype=dtype)
        wide[:, 0] = values
        return wide[:, 0]
    return values.to(dtype)


def found(form: Callable[..., None]) -> dict[str, list[str]]:
    differences: dict[str, list[str]] = {"cydist": [], "gloo": []}
    for dtype, layout, async_op in product(DTYPES, ("contiguous", "strided"), (False, True)):
        # gloo's collectives take contiguous tensors only.
        expected = given(dtype, "contiguous")
        form(expected, torch.zeros_like, group=GLOO, async_op=async_op)
        ours = given(dtype, layout)
        form(ours, in_place, group=None, async_op=async_op)
        case = f"{dtype} {layout} async_op={async_op}"
        if not torch.equal(expected, ours):
            differences["cydist"].append(case)
        if layout == "contiguous":
            theirs = given(dtype, layout)
            form(theirs, in_place, group=GLOO, async_op=async_op)
            if not torch.equal(expected, theirs):
                differences["gloo"].append(case)
    return differences


results = {form.__name__: found(form) for form in FORMS}
(Path(sys.argv[1]) / f"{RANK}.json").write_text(json.dumps(results))
dist.barrier()
dist.destroy_process_group()
