"""One rank of a step of scripts/test-gpu: `gpu.py STEP`, started by cydistrun.

A check that fails is a line of JSON, and the next one runs. The exit code is 1 then.

Ranks may share one GPU: each says that it is a host of its own, and NCCL then talks over sockets
on the loopback interface. With STANDIN=FOLDER the step runs without a GPU, over the stand-ins for
CUDA and NCCL that tests/support/fake_cuda.py builds there.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import gpu_arrays  # noqa: E402
import numpy as np  # noqa: E402
from gpu_arrays import SIDE, all_kinds, give_stacks_in_time, say, share_a_gpu  # noqa: E402
from gpu_arrays import check as going_on  # noqa: E402
from gpu_overhead import overhead  # noqa: E402

import cydist as dist  # noqa: E402
from cydist.testing import oracle  # noqa: E402

MANY = (4097, 16401, (1 << 20) + 1, (1 << 22) + 1, *(() if "STANDIN" in os.environ else (1 << 26,)))
SIZES = (0, 1, 1000, *((16401,) if SIZE == 1 else ()))  # more than a block of NCCL's for one rank
REDUCTIONS = ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "AVG", "PREMUL_SUM")
TORCH_MOVES = (
    "bool", "uint8", "int32", "int64", "float16", "bfloat16", "float32", "float64", "complex64",
    # These take kernels of cydist's, which are torch's without cupy.
    *(("int8", "int16", "uint16", "uint32", "uint64") if os.environ.get("ONLY") == "torch" else ()),
)  # fmt: skip
LIMIT = 60.0  # seconds a call may take, several ranks on one GPU included


first_kind: Any = None
other_kinds: Iterator[Any]  # made when they are needed: to import torch takes seconds
arrays: Any = None  # the kind that is used now


def check(expected: Any, found: Any, what: Any) -> None:
    got = arrays.get(found)
    if not oracle.same_bits(np.asarray(expected), got):
        say(
            str(what), False, arrays=arrays.name, expected=str(expected)[:200], found=str(got)[:200]
        )


def values(rank: int, count: int, dtype: np.dtype) -> np.ndarray:
    if dtype.name.startswith("float8"):
        return ((np.arange(count) + rank) % 2).astype(dtype)
    return oracle.contribution(rank, count, dtype)


def averaged(rank: int, count: int, dtype: np.dtype) -> np.ndarray:
    """Values whose mean is whole, however it is rounded."""
    return (np.arange(count) % 2 * SIZE + (rank == 0) * SIZE).astype(dtype)


# Steps. Each returns what is to be printed.


def correctness() -> dict[str, Any]:
    """Every collective, every reduction of every dtype, blocking and asynchronous, on every
    library's arrays; groups with a priority, and by kind of memory."""
    global arrays
    calls = {}
    for arrays in (first_kind, *other_kinds):
        count = sum(reductions(op) for op in REDUCTIONS)
        for dtype in oracle.DTYPES.values():
            if arrays.name != "torch" or dtype.name in TORCH_MOVES:
                with going_on(f"moves of {dtype} on {arrays.name}"):
                    count += moves(dtype)
        with going_on(f"other calls on {arrays.name}"):
            count += others()
        calls[arrays.name] = count
    arrays = first_kind
    with going_on("arrays of both kinds of memory"):
        routed()
    dist.barrier()
    return {"calls": calls}


def sizes() -> dict[str, Any]:
    """Reductions and moves of up to 64 Mi elements, beyond one block, chunk and slice of NCCL's."""
    for count in MANY:
        with going_on(f"{count} elements"):
            given = np.arange(count, dtype="float32") % 1021
            x = arrays.array(given * (RANK + 1))
            dist.all_reduce(x)
            check(given * (SIZE * (SIZE + 1) // 2), x, ("all_reduce", count))
            x = arrays.array(np.full(count, RANK + 1, "uint8"))
            dist.all_reduce(x, dist.ReduceOp.PREMUL_SUM(2))
            check(np.full(count, SIZE * (SIZE + 1), "uint8"), x, ("PREMUL_SUM", count))
            x = arrays.array(given + RANK)
            dist.broadcast(x, SIZE - 1)
            check(given + SIZE - 1, x, ("broadcast", count))
            part = -(-count // SIZE)
            whole = arrays.array(np.zeros(part * SIZE, "float32"))
            dist.all_gather_into_tensor(whole, arrays.array(np.full(part, RANK, "float32")))
            check(np.repeat(np.arange(SIZE, dtype="float32"), part), whole, ("all_gather", count))
            back = arrays.array(np.zeros(part, "float32"))
            dist.reduce_scatter_tensor(back, whole, dist.ReduceOp.AVG)
            check(np.full(part, RANK, "float32"), back, ("reduce_scatter", count))
            dist.all_to_all_single(other := arrays.array(np.zeros(part * SIZE, "float32")), whole)
            check(np.full(part * SIZE, RANK, "float32"), other, ("all_to_all", count))
    return {"largest": MANY[-1]}


def reductions(op: str) -> int:
    """One reduction by all_reduce and reduce, for every dtype; how many calls."""
    calls = 0
    for dtype in oracle.DTYPES.values():
        if not (reduced_by(op, dtype) and arrays.reduces(dtype)):
            continue
        make, rule, action = values, op, getattr(dist.ReduceOp, op)
        if op == "AVG":
            make = averaged
        elif op == "PREMUL_SUM":
            rule, action = "SUM", dist.ReduceOp.PREMUL_SUM(2)
        with going_on(f"{op} of {dtype} on {arrays.name}"):
            for count in SIZES:
                given = [make(r, count, dtype) for r in range(SIZE)]
                expected = oracle.reduced(rule, given)
                if op == "PREMUL_SUM":
                    expected = (expected + expected).astype(dtype)
                x = arrays.array(given[RANK])
                work = dist.all_reduce(x, action, async_op=calls % 2 == 1)
                if work is not None:
                    work.wait()
                check(expected, x, (op, dtype, count))
                calls += 1
            x = arrays.array(given[RANK])
            dist.reduce(x, SIZE - 1, action)
            check(expected if RANK == SIZE - 1 else given[RANK], x, ("reduce", op, dtype))
            calls += 1
    return calls


def reduced_by(op: str, dtype: np.dtype) -> bool:
    if arrays.name == "torch" and dtype.name not in TORCH_MOVES:
        return False
    if op == "PREMUL_SUM":
        return dtype.kind != "b" and not dtype.name.startswith("float8")
    return oracle.makes_sense(op, dtype)


def others() -> int:
    """Calls on several arrays, strided ones, objects, single messages, and a group with a
    priority; how many."""
    x = arrays.array(np.arange(12.0).reshape(3, 4) * (RANK + 1))
    dist.all_reduce(x[:, ::2])
    check(np.arange(12.0).reshape(3, 4)[:, ::2] * (SIZE * (SIZE + 1) // 2), x[:, ::2], "strided")
    several = [arrays.array(np.full(n, RANK + 1.0)) for n in (3, 0, 5)]
    dist.all_reduce_coalesced(several)
    for n, each in zip((3, 0, 5), several, strict=True):
        check(np.full(n, SIZE * (SIZE + 1) / 2), each, "coalesced")
    sent = arrays.array(np.arange(2.0 * SIZE) + 100 * RANK)
    taken = arrays.array(np.zeros(2 * SIZE))
    dist.all_to_all_single(taken, sent)
    expected = [100.0 * r + 2 * RANK + i for r in range(SIZE) for i in range(2)]
    check(expected, taken, "all_to_all_single")
    part = arrays.array(np.zeros(2))
    dist.reduce_scatter_tensor(part, sent, async_op=True).wait()
    check(2.0 * RANK * SIZE + np.arange(2.0) * SIZE + 50 * SIZE * (SIZE - 1), part, "scattered")
    if RANK < 2 <= SIZE:
        y = arrays.array(np.full(5, 7.0 * (1 - RANK)))
        (dist.send if RANK == 0 else dist.recv)(y, 1 - RANK)
        check(np.full(5, 7.0), y, "message")
    gathered: list[Any] = [None] * SIZE
    dist.all_gather_object(gathered, RANK)
    assert gathered == [*range(SIZE)]
    wanted = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    group = dist.new_group(range(SIZE), pg_options=wanted)
    z = arrays.array(np.ones(3))
    dist.all_reduce(z, group=group, async_op=True).wait()
    check(np.full(3, float(SIZE)), z, "priority")
    dist.destroy_process_group(group)
    return 7


def routed() -> None:
    """Arrays on the CPU and on the GPU in one group."""
    group = dist.new_group(range(SIZE), backend="cpu:tcp,cuda:nccl")
    x, y = np.ones(3), arrays.array(np.ones(3))
    dist.all_reduce(x, group=group)
    dist.all_reduce(y, group=group)
    dist.barrier(group)
    check(x, y, "routed")
    assert x[0] == SIZE
    dist.destroy_process_group(group)


def moves(dtype: np.dtype) -> int:
    counts = [(3 * r + 1) % 4 for r in range(SIZE)]
    blocks = [values(r, counts[r], dtype) for r in range(SIZE)]
    x = arrays.array(values(RANK, 1000, dtype))
    dist.broadcast(x, SIZE - 1)
    check(values(SIZE - 1, 1000, dtype), x, "broadcast")
    outputs = [arrays.array(np.zeros(n, dtype)) for n in counts]
    dist.all_gather(outputs, arrays.array(blocks[RANK]))
    for block, output in zip(blocks, outputs, strict=True):
        check(block, output, "all_gather")
    whole = arrays.array(np.zeros(5 * SIZE, dtype))
    dist.all_gather_into_tensor(whole, arrays.array(values(RANK, 5, dtype)))
    check(np.concatenate([values(r, 5, dtype) for r in range(SIZE)]), whole, "into")
    back = arrays.array(np.zeros(counts[RANK], dtype))
    dist.scatter(back, outputs if RANK == 0 else None, 0)
    check(blocks[RANK], back, "scatter")
    into = [arrays.array(np.zeros(n, dtype)) for n in counts] if RANK == 0 else None
    dist.gather(back, into, 0)
    for block, output in zip(blocks, into or (), strict=False):
        check(block, output, "gather")
    if arrays.reduces(dtype):
        part = arrays.array(np.zeros(counts[RANK], dtype))
        dist.reduce_scatter(part, [arrays.array(values(RANK, n, dtype)) for n in counts])
        given = [values(r, counts[RANK], dtype) for r in range(SIZE)]
        check(oracle.reduced("SUM", given), part, "reduce_scatter")
    taken = [arrays.array(np.zeros(r + RANK, dtype)) for r in range(SIZE)]
    dist.all_to_all(taken, [arrays.array(values(RANK, r + RANK, dtype)) for r in range(SIZE)])
    for r, output in enumerate(taken):
        check(values(r, r + RANK, dtype), output, "all_to_all")
    near, far = (RANK + 1) % SIZE, (RANK - 1) % SIZE
    if SIZE > 1:
        y = arrays.array(np.zeros(7, dtype))
        ops = [
            dist.P2POp(dist.isend, arrays.array(values(RANK, 7, dtype)), near),
            dist.P2POp(dist.irecv, y, far),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        check(values(far, 7, dtype), y, "batch")
    return 8


def streams() -> dict[str, Any]:
    """Order behind a long kernel, arrays that are dropped, capture and replay. cupy only."""
    cupy = arrays.cupy
    for part in (ordered, dropped, captured, captured_scratch):
        with going_on(part.__name__):
            part(cupy)
    dist.barrier()
    return {"captured": not gpu_arrays.failed}


def ordered(cupy: Any) -> None:
    """A call behind a kernel that takes long, on a stream of the program's."""
    slow = cupy.random.random((SIDE, SIDE), dtype="float32")
    with cupy.cuda.Stream(non_blocking=True) as stream:
        x = cupy.zeros(1 << 20, "float32")
        for _ in range(5):
            slow = slow @ slow * cupy.float32(1e-4)
        x += 1
        work = dist.all_reduce(x, async_op=True)
        work.wait()
        y = x * 1
        stream.synchronize()
        assert float(y.min()) == float(y.max()) == SIZE


def dropped(cupy: Any) -> None:
    """Arrays of asynchronous calls that the program drops."""
    for _ in range(50):
        x = cupy.ones(1 << 18, "float32")
        work = dist.all_reduce(x, async_op=True)
        work._result = None  # what keeps the memory is the call itself
        kept = x.data.ptr
        del x
        other = cupy.zeros(1 << 18, "float32")
        assert other.data.ptr != kept or work.is_completed()
        work.synchronize()


def captured(cupy: Any) -> None:
    """Calls in a graph, and what CUDA refuses."""
    x = cupy.ones(1000, "float32")
    y = cupy.zeros(1000, "float32")
    dist.all_reduce(x)  # connections are made outside of captures
    cupy.cuda.Device().synchronize()  # the stream below waits for no other
    with cupy.cuda.Stream(non_blocking=True) as stream:
        before = dist.all_reduce(x, async_op=True)
        before.synchronize()
        stream.begin_capture()
        before.wait()  # over: no part of the graph
        y += 1
        dist.all_reduce(y)
        y += 1
        inside: Any = dist.all_reduce(y, async_op=True)
        inside.wait()
        graph = stream.end_capture()
        for other in (False, True):  # outside of its graph, and in another one
            if other:
                stream.begin_capture()
            try:
                inside.wait()
            except dist.UnsupportedError:
                pass
            else:
                raise AssertionError("wait() for a captured call outside of its graph")
            finally:
                if other:
                    stream.end_capture()
        for _ in range(3):
            graph.launch(stream)
        stream.synchronize()
        expected = 0.0
        for _ in range(3):
            for _ in range(2):
                expected = (expected + 1) * SIZE
        assert float(y[0]) == expected, (float(y[0]), expected)


def captured_scratch(cupy: Any) -> None:
    """A call that takes memory for itself, while a graph is captured in the mode that forbids it,
    which is torch's."""
    x, y = cupy.ones(1000, "int16"), cupy.ones((1000, 2))
    for each in (x, y[:, 1]):  # to be widened, and to be packed
        dist.all_reduce(each)  # kernels are compiled outside of captures
        cupy.cuda.Device().synchronize()
        with cupy.cuda.Stream(non_blocking=True) as stream:
            stream.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
            dist.all_reduce(each)
            graph = stream.end_capture()
            graph.launch(stream)
            stream.synchronize()
            assert int(each[0]) == SIZE * SIZE
    assert float(y[0, 0]) == 1


def ended(group: Any) -> tuple[BaseException, float]:
    """What a group fails on, and after how many seconds."""
    start = time.monotonic()
    while group.error is None:
        assert time.monotonic() - start < LIMIT, "the group does not fail"
        time.sleep(0.01)
        if group.failures.watch.oldest is None:
            group.failures.watch.poll()
    return group.error, time.monotonic() - start


@contextlib.contextmanager
def as_soon_as_it_comes(group: Any) -> Iterator[None]:
    """A rank may still be in the barrier before, or at the beginning of its call, when another
    one ends the group: the call raises then, on a group that has failed."""
    try:
        yield
    except dist.DistError:
        assert group.error is not None


def faults() -> dict[str, Any]:
    """Different calls, a late rank, an abort, a dead rank: each a typed error, and soon; then the
    ranks that are left go on."""
    found: dict[str, Any] = {}

    def warm() -> Any:
        group = dist.new_group(range(SIZE))
        dist.all_reduce(arrays.array(np.ones(3)), group=group)
        return group

    def fails(name: str, group: Any, kind: type[BaseException]) -> None:
        error, seconds = ended(group)
        found[f"{name}_s"] = round(seconds, 2)
        if not isinstance(error, kind):
            say(name, False, raised=f"{type(error).__name__}: {error}"[:400])

    with going_on("mismatch"):
        group = warm()
        dist.all_reduce(arrays.array(np.ones(3 + RANK % 2)), group=group)
        fails("mismatch", group, dist.MismatchError)
        dist.destroy_process_group(group)
    with going_on("timeout"):
        group = warm()
        dist.barrier(group)
        if RANK == 0:
            dist.all_reduce(arrays.array(np.ones(3)), group=group, timeout=1.0)
        fails("timeout", group, dist.DistTimeoutError)
        dist.destroy_process_group(group)
    with going_on("abort"):
        group = warm()
        with as_soon_as_it_comes(group):
            dist.barrier(group)
            if RANK == 0:
                dist.abort(group)
            else:
                dist.all_reduce(arrays.array(np.ones(3)), group=group)
        fails("abort", group, dist.GroupFailedError)
        dist.destroy_process_group(group)
    group = dist.group.WORLD
    with as_soon_as_it_comes(group):
        dist.barrier()
        if RANK == SIZE - 1:
            print(json.dumps({"rank": RANK, **found}), flush=True)
            os._exit(bool(gpu_arrays.failed))
        dist.all_reduce(arrays.array(np.ones(3)))
    fails("death", group, dist.DistError)
    found["death"] = type(group.error).__name__  # type: ignore[union-attr]
    if SIZE > 1:
        left = dist.shrink_group()
        x = arrays.array(np.ones(3))
        dist.all_reduce(x)
        check(np.full(3, SIZE - 1.0), x, "shrunk")
        found["left"] = left.size()
    return found


STEPS = {
    "correctness": correctness,
    "sizes": sizes,
    "streams": streams,
    "faults": faults,
    "overhead": overhead,
}


def main() -> None:
    global arrays, first_kind, other_kinds
    give_stacks_in_time()
    share_a_gpu()
    other_kinds = all_kinds()
    arrays = next(other_kinds)
    first_kind = arrays
    dist.init_process_group("nccl", timeout=LIMIT)
    start = time.monotonic()
    try:
        said = STEPS[sys.argv[1]]()
    except Exception as error:
        say(sys.argv[1], False, raised=f"{type(error).__name__}: {error}"[:400])
        raise
    dist.destroy_process_group()
    seconds = round(time.monotonic() - start, 1)
    told = {**said, "failed": gpu_arrays.failed, "seconds": seconds, **first_kind.versions()}
    print(json.dumps({"rank": RANK, **told}), flush=True)
    sys.exit(bool(gpu_arrays.failed))


main()
