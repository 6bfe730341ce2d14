"""What stands for a group on a rank that is not in it."""

from __future__ import annotations

import warnings


class NonMember:
    """What new_group returns to a rank that is not in the group: falsy, rank and size -1."""

    _warned: set[str]

    def __init__(self) -> None:
        self._warned = set()

    def __bool__(self) -> bool:
        return False

    def __repr__(self) -> str:
        return "GroupMember.NON_GROUP_MEMBER"

    def rank(self) -> int:
        """-1: this process is not in the group."""
        return -1

    def size(self) -> int:
        """-1: this process does not know."""
        return -1

    def warn(self, name: str) -> None:
        """Say, once for each kind of call, that it does nothing here."""
        if name not in self._warned:
            self._warned.add(name)
            warnings.warn(f"{name} on a group that this rank is not in does nothing", stacklevel=4)
