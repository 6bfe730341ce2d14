"""Sockets to listen on: bound to the address asked for, and to nothing else."""

from __future__ import annotations

import errno
import fcntl
import socket
import struct

from cydist import config
from cydist.errors import DistNetworkError, RendezvousError
from cydist.names import resolve

_SIOCGIFADDR = 0x8915
# Addresses of documentation: to find out how packets leave this host; nothing is sent to them.
_ELSEWHERE = (("192.0.2.1", 9), ("2001:db8::1", 9))


def adopt(fd: int, port: int) -> socket.socket:
    """The socket behind `fd`, which must be bound to `port`; ours from now on."""
    listener = socket.socket(fileno=fd)
    bound = listener.getsockname()[1]
    if bound != port:
        listener.detach()
        raise ValueError(f"master_listen_fd {fd} is bound to port {bound}, not to {port}")
    # It came through an exec; programs that this rank starts must not hold the port open.
    listener.set_inheritable(False)
    return listener


def bind(host: str, port: int) -> list[socket.socket]:
    """Sockets bound to exactly the address asked for.

    They are two where `host` is a name of this host that it resolves to a loopback address
    itself (127.0.1.1 in many a /etc/hosts), but others do not; and where it is "": then others
    know an address of this host, be it loopback or public, and it does not know which.
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
    """How other hosts reach us, if `host` is our name and means loopback only here."""
    import ipaddress  # slow, and only rank 0 needs it

    ours = host.partition(".")[0] == socket.gethostname().partition(".")[0]
    if not ours or not ipaddress.ip_address(bound).is_loopback:
        return None
    return _way_out(*_ELSEWHERE[0])


def public_address() -> str:
    """An address of this host that others can reach: of the interface that is configured, else
    of the one with the default route, else what the host's name means; loopback without any."""
    names = [name for name in config.INTERFACES.get().split(",") if name]
    if names:
        return interface_address(names[0])
    for target in _ELSEWHERE:
        address = _way_out(*target)
        if address:
            return address
    try:
        return resolve(socket.gethostname(), 0, family=socket.AF_INET)[0][4][0]
    except OSError:
        return "127.0.0.1"


def _way_out(host: str, port: int) -> str | None:
    """The address of ours from which packets to `host` leave."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((host, port))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def interface_address(name: str) -> str:
    """The IPv4 address of an interface; RendezvousError if it has none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            answer = fcntl.ioctl(sock, _SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError as error:
            raise RendezvousError(
                f"{config.INTERFACES.names[0]}={name}: no IPv4 address there ({error})"
            ) from None
    return socket.inet_ntoa(answer[20:24])


def _bind_one(host: str, port: int) -> socket.socket:
    failure: OSError | None = None
    try:
        candidates = resolve(host, port)
    except OSError as error:
        raise DistNetworkError(f"cannot listen on {host}, port {port}: {error}") from None
    for family, kind, protocol, _, address in candidates:
        listener = socket.socket(family, kind, protocol)
        try:
            # Else a port whose last connections are in TIME_WAIT could not be served again.
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
                raise DistNetworkError(
                    f"port {port} of {host} is in use by another process: free it, or give "
                    "another one (MASTER_PORT); 0 takes any"
                ) from None
    if failure is not None and failure.errno == errno.EADDRNOTAVAIL:
        raise DistNetworkError(
            f"{host} is not an address of this host ({socket.gethostname()}): rank 0 must "
            "run where MASTER_ADDR points"
        )
    raise DistNetworkError(f"cannot listen on {host}, port {port}: {failure}")
