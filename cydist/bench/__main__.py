"""`python -m cydist.bench`: which subject, then its own options."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

SUBJECTS = ("collectives",)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: this process's); the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    subject = arguments.pop(0) if arguments and arguments[0] in SUBJECTS else "collectives"
    code: int = importlib.import_module(f"cydist.bench.{subject}").main(arguments)
    return code


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
