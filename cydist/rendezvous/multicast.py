"""Rendezvous on a multicast address, where the processes elect the one that serves the store.

Every process serves a store of its own and announces it, authenticated, on the address. A process
joins the announced store with the smallest name, and leaves it for a smaller one. The first store
that all processes have joined is the job's. So a process need not receive all announcements, and
lost datagrams only cost time. An announcement of a dead process is dropped when its store does not
answer.
"""

from __future__ import annotations

import contextlib
import hmac
import ipaddress
import os
import socket
import struct
import time

from cydist import config
from cydist.errors import AuthenticationError, DistError, DistStoreError, RendezvousError
from cydist.net import auth
from cydist.net.interfaces import chosen_interfaces, family_of, interface_ipv4, source_address
from cydist.rendezvous import launcher_env
from cydist.stores.tcp import TCPStore

# Most hops of announcements: as far as the routers of a site forward them.
HOPS = 8

# magic, job and group, name, address and port of the store, MAC
_ANNOUNCEMENT = struct.Struct("<8s16s16s16sH32s")
_MAGIC = b"cydistm\x02"
_SIZES = "sizes/"  # before the world size of a process, in a key of its store
_FIRST_PAUSE, _LONGEST_PAUSE = 0.02, 0.2


def find_store(group: str, port: int, size: int, group_name: str, deadline: float) -> TCPStore:
    """Return the store that `size` processes on this multicast address agree on.

    Args:
        group_name: Separates jobs that use one address.

    Raises RendezvousError at the deadline (on time.monotonic()), with the number of processes
    found, or as soon as it meets a process with another `size`.
    """
    with _MulticastGroup(group, port, group_name, size) as members:
        while True:
            store = members.join_leading_store(deadline)
            if members.is_complete(store):
                return store
            if time.monotonic() >= deadline:
                raise RendezvousError(
                    f"rendezvous: timeout with {members.here} of {size} processes on multicast "
                    f"address {group}, port {port}, as {members.name.hex()} at {members.address} "
                    f"sees it{members.refusal}"
                )


class _MulticastGroup:
    """This process's part in the announcements.

    Attributes:
        name: Random; the smallest leads.
        here: Number of processes that the leader has counted, as far as known.
        refusal: Why a store that was announced did not admit this process, for messages; else "".
    """

    def __init__(self, group: str, port: int, group_name: str, size: int) -> None:
        self.name = os.urandom(16)
        self.here = 1
        self._size = size
        self._to = (group, port)
        self._job = launcher_env.job_id()
        self._key = auth.job_key(auth.secret(), self._job, b"multicast")
        self._place = hmac.digest(self._key, group_name.encode(), "sha256")[:16]
        self._announced: dict[bytes, tuple[str, int]] = {}
        self._dead: set[bytes] = set()
        self.refusal = ""
        self._pause = _FIRST_PAUSE
        self._family = family_of(group)
        self.address = _own_address(group, port)
        self._packed_address = socket.inet_pton(self._family, self.address.partition("%")[0])
        self._sender, self._receiver = _sockets(group, port)
        self._own = TCPStore(
            self.address, 0, is_master=True, wait_for_workers=False, job=self._store_job(self.name)
        )
        self._leader = self.name
        self._store = self._own
        self._own.multi_set([_member(self.name), f"{_SIZES}{size}"], ["", ""])

    def __enter__(self) -> _MulticastGroup:
        return self

    def __exit__(self, failed: object, *_: object) -> None:
        self._sender.close()
        self._receiver.close()
        if self._store is not self._own:
            self._own.close()
        if failed:
            self._store.release()

    def join_leading_store(self, deadline: float) -> TCPStore:
        """Announce this process, listen for a while, and join the announced store with the smallest
        name."""
        self._announce()
        self._listen(min(deadline, time.monotonic() + self._pause))
        self._pause = min(2 * self._pause, _LONGEST_PAUSE)
        best = min((name for name in self._announced if name not in self._dead), default=self.name)
        if best < self._leader:
            self._join_store(best, deadline)
        return self._store

    def is_complete(self, store: TCPStore) -> bool:
        """Return whether all processes have joined this store, and its leader has confirmed it as
        the job's. Raises RendezvousError if they were given different world sizes."""
        try:
            keys = store.list_keys()
            sizes = {int(key.removeprefix(_SIZES)) for key in keys if key.startswith(_SIZES)}
            if len(sizes) > 1:
                raise RendezvousError(
                    f"the processes were given different world sizes: {sorted(sizes)}. Give all "
                    "the same, or give each job a multicast address and port of its own"
                )
            self.here = sum(key.startswith("multicast/") for key in keys)
            if self._leader == self.name and self.here >= self._size:
                store.set("agreed", "")
            return store.check(["agreed"])
        except DistStoreError:
            # Its process died before all were there: choose again among the others.
            self._dead.add(self._leader)
            self._leader, self._store = self.name, self._own
            return False

    def _join_store(self, name: bytes, deadline: float) -> None:
        host, port = self._announced[name]
        limit = max(0.1, min(2.0, deadline - time.monotonic()))
        try:
            store = TCPStore(host, port, None, False, limit, False, job=self._store_job(name))
            store.multi_set([_member(self.name), f"{_SIZES}{self._size}"], ["", ""])
        except DistError as error:
            self._dead.add(name)
            if isinstance(error, AuthenticationError):
                self.refusal = f". The announced store at {host}, port {port}: {error}"
            return
        if self._leader != self.name:
            with contextlib.suppress(DistStoreError):
                self._store.delete_key(_member(self.name))
            self._store.close()
        self._leader, self._store = name, store

    def _store_job(self, name: bytes) -> str:
        """Return the job of the store that this name announces. An old announcement may lead to
        another store's port, which then refuses: its ranks announced another name."""
        return f"{self._job} {name.hex()}"

    def _announce(self) -> None:
        fields = (self._place, self.name, self._packed_address, self._own.port)
        head = _ANNOUNCEMENT.pack(_MAGIC, *fields, b"")[:-32]
        try:
            self._sender.sendto(head + hmac.digest(self._key, head, "sha256"), self._to)
        except OSError as error:
            raise RendezvousError(
                f"cannot send to multicast address {self._to[0]}: {error}; "
                f"{config.INTERFACES.names[0]} names the interface to use"
            ) from None

    def _listen(self, until: float) -> None:
        while True:
            remaining = until - time.monotonic()
            if remaining <= 0:
                return
            self._receiver.settimeout(remaining)
            try:
                data, sender = self._receiver.recvfrom(_ANNOUNCEMENT.size + 1)
            except TimeoutError:
                return
            if len(data) != _ANNOUNCEMENT.size:
                continue
            magic, place, name, packed, port, mac = _ANNOUNCEMENT.unpack(data)
            expected = hmac.digest(self._key, data[:-32], "sha256")
            genuine = place == self._place and hmac.compare_digest(mac, expected)
            if magic == _MAGIC and genuine and port:
                # This need not be the sender's address: a process may repeat another's
                # announcement.
                length = 16 if self._family == socket.AF_INET6 else 4
                host = socket.inet_ntop(self._family, packed[:length])
                self._announced[name] = (_with_scope((host, *sender[1:])), port)


def _member(name: bytes) -> str:
    return f"multicast/{name.hex()}"


def _with_scope(address: tuple[str, int] | tuple[str, int, int, int]) -> str:
    """Return the host of an address; a link-local one includes its link."""
    host = address[0]
    if len(address) == 4 and "%" not in host and ipaddress.ip_address(host).is_link_local:
        return f"{host}%{address[3]}"
    return host


def _interface() -> str:
    """Return the interface for announcements; "": chosen by the routes."""
    return next(iter(chosen_interfaces()), "")


def _own_address(group: str, port: int) -> str:
    """Return the address that others see as the sender of our announcements."""
    try:
        return _with_scope(
            source_address((group, port), lambda probe: _send_by(probe, family_of(group)))
        )
    except OSError as error:
        raise RendezvousError(
            f"no route to multicast address {group}: {error}; "
            f"{config.INTERFACES.names[0]} names the interface to use"
        ) from None


def _send_by(sock: socket.socket, family: socket.AddressFamily) -> int:
    """Send multicasts through the configured interface, HOPS far. Returns the interface's number or
    0."""
    name = _interface()
    index = socket.if_nametoindex(name) if name else 0
    if family == socket.AF_INET6:
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_HOPS, HOPS)
        sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_MULTICAST_IF, index)
    else:
        sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_TTL, HOPS)
        if name:
            by = struct.pack("4s4si", bytes(4), socket.inet_aton(interface_ipv4(name)), index)
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, by)
    return index


def _sockets(group: str, port: int) -> tuple[socket.socket, socket.socket]:
    """Return a socket for announcements, and one that has joined the group."""
    family = family_of(group)
    sender = socket.socket(family, socket.SOCK_DGRAM)
    receiver = socket.socket(family, socket.SOCK_DGRAM)
    try:
        index = _send_by(sender, family)
        # Every process of this host listens on the same address.
        receiver.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        receiver.bind((group, port))
        packed = socket.inet_pton(family, group)
        if family == socket.AF_INET6:
            join = packed + struct.pack("@I", index)
            receiver.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_JOIN_GROUP, join)
        else:
            join = struct.pack("4s4si", packed, bytes(4), index)
            receiver.setsockopt(socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, join)
    except OSError as error:
        sender.close()
        receiver.close()
        raise RendezvousError(f"cannot join multicast address {group}: {error}") from None
    return sender, receiver
