"""A rank without memory for a message that no receive has asked for says so, and blames no peer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# malloc fails for messages of one size while it is told to.
SHIM = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stddef.h>
int cydist_test_starved;
void *malloc(size_t size) {
    static void *(*real)(size_t);
    if (real == NULL)
        real = dlsym(RTLD_NEXT, "malloc");
    return cydist_test_starved && (size == 4099 || size == 4100) ? NULL : real(size);
}
"""

PROGRAM = """
import ctypes, time
import numpy as np
import cydist as dist
dist.init_process_group(timeout=30)
rank = dist.get_rank()
dist.barrier()
x = np.zeros(4099, np.uint8)
dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
if rank == 1:
    starved = ctypes.c_int.in_dll(ctypes.CDLL(None), "cydist_test_starved")
    starved.value = 1
dist.barrier()
if rank == 0:
    work = dist.isend(x, 1, tag=3)
    time.sleep(0.5)
else:
    y = np.zeros(1)
    try:
        dist.recv(y, 0, tag=9, timeout=2)   # takes in what comes meanwhile
    except dist.DistError as error:
        seen = error
    if isinstance(seen, dist.DistTimeoutError):
        try:
            dist.recv(x, 0, tag=3, timeout=2)
        except dist.DistError as error:
            seen = error
    print(type(seen).__name__, "no memory" in str(seen), seen.ranks, flush=True)
    starved.value = 0
import os
os._exit(0)
"""


@pytest.mark.parametrize("transport", ["tcp", "shm"])
def test_an_unexpected_message(tmp_path: Path, transport: str) -> None:
    """The receiver's error is about its own memory."""
    (tmp_path / "shim.c").write_text(SHIM)
    (tmp_path / "program.py").write_text(PROGRAM)
    library = str(tmp_path / "shim.so")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, f"{library[:-2]}c"], check=True)
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("CYDIST_")}
    done = subprocess.run(
        [sys.executable, "-m", "cydist.launch", "-n", "2", "--no-prefix",
         str(tmp_path / "program.py")],
        capture_output=True, text=True, timeout=60, check=False,
        env={**inherited, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(tmp_path),
             "CYDIST_TRANSPORT": transport,
             "LD_PRELOAD": " ".join([*os.environ.get("LD_PRELOAD", "").split(), library])},
    )  # fmt: skip
    assert done.stdout == "DistBackendError True ()\n", done.stdout + done.stderr
