"""Rank 0's address in another store that all ranks share, such as torchrun's or a file."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable

from cydist.errors import AuthenticationError, DistStoreError, RendezvousError, counted
from cydist.rendezvous import launcher_env
from cydist.rendezvous.address_note import Address, signed_address, verified_address
from cydist.rendezvous.init_arguments import InitArguments
from cydist.rendezvous.job_store import FIRST_PAUSE, LONGEST_PAUSE, job_store
from cydist.stores import Store
from cydist.stores.membership_store import close_on_error, served_by
from cydist.waiting import WaitNotices

# Seconds for which an address in a shared store is tried before it is read again: the first time,
# and at most. Then the seconds for which another service than this start's store may answer there,
# since rank 0 listens before it has written its address.
_FIRST_TRY, _LONGEST_TRY = 1.0, 30.0
_WRONG_SECONDS = 0.5


def via_shared_store(
    shared_store: Store,
    call: InitArguments,
    listen_at: Callable[[], str],
    purpose: str,
    where: str,
) -> Store:
    """Let rank 0 open a store at `listen_at` and write in `shared_store` how to reach it. The other
    ranks read that.

    Args:
        purpose: What the ranks meet for: part of what rank 0 signs.
        where: Names `shared_store`, for messages.

    The address there may be left from an earlier start of the job, whose ranks are gone. So
    rank 0 writes a new random name with its address, and a store admits only ranks that know its
    name. A rank that finds no store at the address, or a different one, or an address for another
    world size, reads it again. An address that rank 0 did not sign is read again for a moment only.
    """
    rank, size = call.with_rank("env://")
    job = launcher_env.job_id()
    if rank == 0:
        host, name = listen_at(), os.urandom(8).hex()
        store = job_store(call, host, 0, name)
        with close_on_error(store):
            address = Address(size, host, store.port, name)
            with served_by(None, "rendezvous"):
                shared_store.set("address", signed_address(address, purpose, job))
        return store
    patience, wrong, notices = _FIRST_TRY, _UnchangedSince(), WaitNotices()

    def notice(seconds: float) -> str:
        who = f"cydist: rank {rank} on {socket.gethostname()}"
        return f"{who} has waited {seconds:.0f} s for rank 0, whose address is not in {where} yet"

    while True:
        try:
            with notices.meanwhile(notice):
                shared_store.wait(["address"], call.remaining)
        except RuntimeError as error:
            raise RendezvousError(
                f"rendezvous: timeout: rank 0 has not said where its store is ({error})",
                ranks=(0,),
            ) from None
        with served_by(None, "rendezvous"):  # it may be gone again
            note = shared_store.get("address")
        try:
            address = verified_address(note, purpose, job, rank=rank, where=where)
            check_world(address, rank, size, where)
            attempt = call._replace(deadline=min(call.deadline, time.monotonic() + patience))
            return job_store(attempt, address.host, address.port, address.name)
        except RendezvousError:
            if not call.remaining:
                raise
            time.sleep(min(FIRST_PAUSE, call.remaining))
        except (AuthenticationError, DistStoreError):
            # Somebody who changes it again and again does not keep this rank beyond its deadline.
            if not call.remaining or wrong.seconds(note) > min(_WRONG_SECONDS, call.remaining):
                raise
            time.sleep(LONGEST_PAUSE)
        patience = min(2 * patience, _LONGEST_TRY)


def check_world(address: Address, rank: int, size: int, where: str) -> None:
    """Raise RendezvousError if rank 0 wrote its address for a world of another size."""
    if address.size != size:
        raise RendezvousError(
            f"rendezvous: rank 0's address in {where} is for a world of "
            f"{counted(address.size, 'rank')}, and rank {rank} was told {size}: rank 0 has not "
            "come since an earlier start, or the ranks were told different world sizes",
            ranks=(0,),
        )


class _UnchangedSince:
    """Measures for how long a value has been the same."""

    def __init__(self) -> None:
        self._what: object = None
        self._began = 0.0

    def seconds(self, what: object) -> float:
        """Return the seconds since this value was first given, without another one in between."""
        now = time.monotonic()
        if what != self._what:
            self._what, self._began = what, now
        return now - self._began
