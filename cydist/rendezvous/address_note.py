"""Rank 0's note of where its store is, for one start of the job."""

from __future__ import annotations

from typing import NamedTuple

from cydist.net.signed_notes import signed, verified


class Address(NamedTuple):
    """The contents of the note.

    Attributes:
        name: Random, of this start; the store admits only ranks that know it.
    """

    size: int
    host: str
    port: int
    name: str


def signed_address(address: Address, purpose: str, job: str) -> bytes:
    """Return the note of `address`. Its host is a name or an address, without spaces."""
    return signed(" ".join(map(str, address)), f"address {purpose}", job)


def verified_address(note: bytes, purpose: str, job: str, *, rank: int, where: str) -> Address:
    """Return the address in rank 0's note. Raises AuthenticationError as `verified`."""
    text = verified(
        note, f"address {purpose}", job, reader=f"rank {rank}", what="of rank 0", where=where
    )
    size, host, port, name = text.decode().split(" ")
    return Address(int(size), host, int(port), name)
