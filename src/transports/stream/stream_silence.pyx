"""Silent kernels: see stream_silence.pxd.

An idle connection is the kernel's to probe (TCP_KEEPALIVE), but it sends no such probes while bytes
wait for their acknowledgement or for room on the other side. Then these looks tell silence from
patience. TCP_USER_TIMEOUT cannot: it also ends connections whose other side answers every probe,
and reads nothing.
"""
from libc.errno cimport EHOSTDOWN, EHOSTUNREACH, ENETDOWN, ENETUNREACH, ETIMEDOUT
from libc.math cimport isinf
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memset

from cydist._native.abi cimport now_ns

cdef extern from *:
    """
    #include <linux/tcp.h>
    #include <netinet/in.h>
    #include <stddef.h>
    #include <string.h>
    #include <sys/socket.h>

    /* Fill in TCP's account of a connection, zeros where the kernel knows less; 0: it is no TCP
       connection. */
    static int cydist_tcp_info(int fd, struct tcp_info *info) {
        socklen_t nbytes = sizeof *info;
        memset(info, 0, sizeof *info);
        return getsockopt(fd, IPPROTO_TCP, TCP_INFO, info, &nbytes) == 0
               && nbytes >= offsetof(struct tcp_info, tcpi_total_retrans);
    }
    static void cydist_reset_on_close(int fd) {
        struct linger at_once = {1, 0};
        setsockopt(fd, SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
    }
    """
    struct tcp_info:
        uint8_t tcpi_retransmits    # of the oldest bytes, without an answer
        uint8_t tcpi_probes         # without an answer
        uint8_t tcpi_backoff        # how often the pause before the next of them was doubled
        uint32_t tcpi_rto           # microseconds
        uint32_t tcpi_unacked       # segments
        uint32_t tcpi_last_data_sent    # milliseconds ago, repetitions included
        uint32_t tcpi_last_data_recv
        uint32_t tcpi_last_ack_recv
        uint64_t tcpi_bytes_acked
        uint64_t tcpi_bytes_received
    bint cydist_tcp_info(int fd, tcp_info *info) noexcept nogil
    void cydist_reset_on_close(int fd) noexcept nogil

cdef enum:
    MS_NS = 1000000
    SECOND_NS = 1000000000
    FIRST_RTO_NS = 200000000    # the shortest time until bytes are sent again
    LONGEST_PERIOD_NS = 500000000
    SHARE = 30                  # looks within the limit
    MARGIN = 4                  # periods by which the verdict is early, so that it comes in time
    IDLE_SHARE = 5
    PROBES = 6                  # of an idle connection, before it ends
    PAUSE_SHARE = 8
    MOST_DOUBLINGS = 16         # the longest pause is shorter
    MISSED = 4                  # periods without a look: this process did not run


cdef int idle_seconds(double seconds) noexcept nogil:
    return <int>max(1.0, min(seconds / IDLE_SHARE, 7200.0))


cdef int interval_seconds(double seconds) noexcept nogil:
    return <int>max(1.0, min((seconds - idle_seconds(seconds)) / PROBES, 7200.0))


cdef double longest_pause(double seconds) noexcept nogil:
    return min(max(1.0, seconds / PAUSE_SHARE), 120.0)


cdef Patience patience_of(double seconds) noexcept nogil:
    cdef Patience p
    memset(&p, 0, sizeof(p))
    p.seconds = seconds
    if not isinf(seconds) and seconds < 1e9:
        p.period_ns = min(<int64_t>(seconds * 1e9) // SHARE, <int64_t>LONGEST_PERIOD_NS)
        p.limit_ns = <int64_t>(seconds * 1e9) - MARGIN * p.period_ns
        p.interval_ns = <int64_t>interval_seconds(seconds) * SECOND_NS
        p.pause_ns = <int64_t>(longest_pause(seconds) * 1e9)
        # A connection may be idle before anything is asked, and the time between its last probe and
        # the first bytes does not count in `owed_for`.
        p.owed_ns = max(p.limit_ns - <int64_t>idle_seconds(seconds) * SECOND_NS - p.interval_ns,
                        p.limit_ns // 2)
    return p


cdef int64_t owed_for(const tcp_info *info, const Patience *p) noexcept nogil:
    """Return how long an answer has been due at least, by what this kernel has asked in vain: for
    a process that has not looked meanwhile.

    It repeats bytes, and probes a closed window, after pauses that double up to the longest.
    Bytes may follow the probes of an idle connection, whose pauses are equal.
    """
    cdef int64_t rto = <int64_t>info.tcpi_rto * 1000
    cdef int64_t pause = FIRST_RTO_NS, owed = 0
    cdef int doublings = 0 if info.tcpi_unacked else info.tcpi_backoff
    cdef int i, _repetition
    for _repetition in range(info.tcpi_retransmits):
        owed += min(pause, rto)
        pause *= 2
    if info.tcpi_retransmits:
        owed += min(<int64_t>info.tcpi_last_data_sent * MS_NS, rto)
    for i in range(1, info.tcpi_probes):    # from the latest pause to the earliest
        if i > doublings:
            owed += p.interval_ns
        else:
            owed += min(max(rto, <int64_t>FIRST_RTO_NS) << min(doublings - i, MOST_DOUBLINGS),
                        p.pause_ns)
    return owed


cdef int look(int fd, Silence *s, const Patience *p, int64_t now) noexcept nogil:
    cdef tcp_info info
    cdef int64_t quiet, owed
    cdef bint slept = now - s.looked > MISSED * p.period_ns
    s.looked = now
    if p.limit_ns == 0 or not cydist_tcp_info(fd, &info):
        return QUIET
    # Bytes behind a closed window wait for the other process, not for its kernel.
    if info.tcpi_unacked == 0 and info.tcpi_probes == 0:
        s.owed_since = 0
        return QUIET
    quiet = <int64_t>min(info.tcpi_last_ack_recv, info.tcpi_last_data_recv) * MS_NS
    if s.owed_since == 0 or slept:
        s.owed_since = now
    elif now - quiet > s.owed_since:
        s.owed_since = now - quiet      # something has come since
    owed = max(now - s.owed_since, owed_for(&info, p))
    return SILENT if quiet >= p.limit_ns and owed >= p.owed_ns else OWED


cdef bint traffic_of(int fd, Traffic *t) noexcept nogil:
    cdef tcp_info info
    if not cydist_tcp_info(fd, &info):
        return False
    t.got = <int64_t>info.tcpi_bytes_received
    t.taken = <int64_t>info.tcpi_bytes_acked
    t.since_got_ns = <int64_t>info.tcpi_last_data_recv * MS_NS
    t.since_heard_ns = <int64_t>min(info.tcpi_last_ack_recv, info.tcpi_last_data_recv) * MS_NS
    return True


cdef bint is_silence(int error) noexcept nogil:
    return error in (ETIMEDOUT, EHOSTUNREACH, EHOSTDOWN, ENETUNREACH, ENETDOWN)


cdef void reset_on_close(int fd) noexcept nogil:
    cydist_reset_on_close(fd)


cdef class SilenceWatch:
    """Tells whether the host at the other end of a TCP socket has fallen silent.

    Args:
        seconds: How long it may be silent before it counts as gone; inf: for ever.
    """

    cdef Patience patience
    cdef Silence silence

    def __init__(self, double seconds):
        self.patience = patience_of(seconds)

    @property
    def period(self):
        """Return the seconds between two looks; inf: there is nothing to look for."""
        return 2e-9 * self.patience.period_ns if self.patience.limit_ns else float("inf")

    def look(self, int fd):
        """Return whether an answer is due, and whether the host counts as gone. To be called about
        every `period` seconds while an answer is due."""
        cdef int verdict = look(fd, &self.silence, &self.patience, now_ns())
        return verdict != QUIET, verdict == SILENT


def keepalive_times(double seconds):
    """Return how many seconds a connection may be idle before its kernel probes the other one, and
    how many lie between two probes."""
    return idle_seconds(seconds), interval_seconds(seconds)


def longest_repetition_pause(double seconds):
    """Return the most seconds that a kernel should wait before it repeats bytes or probes."""
    return longest_pause(seconds)


def silence_limit(double seconds):
    """Return the seconds without a sign of life after which a host counts as gone; inf: never."""
    cdef Patience p = patience_of(seconds)
    return 1e-9 * p.limit_ns if p.limit_ns else float("inf")
