"""The interface to NCCL, and cupy's binding of it.

cydist does not link NCCL. `cupy.cuda.nccl` makes the calls; functions that it lacks are looked up
in the library that it has loaded (libnccl.py). `nccl4py` can replace cupy's binding (nccl4py.py);
create.py chooses.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

from cydist.backends.nccl.libnccl import LibNccl, NcclError
from cydist.devices.array_libraries import CUPY_MINIMUM, cupy_version
from cydist.errors import UnsupportedError

UNIQUE_ID_BYTES = 128
REMOTE = 6  # the result of a call when another rank is gone
IN_PROGRESS, TIMEOUT = 7, 8  # results without a text in cupy
NO_COLOR = -1  # NCCL_SPLIT_NOCOLOR: the rank gets no communicator
END_SECONDS = 10.0  # most seconds that a thread waits for another to end a communicator
EXIT_SECONDS = 5.0  # most seconds that the end of a process waits for NCCL
CALL_SECONDS = 0.5  # most seconds that an abort waits for a thread inside a call
REVOKE_SECONDS = 2.0  # the same, after a revoke has ended that call
INSTALL = (
    "install both by `pip install cupy-cuda13x[ctk] nvidia-nccl-cu13` (or -cuda12x and -cu12: as "
    "the driver has it)"
)


class Communicator(Protocol):
    """A communicator: its calls on streams, and its life cycle.

    Addresses, streams, types and operations are integers, as nccl.h has them. Counts are of
    elements: of one rank's block in `all_gather` and `reduce_scatter`. The calls raise the
    binding's exceptions, which `as_nccl_error` translates.

    Attributes:
        calls: Lock held during a call, since a communicator takes one at a time.
        capability: The lowest of all ranks' GPUs: 90 for 9.0.
        is_idle: Returns whether the GPU has passed all calls, and none has failed. It is asked at
            the end of the process.
    """

    calls: threading.RLock
    capability: int
    is_idle: Callable[[], bool]

    all_reduce: Callable[[int, int, int, int, int, int], None]  # send recv count type op stream
    reduce: Callable[[int, int, int, int, int, int, int], None]  # ... type op root stream
    broadcast: Callable[[int, int, int, int, int, int], None]  # send recv count type root stream
    reduce_scatter: Callable[[int, int, int, int, int, int], None]  # as all_reduce
    all_gather: Callable[[int, int, int, int, int], None]  # send recv count type stream
    send: Callable[[int, int, int, int, int], None]  # address count type peer stream
    recv: Callable[[int, int, int, int, int], None]
    all_to_all: Callable[[int, int, int, int, int], None] | None  # as all_gather; None: not there

    def async_error(self) -> str:
        """Return the asynchronous error since the last call; "" for none."""

    def premul(self, type_code: int, scalar: bytes) -> int:
        """Return the operation that sums contributions multiplied by `scalar`, an element of that
        type."""

    def drop_premul(self, op: int) -> None:
        """Free the operation, outside of groups, after all calls that use it have returned. The end
        of its communicator also frees it."""

    def revoke(self) -> bool:
        """End the calls under way, also one that blocks a thread, and free nothing. Return False if
        NCCL cannot."""

    def can_split(self) -> bool:
        """Return whether the binding has `split`."""

    def split(self, color: int, key: int) -> Communicator | None:
        """Return a communicator of the ranks that give this color, in the order of their keys;
        None for NO_COLOR. Blocks until all ranks have called it, and no call may be under way.
        `revoke` and `abort` end it."""

    def end_on_thread(self, task: Callable[[], object]) -> threading.Event:
        """Run `task`, which ends the communicator, on the communicator's own thread. Return the
        event of its end. A later task is not run: it returns the first one's event."""

    def abort(self) -> None:
        """End the calls under way, and the communicator. Idempotent; may take a while."""

    def destroy(self) -> None:
        """End the communicator when no call is under way. Idempotent; may take a while."""


class Binding(Protocol):
    """The library as a whole."""

    name: str
    group_start: Callable[[], None]  # of this thread; each needs its group_end
    group_end: Callable[[], None]

    def version(self) -> int:
        """Return 20000 + 100 * minor + patch of the loaded library."""

    def unique_id(self) -> bytes:
        """Return a unique id, which one rank makes and all ranks of a communicator join with. It is
        a secret."""

    def init(self, size: int, unique_id: bytes, rank: int) -> Communicator:
        """Join on the current device. Blocks until all ranks have come, and cannot be ended.

        If it raises, NCCL may treat this thread as inside a group, so end the thread.
        """

    def as_nccl_error(self, error: BaseException) -> NcclError | None:
        """Return the NcclError for the binding's exception if NCCL refused a call; None for any
        other error."""


class CupyNccl:
    """The binding of cupy.cuda.nccl."""

    name = "cupy.cuda.nccl"

    def __init__(self) -> None:
        nccl = self._nccl = load_cupy()
        self.group_start: Callable[[], None] = nccl.groupStart
        self.group_end: Callable[[], None] = nccl.groupEnd
        self._libnccl = LibNccl()

    def version(self) -> int:
        return int(self._nccl.get_version())

    def unique_id(self) -> bytes:
        return bytes(self._nccl.get_unique_id())

    def init(self, size: int, unique_id: bytes, rank: int) -> CupyCommunicator:
        return CupyCommunicator(
            self._nccl.NcclCommunicator(size, unique_id, rank), self._libnccl, self.as_nccl_error
        )

    def as_nccl_error(self, error: BaseException) -> NcclError | None:
        if isinstance(error, NcclError):
            return error
        if isinstance(error, self._nccl.NcclError):
            more = self._libnccl.last_error()
            return NcclError(f"{error}{f' ({more})' if more else ''}", error.status)
        # The binding has no text for results of newer libraries.
        if isinstance(error, KeyError) and error.args and error.args[0] in (IN_PROGRESS, TIMEOUT):
            status = error.args[0]
            said = (
                "the call is still in progress: unset NCCL_COMM_BLOCKING"
                if status == IN_PROGRESS
                else "NCCL's own timeout"
            )
            return NcclError(f"{said} (result {status})", status)
        return None


alive: set[Any] = set()  # communicators that have not ended


class EndsOnce:
    """The end of a communicator. The first thread that requests it runs it, and the others wait,
    since two would free it twice. The communicator is `alive` until that is over.

    A thread of its own waits to end it. CPython 3.12 and later start no thread once the interpreter
    ends, so this one is started with the communicator.
    """

    def __init__(self) -> None:
        self.calls = threading.RLock()
        self.capability = 0
        self.is_idle: Callable[[], bool] = lambda: False
        self._lock = threading.Lock()
        self._ended = False
        self._gone = threading.Event()
        self._pid = os.getpid()
        self._task: Callable[[], object] | None = None
        self._task_lock = threading.Lock()
        self._task_wanted, self._task_over = threading.Event(), threading.Event()
        alive.add(self)
        threading.Thread(target=self._run_task, name="cydist-nccl-end", daemon=True).start()

    def _run_task(self) -> None:
        self._task_wanted.wait()
        try:
            if self._task is not None:
                self._task()
        finally:
            self._task_over.set()

    def end_on_thread(self, task: Callable[[], object]) -> threading.Event:
        """Run `task`, which ends the communicator, on its own thread; return the event of the first
        task's end."""
        if os.getpid() != self._pid:  # a forked child has neither the thread nor the communicator
            self._task_over.set()
            return self._task_over
        with self._task_lock:
            if self._task is None:
                self._task = task
        self._task_wanted.set()
        return self._task_over

    def _check(self) -> None:
        """Raise if the communicator has ended: its address may be another's by now."""
        if self._ended:
            raise NcclError("the communicator was ended meanwhile")

    def _end(self, *steps: Callable[[], object]) -> None:
        with self._lock:
            first, self._ended = not self._ended, True
        if not first:
            self._gone.wait(END_SECONDS)
            return
        try:
            for step in steps:
                step()
        finally:
            alive.discard(self)
            self._gone.set()
            self._task_wanted.set()  # its thread has nothing left to do


class LibCommunicator(EndsOnce):
    """A communicator at an address, and NCCL's functions that are called with it here."""

    def __init__(self, libnccl: LibNccl, pointer: int) -> None:
        self._libnccl = libnccl
        self._pointer = pointer
        self.all_to_all = self._bound_all_to_all()
        super().__init__()

    def _bound_all_to_all(self) -> Callable[[int, int, int, int, int], None] | None:
        """Return NCCL's own all-to-all; None if it has none."""
        function = self._libnccl.all_to_all()
        if function is None:
            return None

        def call(send: int, recv: int, count: int, type_code: int, stream: int) -> None:
            self._check()
            if code := function(send, recv, count, type_code, self._pointer, stream):
                raise self._libnccl.error(code)

        return call

    def premul(self, type_code: int, scalar: bytes) -> int:
        with self._lock:
            self._check()
            return self._libnccl.premul(self._pointer, type_code, scalar)

    def drop_premul(self, op: int) -> None:
        with self._lock:
            if not self._ended:
                self._libnccl.drop_premul(self._pointer, op)

    def revoke(self) -> bool:
        with self._lock:
            return not self._ended and self._libnccl.revoke(self._pointer)


class CupyCommunicator(LibCommunicator):
    """One of cupy's communicators. It is ended explicitly, never by the garbage collector, which
    could block at any place."""

    def __init__(
        self,
        comm: Any,
        libnccl: LibNccl,
        as_nccl_error: Callable[[BaseException], NcclError | None],
    ) -> None:
        self.all_reduce = comm.allReduce
        self.reduce = comm.reduce
        self.broadcast = comm.broadcast
        self.reduce_scatter = comm.reduceScatter
        self.all_gather = comm.allGather
        self.send = comm.send
        self.recv = comm.recv
        self._comm: Any = comm
        self._as_nccl_error = as_nccl_error
        super().__init__(libnccl, int(comm.comm))

    def async_error(self) -> str:
        with self._lock:  # it must not end during this query
            return "" if self._ended else self._next_error()

    def _next_error(self) -> str:
        code = self._libnccl.async_error(self._pointer)
        if code is not None:
            return "" if code in (0, IN_PROGRESS) else self._libnccl.text(code)
        try:
            self._comm.check_async_error()
        except Exception as error:
            found = self._as_nccl_error(error)
            if found is None:
                raise
            return str(found)
        return ""

    def can_split(self) -> bool:
        return hasattr(self._comm, "commSplit")

    def split(self, color: int, key: int) -> CupyCommunicator | None:
        self._check()
        made = self._comm.commSplit(color, key)
        if made is None:
            return None
        return CupyCommunicator(made, self._libnccl, self._as_nccl_error)

    def abort(self) -> None:
        self._end(self._comm.abort)

    def destroy(self) -> None:
        self._end(lambda: self._libnccl.finalize(self._pointer), self._comm.destroy)


def end_all() -> None:
    """End all remaining communicators before the process ends, without depending on NCCL's
    return."""
    ends = [each.end_on_thread(partial(_end_at_exit, each)) for each in tuple(alive)]
    limit = time.monotonic() + EXIT_SECONDS
    for each in ends:
        each.wait(max(0.0, limit - time.monotonic()))


def _end_at_exit(comm: Communicator) -> None:
    """End it when no thread is in one of its calls, or after a while.

    The GPU may have passed the last call before NCCL has sent its last bytes to the next rank. A
    destroy sends them, and an abort drops them. So a communicator that is idle is destroyed.
    """
    free = comm.calls.acquire(timeout=CALL_SECONDS)
    if free and comm.is_idle():
        comm.destroy()
        return
    if not free and comm.revoke():
        free = comm.calls.acquire(timeout=REVOKE_SECONDS)
    comm.abort()


def load_cupy() -> Any:
    """Return the module cupy.cuda.nccl, with its library loaded.

    Raises UnsupportedError with a remedy.
    """
    try:
        nccl: Any = importlib.import_module("cupy.cuda.nccl")
    except ImportError as error:
        raise UnsupportedError(
            f"backend 'nccl' needs cupy, which is not installed ({error}): {INSTALL}; or use "
            "backend 'tcp' or 'mpi', which take GPU arrays too"
        ) from None
    if cupy_version() < CUPY_MINIMUM:
        raise UnsupportedError(
            f"backend 'nccl' needs cupy {'.'.join(map(str, CUPY_MINIMUM))} or later, and "
            f"{sys.modules['cupy'].__version__} is installed: {INSTALL}"
        )
    if not nccl.available:
        raise UnsupportedError(
            "backend 'nccl' needs NCCL 2.19 or later, and cupy finds no libnccl.so.2, or one that "
            f"lacks functions: {INSTALL}; CUPY_DEBUG_LIBRARY_LOAD=1 shows where cupy looks"
        )
    return nccl


def version_text(version: int) -> str:
    """Return NCCL's version number for messages: 22809 is "2.28.9"."""
    major, rest = divmod(version, 10000)
    return f"{major}.{rest // 100}.{rest % 100}"
