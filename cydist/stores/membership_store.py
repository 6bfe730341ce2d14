"""MembershipStore: a part of a store for some ranks, in which no rank waits for a dead one."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from datetime import timedelta
from typing import Any

from cydist.errors import (
    AuthenticationError,
    DistError,
    DistStoreError,
    PeerFailedError,
    RendezvousError,
    StoreTimeoutError,
    UnsupportedError,
    listed,
)
from cydist.net.signed_notes import signed, verified
from cydist.stores.prefix import PrefixStore
from cydist.stores.protocol import Op
from cydist.stores.store import (
    Store,
    Timeout,
    Value,
    as_bytes,
    many,
    reports_disconnects,
    returned_bytes,
    store_timeout,
)
from cydist.waiting import WaitNotices, duration

_REPORT_SECONDS = 1.0
_MOST_SHOWN_BYTES = 1 << 16  # of a text that another process wrote
_TELLING_SECONDS = 1.0
_RANK_DIGITS = 9  # at most; int() refuses thousands with a ValueError
# Before what a digest is, and before an AuthenticationError. Other bytes are a RendezvousError,
# whose ranks come first.
_MADE, _FORGED = b"+", b"!"
MOST_ASKING = 16  # most ranks that ask about all ranks when a meeting's time is up
_CLOCKS_DIFFER = 0.05  # seconds by which another library's wait may end early
_FIRST_LOOK, _LONGEST_PAUSE = 0.05, 1.6  # seconds between two checks of a waiting rank


class MembershipStore(PrefixStore):
    """A part of a store for ranks that have to meet: a wait in it ends when one of them is lost.

    A rank that `join` announced is lost if its process ends without closing the store. In this part
    and its own parts it is also lost if it called `leave`. A wait for a key that exists, or
    appears, is never disturbed.

    After `sign`, values in a store that others can write are signed. Counters are not: only `add`
    reads them.

    Args:
        prefix: Stands before every key, as in a PrefixStore.
        store: The store below. If it does not notice the end of a process
            (Store.reports_disconnects), waits last until their timeouts.
        members: Global ranks of all that have to come.
        what: The purpose of the meeting, for messages.
        noun: The kind of the members' numbers, for messages.
        holder: The rank whose process serves the store; None: not one of them.
    """

    def __init__(
        self,
        prefix: str,
        store: Any,
        members: Collection[int],
        *,
        what: str = "rendezvous",
        noun: str = "rank",
        holder: int | None = None,
    ) -> None:
        super().__init__(prefix, store)
        self.holder = holder
        self.nonce = b""  # of this meeting, random and the same on all ranks, once all are here
        # The number with which a rank joined -> its number now.
        self._members = {rank: rank for rank in members}
        self._what = what
        self._noun = noun
        self._root = _root_of(self)
        self.path = path = _below(self)[1]  # all prefixes
        # One line for each lost rank: its number, the meeting, and the reason.
        self._lost = f"{path}lost"
        self._what_for = ""  # the prefixes from there to here
        self._known = b""
        self._patience: float | None = None
        self._will = b""
        self._purpose = ""  # of signed values, with the key; "": values are not signed
        self._job = ""
        # This process's number, as it joined, and the store's name: for messages.
        self._reader, self._where = -1, ""

    def sign(
        self, purpose: str, reader: int, where: str = "the ranks' store", job: str = ""
    ) -> None:
        """Sign values from now on, here and in later parts, and take only those that a rank with
        the job's secret has written for the same purpose under the same key. Without effect in a
        store in which only such ranks can write.

        Args:
            reader: This process's number among the members, as it joined.
            where: Names the store, for messages.
            job: The job's id: values of a job with another one are not taken.
        """
        self._reader = reader
        if others_can_write(self):
            self._purpose, self._where, self._job = purpose, where, job

    @property
    def _here(self) -> str:
        """Return the purpose of the meeting, and which of its members this process is."""
        if self._reader < 0:
            return self._what
        return f"{self._what} on {self._noun} {self._members.get(self._reader, self._reader)}"

    @property
    def signs(self) -> bool:
        """Return whether values are signed."""
        return bool(self._purpose)

    def _signed(self, key: str, value: Value) -> Value:
        """Return a value as it is stored under `key`."""
        if not self._purpose:
            return value
        return signed(as_bytes(value), f"{self._purpose} {self.path}{key}", self._job)

    def _verified(self, key: str, note: bytes) -> bytes:
        """Return the value of `key` that is stored as `note`. Raises AuthenticationError if no
        rank of this meeting has stored it."""
        if not self._purpose:
            return note
        reader = self._members.get(self._reader, self._reader)
        return verified(
            note, f"{self._purpose} {self.path}{key}", self._job, reader=f"{self._noun} {reader}",
            what=f"under the key {self.path + key!r}", where=self._where,
        )  # fmt: skip

    def part(
        self, prefix: str, members: Collection[int], what: str, patience: float | None = None
    ) -> MembershipStore:
        """Return a part of this part, for some of its members.

        Args:
            patience: Default timeout of waits there, in seconds; None: this part's.
        """
        part = MembershipStore(prefix, self, (), what=what, holder=self.holder)
        part._lost = self._lost
        part._what_for = f"{self._what_for}{prefix}/"
        part._patience = patience
        part.nonce = self.nonce
        part._purpose, part._reader, part._where = self._purpose, self._reader, self._where
        part._job = self._job
        part._members = (
            self._members  # of all; `renumber` replaces it
            if len(members) == len(self._members)
            else {joined: rank for joined, rank in self._members.items() if rank in members}
        )
        return part

    def renumber(self, ranks: Sequence[int]) -> None:
        """Renumber the members: a rank's new number is its index in `ranks`, which holds the old
        numbers. Ranks that are not in it are no longer members."""
        self._members = {
            joined: ranks.index(rank) for joined, rank in self._members.items() if rank in ranks
        }

    @property
    def timeout(self) -> timedelta:
        """Return the default timeout of waits."""
        return super().timeout if self._patience is None else timedelta(seconds=self._patience)

    def set_timeout(self, timeout: Timeout) -> None:
        """Set the default timeout of waits in this part and its own parts. The rest of the store is
        not affected."""
        self._patience = duration(timeout)

    def clone(self) -> MembershipStore:
        """Return another object for the same part, with a timeout of its own."""
        from copy import copy  # rarely needed

        twin = copy(self)
        twin._store = self._store.clone()
        twin._root = _root_of(twin)
        twin._known = b""
        return twin

    def join(self, rank: int) -> None:
        """Let the others learn of the end of this process, which is `rank`."""
        self._reader = rank
        if self._root is not None:
            where = f"on {socket.gethostname()} (process {os.getpid()})"
            with served_by(self.holder, self._here):
                self._will = self._line(rank, f"{where} died, ended or was cut off")
                self._root.will(self._lost, self._will)

    def unregister(self) -> None:
        """Stop reporting the end of this process here."""
        if self._root is not None:
            self._root.withdraw_will(self._lost, self._will)

    def let_server_leave_last(self, rank: int, size: int) -> None:
        """Wait, on the rank whose process serves the store, until all others are here. It serves
        them in a thread, which needs Python's lock; and what its program does next may hold that
        until all others have done the same, as MPI_Init does."""
        if self.holder is not None and rank != self.holder:
            self.set(f"done/{rank}", b"")
        elif self.holder is not None and size > 1:
            others = [other for other in range(size) if other != rank]
            try:
                self.wait([f"done/{other}" for other in others])
            except StoreTimeoutError as error:
                raise self._late("done", others, error) from error

    def leave(self, rank: int, why: str) -> None:
        """Tell the ranks that wait here for `rank` that it will not come; best effort."""
        if self._root is not None:
            with (
                contextlib.suppress(Exception),
                contextlib.closing(self._root.clone()) as twin,
            ):
                twin.set_timeout(_REPORT_SECONDS)
                joined = next((j for j, now in self._members.items() if now == rank), rank)
                how = f"on {socket.gethostname()} gave up: {why}"
                twin.append(self._lost, self._line(joined, how))

    @contextlib.contextmanager
    def report_error(self, rank: int, *, late: bool = False) -> Iterator[None]:
        """Call `leave` if the block, in which this rank meets the others here, raises.

        Args:
            late: Also after a timeout: other ranks may have more time, and wait for this one.
        """
        try:
            yield
        except BaseException as error:
            # A rank that failed because of another reports nothing, nor does one that timed out
            # with the others.
            if not isinstance(error, PeerFailedError if late else TimeoutError | PeerFailedError):
                self.leave(rank, f"{type(error).__name__}: {error}")
            raise

    def _line(self, joined: int, how: str) -> bytes:
        line = "\t".join([str(joined), self._what_for, *how.split()]) + "\n"
        return line.encode(errors="backslashreplace")  # file names may contain surrogates

    def wait(self, keys: Sequence[str], timeout: Timeout | None = None) -> None:
        """Wait until all `keys` have a value.

        Raises PeerFailedError when a member is lost before, StoreTimeoutError after the timeout.
        """
        timeout = self._patience if timeout is None else timeout
        if self._root is not None:
            self._awaited(self._root, keys, timeout)
            return
        limit = self.timeout.total_seconds() if timeout is None else duration(timeout)
        began = time.monotonic()
        below, path = _below(self)
        named = [path + key for key in many(keys)]
        try:
            below.wait(named, timedelta(seconds=limit))
        except DistError:
            raise
        except RuntimeError as error:  # of another library's store
            if time.monotonic() - began < limit - _CLOCKS_DIFFER:
                raise DistStoreError(f"{self._here}: the store failed: {error}") from error
            raise store_timeout(self._here, limit, [key.encode() for key in named]) from error

    def _awaited(
        self, root: Store, keys: Sequence[str], timeout: Timeout | None, patience: float = 0.0
    ) -> list[bytes]:
        limit = self.timeout.total_seconds() if timeout is None else duration(timeout)
        deadline = time.monotonic() + limit
        named = [self.path + key for key in many(keys)]
        while True:
            left = max(0.0, deadline - time.monotonic())
            with served_by(self.holder, self._here):
                found = root.watch(self._lost, self._known, named, left, patience=patience)
            if isinstance(found, list):
                return found
            self._check(found)  # a rank that waits again for a lost rank learns of it again
            self._known = found

    def get(self, key: str) -> bytes:
        """Return the value of `key`, waiting until it has one as `wait` does."""
        return self.multi_get([key])[0]

    def multi_get(
        self, keys: Sequence[str], timeout: Timeout | None = None, *, patience: float = 0.0
    ) -> list[bytes]:
        """Return the values of `keys`, waiting until all have one as `wait` does.

        Args:
            patience: As Store.watch's.
        """
        if self._root is not None:
            found = self._awaited(self._root, keys, timeout, patience)
        else:
            self.wait(keys, timeout)
            below, path = _below(self)
            with served_by(None, self._here):
                values = below.multi_get([path + key for key in keys])
            found = [returned_bytes(value) for value in values]
        return [self._verified(key, note) for key, note in zip(keys, found, strict=True)]

    def awaited(
        self, keys: Sequence[str], deadline: float, notice: Callable[[float], str]
    ) -> list[bytes]:
        """Return the values of `keys` as `multi_get` does, and say now and then what is missing.

        Args:
            notice: Returns the text, of the seconds waited so far.
        """
        notices = WaitNotices()
        ours = isinstance(_below(self)[0], Store)  # another library's store may raise anything
        while ours and (pause := notices.left) < (left := deadline - time.monotonic()):
            try:
                return self.multi_get(keys, pause, patience=left - pause)
            except StoreTimeoutError as error:
                if not error.answered:
                    raise
            notices.say_if_due(notice)
        return self.multi_get(keys, max(0.0, deadline - time.monotonic()))

    def refusals(self) -> tuple[str, ...]:
        """Return why the store's server refused clients, if it is in this process."""
        below = _below(self)[0]
        return below.refusals() if isinstance(below, Store) else ()

    def meet(
        self,
        topic: str,
        rank: int,
        ranks: Sequence[int],
        word: Value = b"",
        judge: Callable[[list[bytes]], str] = lambda words: "",
        meanwhile: Callable[[], None] | None = None,
    ) -> None:
        """Wait until all of `ranks` have come here with the same topic.

        Args:
            judge: Returns the error in the ranks' texts; empty: none.
            meanwhile: Called now and then by a rank that waits long.

        Raises RendezvousError with that error on all ranks, and as `digest`.
        """

        def nothing(words: list[bytes]) -> bytes:
            if wrong := judge(words):
                raise RendezvousError(wrong)
            return b""

        self.digest(topic, rank, ranks, word, nothing, meanwhile)

    def digest(
        self,
        topic: str,
        rank: int,
        ranks: Sequence[int],
        word: Value,
        make: Callable[[list[bytes]], bytes],
        meanwhile: Callable[[], None] | None = None,
    ) -> bytes:
        """Return what the first of `ranks` makes of every rank's word. It alone reads them all, so
        N ranks read 2N values.

        Args:
            make: Called on the first rank, with the words of all `ranks`.
            meanwhile: As `meet`'s.

        Raises on all ranks the RendezvousError that `make` raises, or another one that a rank
        declared (`refuse`), or the AuthenticationError about a word that no rank has stored
        (`sign`). Raises StoreTimeoutError that names the missing ranks, PeerFailedError as `wait`,
        and AuthenticationError if the first rank has not stored the answer.
        """
        self.set(f"{topic}/{rank}", word)
        answer = f"{topic}/all"
        try:
            if rank == ranks[0]:
                try:
                    words = self._awaited_by([f"{topic}/{each}" for each in ranks], meanwhile)
                    made = _MADE + make(words)
                except (RendezvousError, AuthenticationError) as error:
                    # Where nothing is signed, it is the connection to the store that cannot be
                    # trusted.
                    if self.signs or isinstance(error, RendezvousError):
                        self.refuse(topic, error)
                    raise
                self.set(answer, made)
            else:
                made = self._awaited_by([answer], meanwhile)[0]
        except StoreTimeoutError as error:
            raise self._late(topic, ranks, error) from error
        if made[:1] == _MADE:
            return made[1:]
        if made[:1] == _FORGED:
            raise AuthenticationError(printable(made[1:]))
        concerned, _, text = printable(made).partition("\n")
        raise RendezvousError(text, ranks=_ranks_in(concerned))

    def _late(
        self, topic: str, ranks: Sequence[int], error: StoreTimeoutError
    ) -> StoreTimeoutError:
        """Return the error with the ranks that have not come for this topic, as far as the store
        answers."""
        missing = self.missing(topic, ranks) if error.answered else ()
        if not missing:
            return error
        return StoreTimeoutError(
            f"{self._what}: timeout after {self.timeout.total_seconds():g} s, "
            f"{listed(self._noun, missing)} did not come"
        )

    def refuse(self, topic: str, error: RendezvousError | AuthenticationError) -> None:
        """Let `meet` and `digest` raise this error on all ranks that come for this topic."""
        if isinstance(error, AuthenticationError):
            answer = _FORGED + str(error).encode()
        else:
            answer = f"{','.join(map(str, error.ranks))}\n{error}".encode()
        self.set(f"{topic}/all", answer)

    def missing(self, topic: str, ranks: Sequence[int]) -> tuple[int, ...]:
        """Return those of `ranks` that have not come for this topic. Some of the ranks that want to
        know ask about all, and tell the others: otherwise N ranks would ask about N each."""
        told = f"{topic}/missing"
        if self.add(f"{topic}/asking", 1) > MOST_ASKING:
            with contextlib.suppress(RuntimeError):
                return _ranks_in(printable(self.multi_get([told], _TELLING_SECONDS)[0]))
        absent = set(self.absent([f"{topic}/{each}" for each in ranks]))
        found_here = tuple(each for each in ranks if f"{topic}/{each}" in absent)
        self.set(told, ",".join(map(str, found_here)))
        return found_here

    def absent(self, keys: Sequence[str]) -> list[str]:
        """Return those of `keys` that have no value now, from as few requests as the store
        allows."""
        below, path = _below(self)
        if not isinstance(below, Store) or type(below)._request is Store._request:
            return [key for key in keys if not self.check([key])]
        found: list[str] = []
        rest = list(keys)
        while rest:
            try:
                below.wait([path + key for key in rest], 0.0)
                break
            except StoreTimeoutError as error:
                if not error.keys:
                    raise
                some = [key.decode()[len(path) :] for key in error.keys]
            found += some
            rest = rest[rest.index(some[-1]) + 1 :]
        return found

    def _awaited_by(self, keys: Sequence[str], meanwhile: Callable[[], None] | None) -> list[bytes]:
        """As `multi_get`, but call `meanwhile` in between. If the store is stopped for a while,
        ranks keep their connections, so they do not all reconnect at once afterwards."""
        deadline, pause = time.monotonic() + self.timeout.total_seconds(), _FIRST_LOOK
        ours = isinstance(_below(self)[0], Store)  # another library's store may raise anything
        while ours and meanwhile is not None:
            left = deadline - time.monotonic()
            if left <= pause:
                break
            try:
                return self.multi_get(keys, pause, patience=left - pause)
            except StoreTimeoutError as error:
                if not error.answered:
                    raise
                meanwhile()
            pause = min(2 * pause, _LONGEST_PAUSE)
        return self.multi_get(keys, max(0.0, deadline - time.monotonic()))

    def queue_push(self, key: str, value: Value) -> None:
        """Put `value` at the end of the queue `key`."""
        below, path = _below(self)
        below.queue_push(path + key, self._signed(key, value))

    def queue_pop(self, key: str, block: bool = True) -> bytes:
        """Remove and return the first value of the queue `key`, waiting as long as `get` does."""
        below, path = _below(self)
        # Another library's store, or one with its own methods, may wait for any time.
        if not isinstance(below, Store) or type(below)._request is Store._request:
            found = returned_bytes(below.queue_pop(path + key, block))
        else:
            found = below._call(Op.QUEUE_POP, [path + key], block=block, timeout=self.timeout)[0]
        return self._verified(key, found)

    def set(self, key: str, value: Value) -> None:
        """Set the value of `key`. Raises PeerFailedError if the store went with its rank."""
        below, path = _below(self)
        with served_by(self.holder, self._here):
            below.set(path + key, self._signed(key, value))

    def add(self, key: str, amount: int) -> int:
        """Add to the counter `key`; return its new value."""
        with served_by(None, self._here):
            return super().add(key, amount)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all `keys` have a value now."""
        with served_by(None, self._here):
            return super().check(keys)

    def multi_set(self, keys: Sequence[str], values: Sequence[Value]) -> None:
        """Set each key to the value at the same index. Raises as `set` does."""
        below, path = _below(self)
        named = [path + key for key in many(keys)]
        if len(keys) == len(values):  # otherwise the store refuses them
            values = [self._signed(*pair) for pair in zip(keys, values, strict=True)]
        with served_by(self.holder, self._here):
            below.multi_set(named, values)

    def compare_set(self, key: str, expected_value: Value, desired_value: Value) -> bytes:
        """Set `key` to `desired_value` if its value is `expected_value`; return the value
        afterwards."""
        below, path = _below(self)
        # Equal values have equal signatures. No value is expected as an empty one.
        expected = self._signed(key, expected_value) if as_bytes(expected_value) else b""
        found = returned_bytes(
            below.compare_set(path + key, expected, self._signed(key, desired_value))
        )
        return self._verified(key, found) if found else found

    def append(self, key: str, value: Value) -> None:
        """Add `value` to the end of `key`'s value. Raises UnsupportedError where values are
        signed: as a whole."""
        if self.signs:
            raise UnsupportedError(
                f"append to {key!r}: values in {self._where} are signed as a whole, since others "
                "can write there; set a key for each rank"
            )
        super().append(key, value)

    def has_extended_api(self) -> bool:
        """Return whether append, multi_get and multi_set exist."""
        return not self.signs and super().has_extended_api()

    def _check(self, news: bytes) -> None:
        ours, said = self._what_for.encode(errors="backslashreplace"), {}
        for line in news.split(b"\n"):
            joined, what_for, *how = [*line.split(b"\t"), b""]  # a line may be anything
            if ours.startswith(what_for):
                said[joined] = printable(b" ".join(how)).rstrip()
        lost = {
            now: said[name]
            for name, now in ((b"%d" % joined, now) for joined, now in self._members.items())
            if name in said
        }
        if lost:
            text = "; ".join(f"{self._noun} {rank} {how}" for rank, how in lost.items())
            raise PeerFailedError(
                f"{self._what}: {text}, before all {len(self._members)} had met",
                ranks=tuple(lost),
            )


def _ranks_in(text: str) -> tuple[int, ...]:
    """Return the ranks in another process's list, which may be anything."""
    return tuple(
        int(each) for each in text.split(",") if each.isdecimal() and len(each) <= _RANK_DIGITS
    )


def printable(text: bytes) -> str:
    """Return the text of another process, for a message: without what controls a terminal, and cut
    to a length that fits one."""
    shown = text[:_MOST_SHOWN_BYTES].decode(errors="replace")
    return "".join(each if each.isprintable() or each in "\n\t" else "?" for each in shown)


@contextlib.contextmanager
def served_by(holder: int | None, what: str) -> Iterator[None]:
    """Turn the loss of the store into a PeerFailedError about the rank that served it, if a rank
    did, and an error of another library's store into a DistStoreError."""
    try:
        yield
    except AuthenticationError as error:
        if holder is None:
            raise
        raise AuthenticationError(
            f"{what}: the store on rank {holder}: {error}", ranks=(holder,)
        ) from None
    except DistStoreError as error:
        if holder is None or error.answered or isinstance(error, StoreTimeoutError):
            raise
        raise PeerFailedError(
            f"{what}: rank {holder}, which serves the store, died or was cut off: {error}",
            ranks=(holder,),
        ) from error
    except (DistError, NotImplementedError):
        raise
    except RuntimeError as error:  # of another library's store
        raise DistStoreError(f"{what}: the store failed: {error}") from error


def release(store: Any) -> None:
    """Release the store below, although objects may refer to it; connected clients are served for a
    moment more."""
    root, _ = _below(store)
    root.release()


def others_can_write(store: Any) -> bool:
    """Return whether processes that do not know the job's secret may write in the store below."""
    below = _below(store)[0]
    return not any(getattr(below, name, False) for name in ("in_process", "authenticated"))


@contextlib.contextmanager
def close_on_error(store: Any) -> Iterator[None]:
    """Release one of cydist's stores if the block raises, since kept exceptions refer to it."""
    try:
        yield
    except BaseException:
        release(store)
        raise


def _root_of(part: MembershipStore) -> Store | None:
    """Return the store that notices the end of a process, if the part is in one."""
    root, _ = _below(part)
    return root if reports_disconnects(root) else None


def _below(store: Any) -> tuple[Any, str]:
    """Return the store at the bottom of prefixes, and all of them together."""
    path = ""
    while isinstance(store, PrefixStore):
        path = f"{store.prefix}/{path}"
        store = store.underlying_store
    return store, path
