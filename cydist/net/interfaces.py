"""This host's own addresses: of its interfaces, and of the ways that lead out of it."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Callable
from typing import Any

from cydist import config
from cydist.errors import DistNetworkError, RendezvousError
from cydist.net.host_names import resolve

SIOCGIFADDR = 0x8915
IPV6_TABLE = "/proc/net/if_inet6"
# Addresses of documentation: to find out how packets leave this host; nothing is sent to them.
_ELSEWHERE = ("192.0.2.1", "2001:db8::1")
_DISCARD = 9  # a port


def chosen() -> list[str]:
    """The interfaces that the user names."""
    return [name.strip() for name in config.INTERFACES.get().split(",") if name.strip()]


def of_interface(name: str) -> list[str]:
    """The numeric addresses of a network interface, or the address that `name` is.

    Raises DistNetworkError when there is no such interface, or it has no address.
    """
    import ipaddress  # slow, and few need it

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


def ipv4_of_interface(name: str) -> str:
    """The IPv4 address of an interface; RendezvousError if it has none."""
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
    """From the kernel's table: address, index, prefix length, scope, flags, interface."""
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
    """AF_INET or AF_INET6, of a numeric address."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def way_out(
    to: tuple[str, int], prepare: Callable[[socket.socket], object] = lambda sock: None
) -> Any:
    """The address of ours, as a socket has it, from which packets to a numeric address leave.

    prepare     sets the socket's options

    Raises OSError when there is no way; nothing is sent.
    """
    with socket.socket(family_of(to[0]), socket.SOCK_DGRAM) as probe:
        prepare(probe)
        probe.connect(to)
        return probe.getsockname()


def towards(host: str, deadline: float | None = None) -> str:
    """The address of ours from which packets to `host`, a name or address, leave: others that
    reach it reach us there.

    deadline    of the name service, on time.monotonic()

    Raises RendezvousError when there is no way to it.
    """
    try:
        answers = resolve(host, _DISCARD, deadline)
    except OSError as error:
        raise RendezvousError(f"no address for {host!r}: {error}") from None
    for _, _, _, _, address in answers:
        try:
            return str(way_out(address)[0])
        except OSError:
            continue
    raise RendezvousError(f"no way from this host to {host!r}")


def outwards() -> str | None:
    """The IPv4 address of ours from which packets to other hosts leave; None: they do not."""
    return _elsewhere(_ELSEWHERE[0])


def _elsewhere(host: str) -> str | None:
    try:
        return str(way_out((host, _DISCARD))[0])
    except OSError:
        return None


def public_address() -> str:
    """An address of this host that others can reach: of the interface that is configured, else
    of the one with the default route, else what the host's name means; loopback without any.

    Raises DistNetworkError when the interface is not there, or has no address.
    """
    for name in chosen():
        return of_interface(name)[0]
    for target in _ELSEWHERE:
        address = _elsewhere(target)
        if address:
            return address
    try:
        return resolve(socket.gethostname(), 0, family=socket.AF_INET)[0][4][0]
    except OSError:
        return "127.0.0.1"


def boot_id() -> str:
    """What this host's kernel made up when it started. Raises OSError where it tells nobody."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()
