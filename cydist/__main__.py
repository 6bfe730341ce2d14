"""`cydist`, and `python -m cydist`: look at the jobs that run on this host."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from cydist.config import __version__
from cydist.launch import all_hosts, rank_records
from cydist.launch.run_files import JobFile


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: this process's), and return the exit code."""
    it = argparse.ArgumentParser(
        prog="cydist",
        description="Look at jobs that cydistrun has started on this host.",
        epilog="A job's files are its user's: no other user can look at it.",
    )
    it.add_argument("--version", action="version", version=f"{it.prog} {__version__}")
    commands = it.add_subparsers(dest="command", required=True)
    about = "beginning of its run id, pid of its cydistrun, or directory; default: the only one"
    for name, text in (
        ("jobs", "list the jobs"),
        ("ps", "show what each rank of a job does, and which are late"),
        ("hang", "the same, and the stacks of the late ranks"),
        ("top", "show how busy each rank is, again and again"),
        ("metrics", "serve metrics of the ranks for Prometheus"),
    ):
        command = commands.add_parser(name, help=text, description=f"{text.capitalize()}.")
        if name != "jobs":
            command.add_argument("job", nargs="?", default="", help=about)
        if name == "top":
            command.add_argument("--once", action="store_true", help="print one table, and end")
            command.add_argument(
                "--interval", type=_seconds, default=1.0, help="seconds for each table; default: 1"
            )
        if name == "metrics":
            command.add_argument(
                "--listen", default=":9400", help="[HOST]:PORT; default: 127.0.0.1:9400"
            )
    given = it.parse_args(argv)
    try:
        if given.command == "jobs":
            for job in rank_records.jobs():
                print(rank_records.describe_job(job))
        else:
            job = rank_records.find_job(given.job)
            if given.command == "ps":
                print(all_hosts.ps_report(job), end="")
            elif given.command == "hang":
                print(all_hosts.hang_report_of_all(job), end="")
            elif given.command == "metrics":
                from cydist.launch import metrics  # the other commands need none

                metrics.serve(job, metrics.address(given.listen))
            else:
                _top(job, given.interval, given.once)
    except (OSError, ValueError) as error:
        print(f"{it.prog}: {error}", file=sys.stderr)
        return 1
    return 0


def _top(job: JobFile, seconds: float, once: bool) -> None:
    from cydist.launch import live_table  # the other commands need none

    if once:
        print(live_table.print_once(job, seconds) or "the job has ended\n", end="")
    else:
        live_table.show(job, seconds)


def _seconds(text: str) -> float:
    seconds = float(text)
    if not 0 < seconds < 1e6:
        raise argparse.ArgumentTypeError(f"{text}: give a time above 0, in seconds")
    return seconds


if __name__ == "__main__":
    sys.exit(main())
