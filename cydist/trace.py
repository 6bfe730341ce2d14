"""`python -m cydist.trace RUN`: one timeline of the calls that the ranks of a job left in RUN."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence

from cydist.recorder import snapshot, timeline


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: this process's), and return the exit code."""
    it = argparse.ArgumentParser(
        prog="python -m cydist.trace",
        description="Merge the last calls of all ranks into one timeline, and sum it up.",
    )
    it.add_argument("run", help="directory that CYDIST_RECORDER named, with rank-0.json and so on")
    it.add_argument("--out", help="file for ui.perfetto.dev; default: trace.json in RUN")
    it.add_argument("--plot", metavar="FILE", help="draw it, as .png, .svg or .pdf")
    given = it.parse_args(argv)
    try:
        merged = timeline.merge(snapshot.read_directory(given.run))
        out = given.out or os.path.join(given.run, "trace.json")
        with open(out, "w") as file:
            json.dump(timeline.chrome_trace(merged), file)
        if given.plot:
            from cydist.recorder import timeline_plot  # slow to import

            timeline_plot.draw(merged, given.plot)
    except (OSError, ValueError) as error:
        print(f"{it.prog}: {error}", file=sys.stderr)
        return 1
    print(timeline.summary(merged), end="")
    if given.plot:
        print(f"\nplot: {given.plot}")
    print(f"\n{len(merged.spans)} calls in {out}, for https://ui.perfetto.dev")
    return 0


if __name__ == "__main__":
    sys.exit(main())
