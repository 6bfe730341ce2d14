"""Peer "raw": two ranks that only poll one TCP connection.

This is the least time that a collective over sockets can take: no checks, no deadlines, no
matching, no sleep. Both directions move at once, as far as the collective allows.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Callable
from typing import Any

import numpy as np

from cydist.bench.cases import OPS
from cydist.bench.peers import Bound, one_way, pingpong

LOCAL = "127.0.0.1"
WRITE_BYTES = 1 << 20  # of one write


class RawSockets:
    """A library that only has sockets: no choices, and nothing in the background."""

    def begin(self, array: Any) -> Callable[[], object]:
        """Raise NotImplementedError, since nothing runs in the background."""
        raise NotImplementedError("raw sockets do nothing in the background")

    def algorithm(self, op: str, nbytes: int) -> str:
        """Return an empty string: there is no choice."""
        return ""


class RawTcp(RawSockets):
    """A library for two ranks; see Library in peers.py. Raises ValueError for other numbers.

    Args:
        rank, size: This process among the ranks.
        from_rank_0: Returns rank 0's argument on both ranks.
        host: Rank 0's. On LOCAL the connection has cydist's congestion control, else the system's.
    """

    def __init__(
        self, rank: int, size: int, from_rank_0: Callable[[str], str], host: str = LOCAL
    ) -> None:
        self.rank, self.size = rank, size
        if size != 2:
            raise ValueError(f"raw sockets connect 2 ranks, not {size}")
        if rank == 0:
            with listen_on(host) as listener:
                from_rank_0(str(listener.getsockname()[1]))
                listener.settimeout(60)
                self._socket, _ = listener.accept()
        else:
            self._socket = socket.create_connection((host, int(from_rank_0(""))), timeout=60)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if host == LOCAL:
            with contextlib.suppress(OSError):
                self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
        self._socket.setblocking(False)
        self.about = {"version": "one TCP connection, polled from Python"}
        self.barrier()

    def bind(self, op: str, send: Any, recv: Any) -> Bound:
        """Return the call that runs `op` on these numpy arrays.

        Raises NotImplementedError for ops that are measured only on request.
        """
        if op not in (*OPS, "one_way"):
            raise NotImplementedError(f"raw sockets have no {op}")
        if op == "barrier":
            return self.barrier, ()
        me, other = self.rank, 1 - self.rank
        if op == "broadcast":
            whole, nothing = bytes_of(send), bytes_of(send[:0])
            return self._move, (whole, nothing) if me == 0 else (nothing, whole)
        if op in ("pingpong", "one_way"):
            empty = bytes_of(send[:0])

            def out(array: Any, _: int) -> None:
                self._move(bytes_of(array), empty)

            def back(array: Any, _: int) -> None:
                self._move(empty, bytes_of(array))

            if op == "pingpong":
                return pingpong(out, back, me, send, recv)
            return one_way(out, back, me, send, recv, np.zeros(1, np.uint8))
        if op == "all_reduce":
            scratch = np.zeros_like(send)
            return self._then(bytes_of(send), scratch, lambda: np.add(recv, scratch, out=recv))
        halves = np.split(recv if op == "all_gather" else send, 2)
        if op == "all_gather":
            return self._then(bytes_of(send), halves[other], lambda: np.copyto(halves[me], send))
        if op == "reduce_scatter":
            scratch = np.zeros_like(recv)
            return self._then(
                bytes_of(halves[other]), scratch, lambda: np.add(halves[me], scratch, out=recv)
            )
        into = np.split(recv, 2)
        return self._then(
            bytes_of(halves[other]), into[other], lambda: np.copyto(into[me], halves[me])
        )

    def _then(self, out: memoryview, into: Any, finish: Callable[[], object]) -> Bound:
        """Exchange, then do the local work."""
        room = bytes_of(into)

        def call() -> None:
            self._move(out, room)
            finish()

        return call, ()

    def _move(self, out: memoryview, into: memoryview) -> None:
        """Send all of `out`, and fill `into`."""
        send, receive = self._socket.send, self._socket.recv_into
        sent, got = 0, 0
        while sent < len(out) or got < len(into):
            if sent < len(out):
                with contextlib.suppress(BlockingIOError):
                    sent += send(out[sent : sent + WRITE_BYTES])
            if got < len(into):
                try:
                    count = receive(into[got:])
                except BlockingIOError:
                    continue
                if count == 0:
                    raise ConnectionError("the other rank is gone")
                got += count

    def barrier(self) -> None:
        """Exchange a byte each way."""
        self._move(memoryview(b"\0"), memoryview(bytearray(1)))

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


def listen_on(host: str) -> socket.socket:
    """Listen on all addresses, since rank 0 may resolve its own name to one that others lack."""
    if host == LOCAL:
        return socket.create_server((LOCAL, 0))
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def bytes_of(array: Any) -> memoryview:
    """Return the memory of an array."""
    return memoryview(array.view(np.uint8))
