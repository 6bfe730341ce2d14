"""The machine, commit and date of a measurement."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import subprocess
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from cydist.errors import counted


def describe(arguments: Sequence[str]) -> dict[str, str]:
    """Describe this machine and the time; `arguments` are those of the command line."""
    load = os.getloadavg()
    cores = len(os.sched_getaffinity(0))
    busy = load[0] > (os.cpu_count() or cores) / 2
    about = {
        "command": shlex.join(["python", "-m", "cydist.bench", *arguments]),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "commit": _commit(),
        "machine": f"{_cpu()}, {counted(cores, 'core')}, {platform.system()} {platform.release()}",
        "load": f"{load[0]:.2f} in the last minute"
        + (": others use this machine, the figures are worth less" if busy else ""),
        "python": f"{platform.python_version()}, numpy {importlib.metadata.version('numpy')}",
    }
    return {name: said for name, said in about.items() if said}


def congestion_control() -> str:
    """Return the name of TCP's congestion control; "" where the system does not say."""
    try:
        return Path("/proc/sys/net/ipv4/tcp_congestion_control").read_text().strip()
    except OSError:
        return ""


def _cpu() -> str:
    """Return the CPU's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _commit() -> str:
    """Return the commit of the source tree that this runs from, if it is a repository."""
    root = Path(__file__).resolve().parent.parent.parent
    if not (root / ".git").exists():
        return ""
    try:
        said = subprocess.run(
            ["git", "-C", str(root), "describe", "--always", "--dirty"],
            capture_output=True, text=True, timeout=10, check=False,
        )  # fmt: skip
    except OSError:
        return ""
    return said.stdout.strip()
