"""Draw a timeline: each rank's calls, what its time went to, and how late it came."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from cydist.recorder.timeline import Timeline, lateness, shares

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INSTALL = '--plot needs matplotlib: pip install "cydist[trace]"'
_OWN_COLORS = 8  # for the calls that took longest; the others share one
_MOST_LABELLED = 32  # ranks
_MOST_INCHES = 40.0


def draw(timeline: Timeline, path: str) -> None:
    """Draw a timeline into a file.

    Args:
        timeline: Of all ranks.
        path: Of the file; its ending names the format: .png, .svg, .pdf.

    Raises:
        ValueError: matplotlib is not installed, or has no such format.
        OSError: The file cannot be written.
    """
    figure(timeline).savefig(path, dpi=110, format=os.path.splitext(path)[1].lstrip(".") or None)


def figure(timeline: Timeline) -> Figure:
    """Return a timeline as a figure: calls, shares of time, and lateness.

    Args:
        timeline: Of all ranks.

    Raises:
        ValueError: matplotlib is not installed.
    """
    try:
        from matplotlib.figure import Figure  # without a window
    except ImportError:
        raise ValueError(INSTALL) from None
    ranks = sorted(timeline.hosts)
    height = min(_MOST_INCHES, 3.0 + 0.35 * len(ranks))
    drawn = Figure(figsize=(14.0, height), layout="constrained")
    calls, time, late = drawn.subplots(1, 3, sharey=True, width_ratios=(4, 1.4, 1.4))
    _draw_calls(calls, timeline, ranks)
    _draw_time(time, timeline, ranks)
    _draw_lateness(late, timeline, ranks)
    if len(ranks) <= _MOST_LABELLED:
        calls.set_yticks(range(len(ranks)), [f"{rank} on {timeline.hosts[rank]}" for rank in ranks])
    calls.set_ylabel("rank")
    calls.set_ylim(len(ranks) - 0.5, -0.5)
    return drawn


def _draw_calls(axes: Axes, timeline: Timeline, ranks: list[int]) -> None:
    """Draw each call as a bar, from its begin to its end."""
    spent: dict[str, int] = {}
    for span in timeline.spans:
        name = span.call["call"]
        spent[name] = spent.get(name, 0) + span.ended - span.began
    longest = sorted(spent, key=lambda name: -spent[name])
    for number, name in enumerate(longest):
        other = number >= _OWN_COLORS
        color = "tab:gray" if other else f"C{number}"
        label = name if not other else "others" if number == _OWN_COLORS else None
        for row, rank in enumerate(ranks):
            bars = [
                (span.began / 1e9, (span.ended - span.began) / 1e9)
                for span in timeline.spans
                if span.rank == rank and span.call["call"] == name
            ]
            # An edge keeps short calls visible.
            axes.broken_barh(
                bars, (row - 0.4, 0.8), facecolors=color, edgecolors=color, linewidth=0.8,
                label=label,
            )  # fmt: skip
            label = None
    axes.set_title("calls")
    axes.set_xlabel("seconds since the first call")
    if longest:
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=6, fontsize="small")


def _draw_time(axes: Axes, timeline: Timeline, ranks: list[int]) -> None:
    """Draw which shares of its time a rank waited, was in calls otherwise, and in the program."""
    rows: dict[str, list[float]] = {"waits": [], "in calls": [], "in the program": []}
    for rank in ranks:
        found = shares(timeline, rank)
        length = max(1, found.length)
        waits = min(found.waited, found.inside)
        rows["waits"].append(100 * waits / length)
        rows["in calls"].append(100 * (found.inside - waits) / length)
        rows["in the program"].append(100 * (found.length - found.inside) / length)
    left: list[float] = [0.0] * len(ranks)
    colors = {"waits": "tab:red", "in calls": "tab:blue", "in the program": "lightgray"}
    for name, values in rows.items():
        axes.barh(range(len(ranks)), values, left=left, color=colors[name], label=name)
        left = [a + b for a, b in zip(left, values, strict=True)]
    axes.set_title("time")
    axes.set_xlabel("% of the rank's time")
    axes.set_xlim(0, 100)
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.15), ncols=1, fontsize="small")


def _draw_lateness(axes: Any, timeline: Timeline, ranks: list[int]) -> None:
    """Draw how long each rank came after the median rank."""
    count, _, behind = lateness(timeline)
    values = [behind.get(rank, 0) / 1e6 for rank in ranks]
    axes.barh(range(len(ranks)), values, color="tab:orange")
    axes.set_title("late")
    axes.set_xlabel(f"ms after the median rank,\nin {count} collectives of all ranks")
