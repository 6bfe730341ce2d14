"""Silent kernels: see stream_silence.pxd.

An idle connection is the kernel's to probe (TCP_KEEPALIVE), but it sends no such probes while bytes
wait for their acknowledgement or for room on the other side. Then these looks tell silence from
patience. TCP_USER_TIMEOUT cannot: it also ends connections whose other side answers every probe,
and reads nothing.
"""
from libc.errno cimport EHOSTDOWN, EHOSTUNREACH, ENETDOWN, ENETUNREACH, ETIMEDOUT
from libc.math cimport isinf
from libc.stdint cimport int64_t, uint8_t, uint32_t, uint64_t

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
        uint32_t tcpi_rto           # microseconds
        uint32_t tcpi_unacked       # segments
        uint32_t tcpi_last_data_recv    # milliseconds ago
        uint32_t tcpi_last_ack_recv
        uint64_t tcpi_bytes_acked
        uint64_t tcpi_bytes_received
    bint cydist_tcp_info(int fd, tcp_info *info) noexcept nogil
    void cydist_reset_on_close(int fd) noexcept nogil

cdef enum:
    MS_NS = 1000000
    FIRST_RTO_NS = 200000000    # the shortest time until bytes are sent again
    LONGEST_PERIOD_NS = 500000000
    SHARE = 30                  # looks within the limit
    IDLE_SHARE = 5
    MISSED = 4                  # periods without a look: this process did not run


cdef int idle_seconds(double seconds) noexcept nogil:
    return <int>max(1.0, min(seconds / IDLE_SHARE, 7200.0))


cdef Patience patience_of(double seconds) noexcept nogil:
    cdef Patience p
    p.seconds = seconds
    p.limit_ns = p.owed_ns = p.period_ns = 0
    if not isinf(seconds) and seconds < 1e9:
        p.period_ns = min(<int64_t>(seconds * 1e9) // SHARE, <int64_t>LONGEST_PERIOD_NS)
        # So that the verdict comes in time: it may be late by a look, and by the beginning of one.
        p.limit_ns = <int64_t>(seconds * 1e9) - 2 * p.period_ns
        p.owed_ns = p.limit_ns - <int64_t>idle_seconds(seconds) * 1000000000
    return p


cdef int64_t owed_for(const tcp_info *info) noexcept nogil:
    """Return how long an answer has been due at least, by the number of bytes' repetitions: for
    a process that has not looked meanwhile. The pauses between those double up to the last."""
    cdef int64_t rto = <int64_t>info.tcpi_rto * 1000
    cdef int64_t pause = FIRST_RTO_NS, owed = 0
    cdef int _repetition
    for _repetition in range(info.tcpi_retransmits):
        owed += min(pause, rto)
        pause *= 2
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
    owed = max(now - s.owed_since, owed_for(&info))
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

    seconds     of silence after which it counts as gone; inf: never
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


def keepalive_idle(double seconds):
    """Return how many seconds a connection may be idle before its kernel probes the other one."""
    return idle_seconds(seconds)
