"""One rank of the step "staging" of scripts/test-gpu, started by cydistrun: GPU arrays over "tcp".

Ranks may share one GPU. Arrays are cupy's and torch's, where these are installed; with ONLY=torch
cupy is not used for the copies either. Prints a line of JSON for each rank: what was checked, and
seconds of a staged all_reduce beside those of the copies and of the host's all_reduce.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import numpy as np
from gpu_arrays import give_stacks_in_time, stand_in

import cydist as dist
from cydist import asarray
from cydist.backends.host import staging_group, staging_p2p
from cydist.devices import array_libraries
from cydist.testing import oracle

SIZES = (0, 1, 1000, 3_000_001)
LARGE = 64 << 20
ROUNDS = 7
SIDE = 4000  # of the matrices that keep the GPU busy
if "STANDIN" in os.environ:  # as many chunks, of less
    SIZES, LARGE, SIDE = (0, 1, 1000, 40_001), 1 << 20, 200
    staging_group.SLOT_BYTES = staging_p2p.STAGED_BYTES = 1 << 16


class Cupy:
    """Arrays of cupy."""

    def __init__(self) -> None:
        import cupy

        self.cupy = cupy
        cupy.cuda.Device(int(os.environ["LOCAL_RANK"]) % cupy.cuda.runtime.getDeviceCount()).use()

    def array(self, values: np.ndarray) -> Any:
        return self.cupy.asarray(values)

    def get(self, array: Any) -> np.ndarray:
        return self.cupy.asnumpy(array)

    def busy(self) -> None:
        """Some milliseconds of work on the current stream."""
        x = self.cupy.ones((SIDE, SIDE), "f4")
        for _ in range(20):
            x = x @ x * 1e-9

    def synchronize(self) -> None:
        self.cupy.cuda.runtime.deviceSynchronize()


class Torch:
    """Tensors of torch."""

    def __init__(self) -> None:
        import torch

        self.torch = torch
        if not torch.cuda.is_available():
            raise ImportError("this torch has no GPU to work on")
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]) % torch.cuda.device_count())

    def array(self, values: np.ndarray) -> Any:
        return self.torch.from_numpy(values.copy()).cuda()

    def get(self, array: Any) -> np.ndarray:
        return array.cpu().numpy()

    def busy(self) -> None:
        x = self.torch.ones((SIDE, SIDE), device="cuda")
        for _ in range(20):
            x = x @ x * 1e-9

    def synchronize(self) -> None:
        self.torch.cuda.synchronize()


def check(library: Any) -> int:
    """Calls in every shape and on every side of a chunk's size; how many."""
    rank, p = dist.get_rank(), dist.get_world_size()
    calls = 0

    def same(wanted: np.ndarray, array: Any) -> None:
        nonlocal calls
        calls += 1
        assert oracle.same_bits(wanted, library.get(array)), (wanted, library.get(array))

    for dtype in (np.dtype("float32"), np.dtype("float16"), np.dtype("int64"), np.dtype("bool")):
        for size in SIZES:
            xs = [oracle.contribution(r, size, dtype) for r in range(p)]
            total = oracle.reduced("SUM", xs)
            x = library.array(xs[rank])
            library.busy()
            x[...] = library.array(xs[rank])
            dist.all_reduce(x)
            same(total, x)
            x = library.array(xs[rank])
            dist.all_reduce(x, async_op=True).wait()
            same(total, x)
            out = library.array(np.zeros(p * size, dtype))
            dist.all_gather_into_tensor(out, library.array(xs[rank]))
            same(np.concatenate(xs), out)
            x = library.array(xs[rank])
            dist.broadcast(x, p - 1)
            same(xs[p - 1], x)
            whole = library.array(np.stack([xs[rank]] * 2, axis=1))
            dist.all_reduce(whole[:, 1])
            same(np.stack([xs[rank], total], axis=1), whole)
            outs = [library.array(np.zeros(size * r, dtype)) for r in range(p)]
            given = oracle.contribution(rank, size * rank, dtype)
            dist.gather(library.array(given), None if rank else outs, 0)
            if rank == 0:
                for r in range(p):
                    same(oracle.contribution(r, size * r, dtype), outs[r])
            if p > 1:
                out = library.array(np.zeros(size, dtype))
                work = dist.isend(library.array(xs[rank]), (rank + 1) % p)
                dist.recv(out, (rank - 1) % p)
                work.wait()
                same(xs[(rank - 1) % p], out)
    return calls


def captured_is_refused() -> None:
    """A call on a stream that is being captured raises, and the group goes on."""
    import cupy

    x = cupy.ones(3)
    stream = cupy.cuda.Stream(non_blocking=True)
    with stream:
        stream.begin_capture()
        try:
            dist.all_reduce(x)
        except dist.UnsupportedError:
            pass
        else:
            raise AssertionError("a call during a capture did not raise")
        finally:
            stream.end_capture()
    dist.barrier()


def beside_a_capture() -> None:
    """A call of another thread, and the end of its group, leave a graph alone that is captured in
    the mode that forbids most, torch's."""
    import cupy

    x, y, device = cupy.zeros(3), cupy.ones(3), cupy.cuda.Device()
    x += 1  # the kernel is there
    group = dist.new_group()
    stream, other = (cupy.cuda.Stream(non_blocking=True) for _ in range(2))
    device.synchronize()

    def call() -> None:
        device.use()
        with other:
            dist.all_reduce(y, group=group)
        dist.destroy_process_group(group)

    with stream, ThreadPoolExecutor(1) as thread:
        stream.begin_capture(cupy.cuda.runtime.streamCaptureModeGlobal)
        x += 1
        found = thread.submit(call).exception(60)
        graph = stream.end_capture()
        assert found is None, found
        graph.launch(stream)
        stream.synchronize()
    device.synchronize()
    assert (float(x[0]), float(y[0])) == (2, dist.get_world_size())


def figures(library: Any) -> dict[str, float]:
    """Median seconds; `share` is the slower of copy and host over staged, at least 0.7."""
    x = library.array(np.ones(LARGE // 4, "f4"))
    array = asarray(x)
    copier, index = array_libraries.copying_library_of(array), array.device_index
    slot, stream = copier.pinned(LARGE).typed(array), copier.stream(index)
    host = np.ones(LARGE // 4, "f4")

    def copied(into: Any, source: Any) -> None:
        copier.move(into, source, index, stream)
        event = copier.event(index)
        copier.record(event, index, stream)
        while not copier.is_over(event):
            pass

    def staged() -> None:
        dist.all_reduce(x)
        library.synchronize()

    subjects: dict[str, Callable[[], None]] = {
        "out": lambda: copied(slot, array), "in": lambda: copied(array, slot),
        "host": lambda: dist.all_reduce(host), "staged": staged,
    }  # fmt: skip
    seconds: dict[str, list[float]] = {name: [] for name in subjects}
    for _ in range(ROUNDS):
        for name, run in subjects.items():
            dist.barrier()
            begun = time.perf_counter()
            run()
            seconds[name].append(time.perf_counter() - begun)
    found = {name: statistics.median(each) for name, each in seconds.items()}
    slower = max(found["out"], found["in"], found["host"])
    return {**found, "share": slower / found["staged"]}


def main() -> None:
    give_stacks_in_time()
    stand_in()
    only = os.environ.get("ONLY", "")
    if only == "torch":
        array_libraries._libraries["cupy"] = None  # as where it is not installed
    dist.init_process_group("tcp", timeout=60.0)
    said: dict[str, Any] = {"rank": dist.get_rank(), "ranks": dist.get_world_size()}
    for kind in (Cupy, Torch):
        name = kind.__name__.lower()
        if only and name != only:
            continue
        try:
            library = kind()
        except ImportError:
            said[name] = "not installed, or not for GPUs"
            continue
        said[name] = {"calls": check(library), "seconds": figures(library)}
        if kind is Cupy:
            captured_is_refused()
            beside_a_capture()
    dist.destroy_process_group()
    print(json.dumps(said), flush=True)


if __name__ == "__main__":
    main()
