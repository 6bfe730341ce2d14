"""Agree on which members of a group go on when some have died.

Each member knows of some that are excluded, because its caller says so or because they are lost,
and may be the only one to know. So the members exchange these sets, over a comm id of its own on
the group's link, until all that are left have sent the same set.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from cydist import _native
from cydist.errors import DistBackendError, DistTimeoutError, from_call_error

SLICE = 0.01  # seconds that the wait for one member may hide what another one says


class Consensus:
    """What one member knows: pure bookkeeping, without a link or a clock.

    rank, size      this member's, in the group
    gone            who is out, as far as is known: bit r for rank r; it only grows
    decided         `gone` is final

    Whenever `gone` grows, it is sent to all members. A member decides when all who are left
    have said exactly its own set, and says so instead of ever sending another one; who hears
    a decision makes it its own. Two living members that go on together decide alike: each has
    said the other's set, and sets only grow, so one would have to go on from the smaller set
    after the other had decided it, which takes hearing of the decision. Members that exclude
    each other part, as do those between which the network is cut.

    This is the flooding consensus of Cachin, Guerraoui and Rodrigues (Introduction to Reliable
    and Secure Distributed Programming, 2011) without its rounds, which can be left out because
    what is agreed on is the set of the dead itself. A set of n members takes n messages from
    each, and n more for every death on the way.
    """

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.gone = 0
        self.decided = False
        self._said: list[int | None] = [None] * size
        self._last_verdict: int | None = None

    def exclude(self, ranks: Iterable[int]) -> None:
        """These are out. Comes too late after the decision."""
        if not self.decided:
            for rank in ranks:
                self.gone |= 1 << rank

    def on_message(self, peer: int, verdict: int) -> None:
        """A member's message has arrived."""
        gone, decided = verdict >> 1, bool(verdict & 1)
        if self.decided or self.gone >> peer & 1:  # one that is out has no say
            return
        self._said[peer] = gone
        self.decided = decided
        self.gone = gone if decided else self.gone | gone

    def verdict(self) -> int | None:
        """Return what all ranks must be told now; None: nothing new."""
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
        """The members that are left."""
        return [rank for rank in range(self.size) if not self.gone >> rank & 1]

    def missing(self) -> list[int]:
        """Those who are left and have not said the same as this member; none once decided."""
        if self.decided:
            return []
        return [r for r in self.members() if r != self.rank and self._said[r] != self.gone]

    def unresponsive(self) -> list[int]:
        """Those who are left and have said nothing yet."""
        return [r for r in self.members() if r != self.rank and self._said[r] is None]

    def reported_by(self) -> int | None:
        """A member that said that this one is out."""
        for rank, said in enumerate(self._said):
            if said is not None and said >> self.rank & 1:
                return rank
        return None


class Membership:
    """One member's part in a Consensus, over the link of its group.

    peers, rank     the link's number of each member, and which of them this is
    comm_id         tells these messages from all others on the link; the same on all members
    name, ranks     of the group, and each member's global rank: for errors

    It outlives an attempt that failed, so that the next one goes on from there, and is closed
    with the group.
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
        """Take no more part in it."""
        self._native.close()
        self._listening.clear()
        self._sending.clear()

    def agree(self, excluded: Iterable[int], deadline: float) -> list[int]:
        """Return the group ranks of those who go on, the same on all of them.

        excluded    group ranks that are out, besides all that are lost
        deadline    on time.monotonic()

        Raises DistTimeoutError that names who neither came nor died, and DistBackendError when
        the others have excluded this member.
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
        """Take what has arrived from one member, or note that it is lost."""
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
        """To all, those who are out included: they may be alive, and wait for us."""
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
            f"shrink_group: this rank ({here}) was excluded from group {self._name!r}{says}: it "
            "has no part in the shrunk group",
            op="shrink_group", group=self._name, ranks=(here,),
        )  # fmt: skip

    def _late(self) -> DistTimeoutError:
        unresponsive = self._consensus.unresponsive()
        late = unresponsive or self._consensus.missing()
        what = "neither called it nor died" if unresponsive else "called it and then fell silent"
        return DistTimeoutError(
            f"shrink_group on group {self._name!r}: timeout: {self._named(late)} {what}; to go on "
            "without, call it again with ranks_to_exclude",
            op="shrink_group", group=self._name, ranks=tuple(self._ranks[rank] for rank in late),
        )  # fmt: skip
