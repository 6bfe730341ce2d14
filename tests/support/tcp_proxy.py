"""A proxy in front of one rank's socket, which can cut, hold, delay and slice what it carries."""

from __future__ import annotations

import contextlib
import heapq
import selectors
import socket
import struct
import threading
import time
from dataclasses import dataclass

RESET = struct.pack("ii", 1, 0)  # SO_LINGER: close by RST


@dataclass
class NetworkFaults:
    """What happens to the bytes; may be changed while they flow.

    Attributes:
        cut_at: The connection ends when so many bytes have gone to the rank behind the proxy.
        reset: By a reset and not by an orderly end.
        held: Nothing moves, in either direction.
        delay: Seconds that every byte takes.
        slice: Bytes that travel together at most.
    """

    cut_at: int | None = None
    reset: bool = False
    held: bool = False
    delay: float = 0.0
    slice: int = 65536


class Proxy:
    """Listens at `port`, connects to `target`, and carries bytes both ways."""

    def __init__(self, target: tuple[str, int], faults: NetworkFaults) -> None:
        self._target = target
        self._faults = faults
        self._selector = selectors.DefaultSelector()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._other: dict[socket.socket, socket.socket] = {}
        self._inward: dict[socket.socket, int] = {}  # bytes so far towards the target
        self._due: list[tuple[float, int, socket.socket, bytes]] = []
        self._count = 0
        self._stopping = False
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End every connection."""
        self._stopping = True
        self._thread.join()
        for sock in [*self._other, self._listener]:
            sock.close()
        self._selector.close()

    def _serve(self) -> None:
        while not self._stopping:
            for key, _ in self._selector.select(0.001 if self._due else 0.02):
                if key.fileobj is self._listener:
                    self._accept()
                elif isinstance(key.fileobj, socket.socket) and not self._faults.held:
                    self._read(key.fileobj)
            while self._due and self._due[0][0] <= time.monotonic() and not self._faults.held:
                _, _, sock, data = heapq.heappop(self._due)
                self._write(sock, data)

    def _accept(self) -> None:
        client, _ = self._listener.accept()
        try:
            server = socket.create_connection(self._target)
        except OSError:
            client.close()
            return
        self._other |= {client: server, server: client}
        self._inward[server] = 0
        for sock in (client, server):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._selector.register(sock, selectors.EVENT_READ)

    def _read(self, sock: socket.socket) -> None:
        if sock not in self._other:
            return
        try:
            data = sock.recv(self._faults.slice)
        except OSError:
            data = b""
        self._count += 1
        when = time.monotonic() + self._faults.delay
        heapq.heappush(self._due, (when, self._count, self._other[sock], data))
        if not data:
            self._selector.unregister(sock)

    def _write(self, sock: socket.socket, data: bytes) -> None:
        """Pass bytes on; b"" ends the connection."""
        if sock not in self._other:
            return
        limit = self._faults.cut_at
        if limit is not None and sock in self._inward:
            data = data[: max(0, limit - self._inward[sock])]
        with contextlib.suppress(OSError):
            sock.sendall(data)
        if sock in self._inward:
            self._inward[sock] += len(data)
            if limit is not None and self._inward[sock] >= limit:
                data = b""
        if not data:
            self._end(sock)

    def _end(self, sock: socket.socket) -> None:
        for each in (sock, self._other.pop(sock)):
            self._other.pop(each, None)
            self._inward.pop(each, None)
            with contextlib.suppress(KeyError, ValueError):
                self._selector.unregister(each)
            if self._faults.reset:
                each.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            each.close()
