"""Survivors agree on who is left, whatever order their messages and the deaths come in.

A network on paper: messages between two members arrive in order, a member that dies loses the
last of what it sent, to each other member another part of it, and a rank that notices a death has
heard what came before. Hypothesis chooses what happens next.
"""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from cydist.backends.host.membership import Consensus

Lists = list[set[int]]


class Network:
    """Members of one group, what is under way between them, and who is dead."""

    def __init__(self, lists: Lists) -> None:
        size = len(lists)
        self.members = [Consensus(rank, size) for rank in range(size)]
        self.under_way: dict[tuple[int, int], list[int]] = {
            (a, b): [] for a in range(size) for b in range(size) if a != b
        }
        self.dead: set[int] = set()
        self.noticed: set[tuple[int, int]] = set()
        for member, excluded in zip(self.members, lists, strict=True):
            member.exclude(excluded)
            self.speak(member.rank)

    def speak(self, rank: int) -> None:
        word = self.members[rank].verdict()
        if word is not None:
            for (sender, _), queue in self.under_way.items():
                if sender == rank:
                    queue.append(word)

    def possible(self) -> list[tuple[int, int]]:
        """Pairs (sender, receiver) between which something can happen."""
        return [
            (a, b)
            for (a, b), queue in self.under_way.items()
            if b not in self.dead
            and not self.members[b].excluded
            and (queue or (a in self.dead and (a, b) not in self.noticed))
        ]

    def step(self, sender: int, receiver: int) -> None:
        queue = self.under_way[sender, receiver]
        if queue:
            self.members[receiver].on_message(sender, queue.pop(0))
        else:
            self.noticed.add((sender, receiver))
            self.members[receiver].exclude([sender])
        self.speak(receiver)

    def kill(self, rank: int, kept: list[int]) -> None:
        """It dies; of what it sent to each other member, only so much arrives."""
        self.dead.add(rank)
        for other in range(len(self.members)):
            if other != rank:
                del self.under_way[rank, other][kept[other] :]

    def finish(self, data: st.DataObject) -> None:
        while pairs := self.possible():
            self.step(*data.draw(st.sampled_from(pairs)))

    def disputes(self) -> list[tuple[int, int]]:
        """Pairs of the living of which one goes on with the other, who decided otherwise."""
        decided = [m for m in self.members if m.decided and m.rank not in self.dead]
        return [
            (a.rank, b.rank) for a in decided for b in decided
            if b.rank in a.members() and a.members() != b.members()
        ]  # fmt: skip

    def undecided(self) -> list[int]:
        """Who is alive, in, and still waiting."""
        return [
            m.rank
            for m in self.members
            if m.rank not in self.dead and not m.decided and not m.excluded
        ]


@st.composite
def lists(draw: st.DrawFn) -> Lists:
    """What each of two to five members excludes: not itself."""
    size = draw(st.integers(2, 5))
    return [
        draw(st.sets(st.integers(0, size - 1).filter(lambda r, me=me: r != me), max_size=2))
        for me in range(size)
    ]


@given(st.integers(2, 6), st.data())
@settings(max_examples=150, deadline=None)
def test_deaths(size: int, data: st.DataObject) -> None:
    """Members die at any moment, in the middle of telling others: the rest decide alike."""
    network = Network([set() for _ in range(size)])
    for victim in data.draw(st.lists(st.integers(0, size - 1), unique=True, max_size=size - 1)):
        for _ in range(data.draw(st.integers(0, 4 * size))):
            if pairs := network.possible():
                network.step(*data.draw(st.sampled_from(pairs)))
        network.kill(victim, data.draw(st.lists(st.integers(0, 3), min_size=size, max_size=size)))
    network.finish(data)
    assert ([], []) == (network.undecided(), network.disputes())
    for member in network.members:
        alive = member.rank not in network.dead
        assert not alive or set(range(size)) - set(member.members()) <= network.dead


@given(lists(), st.data())
@settings(max_examples=150, deadline=None)
def test_lists(lists: Lists, data: st.DataObject) -> None:
    """Members exclude each other: those who go on together go on without all that one excludes."""
    network = Network(lists)
    network.finish(data)
    assert ([], []) == (network.undecided(), network.disputes())
    for member in network.members:
        for other in member.members() if member.decided else ():
            assert not lists[other] & set(member.members())


@given(lists(), st.data())
@settings(max_examples=150, deadline=None)
def test_lists_and_deaths(lists: Lists, data: st.DataObject) -> None:
    """Both at once, and lists that grow on the way, as after a timeout: those of whom each goes
    on with the other decide alike. (Who is excluded late may have decided before.)"""
    size = len(lists)
    network = Network([set() for _ in range(size)])
    for rank, late in data.draw(st.permutations(list(enumerate(lists)))):
        for _ in range(data.draw(st.integers(0, 2 * size))):
            if pairs := network.possible():
                network.step(*data.draw(st.sampled_from(pairs)))
        if rank in network.dead:
            continue
        if data.draw(st.booleans()):
            network.members[rank].exclude(late)
            network.speak(rank)
        else:
            kept = data.draw(st.lists(st.integers(0, 3), min_size=size, max_size=size))
            network.kill(rank, kept)
    network.finish(data)
    disputes = network.disputes()
    assert [pair for pair in disputes if pair[::-1] in disputes] == []
