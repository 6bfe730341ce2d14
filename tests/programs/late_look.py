"""One end of a connection between two hosts, whose process begins to look late.

argv: `listen`, or `idle` or `full`, and the port. The listening end reads nothing. The other one is
idle, or sends until nothing more is taken, and prints "ready". After a line it has something to
send, and looks until it takes the host at the other end for gone. It prints the time of that.
"""

from __future__ import annotations

import contextlib
import select
import socket
import sys
import time

from cydist import _native
from cydist.net.silence import peer_timeout, watch_idle

LISTENER = "10.77.0.2"


def main() -> None:
    doing, port = sys.argv[1], int(sys.argv[2])
    if doing == "listen":
        with socket.create_server((LISTENER, port)) as listener:
            print("ready", flush=True)
            sock = listener.accept()[0]
            with sock:
                sys.stdin.readline()
        return
    with socket.create_connection((LISTENER, port)) as sock:
        watch_idle(sock)
        sock.setblocking(False)
        watch = _native.SilenceWatch(peer_timeout())
        writable = select.poll()
        writable.register(sock, select.POLLOUT)
        if doing == "full":
            # Until the other kernel has no room either, and this one only probes.
            while writable.poll(1000):
                with contextlib.suppress(BlockingIOError):
                    sock.send(bytes(1 << 16))
        print("ready", flush=True)
        sys.stdin.readline()
        if doing == "idle":
            sock.send(b"x")
        ended = select.poll()
        ended.register(sock, 0)
        while not (ended.poll(1000 * watch.period) or watch.look(sock.fileno())[1]):
            pass
        print(time.monotonic(), flush=True)


main()
