"""Two links of one process, and between them a relay that a test has in its hands."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Sequence

from transport_ranks import DEADLINE, Group
from wire_peer import KEYS

from cydist import _native


class RelayedLinks:
    """Ranks 0 and 1, whose connection is cut in two. A subclass says what it carries.

    Args:
        ciphers: One for each rank; None: the connection is not encrypted.
    """

    def __init__(self, ciphers: Sequence[_native.CipherHandle | None] = (None, None)) -> None:
        self.links = [_native.TcpLink(rank, 2) for rank in (0, 1)]
        self.groups = [Group(_native.Group(self.links[rank], [0, 1], rank, 1)) for rank in (0, 1)]
        self._ends = []
        for rank, link in enumerate(self.links):
            ours, theirs = socket.socketpair()
            ours.setblocking(False)
            # Little room, so that frames and records are often sent in parts.
            ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
            keys = KEYS[rank], KEYS[1 - rank]
            assert link.adopt(1 - rank, 0, ours.detach(), *keys, ciphers[rank])
            self._ends.append(theirs)
        self._threads = [
            threading.Thread(target=self._carry, args=(sender,), daemon=True) for sender in (0, 1)
        ]
        for thread in self._threads:
            thread.start()

    def carry(self, sender: int, source: socket.socket, sink: socket.socket) -> None:
        """Carry what rank `sender` sends, until it ends."""
        raise NotImplementedError

    def _carry(self, sender: int) -> None:
        source, sink = self._ends[sender], self._ends[1 - sender]
        with contextlib.suppress(OSError):
            self.carry(sender, source, sink)
        with contextlib.suppress(OSError):
            sink.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """End links and relay."""
        for link in self.links:
            link.close()
        for end in self._ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(DEADLINE)
        for end in self._ends:
            end.close()
