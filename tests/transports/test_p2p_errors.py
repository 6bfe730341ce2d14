"""What a message that goes wrong says, on our own transports."""

import signal

import numpy as np
import pytest

import cydist as dist
from cydist.backends.host.group import HostGroup
from cydist.testing import run_threads


@pytest.mark.parametrize("transport", ["inproc", "tcp", "shm"])
@pytest.mark.parametrize(
    ("sent", "expected"),
    [(np.zeros(4, "f4"), np.zeros(5, "f4")), (np.zeros(4, "f4"), np.zeros(4, "i4"))],
    ids=["size", "dtype"],
)
def test_a_message_that_does_not_fit_raises_and_names_both(transport, sent, expected):
    """Wrong size or dtype: MismatchError on the receiver, which says what both sides meant."""

    def body(rank):
        if rank == 0:
            return dist.send(sent, 1)
        with pytest.raises(dist.MismatchError, match=r"4 float32 .*16 bytes") as caught:
            dist.recv(expected, 0)
        assert (0,) == caught.value.ranks
        return None

    run_threads(body, 2, transport)


@pytest.mark.parametrize("transport", ["inproc", "tcp", "shm"])
def test_a_collective_that_times_out_fails_its_group(transport):
    """DistTimeoutError names the rank waited for; later calls raise GroupFailedError."""

    def body(rank):
        if rank == 0:
            with pytest.raises(dist.DistTimeoutError, match=r"all_reduce #1.*rank 1") as caught:
                dist.all_reduce(np.ones(2), timeout=0.1)
            assert isinstance(caught.value, TimeoutError)
            assert (1,) == caught.value.ranks
            with pytest.raises(dist.GroupFailedError, match="failed earlier"):
                dist.barrier()

    run_threads(body, 2, transport)


@pytest.mark.parametrize("transport", ["inproc", "tcp", "shm"])
def test_a_late_message_names_the_rank(transport):
    """Like a collective that is late."""

    def body(rank):
        if rank == 0:
            with pytest.raises(
                dist.DistTimeoutError, match=r"recv.* timeout after .*rank 1"
            ) as caught:
                dist.recv(np.zeros(1), 1, timeout=0.05)
            assert (1,) == caught.value.ranks

    run_threads(body, 2, transport)


@pytest.mark.parametrize("transport", ["inproc", "tcp", "shm"])
@pytest.mark.parametrize("how", ["does not fit", "is late", "sender has left"])
def test_both_paths_fail_a_message_alike(how, transport, monkeypatch):
    """The fast path and the general path raise one error, and the group has failed on it."""
    posted = []
    real = HostGroup.irecv

    def irecv(group, *arguments, **options):
        posted.append(group.rank())
        return real(group, *arguments, **options)

    monkeypatch.setattr(HostGroup, "irecv", irecv)

    def body(rank, own_timeout):
        pair = dist.new_group([0, 1], timeout=0.2)
        if rank == 1 and how == "does not fit":
            dist.send(np.zeros(4, "f4"), 0, pair)
        elif rank == 1 and how == "sender has left":
            dist.destroy_process_group(pair)
        if rank == 1:
            return None
        with pytest.raises(dist.DistError) as caught:
            dist.recv(np.zeros(5, "f4"), 1, pair, timeout=own_timeout)
        assert pair.error is not None
        assert str(pair.error) == str(caught.value)
        error = caught.value
        text = str(error).partition("\n")[0]  # without the peer's stack
        return type(error), text, error.op, error.seq, error.group, error.ranks

    fast = run_threads(lambda rank: body(rank, None), 2, transport)[0]
    assert posted == []
    general = run_threads(lambda rank: body(rank, 0.2), 2, transport)[0]
    assert posted == [0]
    assert fast == general


def test_an_interrupted_receive_fails_its_group():
    """Its message may still come, so a later receive would get the wrong one."""

    def interrupt(number, frame):
        raise KeyboardInterrupt

    dist.init_process_group("inproc", rank=0, world_size=1, store=dist.HashStore())
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            dist.recv(np.zeros(1))
        with pytest.raises(dist.GroupFailedError, match="KeyboardInterrupt"):
            dist.recv(np.zeros(1))
    finally:
        signal.signal(signal.SIGALRM, before)
        dist.destroy_process_group()
