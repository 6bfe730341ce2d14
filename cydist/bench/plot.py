"""Time against size, one picture for each op."""

from __future__ import annotations

import importlib
import math
from typing import Any

from cydist.bench.report import Rows


def draw(rows: Rows, title: str, path: str) -> None:
    """Write the plot to `path`, in the format that its ending names."""
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    plt: Any = importlib.import_module("matplotlib.pyplot")
    ops = list(dict.fromkeys(cell.op for cell, _ in rows))
    names = list(dict.fromkeys(name for _, row in rows for name in row))
    columns = min(4, len(ops))
    lines = math.ceil(len(ops) / columns)
    figure, axes = plt.subplots(
        lines, columns, figsize=(3.4 * columns + 0.6, 3.0 * lines + 0.8), squeeze=False
    )
    for picture in axes.flat[len(ops) :]:
        picture.set_axis_off()
    for picture, op in zip(axes.flat, ops, strict=False):
        for number, name in enumerate(names):
            points = [
                (max(1, cell.nbytes), row[name].median * 1e6)
                for cell, row in rows
                if cell.op == op and name in row and row[name].rounds
            ]
            style = {"linewidth": 2.2, "zorder": 3} if number == 0 else {"linewidth": 1.2}
            picture.plot(*zip(*points, strict=True) if points else ((), ()), "o-",
                         markersize=3, color=f"C{number}", label=name, **style)  # fmt: skip
        picture.set_title(op, fontsize=10)
        picture.set_yscale("log")
        if op == "barrier":
            picture.set_xticks([])
        else:
            picture.set_xscale("log", base=2)
            picture.set_xlabel("bytes")
        picture.grid(True, which="major", alpha=0.3)
    for line in axes:
        line[0].set_ylabel("us per call")
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="lower center", ncols=len(names))
    figure.suptitle(title, fontsize=10)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(path, dpi=150)
    plt.close(figure)
