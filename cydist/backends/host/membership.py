"""Agree on the members that a group keeps when some have died.

Each member knows some excluded members: its caller named them, or their connections are lost. It
may be the only one to know. So the members exchange these sets, over a separate comm id of the
group's link, until all remaining members have sent the same set.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from cydist import _native
from cydist.errors import DistBackendError, DistTimeoutError, from_call_error
from cydist.group_names import group_title

SLICE = 0.01  # seconds that a wait for one member may delay another's message


class Consensus:
    """One member's knowledge: pure bookkeeping, without a link or a clock.

    Attributes:
        rank, size: This member's rank, and the group's size.
        gone: The excluded members known so far: bit r for rank r; it only grows.
        decided: `gone` is final.

    A member sends `gone` to all members whenever it grows. It decides when all remaining members
    have sent exactly its own set. It then sends its decision and no further set. A member that
    receives a decision adopts it. Two living members that stay together decide alike: each has sent
    the other's set, and sets only grow. So one of them would have to move on from the smaller set
    after the other had decided on it, and it cannot without receiving that decision. Members that
    exclude each other end in different groups, as do members on two sides of a cut network.

    This is the flooding consensus of Cachin, Guerraoui and Rodrigues (Introduction to Reliable
    and Secure Distributed Programming, 2011) without its rounds: they are not needed because the
    members agree on the set of the dead itself. Each of n members sends n messages, and n more for
    every death meanwhile.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.gone = 0
        self.decided = False
        self._said: list[int | None] = [None] * size
        self._last_verdict: int | None = None

    def exclude(self, ranks: Iterable[int]) -> None:
        """Exclude these ranks. Has no effect once the membership is decided."""
        if not self.decided:
            for rank in ranks:
                self.gone |= 1 << rank

    def on_message(self, peer: int, verdict: int) -> None:
        """Take in a message of another member."""
        gone, decided = verdict >> 1, bool(verdict & 1)
        if self.decided or self.gone >> peer & 1:  # excluded members do not count
            return
        self._said[peer] = gone
        self.decided = decided
        self.gone = gone if decided else self.gone | gone

    def verdict(self) -> int | None:
        """Return the verdict to send to all ranks now; None: nothing new."""
        if not self.excluded and not self.missing():
            self.decided = True
        verdict = self.gone << 1 | self.decided
        if verdict == self._last_verdict:
            return None
        self._last_verdict = verdict
        return verdict

    @property
    def excluded(self) -> bool:
        """Return whether this member is excluded."""
        return bool(self.gone >> self.rank & 1)

    def members(self) -> list[int]:
        """Return the remaining members."""
        return [rank for rank in range(self.size) if not self.gone >> rank & 1]

    def missing(self) -> list[int]:
        """Return the remaining members that have not sent the same set as this one; none once
        decided."""
        if self.decided:
            return []
        return [r for r in self.members() if r != self.rank and self._said[r] != self.gone]

    def unresponsive(self) -> list[int]:
        """Return the remaining members that have sent nothing yet."""
        return [r for r in self.members() if r != self.rank and self._said[r] is None]

    def reported_by(self) -> int | None:
        """Return a member that reported this one as excluded."""
        for rank, said in enumerate(self._said):
            if said is not None and said >> self.rank & 1:
                return rank
        return None


class Membership:
    """One member's part in a Consensus, over the link of its group.

    Args:
        peers, rank: Each member's number on the link, and this member's index among them.
        comm_id: Separates these messages from all others on the link; the same on all members.
        name, ranks: Of the group, and each member's global rank: for errors.

    It survives a failed attempt, so that the next one continues from there. It is closed with the
    group.
    """

    def __init__(
        self,
        link: _native.Link,
        peers: Sequence[int],
        rank: int,
        comm_id: int,
        name: str,
        ranks: Sequence[int],
    ) -> None:
        self._link = link
        self._peers = peers
        self._name = name
        self._ranks = ranks
        self._native = _native.Group(link, peers, rank, comm_id)
        self._nbytes = (len(peers) + 1 + 7) // 8
        self._consensus = Consensus(rank, len(peers))
        self._others = [other for other in range(len(peers)) if other != rank]
        self._listening: dict[int, tuple[bytearray, _native.Message]] = {}
        self._sending: list[_native.Message] = []

    def close(self) -> None:
        """Stop taking part."""
        self._native.close()
        self._listening.clear()
        self._sending.clear()

    def agree(self, excluded: Iterable[int], deadline: float) -> list[int]:
        """Return the group ranks of the remaining members, the same on all of them.

        Args:
            excluded: Group ranks to exclude, besides all lost ones.
            deadline: On time.monotonic().

        Raises DistTimeoutError, which names the ranks that neither answered nor died, and
        DistBackendError when the others have excluded this member.
        """
        consensus = self._consensus
        consensus.exclude(excluded)
        consensus.exclude(rank for rank in self._others if self._link.lost(self._peers[rank]))
        while True:
            for rank in self._others:
                self._receive(rank)
            verdict = consensus.verdict()
            if verdict is not None:
                self._send(verdict)
            if consensus.excluded:
                raise self._excluded()
            if consensus.decided:
                return consensus.members()
            if time.monotonic() >= deadline:
                raise self._late()
            _, message = self._listening[consensus.missing()[0]]
            message.wait(int(min(deadline, time.monotonic() + SLICE) * 1e9))

    def _receive(self, rank: int) -> None:
        """Process the messages that have arrived from one member, or record that it is lost."""
        while True:
            if rank not in self._listening:
                buffer = bytearray(self._nbytes)
                message = _native.irecv(self._native, _native.asarray(buffer), rank, 0)
                self._listening[rank] = buffer, message
            buffer, message = self._listening[rank]
            if not message.test():
                return
            try:
                message.check()
            except _native.CallError as failure:
                if failure.status != "peer_lost":
                    raise from_call_error(
                        failure, "shrink_group", self._name, self._ranks
                    ) from None
                self._consensus.exclude([rank])
                return
            self._consensus.on_message(rank, int.from_bytes(buffer, "little"))
            del self._listening[rank]

    def _send(self, verdict: int) -> None:
        """Send to all members, excluded ones too: they may be alive and waiting for this rank."""
        array = _native.asarray(bytearray(verdict.to_bytes(self._nbytes, "little")))
        self._sending = [message for message in self._sending if not message.over]
        self._sending += [_native.isend(self._native, array, rank, 0) for rank in self._others]

    def _named(self, ranks: Sequence[int]) -> str:
        names = ", ".join(str(self._ranks[rank]) for rank in ranks)
        return f"rank{'s' if len(ranks) > 1 else ''} {names}"

    def _excluded(self) -> DistBackendError:
        here = self._ranks[self._consensus.rank]
        reported_by = self._consensus.reported_by()
        says = "" if reported_by is None else f", says rank {self._ranks[reported_by]}"
        return DistBackendError(
            f"shrink_group: this rank ({here}) was excluded from {group_title(self._name)}{says}: "
            "it has no part in the shrunk group",
            op="shrink_group", group=self._name, ranks=(here,),
        )  # fmt: skip

    def _late(self) -> DistTimeoutError:
        unresponsive = self._consensus.unresponsive()
        late = unresponsive or self._consensus.missing()
        what = "neither called it nor died" if unresponsive else "called it and then fell silent"
        return DistTimeoutError(
            f"shrink_group on {group_title(self._name)}: timeout: {self._named(late)} {what}; to "
            "go on without, call it again with ranks_to_exclude",
            op="shrink_group", group=self._name, ranks=tuple(self._ranks[rank] for rank in late),
        )  # fmt: skip
