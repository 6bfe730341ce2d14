"""Subject "kernels": local work of a rank, compared with numpy and torch.

A rate counts the bytes of the result: of the sum, of the packed memory, of all small arrays
together. A function that creates its result allocates new memory each time; one that gets memory
reuses it, for cydist and the other libraries alike. numpy's buffers are as malloc returns them.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

import cydist._native
from cydist.bench import inprocess, report, sysinfo
from cydist.bench.buffers import dtype_of
from cydist.bench.inprocess import InProcessRun
from cydist.bench.options import checked, local_parser, size
from cydist.bench.peers import as_tensor
from cydist.reduce_ops import ReduceOp

_native: Any = cydist._native  # numpy's arrays have a buffer, which numpy's types do not say

DTYPES = "float32,float64,float16,int8,int32,int64,complex64"
WITH_ML_DTYPES = ",bfloat16"
# Rows of a matrix with gaps, by the bytes that lie together; and its columns.
RUNS = (4, 16, 64, 1024)
COUNTS = (10, 100, 1000)
SMALL = 256  # float32 elements of each array to flatten


def main(arguments: Sequence[str]) -> int:
    """Print the tables; return 1 if any result was wrong, else 0."""
    parser = local_parser("kernels", "Time sums, packing and flattening in one process.")
    parser.add_argument("--sizes", default="64Ki,16Mi", help="bytes of arrays (64Ki,16Mi)")
    usual = DTYPES + WITH_ML_DTYPES * (importlib.util.find_spec("ml_dtypes") is not None)
    parser.add_argument("--dtypes", default=usual, help=f"of sums ({usual})")
    given = checked(parser, arguments)
    try:
        sizes = [size(text) for text in given.sizes.split(",")]
        dtypes = [dtype_of(name) for name in given.dtypes.split(",")]
    except ValueError as error:
        parser.error(str(error))
    about = sysinfo.describe(["kernels", *arguments])
    torch = None
    if importlib.util.find_spec("torch") is not None:
        torch = importlib.import_module("torch")
        torch.set_num_threads(1)
        about["torch"] = torch.__version__
    print(report.header(about), flush=True)
    kinds: dict[str, tuple[list[str], Iterator[InProcessRun]]] = {
        "a += b": (["cydist", "numpy", "torch"], sums(dtypes, sizes, torch)),
        "packing": (["cydist", "numpy", "memcpy"], packing(sizes)),
        "unpacking": (["cydist", "numpy", "memcpy"], unpacking(sizes)),
        "flattening": (["cydist", "numpy", "torch"], flattening(torch)),
        "unflattening": (["cydist", "numpy", "torch"], unflattening(torch)),
    }
    entries = []
    for kind, (names, contests) in kinds.items():
        print(inprocess.head(kind, names), flush=True)
        for each in contests:
            row = inprocess.run_in_process(each.calls, given.rounds)
            print(inprocess.line(each, row, names), flush=True)
            entries.append(inprocess.entry(kind, each, row))
    report.save({"header": about, "rows": entries}, given.json)
    return int(any(each["wrong"] for each in entries))


def differing(found: Any, expected: Any) -> int:
    """Return how many elements differ."""
    return int(np.count_nonzero(np.asarray(found) != np.asarray(expected)))


def numbered(count: int, dtype: Any = np.float32) -> Any:
    """Return (count,) small integers that differ from their neighbours."""
    return (np.arange(count) % 7).astype(dtype)


def sums(dtypes: Sequence[Any], sizes: Sequence[int], torch: Any) -> Iterator[InProcessRun]:
    """Yield the kernel of every reduction, which adds an array to another in place."""
    for dtype in dtypes:
        for nbytes in sizes:
            a, b = numbered(nbytes // dtype.itemsize, dtype), np.ones(1, dtype)
            b = np.repeat(b, a.size)
            code = _native.asarray(a).dtype
            add = partial(_native.combine_all, int(ReduceOp.SUM), code, a, [a, b])
            expected = a + b
            add()
            calls: dict[str, Callable[[], object]] = {
                "cydist": add,
                "numpy": partial(np.add, a, b, a),
            }
            if torch is not None:
                calls["torch"] = partial(as_tensor(a).add_, as_tensor(b))
            yield InProcessRun(str(dtype), a.nbytes, calls, differing(a, expected))


def strided(nbytes: int) -> Iterator[tuple[str, Any]]:
    """Yield arrays of float32 with `nbytes`, each after the name of its layout."""
    count = nbytes // 4
    side = int(count**0.5)
    yield "transposed matrix", numbered(side * side).reshape(side, side).T
    for run in RUNS:
        columns = run // 4
        if count >= columns:
            whole = numbered(2 * count).reshape(-1, 2 * columns)
            yield f"runs of {run} bytes, gaps as long", whole[:, :columns]


def packing(sizes: Sequence[int]) -> Iterator[InProcessRun]:
    """Yield copies of strided memory into new dense memory, as before a call."""
    for nbytes in sizes:
        for what, array in strided(nbytes):
            dense = np.ascontiguousarray(array)
            ours = _native.asarray(array)
            packed = np.frombuffer(ours.dense(), np.float32)
            calls = {
                "cydist": ours.dense,
                "numpy": partial(np.ascontiguousarray, array),
                "memcpy": dense.copy,
            }
            yield InProcessRun(what, dense.nbytes, calls, differing(packed, dense.ravel()))


def unpacking(sizes: Sequence[int]) -> Iterator[InProcessRun]:
    """Yield copies of dense memory into strided memory, as after a call."""
    for nbytes in sizes:
        for what, array in strided(nbytes):
            dense = np.ascontiguousarray(array)
            array[...] = 0
            ours = _native.asarray(array)
            ours.copy_from(_native.asarray(dense))
            wrong = differing(array, dense)
            calls = {
                "cydist": partial(ours.copy_from, _native.asarray(dense)),
                "numpy": partial(np.copyto, array, dense),
                "memcpy": partial(np.copyto, np.empty_like(dense), dense),
            }
            yield InProcessRun(what, dense.nbytes, calls, wrong)


def flattening(torch: Any) -> Iterator[InProcessRun]:
    """Yield copies of many small arrays into one."""
    for count in COUNTS:
        blocks = [numbered(SMALL) + number for number in range(count)]
        flat = np.empty(count * SMALL, np.float32)
        _native.flatten_buffers(flat, blocks)
        wrong = differing(flat, np.concatenate(blocks))
        calls: dict[str, Callable[[], object]] = {
            "cydist": partial(_native.flatten_buffers, flat, blocks),
            "numpy": partial(np.concatenate, blocks, out=flat),
        }
        if torch is not None:
            flatten = importlib.import_module("torch._utils")._flatten_dense_tensors
            calls["torch"] = partial(flatten, [as_tensor(block) for block in blocks])
        yield InProcessRun(f"{count} arrays of {4 * SMALL} bytes", flat.nbytes, calls, wrong)


def unflattening(torch: Any) -> Iterator[InProcessRun]:
    """Yield copies of one array into many small ones. torch makes views, which are then copied."""
    for count in COUNTS:
        blocks = [np.empty(SMALL, np.float32) for _ in range(count)]
        flat = numbered(count * SMALL)
        _native.unflatten_buffers(blocks, flat)
        wrong = differing(np.concatenate(blocks), flat)
        pieces = np.split(flat, count)
        calls: dict[str, Callable[[], object]] = {
            "cydist": partial(_native.unflatten_buffers, blocks, flat),
            "numpy": partial(copy_each, np.copyto, blocks, pieces),
        }
        if torch is not None:
            unflatten = importlib.import_module("torch._utils")._unflatten_dense_tensors
            tensors = [as_tensor(block) for block in blocks]
            calls["torch"] = partial(copy_views, unflatten, as_tensor(flat), tensors)
        yield InProcessRun(f"{count} arrays of {4 * SMALL} bytes", flat.nbytes, calls, wrong)


def copy_each(copy: Callable[[Any, Any], object], into: Sequence[Any], of: Sequence[Any]) -> None:
    """Copy array by array."""
    for to, source in zip(into, of, strict=True):
        copy(to, source)


def copy_views(unflatten: Callable[..., Any], flat: Any, tensors: Sequence[Any]) -> None:
    """Copy views, as torch does."""
    for tensor, view in zip(tensors, unflatten(flat, tensors), strict=True):
        tensor.copy_(view)
