"""The TCP store servers of this process, each with the number of its users."""

from __future__ import annotations

import threading
import weakref

from cydist.errors import DistNetworkError
from cydist.net.acceptor import with_remedy
from cydist.stores.listen import adopt, bind
from cydist.stores.tcp_server import StoreServer, servers

__all__ = ["ServerRefcount", "serve", "servers"]


class ServerRefcount:
    """A server and the number of its users in this process. It stops with the last user."""

    def __init__(self, server: StoreServer) -> None:
        self.server = server
        self._users = 1
        # Finalizers take it, which run wherever garbage is collected. So it is reentrant, and held
        # only for counting.
        self._lock = threading.RLock()

    def join(self) -> bool:
        """Add a user; return False if the last one has gone."""
        with self._lock:
            if self._users:
                self._users += 1
            return self._users > 0

    def leave(self, linger: float) -> None:
        """Remove a user."""
        with self._lock:
            self._users -= 1
            last = self._users == 0
        if last:
            self.server.stop(linger)


_tenants: weakref.WeakValueDictionary[tuple[str, int], ServerRefcount] = (
    weakref.WeakValueDictionary()
)
_tenants_lock = threading.Lock()


def serve(
    host: str, port: int, secret: bytes, job: str, multi_tenant: bool, fd: int | None
) -> ServerRefcount:
    """Serve at this address, or through `fd`, a socket bound to it. Share the server of another
    store in this process if both are `multi_tenant`. Raises DistNetworkError if the port is
    taken."""
    if not multi_tenant:
        return ServerRefcount(_new_server(host, port, secret, job, fd))
    with _tenants_lock:
        lease = _tenants.get((host, port))
        if lease is not None and lease.join():
            return lease
        lease = ServerRefcount(_new_server(host, port, secret, job, fd))
        _tenants[host, lease.server.port] = lease
        return lease


def _new_server(host: str, port: int, secret: bytes, job: str, fd: int | None) -> StoreServer:
    listeners = bind(host, port) if fd is None else [adopt(fd, port)]
    try:
        return StoreServer(listeners, secret, job)
    except OSError as error:
        for listener in listeners:
            listener.close()
        raise DistNetworkError(
            f"cannot serve a store on port {port}: {with_remedy(error)}"
        ) from None
