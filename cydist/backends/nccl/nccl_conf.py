"""NCCL's own settings, also those in its configuration files.

NCCL takes a setting from the environment; otherwise from the file that NCCL_CONF_FILE names (from
NCCL 2.23 on) or, without that, from ~/.nccl.conf; otherwise from /etc/nccl.conf. It reads the files
only when it makes a communicator, and puts them into an environment that Python does not see. A
plugin that NCCL_ENV_PLUGIN names is not asked here.
"""

from __future__ import annotations

import os
from pathlib import Path

from cydist import config

CONF_FILE_SINCE = 22300  # NCCL's version
SYSTEM_FILE = "/etc/nccl.conf"


def setting(variable: config.Variable, version: int) -> str:
    """Return what a version of NCCL takes for one of its variables; the variable's default if it is
    set nowhere."""
    (name,) = variable.names
    found = variable.get()
    if found or name in os.environ:
        return found
    for path in _files(version):
        if (in_file := _in_file(path, name)) is not None:
            return in_file
    return found


def _files(version: int) -> list[str]:
    """Return NCCL's files, the one that counts first."""
    own = config.NCCL_CONF_FILE.get() if version >= CONF_FILE_SINCE else ""
    return [own or os.path.expanduser("~/.nccl.conf"), SYSTEM_FILE]


def _in_file(path: str, name: str) -> str | None:
    """Return a variable's value in a file, whose first line for it counts; None: it is not in it.

    NCCL takes lines NAME=VALUE as they are, with their spaces.
    """
    try:
        text = Path(path).read_text(errors="replace")
    except OSError:
        return None
    lines = (line.removesuffix("\r").partition("=") for line in text.split("\n"))
    return next((value for key, equals, value in lines if key == name and equals), None)
