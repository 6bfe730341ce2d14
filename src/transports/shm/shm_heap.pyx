"""Arrays in shared memory: each rank allocates them from its own part of it.

No other process writes this rank's record of the part, so no death can damage it. Arrays that a
dead rank had allocated stay allocated until the job ends.
"""
import threading
from bisect import bisect
from collections import deque

cimport cython
from libc.errno cimport ENOMEM
from cpython.buffer cimport Py_buffer, PyBUF_FORMAT, PyBUF_ND, PyBUF_STRIDES
from cpython.exc cimport PyErr_CheckSignals
from libc.stdint cimport uint64_t, uintptr_t

from cydist._native.abi cimport PAGE
from cydist._native.linux cimport (
    FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE, fallocate, getpid, take_pages,
)

cdef enum:
    UNHEARD_BYTES = 67108864    # allocated between two checks for signals, in about 20 ms

cdef const char *BYTES = b"B"           # the buffer protocol's format of exported memory


def available() -> int:
    """Return the bytes that can be allocated before the host must reclaim memory from others, or
    before the kernel kills a process of this one's cgroup."""
    left = cgroup_left()
    with open("/proc/meminfo", "rb") as lines:
        for line in lines:
            if line.startswith(b"MemAvailable:"):
                return min(left, int(line.split()[1]) << 10)
    return left


# The files of a cgroup of each version: limit, use, and the line of memory.stat with the bytes of
# files, which the kernel gives up before it kills a process.
CGROUPS = {
    b"": ("sys/fs/cgroup", "memory.max", "memory.current", b"inactive_file"),
    b"memory": ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
                b"total_inactive_file"),
}


def cgroup_left(str root="/") -> int:
    """Return the bytes that this process's cgroups may still take, the smallest on the way up.

    Args:
        root: The tree in which to look, for tests.
    """
    left = 1 << 62
    try:
        with open(f"{root}/proc/self/cgroup", "rb") as lines:
            entries = [line.rstrip(b"\n").split(b":", 2) for line in lines]
    except OSError:
        return left
    for _, controllers, path in entries:
        for controller in controllers.split(b","):
            if controller in CGROUPS:
                top, *files = CGROUPS[controller]
                parts = [each for each in path.decode().split("/") if each not in ("", "..")]
                # A container may see its own cgroup as the top one, under the host's path.
                for depth in range(len(parts), -1, -1):
                    left = min(left, one_left("/".join((root, top, *parts[:depth])), *files))
    return left


def one_left(str directory, str limit, str used, bytes files):
    try:
        with open(f"{directory}/{limit}", "rb") as file:
            most = file.read().strip()
        if not most.isdigit() or int(most) >= 1 << 62:      # v2: max; v1: nearly 2^63
            return 1 << 62
        with open(f"{directory}/{used}", "rb") as file:
            left = int(most) - int(file.read())
        with open(f"{directory}/memory.stat", "rb") as lines:
            for line in lines:
                name, _, count = line.partition(b" ")
                if name == files:
                    left += int(count)
    except (OSError, ValueError):
        return 1 << 62
    return max(0, left)


cdef class Heap:
    """One rank's part of shared memory, in whole pages.

    Args:
        memory: Keeps the mapping and the descriptor.
        fd, address: Of the memory, and where its part begins here.
        start, nbytes: The part's place in the memory.
    """

    cdef object memory, lock, returned
    cdef int fd, pid
    cdef uintptr_t address
    cdef uint64_t start
    cdef readonly uint64_t nbytes
    cdef list free                      # [start, end) in the part, in order, never touching

    def __init__(self, memory, int fd, uintptr_t address, uint64_t start, uint64_t nbytes):
        self.memory = memory
        self.fd = fd
        self.pid = getpid()
        self.address = address
        self.start = start
        self.nbytes = nbytes // PAGE * PAGE
        self.free = [(0, self.nbytes)] if self.nbytes else []
        self.lock = threading.Lock()
        # Ranges to free. The collector may add to it at any moment, so that takes no lock.
        self.returned = deque()

    def left(self) -> int:
        """Return the bytes that are not allocated."""
        with self.lock:
            self.reclaim()
            return sum(end - start for start, end in self.free)

    def allocate(self, uint64_t nbytes) -> HeapBuffer:
        """Allocate `nbytes` zeroed bytes, from the beginning of a page, while the result lives.

        Its pages are allocated: no later write can fail. Raises MemoryError.
        """
        cdef uint64_t room = ((nbytes if nbytes else 1) + PAGE - 1) // PAGE * PAGE
        cdef int error = 0
        cdef uint64_t done = 0, some
        cdef HeapBuffer held
        if room < nbytes or room > self.nbytes:
            raise MemoryError(f"{nbytes} bytes are more than the {self.nbytes} of a rank's part "
                              "of the host's shared memory")
        if room > (spare := available()):
            raise MemoryError(f"no shared memory for an array of {nbytes} bytes: this host, or "
                              f"this process's cgroup, has {spare} bytes left")
        with self.lock:
            self.reclaim()
            held = HeapBuffer.__new__(HeapBuffer, self, self.first_fit(room), nbytes, room)
        while done < held.room and not error:
            PyErr_CheckSignals()
            some = min(held.room - done, <uint64_t>UNHEARD_BYTES)
            if done and some > available():     # other ranks take memory at the same time
                error = ENOMEM
                break
            with nogil:
                error = take_pages(self.fd, self.start + held.offset + done, some)
            done += some
        if error:
            raise MemoryError(f"no shared memory for an array of {nbytes} bytes: error {error}")
        return held

    cdef uint64_t first_fit(self, uint64_t room) except? 0xFFFFFFFFFFFFFFFF:
        for i, (start, end) in enumerate(self.free):
            if end - start >= room:
                if end - start == room:
                    del self.free[i]
                else:
                    self.free[i] = (start + room, end)
                return start
        left = sum(end - start for start, end in self.free)
        raise MemoryError(f"no {room} bytes in one piece among the {left} that are left of the "
                          f"{self.nbytes} of this rank's part of the host's shared memory")

    cdef int reclaim(self) except -1:
        while self.returned:
            start, end = self.returned.popleft()
            i = bisect(self.free, (start, end))
            if i < len(self.free) and self.free[i][0] == end:
                end = self.free.pop(i)[1]
            if i > 0 and self.free[i - 1][1] == start:
                start = self.free.pop(i - 1)[0]
                i -= 1
            self.free.insert(i, (start, end))
        return 0


# Dealloc needs the heap, so the collector must not clear it before.
@cython.no_gc_clear
cdef class HeapBuffer:
    """Memory of an array: a writable buffer. The end of the last view frees its pages."""

    cdef Heap heap
    cdef readonly uint64_t offset       # from the start of the heap's part
    cdef readonly uint64_t nbytes
    cdef uint64_t room                  # whole pages, in bytes

    def __cinit__(self, Heap heap not None, uint64_t offset, uint64_t nbytes, uint64_t room):
        self.heap = heap
        self.offset = offset
        self.nbytes = nbytes
        self.room = room

    def __dealloc__(self):
        if self.heap is None or getpid() != self.heap.pid:
            return                      # it belongs to the parent process
        fallocate(self.heap.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
                  self.heap.start + self.offset, self.room)
        self.heap.returned.append((self.offset, self.offset + self.room))

    def __getbuffer__(self, Py_buffer *view, int flags):
        view.buf = <void *>(self.heap.address + self.offset)
        view.obj = self
        view.len = <Py_ssize_t>self.nbytes
        view.readonly = False
        view.itemsize = 1
        view.format = <char *>BYTES if flags & PyBUF_FORMAT else NULL
        view.ndim = 1
        view.shape = &view.len if flags & PyBUF_ND else NULL
        view.strides = &view.itemsize if (flags & PyBUF_STRIDES) == PyBUF_STRIDES else NULL
        view.suboffsets = NULL
        view.internal = NULL
