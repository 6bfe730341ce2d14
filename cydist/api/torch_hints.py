"""Advice after an error of torch, where cydist's default group is the cause.

torch's own errors know nothing of cydist, so a process says it at its end, below the traceback.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Collection
from typing import Any

_TOGETHER = "cydist.init_process_group('tcp', torch=True)"
_NO_DEFAULT = "Default process group has not been initialized"
_WRONG_GROUP = re.compile(
    r"Expecting a ProcessGroup, but got a <class 'cydist\."
    r"|_distributed_c10d\.ProcessGroup.*Invoked with: .*<\w+ '.*' backend=.* rank=\d+ size=\d+>",
    re.S,
)


def hint(error: BaseException, ports: Collection[int]) -> str:
    """Return what to write if this error, which ended the program, is torch's; else "".

    Args:
        ports: On which cydist's stores listen in this process.
    """
    torch: Any = sys.modules.get("torch.distributed")
    if torch is None or not torch.is_available():
        return ""
    text = str(error)
    if isinstance(error, ValueError) and _NO_DEFAULT in text and not torch.is_initialized():
        return (
            "cydist.init_process_group made cydist's default group, and torch.distributed has "
            f"none. Call {_TOGETHER} to make both"
        )
    if isinstance(error, ValueError | TypeError) and _WRONG_GROUP.search(text):
        return (
            "this call of torch takes torch's groups only. Call "
            f"{_TOGETHER}, and pass torch.distributed.group.WORLD or a group of "
            "torch.distributed.new_group"
        )
    taken = [port for port in ports if f"port: {port}," in text and "EADDRINUSE" in text]
    if isinstance(error, torch.DistNetworkError) and taken:
        return (
            f"cydist's store in this process listens on port {taken[0]}. Call {_TOGETHER} in place "
            "of torch's init_process_group, or give torch another port "
            "(init_method='tcp://host:port', with rank and world_size)"
        )
    return ""


def write_hint(error: BaseException, ports: Collection[int]) -> None:
    """Write the hint for the error that ended the program, if there is one."""
    text = hint(error, ports)
    if text:
        print(f"cydist: {text}", file=sys.stderr, flush=True)
