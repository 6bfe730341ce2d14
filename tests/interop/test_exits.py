"""A process may end while Futures of the bridge are incomplete, or their callbacks run."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import weakref
from pathlib import Path
from queue import SimpleQueue

import pytest
from extra_values import more_but

import cydist
from cydist.executor import Completions

torch = pytest.importorskip("torch")
from cydist.interop.torch.work import PendingWork  # noqa: E402

ROOT = Path(__file__).resolve().parents[2]

PROGRAM = """
import atexit, sys, threading, torch
late = []
atexit.register(lambda: late and late[0]())  # runs after what cydist has registered
import cydist
from cydist.interop.torch.work import PendingWork

torch.set_num_threads(1)
call = cydist.EventWork("a call", timeout=None)
caller = PendingWork(call, [torch.ones(1)])
begun = threading.Event()
source, copy = torch.ones(4000, 1000).t(), torch.empty(1000, 4000)

def callback(future):
    begun.set()
    for _ in range(20):
        copy.copy_(source)  # without the GIL, as most of what torch does
    print("called back", flush=True)
"""

# The test's id, the end of the program, and what it prints.
ENDS = {
    "callback under way": (
        """
caller.get_future().then(callback)
threading.Thread(target=call.end).start()
begun.wait(30)
print("ends", flush=True)
""",
        ["ends", "called back"],
    ),
    "call that ends late": (
        """
caller.get_future().then(callback)
late.append(lambda: (call.end(), begun.wait(0.5), print("ends", flush=True)))
""",
        ["ends"],
    ),
    "call that never ends": ("caller.get_future().then(callback)", []),
    "future made late": (
        """
last = threading.Event()
ender = threading.Thread(target=lambda: (last.wait(30), call.end()), daemon=True)
ender.start()
late.append(lambda: (last.set(), caller.get_future().then(callback).wait()))
""",
        ["called back"],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("end", more_but(["callback under way", "future made late"], ENDS))
def test_no_signal_ends_the_process(end: str) -> None:
    """Its exit code is 0, and callbacks that have begun are run to their end."""
    program, printed = ENDS[end]
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM + program],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=50, check=False,
    )  # fmt: skip
    assert (result.returncode, result.stdout.splitlines()) == (0, printed), result.stderr[-3000:]


def test_a_call_is_destroyed_while_the_end_of_the_process_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the thread that completes its Future, if that has the last reference. torch's C++ lets the
    GIL go then, so a thread that wanted it back later would end the process by SIGABRT."""
    completions = Completions()
    monkeypatch.setattr("cydist.interop.torch.work.COMPLETIONS", completions)
    call = cydist.EventWork("a call", timeout=None)
    caller = PendingWork(call, [torch.ones(1)])
    future = caller.get_future()
    waits: SimpleQueue[bool] = SimpleQueue()

    def destroyed() -> None:
        end = threading.Thread(target=completions.close, daemon=True)
        end.start()
        end.join(0.2)
        waits.put(end.is_alive())

    weakref.finalize(caller, destroyed)
    del caller
    call.end()
    future.wait()
    assert waits.get(timeout=30)


@pytest.mark.slow
@pytest.mark.more
@pytest.mark.timeout(170)
def test_a_model_may_outlive_its_group() -> None:
    """Groups end and are made again while models of DistributedDataParallel of earlier ones are
    freed; torch's gloo may hang there."""
    result = subprocess.run(
        [sys.executable, str(ROOT / "tests/interop/torch_outliving_model.py"), "40"],
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert (result.returncode, result.stdout) == (0, "ended\n"), result.stderr[-3000:]
