"""`cydistrun`, and `python -m cydist.launch`: start a program as the ranks of one job.

The second gives scripts `--local-rank=K`, as `python -m torch.distributed.launch` does.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial

from cydist.launch.job import run_job
from cydist.launch.options import parse
from cydist.launch.supervisor import run_supervised


def main(argv: Sequence[str] | None = None, *, passes_local_rank: bool = False) -> int:
    """Run the command line `argv` (default: this process's), and return the exit code.

    With `passes_local_rank` scripts get `--local-rank=K`, unless --use-env is given.

    The exit code is 0 if every rank succeeded. Otherwise it is that of the rank that failed first,
    or 128 plus the number of the signal that ended that rank or this launcher.
    """
    options = parse(sys.argv[1:] if argv is None else argv, passes_local_rank=passes_local_rank)
    if options.hosts:
        from cydist.launch.ssh import run_over_ssh  # slow to import, and one host needs none

        return run_supervised(lambda lifeline, _: run_over_ssh(options, lifeline), options.signals)
    return run_supervised(partial(run_job, options), options.signals)


if __name__ == "__main__":
    sys.exit(main(passes_local_rank=True))
