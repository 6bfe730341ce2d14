"""Small messages through rings, which are over at once where nothing stands before them."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

import cydist as dist
from cydist._native import fast_collectives, fast_p2p
from cydist.testing import run_threads

SECONDS = 60


def numbers(*values: float) -> Any:
    """An array of float64."""
    return np.array(values, float)


@pytest.fixture(params=["inproc", "tcp", "shm"])
def transport(request: pytest.FixtureRequest) -> str:
    """Where the bytes go."""
    return str(request.param)


def test_other_groups(transport: str) -> None:
    """Messages and broadcasts of any group take the short way; ranks are global."""

    def body(rank: int) -> None:
        group = dist.new_group([2, 0])
        if rank == 1:
            assert not fast_p2p.send(numbers(1), 0, group, 0)
            return
        x = numbers(rank)
        dist.broadcast(x, 2, group)
        assert fast_collectives.broadcast(x, 2, group)
        assert x[0] == 2
        other = 2 - rank
        assert fast_p2p.send(numbers(rank), other, group, 7)
        assert fast_p2p.recv(x, other, group, 7)
        assert x[0] == other
        for wrong in (1, 3, -1, rank, 1 << 70, True, None):
            assert not fast_p2p.send(x, wrong, group, 0)
        assert not fast_collectives.broadcast(x, 1, group)

    run_threads(body, 3, transport)


def test_a_kept_message_comes_first(transport: str) -> None:
    """What was kept while another tag was asked for is older than what is in the ring."""

    def body(rank: int) -> None:
        group, x = dist.group.WORLD, numbers(0)
        if rank == 1:
            dist.send(numbers(1), 0, group, 1)
            dist.send(numbers(5), 0, group, 2)
            dist.barrier()
            dist.send(numbers(2), 0, group, 1)
            dist.barrier()
        else:
            dist.recv(x, 1, group, 2)
            assert x[0] == 5
            dist.barrier()
            dist.barrier()  # which leaves the message where it is
            for value in (1, 2):
                dist.recv(x, 1, group, 1)
                assert x[0] == value

    run_threads(body, 2, transport)


@pytest.mark.parametrize("wrong", [np.zeros(3), np.zeros(2, "i8")], ids=["count", "dtype"])
def test_a_message_that_does_not_fit(transport: str, wrong: Any) -> None:
    """It is a mismatch, as on the long way, and what came before it is taken."""

    def body(rank: int) -> None:
        group = dist.group.WORLD
        if rank == 0:
            dist.send(numbers(0, 0), 1, group)
            dist.barrier()
            dist.send(numbers(1, 2), 1, group)
            dist.send(wrong, 1, group)
            dist.barrier()
            return
        x = numbers(0, 0)
        dist.recv(x, 0, group)
        dist.barrier()
        dist.barrier()
        dist.recv(x, 0, group)
        assert x.tolist() == [1, 2]
        with pytest.raises(dist.MismatchError, match="Rank 0"):
            dist.recv(x, 0, group)

    run_threads(body, 2, transport)


@pytest.mark.parametrize("name", ["send", "recv"])
def test_a_failure_elsewhere_is_noticed(transport: str, name: str) -> None:
    """By the next message, though all is well between these two."""
    failed = threading.Event()

    def body(rank: int) -> None:
        group, x = dist.group.WORLD, numbers(0)
        assert group is not None
        for peer in range(3):  # every rank has talked to every rank
            for other in range(3):
                if peer == rank != other:
                    dist.send(x, other, group)
                elif other == rank != peer:
                    dist.recv(x, peer, group)
        dist.send(x, 1 - rank, group) if rank < 2 else None
        dist.barrier()
        if rank == 2:
            group.abort()
            failed.set()
            return
        assert failed.wait(SECONDS)
        with pytest.raises(dist.GroupFailedError, match="rank 2"):
            getattr(dist, name)(x, 1 - rank, group)

    run_threads(body, 3, transport)


@pytest.mark.parametrize("name", ["send", "recv"])
def test_a_failure_that_another_group_read_is_noticed(transport: str, name: str) -> None:
    """By the next message, though the notice has left the ring for another group's call."""
    failed = threading.Event()

    def body(rank: int) -> None:
        group, x = dist.group.WORLD, numbers(0)
        assert group is not None
        other = dist.new_group([0, 1, 2])
        for each in (group, other):
            if rank == 2:
                dist.send(x, 0, each)
                dist.send(x, 1, each)
            else:
                dist.recv(x, 2, each)
        if rank < 2:
            dist.send(x, 1 - rank, group)
            dist.recv(x, 1 - rank, group)
            dist.send(x, 1 - rank, group)
        dist.barrier()
        if rank == 2:
            group.abort()
            for peer in (0, 1):
                dist.send(x, peer, other, 3)
            failed.set()
            return
        assert failed.wait(SECONDS)
        dist.recv(x, 2, other, 3)
        with pytest.raises(dist.GroupFailedError, match="rank 2"):
            getattr(dist, name)(x, 1 - rank, group)

    run_threads(body, 3, transport)
