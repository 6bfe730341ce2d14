"""The parts of every wait: atomic words, the futex, and how long to spin.

A wait first spins (only where there are cores for it), yields a few times, then sleeps in
slices of at most SLICE_NS, each of which ends in abi.slice_end.
"""
from libc.stdint cimport int64_t, uint32_t, uint64_t


cdef extern from *:
    """
    #ifndef CYDIST_WAITING
    #define CYDIST_WAITING
    #include <errno.h>
    #include <linux/futex.h>
    #include <sched.h>
    #include <stdint.h>
    #include <sys/syscall.h>
    #include <time.h>
    #include <unistd.h>

    /* Acquire and release: writes before a store are visible after the load that sees it. */
    static inline int cydist_load_int(const volatile int *p) {
        return __atomic_load_n(p, __ATOMIC_ACQUIRE);
    }
    static inline void cydist_store_int(volatile int *p, int v) {
        __atomic_store_n(p, v, __ATOMIC_RELEASE);
    }
    /* Without order, for words that only tests change. */
    static inline int cydist_glance_int(const int *p) {
        return __atomic_load_n(p, __ATOMIC_RELAXED);
    }
    static inline int cydist_exchange_int(int *p, int v) {
        return __atomic_exchange_n(p, v, __ATOMIC_ACQ_REL);
    }
    static inline uint64_t cydist_load_u64(const uint64_t *p) {
        return __atomic_load_n(p, __ATOMIC_ACQUIRE);
    }
    static inline void cydist_store_u64(uint64_t *p, uint64_t v) {
        __atomic_store_n(p, v, __ATOMIC_RELEASE);
    }
    /* Replace `seen` by v. 0: *p has another value by now, which is put into `seen`. */
    static inline int cydist_compare_swap_u64(uint64_t *p, uint64_t *seen, uint64_t v) {
        return __atomic_compare_exchange_n(p, seen, v, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    }
    /* Sequentially consistent, as are add_u32 and load_u32. */
    static inline void cydist_swap_u64(uint64_t *p, uint64_t v) {
        __atomic_exchange_n(p, v, __ATOMIC_SEQ_CST);
    }
    static inline uint32_t cydist_load_u32(const uint32_t *p) {
        return __atomic_load_n(p, __ATOMIC_SEQ_CST);
    }
    static inline void cydist_and_u64(uint64_t *p, uint64_t v) {
        __atomic_fetch_and(p, v, __ATOMIC_SEQ_CST);
    }
    static inline void cydist_or_u64(uint64_t *p, uint64_t v) {
        __atomic_fetch_or(p, v, __ATOMIC_SEQ_CST);
    }
    static inline void cydist_store_u32(uint32_t *p, uint32_t v) {
        __atomic_store_n(p, v, __ATOMIC_SEQ_CST);
    }
    static inline uint32_t cydist_add_u32(uint32_t *p, uint32_t v) {
        return __atomic_add_fetch(p, v, __ATOMIC_SEQ_CST);
    }
    /* Between this thread's store and its load of another word. The other side does the same, so
       one of the two sees the other's store: a sleeper announces itself, a waker looks for it. */
    static inline void cydist_fence(void) { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

    static inline void cydist_pause(void) {
    #if defined(__x86_64__) || defined(__i386__)
        __builtin_ia32_pause();
    #elif defined(__aarch64__)
        __asm__ __volatile__("yield");
    #endif
    }
    static inline void cydist_futex_wait(uint32_t *p, uint32_t seen, int64_t ns) {
        struct timespec t = {ns / 1000000000, ns % 1000000000};
        if (ns > 0)
            syscall(SYS_futex, p, FUTEX_WAIT_PRIVATE, seen, &t, 0, 0);
    }
    static inline void cydist_futex_wake(uint32_t *p) {
        syscall(SYS_futex, p, FUTEX_WAKE_PRIVATE, 0x7fffffff, 0, 0, 0);
    }
    static inline void cydist_futex_wait_shared(uint32_t *p, uint32_t seen, int64_t ns) {
        struct timespec t = {ns / 1000000000, ns % 1000000000};
        if (ns > 0)
            syscall(SYS_futex, p, FUTEX_WAIT, seen, &t, 0, 0);
    }
    static inline void cydist_futex_wake_shared(uint32_t *p) {
        syscall(SYS_futex, p, FUTEX_WAKE, 0x7fffffff, 0, 0, 0);
    }
    /* The half of a 64-bit word that changes with every step. */
    static inline uint32_t *cydist_low_half(uint64_t *p) {
        return (uint32_t *)p + (__BYTE_ORDER__ == __ORDER_BIG_ENDIAN__);
    }
    static inline int cydist_cores_of(const int *pids, int count) {
        cpu_set_t all, each;
        int i;
        CPU_ZERO(&all);
        for (i = 0; i < count; i++)
            if (sched_getaffinity(pids[i], sizeof each, &each) == 0)
                CPU_OR(&all, &all, &each);
        return CPU_COUNT(&all) > 0 ? CPU_COUNT(&all) : 1;
    }
    static inline int cydist_cores(void) {
        const int self = 0;
        return cydist_cores_of(&self, 1);
    }
    static inline int cydist_cores_online(void) {
        return (int)sysconf(_SC_NPROCESSORS_ONLN);
    }
    #endif
    """
    int load_int "cydist_load_int"(const volatile int *p) noexcept nogil
    void store_int "cydist_store_int"(volatile int *p, int v) noexcept nogil
    int glance_int "cydist_glance_int"(const int *p) noexcept nogil
    int exchange_int "cydist_exchange_int"(int *p, int v) noexcept nogil
    uint32_t load_u32 "cydist_load_u32"(const uint32_t *p) noexcept nogil
    uint64_t load_u64 "cydist_load_u64"(const uint64_t *p) noexcept nogil
    void store_u64 "cydist_store_u64"(uint64_t *p, uint64_t v) noexcept nogil
    void swap_u64 "cydist_swap_u64"(uint64_t *p, uint64_t v) noexcept nogil
    bint compare_swap_u64 "cydist_compare_swap_u64"(uint64_t *p, uint64_t *seen,
                                                    uint64_t v) noexcept nogil
    void and_u64 "cydist_and_u64"(uint64_t *p, uint64_t v) noexcept nogil
    void or_u64 "cydist_or_u64"(uint64_t *p, uint64_t v) noexcept nogil
    void store_u32 "cydist_store_u32"(uint32_t *p, uint32_t v) noexcept nogil
    uint32_t add_u32 "cydist_add_u32"(uint32_t *p, uint32_t v) noexcept nogil
    void fence "cydist_fence"() noexcept nogil
    void pause "cydist_pause"() noexcept nogil
    # Sleep until woken, at most `ns`; returns at once if *p is no longer `seen`.
    void futex_wait "cydist_futex_wait"(uint32_t *p, uint32_t seen, int64_t ns) noexcept nogil
    void futex_wake "cydist_futex_wake"(uint32_t *p) noexcept nogil
    # The same if waiter and waker may be different processes.
    void futex_wait_shared "cydist_futex_wait_shared"(uint32_t *p, uint32_t seen,
                                                      int64_t ns) noexcept nogil
    void futex_wake_shared "cydist_futex_wake_shared"(uint32_t *p) noexcept nogil
    uint32_t *low_half "cydist_low_half"(uint64_t *p) noexcept nogil
    int cores "cydist_cores"() noexcept nogil     # on which this process may run
    int cores_online "cydist_cores_online"() noexcept nogil
    # On which these processes may run together: launchers bind each rank to a core of its own.
    int cores_of "cydist_cores_of"(const int *pids, int count) noexcept nogil
    int sched_yield() noexcept nogil


cdef enum:
    SLICE_NS = 20000000         # the longest sleep between two checks of clock and signals
    LOOKS = 100                 # about 1 us of pauses, during which no lock is released
    SPINS = 2000                # about 20 to 50 us
    YIELDS = 4
    SWITCH_NS = 2000            # another thread has run on the core if a yield took longer
    YIELD_NS = 1000000          # how long a wait for a flag yields before it sleeps
    PAUSE_US = 200              # between two looks at what cannot wake a thread
    GRACE_NS = 100000000        # for a peer that accesses this rank's memory when it gives up


# Return the end of the next slice of sleep.
cdef inline int64_t slice_until(int64_t now, int64_t deadline_ns) noexcept nogil:
    return now + SLICE_NS if deadline_ns - now > SLICE_NS else deadline_ns


# Return how long to spin next time. On a host whose cores are busy with other work spinning never
# pays and is soon given up; it is retried now and then. It grows slowly: ranks that share a core
# without knowing it (those of two containers, say) gain from it at times, and lose on average.
cdef inline int spins_after(int spins, int most, bint paid) noexcept nogil:
    if paid:
        return min(spins + most // 32, most)
    return spins // 2 if spins > most // 16 else spins


# Return how long to spin next time, after a yield that took so long. If another thread ran on the
# core, it may be the one that is waited for. If none did, the core is free again.
cdef inline int spins_after_yield(int spins, int most, int64_t took_ns) noexcept nogil:
    return min(spins, most // 64) if took_ns > SWITCH_NS else max(spins, most // 16)


# Return how long to spin next time, after a sleep that a longer spin would have saved. If no other
# thread took the core before it, spinning costs nothing, and the next short wait shall be awake.
cdef inline int spins_after_short_sleep(int spins, int most, bint free) noexcept nogil:
    return min(2 * spins + most // 16, most) if free else spins_after(spins, most, True)


# Return whether a counter has come to this value. Counters may pass 2**64: what is less than 2**63
# ahead of another value is after it.
cdef inline bint has_reached(uint64_t counter, uint64_t value) noexcept nogil:
    return <int64_t>(counter - value) >= 0


# Poll a flag as often as pays here. Return whether it is up.
cdef inline bint spin(const uint64_t *flag, uint64_t value, int *spins, int most) noexcept nogil:
    cdef int given = spins[0]
    cdef int _look
    for _look in range(given):
        if has_reached(load_u64(flag), value):
            spins[0] = spins_after(given, most, True)
            return True
        pause()
    spins[0] = spins_after(given, most, False)
    return False
