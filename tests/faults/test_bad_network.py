"""Two ranks with a bad network between them: a proxy that cuts, holds, delays and slices."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from contextlib import closing

import numpy as np
import pytest
from tcp_proxy import NetworkFaults, Proxy
from transport_ranks import SECRET, run, soon

from cydist import _native
from cydist.backends.host.addresses import Address
from cydist.backends.host.connections import Connections

SUM = 1
HANDSHAKE = 197  # bytes that who connects sends until it has proved itself
COUNT = 50_000


class Pair:
    """Ranks 0 and 1, which reach each other through proxies only."""

    def __init__(self) -> None:
        self.faults = NetworkFaults()
        self.ends = [
            Connections(rank, 2, host="127.0.0.1", job="test", secret=SECRET) for rank in range(2)
        ]
        self._proxies: list[Proxy] = []
        published = []
        for end in self.ends:
            there = Address.decode(end.address())
            self._proxies.append(Proxy(there.lanes[0][0], self.faults))
            lanes = [[("127.0.0.1", self._proxies[-1].port)]]
            published.append(Address(there.rank, there.host, lanes).encode())
        for end in self.ends:
            end.connect(published)
        self._groups = [
            _native.Group(end.link, [0, 1], rank, 1) for rank, end in enumerate(self.ends)
        ]
        self._seq = 0

    def all_reduce(self, limit: float = 20.0) -> list[str]:
        """A sum on both ranks, compared; how it ended on each."""
        self._seq += 1
        ended = ["ok", "ok"]

        def body(rank: int) -> None:
            x = np.arange(COUNT) + float(rank)
            array = _native.asarray(x)
            try:
                self._groups[rank].run(
                    "all_reduce", [array], [array], algorithm=b"ring", deadline_ns=soon(limit),
                    seq=self._seq, op=SUM, count=COUNT, segment_bytes=1 << 17,
                )  # fmt: skip
            except _native.CallError as failure:
                ended[rank] = str(failure.status)
            else:
                assert np.array_equal(2.0 * np.arange(COUNT) + 1, x)

        run(lambda: body(0), lambda: body(1))
        return ended

    def gather(self, roots: list[int]) -> list[str]:
        """Each rank's block to the root that it takes; how it ended on each."""
        self._seq += 1
        ended = ["ok", "ok"]

        def body(rank: int) -> None:
            block = _native.asarray(np.full(3, float(rank)))
            whole = [_native.asarray(np.empty(3)) for _ in range(2)]
            try:
                self._groups[rank].run(
                    "gather", [block], whole if rank == roots[rank] else [], algorithm=b"linear",
                    deadline_ns=soon(20), seq=self._seq, root=roots[rank],
                )  # fmt: skip
            except _native.CallError as failure:
                ended[rank] = str(failure.status)

        run(lambda: body(0), lambda: body(1))
        return ended

    def compare_last(self) -> list[str]:
        """Compare the last calls, as an orderly end does; how it ended on each rank."""
        ended = ["ok", "ok"]

        def body(rank: int) -> None:
            try:
                self._groups[rank].compare_last(soon(20))
            except _native.CallError as failure:
                ended[rank] = str(failure.status)

        run(lambda: body(0), lambda: body(1))
        return ended

    def close(self) -> None:
        self.faults.held = False
        for end in self.ends:
            end.close()
        for proxy in self._proxies:
            proxy.close()


@pytest.fixture(autouse=True)
def relayed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy is a relay, which ranks refuse unless they are told that there may be one."""
    monkeypatch.setenv("CYDIST_NAT", "1")


@pytest.fixture
def pair() -> Iterator[Pair]:
    made = Pair()
    yield made
    made.close()


def test_relay_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where addresses are not said to be translated the ranks do not talk through a proxy, and
    both say what each side sees, and what to do."""
    monkeypatch.delenv("CYDIST_NAT")
    with closing(Pair()) as pair:
        assert pair.all_reduce() == ["peer_lost", "peer_lost"]
        reasons = [end.link.lost(1 - rank) for rank, end in enumerate(pair.ends)]
    place = r"127\.0\.0\.1:\d+"
    seen = rf"this side sees a connection ({place} -> {place}), the other side one (?!\1){place} ->"
    for reason in reasons:
        assert re.search(seen, reason)
        assert "set CYDIST_NAT=1 on every rank of the job" in reason


@pytest.mark.parametrize("reset", [False, True], ids=["end", "reset"])
@pytest.mark.parametrize("offset", [1, 95, 96, 128])
def test_cut_within_a_stream(pair: Pair, offset: int, reset: bool) -> None:
    """A connection that ends at any byte of its frames is a lost peer on both ranks."""
    pair.faults.cut_at, pair.faults.reset = HANDSHAKE + offset, reset
    assert pair.all_reduce() == ["peer_lost", "peer_lost"]


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("reset", [False, True], ids=["end", "reset"])
def test_cut_at_every_byte(reset: bool) -> None:
    """The same, at each of the first 128 bytes after the handshake."""
    for offset in range(1, 129):
        pair = Pair()
        pair.faults.cut_at, pair.faults.reset = HANDSHAKE + offset, reset
        assert pair.all_reduce() == ["peer_lost", "peer_lost"], offset
        pair.close()


def test_a_mismatch_whose_messages_come_late(pair: Pair) -> None:
    """Both ranks send to the other one, each with itself in mind as no root, and are done before
    anything arrives. The next call finds it, since its messages come after those."""
    assert pair.all_reduce() == ["ok", "ok"]
    pair.faults.delay = 0.1
    assert pair.gather([1, 0]) == ["ok", "ok"]
    assert pair.all_reduce() == ["mismatch", "mismatch"]


def test_a_mismatch_in_the_last_call(pair: Pair) -> None:
    """The same without a next call: both learn of it when they end."""
    assert pair.all_reduce() == ["ok", "ok"]
    pair.faults.delay = 0.1
    assert pair.gather([1, 0]) == ["ok", "ok"]
    assert pair.compare_last() == ["mismatch", "mismatch"]


def test_partition_that_heals(pair: Pair) -> None:
    """When the network comes back before the timeout, the result is right to the bit."""
    assert pair.all_reduce() == ["ok", "ok"]
    pair.faults.held = True
    heal = threading.Timer(1.0, setattr, (pair.faults, "held", False))
    heal.start()
    assert pair.all_reduce() == ["ok", "ok"]
    heal.join()


def test_partition_that_stays(pair: Pair) -> None:
    """When it does not, both sides end at their timeout."""
    assert pair.all_reduce() == ["ok", "ok"]
    pair.faults.held = True
    assert pair.all_reduce(0.5) == ["timeout", "timeout"]


@pytest.mark.parametrize(
    ("delay", "size"), [(0.05, 65536), (0.2, 65536), (0.0, 1000)], ids=["50ms", "200ms", "sliced"]
)
def test_slow_is_not_dead(pair: Pair, delay: float, size: int) -> None:
    """Late or sliced bytes give right results, and nobody is taken for dead."""
    pair.faults.delay, pair.faults.slice = delay, size
    for _ in range(2):
        assert pair.all_reduce() == ["ok", "ok"]
