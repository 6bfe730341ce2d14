"""Ranks as ends of one transport within a test's process, below any backend."""

from __future__ import annotations

import contextlib
import functools
import os
import resource
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from cydist import _native
from cydist.backends.host.connections import Connections

DEADLINE = 20.0  # seconds for what takes milliseconds
SECRET = bytes(range(32))


@functools.cache
def has_ipv6() -> bool:
    """Is there a loopback for IPv6?"""
    try:
        with socket.socket(socket.AF_INET6) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


def free_port(host: str = "127.0.0.1") -> int:
    """A port that was free a moment ago."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as sock:
        sock.bind((host, 0))
        return int(sock.getsockname()[1])


@contextlib.contextmanager
def descriptors(left: int) -> Iterator[None]:
    """This process has so many descriptors left and no more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    lowest = [os.open(os.devnull, os.O_RDONLY) for _ in range(left + 1)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(lowest), hard))
    try:
        for fd in lowest:
            os.close(fd)
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def transports() -> list[str]:
    """Names for Ranks; conftest.py sets CYDIST_ENCRYPT for "tls"."""
    return ["inproc", "tcp", "tls", "shm", *(["tcp6"] if has_ipv6() else [])]


def soon(seconds: float = DEADLINE) -> int:
    """A deadline, in nanoseconds of the monotonic clock."""
    return time.monotonic_ns() + int(seconds * 1e9)


class Group:
    """A compiled group that takes what `asarray` takes."""

    def __init__(self, native: _native.Group) -> None:
        self.native = native
        self.abort, self.close = native.abort, native.close

    def run(self, *args: Any, **kwargs: Any) -> None:
        """As a backend does: a timeout is told when it has been looked into."""
        try:
            self.native.run(*args, **kwargs)
        except _native.CallError as failure:
            if failure.status == "timeout":
                self.native.fail("timeout")
            raise

    def isend(self, array: object, peer: int, tag: int) -> _native.Message:
        return _native.isend(self.native, _native.asarray(array), peer, tag)

    def irecv(self, array: object, peer: int, tag: int) -> _native.Message:
        return _native.irecv(self.native, _native.asarray(array), peer, tag)


class Ranks:
    """`size` ends of one transport, and groups over them.

    Args:
        memory: Bytes that ranks of "shm" share.
    """

    def __init__(
        self, transport: str, size: int, *, memory: int | None = None, **options: Any
    ) -> None:
        self.links: list[_native.Link] = []
        self.connections: list[Connections] = []
        if transport == "inproc":
            hub = _native.hub(uuid.uuid4().hex, size, **options)
            self.links = [_native.InprocLink(hub, rank) for rank in range(size)]
            return
        host = "::1" if transport == "tcp6" else "127.0.0.1"
        self.connections = [
            Connections(rank, size, host=host, job="test", secret=SECRET, **options)
            for rank in range(size)
        ]
        self.links = [connections.link for connections in self.connections]
        addresses = [connections.address() for connections in self.connections]
        for connections in self.connections:
            connections.connect(addresses)
        if transport == "shm":
            self.links = self._sharing(size, memory or size << 24)

    def _sharing(self, size: int, nbytes: int) -> list[_native.Link]:
        """Links as those of processes that share memory: each has a mapping of its own."""
        token = bytes(range(32))
        first = _native.SharedMemory.create(size, nbytes, token)
        memories = [first]
        for _ in range(1, size):
            memories.append(_native.SharedMemory.attach(os.dup(first.fd), token))
        return [
            _native.ShmLink(link, memory, dict.fromkeys(range(size), os.getpid()))
            for link, memory in zip(self.links, memories, strict=True)
        ]

    def group(self, context: int = 1, members: Sequence[int] | None = None) -> list[Group]:
        """Every member's end of a group, in group order."""
        peers = list(range(len(self.links))) if members is None else list(members)
        return [
            Group(_native.Group(self.links[peer], peers, rank, context))
            for rank, peer in enumerate(peers)
        ]

    def pending(self, rank: int) -> tuple[int, int]:
        """Receives posted on this rank, and messages nobody has asked for."""
        link = self.links[rank]
        if isinstance(link, _native.ShmLink):
            link = link.messages
        if isinstance(link, _native.InprocLink):
            return link.pending()
        counts = link.statistics()
        return counts["posted"], counts["arrived"]

    def leave(self, rank: int) -> None:
        """This rank ends as a well-behaved process does."""
        self.links[rank].close()
        if self.connections:
            self.connections[rank].close()

    def close(self) -> None:
        for rank in range(len(self.links)):
            self.leave(rank)


def done(*messages: _native.Message) -> None:
    """Wait for all, and see that they ended well."""
    for message in messages:
        assert message.wait(soon()), "not complete at the deadline"
        message.check()


def status_of(message: _native.Message) -> str:
    """How a message ended."""
    assert message.test()
    try:
        message.check()
    except _native.CallError as failure:
        return str(failure.status)
    return "ok"


def run(*bodies: Callable[[], object]) -> None:
    """Run all at once, each on a thread; raise what the first of them raised."""
    errors: list[BaseException | None] = [None] * len(bodies)

    def guarded(i: int) -> None:
        try:
            bodies[i]()
        except BaseException as error:
            errors[i] = error

    threads = [threading.Thread(target=guarded, args=(i,), daemon=True) for i in range(len(bodies))]
    for thread in threads:
        thread.start()
    limit = time.monotonic() + 2 * DEADLINE
    for thread in threads:
        thread.join(max(0.0, limit - time.monotonic()))
    assert not any(thread.is_alive() for thread in threads), "a rank hangs"
    for error in errors:
        if error is not None:
            raise error


def eventually(condition: Callable[[], bool]) -> None:
    """Wait for what other threads do."""
    limit = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < limit
        threading.Event().wait(0.002)
