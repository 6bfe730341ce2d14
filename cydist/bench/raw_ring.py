"""Peer "raw" on several hosts: TCP connections in a ring of hosts, which only move bytes.

This is what TCP takes for the bytes of a collective: each host sends the fewest, from all its ranks
at once, and none waits for data that it passes on, but for those of a broadcast. A library that has
less under way may take less on a slow link.
"""

from __future__ import annotations

import contextlib
import select
import socket
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from cydist.bench.peers import Bound
from cydist.bench.raw_tcp import WRITE_BYTES, RawSockets, bytes_of, listen_on

Gather = Callable[[Any], list[Any]]


class RawRing(RawSockets):
    """A library without results, for as many ranks on each host; see Library in peers.py.

    Rank k of each host sends to rank k of the next one, and receives from that of the one before;
    between two hosts over one connection. It sleeps while it can do neither. Raises ValueError if
    the hosts have different numbers of ranks, or there is one.

    Args:
        rank: This process among the ranks.
        places: The host of each rank.
        address: This host's, for the others.
        all_gather: Returns the arguments of all ranks.
        barrier: Waits for all ranks.
    """

    moves_only = True

    def __init__(
        self,
        rank: int,
        places: Sequence[str],
        address: str,
        all_gather: Gather,
        barrier: Callable[[], object],
    ) -> None:
        self.rank, self.size = rank, len(places)
        self.barrier = barrier
        hosts = [[r for r in range(self.size) if places[r] == one] for one in dict.fromkeys(places)]
        if len(hosts) == 1 or len({len(ranks) for ranks in hosts}) != 1:
            raise ValueError(
                "raw sockets need 2 ranks, or hosts with the same number of ranks, not "
                + " and ".join(str(len(ranks)) for ranks in hosts)
            )
        self._hosts, self._lanes = len(hosts), len(hosts[0])
        self._here = next(i for i, ranks in enumerate(hosts) if rank in ranks)
        lane = hosts[self._here].index(rank)
        after = hosts[(self._here + 1) % self._hosts][lane]
        self._before = hosts[self._here - 1][lane]
        self._connect(after, address, all_gather)
        self.about = {"version": f"{self._lanes} TCP connections from host to host, bytes alone"}

    def _connect(self, after: int, address: str, all_gather: Gather) -> None:
        with contextlib.ExitStack() as opened:
            accepting = opened.enter_context(listen_on(address))
            accepting.settimeout(60)
            places = all_gather((address, accepting.getsockname()[1]))
            made: list[socket.socket] = []
            if self._hosts > 2 or self._here == 0:
                made.append(socket.create_connection(places[after], timeout=60))
                opened.enter_context(made[-1])
            if self._hosts > 2 or self._here != 0:
                made.append(accepting.accept()[0])
                opened.enter_context(made[-1])
            for each in made:
                each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                each.setblocking(False)
            self._out, self._in = made[0], made[-1]
            opened.pop_all()
            accepting.close()

    def bind(self, op: str, send: Any, recv: Any) -> Bound:
        """Return the call that moves this rank's share of the bytes of `op`.

        Raises NotImplementedError for ops whose bytes do not travel round a ring.
        """
        hosts, lanes = self._hosts, self._lanes
        if op == "broadcast":
            share = send.nbytes // lanes
            room = bytes_of(np.zeros(share, np.uint8))
            last = self._here == hosts - 1
            out, into = room[: 0 if last else share], room[: share if self._here else 0]
            return self._move, (out, into)
        whole = {"all_reduce": send, "reduce_scatter": send, "all_gather": recv}.get(op)
        if whole is None:
            raise NotImplementedError(f"raw sockets between hosts have no {op}")
        share = whole.nbytes * (hosts - 1) * (2 if op == "all_reduce" else 1) // hosts // lanes
        return self._move, (
            bytes_of(np.zeros(share, np.uint8)),
            bytes_of(np.zeros(share, np.uint8)),
        )

    def _move(self, out: memoryview, into: memoryview) -> None:
        """Send all of `out`, and fill `into`. What is in both is passed on."""
        relayed = out.obj is into.obj and len(into) > 0
        sent = got = 0
        while sent < len(out) or got < len(into):
            ready = got if relayed else len(out)
            moved = 0
            with contextlib.suppress(BlockingIOError):
                if sent < min(ready, len(out)):
                    moved += (count := self._out.send(out[sent : min(ready, sent + WRITE_BYTES)]))
                    sent += count
            with contextlib.suppress(BlockingIOError):
                if got < len(into):
                    moved += (count := self._in.recv_into(into[got:]))
                    got += count
                    if count == 0:
                        raise ConnectionError(f"rank {self._before} is gone")
            if not moved:
                waiting = [self._in] if got < len(into) else []
                select.select(waiting, [self._out] if sent < min(ready, len(out)) else [], [])

    def close(self) -> None:
        """Close the connections."""
        self._in.close()
        self._out.close()
