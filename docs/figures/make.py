"""Write all figures of the documentation: `python docs/figures/make.py`.

The plots come from the files in measurements/, each of which names its command and commit.
two_ranks.json and four_ranks.json are medians of what `python -m cydist.bench --json` wrote.
"""

from __future__ import annotations

from pathlib import Path

import diagrams
import plots

FIGURES = {
    "layers": diagrams.layers,
    "two_hosts": diagrams.two_hosts,
    "timeout": diagrams.timeout,
    "latency_two_ranks": lambda: plots.latency(plots.measured("two_ranks"), "two ranks"),
    "latency_four_ranks": lambda: plots.latency(plots.measured("four_ranks"), "four ranks"),
    "times_two_ranks": lambda: plots.times(plots.measured("two_ranks"), "two ranks"),
    "times_four_ranks": lambda: plots.times(plots.measured("four_ranks"), "four ranks"),
    "hosts_bytes": plots.hosts_bytes,
    "ddp_steps": plots.ddp_steps,
}

if __name__ == "__main__":
    for name, draw in FIGURES.items():
        (Path(__file__).parent / f"{name}.svg").write_text(draw().written())
