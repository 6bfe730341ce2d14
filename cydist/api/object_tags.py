"""Tags of objects, from the rank that sends one to the ranks that receive it.

Objects travel as bytes of arrays: through trees of ranks, rings, shared memory, sockets and MPI.
So each carries a tag of its own, which its receivers check before they decode anything. It covers
the group, the call and its number, source, destination, position in the list and all bytes, and is
keyed BLAKE2b (RFC 7693). The key is derived from the job's secret and a random number of this
start of the job. So an object that was changed, replaced, or sent in another call or another start
is refused, by pickle and codec alike.

There are no tags where connections are not authenticated, which also rules out pickle, and where
ranks are threads of one process.
"""

from __future__ import annotations

import hmac
import struct
from hashlib import blake2b

from cydist import config
from cydist.api.process_groups import current_world
from cydist.errors import AuthenticationError
from cydist.groups.process_group import ProcessGroup

TAG_BYTES = 16
TO_ALL = -1  # in position of a destination
_POSITION = struct.Struct("<Qiii")  # number of the call, source, destination, position in the list


class ObjectTags:
    """Make and check the tags of the objects of one call.

    Args:
        group: The group of CPU memory that carries them.
        name: The call, the same for its sender and its receivers.
        sender: Global rank that sends a message; None: the call is a collective.
        receiver: Global rank that receives a message.

    Calls are counted when `count` is called: a collective before its first bytes, a message after
    them, so that both sides count the same.
    """

    def __init__(
        self, group: ProcessGroup, name: str, sender: int | None = None, receiver: int = TO_ALL
    ) -> None:
        self._counts = group.object_calls
        self._calls = None if sender is None else (sender, receiver)
        self._number = self._counts.get(self._calls, 0)
        self._label = f"{name}\0{group.group_name}\0".encode()
        self._name = name
        self._key = _key(group)
        self.tag_bytes = TAG_BYTES if self._key else 0

    def count(self) -> None:
        """Give the next such call another number."""
        self._counts[self._calls] = self._number + 1

    def seal(self, part: bytes, source: int, destination: int, position: int) -> bytes:
        """Return an object's bytes, followed by their tag."""
        return part + self._tag(part, source, destination, position)

    def open(self, data: memoryview, source: int, destination: int, position: int) -> memoryview:
        """Return an object's bytes without their tag.

        Raises AuthenticationError if `source` did not send them so in this call; the group stays
        usable.
        """
        part = data[: len(data) - self.tag_bytes]
        expected = self._tag(part, source, destination, position)
        if len(data) < self.tag_bytes or not hmac.compare_digest(expected, data[len(part) :]):
            raise AuthenticationError(
                f"{self._name}: the object from rank {source} is not the one that it sent in this "
                "call: it was changed on its way, or rank and sender do not share one secret. It "
                "was not decoded",
                ranks=(source,),
            )
        return part

    def _tag(self, part: bytes | memoryview, source: int, destination: int, position: int) -> bytes:
        if not self._key:
            return b""
        state = blake2b(self._label, key=self._key, digest_size=TAG_BYTES)
        state.update(_POSITION.pack(self._number, source, destination, position))
        state.update(part)
        return state.digest()


def _key(group: ProcessGroup) -> bytes:
    """Return the key of this start of the job; b"" where objects have no tags."""
    world = current_world()
    if not group.authenticated or config.INSECURE.is_on() or world.spec == "inproc":
        return b""
    return world.object_key
