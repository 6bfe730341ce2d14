"""`python -m cydist.recorder`: convert the dumps of a job's ranks."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from cydist.recorder import snapshot


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: this process's), and return the exit code."""
    it = argparse.ArgumentParser(
        prog="python -m cydist.recorder",
        description="Convert the dumps that ranks left in a directory (CYDIST_RECORDER).",
    )
    commands = it.add_subparsers(dest="command", required=True)
    export = commands.add_parser(
        "export", help="write the dumps for torch's analyser, torchfrtrace OUT"
    )
    export.add_argument("run", help="directory with rank-0.json and so on")
    export.add_argument("out", help="directory for rank_0 and so on")
    given = it.parse_args(argv)
    try:
        paths = snapshot.export_to_torch(snapshot.read_directory(given.run), given.out)
    except (OSError, ValueError) as error:
        print(f"{it.prog}: {error}", file=sys.stderr)
        return 1
    print(f"{len(paths)} files in {given.out}: torchfrtrace {given.out} -p rank_")
    return 0


if __name__ == "__main__":
    sys.exit(main())
