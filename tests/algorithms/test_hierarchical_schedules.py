"""The messages between hosts and inside them, checked on paper, to a thousand ranks."""

import functools
import itertools

import numpy as np
import pytest
from extra_values import more
from recorded_calls import CODES, UNIT, blocks, unfinished_requests

from cydist._native import schedule_recorder
from cydist.backends.host.group import choose_for_part
from cydist.tuning import table as tuning_table

ROWS = sorted(row for row, needs in tuning_table.NEEDS.items() if needs & tuning_table.HOSTS)
MiB = 1 << 20
SEGMENT = 256 * 1024


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
    "5x4-in-blocks": [host for host in range(5) for _ in range(4)],
    "7-uneven": uneven(7, 5),
    "8-uneven-mixed": mixed(uneven(8, 4)),
}
LARGE = {
    "1024-in-blocks": [rank // 16 for rank in range(1024)],
    "1024-round-robin": [rank % 64 for rank in range(1024)],
    "1024-uneven": uneven(117, 17)[:1024],
}


def row_id(row):
    return "-".join(row)


class HierarchicalSchedule:
    """The logs of all ranks of one call, of `nbytes` in all."""

    def __init__(self, row, hosts, nbytes, root=0):
        collective, name = row
        self.hosts, self.p = hosts, len(hosts)
        whole = ("broadcast", "all_reduce", "reduce", "scan", "exscan")
        one = nbytes if collective in whole else nbytes // self.p
        count = one // UNIT
        self.nbytes = count * UNIT * (1 if one == nbytes else self.p)
        scratch = np.zeros(UNIT * count, np.uint8)  # the data do not count
        self.logs = []
        for rank in range(self.p):
            link = schedule_recorder.Recording(rank, self.p)
            recorder = schedule_recorder.ScheduleRecorder(
                link, hosts, choose_for_part, lambda ranks, windows: SEGMENT
            )
            inputs, outputs = blocks(collective, self.p, rank, count, root, lambda n: scratch)
            status = recorder.run(
                CODES[collective], name.encode(), inputs, outputs,
                root=root, commutative=True, even=True, segment_bytes=SEGMENT, seq=1,
                deadline_ns=0,
            )  # fmt: skip
            assert status == 0
            self.logs.append(link.lines())

    def messages(self, what):
        """(from, to) -> [bytes], in order: messages of one tag between two ranks keep it."""
        found = {}
        for rank, log in enumerate(self.logs):
            for kind, peer, _, nbytes, _ in log:
                if kind == what:
                    found.setdefault((rank, peer) if what == "send" else (peer, rank), []).append(
                        nbytes
                    )
        return found

    def between_hosts(self):
        """Bytes and messages that each host sends to others: [bytes], [messages]."""
        nbytes, count = [0] * (max(self.hosts) + 1), [0] * (max(self.hosts) + 1)
        for (source, target), sizes in self.messages("send").items():
            if self.hosts[source] != self.hosts[target]:
                nbytes[self.hosts[source]] += sum(sizes)
                count[self.hosts[source]] += len(sizes)
        return nbytes, count


@functools.cache
def recorded(row, placement, nbytes, root):
    return HierarchicalSchedule(row, (PLACEMENTS | LARGE)[placement], nbytes, root)


def able(row, placement):
    """Return whether the row can run there."""
    hosts = (PLACEMENTS | LARGE)[placement]
    consecutive = sum(a != b for a, b in itertools.pairwise(hosts)) < len(set(hosts))
    return consecutive or not tuning_table.NEEDS[row] & tuning_table.CONSECUTIVE


CASES = [
    (row, placement, nbytes)
    for row in ROWS
    for placement in PLACEMENTS
    for nbytes in (1 << 15, 1 << 22)
    if able(row, placement)
] + more(
    *((row, placement, 1 << 22) for row in ROWS for placement in LARGE if able(row, placement))
)


def case_id(case):
    row, placement, nbytes = case
    return f"{row_id(row)}-{placement}-{nbytes}"


@pytest.fixture(params=CASES, ids=case_id)
def schedule(request):
    """The logs of every hierarchical algorithm, for short and long calls."""
    row, placement, nbytes = request.param
    return recorded(row, placement, nbytes, len((PLACEMENTS | LARGE)[placement]) // 2)


def test_every_send_has_its_receive(schedule):
    """Of the same size, from that rank; none is to oneself."""
    sends = schedule.messages("send")
    assert sends == schedule.messages("recv")
    assert [key for key in sends if key[0] == key[1]] == []


def test_every_request_is_waited_for(schedule):
    """A request that is posted ends in complete(), once, before the call returns."""
    assert [unfinished_requests(log) for log in schedule.logs if unfinished_requests(log)] == []


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


@pytest.mark.parametrize("placement", more("1024-in-blocks", "1024-round-robin"))
@pytest.mark.parametrize("row", LONG, ids=row_id)
def test_each_byte_crosses_once_among_a_thousand_ranks(row, placement):
    """The same, far from what can be run here."""
    if able(row, placement):
        test_each_byte_crosses_once_for_each_host_that_needs_it(row, placement)


def blocks_between(places, root, collective):
    """Return how many of p * p blocks, or of p, go from one host to another."""
    p, own = len(places), [places.count(host) for host in places]
    if collective == "all_to_all":
        return sum(p - mine for mine in own)
    return p - own[root]


@placed([row for row in ROWS if row[0] in ("gather", "scatter", "all_to_all")], PLACEMENTS)
@pytest.mark.parametrize("nbytes", [1 << 12, 8 * MiB])
def test_each_block_crosses_once_to_its_host(row, placement, nbytes):
    """Whether in bundles or straight to its rank."""
    found = recorded(row, placement, nbytes, 1)
    block = found.nbytes // found.p
    assert sum(found.between_hosts()[0]) == block * blocks_between(found.hosts, 1, row[0])


ONE_WAY = ("broadcast", "reduce", "gather", "scatter", "scan", "exscan")


@placed([row for row in ROWS if row[1] == "leaders"], ["2+2", "round-robin", "3+1"])
def test_two_leaders_exchange_one_message(row, placement):
    """A short call takes one message each way between two hosts, or one in all with a root."""
    count = recorded(row, placement, 256, 1).between_hosts()[1]
    assert sorted(count) == ([0, 1] if row[0] in ONE_WAY else [1, 1])


@pytest.mark.parametrize("row", more(*ROWS), ids=row_id)
def test_a_rank_talks_to_few_others(row):
    """Of 1,024 ranks in blocks of 16 none needs a connection to more than its host's, one rank of
    each other host for blocks, and a tree's neighbours for the rest."""
    found = recorded(row, "1024-in-blocks", 1 << 22, 512)
    peers = {rank: set() for rank in range(found.p)}
    for source, target in (*found.messages("send"), *found.messages("recv")):
        peers[source].add(target)
        peers[target].add(source)
    hosts = len(set(found.hosts))
    most = 15 + (hosts - 1 if row[0] in ("all_gather", "reduce_scatter") else 2 * 6)
    if row[0] in ("gather", "scatter", "all_to_all"):
        most = found.p - 1  # long blocks go straight to their ranks
    assert max(map(len, peers.values())) <= most
