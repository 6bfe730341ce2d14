"""torch.profiler shows each call of cydist as a range, with its fields."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import valid_calls
from entered_functions import entered_functions

import cydist as dist
from cydist import _native
from cydist.groups import profiler_ranges
from cydist.testing import run_threads

torch = pytest.importorskip("torch")

Event = dict[str, Any]
COLLECTIVES = [name for name in valid_calls.CALLS if not name.endswith(("send", "recv"))]


def ranges_of(call: Callable[[], object], folder: Path, **options: bool) -> list[Event]:
    """The ranges of cydist's calls in the trace of this one."""
    with torch.profiler.profile(**{"record_shapes": True, **options}) as profile:
        call()
    trace = folder / "trace.json"
    profile.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    return [event for event in events if event["name"].startswith("cydist:")]


def in_a_group_of_one(body: Callable[[], Any]) -> Any:
    (result,) = run_threads(lambda rank: body(), 1)
    return result


@pytest.mark.parametrize("asynchronous", [False, True], ids=["blocking", "async"])
@pytest.mark.parametrize("name", COLLECTIVES)
def test_a_collective_is_a_range_with_its_fields(
    name: str, asynchronous: bool, tmp_path: Path
) -> None:
    """One of numpy arrays, also if it would take the fast path."""
    arguments = valid_calls.of_one_rank(name)

    def call() -> None:
        work = getattr(dist, name)(**arguments, async_op=asynchronous)
        if asynchronous:
            work.wait()

    first, *others = in_a_group_of_one(lambda: ranges_of(call, tmp_path))
    fields = first["args"]
    assert first["name"] == f"cydist:{name}"
    assert fields["Collective name"] == name
    assert fields["dtype"] == "float32"
    assert fields["bytes"] == 16
    assert fields["Process Group Name"] == "0"
    assert fields["Group size"] == 1
    assert bool(fields["Async"]) is asynchronous
    assert [each["name"] for each in others] == [f"cydist:{name} until completed"] * asynchronous
    assert all("finished" not in each["args"] for each in others)


def test_a_barrier_is_a_range(tmp_path: Path) -> None:
    """Without an array."""
    (event,) = in_a_group_of_one(lambda: ranges_of(dist.barrier, tmp_path))
    assert event["args"]["Collective name"] == "barrier"
    assert "bytes" not in event["args"]


def test_a_tensor_gives_the_shape(tmp_path: Path) -> None:
    """As torch's own operations do."""
    tensor = torch.ones(3, 5)

    def call() -> None:
        dist.all_reduce(tensor)

    (event,) = in_a_group_of_one(lambda: ranges_of(call, tmp_path))
    assert event["args"]["Input Dims"] == [[3, 5]]
    assert event["args"]["bytes"] == 60


def test_a_range_needs_no_shapes(tmp_path: Path) -> None:
    """Its name is there by default, and torch leaves the fields out."""
    (event,) = in_a_group_of_one(lambda: ranges_of(dist.barrier, tmp_path, record_shapes=False))
    assert event["name"] == "cydist:barrier"


@pytest.mark.parametrize("names", [("send", "recv"), ("isend", "irecv")], ids="-".join)
def test_a_message_is_a_range_on_both_sides(names: tuple[str, str], tmp_path: Path) -> None:
    """With the other side's rank."""

    def message(rank: int) -> None:
        work = getattr(dist, names[rank])(np.ones(3), 1 - rank)
        if names[0] == "isend":
            work.wait()

    for profiled in (0, 1):

        def body(rank: int, profiled: int = profiled) -> list[Event]:
            if rank != profiled:
                message(rank)
                return []
            return ranges_of(lambda: message(rank), tmp_path)

        events = run_threads(body, 2)[profiled]
        event, *others = [each for each in events if each["tid"] == events[0]["tid"]]
        started = ["isend", "irecv"].count(names[profiled])
        assert [e["name"] for e in others] == [
            f"cydist:{names[profiled]} until completed"
        ] * started
        assert event["name"] == f"cydist:{names[profiled]}"
        assert event["args"]["Peer"] == 1 - profiled
        assert event["args"]["bytes"] == 24


@pytest.mark.parametrize("batched", [False, True], ids=["single", "batch"])
@pytest.mark.parametrize("name", ["isend", "irecv"])
def test_a_started_message_is_a_range_until_it_has_ended(
    name: str, batched: bool, tmp_path: Path
) -> None:
    """It lasts while the program does something else before the peer takes part."""
    size = 1 << 21  # bytes: a message that is not sent before the receiver is there
    go = threading.Event()

    def start() -> Any:
        array = np.ones(size // 8)
        if batched:
            return dist.batch_isend_irecv([dist.P2POp(getattr(dist, name), array, 1)])[0]
        return getattr(dist, name)(array, 1)

    def first() -> None:
        work = start()
        with torch.profiler.record_function("cydist:something else"):
            pass
        go.set()
        work.wait()

    def body(rank: int) -> list[Event]:
        if rank == 0:
            return ranges_of(first, tmp_path)
        assert go.wait(60)
        (dist.recv if name == "isend" else dist.send)(np.ones(size // 8), 0)
        return []

    events = {each["name"]: each for each in run_threads(body, 2)[0] if each["ph"] == "X"}
    whole, other = events[f"cydist:{name} until completed"], events["cydist:something else"]
    assert whole["ts"] <= other["ts"]
    assert whole["ts"] + whole["dur"] >= other["ts"] + other["dur"]


@pytest.mark.parametrize("name", ["isend", "irecv"])
def test_who_waited_may_stop_the_profiler(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The range has ended before wait returns, however late the thread that watches it is:
    torch's profiler would write into freed memory."""
    late = threading.Event()
    watch = profiler_ranges.RangedWork.watch

    def watch_late(work: profiler_ranges.RangedWork) -> None:
        threading.Thread(target=lambda: (late.wait(60), watch(work)), daemon=True).start()

    monkeypatch.setattr(profiler_ranges.RangedWork, "watch", watch_late)

    def body(rank: int) -> list[str]:
        if rank == 1:
            (dist.recv if name == "isend" else dist.send)(np.ones(3), 0)
            return []
        with torch.profiler.profile() as profile:
            getattr(dist, name)(np.ones(3), 1).wait()
        return [event.key for event in profile.key_averages()]

    found = run_threads(body, 2)[0]
    late.set()
    assert f"cydist:{name} until completed" in found


def test_a_call_that_outlives_the_profiler_ends_no_range() -> None:
    """Torch's profiler would write into freed memory, also where the next profiler runs."""
    go = threading.Event()

    def body(rank: int) -> int:
        array = np.ones(1 << 18)
        if rank == 1:
            assert go.wait(60)
            dist.recv(array, 0)
            return 0
        before = len(profiler_ranges._ABANDONED)
        with torch.profiler.profile():
            work = dist.isend(array, 1)
        go.set()
        work.wait()
        return len(profiler_ranges._ABANDONED) - before

    assert run_threads(body, 2)[0] == 1


def test_calls_take_the_fast_path_again(tmp_path: Path) -> None:
    """After the profiler has ended."""

    def body() -> list[str]:
        ranges_of(dist.barrier, tmp_path)
        assert not _native.is_profiling()
        group = dist.group.WORLD
        dist.all_reduce(np.ones(4), group=group)  # the first such call chooses its algorithm
        return entered_functions(lambda: dist.all_reduce(np.ones(4), group=group))

    assert in_a_group_of_one(body) == []


PROGRAM = """
import sys
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import cydist.interop.torch
backend = sys.argv[1]
dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
model = DistributedDataParallel(torch.nn.Linear(3, 2))
model(torch.ones(1, 3)).sum().backward()
with torch.profiler.profile() as profile:
    model(torch.ones(1, 3)).sum().backward()
    dist.all_reduce(torch.ones(4))
    dist.broadcast(torch.ones(4), 0)
names = [event.key for event in profile.key_averages() if event.key.startswith(backend)]
print(*sorted(name for name in names if not name.endswith(" until completed")))
dist.destroy_process_group()
"""


@pytest.mark.parametrize("backend", ["cydist", "gloo"])
def test_torchs_own_calls_are_ranges(backend: str) -> None:
    """On torch's backend cydist the calls of a program and of DDP are, as gloo's are."""
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, backend], capture_output=True, text=True, timeout=100,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [f"{backend}:all_reduce", f"{backend}:broadcast"]
