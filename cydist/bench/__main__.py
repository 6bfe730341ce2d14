"""`python -m cydist.bench`: choose a subject, and pass on its options."""

from __future__ import annotations

import importlib
import signal
import sys
from collections.abc import Callable, Sequence

from cydist.bench.workers import WorkerError

SUBJECTS = (
    "collectives", "job", "kernels", "overlap", "paths", "startup", "rendezvous", "memory", "tune",
    "simulate",
)  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: this process's), and return the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    for subject in ("tune", "simulate"):
        if f"--{subject}" in arguments:
            arguments.remove(f"--{subject}")
            arguments.insert(0, subject)
    subject = arguments.pop(0) if arguments and arguments[0] in SUBJECTS else "collectives"
    run: Callable[[Sequence[str]], int] = importlib.import_module(f"cydist.bench.{subject}").main
    try:
        return run(arguments)
    except WorkerError as error:
        print(error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    # An exit, so that the participants are ended and their files removed.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
