"""Start a worker's processes with their own launcher, and end them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from cydist.bench import rank
from cydist.launch.spawn import ProcessContext, spawn
from cydist.stores import HashStore

# Allow mpirun to run as root, and with more ranks than cores.
MPIRUN_VARIABLES = {
    "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}


@dataclass(frozen=True)
class Spec:
    """A worker to start.

    Attributes:
        name: Its name in the table.
        kind: "cydist", "torch", "mpi", "mpi-polled" or "raw".
        python: For mpirun: an interpreter of an environment with mpi4py; None: children of this
            process.
        options: Of `rank.start`.
        arguments: For mpirun.
    """

    name: str
    kind: str
    python: str | None = None
    options: Mapping[str, str] = field(default_factory=dict)
    arguments: Sequence[str] = ()


@dataclass
class Processes:
    """The processes of a worker.

    Attributes:
        status: Exit status of an ended process, None while all run.
        signal: Sends a signal to all of them.
    """

    status: Callable[[], int | None]
    signal: Callable[[int], None]
    ended: Callable[[], bool]

    def end(self, seconds: float) -> None:
        """Wait for them to end for `seconds`, then end them."""
        for number in (None, signal.SIGTERM, signal.SIGKILL):
            if number is not None:
                self.signal(number)
            deadline = time.monotonic() + (seconds if number is None else 5.0)
            while not self.ended() and time.monotonic() < deadline:
                time.sleep(0.01)
            if self.ended():
                return


def start(spec: Spec, size: int, address: str, log: str) -> Processes:
    """Start `size` ranks that will connect to `address`. Raises OSError."""
    if spec.python is None:
        return _spawned(spec, size, address, log)
    return _under_mpirun(spec, size, address, log)


def _spawned(spec: Spec, size: int, address: str, log: str) -> Processes:
    options = dict(spec.options)
    if options.get("backend") == "inproc":
        context = spawn(_threads, (size, address, log, spec.kind, options), 1, join=False)
    else:
        context = spawn(_child, (address, log, spec.kind, options), size, join=False)
    assert isinstance(context, ProcessContext)
    children = context.processes

    def status() -> int | None:
        codes = [child.exitcode for child in children if child.exitcode is not None]
        return max(codes, key=abs) if codes else None

    def send(number: int) -> None:
        for child in children:
            if child.pid is not None and child.exitcode is None:
                os.kill(child.pid, number)

    return Processes(status, send, lambda: all(child.exitcode is not None for child in children))


def _child(_rank: int, address: str, log: str, library: str, options: Mapping[str, str]) -> None:
    rank.main(address, log, library, options)


def _threads(
    _rank: int, size: int, address: str, log: str, library: str, options: Mapping[str, str]
) -> None:
    """Run all ranks of the backend "inproc" in this process."""
    store = HashStore()
    ranks = [
        threading.Thread(
            target=rank.main,
            args=(address, log, library, options),
            kwargs={"store": store, "rank": number, "world_size": size},
        )
        for number in range(size)
    ]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()


def _under_mpirun(spec: Spec, size: int, address: str, log: str) -> Processes:
    assert spec.python is not None
    options = json.dumps(dict(spec.options))
    variables = {**os.environ, **MPIRUN_VARIABLES}
    if spec.kind == "cydist":
        program = ["-m", "cydist.bench.rank"]
        variables["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    else:
        program = [str(Path(__file__).with_name("mpi_start.py"))]
    launcher = mpirun(spec.python)
    variables["PATH"] = f"{Path(launcher).parent}{os.pathsep}{variables.get('PATH', os.defpath)}"
    command = [launcher, *spec.arguments, "-n", str(size), spec.python, *program]
    with open(log, "ab") as out:
        process = subprocess.Popen(
            [*command, address, log, spec.kind, options],
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            env=variables,
        )
    return Processes(process.poll, process.send_signal, lambda: process.poll() is not None)


def mpirun(python: str) -> str:
    """Return the mpirun next to an interpreter, or else the one in PATH. Raises OSError."""
    if not os.access(python, os.X_OK):
        raise FileNotFoundError(f"{python} is not an interpreter")
    beside = str(Path(python).parent)
    for name in ("mpirun", "mpiexec"):
        found = shutil.which(name, path=beside) or shutil.which(name)
        if found is not None:
            return found
    raise FileNotFoundError(f"no mpirun or mpiexec beside {python}, nor in PATH")
