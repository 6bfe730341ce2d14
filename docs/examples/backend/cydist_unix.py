"""The backend "unix" for cydist: ranks of one host send each other messages by Unix sockets."""

import os
import socket
import threading
from collections import defaultdict, deque
from multiprocessing.connection import Client, Listener

import cydist as dist


class UnixGroup(dist.ProcessGroup):
    interface_version = 2

    def __init__(self, store, rank, size, timeout):
        super().__init__(rank, size)
        self._lock = threading.Lock()  # of the next three
        self._arrived = defaultdict(deque)  # (peer, tag) -> contents
        self._wanted = defaultdict(deque)  # (peer, tag) -> (work, array)
        self._lost = {}  # peer -> why no more messages come from it
        self._links = connect(store, rank, size)
        self._sending = {peer: threading.Lock() for peer in self._links}
        for each in self._links.items():
            threading.Thread(target=self._read, args=each, daemon=True).start()

    def isend(self, array, peer, tag):
        work = dist.EventWork(f"send to rank {self.ranks[peer]}", self.timeout)
        try:
            with self._sending[peer]:  # until the peer has read, which it always does
                self._links[peer].send_bytes(f"{tag}".encode())
                self._links[peer].send_bytes(memoryview(array))
            work.end()
        except OSError as error:
            work.end(self._failed_peer(peer, error))
        return work

    def irecv(self, array, peer, tag):
        if peer is None:
            raise dist.UnsupportedError("recv: backend 'unix' must be told from whom")
        work = dist.EventWork(f"recv from rank {self.ranks[peer]}", self.timeout)
        with self._lock:
            self._wanted[peer, tag].append((work, array))
            self._match(peer, tag)
        return work

    def close(self):
        for link in self._links.values():
            with socket.socket(fileno=os.dup(link.fileno())) as end:
                end.shutdown(socket.SHUT_RDWR)  # wakes the readers on both sides

    def abort(self):
        super().abort()
        self.close()

    def _read(self, peer, link):
        try:
            while True:
                tag, content = int(link.recv_bytes()), link.recv_bytes()
                with self._lock:
                    self._arrived[peer, tag].append(content)
                    self._match(peer, tag)
        except (OSError, EOFError) as error:
            with self._lock:
                self._lost[peer] = error
                for source, tag in self._wanted:
                    if source == peer:
                        self._match(peer, tag)

    def _match(self, peer, tag):
        arrived, wanted = self._arrived[peer, tag], self._wanted[peer, tag]
        while wanted and (arrived or peer in self._lost):
            work, array = wanted.popleft()
            if not arrived:
                work.end(self._failed_peer(peer, self._lost[peer]))
            elif len(content := arrived.popleft()) != array.nbytes:
                sizes = f"{len(content)} bytes came, and {array.nbytes} were expected"
                work.end(dist.MismatchError(f"recv: {sizes}", ranks=(self.ranks[peer],)))
            else:
                memoryview(array)[:] = content
                work.end(source=self.ranks[peer])

    def _failed_peer(self, peer, why):
        rank = self.ranks[peer]
        return dist.PeerFailedError(f"rank {rank} ended or was lost: {why!r}", ranks=(rank,))


def connect(store, rank, size):
    links = {}
    with Listener(family="AF_UNIX", backlog=size) as listener:
        store.set(f"address/{rank}", listener.address)
        for peer in range(rank):
            links[peer] = Client(store.get(f"address/{peer}").decode())
            links[peer].send_bytes(f"{rank}".encode())
        store.set(f"connected/{rank}", "")
        store.wait([f"connected/{peer}" for peer in range(size)])  # or accept might wait
        for _ in range(rank + 1, size):
            link = listener.accept()
            links[int(link.recv_bytes())] = link
    return links
