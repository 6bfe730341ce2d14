"""Whether the kernel at the other end of a TCP connection still answers, by tcp(7)'s TCP_INFO.

Kernels acknowledge what arrives, and answer probes, whatever their processes do. So a peer that is
stopped, computes or does not read is alive, and a host whose kernel is silent is not there.
"""
from libc.stdint cimport int64_t


ctypedef struct Patience:       # how long a kernel may be silent
    double seconds              # CYDIST_PEER_TIMEOUT; infinite: for ever
    int64_t limit_ns            # without a sign of life; 0: for ever
    int64_t owed_ns             # of that with an answer due
    int64_t interval_ns         # between two probes of an idle connection
    int64_t pause_ns            # the longest before a kernel repeats bytes
    int64_t period_ns           # between two looks


ctypedef struct Silence:        # of one connection, from look to look
    int64_t owed_since          # when this process first saw an answer due; 0: none is
    int64_t looked


ctypedef struct Traffic:
    int64_t got                 # bytes that have come
    int64_t taken               # bytes of this side that the other kernel has acknowledged
    int64_t since_got_ns        # since the last bytes came
    int64_t since_heard_ns      # since bytes or an acknowledgement came


cdef enum Verdict:
    QUIET                       # nothing is due
    OWED                        # an answer is due
    SILENT                      # and has been for too long: the host is gone


# Seconds of an idle connection before its kernel asks the other one (TCP_KEEPIDLE).
cdef int idle_seconds(double seconds) noexcept nogil
# And between two such probes (TCP_KEEPINTVL).
cdef int interval_seconds(double seconds) noexcept nogil
# The most seconds before a kernel repeats bytes, or probes a closed window (TCP_RTO_MAX_MS).
cdef double longest_pause(double seconds) noexcept nogil
cdef Patience patience_of(double seconds) noexcept nogil
# Look at a connection. It costs a system call.
cdef int look(int fd, Silence *s, const Patience *p, int64_t now) noexcept nogil
# Return whether it is a TCP connection, and its traffic.
cdef bint traffic_of(int fd, Traffic *t) noexcept nogil
# The other side, if only large packets are lost on the way to it, shall learn of the end, and this
# kernel not go on repeating its bytes.
cdef void reset_on_close(int fd) noexcept nogil
# Return whether a connection that ended with this error ended because nothing came.
cdef bint is_silence(int error) noexcept nogil
