"""Worlds of forked ranks, one of which dies or stops at a chosen place: a server of trials.

    python fork_server.py < trials > outcomes

Each line of the input is a trial, JSON with the fields of `Trial`; each line of the output says
what its ranks saw: a list with, for each rank, `code` (how the process ended, as in
subprocess.Popen.returncode; null: killed by this program at the deadline), `ended` (when, on the
monotonic clock) and `saw`, a list of events. An event has `call`, `began`, `ended`, and, where
the call raised, `error` (the class), `ranks`, `op`, `seq`, `group` and `message`.

The ranks are forks of one process that has imported everything, so a trial takes no longer than
its calls.
"""

import json
import os
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from dataclasses import dataclass

import numpy as np

import cydist as dist
from cydist import _native

DEADLINE = 30.0  # seconds for a trial
NOT_REACHED = 71  # exit code of a victim that never came to its failpoint
SEARCH = 5.0  # seconds in which a victim calls, looking for its failpoint
LIMIT = 22.0  # seconds in which a survivor calls before it gives up


@dataclass
class Trial:
    """What happens in one world.

    Attributes:
        call: A name of CALLS, made over and over until it raises.
        phase: Where the victim ends: a failpoint, "idle" (between calls), "destroy" (in
            destroy_process_group), or "leave" (after it).
        action: "kill", "exit" or "stop" (continued when `call` has raised on all others).
        warm: Calls that all ranks make before.
        timeout: Of the group, in seconds.
        transport: CYDIST_TRANSPORT.
        algorithm: CYDIST_ALGORITHM.
        store: The scheme of the URL at which the ranks meet.
        child: "fork" or "multiprocessing": the victim has a living child by then.
        quits: Ranks end as soon as a call has raised, as programs without an except clause do.
    """

    call: str
    phase: str
    victim: int = 1
    size: int = 4
    count: int = 1000
    warm: int = 2
    action: str = "kill"
    timeout: float = 20.0
    transport: str = "tcp"
    algorithm: str = ""
    store: str = "file"
    child: str = ""
    quits: bool = False


# The calls: each returns pairs of what is expected and what came. `given(rank)` is exact in
# float64 whatever the order.


def given(rank, turn, count):
    """What a rank contributes in its turn-th call."""
    return np.arange(count) % 7 + 10.0 * rank + turn


def totals(size, turn, count):
    """The sums over ranks 0 to r, for each r."""
    return np.cumsum([given(rank, turn, count) for rank in range(size)], axis=0)


def broadcast(group, me, size, turn, count):
    x = given(me, turn, count)
    dist.broadcast(x, 0, group=group)
    return [(given(0, turn, count), x)]


def all_reduce(group, me, size, turn, count):
    x = given(me, turn, count)
    dist.all_reduce(x, group=group)
    return [(totals(size, turn, count)[-1], x)]


def async_all_reduce(group, me, size, turn, count):
    x, y = given(me, turn, count), given(me, turn + 1, count)
    first = dist.all_reduce(x, group=group, async_op=True)
    try:
        second = dist.all_reduce(y, group=group, async_op=True)
    except dist.GroupFailedError:  # the group failed in between: the first work says why
        first.wait()
        raise
    first.wait()
    second.wait()
    return [(totals(size, turn, count)[-1], x), (totals(size, turn + 1, count)[-1], y)]


def reduce(group, me, size, turn, count):
    x = given(me, turn, count)
    dist.reduce(x, 0, group=group)
    return [(totals(size, turn, count)[-1], x)] if me == 0 else []


def all_gather(group, me, size, turn, count):
    out = [np.zeros(count) for _ in range(size)]
    dist.all_gather(out, given(me, turn, count), group=group)
    return [(given(rank, turn, count), out[rank]) for rank in range(size)]


def gather(group, me, size, turn, count):
    out = [np.zeros(count) for _ in range(size)] if me == 0 else None
    dist.gather(given(me, turn, count), out, 0, group=group)
    return [(given(rank, turn, count), out[rank]) for rank in range(size)] if me == 0 else []


def scatter(group, me, size, turn, count):
    x = np.zeros(count)
    blocks = [given(rank, turn, count) for rank in range(size)] if me == 0 else None
    dist.scatter(x, blocks, 0, group=group)
    return [(given(me, turn, count), x)]


def reduce_scatter(group, me, size, turn, count):
    x = np.zeros(count)
    dist.reduce_scatter(x, [given(me, turn + block, count) for block in range(size)], group=group)
    return [(totals(size, turn + me, count)[-1], x)]


def all_to_all(group, me, size, turn, count):
    out = [np.zeros(count) for _ in range(size)]
    dist.all_to_all(out, [given(me, turn + to, count) for to in range(size)], group=group)
    return [(given(rank, turn + me, count), out[rank]) for rank in range(size)]


def barrier(group, me, size, turn, count):
    dist.barrier(group=group)
    return []


def monitored_barrier(group, me, size, turn, count):
    dist.monitored_barrier(group=group)
    return []


def scan(group, me, size, turn, count):
    x = given(me, turn, count)
    dist.scan(x, group=group)
    return [(totals(size, turn, count)[me], x)]


def exscan(group, me, size, turn, count):
    x = given(me, turn, count)
    dist.exscan(x, group=group)
    return [(totals(size, turn, count)[me - 1], x)] if me else []


def send_recv(group, me, size, turn, count):
    x = np.zeros(count)
    after, before = (me + 1) % size, (me - 1) % size
    sent = dist.isend(given(me, turn, count), after, group=group)
    dist.recv(x, before, group=group)
    sent.wait()
    return [(given(before, turn, count), x)]


def any_source(group, me, size, turn, count):
    if me:
        dist.send(given(me, turn, count), 0, group=group)
        dist.recv(x := np.zeros(1), 0, group=group)
        return [(np.array([turn]), x)]
    total = np.zeros(count)
    for _ in range(size - 1):
        dist.recv(x := np.zeros(count), None, group=group)
        total += x
    for peer in range(1, size):
        dist.send(np.array([float(turn)]), peer, group=group)
    return [(totals(size, turn, count)[-1] - given(0, turn, count), total)]


def all_gather_object(group, me, size, turn, count):
    out = [None] * size
    dist.all_gather_object(out, given(me, turn, count), group=group)
    return [(given(rank, turn, count), out[rank]) for rank in range(size)]


def broadcast_object_list(group, me, size, turn, count):
    out = [given(0, turn, count), "word"] if me == 0 else [None, None]
    dist.broadcast_object_list(out, 0, group=group)
    return [(given(0, turn, count), out[0])]


def gather_object(group, me, size, turn, count):
    out = [None] * size if me == 0 else None
    dist.gather_object(given(me, turn, count), out, 0, group=group)
    return [(given(rank, turn, count), out[rank]) for rank in range(size)] if me == 0 else []


def scatter_object_list(group, me, size, turn, count):
    out = [None]
    objects = [given(rank, turn, count) for rank in range(size)] if me == 0 else None
    dist.scatter_object_list(out, objects, 0, group=group)
    return [(given(me, turn, count), out[0])]


CALLS = {
    call.__name__: call
    for call in (
        broadcast, all_reduce, async_all_reduce, reduce, all_gather, gather, scatter,
        reduce_scatter, all_to_all, barrier, monitored_barrier, scan, exscan, send_recv,
        any_source, all_gather_object, broadcast_object_list, gather_object, scatter_object_list,
    )
}  # fmt: skip


# One rank


class Rank:
    """One rank of a trial, in a process of its own; what it sees goes down a pipe."""

    def __init__(self, trial, me, url, pipe, hold):
        self.trial, self.me, self.url, self.pipe, self.hold = trial, me, url, pipe, hold
        self.began = 0.0
        self.turn = 0

    def say(self, event):
        """Tell the server at once: this process may not live long."""
        os.write(self.pipe, json.dumps(event).encode() + b"\n")

    def watch(self, name, body):
        """Call body, say how it went; True if it raised."""
        event = {"call": name}
        self.began = time.monotonic()
        try:
            body()
        except Exception as error:
            event |= {"error": type(error).__name__, "message": str(error)}
            event |= {each: getattr(error, each, None) for each in ("ranks", "op", "seq", "group")}
        self.say(event | {"began": self.began, "ended": time.monotonic()})
        return "error" in event

    def call(self, group, name, turn, count):
        """One call, its results compared."""
        me, size = dist.get_rank(group), dist.get_world_size(group)
        self.began = time.monotonic()
        for expected, got in CALLS[name](group, me, size, turn, count):
            assert np.array_equal(expected, got), f"wrong numbers in turn {turn}: {got[:3]}"

    def calls(self, seconds):
        """The call on the world, again and again, as long as it does not raise."""
        limit = time.monotonic() + seconds
        while time.monotonic() < limit:
            self.call(None, self.trial.call, self.turn, self.trial.count)
            self.turn += 1
            if self.turn % 16 == 0:  # or ranks that only send would run far ahead
                dist.barrier()

    def run(self):
        """The whole life of this rank."""
        trial = self.trial
        early = self.me == trial.victim and trial.phase in ("rendezvous", "connect")
        os.environ["CYDIST_ALGORITHM"] = trial.algorithm
        os.environ["CYDIST_TRANSPORT"] = trial.transport
        os.environ["CYDIST_FAILPOINT"] = f"{trial.phase}:{trial.action}" if early else ""
        if self.watch("init_process_group", self.join):
            return
        rest = dist.new_group([rank for rank in range(trial.size) if rank != trial.victim])
        unused = dist.new_group()
        if self.me == trial.victim:
            self.watch("victim", self.die)
            return
        # A rank that was through early learns at its next call.
        if not self.watch(trial.call, lambda: self.calls(LIMIT)) or trial.quits:
            return
        self.watch("again", lambda: self.call(None, trial.call, 0, trial.count))
        if trial.action != "stop":
            self.watch("unused", lambda: self.call(unused, "all_reduce", 0, 10))
        self.watch("rest", lambda: [self.call(rest, "all_reduce", i, 9000) for i in range(3)])
        os.read(self.hold, 1)
        self.watch("destroy", dist.destroy_process_group)

    def join(self):
        trial = self.trial
        dist.init_process_group(
            "tcp", self.url, rank=self.me, world_size=trial.size, timeout=trial.timeout
        )

    def die(self):
        """The victim's end. One that was only stopped goes on until a call raises."""
        trial = self.trial
        while self.turn < trial.warm:
            self.call(None, trial.call, self.turn, trial.count)
            self.turn += 1
        if trial.child:
            self.have_child()
        if trial.phase == "leave":
            dist.destroy_process_group()
            os._exit(0)
        if trial.phase == "idle":
            self.say({"call": "stop", "began": time.monotonic()})
            os.kill(os.getpid(), signal.SIGSTOP if trial.action == "stop" else signal.SIGKILL)
        else:
            point = "leave" if trial.phase == "destroy" else trial.phase
            _native.arm_failpoint(f"{point}:{trial.action}")
        if trial.phase == "destroy":
            dist.destroy_process_group()
        else:
            self.calls(LIMIT if trial.action == "stop" else SEARCH)
        os._exit(NOT_REACHED)

    def have_child(self):
        """A child that outlives us, and holds what we had open."""

        def sleep():
            signal.alarm(int(DEADLINE))
            signal.pause()

        if self.trial.child == "multiprocessing":
            import multiprocessing

            child = multiprocessing.get_context("fork").Process(target=sleep, daemon=True)
            child.start()
            pid = child.pid
        elif (pid := os.fork()) == 0:
            sleep()
        self.say({"call": "child", "pid": pid})


# The server


def start(trial, rank, url, hold, others):
    """Fork a rank; its process id and the end of its pipe."""
    out, into = os.pipe()
    pid = os.fork()
    if pid:
        os.close(into)
        return pid, out
    for pipe in (*others, out, hold[1]):
        os.close(pipe)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    Rank(trial, rank, url, into, hold[0]).run()
    sys.exit(0)


class GroupWatch:
    """The ranks of a trial, as the server sees them."""

    def __init__(self, trial, pids, pipes):
        self.trial, self.pids = trial, pids
        self.ended, self.said = {}, [b"" for _ in pids]
        self.ends = {os.pidfd_open(pid): rank for rank, pid in enumerate(pids)}
        self.pipes = {pipe: rank for rank, pipe in enumerate(pipes)}
        self.poll = select.poll()
        for fd in (*self.ends, *self.pipes):
            self.poll.register(fd, select.POLLIN)

    def look(self):
        """Take in what happens within a tenth of a second."""
        for fd, _ in self.poll.poll(100):
            if fd in self.ends:
                self.ended[self.ends[fd]] = time.monotonic()
                self.poll.unregister(fd)
            elif data := os.read(fd, 65536):
                self.said[self.pipes[fd]] += data
            else:
                self.poll.unregister(fd)

    def events(self, rank):
        """What a rank saw."""
        return [json.loads(line) for line in self.said[rank].splitlines() if line.endswith(b"}")]

    def others_raised(self):
        """Has the call raised on all but the victim?"""
        others = set(range(len(self.pids))) - {self.trial.victim}
        return all(
            rank in self.ended or any(e["call"] == self.trial.call for e in self.events(rank))
            for rank in others
        )

    def until_all_end(self, hold):
        """Wait for them; those that are late are killed. The outcome, by rank."""
        deadline = time.monotonic() + DEADLINE
        victim, stopped, held = self.trial.victim, self.trial.action == "stop", True
        while len(self.ended) < len(self.pids) and time.monotonic() < deadline:
            self.look()
            if stopped and self.others_raised():
                os.kill(self.pids[victim], signal.SIGCONT)
                stopped = False
            if held and victim in self.ended:
                os.close(hold)
                held = False
        if held:
            os.close(hold)
        for rank, pid in enumerate(self.pids):
            if rank not in self.ended:
                os.kill(pid, signal.SIGKILL)
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in self.pids]
        self.look()
        for fd in (*self.ends, *self.pipes):
            os.close(fd)
        return [
            {
                "code": codes[rank] if rank in self.ended else None,
                "ended": self.ended.get(rank),
                "saw": self.events(rank),
            }
            for rank in range(len(self.pids))
        ]


def where(store, directory):
    """A URL at which ranks may meet."""
    if store == "file":
        return f"file://{directory}/meeting"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{free.getsockname()[1]}"


def run(trial):
    """One trial; what its ranks saw."""
    # Removed here and by no `with`, which would end in every rank too.
    directory = tempfile.mkdtemp()
    url, hold = where(trial.store, directory), os.pipe()
    pids, pipes = [], []
    for rank in range(trial.size):
        pid, pipe = start(trial, rank, url, hold, pipes)
        pids.append(pid)
        pipes.append(pipe)
    os.close(hold[0])
    outcome = GroupWatch(trial, pids, pipes).until_all_end(hold[1])
    shutil.rmtree(directory)
    for event in outcome[trial.victim]["saw"]:
        if event["call"] == "child":
            os.kill(event["pid"], signal.SIGKILL)
    return outcome


if __name__ == "__main__":
    for line in iter(sys.stdin.readline, ""):
        print(json.dumps(run(Trial(**json.loads(line)))), flush=True)
