"""Rank 0's address over MPI, and a secret for ranks that have none."""

from __future__ import annotations

import hmac
import os
import struct
import time
from collections.abc import Sequence
from typing import Any

from cydist import config
from cydist.errors import RendezvousError, warn_user
from cydist.net import auth
from cydist.net.interfaces import public_address
from cydist.rendezvous import launcher_env
from cydist.rendezvous.address_note import Address, signed_address, verified_address
from cydist.rendezvous.init_arguments import InitArguments
from cydist.rendezvous.job_store import job_store
from cydist.rendezvous.shared_address import check_world
from cydist.stores import Store
from cydist.stores.membership_store import close_on_error

# Rank 0's message to the others over MPI: a secret, whether it is one, and its signed address.
_ADDRESS = struct.Struct("<32s?512s")
# Before that: whether an answer is expected, rank 0's rank in MPI, a nonce, and its keyed hash
# under the user's secret.
_OFFER = struct.Struct("<?i16s32s")
_NONCE_BYTES = 16
_PROBES = 100  # calls of MPI after a receive
_MPI_TAG = 32_749  # every MPI has tags up to 32,767, and no other message has this one


def by_mpi(call: InitArguments, MPI: Any) -> Store:
    """Exchange rank 0's address through MPI, with a secret for ranks that have none.

    The address is signed under the secret that rank 0 uses.

    If rank 0 was given none, it offers the user's: it sends a keyed hash, and the others answer
    whether their user's secret gives the same, or whether they were given one. Unless all agree, a
    new secret travels over MPI.

    It uses synchronous sends, and no collectives: those may leave a rank waiting for
    another rank's next call of MPI, which would come only after this meeting.
    """
    rank, size = call.with_rank("env://")
    purpose, job = f"mpi {call.group_name}", launcher_env.job_id()
    comm = MPI.COMM_WORLD
    if rank > 0:
        asked, zero, nonce, tag = _OFFER.unpack(_heard(call, MPI, MPI.ANY_SOURCE, _OFFER.size))
        if asked:
            own = auth.user_secret_tag(nonce)
            agreed = auth.is_configured() or (own is not None and hmac.compare_digest(own, tag))
            _tell(call, MPI, [zero], bytes([agreed]))
        value, fresh, note = _ADDRESS.unpack(_heard(call, MPI, zero, _ADDRESS.size))
        if fresh and not auth.is_configured():
            auth.set_secret(value)
        del value  # not for tracebacks
        where = "a message over MPI"
        address = verified_address(note.rstrip(b"\0"), purpose, job, rank=rank, where=where)
        check_world(address, rank, size, where)
        return job_store(call, address.host, address.port, address.name)
    others = [other for other in range(comm.Get_size()) if other != comm.Get_rank()]
    secret = _secret_over_mpi(call, MPI, others)
    host, name = public_address(), os.urandom(8).hex()
    store = job_store(call, host, 0, name)
    with close_on_error(store):
        note = signed_address(Address(size, host, store.port, name), purpose, job)
        parts = (secret or b"", secret is not None, note)
        _tell(call, MPI, others, auth.Secret(_ADDRESS.pack(*parts)))
    return store


def _secret_over_mpi(call: InitArguments, MPI: Any, others: Sequence[int]) -> bytes | None:
    """Offer the user's secret to all ranks; return the secret that they need, None if they have
    one. This rank uses the same."""
    given, nonce = auth.is_configured(), os.urandom(_NONCE_BYTES)
    tag = None if given else auth.user_secret_tag(nonce, create=True)
    zero = MPI.COMM_WORLD.Get_rank()
    _tell(call, MPI, others, _OFFER.pack(not given, zero, nonce, tag or b""))
    if given:
        return None
    answers = [_heard(call, MPI, other, 1) == b"\1" for other in others]
    if tag is not None and all(answers):
        return None
    secret = auth.new_secret()
    auth.set_secret(secret)
    warn_user(
        "the ranks' hosts share no secret, so rank 0 sends one over MPI, and a program that can "
        f"read this network sees it. Set {config.SECRET_FILE.names[0]} to a file of mode 0600 on "
        "every host, or share the home directory"
    )
    return secret


def _tell(call: InitArguments, MPI: Any, ranks: Sequence[int], content: bytes) -> None:
    sent = [MPI.COMM_WORLD.Issend([content, MPI.BYTE], rank, _MPI_TAG) for rank in ranks]
    late = tuple(ranks[i] for i in _unfinished(sent, call.deadline))
    if late:
        raise RendezvousError(f"rendezvous: timeout: MPI's ranks {late} have not come", ranks=late)


def _heard(call: InitArguments, MPI: Any, source: int, count: int) -> bytes:
    """Return a message of `count` bytes from MPI's rank `source`, or from rank 0 of the job."""
    message = bytearray(count)
    sender = 0 if source == MPI.ANY_SOURCE else source
    request = MPI.COMM_WORLD.Irecv([message, MPI.BYTE], source, _MPI_TAG)
    if _unfinished([request], call.deadline):
        request.Cancel()
        raise RendezvousError(
            f"rendezvous: timeout: nothing from rank {sender} over MPI (a receive from "
            "anyone of any tag that is pending on COMM_WORLD takes it: post it later, or set "
            "MASTER_ADDR)",
            ranks=(sender,),
        )
    for _ in range(_PROBES):  # MPICH over libfabric confirms a receive in calls after it
        MPI.COMM_WORLD.Iprobe()
    return auth.Secret(message)


def _unfinished(requests: list[Any], deadline: float) -> list[int]:
    """Wait for MPI requests until a deadline, and return those that are not complete."""
    waiting = list(range(len(requests)))
    while True:
        waiting = [i for i in waiting if not requests[i].Test()]
        if not waiting or time.monotonic() >= deadline:
            return waiting
        time.sleep(0.001)
