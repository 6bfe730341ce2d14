"""The ring of this process's last calls, its file, and the reading of any such ring."""
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy, memset
from posix.fcntl cimport O_CREAT, O_EXCL, O_RDWR, open as open_fd
from posix.mman cimport (
    MAP_ANONYMOUS, MAP_FAILED, MAP_PRIVATE, MAP_SHARED, PROT_READ, PROT_WRITE, mmap,
)
from posix.time cimport CLOCK_MONOTONIC, clock_gettime, timespec
from posix.unistd cimport close, getpid

from cydist._native.sync cimport fence, load_u32, load_u64, store_u32, store_u64

import errno
import os

cdef extern from "pthread.h" nogil:
    int pthread_atfork(void *, void *, void (*)() noexcept nogil)

cdef extern from *:
    """
    #if defined(__x86_64__) || defined(__aarch64__)
    #define CYDIST_HAS_COUNTER 1
    #else
    #define CYDIST_HAS_COUNTER 0
    #endif
    """
    enum:
        HAS_COUNTER "CYDIST_HAS_COUNTER"

cdef enum:
    HEAD_BYTES = 4096
    LAYOUT = 2
    WHOLE_BYTES = HEAD_BYTES + NAMES_BYTES + RECENT_CALLS * 128

cdef const char *MAGIC = b"cydcalls"
cdef RecentCalls here
cdef RecentHead spare_head          # of a process that got no memory: it overwrites one entry
cdef RecentCall spare_call
cdef uint64_t first_number = 0      # but in tests
cdef dict numbers = {}              # of names of calls

# For Python.
SEND_NAME, RECV_NAME, OTHER_NAMES = SENDING, RECEIVING, OTHERS
STATES = {OVER: "over", IN_TURN: "running", POSTED: "posted", ENQUEUED: "enqueued"}
RUNNING = IN_TURN


cdef RecentCalls *recent_calls() noexcept:
    return &here


cdef void read_clocks(uint64_t *counter, uint64_t *monotonic_ns) noexcept nogil:
    """Read the ring's clock and CLOCK_MONOTONIC at one moment: of some attempts take the one that
    was interrupted least."""
    cdef timespec t
    cdef uint64_t before, past, least = <uint64_t>-1
    cdef int _attempt
    for _attempt in range(5):
        before = ticks(&here)
        clock_gettime(CLOCK_MONOTONIC, &t)
        past = ticks(&here) - before
        if past < least:
            least = past
            counter[0] = before + past // 2
            monotonic_ns[0] = <uint64_t>t.tv_sec * 1000000000 + <uint64_t>t.tv_nsec


cdef void use(char *memory) noexcept nogil:
    """Begin an empty ring in this memory, which is zero; NULL: in the spare entry."""
    if memory == NULL:
        memset(&spare_head, 0, sizeof(RecentHead))
        here.head, here.calls, here.mask = &spare_head, &spare_call, 0
    else:
        here.head = <RecentHead *>memory
        here.calls = <RecentCall *>(memory + HEAD_BYTES + NAMES_BYTES)
        here.mask = RECENT_CALLS - 1
    cdef RecentHead *head = here.head
    head.layout = LAYOUT
    head.calls = <uint32_t>(here.mask + 1)
    head.call_bytes = sizeof(RecentCall)
    head.names_bytes = NAMES_BYTES if memory != NULL else 0
    head.pid = getpid()
    head.next = first_number
    head.clock = here.clock
    read_clocks(&head.ticks, &head.monotonic_ns)
    memcpy(head.magic, MAGIC, 8)


cdef char *own_memory() noexcept nogil:
    cdef void *got = mmap(NULL, WHOLE_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                          -1, 0)
    return NULL if got == MAP_FAILED else <char *>got


cdef void in_child() noexcept nogil:
    # The parent goes on writing into its own.
    use(own_memory())


def _has_counter():
    """Return whether the processor's counter serves as a clock: the kernel uses it as one."""
    if not HAS_COUNTER:
        return False
    try:
        with open("/sys/devices/system/clocksource/clocksource0/available_clocksource") as file:
            return bool({"tsc", "arch_sys_counter"} & set(file.read().split()))
    except OSError:
        return False


here.clock = _has_counter()
use(own_memory())
pthread_atfork(NULL, NULL, in_child)


def open_ring(path: str) -> None:
    """Keep the calls from now on in a new file, which other processes may read. Raises OSError."""
    cdef bytes name = os.fsencode(path)
    cdef void *got
    cdef int fd = open_fd(name, O_CREAT | O_EXCL | O_RDWR | os.O_CLOEXEC, 0o600)
    if fd < 0:
        raise OSError(errno.EIO, "cannot make the file", path)
    try:
        # Blocks for all of it, or an error: a write into a hole of a full disk would kill.
        os.posix_fallocate(fd, 0, WHOLE_BYTES)
        got = mmap(NULL, WHOLE_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0)
    finally:
        close(fd)
    if got == MAP_FAILED:
        raise OSError(errno.ENOMEM, "cannot map the file", path)
    numbers.clear()
    use(<char *>got)        # the former ring stays mapped: a thread may be writing an entry


cdef void begin_ring_at(uint64_t number) noexcept:
    global first_number
    first_number = here.head.next = number
    memset(here.calls, 0, (here.mask + 1) * sizeof(RecentCall))


def add_text(line: str) -> bool:
    """Append a line that explains numbers of this ring; return False if it is full."""
    cdef bytes data = line.encode() + b"\n"
    cdef uint32_t used = here.head.names_used
    if used + <size_t>len(data) > here.head.names_bytes:
        return False
    memcpy(<char *>here.head + HEAD_BYTES + used, <const char *>data, len(data))
    store_u32(&here.head.names_used, used + <uint32_t>len(data))
    return True


def replace_text(list lines not None) -> bool:
    """Put these lines in place of all but those that explain names; return False if they do not
    fit, and leave the text empty then. Readers in other processes notice, and read again."""
    cdef RecentHead *head = here.head
    names = [f"name {number} {name}" for name, number in numbers.items()]
    store_u64(&head.text_version, head.text_version + 1)
    fence()
    store_u32(&head.names_used, 0)
    fits = all([add_text(line) for line in names + lines])
    fence()
    store_u64(&head.text_version, head.text_version + 1)
    return fits


cdef bytes text_of(const unsigned char[::1] memory):
    """Return the text of a ring, or the last attempt's if it was being replaced all the time."""
    cdef const RecentHead *head = <const RecentHead *>&memory[0]
    cdef uint64_t version
    cdef uint32_t used
    cdef int _attempt
    for _attempt in range(100):
        version = load_u64(&head.text_version)
        used = min(load_u32(&head.names_used), <uint32_t>NAMES_BYTES)
        found = bytes(memory[HEAD_BYTES:HEAD_BYTES + used])
        fence()
        if version % 2 == 0 and load_u64(&head.text_version) == version:
            break
    return found


cdef int number_of_name(str name) except -1:
    """Return the number of a call's name, after it has been explained in the ring."""
    found = numbers.get(name)
    if found is None:
        found = OTHERS + len(numbers)
        numbers[name] = found
        add_text(f"name {found} {name}")
    return found


def set_stack_signal(number: int) -> None:
    """Note in the ring that this signal lets the process write its stacks."""
    here.head.stack_signal = number


def own_ring():
    """Return the memory of this process's ring."""
    if here.head == &spare_head:
        raise MemoryError("this process has no memory for its last calls")
    return <unsigned char[:WHOLE_BYTES:1]><unsigned char *>here.head


def clock_now() -> tuple[int, int]:
    """Return this process's clock for rings, in ticks, and CLOCK_MONOTONIC in nanoseconds."""
    cdef uint64_t counter = 0, now = 0
    read_clocks(&counter, &now)
    return counter, now


def read_ring(const unsigned char[::1] memory not None, uint64_t first=0):
    """Read a ring of this process or another one, which may be writing.

    Args:
        first: Leave out calls with a lower number, except those that run.

    Returns its head as a dictionary, its text, and its calls, oldest first, as tuples: number,
    began, seq, bytes, group, name, algorithm, dtype, op, root, state, awaited, since, ended,
    waited, longest, longest_for, queued_ns, blocked, asynchronous. Times are in ticks; 0 and -1
    where nothing is known.

    Raises ValueError if it is none, or of another version of cydist.
    """
    cdef const RecentHead *head
    cdef const RecentCall *calls
    cdef RecentCall c
    cdef uint64_t version, i, last
    cdef int64_t age
    cdef int k, kept
    if memory.shape[0] < HEAD_BYTES:
        raise ValueError("not a ring of calls: it is too short")
    head = <const RecentHead *>&memory[0]
    if memcmp(head.magic, MAGIC, 8) != 0:
        raise ValueError("not a ring of calls, or its process has just begun it")
    if (head.layout != LAYOUT or head.calls != RECENT_CALLS or head.names_bytes != NAMES_BYTES
            or head.call_bytes != sizeof(RecentCall) or memory.shape[0] < WHOLE_BYTES):
        raise ValueError("a ring of calls of another version of cydist")
    text = text_of(memory).decode("utf-8", "replace")
    calls = <const RecentCall *>(&memory[0] + HEAD_BYTES + NAMES_BYTES)
    found = []
    last = load_u64(&head.next)
    kept = RECENT_CALLS
    if first != 0:
        kept = <int>min(last - first, <uint64_t>RECENT_CALLS)
    for k in range(kept):
        i = last - <uint64_t>kept + <uint64_t>k         # their numbers may pass 2**64
        version = load_u64(&calls[i % RECENT_CALLS].version)
        if version != 2 * i + 2 or calls[i % RECENT_CALLS].began == 0:
            continue    # being written, or passed over since its place was taken, or never used
        copy_call(&c, &calls[i % RECENT_CALLS])
        if load_u64(&calls[i % RECENT_CALLS].version) != version:
            continue
        found.append((k - kept, call_tuple(&c, i)))
    # Calls that run, also for so long that the others went round.
    for i in range(<uint64_t>RECENT_CALLS):
        version = load_u64(&calls[i].version)
        age = <int64_t>(2 * last + 2 - version) // 2
        if calls[i].began == 0 or version & 1 or age <= kept or calls[i].state != IN_TURN:
            continue
        copy_call(&c, &calls[i])
        if load_u64(&calls[i].version) == version:
            found.append((-age, call_tuple(&c, last - <uint64_t>age)))
    found.sort()
    return {
        "pid": head.pid, "clock": head.clock, "ticks": head.ticks,
        "monotonic_ns": head.monotonic_ns,
        "stack_signal": head.stack_signal, "calls": last,
    }, text, [call for _age, call in found]


cdef void copy_call(RecentCall *into, const RecentCall *c) noexcept nogil:
    memcpy(into, c, sizeof(RecentCall))
    fence()                         # what was copied was read before the next look


cdef object call_tuple(const RecentCall *c, uint64_t number):
    cdef bint timed = c.timed != 0
    return (
        number, c.began, c.seq, c.nbytes, c.group, c.name, c.algorithm, c.dtype, c.op, c.root,
        c.state, c.awaited, c.since, c.ended if timed else 0, c.waited if timed else 0,
        c.longest if timed else 0, c.longest_for if timed else -1, c.queued_ns if timed else 0,
        c.blocked if timed else 0, c.asynchronous if timed else 0,
    )
