"""The host group: CPU memory with the same ranks, for all that is not for GPUs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cydist.backends.host.group import HostGroup

if TYPE_CHECKING:
    from cydist.groups.process_group import Call, ProcessGroup


class ControlGroup(HostGroup):
    """A group of backend "tcp" that speaks for one on GPUs, when others ask what a rank does.

    speaks_for      the group on GPUs; None until it is made
    """

    speaks_for: ProcessGroup | None = None

    def last_call(self) -> Call | None:
        own = super().last_call()
        if (own is not None and not own.over) or self.speaks_for is None:
            return own
        return self.speaks_for.last_call()
