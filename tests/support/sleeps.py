"""How often threads of this process have slept."""

from __future__ import annotations

import re
import threading
from pathlib import Path


def sleeps(thread: threading.Thread) -> int:
    """How often this thread has waited in the kernel; 0 before it runs."""
    if thread.native_id is None:
        return 0
    status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
    (times,) = re.findall(r"^voluntary_ctxt_switches:\s*(\d+)", status, re.M)
    return int(times)
