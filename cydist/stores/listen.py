"""Listening sockets, bound to the requested address and no other."""

from __future__ import annotations

import errno
import socket
import sys
from typing import Any

from cydist.errors import DistNetworkError
from cydist.net.acceptor import with_remedy
from cydist.net.interfaces import outgoing_address, public_address, resolve


def adopt(fd: int, port: int) -> socket.socket:
    """Return the socket behind `fd`, which must be bound to `port`. The caller owns it from now
    on."""
    try:
        listener = socket.socket(fileno=fd)
    except OSError as error:
        raise DistNetworkError(f"master_listen_fd {fd} is not a socket: {error}") from None
    bound = listener.getsockname()[1]
    if bound != port:
        listener.detach()
        raise ValueError(f"master_listen_fd {fd} is bound to port {bound}, not to {port}")
    # It was inherited through exec; programs that this rank starts must not hold the port open.
    listener.set_inheritable(False)
    try:
        listener.listen()  # it may do so already
    except OSError as error:
        listener.detach()
        raise DistNetworkError(
            f"cannot listen on port {port}, to which master_listen_fd {fd} is bound: {error}. "
            "Another process listens there"
        ) from None
    return listener


def bind(host: str, port: int) -> list[socket.socket]:
    """Return sockets bound to exactly the requested address.

    There are two sockets if `host` is a name of this host that resolves to a loopback address only
    here (127.0.1.1 in many /etc/hosts files). There are also two if `host` is "": other ranks then
    know a loopback or a public address of this host, and this process does not know which.
    """
    if not host:
        return [_bind_one(name, port) for name in dict.fromkeys(("127.0.0.1", public_address()))]
    listener = _bind_one(host, port)
    address = listener.getsockname()
    outer = outer_address(host, address[0])
    if outer is None:
        return [listener]
    try:
        return [listener, _bind_one(outer, address[1])]
    except DistNetworkError:
        return [listener]


def outer_address(host: str, bound: str) -> str | None:
    """Return the address at which other hosts reach this one, if `host` is its name and means
    loopback only here."""
    import ipaddress  # slow, and only rank 0 needs it

    ours = host.partition(".")[0] == socket.gethostname().partition(".")[0]
    if not ours or not ipaddress.ip_address(bound).is_loopback:
        return None
    return outgoing_address()


def _holder() -> str:
    """Return the likely holder of a port that is in use, and what to do."""
    torch: Any = sys.modules.get("torch.distributed")
    if torch is not None and torch.is_available() and torch.is_initialized():
        return (
            "another process, or by torch.distributed's store in this one: call "
            "cydist.init_process_group('tcp', torch=True) in place of torch's init_process_group, "
            "or give cydist another port (init_method='tcp://host:port')"
        )
    return "another process: free it, or give all ranks another one (MASTER_PORT)"


def _bind_one(host: str, port: int) -> socket.socket:
    failure: OSError | None = None
    try:
        candidates = resolve(host, port)
    except OSError as error:
        raise DistNetworkError(f"cannot listen on {host}, port {port}: {error}") from None
    for family, kind, protocol, _, address in candidates:
        try:
            listener = socket.socket(family, kind, protocol)
        except OSError as error:
            failure = error
            continue
        try:
            # Otherwise a port whose last connections are in TIME_WAIT could not be used again.
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                only = 0 if address[0] == "::" else 1
                listener.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, only)
            listener.bind(address)
            # With SO_REUSEADDR some taken ports are found only now.
            listener.listen()
            return listener
        except OSError as error:
            listener.close()
            failure = error
            if error.errno == errno.EADDRINUSE:
                raise DistNetworkError(f"port {port} of {host} is in use by {_holder()}") from None
    if failure is not None and failure.errno == errno.EADDRNOTAVAIL:
        raise DistNetworkError(
            f"{host} is not an address of this host ({socket.gethostname()}): rank 0 must "
            "run where MASTER_ADDR points"
        )
    why = "it has no address" if failure is None else with_remedy(failure)
    raise DistNetworkError(f"cannot listen on {host}, port {port}: {why}")
