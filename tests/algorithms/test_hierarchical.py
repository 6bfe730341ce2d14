"""Hierarchical algorithms: ranks of which some share a host, and memory, and some do not."""

import fcntl
import socket
import struct
import threading
import time
from contextlib import ExitStack, contextmanager, suppress

import numpy as np
import pytest
from collective_cases import ROOTED, TINY, Case, Ranks, choose_for_part
from extra_values import more
from hierarchical_cases import PLACEMENTS, ROWS, cut_parts_at, pending, placed, row_id, status_of
from sleeps import sleeps
from transport_ranks import eventually, run
from wire_peer import KEYS

from cydist import _native
from cydist.testing import oracle
from cydist.tuning import table as tuning_table

REDUCING = [row for row in ROWS if row[0] in tuning_table.REDUCING]
BLOCKS = [row for row in ROWS if row[0] in ("all_gather", "reduce_scatter", "gather", "scatter")]
TRANSPORTS = ["shm", *more("tcp")]  # inside a host
SIOCOUTQNSD = 0x894B  # asks for the bytes of a connection that have not been sent
SENT = np.zeros(4, np.uint64)  # by rank 0, to each; as long as the process lives


@pytest.mark.parametrize("transport", TRANSPORTS)
@placed(ROWS)
def test_every_placement_count_and_root(ranks_on, row, placement, transport):
    """Any placement of the ranks, any root; no element, fewer than ranks, many segments."""
    collective, name = row
    group = ranks_on(placement, transport)
    roots = range(group.size) if collective in ROOTED else (0,)
    for count in (0, 1, group.size + 1, 1000, 40_000):
        for root in roots:
            case = Case(collective, group.size, count, root=root)
            case.check(group.run(case, name, segment=4096))


@placed([row for row in ROWS if row[0] not in ("barrier", "broadcast", "all_to_all")])
def test_in_place(ranks_on, row, placement):
    """An input may be the output, or the output's block that belongs to this rank."""
    collective, name = row
    group = ranks_on(placement, "shm")
    for count in (100, 40_000):
        case = Case(collective, group.size, count, root=group.size - 1, in_place=True)
        case.check(group.run(case, name))


@placed(BLOCKS)
def test_uneven_blocks(ranks_on, row, placement):
    """Blocks of any sizes, empty ones too."""
    collective, name = row
    group = ranks_on(placement, "shm")
    for scale in (1, 1000):
        sizes = [scale * ((7 * r * r + 3) % 23) if r % 3 != 1 else 0 for r in range(group.size)]
        case = Case(collective, group.size, 0, root=scale % group.size, sizes=sizes)
        case.check(group.run(case, name))


# Elements of blocks that are long on one lane of a host, and on another one of the next.
CROSSWISE = {
    "2+2": [50_000, 0, 0, 50_000],
    "round-robin": [50_000, 0, 0, 50_000],
    "2+1+3": [50_000, 0, 50_000, 0, 50_000, 0],
    "2+2+2-mixed": [50_000, 0, 50_000, 50_000, 0, 0],
}


@pytest.mark.parametrize("placement", CROSSWISE)
@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter"])
def test_a_lane_that_has_little_to_take_sends_what_others_wait_for(
    fresh_ranks_on, collective, placement
):
    """Blocks of many segments beside empty ones."""
    group = fresh_ranks_on(placement)
    case = Case(collective, group.size, 0, sizes=CROSSWISE[placement])
    case.check(group.run(case, "lanes", seconds=5.0))


# Bytes of a block on a host of two or three ranks: with its size in one message or in two, as long
# as may be in a bundle, too long for one, and none.
AT_LIMITS = [56, 57, 65536 // 3, 65536 // 3 + 1, 32768, 32769, 0]


@placed([row for row in BLOCKS if row[0] in ("gather", "scatter")])
@pytest.mark.parametrize("shift", range(len(AT_LIMITS)))
def test_blocks_at_the_limits_of_a_bundle(ranks_on, row, placement, shift):
    """Each rank, leaders too, has a block of each size, beside others of other sizes."""
    collective, name = row
    group = ranks_on(placement, "shm")
    sizes = [AT_LIMITS[(shift + r) % len(AT_LIMITS)] for r in range(group.size)]
    for root in range(group.size):
        case = Case(collective, group.size, 0, dtype="uint8", root=root, sizes=sizes)
        case.check(group.run(case, name))


@placed([row for row in ROWS if row[0] == "all_to_all"])
def test_uneven_all_to_all(ranks_on, row, placement):
    """Some pairs of hosts have little for each other and some much, in either direction."""
    collective, name = row
    group = ranks_on(placement, "shm")
    for scale in (1, 100, 3000):
        sizes = [[scale * ((5 * a + 3 * b * b) % 19 // 7) for b in range(group.size)]
                 for a in range(group.size)]  # fmt: skip
        sizes[0] = [3] * group.size
        case = Case(collective, group.size, 0, sizes=sizes)
        case.check(group.run(case, name))


@placed(REDUCING)
def test_premul_sum_prepares_every_contribution_once(ranks_on, row, placement):
    """A host's sum is not multiplied by the factor again."""
    collective, name = row
    group = ranks_on(placement, "shm")
    for count in (50, 40_000):
        case = Case(collective, group.size, count, op="PREMUL_SUM", factor=0.5, root=group.size - 1)
        case.check(group.run(case, name))


@placed([row for row in REDUCING if "scan" not in row[0]])
def test_avg_divides_once(ranks_on, row, placement):
    """The sum of all hosts is divided by the number of all ranks."""
    collective, name = row
    group = ranks_on(placement, "shm")
    for count in (50, 40_000):
        case = Case(
            collective, group.size, count, op="AVG", root=group.size - 1,
            values=lambda rank, n, salt: (np.arange(n) % 5 + rank + salt) * group.size,
        )  # fmt: skip
        case.check(group.run(case, name))


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("name", ["leaders", "lanes"])
def test_same_bits_on_all_ranks(ranks_on, name, placement, dtype):
    """Whatever the order of the additions, it is one order."""
    group = ranks_on(placement, "shm")
    count = 6001 if dtype == "float16" else 1 << 20  # of several stretches
    case = Case(
        "all_reduce", group.size, count, dtype=dtype,
        values=lambda rank, n, salt: np.random.default_rng(rank).normal(size=n) * 3.0**rank,
    )  # fmt: skip
    results = group.run(case, name)
    assert {outputs[0].tobytes() for outputs in results} == {results[0][0].tobytes()}


@pytest.mark.parametrize("row", ROWS, ids=row_id)
def test_a_missing_rank_is_a_timeout_on_its_own_host_and_on_others(fresh_ranks_on, row):
    """Ranks that need the missing one time out, and withdraw what they posted."""
    collective, name = row
    group = fresh_ranks_on("2+2")
    missing = 0 if "scan" in collective else 3
    # Who only sends, as all but the root of a reduce do, does not miss it.
    case = Case(
        collective, group.size, 1000, root=0 if collective in ("reduce", "gather") else missing
    )

    def body(rank):
        if rank == missing:
            return None
        try:
            case.run(group.groups[rank], rank, name, 1, TINY, 0.3)
        except _native.CallError as error:
            return error.status
        return "ok"

    others = [rank for rank in range(group.size) if rank != missing]
    results = group.each(body)
    ended = [results[rank] for rank in others]
    assert "timeout" in ended
    # Who only sends to others is done. Some learn the reason from a rank that gave up before.
    assert set(ended) <= {"timeout", "ok", "aborted"}
    for rank in others:
        group.groups[rank].close()
        assert pending(group.links[rank]) == (0, 0)


def test_no_rank_beside_the_root_ends_a_broadcast_while_another_sends(fresh_ranks_on):
    """To three hosts, and one rank of another host is late. Bytes of the next call would delay
    those that it is to get, and all ranks of its host wait for them."""
    group = fresh_ranks_on("2+2+2-mixed")
    case = Case("broadcast", group.size, 1 << 20, dtype="uint8")
    late = 3  # gets its part from rank 4, which is on rank 0's host

    def body(rank):
        if rank != late:
            with pytest.raises(_native.CallError) as error:
                case.run(group.groups[rank], rank, "lanes", 1, TINY, 0.3)
            return error.value.status
        return "late"

    ended = group.each(body)
    assert ended[0] in ("timeout", "aborted")


@pytest.mark.parametrize(
    ("name", "transport", "hosts", "sender"),
    [("leaders", "shm", [0, 0, 1, 1], 3), ("linear", "tcp", None, 2)],
    ids=["leaders", "linear"],
)
def test_a_long_block_waits_for_the_root_of_a_gather(name, transport, hosts, sender):
    """The root takes what several ranks send, and would keep what comes before its own call."""
    with ExitStack() as stack:
        group = Ranks(len(hosts or range(3)), transport, hosts)
        stack.callback(group.close)
        case = Case("gather", group.size, 200_000, dtype="uint8")

        def body(rank):
            if rank == case.root:
                return "late"
            try:
                case.run(group.groups[rank], rank, name, 1, TINY, 0.3)
            except _native.CallError as error:
                return error.status
            return "ok"

        assert group.each(body)[sender] in ("timeout", "aborted")


@contextmanager
def narrow_connection():
    """Ranks of three hosts, and a socket from rank 0 to rank 2 that holds little there."""
    with ExitStack() as stack:
        group = Ranks(6, "shm", [0, 0, 1, 1, 2, 2], unconnected=[(0, 2)])
        stack.callback(group.close)
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        ours = socket.create_connection(listener.getsockname())
        watched = stack.enter_context(ours.dup())
        group.links[0].messages.adopt(2, 0, ours.detach(), *KEYS)
        group.links[2].messages.adopt(0, 0, listener.accept()[0].detach(), *KEYS[::-1])
        yield group, watched


def unsent(sock):
    return struct.unpack("i", fcntl.ioctl(sock, SIOCOUTQNSD, bytes(4)))[0]


def test_a_broadcast_to_three_hosts_ends_at_the_root_when_its_bytes_were_sent():
    """Until then later ones of the other rank of its host could go before them."""
    with narrow_connection() as (group, watched):
        case = Case("broadcast", group.size, 1 << 20, dtype="uint8")

        def body(rank):
            case.run(group.groups[rank], rank, "lanes", 1, TINY, 30.0)
            return unsent(watched) if rank == 0 else None

        assert group.each(body)[0] == 0


def test_a_broadcast_ends_though_a_host_reads_nothing():
    """Its bytes are in the system's hands, as those of any short message are."""
    with narrow_connection() as (group, watched):
        case = Case("broadcast", group.size, 200_000, dtype="uint8")

        def body(rank):
            if rank < 2:
                case.run(group.groups[rank], rank, "lanes", 1, TINY, 30.0)
            return unsent(watched) if rank == 0 else None

        assert group.each(body)[0] > 0


@pytest.mark.parametrize("placement", ["2+2", "3+1"])
def test_a_sum_that_was_not_made_is_not_sent(fresh_ranks_on, placement):
    """A rank that waits in vain for another one of its host has nothing for the next host."""
    group = fresh_ranks_on(placement)
    case = Case("reduce_scatter", group.size, 1000)
    ended = {}

    def body(rank):
        if rank == 1:
            return
        try:
            case.run(group.groups[rank], rank, "lanes", 1, TINY, 0.3 if rank == 0 else 2.0)
        except _native.CallError as error:
            ended[rank] = error.status

    group.each(body)
    assert sorted(ended) == [rank for rank in range(group.size) if rank != 1]


@pytest.mark.parametrize("odd", [0, 1, 3], ids=lambda rank: f"rank{rank}")
@pytest.mark.parametrize("row", ROWS, ids=row_id)
def test_a_rank_in_another_call_is_a_mismatch_on_all(fresh_ranks_on, row, odd):
    """Whether it is a leader, beside one, or on another host."""
    collective, name = row
    group = fresh_ranks_on("2+2")
    case = Case(collective, group.size, 1000, root=2)
    other = Case(
        "all_reduce" if collective != "all_reduce" else "broadcast", group.size, 77, root=2
    )

    def body(rank):
        mine, called = (other, "lanes") if rank == odd else (case, name)
        return status_of(group, mine, called, rank)

    assert group.each(body) == ["mismatch"] * group.size


@pytest.mark.parametrize(("called", "of_odd", "root"), [
    ("broadcast", "reduce", 0),
    ("reduce", "broadcast", 3),
], ids=["broadcast-reduce", "reduce-broadcast"])  # fmt: skip
@pytest.mark.parametrize("name", ["leaders", "lanes"])
def test_two_hosts_that_only_sent_find_it_in_the_next_barrier(
    fresh_ranks_on, called, of_odd, root, name
):
    """Neither received in the calls that differ, so both calls ended."""
    group = fresh_ranks_on("3+1")
    cases = {each: Case(each, group.size, 1000, root=root) for each in (called, of_odd)}
    barrier = Case("barrier", group.size, 0)
    calls = {}

    def body(rank):
        calls[rank] = of_odd if rank == 3 else called
        try:
            cases[calls[rank]].run(group.groups[rank], rank, name, 1, TINY, 20.0)
            calls[rank] = "barrier"
            barrier.run(group.groups[rank], rank, "leaders", 2, TINY, 20.0)
            if rank in (1, 2):  # beside the leader, which may let them go before it finds it
                barrier.run(group.groups[rank], rank, "leaders", 3, TINY, 20.0)
        except _native.CallError as error:
            return error.status
        return "ok"

    assert group.each(body) == ["mismatch"] * group.size
    assert calls[0] == calls[3] == "barrier"


@pytest.mark.parametrize("odd", [0, 1, 3], ids=lambda rank: f"rank{rank}")
@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter"])
def test_another_number_of_segments_is_a_mismatch_on_all(fresh_ranks_on, collective, odd):
    """Although the messages of such ranks have other numbers, too."""
    group = fresh_ranks_on("2+2")
    case, other = (Case(collective, group.size, count) for count in (1000, 9000))

    def body(rank):
        return status_of(group, other if rank == odd else case, "lanes", rank)

    assert group.each(body) == ["mismatch"] * group.size


LONG = 40_000
# Bytes of the blocks, as the root has them, and as their ranks do: some in bundles, some too long;
# sums that agree although the blocks do not.
DISAGREEING = {
    "same-sum": ([8, 8, 8, 8], [8, 8, 4, 12]),
    "one-shorter": ([8, 8, LONG, LONG], [8, 8, LONG, 8]),
    "leader-shorter": ([8, 8, LONG, LONG], [8, 8, 8, LONG]),
    "one-longer": ([8, 8, 8, 8], [8, 8, 8, LONG]),
    "long-for-none": ([8, 8, 8, 0], [8, 8, 8, LONG]),
    "all-longer": ([8, 8, 8, 8], [8, 8, LONG, LONG]),
    "a-byte": ([8, 8, 8, 8], [8, 8, 8, 9]),
}


@pytest.mark.parametrize("sizes", DISAGREEING)
@pytest.mark.parametrize("collective", ["gather", "scatter"])
def test_another_size_than_the_roots_is_a_mismatch_on_all(fresh_ranks_on, collective, sizes):
    """Whether the block would be in a bundle, or go straight to its rank."""
    group = fresh_ranks_on("2+2")
    roots, own = DISAGREEING[sizes]
    root = Case(collective, group.size, 0, dtype="uint8", root=0, sizes=roots)
    others = Case(collective, group.size, 0, dtype="uint8", root=0, sizes=own)

    def body(rank):
        return status_of(group, root if rank == 0 else others, "leaders", rank)

    assert group.each(body) == ["mismatch"] * group.size


@pytest.mark.parametrize("sizes", DISAGREEING)
def test_the_error_of_another_size_in_a_scatter_names_the_root(fresh_ranks_on, sizes):
    """And says what both have, however the block would have come."""
    group = fresh_ranks_on("2+2")
    roots, own = DISAGREEING[sizes]
    odd = [rank for rank in range(group.size) if roots[rank] != own[rank]]
    found = []

    def body(rank):
        given = roots if rank == 0 else own
        case = Case("scatter", group.size, 0, dtype="uint8", root=0, sizes=given)
        try:
            case.run(group.groups[rank], rank, "leaders", 1, TINY, 20.0)
            group.groups[rank].compare_last(time.monotonic_ns() + int(20e9))
        except _native.CallError as error:
            if rank in odd:
                found.append(error)

    group.each(body)
    assert {error.peer for error in found} == {0}
    seen = {(error.ours, error.theirs) for error in found}
    if roots[odd[0]] == 0:  # which is not written
        assert seen == {("scatter #1", "scatter #1")}
        return
    message = "scatter #1, {} bytes in this message"
    assert seen <= {(message.format(own[rank]), message.format(roots[rank])) for rank in odd}


def test_a_size_that_was_changed_on_the_way_is_a_mismatch():
    """Bytes of arrays carry no tag. The leader of a scatter reads no further than what came."""
    size, changed = 12_345, 30_000
    with ExitStack() as stack:
        group = Ranks(4, "shm", [0, 0, 1, 1], unconnected=[(0, 2)])
        ours, near = socket.socketpair()
        far, theirs = socket.socketpair()
        stack.callback(near.close)
        stack.callback(far.close)
        group.links[0].messages.adopt(2, 0, ours.detach(), *KEYS)
        group.links[2].messages.adopt(0, 0, theirs.detach(), *KEYS[::-1])
        copied = [
            threading.Thread(target=copy, args=(near, far, size, changed)),
            threading.Thread(target=copy, args=(far, near)),
        ]
        stack.callback(lambda: [thread.join(30) for thread in copied])
        stack.callback(group.close)
        for thread in copied:
            thread.start()
        case = Case("scatter", 4, 0, dtype="uint8", sizes=[8, 8, 8, size])
        barrier = Case("barrier", 4, 0)
        ended = {}

        def body(rank):
            try:
                case.run(group.groups[rank], rank, "leaders", 1, TINY, 20.0)
                barrier.run(group.groups[rank], rank, "leaders", 2, TINY, 20.0)
            except _native.CallError as error:
                ended[rank] = error

        group.each(body)
        assert {rank: error.status for rank, error in ended.items()} == dict.fromkeys(
            range(4), "mismatch"
        )
        assert (ended[2].peer, ended[2].teller) == (0, -1)


def copy(source, target, size=0, changed=0):
    """Pass on all bytes, but another size of a block."""
    before, after = (struct.pack("<Q", each) for each in (size, changed))
    with suppress(OSError):  # the other side may end first
        while data := source.recv(1 << 20):
            target.sendall(data.replace(before, after) if size else data)
        target.shutdown(socket.SHUT_WR)


@pytest.mark.parametrize("name", ["leaders", "lanes"])
def test_sizes_with_the_same_sum_are_a_mismatch(fresh_ranks_on, name):
    """Rank 2 gives 4 and 12 bytes to the other host, where 8 and 8 are due. Ranks that have all may
    be done before the others find it."""
    group = fresh_ranks_on("2+2")
    due = [[8] * 4 for _ in range(4)]
    given = [*due[:2], [4, 12, 8, 8], due[3]]
    cases = [Case("all_to_all", group.size, 0, dtype="uint8", sizes=each) for each in (due, given)]

    def body(rank):
        return status_of(group, cases[rank == 2], name, rank)

    ended = group.each(body)
    assert ended[:2] == ["mismatch"] * 2
    assert set(ended) <= {"mismatch", "ok"}


@pytest.mark.parametrize("hosts", [[0, 0, 0], [0, 1, 2]], ids=["one host", "a rank per host"])
def test_without_hierarchy_there_are_no_parts(hosts):
    """Where all ranks share a host, or none do, such an algorithm is refused before any traffic."""
    group = Ranks(3, "tcp", hosts)
    case = Case("all_reduce", 3, 10)
    try:
        with pytest.raises(ValueError, match="leaders needs several hosts, one of them with"):
            group.run(case, "leaders")
    finally:
        group.close()


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_an_array_that_ranks_share_may_be_reduced(ranks_on, placement):
    """Memory that its host's ranks have mapped is reduced like any other."""
    group = ranks_on(placement, "shm")
    case = Case("all_reduce", group.size, 30_000)

    def body(rank):
        link = group.links[rank]
        array = case.given[rank][0]
        if isinstance(link, _native.ShmLink):
            array = np.frombuffer(link.heap.allocate(array.nbytes), array.dtype)
            array[:] = case.given[rank][0]
        group.groups[rank].run(
            "all_reduce", [_native.asarray(array)], [_native.asarray(array)], algorithm=b"lanes",
            deadline_ns=time.monotonic_ns() + int(30e9), seq=seq, op=1, count=array.size,
            flags=_native.FLAG_BITS["EVEN"], segment_bytes=4096,
        )  # fmt: skip
        return array

    group.seq += 1
    seq = group.seq
    for array in group.each(body):
        assert oracle.same_bits(case.expected(0)[0], array)


@pytest.mark.parametrize("row", [row for row in ROWS if row[1] == "leaders"], ids=row_id)
def test_a_rank_that_leaves_passes_on_why_the_group_failed(row):
    """The finder's report needs a connection that does not exist yet; those who know it leave."""
    collective, name = row
    group = Ranks(4, "shm", [0, 0, 1, 1], unconnected=[(0, 3), (1, 2), (1, 3)])
    case, other = (Case(collective, 4, count, root=0) for count in (100, 77))
    if collective == "barrier":
        other = Case("broadcast", 4, 77, root=0)

    def body(rank):
        mine, called = (other, "leaders") if rank == 3 else (case, name)
        native = group.groups[rank]
        try:
            mine.run(native, rank, called, 1, TINY, 5.0)
            Case("barrier", 4, 0).run(native, rank, "leaders", 2, TINY, 5.0)
        except _native.CallError as error:
            return native.explain(error).status
        finally:
            native.close()
        return "ok"

    try:
        assert group.each(body) == ["mismatch"] * 4
    finally:
        group.close()


def test_a_wait_in_windows_hears_of_a_failure_on_another_host(fresh_ranks_on):
    """A rank that waits for another one of its host reads what comes in at its sockets meanwhile,
    at the end of each slice of the wait."""
    group = fresh_ranks_on("2+2")
    case = Case("barrier", 4, 0)
    group.groups[2].fail("timeout")  # its notice is in rank 0's socket now
    _native.arm_failpoint("wait:hold:6")
    try:
        waits = group.pool.submit(case.run, group.groups[0], 0, "leaders", 1, TINY, 30.0)
        eventually(lambda: waits.done() or _native.failpoint_holds())
        assert not _native.failpoint_holds()
        with pytest.raises(_native.CallError, match="timeout"):
            waits.result()
    finally:
        _native.arm_failpoint("")


def test_a_wait_in_windows_moves_the_messages_of_its_call(fresh_ranks_on):
    """Ranks that wait for others of their hosts send and receive their blocks meanwhile, however
    much more those have than sockets hold."""
    case = Case("all_gather", 4, 4_000_000)
    nbytes = 4_000_000 * case.dtype.itemsize
    group = fresh_ranks_on("2+2")
    cut_parts_at(group, nbytes)
    group.links[0].messages.count_sent_in(SENT)

    def call(rank):
        return group.pool.submit(case.run, group.groups[rank], rank, "lanes", 1, TINY, 60.0)

    _native.arm_failpoint("wait:hold:50")
    try:
        calls = [call(0), call(2)]
        eventually(lambda: SENT[2] >= nbytes or _native.failpoint_holds())
        assert not _native.failpoint_holds()
    finally:
        _native.arm_failpoint("")
    calls += [call(1), call(3)]
    for each in calls:
        each.result()


def test_a_later_part_of_the_same_call_is_no_mismatch(fresh_ranks_on):
    """A rank waits for the message of a late one, while others of its host are in the next part of
    the call, which goes through windows."""
    group = fresh_ranks_on("3+1")
    case = Case("all_reduce", 4, 1000)

    def choose(collective, *about):
        return (b"tree", b"") if collective == "reduce" else choose_for_part(collective, *about)

    for each in group.groups:
        each.prepare_parts(choose, lambda ranks, windows: 1 << 18)

    def call(rank):
        return group.pool.submit(case.run, group.groups[rank], rank, "leaders", 1, TINY, 30.0)

    calls = [call(0), *(call(rank) for rank in (2, 3))]
    until = time.monotonic() + 0.3  # seconds: rank 0 has asked what rank 1 does
    eventually(lambda: time.monotonic() >= until)
    calls.insert(1, call(1))
    case.check([each.result() for each in calls])


def test_a_long_wait_in_windows_wakes_up_rarely(fresh_ranks_on):
    """Its messages are under way, but none moves: the other ranks do not come for a second."""
    group = fresh_ranks_on("2+2")
    case = Case("all_gather", 4, 100_000)
    times = []

    def wait():
        before = sleeps(threading.current_thread())
        with pytest.raises(_native.CallError, match="timeout"):
            case.run(group.groups[0], 0, "lanes", 1, TINY, 1.0)
        times.append(sleeps(threading.current_thread()) - before)

    run(wait)
    assert times[0] < 1000  # at the first of its intervals it would be 3000


def test_each_group_has_its_own_segments(fresh_ranks_on):
    """Another group of the process with as many hosts has been prepared for other segments."""
    case = Case("broadcast", 4, 16_384)
    sent = []
    for segment in 4096, 65_536:
        group = fresh_ranks_on("2+2")
        group.links[0].messages.count_sent_in(SENT)
        cut_parts_at(group, segment)
        case.check(group.run(case, "leaders"))
        sent.append(int(SENT[2]))
    assert sent[0] > sent[1] > 65_536
