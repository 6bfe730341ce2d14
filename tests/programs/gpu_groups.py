"""One rank of a step of scripts/test-gpu about groups and arrays: `gpu_groups.py STEP`.

split    split_group into parts, and while the parent's calls wait for a busy GPU
memory   groups and calls that come and go leave memory as it was
default  what init_process_group() chooses on a GPU
shared   two ranks on one GPU are refused
foreign  arrays of numba and of JAX, on nccl and on tcp

Prints a line of JSON for each check, with "ok", and goes on after one that fails. STANDIN as in
gpu.py.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from pathlib import Path
from typing import Any

RANK, SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import gpu_arrays  # noqa: E402
from gpu_arrays import Cupy, check, give_stacks_in_time, say, share_a_gpu, stand_in  # noqa: E402

import cydist as dist  # noqa: E402

STANDIN = "STANDIN" in os.environ
LIMIT = 60.0  # seconds of a call
BUSY_SECONDS = 3.0  # more than the second after which ranks make a new communicator instead
GROUPS, CALLS, COUNT = (32, 500 if SIZE > 1 else 20_000, 1 << 18)
if STANDIN:  # which gives no memory of its GPU back
    GROUPS, CALLS, COUNT = 4, 200, 1 << 10
# What a round may take more than the one before: other processes on the GPU come and go, and NCCL
# took 38 or 76 MiB of the host's at once on an H200, with 8 groups in a round as with 16.
GPU_BYTES, GROUPS_HOST_BYTES, CALLS_HOST_BYTES = 16 << 20, 80 << 20, 16 << 20
cupy: Any = None

SPIN = """
extern "C" __global__ void spin(long long ticks) {
    long long start = clock64();
    while (clock64() - start < ticks) {}
}
"""


def ones(count: int = 3) -> Any:
    return cupy.ones(count, "float32")


def total(group: Any) -> float:
    """What a call on the group adds up to: its number of ranks, if all is well."""
    x = ones()
    dist.all_reduce(x, group=group)
    return float(x[0])


def split() -> None:
    """Parts in an order of their own, a rank in none, a part of a part; the parent goes on."""
    parts = [[2, 0], [3]] if SIZE == 4 else [[1, 0]]
    with check("split"):
        part: Any = dist.split_group(None, parts)
        inside = next((each for each in parts if RANK in each), None)
        say("split: members", (part is None) == (inside is None))
        if part is not None and inside is not None:
            say("split: order", dist.get_process_group_ranks(part) == inside)
            say("split: a call", total(part) == len(inside))
            x = cupy.full(3, RANK, "float32")
            dist.broadcast(x, inside[0], group=part)
            say("split: a root", float(x[0]) == inside[0])
            if len(inside) == 2:
                lower: Any = dist.split_group(part, [[0], [1]])
                say("split: a part of a part", total(lower) == 1)
                dist.destroy_process_group(lower)
        say("split: the parent", total(None) == SIZE)
        if part is not None:
            dist.destroy_process_group(part)
        say("split: the parent without its parts", total(None) == SIZE)
    dist.monitored_barrier(timeout=LIMIT)
    with check("split of a busy parent"):
        if RANK == SIZE - 1 and not STANDIN:
            spin = cupy.RawKernel(SPIN, "spin")
            rate = cupy.cuda.Device().attributes["ClockRate"]  # in kHz
            spin((1,), (1,), (cupy.int64(BUSY_SECONDS * rate * 1e3),))
        x = ones()
        dist.all_reduce(x)  # waits for the kernel
        start = time.monotonic()
        part = dist.split_group(None, [[*range(SIZE)]])
        seconds = time.monotonic() - start
        say("split of a busy parent", float(x[0]) == total(part) == SIZE, seconds=round(seconds, 2))
        if not STANDIN:
            say("split of a busy parent: time", 1.0 <= seconds < BUSY_SECONDS)


def bytes_used() -> tuple[int, int]:
    """Of the GPU, and of this process."""
    cupy.cuda.Device().synchronize()
    cupy.get_default_memory_pool().free_all_blocks()
    free, whole = cupy.cuda.runtime.memGetInfo()
    lines = Path("/proc/self/status").read_text().splitlines()
    resident = next(int(line.split()[1]) for line in lines if line.startswith("VmRSS"))
    return whole - free, resident << 10


def memory() -> None:
    """The third of equal rounds takes no more memory than the second."""

    def groups() -> None:
        for _ in range(GROUPS):
            group: Any = dist.new_group()
            dist.all_reduce(ones(COUNT), group=group, async_op=True)
            dist.destroy_process_group(group)

    def calls() -> None:
        for n in range(CALLS):
            x = ones(COUNT)
            dist.all_reduce(x, async_op=True)  # no code waits for it, or keeps its array
            dist.all_reduce(x)
            if n % 100 == 99:
                cupy.cuda.Device().synchronize()  # as many arrays are under way in each round
        time.sleep(0.5)  # the watchdog looks meanwhile

    for body, host_bytes in ((groups, GROUPS_HOST_BYTES), (calls, CALLS_HOST_BYTES)):
        with check(f"memory: {body.__name__}"):
            said = []
            for _ in range(3):
                body()
                dist.barrier()
                said.append(bytes_used())
                dist.barrier()
            gpu, host = (now - then for now, then in zip(said[2], said[1], strict=True))
            well = gpu <= GPU_BYTES and host <= host_bytes
            say(f"memory: {body.__name__}", well, gpu=gpu, host=host, rounds=said)


def default() -> None:
    """A program that works on a GPU gets both backends."""
    ones()
    dist.init_process_group(timeout=LIMIT)
    say("default: backend", dist.get_backend_config() == "cpu:tcp,cuda:nccl",
        backend=dist.get_backend_config())  # fmt: skip
    np = importlib.import_module("numpy")
    for x in (np.ones(3), ones()):
        dist.all_reduce(x)
        say(f"default: {type(x).__module__}", float(x[0]) == SIZE)
    dist.destroy_process_group()


def shared() -> None:
    """Each of two ranks on one GPU learns with which other it shares it, and "tcp" still works."""
    try:
        dist.init_process_group("nccl", timeout=LIMIT)
    except dist.DistError as error:
        told = str(error)
        say("shared: refused", "ranks 0 and 1 are both on GPU" in told, told=told)
    else:
        say("shared: refused", False)
    dist.init_process_group("tcp", timeout=LIMIT)
    say("shared: tcp", total(None) == SIZE)
    dist.destroy_process_group()


def foreign() -> None:
    """Arrays by their interfaces: numba's are written, and JAX's, which are constants, read."""
    found = {}
    for name in ("numba.cuda", "jax"):
        try:
            found[name] = importlib.import_module(name)
        except ImportError as error:
            say(f"foreign: {name} is there", False, raised=str(error))
    group: Any = dist.new_group(backend="tcp")
    for name, each in (("nccl", None), ("tcp", group)):
        if (cuda := found.get("numba.cuda")) is not None:
            with check(f"foreign: numba on {name}"):
                x = cuda.to_device(cupy.asnumpy(ones(1000)))
                dist.all_reduce(x, group=each)
                cupy.cuda.Device().synchronize()
                say(f"foreign: numba on {name}", bool((x.copy_to_host() == SIZE).all()))
        if (jax := found.get("jax")) is not None:
            with check(f"foreign: JAX on {name}"):
                given = jax.numpy.full(1000, RANK + 1.0, "float32")
                say("foreign: JAX's array is on the GPU", given.device.platform == "gpu")
                whole = cupy.zeros(1000 * SIZE, "float32")
                dist.all_gather_into_tensor(whole, given, group=each)
                wanted = cupy.repeat(cupy.arange(1, SIZE + 1), 1000)
                say(f"foreign: JAX on {name}", bool((whole == wanted).all()))


STEPS = {"split": split, "memory": memory, "foreign": foreign}
WITHOUT_A_GROUP = {"default": default, "shared": shared}


if __name__ == "__main__":
    give_stacks_in_time()
    step = sys.argv[1]
    if step != "shared":
        share_a_gpu()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    stand_in()
    cupy = Cupy().cupy
    if step in WITHOUT_A_GROUP:
        with check(step):
            WITHOUT_A_GROUP[step]()
    else:
        dist.init_process_group("nccl", timeout=LIMIT)
        STEPS[step]()
        dist.destroy_process_group()
    sys.exit(bool(gpu_arrays.failed))
