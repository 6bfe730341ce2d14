"""The addresses at which a rank listens, and those that it publishes to the others."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from typing import Any, NamedTuple

from cydist import config
from cydist.errors import DistNetworkError, RendezvousError
from cydist.net.interfaces import address_towards, boot_id, public_address, resolve

MAX_BYTES = 65536

SocketAddress = tuple[str, int]  # numeric host, port


def resolve_host(host: str) -> list[str]:
    """Return the numeric addresses of a host name. Raises DistNetworkError if it has none."""
    try:
        answers = resolve(host, 0)
    except OSError as error:
        raise DistNetworkError(f"no address for {host!r} to listen on: {error}") from None
    return list(dict.fromkeys(str(answer[4][0]) for answer in answers))


def where_to_listen(store: Any, deadline: float | None = None) -> str:
    """Return this host's address that all ranks that reached the store can reach. The store may be
    another library's.

    Args:
        deadline: Of the name service, on time.monotonic().

    Raises RendezvousError if the store's host is unknown, or there is no route to it.
    """
    while (below := getattr(store, "underlying_store", None)) is not None:
        store = below
    host = getattr(store, "host", None)  # a TCPStore's, cydist's or torch's
    if isinstance(host, str):
        return address_towards(host, deadline)
    # A HashStore, cydist's or torch's: its users are threads of one process.
    return "127.0.0.1" if type(store).__name__ == "HashStore" else public_address()


def host_port(endpoint: SocketAddress) -> str:
    """Return host:port for messages."""
    host, port = endpoint
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


class Address(NamedTuple):
    """The address that a rank publishes.

    Attributes:
        host: The name of the host and of its boot: equal on ranks that share cores.
        lanes: For each lane, the addresses where it listens; peers try all.
    """

    rank: int
    host: str
    lanes: list[list[SocketAddress]]

    def encode(self) -> bytes:
        """Encode it as lines: the rank, the host, and each lane's addresses."""
        lanes = (" ".join(f"{host} {port}" for host, port in lane) for lane in self.lanes)
        return "\n".join((str(self.rank), self.host, *lanes)).encode()

    @staticmethod
    def decode(data: bytes) -> Address:
        """Decode the lines. Raises RendezvousError for anything that `encode` cannot have made."""
        try:
            if len(data) > MAX_BYTES:
                raise ValueError(f"{len(data)} bytes")
            rank, host, *lanes = data.decode().split("\n")
            found = Address(int(rank), host, [_lane(*lane.split(" ")) for lane in lanes])
            if found.rank < 0 or not lanes:
                raise ValueError("no rank, or nowhere to connect to")
            if found.encode() != data:
                raise ValueError("it is spelled in another way")
            return found
        except ValueError as error:
            raise RendezvousError(f"{data[:80]!r} is not a rank's address: {error!r}") from None


def this_host() -> str:
    """Return a name that is equal on ranks that share cores."""
    boot = ""
    with contextlib.suppress(FileNotFoundError):
        boot = boot_id()
    return f"{ascii(socket.gethostname())[1:-1]}/{boot}"  # must be one line


def check_reachable(peers: Sequence[Address]) -> None:
    """Raise RendezvousError if a rank listens on its loopback interface only, and another one is on
    another host."""
    hidden = [peer for peer in peers if _hidden(peer)]
    # "": a host whose kernel does not tell
    boots = {peer.host.partition("/")[2]: peer for peer in reversed(peers)}
    boots.pop("", None)
    for peer in hidden:
        name, _, boot = peer.host.partition("/")
        away = next((each for other, each in boots.items() if boot and other != boot), None)
        if away is not None:
            place = next(lane[0] for lane in peer.lanes if _all_loopback(lane))
            raise RendezvousError(
                f"rank {peer.rank} on {name} listens on {host_port(place)}, its loopback "
                f"interface, where rank {away.rank} on {away.host.partition('/')[0]} cannot reach "
                f"it: name interfaces that connect the hosts in {config.INTERFACES.names[0]}, or "
                "unset it",
                ranks=(peer.rank,),
            )


def _hidden(peer: Address) -> bool:
    return any(_all_loopback(lane) for lane in peer.lanes)


def _all_loopback(lane: Sequence[SocketAddress]) -> bool:
    return all(_is_loopback(host) for host, _ in lane)


def _is_loopback(host: str) -> bool:
    return host == "::1" or host.startswith("127.")


def _lane(*words: str) -> list[SocketAddress]:
    """Return the addresses in host, port, host, port ... Raises ValueError for anything that a
    socket cannot connect to."""
    pairs = zip(words[::2], words[1::2], strict=True)
    return [_socket_address(host, int(port)) for host, port in pairs]


def _socket_address(host: str, port: int) -> SocketAddress:
    """Return an address that a socket can connect to. Raises ValueError for anything else."""
    if not (host.isascii() and host.isprintable() and 0 < port < 65536):
        raise ValueError(f"no address {host!r}, port {port!r}")
    with contextlib.suppress(OSError):
        socket.inet_pton(socket.AF_INET, host)
        return host, port
    import ipaddress  # slow for many ranks

    return str(ipaddress.ip_address(host)), port
