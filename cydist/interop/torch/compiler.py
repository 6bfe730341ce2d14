"""Keep torch.compile out of the bridge's methods, which torch's Python and C++ call."""

from __future__ import annotations

from types import FunctionType

from torch._C._dynamo import eval_frame

SKIP = eval_frame._FrameExecStrategy(eval_frame._FrameAction.SKIP, eval_frame._FrameAction.SKIP)


def run_as_written(*classes: type) -> None:
    """Let torch.compile run the methods of these classes, and what they call, as they are.

    Dynamo compiles every Python frame below a compiled function, such as a group's broadcast that
    DDP's C++ calls. It takes a group for an object without attributes, and fails. Marked code costs
    nothing, where `torch.compiler.disable` would wrap every call and import Dynamo.
    """
    for each in classes:
        for member in vars(each).values():
            function = member.fget if isinstance(member, property) else member
            if isinstance(function, FunctionType):
                eval_frame.set_code_exec_strategy(function.__code__, SKIP)
