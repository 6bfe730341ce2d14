"""Messages between GPU arrays, over a group of CPU memory.

A message of one chunk is one message of the host group. A longer one begins with a header under the
user's tag, which matches it with its receive. Its chunks follow under a separate tag. Each message
in flight has a thread and a pinned pipeline.
"""

from __future__ import annotations

import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import TYPE_CHECKING, Any

from cydist import _native
from cydist.backends.host.pinned_pipeline import Chunk, PinnedPipeline, StagedCall
from cydist.backends.host.work import PIECE_TAG
from cydist.devices import array_libraries
from cydist.errors import DistTimeoutError, UnsupportedError
from cydist.executor import THREADS, PollHook, TaskWork
from cydist.group_names import group_title

if TYPE_CHECKING:
    from cydist._native import Array
    from cydist.backends.host.group import HostGroup
    from cydist.work import Work

SLOTS = 2
STAGED_BYTES = 1 << 20  # of a piece
SLICE = 0.1  # seconds between two checks of the clock
MOST_IDLE = 4  # idle pipelines that a device keeps for the next messages
HEADER = struct.Struct("<Q")  # added to PIECE_TAG for the tags of its pieces


def current_streams(array: Array, name: str, group_name: str) -> list[int]:
    """Return the streams that a call on the array must wait for.

    Raises UnsupportedError if no library can copy from the device, and while one of the streams is
    captured.
    """
    try:
        streams = array_libraries.current_streams(array)
    except ValueError as error:
        raise UnsupportedError(f"{name}: {error}", op=name, group=group_name) from None
    if array_libraries.is_capturing(array.device_index):
        raise UnsupportedError(
            f"{name} on {group_title(group_name)}: a CUDA graph is being captured, and this "
            "backend copies arrays to the CPU, which waits for the copies: call it outside of the "
            "capture, or use backend 'nccl'",
            op=name, group=group_name,
        )  # fmt: skip
    return streams


class StagedP2PCalls:
    """The messages of device arrays on a host group."""

    def __init__(self, host: HostGroup) -> None:
        self._host = host
        self._idle: dict[int, list[PinnedPipeline]] = {}
        self._lock = threading.Lock()
        self._posted: dict[tuple[int, int], threading.Event] = {}  # the last send's, by peer
        self._numbers = count()
        self._closed = False

    def close(self) -> None:
        """Close the idle pipelines. Those of messages in flight close with their messages."""
        self._closed = True
        with self._lock:
            idle, self._idle = self._idle, {}
        for pipelines in idle.values():
            for pipeline in pipelines:
                pipeline.close()

    def isend(self, array: Array, peer: int, tag: int) -> Work:
        """As ProcessGroup.isend. The message is sent when the current streams have reached this
        point. Messages to one peer with one tag are sent in order."""
        pipeline, events, staged = self._begin("send", array)
        posted, key = threading.Event(), (peer, tag)
        with self._lock:
            before = self._posted.get(key)
            self._posted[key] = posted

        def post(data: Array, about: Array | None = None) -> Work:
            """Post the one message that a receive with the user's tag takes."""
            while before is not None and not before.wait(SLICE):
                if time.monotonic() > staged.deadline:
                    raise DistTimeoutError(
                        f"send on {self._host.title}: timeout: an earlier message to "
                        f"rank {self._host.ranks[peer]} is not on its way yet",
                        op="send", group=self._host.group_name,
                    )  # fmt: skip
            try:
                return self._host.isend(data, peer, tag, about=about)
            finally:
                posted.set()

        def body() -> None:
            try:
                with self._in_flight(pipeline, "send"):
                    pipeline.wait_for_streams(events)
                    pipeline.run(self._send_chunks(array, peer, post, staged), staged)
            finally:
                posted.set()
                with self._lock:
                    if self._posted.get(key) is posted:
                        del self._posted[key]

        work = StagedP2P(staged, body, self._host.poll_hook)
        THREADS.run(work.run)
        return work

    def _send_chunks(
        self, array: Array, peer: int, post: Callable[..., Work], staged: StagedCall
    ) -> list[Chunk]:
        if array.nbytes <= STAGED_BYTES:
            only = [(0, array)]
            return [Chunk(array.nbytes, only, [], lambda m: staged.wait(post(m.typed(array))))]
        number = next(self._numbers)
        header = _native.empty(HEADER.size)
        memoryview(header)[:] = HEADER.pack(number)

        def chunk(i: int, piece: Array) -> Chunk:
            def send(memory: Array) -> None:
                announced = post(header, array) if i == 0 else None
                staged.wait(self._host.isend(memory.typed(piece), peer, PIECE_TAG | number))
                if announced is not None:
                    staged.wait(announced)

            return Chunk(piece.nbytes, [(0, piece)], [], send)

        return [chunk(i, piece) for i, piece in enumerate(_cut(array))]

    def irecv(self, array: Array, peer: int | None, tag: int) -> Work:
        """As ProcessGroup.irecv; complete when the array is written."""
        pipeline, events, staged = self._begin("recv", array)
        whole = array.nbytes <= STAGED_BYTES
        if whole:
            chunk = Chunk(array.nbytes, [], [(0, array)], lambda memory: None)
            slot = pipeline.copy_in(chunk, staged)
            first = self._host.irecv(slot.memory.typed(array), peer, tag)
        else:
            header = _native.empty(HEADER.size)
            first = self._host.irecv(header, peer, tag, about=array)

        def body() -> int:
            with self._in_flight(pipeline, "recv"):
                staged.wait(first)
                pipeline.wait_for_streams(events)
                if whole:
                    pipeline.copy_out(chunk, slot)
                else:
                    pipeline.run(
                        self._receive_chunks(array, first.source_rank(), header, staged), staged
                    )
                pipeline.finish(staged)
            return first.source_rank()

        work = StagedP2P(staged, body, self._host.poll_hook)
        THREADS.run(work.run)
        return work

    def _receive_chunks(
        self, array: Array, source: int, header: Array, staged: StagedCall
    ) -> list[Chunk]:
        (number,) = HEADER.unpack(memoryview(header))
        peer = self._host.get_group_rank(source)

        def chunk(piece: Array) -> Chunk:
            def receive(memory: Array) -> None:
                staged.wait(self._host.irecv(memory.typed(piece), peer, PIECE_TAG | number))

            return Chunk(piece.nbytes, [], [(0, piece)], receive)

        return [chunk(piece) for piece in _cut(array)]

    # Pipelines.

    def _begin(self, name: str, array: Array) -> tuple[PinnedPipeline, list[Any], StagedCall]:
        streams = current_streams(array, name, self._host.group_name)
        index = array.device_index
        with self._lock:
            idle = self._idle.setdefault(index, [])
            pipeline = idle.pop() if idle else None
        if pipeline is None:
            pipeline = PinnedPipeline(
                array_libraries.copying_library_of(array), index, SLOTS, STAGED_BYTES
            )
        staged = StagedCall(self._host, name, self._host.deadline(None))
        return pipeline, pipeline.record(streams), staged

    @contextmanager
    def _in_flight(self, pipeline: PinnedPipeline, name: str) -> Iterator[None]:
        """Fail the group and close the pipeline if a message fails; else keep the pipeline."""
        try:
            pipeline.lib.adopt(pipeline.device)
            yield
        except BaseException as error:
            self._host.fail(error, name)
            pipeline.close()
            raise
        with self._lock:
            idle = self._idle.setdefault(pipeline.device, [])
            keep = not self._closed and len(idle) < MOST_IDLE
            if keep:
                idle.append(pipeline)
        if not keep:
            pipeline.close()


class StagedP2P(TaskWork):
    """The handle of a staged message. The host group's messages in it have the group's deadline,
    unless `due` sets another."""

    def __init__(
        self, staged: StagedCall, body: Callable[[], int | None], poll_hook: PollHook | None
    ) -> None:
        super().__init__(staged.name, body, None, poll_hook)
        self._staged = staged

    def due(self, timeout: float | None) -> None:
        super().due(timeout)
        self._staged.unbind()


def _cut(array: Array) -> list[Array]:
    """Return the parts in which an array is sent. Both ends cut it alike."""
    each = max(1, STAGED_BYTES // array.itemsize)
    return array.split([min(each, array.size - i) for i in range(0, array.size, each)])
