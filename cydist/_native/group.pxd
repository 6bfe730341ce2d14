"""A group's compiled half, shared with the fast path (src/fastpath/fast_collectives.pyx)."""
from libc.stdint cimport int64_t, uint32_t, uint64_t

from cydist._native.abi cimport Block, Call, Comm, Link
from cydist._native.algorithm_table cimport Choice, ChosenAlgorithms
from cydist._native.control_plane cimport CALL_BYTES, ControlMessage, ControlPlane
from cydist._native.call_queue cimport CallQueue, CallRecord

cdef class Group:
    cdef readonly Link link
    cdef public CallQueue call_queue     # the queue of the group's calls
    cdef public double timeout      # seconds that a call may take, by default
    cdef Comm comm
    cdef int *peers
    cdef Block *blocks              # for 2 * size blocks of the call that is running
    cdef ChosenAlgorithms choices            # None before the first collective
    cdef int aborted                # 0, or the Status that ends every wait
    cdef int running                # collectives under way; changed with the GIL held
    cdef int pid                    # that made it; locks may be held forever in a forked child
    cdef bint open
    cdef bint left                  # the comm is closed; happens once
    cdef bint asked_for_windows
    cdef bint apart                 # known to have a host for each member
    cdef uint64_t compared_after    # the number of the last call that `part` compared
    cdef ControlPlane control_plane
    cdef readonly CallRecord whole  # the call whose parts run now; None: calls run whole
    cdef char part_of[CALL_BYTES]   # the same, in words for other ranks

    cpdef close(self)
    # Run one collective: see the body.
    cdef int run_choice(self, const Choice *choice, str collective, list inputs, list outputs,
                        int64_t deadline_ns, uint64_t seq, int op, object factor, int root,
                        size_t count, uint32_t sizes, int flags, size_t segment_bytes,
                        object about) except -1
    cdef void leave_comm(self) noexcept
    cdef int open_part(self, int64_t deadline_ns) except -100
    cdef object placement(self)
    # The CallError of a first call that the table of the shared memory did not answer.
    cdef object without_windows(self, int status, int peer)
    cdef void send_failure(self, ControlMessage *message)
    # After a failure: keep objects alive whose memory may still be used.
    cdef void keep_while_used(self, object one, object other)
    # A peer was lost as the group ended: MISMATCH if it had left without the last call.
    cdef int left_without_it(self, Call *c, int status) except -100
    # Number a call, and fill in the fields that follow from its fingerprint.
    cdef void assign_number(self, Call *c) noexcept
    # Run it; returns its Status. The caller counts it in `running`.
    cdef int perform(self, Call *c, const Choice *choice) noexcept nogil
    cdef void describe(self, const Call *c, const Block *blocks, size_t inputs,
                       size_t outputs) noexcept
    # Return the exception for a Status that is not OK.
    cdef object error_of(self, const Call *c, int status)
    # End it, with the GIL held: return the exception for its Status, or None. After a failure the
    # call's arrays, `one` and `other`, stay alive as long as the transport or a rank may use them.
    cdef object end_call(self, Call *c, int status, object one, object other)


# Return the exception for a Status: what a signal handler raised, or a CallError.
cdef object failure(int status, int peer, int step, str ours=*, str theirs=*)
# Put into the fingerprint's detail how the ranks cut their data.
cdef void agree_on_sizes(Call *c, size_t inputs, size_t outputs) noexcept
