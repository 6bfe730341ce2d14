"""Where a rank can be reached: its network interfaces, and what it tells the others of them."""

from __future__ import annotations

import contextlib
import fcntl
import json
import socket
import struct
from typing import NamedTuple

from cydist.errors import DistNetworkError, RendezvousError
from cydist.names import resolve
from cydist.stores import PrefixStore, TCPStore

SIOCGIFADDR = 0x8915
IPV6_TABLE = "/proc/net/if_inet6"
MAX_BYTES = 65536

Endpoint = tuple[str, int]  # numeric host, port


def of_interface(name: str) -> list[str]:
    """The numeric addresses of a network interface, or the address that `name` is.

    Raises DistNetworkError when there is no such interface, or it has no address.
    """
    import ipaddress

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


def of_host(host: str) -> list[str]:
    """The numeric addresses of a host name. Raises DistNetworkError if it has none."""
    try:
        answers = resolve(host, 0)
    except OSError as error:
        raise DistNetworkError(f"no address for {host!r} to listen on: {error}") from None
    return list(dict.fromkeys(str(answer[4][0]) for answer in answers))


def towards(host: str) -> str:
    """The address of ours from which packets to `host` leave; nothing is sent.

    Raises DistNetworkError when there is no way to it.
    """
    for address in of_host(host):
        with socket.socket(family(address), socket.SOCK_DGRAM) as sock:
            try:
                sock.connect((address, 9))
            except OSError:
                continue
            return str(sock.getsockname()[0])
    raise DistNetworkError(f"no way from this host to {host!r}")


def where_to_listen(store: object) -> str:
    """The address of ours that the others can reach if they reached the store."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, TCPStore):
        return towards(store.host)
    from cydist.stores import FileStore

    if isinstance(store, FileStore):
        with contextlib.suppress(OSError):
            return resolve(socket.gethostname(), 0, family=socket.AF_INET)[0][4][0]
    return "127.0.0.1"


def family(address: str) -> socket.AddressFamily:
    """AF_INET or AF_INET6."""
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def spelled(endpoint: Endpoint) -> str:
    """host:port as people write it."""
    host, port = endpoint
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Address(NamedTuple):
    """What a rank publishes of itself.

    host    tells which ranks share cores: the name of the host and of its boot
    lanes   of each lane, where it listens; all are tried
    """

    rank: int
    host: str
    lanes: list[list[Endpoint]]

    def encode(self) -> bytes:
        """The bytes that other ranks decode."""
        return json.dumps({"rank": self.rank, "host": self.host, "lanes": self.lanes}).encode()

    @staticmethod
    def decode(data: bytes) -> Address:
        """Raises RendezvousError for anything that `encode` would not make."""
        try:
            if len(data) > MAX_BYTES:
                raise ValueError(f"{len(data)} bytes")
            fields = json.loads(data)
            rank, host = fields["rank"], fields["host"]
            lanes = [[_endpoint(*pair) for pair in lane] for lane in fields["lanes"]]
            if type(rank) is not int or rank < 0 or type(host) is not str:
                raise ValueError(f"rank {rank!r} on host {host!r}")
            if not lanes or not all(lanes):
                raise ValueError("nowhere to connect to")
            return Address(rank, host, lanes)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise RendezvousError(f"{data[:80]!r} is no rank's address: {error!r}") from None


def this_host() -> str:
    """A name that two ranks share if they share cores."""
    boot = ""
    with contextlib.suppress(FileNotFoundError):
        boot = boot_id()
    return f"{socket.gethostname()}/{boot}"


def boot_id() -> str:
    """What the kernel made up when it started. Raises OSError where it tells nobody."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def _endpoint(host: object, port: object) -> Endpoint:
    """What a socket can connect to, whatever it then says; ValueError for anything else."""
    plain = type(host) is str and host.isascii() and host.isprintable()
    if not plain or type(port) is not int or not 0 < port < 65536:
        raise ValueError(f"no address {host!r}, port {port!r}")
    with contextlib.suppress(OSError):
        socket.inet_pton(socket.AF_INET, str(host))
        return str(host), port
    import ipaddress  # slow, and takes long for each of many ranks

    return str(ipaddress.ip_address(str(host))), port
