"""Counts of the bytes that a process has written to each rank's sockets; others can read them.

A count is of one link: the global rank of each of its peers, and then the bytes to each.
"""

from __future__ import annotations

import contextlib
import os
from array import array
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from mmap import ACCESS_READ, mmap

_ITEM = 8  # bytes of a rank, and of a count
_spare: list[mmap] = []


def make(path: str, ranks: Sequence[int]) -> mmap:
    """Return new counts, all 0, for a link to these global ranks.

    Args:
        path: A new file for them; "", or if it cannot be made: they are only in memory.
    """
    if path:
        with contextlib.suppress(OSError):
            return _in_file(path, ranks)
    return _with_ranks(mmap(-1, 2 * _ITEM * len(ranks)), ranks)


def _in_file(path: str, ranks: Sequence[int]) -> mmap:
    fd = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
    try:
        # Blocks for all of it, or an error: a write into a hole of a full disk would kill.
        os.posix_fallocate(fd, 0, 2 * _ITEM * len(ranks))
        return _with_ranks(mmap(fd, 2 * _ITEM * len(ranks)), ranks)
    finally:
        os.close(fd)


def write(path: str, counts: Mapping[int, int]) -> None:
    """Put these counts in the place of those of a file. Raises OSError."""
    with open(f"{path}.new", "wb") as file:
        array("Q", [*counts.keys(), *counts.values()]).tofile(file)
    os.replace(f"{path}.new", path)


def spare(size: int) -> memoryview:
    """Return memory for the counts of a closed link, which nothing reads."""
    if not _spare or len(_spare[-1]) < size * _ITEM:
        _spare.append(mmap(-1, size * _ITEM))  # former links still point to the others
    return memoryview(_spare[-1]).cast("Q")


def _with_ranks(memory: mmap, ranks: Sequence[int]) -> mmap:
    whole = memoryview(memory).cast("Q")
    for place, rank in enumerate(ranks):
        whole[place] = rank
    return memory


def counters_in(memory: mmap) -> memoryview:
    """Return the counts, for the link that writes them."""
    whole = memoryview(memory).cast("Q")
    return whole[len(whole) // 2 :]


def total(counts: Iterable[mmap]) -> dict[int, int]:
    """Return the bytes to each global rank, if any."""
    found: Counter[int] = Counter()
    for memory in counts:
        whole = memoryview(memory).cast("Q").tolist()
        half = len(whole) // 2
        found.update(dict(zip(whole[:half], whole[half:], strict=True)))
    return {rank: count for rank, count in sorted(found.items()) if count}


def of_process(directory: str, pid: int) -> dict[int, int]:
    """Return what the files of a process of this host say. Raises OSError."""
    counts = []
    for name in os.listdir(directory):
        if name.startswith(f"sent-{pid}-") and not name.endswith(".new"):
            # It may be gone since, or be empty, as it is being made.
            with (
                contextlib.suppress(FileNotFoundError, ValueError),
                open(os.path.join(directory, name), "rb") as file,
            ):
                counts.append(mmap(file.fileno(), 0, access=ACCESS_READ))
    return total(counts)
