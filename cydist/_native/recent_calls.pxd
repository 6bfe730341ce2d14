"""The last calls of this process, for reports and timelines: a ring in memory that a launcher may
map too, so that it can be read while this process computes, is stopped, or is dead.

An entry is claimed and ended with the GIL held; waits are noted without it. A reader takes no lock:
an entry's `version` is odd while it is being filled in, and changes when the entry is used again.
"""
from libc.stdint cimport int32_t, int64_t, uint8_t, uint16_t, uint32_t, uint64_t


cdef extern from *:
    """
    #ifndef CYDIST_RECENT_CALLS
    #define CYDIST_RECENT_CALLS
    #include <Python.h>
    #include <stdint.h>
    #include <time.h>

    #define CYDIST_RECENT 2048          /* calls; a power of two */
    #define CYDIST_RECENT_NAMES 32768   /* bytes of text that explain their numbers */
    enum { CYDIST_OVER = 0, CYDIST_RUNNING = 1, CYDIST_POSTED = 2, CYDIST_ENQUEUED = 3 };

    typedef struct {                /* two cache lines; a call that did not wait uses the first */
        uint64_t version;           /* 2 + 2 * its number in this process; odd: half written */
        uint64_t began;             /* ticks */
        uint64_t seq;               /* of a message: its tag */
        uint64_t nbytes;
        uint16_t group, name, algorithm;
        uint8_t dtype, op;
        int32_t root;               /* group rank, or -1; of a message: its peer */
        int32_t state;              /* one of the enum, or the negative Status it failed with */
        int32_t awaited;            /* group rank that it waits for now, or -1 */
        int32_t timed;              /* whether the second line is filled in */
        uint64_t since;             /* ticks: when it began to wait for that rank */
        uint64_t ended;             /* ticks; 0: not yet */
        uint64_t waited;            /* ticks in all waits */
        uint64_t longest;           /* ticks in the longest wait for one rank */
        int32_t longest_for, pad;
        uint64_t queued_ns;         /* from the call's issue to its turn */
        uint64_t blocked;           /* ticks of an asynchronous call in which its caller waited */
        int32_t asynchronous, pad2;
        uint64_t more;
    } cydist_recent_call;

    typedef struct {                /* one page, then the text, then the calls */
        char magic[8];
        uint32_t layout, calls, call_bytes, names_bytes;
        int32_t pid, clock;         /* clock 1: ticks of the processor's counter; 0: ns */
        uint64_t ticks, monotonic_ns;       /* at one moment */
        int32_t stack_signal;       /* writes Python's stacks into a file; 0: none does */
        uint32_t names_used;
        uint64_t text_version;      /* odd: the text is being replaced */
        uint64_t pad[7];
        uint64_t next;              /* calls claimed so far */
    } cydist_recent_head;

    typedef struct {                /* where this process's ring is */
        cydist_recent_head *head;
        cydist_recent_call *calls;
        uint64_t mask;
        int clock;
    } cydist_recent_calls;

    static inline uint64_t cydist_recent_ticks(const cydist_recent_calls *r) {
    #if defined(__x86_64__)
        if (r->clock)
            return __builtin_ia32_rdtsc();
    #elif defined(__aarch64__)
        if (r->clock) {
            uint64_t t;
            __asm__ __volatile__("mrs %0, cntvct_el0" : "=r"(t));
            return t;
        }
    #endif
        struct timespec t;
        clock_gettime(CLOCK_MONOTONIC, &t);
        return (uint64_t)t.tv_sec * 1000000000 + t.tv_nsec;
    }

    /* With the GIL held. Calls that run are never overwritten, unless very many do. */
    static inline cydist_recent_call *cydist_recent_claim(
            cydist_recent_calls *r, int group, int name, uint64_t seq, uint64_t nbytes,
            int algorithm, int dtype, int op, int root, int state, int awaited) {
        cydist_recent_call *c;
        uint64_t i;
        int tries = 64;
        do {
    #ifdef Py_GIL_DISABLED
            i = __atomic_fetch_add(&r->head->next, 1, __ATOMIC_RELAXED);
    #else
            i = r->head->next++;
    #endif
            c = &r->calls[i & r->mask];
        } while (__builtin_expect(c->state == CYDIST_RUNNING, 0) && --tries);
        __atomic_store_n(&c->version, 2 * i + 1, __ATOMIC_RELAXED);
        __atomic_thread_fence(__ATOMIC_RELEASE);
        c->began = cydist_recent_ticks(r);
        c->seq = seq;
        c->nbytes = nbytes;
        c->group = (uint16_t)group;
        c->name = (uint16_t)name;
        c->algorithm = (uint16_t)algorithm;
        c->dtype = (uint8_t)dtype;
        c->op = (uint8_t)op;
        c->root = root;
        c->state = state;
        c->awaited = awaited;
        c->timed = 0;
        __atomic_store_n(&c->version, 2 * i + 2, __ATOMIC_RELEASE);
        __builtin_prefetch(&r->calls[(i + 1) & r->mask], 1);
        return c;
    }

    static inline void cydist_recent_time(cydist_recent_call *c) {
        if (!c->timed) {
            c->ended = c->waited = c->longest = c->queued_ns = c->blocked = 0;
            c->asynchronous = 0;
            c->longest_for = -1;
            __atomic_store_n(&c->timed, 1, __ATOMIC_RELEASE);
        }
    }
    static inline void cydist_recent_wait(const cydist_recent_calls *r, cydist_recent_call *c,
                                          int peer) {
        cydist_recent_time(c);
        c->since = cydist_recent_ticks(r);
        __atomic_store_n(&c->awaited, peer, __ATOMIC_RELEASE);
    }
    static inline void cydist_recent_waited(const cydist_recent_calls *r, cydist_recent_call *c) {
        uint64_t spent = cydist_recent_ticks(r) - c->since;
        c->waited += spent;
        if (spent > c->longest) {
            c->longest = spent;
            c->longest_for = c->awaited;
        }
        __atomic_store_n(&c->awaited, -1, __ATOMIC_RELEASE);
    }
    static inline void cydist_recent_end(const cydist_recent_calls *r, cydist_recent_call *c,
                                         int state, int timed) {
        if (timed) {
            cydist_recent_time(c);
            c->ended = cydist_recent_ticks(r);
        }
        __atomic_store_n(&c->state, state, __ATOMIC_RELEASE);
    }
    #endif
    """
    enum:
        OVER "CYDIST_OVER"
        IN_TURN "CYDIST_RUNNING"            # in its turn, on some thread
        POSTED "CYDIST_POSTED"              # a message under way that no thread waits for
        ENQUEUED "CYDIST_ENQUEUED"          # on a GPU's stream
        RECENT_CALLS "CYDIST_RECENT"
        NAMES_BYTES "CYDIST_RECENT_NAMES"
    ctypedef struct RecentCall "cydist_recent_call":
        uint64_t version, began, seq, nbytes
        uint16_t group, name, algorithm
        uint8_t dtype, op
        int32_t root, state, awaited, timed
        uint64_t since, ended, waited, longest
        int32_t longest_for
        uint64_t queued_ns, blocked
        int32_t asynchronous
    ctypedef struct RecentHead "cydist_recent_head":
        char magic[8]
        uint32_t layout, calls, call_bytes, names_bytes
        int32_t pid, clock
        uint64_t ticks, monotonic_ns
        int32_t stack_signal
        uint32_t names_used
        uint64_t text_version
        uint64_t next
    ctypedef struct RecentCalls "cydist_recent_calls":
        RecentHead *head
        RecentCall *calls
        uint64_t mask
        int clock
    uint64_t ticks "cydist_recent_ticks"(const RecentCalls *r) noexcept nogil
    # Claim the next entry, for a call that begins now. `state` is IN_TURN or POSTED.
    RecentCall *claim "cydist_recent_claim"(
        RecentCalls *r, int group, int name, uint64_t seq, uint64_t nbytes, int algorithm,
        int dtype, int op, int root, int state, int awaited) noexcept
    # The call waits for a group rank (-1: not known), and has waited.
    void note_wait "cydist_recent_wait"(const RecentCalls *r, RecentCall *c,
                                        int peer) noexcept nogil
    void note_waited "cydist_recent_waited"(const RecentCalls *r, RecentCall *c) noexcept nogil
    # The call is over; `timed`: note when.
    void note_end "cydist_recent_end"(const RecentCalls *r, RecentCall *c, int state,
                                      bint timed) noexcept nogil
    void time_call "cydist_recent_time"(RecentCall *c) noexcept nogil


cdef enum:                      # RecentCall.name of messages; before them the Collectives
    SENDING = 14
    RECEIVING = 15
    OTHERS = 16                 # and up: names that Python gives

# Where this process's calls are. The address stays; a fork, or `open_ring`, changes what is there.
cdef RecentCalls *recent_calls() noexcept
# Number the calls from here on, for tests.
cdef void begin_ring_at(uint64_t number) noexcept
# The number of a call's name.
cdef int number_of_name(str name) except -1
