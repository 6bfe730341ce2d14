"""`cydist`, and `python -m cydist`: look at the jobs that run on this host."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from cydist.launch import hang_report, rank_records


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: this process's), and return the exit code."""
    it = argparse.ArgumentParser(
        prog="cydist",
        description="Look at jobs that cydistrun has started on this host.",
        epilog="A job's files are its user's: no other user can look at it.",
    )
    commands = it.add_subparsers(dest="command", required=True)
    about = "beginning of its run id, pid of its cydistrun, or directory; default: the only one"
    for name, text in (
        ("jobs", "list the jobs"),
        ("ps", "show what each rank of a job does, and which are late"),
        ("hang", "the same, and the stacks of the late ranks"),
    ):
        command = commands.add_parser(name, help=text, description=f"{text.capitalize()}.")
        if name != "jobs":
            command.add_argument("job", nargs="?", default="", help=about)
    given = it.parse_args(argv)
    try:
        if given.command == "jobs":
            for job in rank_records.jobs():
                print(rank_records.describe_job(job))
        else:
            job = rank_records.find_job(given.job)
            if given.command == "ps":
                text = hang_report.report(job, hang_report.observe(job))
            else:
                text = hang_report.hang_report(job)
            print(text, end="")
    except (OSError, ValueError) as error:
        print(f"{it.prog}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
