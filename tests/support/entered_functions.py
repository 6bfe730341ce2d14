"""Which of cydist's Python functions a call enters: none on the fast path."""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import cydist

PACKAGE = Path(cydist.__file__).parent


def entered_functions(call: Callable[[], object]) -> list[str]:
    """Run the call; return the names of cydist's Python functions that it entered, in order."""
    entered: list[str] = []

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and PACKAGE in Path(frame.f_code.co_filename).parents:
            entered.append(frame.f_code.co_qualname)

    gc.collect()  # what it frees of other tests may run code of cydist's
    gc.disable()
    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
        gc.enable()
    return entered
