"""Long messages between two ranks of a host, which sender and receiver copy together."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from extra_values import more
from transport_ranks import Group, Ranks, done, free_port, run, soon
from unreadable_memory import unreadable

ROOT = Path(__file__).parents[2]
PAGE = 4096
LONG = 3 << 20


@pytest.fixture
def pair() -> Iterator[list[Group]]:
    """Both ends of a group of two ranks that share memory."""
    with closing(Ranks("shm", 2)) as ranks:
        yield ranks.group()


def pattern(nbytes: int, seed: int = 1) -> np.ndarray:
    """Bytes that a shifted or mixed copy does not equal."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)


def edges() -> list[int]:
    """Sizes around those at which messages are cut otherwise."""
    marks = [65536, 131072, 131072 + PAGE, 1 << 20, (1 << 20) + PAGE]
    return [mark + off for mark in marks for off in (-1, 0, 1)]


@pytest.mark.parametrize("nbytes", edges())
def test_every_byte_arrives(pair: list[Group], nbytes: int) -> None:
    """A message is the same on both sides, and nothing beside it is written, at any size."""
    sent = pattern(nbytes)
    got = np.full(nbytes + 2 * PAGE, 7, np.uint8)
    run(
        lambda: done(pair[0].isend(sent, 1, 3)),
        lambda: done(pair[1].irecv(got[PAGE:-PAGE], 0, 3)),
    )
    assert np.array_equal(got[PAGE:-PAGE], sent)
    assert (got[:PAGE] == 7).all()
    assert (got[-PAGE:] == 7).all()


def test_several_at_once(pair: list[Group]) -> None:
    """Messages both ways at once, taken in another order than they were sent, keep apart."""
    count = 6

    def body(rank: int) -> None:
        mine = [pattern(LONG // 2 + i, 10 * rank + i) for i in range(count)]
        got = [np.zeros(LONG // 2 + i, np.uint8) for i in range(count)]
        sends = [pair[rank].isend(mine[i], 1 - rank, i) for i in range(count)]
        receives = [pair[rank].irecv(got[i], 1 - rank, i) for i in reversed(range(count))]
        done(*sends, *receives)
        for i in range(count):
            assert np.array_equal(got[i], pattern(LONG // 2 + i, 10 * (1 - rank) + i))

    run(lambda: body(0), lambda: body(1))


@pytest.mark.parametrize("turn", range(10))
def test_a_receive_that_is_given_up_is_not_written_again(pair: list[Group], turn: int) -> None:
    """Once a receive is cancelled its memory is the caller's, whatever the sender does; the next
    message comes."""
    first, second = pattern(LONG, 1), pattern(LONG, 2)
    into, after = np.zeros(LONG, np.uint8), np.zeros(LONG, np.uint8)
    send = pair[0].isend(first, 1, 1)
    receive = pair[1].irecv(into, 0, 1)
    for _ in range(turn):
        receive.test()
    receive.cancel()
    into[:] = 9
    done(pair[0].isend(second, 1, 2), pair[1].irecv(after, 0, 2))
    send.cancel()
    assert np.array_equal(after, second)
    assert (into == 9).all()


@pytest.mark.parametrize("turn", range(10))
def test_a_send_that_is_given_up_is_not_received(pair: list[Group], turn: int) -> None:
    """What a sender puts into its memory after it gave up is not taken for its message."""
    first, second = pattern(LONG, 1), pattern(LONG, 2)
    into = np.zeros(LONG, np.uint8)
    sent = first.copy()
    send = pair[0].isend(sent, 1, 1)
    receive = pair[1].irecv(into, 0, 1)
    for _ in range(turn):
        receive.test()
    send.cancel()
    sent[:] = 9
    if not receive.wait(soon(0.02)):
        run(lambda: done(pair[0].isend(second, 1, 1)), lambda: done(receive))
        assert np.array_equal(into, second)
    else:
        receive.check()
        assert np.array_equal(into, first)


@pytest.mark.parametrize("heard", [False, True], ids=["offer-unread", "offer-read"])
def test_a_send_that_is_given_up_behind_a_full_ring_is_not_received(
    pair: list[Group], heard: bool
) -> None:
    """The receiver, who opens the message without knowing that it was taken back, does not take
    what lies there now; what stands in the ring before the news comes."""
    sent, into = pattern(LONG), np.zeros(LONG, np.uint8)
    between = [pattern(60_000, i) for i in range(100)]
    offered = pair[0].isend(sent, 1, 1)
    if heard:
        asked = pair[1].irecv(np.zeros(1, np.uint8), 0, 9)
        asked.test()
        asked.cancel()
    sends = [pair[0].isend(each, 1, 2) for each in between]
    offered.cancel()
    sent[:] = 9
    receive = pair[1].irecv(into, 0, 1)
    for _ in range(100):
        receive.test()
    got = [np.zeros(60_000, np.uint8) for _ in between]
    run(lambda: done(*sends), lambda: done(*[pair[1].irecv(each, 0, 2) for each in got]))
    assert all(map(np.array_equal, between, got))
    last = pattern(LONG, 5)
    run(lambda: done(pair[0].isend(last, 1, 1)), lambda: done(receive))
    assert np.array_equal(into, last)


@pytest.mark.parametrize("whose", ["sender", "receiver"])
def test_memory_out_of_reach(pair: list[Group], whose: str) -> None:
    """Where one side's memory cannot be reached the message goes through the ring, and so do
    the next."""
    for seq in range(3):
        sent = unreadable(LONG) if whose == "sender" and seq == 0 else np.empty(LONG, np.float32)
        got = unreadable(LONG) if whose == "receiver" and seq == 0 else np.empty_like(sent)
        sent[:] = np.arange(LONG) % 1000 + seq
        got[:] = -1
        done(pair[0].isend(sent, 1, seq), pair[1].irecv(got, 0, seq))
        assert np.array_equal(got, sent)


def test_a_sender_that_leaves(pair: list[Group]) -> None:
    """A group that is closed while its send is copied leaves no receive waiting for ever."""
    into = np.zeros(LONG, np.uint8)
    sent = pattern(LONG)
    pair[0].isend(sent, 1, 1)
    receive = pair[1].irecv(into, 0, 1)
    receive.test()
    pair[0].close()
    sent[:] = 9
    if receive.wait(soon(0.02)):
        assert np.array_equal(into, pattern(LONG))
    else:
        receive.cancel()


def start(tmp_path: Path, source: str, size: int, *arguments: str) -> list[subprocess.Popen[str]]:
    """The ranks of a job of this program."""
    program = tmp_path / "program.py"
    program.write_text(source)
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("CYDIST_")}
    env = {**inherited, "PYTHONPATH": str(ROOT), "XDG_STATE_HOME": str(tmp_path)}
    env |= {"WORLD_SIZE": str(size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    return [
        subprocess.Popen(
            [sys.executable, str(program), *arguments],
            stdout=subprocess.PIPE, text=True, env={**env, "RANK": str(rank)},
        )
        for rank in range(size)
    ]  # fmt: skip


# Failpoints where a receiver, and a sender, are in the middle of a message, and its int64 elements.
# With send.mid armed a header is written by halves, which are seven. The sender of a message in a
# cell then has written half of the marks that say what is there.
MIDDLES = {
    "both copy": (("recv.mid", "2"), ("send.mid", "9"), 1 << 20),
    "in a cell": (("recv.mid", "1"), ("send.mid", "17"), 1 << 15),
}


def in_the_middle(of: str, sends: bool, who: int) -> list[str]:
    """Return the failpoint, how often it is reached, the rank, and the elements."""
    receiver, sender, count = MIDDLES[of]
    return [*(sender if sends else receiver), str(who), str(count)]


# One rank dies in the middle of a message.
PROGRAM = """
import os, sys
import numpy as np
import cydist as dist
from cydist._native import arm_failpoint
dist.init_process_group("tcp")
point, turn, who, count = sys.argv[1:]
rank, count = dist.get_rank(), int(count)
data = np.arange(count, dtype=np.int64)
into = np.zeros(count, np.int64)
if rank == int(who):
    arm_failpoint(f"{point}:kill:{turn}")
try:
    while True:     # the other rank alone may have copied all of a message
        if rank == 0:
            dist.send(data, 1)
        else:
            dist.recv(into, 0)
            assert np.array_equal(into, data)
except dist.DistError as error:
    print(type(error).__name__, flush=True)
os._exit(0)
"""


@pytest.mark.parametrize("of", MIDDLES)
@pytest.mark.parametrize("who", [*more(0), 1], ids=["sender", "receiver"])
def test_a_death_in_the_middle(tmp_path: Path, who: int, of: str) -> None:
    """A rank that is killed while it copies is noticed by the other, at once."""
    ranks = start(tmp_path, PROGRAM, 2, *in_the_middle(of, who == 0, who))
    said = [rank.communicate(timeout=60)[0] for rank in ranks]
    assert said[1 - who] == "PeerFailedError\n"
    assert ranks[who].returncode == -signal.SIGKILL


# Rank 1 or rank 0 stops in the middle of a message; the other gives up, talks to
# rank 2, and lets it go on.
STOPPED = """
import os, signal, sys
import numpy as np
import cydist as dist
from cydist._native import arm_failpoint
dist.init_process_group("tcp")
point, turn, who, count = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
rank = dist.get_rank()
rest = dist.new_group([1 - who, 2])
pids = np.zeros(3, np.int64)
dist.all_gather_into_tensor(pids, np.array([os.getpid()]))
data = np.arange(count, dtype=np.int64)
into = np.zeros(count, np.int64)
if rank == who:
    arm_failpoint(f"{point}:stop:{turn}")
seconds = 60 if rank == who else 0.5
try:
    while rank != 2:    # the other rank alone may have copied all of a message
        if rank == 1:
            dist.send(data, 0, timeout=seconds)
        else:
            dist.recv(into, 1, timeout=seconds)
            assert np.array_equal(into, data)
except dist.DistError as error:
    print(type(error).__name__, flush=True)
data[:] = 7
if rank == 1 - who:
    dist.send(data, 2, group=rest)
    dist.recv(into, 2, group=rest)
    os.kill(pids[who], signal.SIGCONT)
elif rank == 2:
    dist.recv(into, 1 - who, group=rest)
    dist.send(data, 1 - who, group=rest)
if rank != who:
    assert np.all(into == 7), "data of another message"
"""


@pytest.mark.parametrize("of", MIDDLES)
@pytest.mark.parametrize("who", [1, 0], ids=["sender", "receiver"])
def test_one_that_was_stopped_in_the_middle(tmp_path: Path, who: int, of: str) -> None:
    """Its peer raises at the timeout, and goes on with others; when it goes on itself it raises,
    too, and neither takes nor gives what is no message any more."""
    ranks = start(tmp_path, STOPPED, 3, *in_the_middle(of, who == 1, who))
    said = [rank.communicate(timeout=60)[0] for rank in ranks]
    assert said[1 - who] == "DistTimeoutError\n"
    assert said[who] in ("GroupFailedError\n", "DistTimeoutError\n")
    assert [rank.returncode for rank in ranks] == [0, 0, 0]
