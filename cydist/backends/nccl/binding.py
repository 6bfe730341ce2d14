"""The interface to NCCL, and cupy's binding of it.

cydist does not link NCCL. `cupy.cuda.nccl` makes the calls; functions that it lacks are looked up
in the library that it has loaded (libnccl.py). `nccl4py` can replace cupy's binding (nccl4py.py).
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Protocol

from cydist import config
from cydist.backends.nccl.libnccl import LibNccl
from cydist.devices.array_libraries import CUPY_MINIMUM, NCCL_MINIMUM, cupy_version
from cydist.errors import UnsupportedError

UNIQUE_ID_BYTES = 128
REMOTE = 6  # the result of a call when another rank is gone
IN_PROGRESS, TIMEOUT = 7, 8  # results that cupy has no text for
END_SECONDS = 10.0  # the longest that one thread waits for another to end a communicator
EXIT_SECONDS = 5.0  # the longest that the end of a process waits for NCCL
CALL_SECONDS = 0.5  # the longest that an abort waits for a thread that is in a call
INSTALL = (
    "install both by `pip install cupy-cuda13x[ctk] nvidia-nccl-cu13` (or -cuda12x and -cu12: as "
    "the driver has it)"
)


class NcclError(Exception):
    """NCCL's answer to a call, when it was not "success".

    status      ncclResult_t; None: the binding did not know it
    """

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status


class Communicator(Protocol):
    """A communicator: the calls that run on a stream, and its life.

    Addresses, streams, types and operations are integers, as nccl.h has them. Counts are of
    elements: of one rank's block in `all_gather` and `reduce_scatter`. The calls raise whatever
    the binding raises; `as_nccl_error` says what that is.

    calls       held by the thread that is in one: a communicator takes one at a time
    capability  the least of all ranks' GPUs: 90 for 9.0
    """

    calls: threading.RLock
    capability: int

    all_reduce: Callable[[int, int, int, int, int, int], None]  # send recv count type op stream
    reduce: Callable[[int, int, int, int, int, int, int], None]  # ... type op root stream
    broadcast: Callable[[int, int, int, int, int, int], None]  # send recv count type root stream
    reduce_scatter: Callable[[int, int, int, int, int, int], None]  # as all_reduce
    all_gather: Callable[[int, int, int, int, int], None]  # send recv count type stream
    send: Callable[[int, int, int, int, int], None]  # address count type peer stream
    recv: Callable[[int, int, int, int, int], None]

    def async_error(self) -> str:
        """Return what went wrong since the last call; "" for nothing."""

    def premul(self, type_code: int, scalar: bytes) -> int:
        """Return the operation that sums contributions times `scalar`, an element of that type."""

    def drop_premul(self, op: int) -> None:
        """Let go of it, outside of groups, when all calls that were given it have returned; it
        has gone with a communicator that ended."""

    def abort(self) -> None:
        """End what is under way, and the communicator. Idempotent; may take a while."""

    def destroy(self) -> None:
        """End the communicator, when nothing is under way. Idempotent; may take a while."""


class Binding(Protocol):
    """The library as a whole."""

    name: str
    group_start: Callable[[], None]  # of this thread; every one has its group_end
    group_end: Callable[[], None]

    def version(self) -> int:
        """20000 + 100 * minor + patch, of the library that is loaded."""

    def unique_id(self) -> bytes:
        """Return what one rank makes and all ranks of a communicator join with: a secret."""

    def init(self, size: int, unique_id: bytes, rank: int) -> Communicator:
        """Join, on the current device. Blocks until all have come, and cannot be ended.

        When it raises, NCCL may take this thread for one inside a group: let it go.
        """

    def as_nccl_error(self, error: BaseException) -> NcclError | None:
        """Return what the binding raised if NCCL refused a call; None for any other error."""


class CupyNccl:
    """By cupy.cuda.nccl."""

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
        # The binding has no text for what newer libraries say.
        if isinstance(error, KeyError) and error.args and error.args[0] in (IN_PROGRESS, TIMEOUT):
            status = error.args[0]
            said = (
                "the call is still in progress: unset NCCL_COMM_BLOCKING"
                if status == IN_PROGRESS
                else "NCCL's own timeout"
            )
            return NcclError(f"{said} (result {status})", status)
        return None


alive: set[Any] = set()  # communicators, until they are ended


class EndsOnce:
    """How a communicator ends: by the first thread that asks, for whom the others wait; two would
    free it twice. It is `alive` until that is over."""

    def __init__(self) -> None:
        self.calls = threading.RLock()
        self.capability = 0
        self._lock = threading.Lock()
        self._ended = False
        self._gone = threading.Event()
        alive.add(self)

    def _check(self) -> None:
        """Raise where it has ended: its address may be another's by now."""
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


class CupyCommunicator(EndsOnce):
    """One of cupy's communicators. It is ended here, never by the garbage collector: that could
    block wherever Python happens to be."""

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
        self._pointer = int(comm.comm)
        self._libnccl = libnccl
        self._as_nccl_error = as_nccl_error
        super().__init__()

    def async_error(self) -> str:
        with self._lock:  # nobody may end it while NCCL is asked about it
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

    def premul(self, type_code: int, scalar: bytes) -> int:
        with self._lock:
            self._check()
            return self._libnccl.premul(self._pointer, type_code, scalar)

    def drop_premul(self, op: int) -> None:
        with self._lock:
            if not self._ended:
                self._libnccl.drop_premul(self._pointer, op)

    def abort(self) -> None:
        self._end(self._comm.abort)

    def destroy(self) -> None:
        self._end(lambda: self._libnccl.finalize(self._pointer), self._comm.destroy)


def abort_all() -> None:
    """End every communicator that is left: the process is about to end, whether NCCL comes back
    from it or not."""
    threads = [threading.Thread(target=_abort, args=(each,), daemon=True) for each in tuple(alive)]
    for thread in threads:
        thread.start()
    end = time.monotonic() + EXIT_SECONDS
    for thread in threads:
        thread.join(max(0.0, end - time.monotonic()))


def _abort(comm: Communicator) -> None:
    """When no thread is in a call of it, if that is soon: who hangs in one comes back by this."""
    free = comm.calls.acquire(timeout=CALL_SECONDS)
    try:
        comm.abort()
    finally:
        if free:
            comm.calls.release()


def load_cupy() -> Any:
    """Return the module cupy.cuda.nccl, with a library.

    Raises UnsupportedError that says what to do.
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
            "backend 'nccl' needs NCCL, and cupy finds no libnccl.so.2: "
            f"{INSTALL}; CUPY_DEBUG_LIBRARY_LOAD=1 shows where cupy looks"
        )
    return nccl


def load() -> Binding:
    """Return the binding that is installed: cupy's, unless CYDIST_NCCL_BINDING says nccl4py.

    Raises UnsupportedError when there is none, or NCCL is too old; ValueError for another word.
    """
    wanted = config.NCCL_BINDING.get().strip().lower()
    binding: Binding
    if wanted == "nccl4py":
        from cydist.backends.nccl.nccl4py import Nccl4py

        binding = Nccl4py()
    elif wanted in ("", "cupy"):
        binding = CupyNccl()
    else:
        raise ValueError(f"CYDIST_NCCL_BINDING={wanted!r}: there are cupy and nccl4py")
    if binding.version() < NCCL_MINIMUM:
        raise UnsupportedError(
            "backend 'nccl' needs NCCL 2.11 or later, and "
            f"{version_text(binding.version())} is loaded: {INSTALL}"
        )
    return binding


def version_text(version: int) -> str:
    """NCCL's number of a version for people: 22809 is "2.28.9"."""
    major, rest = divmod(version, 10000)
    return f"{major}.{rest // 100}.{rest % 100}"
