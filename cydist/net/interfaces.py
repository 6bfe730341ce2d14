"""Find the addresses of this host's interfaces and routes, and of host names."""

from __future__ import annotations

import errno
import fcntl
import socket
import struct
import threading
import time
from collections.abc import Callable
from typing import Any

from cydist import config
from cydist.errors import DistNetworkError, DistTimeoutError, RendezvousError
from cydist.executor import THREADS
from cydist.waiting import wait_for

SIOCGIFADDR = 0x8915
IPV6_TABLE = "/proc/net/if_inet6"
# Documentation addresses, to find the interface by which packets leave this host; nothing is sent
# to them.
_ELSEWHERE = ("192.0.2.1", "2001:db8::1")
_DISCARD = 9  # a port

# How long a name service may take without a deadline, in seconds.
PATIENCE = 10.0

# getaddrinfo's error codes for a name that is not known, or that has no address.
NO_SUCH_NAME = (socket.EAI_NONAME, socket.EAI_FAMILY, socket.EAI_NODATA)

# As getaddrinfo gives them: family, kind, protocol, canonical name, address.
Resolved = tuple[int, int, int, str, tuple[str, int]]


class NameServiceTimeout(TimeoutError):
    """The name service did not answer in time."""


def why_unreachable(host: str, error: Exception) -> str:
    """Return the text of an error in connecting to `host`, with what may be the reason."""
    if isinstance(error, NameServiceTimeout):
        return str(error)
    if isinstance(error, socket.gaierror):
        if error.errno in NO_SUCH_NAME:
            return f"{error}: the name service of this host knows no {host!r}: is it misspelt?"
        return f"{error}: the name service of this host fails for {host!r}"
    if isinstance(error, ConnectionRefusedError):
        # Each host has these for itself, and gives them to its ranks by mistake.
        own = host in ("localhost", "::1") or host.startswith("127.")
        there = f"{host} is this host itself" if own else "the host is there"
        return (
            f"{error}: {there}, and no process listens on this port yet, or a firewall rejects it"
        )
    if isinstance(error, OSError) and error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH):
        return f"{error}: this host has no route there, the host is off, or a firewall rejects it"
    if isinstance(error, OSError) and error.errno in (errno.EINVAL, errno.EACCES, errno.EPERM):
        return f"{error}: a route or a firewall of this host forbids this address"
    if isinstance(error, DistTimeoutError):
        return (
            f"{error}: what listens there has accepted and says nothing: it is another program, "
            "or stopped"
        )
    if isinstance(error, TimeoutError):
        return (
            f"{error}: nothing answers: the host is off, or a firewall drops packets to this port"
        )
    return str(error)


def chosen_interfaces() -> list[str]:
    """Return the interfaces that CYDIST_SOCKET_IFNAME names."""
    return [name.strip() for name in config.INTERFACES.get().split(",") if name.strip()]


def interface_addresses(name: str) -> list[str]:
    """Return a network interface's numeric addresses, or `name` itself if it is an address.

    Raises DistNetworkError when there is no such interface, or it has no address.
    """
    import ipaddress  # slow and rarely needed

    try:
        return [str(ipaddress.ip_address(name))]
    except ValueError:
        pass
    found = _ipv4(name) + _ipv6(name)
    if not found:
        known = ", ".join(interface for _, interface in socket.if_nameindex())
        raise DistNetworkError(
            f"no address on network interface {name!r} to listen on; this host has {known}"
        )
    return found


def interface_ipv4(name: str) -> str:
    """Return the IPv4 address of an interface. Raises RendezvousError if it has none."""
    found = _ipv4(name)
    if not found:
        raise RendezvousError(f"{config.INTERFACES.names[0]}={name}: no IPv4 address there")
    return found[0]


def _ipv4(name: str) -> list[str]:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        try:
            answer = fcntl.ioctl(sock, SIOCGIFADDR, struct.pack("256s", name.encode()[:15]))
        except OSError:
            return []
    return [socket.inet_ntoa(answer[20:24])]


def _ipv6(name: str) -> list[str]:
    """Read the kernel's table: address, index, prefix length, scope, flags, interface."""
    import ipaddress

    try:
        with open(IPV6_TABLE) as file:
            rows = [line.split() for line in file]
    except FileNotFoundError:
        return []
    found = [ipaddress.IPv6Address(int(row[0], 16)) for row in rows if row[5] == name]
    # A link-local address means nothing without the interface of the host that uses it.
    return [str(address) for address in found if not address.is_link_local]


def family_of(address: str) -> socket.AddressFamily:
    """Return AF_INET or AF_INET6 for a numeric address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def source_address(
    to: tuple[str, int], prepare: Callable[[socket.socket], object] = lambda sock: None
) -> Any:
    """Return this host's address, as a socket has it, from which packets to `to` leave.

    Args:
        prepare: Sets the socket's options.

    Raises OSError when there is no route. Nothing is sent.
    """
    with socket.socket(family_of(to[0]), socket.SOCK_DGRAM) as probe:
        prepare(probe)
        probe.connect(to)
        return probe.getsockname()


def address_towards(host: str, deadline: float | None = None) -> str:
    """Return this host's address from which packets to `host`, a name or address, leave.

    Hosts that reach `host` reach this one there.

    Args:
        deadline: Of the name service, on time.monotonic().

    Raises RendezvousError when there is no route to it.
    """
    try:
        answers = resolve(host, _DISCARD, deadline)
    except OSError as error:
        raise RendezvousError(f"no address for {host!r}: {error}") from None
    for _, _, _, _, address in answers:
        try:
            return str(source_address(address)[0])
        except OSError:
            continue
    raise RendezvousError(f"no way from this host to {host!r}")


def outgoing_address() -> str | None:
    """Return this host's IPv4 address from which packets to other hosts leave; None: no route."""
    return _address_towards(_ELSEWHERE[0])


def _address_towards(host: str) -> str | None:
    try:
        return str(source_address((host, _DISCARD))[0])
    except OSError:
        return None


def public_address() -> str:
    """Return an address of this host that others can reach.

    That is the address of the configured interface, else of the one with the default route, else
    what the host's name resolves to, else loopback.

    Raises DistNetworkError when the configured interface is missing or has no address.
    """
    for name in chosen_interfaces():
        return interface_addresses(name)[0]
    for target in _ELSEWHERE:
        address = _address_towards(target)
        if address:
            return address
    try:
        return resolve(socket.gethostname(), 0, family=socket.AF_INET)[0][4][0]
    except OSError:
        return "127.0.0.1"


def resolve(
    host: str, port: int, deadline: float | None = None, family: int = socket.AF_UNSPEC
) -> list[Resolved]:
    """Return the addresses of `host`, a name or an address, for TCP.

    Args:
        deadline: On time.monotonic(); None: in PATIENCE seconds.

    Raises OSError when it has none, NameServiceTimeout when the name service does not answer in
    time.
    The system's resolver has no deadline, so a thread asks it.
    """
    bare = host.strip("[]")
    try:
        return _getaddrinfo(bare, port, family, socket.AI_NUMERICHOST)
    except (socket.gaierror, UnicodeError):
        pass  # a name, or empty
    answers: list[list[Resolved] | OSError] = []
    answered = threading.Event()

    def ask() -> None:
        try:
            answers.append(_getaddrinfo(bare, port, family, 0))
        except OSError as error:
            answers.append(error)
        except UnicodeError as error:  # an impossible name
            answers.append(OSError(str(error)))
        answered.set()

    THREADS.run(ask)
    limit = PATIENCE if deadline is None else max(0.0, deadline - time.monotonic())
    if not wait_for(answered, limit):
        within = f"within {limit:.3g} s" if deadline is None else "in the time that the call has"
        raise NameServiceTimeout(f"the name service did not resolve {host!r} {within}")
    (answer,) = answers
    if isinstance(answer, OSError):
        raise answer
    return answer


def _getaddrinfo(host: str, port: int, family: int, flags: int) -> list[Resolved]:
    # ASCII names go as bytes: text would load Python's tables for international names.
    name = host.encode() if host.isascii() else host
    kind = socket.SOCK_STREAM
    return socket.getaddrinfo(name, port, family, kind, 0, flags)  # type: ignore[return-value]


def boot_id() -> str:
    """Return the random id of this host's running kernel. Raises OSError where it is hidden."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
