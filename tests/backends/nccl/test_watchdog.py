"""The watchdog's decisions, with a clock and events of the test's own."""

from __future__ import annotations

import threading
import time
import weakref
from typing import Any

import pytest

from cydist.backends.nccl import watchdog
from cydist.backends.nccl.call_check import CallCheck, CallsDiffer
from cydist.backends.nccl.watchdog import CROWDED, GroupWatch, InFlight, StreamCall
from cydist.errors import PeerFailedError


class Group:
    """What the watchdog looks at, and what it did."""

    def __init__(self) -> None:
        self.over: set[Any] = set()
        self.asked = 0
        self.error = ""
        self.told: Any = None
        self.raises: Exception | None = None
        self.failed: list[Any] = []

    def prepare_thread(self) -> None:
        pass

    def is_over(self, flight: InFlight) -> bool:
        self.asked += 1
        if self.raises is not None:
            raise self.raises
        return flight.event in self.over

    def async_error(self) -> str:
        return self.error

    def control_error(self) -> Any:
        return self.told

    def on_control_error(self, error: Any) -> None:
        self.failed.append(("heard", error))

    def on_timeout(self, call: StreamCall) -> None:
        self.failed.append(("late", call.seq))

    def on_device_error(self, call: StreamCall, why: Any) -> None:
        self.failed.append(("broken", call.seq, why))

    def on_mismatch(self, found: CallsDiffer) -> None:
        self.failed.append(("differ", found.seq, found.ours, found.theirs))

    def on_lost_peer(self, call: StreamCall, error: Any) -> None:
        self.failed.append(("lost", call.seq, error))


class NoteChannel:
    """The ways to the ranks on both sides."""

    def __init__(self) -> None:
        self.sent: list[bytes] = []
        self.coming: list[bytes | Exception] = []
        self.stuck = False

    def send(self, data: bytes) -> bool:
        if not self.stuck:
            self.sent.append(data)
        return not self.stuck

    def receive(self) -> bytes | None:
        if not self.coming:
            return None
        found = self.coming.pop(0)
        if isinstance(found, Exception):
            raise found
        return found

    def send_goodbye(self, seconds: float) -> None:
        self.sent.append(b"")


@pytest.fixture
def scene() -> Any:
    """A watch of a group, at 0 s."""
    return Scene()


class Scene:
    def __init__(self) -> None:
        self.now = 0.0
        self.group = Group()
        self.neighbours = NoteChannel()
        self.call_check = CallCheck(self.neighbours)
        self.watch = GroupWatch(self.group, self.call_check, clock=lambda: self.now)

    def call(
        self, seq: int, deadline: float = 10.0, event: Any = None, stream: int = 0
    ) -> InFlight:
        flight = InFlight(StreamCall("all_reduce", seq, deadline), object(), stream)
        flight.event = event
        self.watch.add(flight)
        return flight


def test_many_calls_are_asked_about_as_they_are_made(scene: Scene) -> None:
    """Those that are over do not wait for the watchdog: a few events are used again and again."""
    scene.group.over = {*range(1, 1001)}
    events = set()
    for n in range(1, 1001):
        spare = scene.watch.spare_event()
        events.add(n if spare is None else spare)
        scene.call(n, event=n if spare is None else spare)
    assert len(events) <= 2 * CROWDED


def test_a_backlog_is_forgotten_once_it_is_over(scene: Scene) -> None:
    """Later calls are asked about as early as if it had not been."""
    for n in range(1, 5001):
        scene.call(n, event=n)
    scene.group.over = {*range(1, 10_001)}
    scene.watch.poll()
    asked = scene.group.asked
    for n in range(5001, 10_001):
        scene.call(n, event=n)
    assert scene.group.asked - asked > 50


def test_the_thread_that_asks_never_has_the_last_array(scene: Scene) -> None:
    """One of the program's drops it: freeing memory of the GPU may block."""
    first = scene.call(1, event=1)
    scene.call(2, event=2, stream=1)
    first.keep = threading.Event()  # can be referred to weakly
    array = weakref.ref(first.keep)
    left: list[Any] = []

    def is_over(flight: InFlight) -> bool:
        if flight.stream == 1:
            scene.watch.release()
            left.append(array())
        return True

    scene.group.is_over = is_over  # type: ignore[method-assign]
    scene.watch.query()
    assert left == [None]


def test_a_query_that_cuda_does_not_answer_is_timed(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one of a thread that makes calls: the error of a timeout says for how long."""
    monkeypatch.setattr(watchdog, "QUERY_SECONDS", 0.01)
    asked, answered = threading.Event(), threading.Event()

    def is_over(flight: InFlight) -> bool:
        asked.set()
        return answered.wait(20)

    scene.group.is_over = is_over  # type: ignore[method-assign]
    dog = watchdog.Watchdog()
    dog._watches.add(scene.watch)
    for n in range(1, CROWDED + 1):
        scene.call(n, event=n)
    caller = threading.Thread(target=scene.call, args=(CROWDED + 1,))
    caller.start()
    assert asked.wait(20)
    until = time.monotonic() + 20
    while dog.blocked_seconds == 0:
        assert time.monotonic() < until
    answered.set()
    caller.join(20)
    assert dog.blocked_seconds == 0


def test_calls_that_pile_up_are_asked_about_rarely(scene: Scene) -> None:
    """A GPU that is behind costs the calling thread next to nothing."""
    for n in range(1, 10_001):
        scene.call(n, event=n)
    assert scene.group.asked < 200


def test_a_device_error_does_not_come_out_of_a_call(scene: Scene) -> None:
    """It fails the group, at the watchdog's next look."""
    scene.group.raises = ValueError("of CUDA")
    for n in range(1, 2 * CROWDED):
        scene.call(n, event=n)
    assert not scene.group.failed
    scene.watch.look()
    assert scene.group.failed == [("broken", 1, scene.group.raises)]


def test_calls_retire_in_order(scene: Scene) -> None:
    """What is over lets go of its arrays, whatever another stream does; the first that is not is
    the oldest."""
    first, second = (scene.call(n, event=n) for n in (1, 2))
    third = scene.call(3, event=3, stream=1)
    scene.group.over = {1, 3}
    scene.watch.poll()
    assert [each.over for each in (first, second, third)] == [True, False, True]
    assert [each.keep is None for each in (first, second, third)] == [True, False, True]
    assert scene.watch.oldest is second.call
    scene.group.over = {2}  # nobody asks for the others again
    scene.watch.poll()
    assert scene.watch.oldest is None
    assert not scene.group.failed


@pytest.mark.parametrize("over", [0, 1, 500, 999, 1000])
def test_many_calls_retire_by_few_questions(scene: Scene, over: int) -> None:
    """A stream comes past its calls in their order, so most need not be asked for."""
    flights = [scene.call(n, event=n) for n in range(1000)]
    asked = []
    is_over = scene.group.is_over
    scene.group.over = set(range(over))
    scene.group.is_over = lambda flight: asked.append(flight) or is_over(flight)  # type: ignore
    scene.watch.poll()
    assert [each.over for each in flights] == [n < over for n in range(1000)]
    assert len(asked) <= 11


def test_a_late_call_fails_once(scene: Scene) -> None:
    """After its deadline, not before; nothing is looked at any more then."""
    scene.call(1, deadline=5.0, event="e")
    scene.now = 5.0
    scene.watch.poll()
    assert scene.group.failed == []
    scene.now = 5.1
    scene.watch.poll()
    scene.watch.poll()
    assert scene.group.failed == [("late", 1)]
    assert not scene.watch.in_flight


def test_a_call_behind_another_may_be_due_before_it(scene: Scene) -> None:
    """The deadline of each call counts, whichever the stream comes to first."""
    scene.call(1, deadline=50.0, event="first")
    scene.call(2, deadline=5.0, event="second")
    scene.now = 5.1
    scene.watch.poll()
    assert scene.group.failed == [("late", 2)]


def test_a_thread_that_does_not_come_back_is_late_too(scene: Scene) -> None:
    """A call whose event is not even recorded: NCCL's first call may block in the host."""
    scene.call(1, deadline=5.0)
    scene.now = 6.0
    scene.watch.poll()
    assert scene.group.failed == [("late", 1)]


def test_a_late_completion_is_no_failure(scene: Scene) -> None:
    """Over when it is looked at is over, whatever the clock says."""
    scene.call(1, deadline=5.0, event=1)
    scene.now, scene.group.over = 9.0, {1}
    scene.watch.poll()
    assert scene.group.failed == []


def test_a_sticky_error_of_the_device_fails(scene: Scene) -> None:
    """An event that cannot be asked."""
    scene.call(1, event=1)
    scene.group.raises = OSError("illegal address")
    scene.watch.poll()
    assert scene.group.failed == [("broken", 1, scene.group.raises)]


def test_a_device_that_cannot_be_used_is_looked_at(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The group fails at its deadline, as ever."""

    def unusable() -> None:
        raise OSError("no such device")

    monkeypatch.setattr(scene.group, "prepare_thread", unusable)
    scene.call(1)
    scene.now = 10.5
    scene.watch.prepare_thread()
    scene.watch.poll()
    assert scene.group.failed == [("late", 1)]


def test_an_error_of_nccl_fails(scene: Scene) -> None:
    """While a call is under way; not when nothing is."""
    scene.group.error = "remote process exited"
    scene.watch.poll()
    assert scene.group.failed == []
    scene.call(1, event=1)
    scene.watch.poll()
    assert scene.group.failed == [("broken", 1, "remote process exited")]


def test_an_alarm_fails_at_once(scene: Scene) -> None:
    """Another rank's word comes before what this one would find itself."""
    scene.call(1, deadline=1.0, event=1)
    scene.now, scene.group.told = 2.0, PeerFailedError("rank 3 died")
    scene.watch.poll()
    assert scene.group.failed == [("heard", scene.group.told)]


def test_notes_are_sent_and_compared(scene: Scene) -> None:
    """Each rank's notes go to the next one; equal ones are forgotten."""
    scene.call_check.note(1, "all_reduce of 3 float32")
    scene.neighbours.coming = [b"1 all_reduce of 3 float32\n2 barrier "]
    assert scene.watch.in_flight
    scene.watch.poll()
    assert scene.neighbours.sent == [b"1 all_reduce of 3 float32"]
    assert not scene.call_check.pending
    scene.call_check.note(2, "broadcast")
    scene.watch.poll()
    assert scene.group.failed == [("differ", 2, "broadcast", "barrier ")]


def test_a_call_that_one_rank_captured_is_compared_with_nothing(scene: Scene) -> None:
    """It has no note there; the calls around it are compared all the same."""
    for seq in (1, 2, 4):
        scene.call_check.note(seq, "a")
    scene.neighbours.coming = [b"1 a\n3 a\n4 a"]
    scene.watch.poll()
    assert scene.group.failed == []
    scene.call_check.note(5, "a")
    scene.neighbours.coming = [b"5 b"]
    scene.watch.poll()
    assert scene.group.failed == [("differ", 5, "a", "b")]


def test_notes_are_compared_though_none_can_be_sent(scene: Scene) -> None:
    """The next rank may be busy with something else."""
    scene.neighbours.stuck = True
    scene.call_check.note(1, "a")
    scene.neighbours.coming = [b"1 b"]
    scene.watch.poll()
    assert scene.group.failed == [("differ", 1, "a", "b")]


def test_notes_wait_for_the_last_ones(scene: Scene) -> None:
    """What could not be sent goes with the next notes, in order, once."""
    scene.neighbours.stuck = True
    scene.call_check.note(1, "a")
    scene.watch.poll()
    scene.call_check.note(2, "b")
    scene.neighbours.stuck = False
    scene.watch.poll()
    scene.watch.poll()
    assert scene.neighbours.sent == [b"1 a\n2 b"]


def test_a_lost_neighbour_fails_calls_under_way(scene: Scene) -> None:
    """And nothing else: what is over stays over."""
    error = PeerFailedError("rank 0 died")
    scene.call_check.note(1, "a")
    scene.neighbours.coming = [error]
    scene.watch.poll()
    assert scene.group.failed == []
    scene.call(2, event=2)
    scene.watch.poll()
    assert scene.group.failed == []
    scene.watch.poll()
    assert scene.group.failed == [("lost", 2, error)]


def test_what_a_lost_neighbour_said_counts_more(scene: Scene) -> None:
    """Its alarm may come a moment after its end."""
    scene.call(1, event=1)
    scene.call_check.note(1, "a")
    scene.neighbours.coming = [PeerFailedError("rank 0 left")]
    scene.watch.poll()
    scene.group.told = PeerFailedError("rank 5 died")
    scene.watch.poll()
    assert scene.group.failed == [("heard", scene.group.told)]


def test_a_neighbour_that_left_is_not_lost(scene: Scene) -> None:
    """Its last word; a call that is under way may still end well."""
    scene.call(1, event=1)
    scene.call_check.note(1, "a")
    scene.neighbours.coming = [b"", PeerFailedError("closed")]
    scene.watch.poll()
    assert scene.group.failed == []
    scene.group.over = {1}
    scene.watch.poll()
    assert not scene.watch.in_flight


def test_events_are_used_again(scene: Scene) -> None:
    """As soon as nothing holds the call: none is destroyed, which CUDA may block, while a group
    lives."""
    scene.call(1, event="one")
    held = scene.call(2, event="two")
    scene.group.over = {"one", "two"}
    scene.watch.poll()
    assert [scene.watch.spare_event(), scene.watch.spare_event()] == ["one", None]
    del held
    assert scene.watch.spare_event() == "two"


def test_arrays_are_dropped_by_the_program(scene: Scene) -> None:
    """Not by the watchdog: to free a GPU's memory may block, as long as a call hangs."""
    dropped: list[str] = []

    class Kept:
        def __del__(self) -> None:
            dropped.append(threading.current_thread().name)

    scene.call(1, event="one").keep = Kept()
    scene.group.over = {"one"}
    watchdog = threading.Thread(target=scene.watch.poll, name="watchdog")
    watchdog.start()
    watchdog.join()
    assert not dropped
    scene.call(2)
    assert dropped == [threading.current_thread().name]


def test_a_query_that_blocks_hides_no_deadline(scene: Scene) -> None:
    """CUDA may not answer before the call that hangs has ended, which another thread sees to."""
    asked, answered = threading.Event(), threading.Event()

    def blocks(flight: InFlight) -> bool:
        asked.set()
        return answered.wait(20)

    scene.group.is_over = blocks  # type: ignore[method-assign]
    scene.call(1, deadline=1.0, event="one")
    thread = threading.Thread(target=scene.watch.query, daemon=True)
    thread.start()
    assert asked.wait(20)
    scene.now = 2.0
    scene.watch.poll()  # asks nothing again
    assert scene.group.failed == [("late", 1)]
    answered.set()
    thread.join(20)


def test_replays_of_a_graph_are_looked_after(scene: Scene) -> None:
    """They have no deadline, but NCCL's errors and lost ranks end what spins in them."""
    scene.watch.add_captured("all_reduce")
    scene.now = 1e9
    scene.watch.poll()
    assert not scene.group.failed
    scene.group.error = "remote process exited"
    scene.watch.poll()
    assert scene.group.failed == [("broken", 0, "remote process exited")]


def test_who_leaves_sends_alone(scene: Scene) -> None:
    """After the goodbye the watchdog touches the way to the next rank no more."""
    scene.call_check.note(1, "a")
    scene.watch.end_group(5.0)
    scene.call_check.note(2, "b")
    scene.watch.poll()
    assert scene.neighbours.sent == [b"1 a", b""]
    assert not scene.watch.in_flight
