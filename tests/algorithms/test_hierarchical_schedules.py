"""The messages between hosts and inside them, checked on paper, to a thousand ranks."""

import functools
import itertools
from collections import Counter
from operator import itemgetter

import pytest
from extra_values import long
from recorded_calls import ranks_that_wait_for_ever, unfinished_requests

from cydist.bench.schedules import SEGMENT_BYTES, UNIT, WHOLE, DeadlockError, Line, play, record
from cydist.tuning import table as tuning_table

ROWS = sorted(row for row, needs in tuning_table.NEEDS.items() if needs & tuning_table.HOSTS)
MiB = 1 << 20


def uneven(hosts, most):
    """Return places on so many hosts, the numbers of whose ranks differ from 1 to `most`."""
    return [host for host in range(hosts) for _ in range(1 + host * 7 % most)]


def mixed(places):
    """Return the places in an order in which neighbours are mostly on other hosts."""
    return [places[rank * 5 % len(places)] for rank in range(len(places))]


PLACEMENTS = {
    "2+2": [0, 0, 1, 1],
    "round-robin": [0, 1] * 4,
    "3+1": [0, 0, 0, 1],
    "4x3": [0, 1, 2] * 4,
    "2x16": [0, 1] * 16,
    "5x4-in-blocks": [host for host in range(5) for _ in range(4)],
    "7-uneven": uneven(7, 5),
    "8-uneven-mixed": mixed(uneven(8, 4)),
    "1+9": [0, *[1] * 9],
    "subgroup": uneven(12, 5)[::2],
}
LARGE = {
    "1024-in-blocks": [rank // 16 for rank in range(1024)],
    "1024-round-robin": [rank % 64 for rank in range(1024)],
    "1024-uneven": uneven(117, 17)[:1024],
    "1024-uneven-mixed": mixed(uneven(117, 17)[:1024]),
    "1+3+1020": [0, *[1] * 3, *[2] * 1020],
    "1024-subgroup": uneven(400, 17)[::3][:1024],
}
# Where rings of long calls have millions of messages, for short ones.
SPARSE = {"1024-on-1023-hosts": [0, *range(1023)]}


def row_id(row):
    return "-".join(row)


# Long calls have millions of messages between the ranks of the large host, gigabytes of them. So
# these meet in memory, and exchange messages in short calls only.
CROWDED = "1+3+1020"
MOST_CROWDED = 1 << 14  # bytes


class HierarchicalSchedule:
    """The logs of all ranks of one call, of `nbytes` in all."""

    def __init__(self, row, hosts, nbytes, root=0, together=False):
        self.row, self.hosts, self.p = row, hosts, len(hosts)
        one = nbytes if row[0] in WHOLE else nbytes // self.p
        self.nbytes = one // UNIT * UNIT * (1 if row[0] in WHOLE else self.p)
        self.logs = record(*row, hosts, nbytes, root, together=together)
        self._messages = {}

    def messages(self, what):
        """(from, to) -> [bytes], by tag: only messages of one tag keep their order."""
        if what in self._messages:
            return self._messages[what]
        found = self._messages[what] = {}
        for rank, log in enumerate(self.logs):
            for kind, peer, step, nbytes, _ in log:
                if kind == what:
                    pair = (rank, peer) if what == "send" else (peer, rank)
                    found.setdefault(pair, []).append((step, nbytes))
        for pair, tagged in found.items():
            tagged.sort(key=itemgetter(0))
            found[pair] = [nbytes for _, nbytes in tagged]
        return found

    def unmatched(self):
        """Pairs of ranks between which not every send has a receive of its size. A receive of less
        than 0 bytes takes at most so many."""
        sends, receives = self.messages("send"), self.messages("recv")
        return [
            pair
            for pair in {**sends, **receives}
            if len(sends.get(pair, ())) != len(receives.get(pair, ()))
            or any(
                taken != sent and -taken < sent
                for sent, taken in zip(sends[pair], receives[pair], strict=True)
            )
        ]

    def between_hosts(self):
        """Bytes and messages that each host sends to others: [bytes], [messages]."""
        nbytes, count = [0] * (max(self.hosts) + 1), [0] * (max(self.hosts) + 1)
        for (source, target), sizes in self.messages("send").items():
            if self.hosts[source] != self.hosts[target]:
                nbytes[self.hosts[source]] += sum(sizes)
                count[self.hosts[source]] += len(sizes)
        return nbytes, count


@functools.lru_cache(maxsize=2)  # some have millions of lines
def recorded(row, placement, nbytes, root):
    hosts = (PLACEMENTS | LARGE | SPARSE)[placement]
    together = placement == CROWDED and nbytes > MOST_CROWDED
    return HierarchicalSchedule(row, hosts, nbytes, root, together)


def able(row, placement):
    """Return whether the row can run there."""
    hosts = (PLACEMENTS | LARGE)[placement]
    consecutive = sum(a != b for a, b in itertools.pairwise(hosts)) < len(set(hosts))
    return consecutive or not tuning_table.NEEDS[row] & tuning_table.CONSECUTIVE


# With a message for each pair of ranks, or of a rank and a host: a minute of a core each.
CROWDS = (("all_to_all", "lanes"), ("all_gather", "lanes"))


def large(row):
    """Return the large placements that add something for a row."""
    if row in CROWDS:
        return ("1024-uneven-mixed",)
    if able(row, "1024-uneven-mixed"):
        return tuple(name for name in LARGE if name != "1024-uneven")
    return tuple(name for name in LARGE if able(row, name))


CASES = [
    (row, placement, nbytes)
    for row in ROWS
    for placement in PLACEMENTS
    for nbytes in (1 << 15, 1 << 22)
    if able(row, placement)
] + long(
    *((row, placement, 1 << 22) for row in ROWS for placement in large(row)),
    *((row, CROWDED, MOST_CROWDED) for row in ROWS if able(row, CROWDED)),
)


def case_id(case):
    row, placement, nbytes = case
    return f"{row_id(row)}-{placement}-{nbytes}"


@pytest.fixture(params=CASES, ids=case_id, scope="module")
def schedule(request):
    """The logs of every hierarchical algorithm, for short and long calls."""
    row, placement, nbytes = request.param
    return recorded(row, placement, nbytes, len((PLACEMENTS | LARGE)[placement]) // 2)


def test_every_send_has_its_receive(schedule):
    """Of the same size, from that rank; none is to oneself."""
    assert schedule.unmatched() == []
    assert [key for key in schedule.messages("send") if key[0] == key[1]] == []


def test_every_request_is_waited_for(schedule):
    """A request that is posted ends in complete(), once, before the call returns."""
    assert [unfinished_requests(log) for log in schedule.logs if unfinished_requests(log)] == []


def test_no_rank_waits_for_ever(schedule):
    """Even if no send ends before its receive is posted."""
    assert ranks_that_wait_for_ever(schedule.logs, schedule.hosts) == []
    if schedule.p < 1000:  # these would take most of this file's time
        play(schedule.logs, schedule.hosts)


def test_ranks_that_wait_for_each_other_are_found():
    """Two ranks that both receive first never end."""
    logs: list[list[Line]] = [
        [("recv", 1 - rank, 0, 8, 0), ("wait", 1 - rank, 0, 8, 0), ("send", 1 - rank, 0, 8, 2),
         ("wait", 1 - rank, 0, 8, 2)] for rank in range(2)
    ]  # fmt: skip
    with pytest.raises(DeadlockError, match="2 ranks wait for ever"):
        play(logs, [0, 1])
    assert ranks_that_wait_for_ever(logs, [0, 1]) == [0, 1]


@pytest.mark.parametrize("placement", ["2+2", "7-uneven"])
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("row", ROWS, ids=row_id)
def test_every_message_that_is_lost_is_found(row, placement, together):
    """Without any one line that posts a message, the rest waits for ever as `play` says."""
    if not able(row, placement):
        return
    logs = HierarchicalSchedule(row, PLACEMENTS[placement], 1 << 12, 1, together).logs
    for rank, log in enumerate(logs):
        for number in range(0, len(log), 1 + len(log) // 4):
            lame = [*logs]
            lame[rank] = [("send", rank, 99, 0, 0) if i == number else line
                          for i, line in enumerate(log)]  # fmt: skip
            try:
                play(lame, PLACEMENTS[placement])
                left = 0
            except DeadlockError as error:
                left = int(str(error).partition(" ")[0])
            assert len(ranks_that_wait_for_ever(lame, PLACEMENTS[placement])) == left


ROOTED = [row for row in ROWS if row[0] in ("broadcast", "reduce", "gather", "scatter")]


@pytest.mark.parametrize("nbytes", [1 << 12, 1 << 20])
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("row", ROOTED, ids=row_id)
def test_any_root(row, placement, nbytes):
    """From every root each send has its receive, no rank waits for ever, and each byte crosses
    once."""
    hosts = PLACEMENTS[placement]
    for root in range(len(hosts)):
        found = recorded(row, placement, nbytes, root)
        assert found.unmatched() == []
        assert ranks_that_wait_for_ever(found.logs, hosts) == []
        sent = sum(found.between_hosts()[0])
        if row[0] in LEAST:
            least = LEAST[row[0]](found.nbytes, len(set(hosts)))
            assert least <= sent <= 1.03 * least
        else:
            assert sent == bytes_of_blocks(found, root, row[0])


@pytest.mark.parametrize("row", long(*ROOTED), ids=row_id)
@pytest.mark.parametrize("placement", [name for name in LARGE if name != "1024-uneven"])
def test_any_root_among_a_thousand_ranks(row, placement):
    """The same for the first and the last rank; `schedule` has one in the middle."""
    hosts = LARGE[placement]
    for root in (0, 1023):
        found = recorded(row, placement, 1 << 20, root)
        assert found.unmatched() == []
        assert ranks_that_wait_for_ever(found.logs, hosts) == []


# n bytes, h hosts: the least that all hosts together send to others.
LEAST = {
    "broadcast": lambda n, h: (h - 1) * n,
    "reduce": lambda n, h: (h - 1) * n,
    "all_reduce": lambda n, h: 2 * (h - 1) * n,
    "all_gather": lambda n, h: (h - 1) * n,
    "reduce_scatter": lambda n, h: (h - 1) * n,
    "scan": lambda n, h: (h - 1) * n,
    "exscan": lambda n, h: (h - 1) * n,
}
LONG = [row for row in ROWS if row[1] == "lanes" and row[0] in LEAST]


def placed(rows, placements):
    """Parametrize by these rows and the placements where each can run."""
    found = [pytest.param(row, placement, id=f"{row_id(row)}-{placement}")
             for row in rows for placement in placements if able(row, placement)]  # fmt: skip
    return pytest.mark.parametrize(("row", "placement"), found)


@placed(LONG, PLACEMENTS)
def test_each_byte_crosses_once_for_each_host_that_needs_it(row, placement):
    """Wherever the ranks are placed, hosts send each other the least that there is to send."""
    found = recorded(row, placement, 8 * MiB, 1)
    least = LEAST[row[0]](found.nbytes, len(set(found.hosts)))
    assert least <= sum(found.between_hosts()[0]) <= 1.03 * least


def test_each_byte_of_a_long_call_crosses_once(schedule):
    """The same of each schedule above, far from what can be run here, too."""
    if schedule.row in LONG and schedule.nbytes >= 4000 * schedule.p:
        least = LEAST[schedule.row[0]](schedule.nbytes, len(set(schedule.hosts)))
        assert least <= sum(schedule.between_hosts()[0]) <= 1.03 * least


LEAST_SEGMENT_BYTES = 32768  # of pipeline.pxd
SCRATCH_BYTES, PART_BYTES = 4 * MiB, 65536  # of hierarchy.pxd
EVEN = ("2+2", "round-robin", "4x3", "5x4-in-blocks")
RINGS = [("all_gather", "lanes"), ("reduce_scatter", "lanes")]


@placed(RINGS, PLACEMENTS)
def test_blocks_travel_in_segments(row, placement):
    """Those of the lanes of a host are as long as one alone would be, but not as short as lanes are
    many; and not longer than what a reduce_scatter takes of a block at once."""
    found = recorded(row, placement, 32 * MiB, 0)
    between = [
        max(sizes)
        for (source, target), sizes in found.messages("send").items()
        if found.hosts[source] != found.hosts[target]
    ]
    lanes = min(Counter(found.hosts).values())
    segment = max(SEGMENT_BYTES // lanes, LEAST_SEGMENT_BYTES)
    if row[0] == "reduce_scatter":
        segment = min(segment, max(SCRATCH_BYTES // found.p, PART_BYTES))
    assert segment - UNIT < max(between) <= segment


@pytest.mark.parametrize(
    ("nbytes", "segment"),
    [(1 << 14, 1 << 14), (1 << 18, 1 << 15), (1 << 19, 1 << 16), (1 << 21, 1 << 17)],
)
def test_a_chain_waits_for_an_eighth_of_the_array_at_most(nbytes, segment):
    """For 32 KiB of a short one, and for half a segment of a long one."""
    found = HierarchicalSchedule(("broadcast", "ring"), range(4), nbytes)
    assert {size for sizes in found.messages("send").values() for size in sizes} == {segment}


def test_stretches_are_longer_where_there_are_many_lanes():
    """So that each lane sends another host 64 KiB at once."""
    found = recorded(("all_reduce", "lanes"), "2x16", 4 * MiB, 0)
    between = {
        size
        for (source, target), sizes in found.messages("send").items()
        for size in sizes
        if found.hosts[source] != found.hosts[target]
    }
    assert between == {65536}


EXCHANGES = ("all_reduce", "all_gather", "reduce_scatter")


@placed([row for row in ROWS if row[0] in EXCHANGES], EVEN)
def test_a_rank_sends_little_before_it_receives(row, placement):
    """As long as it has to receive from other hosts, it is half a mebibyte ahead at most; in a ring
    of more hosts, where it sends on the first segments at once, one. Blocks may differ by an
    element."""
    found = recorded(row, placement, 32 * MiB, 0)
    for rank, log in enumerate(found.logs):
        elsewhere = [line for line in log if found.hosts[line[1]] != found.hosts[rank]]
        numbers = {line[4] for line in elsewhere if line[0] == "recv"}
        due = sum(line[3] for line in elsewhere if line[0] == "recv")
        sent = received = most = 0
        for kind, _, _, nbytes, number in elsewhere:
            if kind == "send":
                sent += nbytes
                most = max(most, sent - received if received < due else 0)
            elif kind == "wait" and number in numbers:
                received += nbytes
        assert most <= (MiB // 2 if len({*found.hosts}) == 2 else MiB) + 100 * UNIT


def bytes_of_blocks(found, root, collective):
    """Return the bytes of p * p blocks, or of p, that go from one host to another. A bundle of a
    root is headed by 8 bytes for each rank of the other host."""
    hosts, block = found.hosts, found.nbytes // found.p
    own = [hosts.count(host) for host in hosts]
    if collective == "all_to_all":
        return block * sum(found.p - mine for mine in own)
    headed = sum(mine > 1 and host != hosts[root] for host, mine in zip(hosts, own, strict=True))
    return block * (found.p - own[root]) + 8 * headed


@placed([row for row in ROWS if row[0] in ("gather", "scatter", "all_to_all")], PLACEMENTS)
@pytest.mark.parametrize("nbytes", [1 << 12, 8 * MiB])
def test_each_block_crosses_once_to_its_host(row, placement, nbytes):
    """Whether in bundles or straight to its rank."""
    found = recorded(row, placement, nbytes, 1)
    assert sum(found.between_hosts()[0]) == bytes_of_blocks(found, 1, row[0])


ONE_WAY = ("broadcast", "reduce", "gather", "scatter", "scan", "exscan")


@placed([row for row in ROWS if row[1] == "leaders"], ["2+2", "round-robin", "3+1"])
def test_two_leaders_exchange_one_message(row, placement):
    """A short call takes one message each way between two hosts, or one in all with a root."""
    count = recorded(row, placement, 256, 1).between_hosts()[1]
    assert sorted(count) == ([0, 1] if row[0] in ONE_WAY else [1, 1])


def peers_of(found):
    """Return for each rank the others that it exchanges messages with."""
    peers = {rank: set() for rank in range(found.p)}
    for source, target in (*found.messages("send"), *found.messages("recv")):
        peers[source].add(target)
        peers[target].add(source)
    return peers


# These have a message for each rank.
TO_ALL = ("gather", "scatter", "all_to_all")
FEW = [row for row in ROWS if row[0] not in TO_ALL]


def test_a_rank_needs_few_connections(schedule):
    """No rank talks to more than those on its host and 2 log2(h) + 4 others, in long calls."""
    if schedule.row in FEW:
        check_connections(schedule)


@pytest.mark.parametrize("placement", long(*LARGE))
@pytest.mark.parametrize("row", FEW, ids=row_id)
def test_a_rank_needs_few_connections_for_short_calls(row, placement):
    """The same of 1,024 ranks in calls of 16 KiB."""
    if able(row, placement):
        check_connections(recorded(row, placement, 1 << 14, 512))


def check_connections(found):
    """Assert that each rank has at most 2 log2(h) + 4 peers elsewhere."""
    hosts = found.hosts
    most = 2 * (len(set(hosts)) - 1).bit_length() + 4
    elsewhere = [
        sum(hosts[other] != hosts[rank] for other in others)
        for rank, others in peers_of(found).items()
    ]
    assert max(elsewhere) <= most


@pytest.mark.parametrize("collective", ["all_gather", "reduce_scatter"])
def test_lists_of_blocks_go_round_a_ring(collective):
    """A lane has two connections to other hosts, and ranks that are in none have none."""
    found = recorded((collective, "lanes"), "7-uneven", 1 << 22, 0)
    hosts = found.hosts
    for rank, others in peers_of(found).items():
        elsewhere = {hosts[other] for other in others if hosts[other] != hosts[rank]}
        first = hosts.index(hosts[rank]) == rank
        assert elsewhere == ({(hosts[rank] + 1) % 7, (hosts[rank] - 1) % 7} if first else set())


SHORT = {"broadcast": 1, "reduce": 1, "gather": 1, "scatter": 1, "barrier": 2}


@pytest.mark.parametrize("placement", [*PLACEMENTS, *long(*LARGE, *SPARSE)])
@pytest.mark.parametrize("collective", SHORT)
def test_leaders_send_the_fewest_messages(collective, placement):
    """A short call with a root takes one message for each other host, in any placement; a barrier
    log2(h) for each host."""
    hosts = (PLACEMENTS | LARGE | SPARSE)[placement]
    h = len(set(hosts))
    found = recorded((collective, "leaders"), placement, 16 * len(hosts), len(hosts) - 1)
    sent = found.between_hosts()[1]
    if collective == "barrier":
        assert set(sent) - {0} == {(h - 1).bit_length()}
    else:
        assert sum(sent) == h - 1


@pytest.mark.parametrize("root", [0, 4, 11])
def test_ranks_beside_the_root_send_to_few_hosts(root):
    """The root of a short broadcast and the next rank on its host send to one other host each."""
    found = recorded(("broadcast", "leaders"), "4x3", 8, root)
    hosts = found.hosts
    beside = [rank for rank in range(found.p) if hosts[rank] == hosts[root]]
    following = beside[(beside.index(root) + 1) % len(beside)]
    between = [pair for pair in found.messages("send") if hosts[pair[0]] != hosts[pair[1]]]
    assert sorted(source for source, _ in between) == sorted([root, following])
    assert len({hosts[target] for _, target in between}) == 2
