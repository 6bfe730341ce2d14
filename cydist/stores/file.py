"""FileStore: a store in a file that all ranks can reach, such as one on NFS.

The file is a log of the requests that changed the store: eight bytes of magic, then requests in the
layout of `cydist.stores.protocol`. Each user replays the requests that others appended, under an
fcntl lock, and so has the same table. A request that was cut off by its writer's death is found by
its length and overwritten. A log that is much longer than its table is rewritten to a second file,
which replaces
it.

Each user also holds a lock on a second file beside it, for as long as it lives. That file is never
replaced, so any process can see whether the first one is in use or abandoned. Where the directory
is not writable, nothing is replaced, and the lock is on one byte far after the log.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import stat
import struct
import threading
import time
import weakref
from collections.abc import Iterator, Sequence

from cydist.errors import DistStoreError, StoreTimeoutError
from cydist.stores.kv_table import KeyValueTable
from cydist.stores.protocol import (
    INTERNAL,
    LENGTH,
    MAX_TOTAL_BYTES,
    MUTATING,
    Op,
    StoreRequest,
    decode_request,
    encode_request,
)
from cydist.stores.store import Store, Timeout, store_timeout
from cydist.waiting import STORE_TIMEOUT, one_wait

_MAGIC = b"cydist\x01\n"
_FIRST_PAUSE, _LONGEST_PAUSE = 0.0005, 0.02
# A log is rewritten when it is longer than this, and longer than this multiple of its table.
_SHORTEST_BYTES, _TIMES_THE_TABLE = 1 << 20, 4
# The locked regions: the log, and the byte that marks the file as in use.
_LOG = (0, 1 << 62)
_IN_USE = (1 << 62, 1)

# Others may write there: most bytes that are read at once, of requests that are short, and how long
# a request reads what has been appended, at least.
_READ_BYTES = 1 << 24
_REPLAY_SECONDS = 10.0

_USERS = ".users"  # appended to the path: the file on which users hold their locks

_OPENED = INTERNAL + b"opened"
_CLOSED = INTERNAL + b"closed"


def log_entry(request: StoreRequest) -> bytes:
    """Return what the log holds of a request: its length, and its bytes."""
    body = encode_request(request)
    return LENGTH.pack(len(body)) + body


class FileStore(Store):
    """A store in a file, which is created when missing.

    A user closes the store with `close`, with garbage collection, or at its process's end. A file
    that an earlier job left behind keeps its keys, unless `fresh` is set.

    Args:
        file_name: Path of the file.
        world_size: Number of users. The file is removed when that many have opened it and all have
            closed it; if one dies, it stays. Negative: not fixed, and the file is never removed.
        timeout: Of later calls by default.
        fresh: Empty a file that is not in use: its users died before they closed it.

    Raises:
        DistStoreError: The directory is missing, or the file is something else.

    Examples:
        >>> import os, tempfile
        >>> store = dist.FileStore(os.path.join(tempfile.mkdtemp(), "store"), world_size=1)
        >>> store.add("steps", 1)
        1
        >>> store.close()
    """

    __module__ = "cydist"

    def __init__(
        self,
        file_name: str,
        world_size: int = -1,
        timeout: Timeout = STORE_TIMEOUT,
        *,
        fresh: bool = False,
    ) -> None:
        super().__init__(timeout)
        self._path = os.fspath(file_name)
        self._world_size = world_size
        self._log = _Log(self._path, fresh)
        self._request(StoreRequest(Op.ADD, (_OPENED,), (b"1",), False, self._timeout))
        self._leave = weakref.finalize(self, _leave, self._log, world_size, os.getpid())

    @property
    def path(self) -> str:
        """Return the path of the file.

        Returns:
            The path, as it was given.
        """
        return self._path

    def _request(self, request: StoreRequest) -> Sequence[bytes]:
        deadline = time.monotonic() + request.timeout
        pause = _FIRST_PAUSE
        while True:
            with self._log.locked(deadline, exclusive=request.op in MUTATING) as table:
                if table.awaits(request) is None:
                    items = table.execute(request)
                    if request.op in MUTATING:
                        self._log.append(request)
                    return items
                missing = table.missing(request)
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise store_timeout(f"FileStore {self._path}", request.timeout, missing)
            pause = self._log.pause(min(pause, remaining))

    def num_keys(self) -> int:
        """Return the number of keys: one more than the user's, for the count of workers."""
        return super().num_keys() + 1

    def clone(self) -> FileStore:
        """Return another object for the same file, with a timeout of its own, counted as a user."""
        return FileStore(self._path, self._world_size, self.timeout)

    def close(self) -> None:
        """Stop using the file; the last of `world_size` users removes it."""
        self._leave()


def _leave(log: _Log, world_size: int, pid: int) -> None:
    """Count this user out, and remove the file after the last one. Best effort, at exit too."""
    if pid != os.getpid():
        return  # a forked child was not counted
    request = StoreRequest(Op.ADD, (_CLOSED,), (b"1",))
    with (
        contextlib.suppress(OSError, DistStoreError),
        log.locked(time.monotonic() + 1, exclusive=True) as table,
    ):
        (closed,) = table.execute(request)
        log.append(request)
        (opened,) = table.execute(StoreRequest(Op.GET, (_OPENED,)))
        if 0 < world_size <= int(closed) and closed == opened:
            log.remove()
    log.close()


class _Log:
    """The open file, and the table that its requests produce."""

    def __init__(self, path: str, fresh: bool) -> None:
        self.path = path
        self._fresh = fresh
        self._lock = threading.Lock()
        self._fd = -1
        self._users = -1  # the second file, on which this process holds the lock of a user
        self._in_use = False  # whether it holds it, there or on the log
        self._table = KeyValueTable(MAX_TOTAL_BYTES)
        self._end = 0  # offset up to which the log was replayed
        _logs.add(self)

    @contextlib.contextmanager
    def locked(self, deadline: float, *, exclusive: bool) -> Iterator[KeyValueTable]:
        """Yield the current table, while no other process writes (exclusive: or reads)."""
        while not self._lock.acquire(timeout=one_wait(max(0.0, deadline - time.monotonic()))):
            if time.monotonic() >= deadline:
                raise self._locked_out()
        try:
            try:
                self._lock_and_replay(deadline, exclusive)
                yield self._table
            finally:
                if self._fd >= 0:
                    _flock(self._fd, fcntl.F_UNLCK, _LOG)
        finally:
            self._lock.release()

    def _lock_and_replay(self, deadline: float, exclusive: bool) -> None:
        """Lock the file, and bring the table up to date."""
        try:
            self._open_and_lock(deadline, exclusive)
            self._replay(max(deadline, time.monotonic() + _REPLAY_SECONDS))
        except DistStoreError:  # timeouts are errors of the system, too
            raise
        except OSError as error:
            self._reset()
            raise DistStoreError(f"FileStore {self.path}: cannot use: {error}") from None

    def append(self, request: StoreRequest) -> None:
        """Write a request that was executed; the lock is held exclusively."""
        if request.block:
            request = StoreRequest(request.op, request.keys, request.values)
        frame = log_entry(request)
        if len(frame) > MAX_TOTAL_BYTES:
            self._reset()
            raise DistStoreError(
                f"FileStore {self.path}: a request of {len(frame)} bytes: it takes at most "
                f"{MAX_TOTAL_BYTES}"
            )
        try:
            if os.fstat(self._fd).st_size > self._end:
                os.ftruncate(self._fd, self._end)  # a dead writer's unfinished request
            written = 0
            while written < len(frame):
                written += os.pwrite(self._fd, frame[written:], self._end + written)
        except OSError as error:
            # The table must match the file: read the file again.
            self._reset()
            raise DistStoreError(f"FileStore {self.path}: cannot write: {error}") from None
        self._end += len(frame)
        if self._end > max(_SHORTEST_BYTES, _TIMES_THE_TABLE * self._table.used_bytes):
            self._write_anew()

    def _write_anew(self) -> None:
        """Replace the file by one that holds only the table's present contents.

        Other users notice that their file has lost its name, and open the new one. The new file is
        complete before it gets the name, so a process that dies meanwhile leaves the old one.
        """
        beside = f"{self.path}.new"  # at most one, since the lock is held
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(beside)  # of a dead writer, or what somebody else has put there
            fd = os.open(beside, flags, 0o600)
        except OSError:
            return  # the directory is not writable: the log goes on growing
        try:
            with open(fd, "wb", closefd=False) as file:
                file.write(_MAGIC)
                file.writelines(log_entry(request) for request in self._table.requests())
                end = file.tell()
            _flock(fd, fcntl.F_WRLCK, _LOG)  # the caller is not done yet
            os.rename(beside, self.path)
        except OSError:
            os.close(fd)
            with contextlib.suppress(OSError):
                os.unlink(beside)
            return
        os.close(self._fd)
        self._fd, self._end = fd, end

    def pause(self, seconds: float) -> float:
        """Wait briefly for another process to write; return how long to wait next time."""
        time.sleep(seconds)
        return min(2 * seconds, _LONGEST_PAUSE) or _FIRST_PAUSE

    def close(self) -> None:
        """Close the files; they are opened again when needed."""
        with self._lock:
            self._reset()
            self._stop_using()

    def _reset(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = -1
        self._in_use = self._in_use and self._users >= 0
        self._table = KeyValueTable(MAX_TOTAL_BYTES)
        self._end = 0

    def abandon(self) -> None:
        """In a forked child, close the file: the child shares its parent's locks as long as it
        shares the open file."""
        self._lock = threading.Lock()
        self._reset()
        self._stop_using()

    def _stop_using(self) -> None:
        if self._users >= 0:
            os.close(self._users)
        self._users = -1
        self._in_use = False

    def remove(self) -> None:
        """Remove both files. The log's lock is held exclusively."""
        with contextlib.suppress(OSError):
            os.unlink(f"{self.path}{_USERS}")
        os.unlink(self.path)

    def _open_and_lock(self, deadline: float, exclusive: bool) -> None:
        """Lock the file that has the path now: the last user may have removed an earlier one."""
        while True:
            if self._fd < 0:
                self._open()
            # The first lock is exclusive, so that no other process checks meanwhile whether the
            # file is in use.
            alone = exclusive or not self._in_use
            try:
                self._wait_for_lock(deadline, fcntl.F_WRLCK if alone else fcntl.F_RDLCK)
                if os.fstat(self._fd).st_nlink:
                    self._use()
                    return
            except OSError as error:
                if error.errno != errno.ESTALE:  # another host removed it
                    raise
            self._reset()

    def _use(self) -> None:
        """Take the lock of a user. Called the first time, while the log's lock is held
        exclusively."""
        if self._in_use and (self._users < 0 or os.fstat(self._users).st_nlink):
            return
        magic = os.pread(self._fd, len(_MAGIC), 0)
        if magic != _MAGIC[: len(magic)]:
            return  # `_begin` refuses it
        self._stop_using()
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        with contextlib.suppress(OSError):
            self._users = os.open(f"{self.path}{_USERS}", flags, 0o600)
        fd = self._fd if self._users < 0 else self._users
        if self._fresh:
            with contextlib.suppress(OSError):  # another process uses it
                _flock(fd, fcntl.F_WRLCK, _IN_USE)
                os.ftruncate(self._fd, 0)
        self._fresh = False
        try:
            _flock(fd, fcntl.F_RDLCK, _IN_USE)
        except OSError as error:
            raise OSError(error.errno, "another program keeps it to itself by a lock") from None
        self._in_use = True

    def _open(self) -> None:
        try:
            self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise DistStoreError(f"FileStore {self.path}: cannot open: {error}") from None
        if not stat.S_ISREG(os.fstat(self._fd).st_mode):
            self._reset()
            raise DistStoreError(f"FileStore {self.path}: it is not a regular file")

    def _wait_for_lock(self, deadline: float, kind: int) -> None:
        pause = _FIRST_PAUSE / 4
        while True:
            try:
                _flock(self._fd, kind, _LOG)
                return
            except OSError as error:
                if error.errno == errno.ESTALE:
                    raise
                if error.errno not in (errno.EAGAIN, errno.EACCES):
                    raise DistStoreError(
                        f"FileStore {self.path}: cannot lock: {error}; the file system must "
                        "support locks of fcntl"
                    ) from None
            # Not F_SETLKW: it has no deadline, and the holder may be stopped.
            if time.monotonic() >= deadline:
                raise self._locked_out()
            pause = self.pause(pause)

    def _locked_out(self) -> StoreTimeoutError:
        return StoreTimeoutError(
            f"FileStore {self.path}: timeout: another process or thread keeps the file locked"
        )

    def _replay(self, deadline: float) -> None:
        """Apply the requests that others have appended since the last time."""
        size = os.fstat(self._fd).st_size
        if size < self._end:
            # Another process emptied the file to start again.
            self._table, self._end = KeyValueTable(MAX_TOTAL_BYTES), 0
        if self._end == 0:
            self._begin(size)
        least = LENGTH.size
        while size - self._end >= least:
            if time.monotonic() > deadline:
                raise StoreTimeoutError(f"FileStore {self.path}: timeout: it is too long to read")
            data = self._read(min(size - self._end, max(least, _READ_BYTES)))
            if len(data) < least:
                break  # another process is emptying it
            least = self._apply_all(data)

    def _apply_all(self, data: bytes) -> int:
        """Apply the whole requests in `data`; return how many bytes the next one takes."""
        start = 0
        while start + LENGTH.size <= len(data):
            length: int = LENGTH.unpack_from(data, start)[0]
            end = start + LENGTH.size + length
            if length > MAX_TOTAL_BYTES:
                self._reset()
                raise DistStoreError(
                    f"FileStore {self.path} is damaged: a request of {length} bytes"
                )
            if end > len(data):
                self._end += start
                return end - start  # more than there is: its writer died, the next overwrites it
            self._apply(data[start + LENGTH.size : end])
            start = end
        self._end += start
        return LENGTH.size

    def _begin(self, size: int) -> None:
        """Check the magic, or write it into an empty file."""
        magic = os.pread(self._fd, len(_MAGIC), 0)
        if magic != _MAGIC[: len(magic)]:
            raise DistStoreError(f"{self.path} is not a FileStore's file: it begins with {magic!r}")
        if len(magic) < len(_MAGIC):
            # Two readers may do this at once, with the same bytes.
            os.pwrite(self._fd, _MAGIC, 0)
        self._end = len(_MAGIC)

    def _read(self, count: int) -> bytes:
        parts = []
        start = self._end
        while count > 0:
            part = os.pread(self._fd, min(count, _READ_BYTES), start)
            if not part:
                break
            parts.append(part)
            start += len(part)
            count -= len(part)
        return b"".join(parts)

    def _apply(self, body: bytes) -> None:
        try:
            self._table.execute(decode_request(body))
        except DistStoreError as error:
            self._reset()  # half of it is in the table, and would be applied twice
            raise DistStoreError(f"FileStore {self.path} is damaged: {error}") from None


def _flock(fd: int, kind: int, region: tuple[int, int]) -> None:
    """Lock or unlock a region for this open file, so that threads exclude each other too.

    Raises OSError with EAGAIN if another process holds it.
    """
    command = fcntl.F_OFD_SETLK
    fcntl.fcntl(fd, command, struct.pack("hhqqi4x", kind, os.SEEK_SET, *region, 0))


_logs: weakref.WeakSet[_Log] = weakref.WeakSet()


def _after_fork() -> None:
    for log in list(_logs):
        log.abandon()


os.register_at_fork(after_in_child=_after_fork)
