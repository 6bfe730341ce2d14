"""NVTX ranges: one for each collective and message, for Nsight Systems. Needs the package nvtx."""

from __future__ import annotations

import importlib
from typing import Any

from cydist.groups.hooks import CallInfo, HookHandle, add_hook


def add_ranges() -> HookHandle:
    """Mark each call of this process from now on, in the domain "cydist" of NVTX.

    A range is named "all_reduce on group 0, 4096 bytes". It begins when the program makes the call
    and ends when the call has completed; on backend nccl that is when it is enqueued.

    Returns:
        A `HookHandle`, whose `remove()` ends the marking.

    Raises:
        ImportError: There is no package nvtx.
    """
    nvtx: Any = importlib.import_module("nvtx")

    def before(call: CallInfo) -> Any:
        what = f"{call.name} on group {call.group}, {call.nbytes} bytes"
        return nvtx.start_range(message=what, domain="cydist")

    def after(call: CallInfo, started: Any, error: BaseException | None) -> None:
        nvtx.end_range(started)

    return add_hook(before, after)
