"""Plot time against size, one picture for each op."""

from __future__ import annotations

import importlib
import math
from typing import Any

from cydist.bench.report import Rows

MOST_TICKS = 6


def size_text(nbytes: int) -> str:
    """Return bytes in the form of --sizes: 8, 64Ki, 16Mi; 1.5Ki if they are not whole."""
    power = min(3, max(0, nbytes.bit_length() - 1) // 10)
    return f"{nbytes / (1 << 10 * power):.4g}{('', 'Ki', 'Mi', 'Gi')[power]}"


def apart(sizes: list[int]) -> list[int]:
    """Return those of ascending sizes that have room for a label: the largest, and others."""
    room = (math.log2(sizes[-1]) - math.log2(sizes[0])) / MOST_TICKS
    shown = [sizes[-1]]
    for nbytes in reversed(sizes):
        if math.log2(shown[-1]) - math.log2(nbytes) >= room > 0:
            shown.append(nbytes)
    return shown[::-1]


def draw(rows: Rows, title: str, path: str) -> None:
    """Write the plot to `path`, in the format of its suffix."""
    matplotlib: Any = importlib.import_module("matplotlib")
    matplotlib.use("Agg")
    plt: Any = importlib.import_module("matplotlib.pyplot")
    ticker: Any = importlib.import_module("matplotlib.ticker")
    ops = list(dict.fromkeys(case.op for case, _ in rows))
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
                (max(1, case.nbytes), row[name].median * 1e6)
                for case, row in rows
                if case.op == op and name in row and row[name].rounds
            ]
            style = {"linewidth": 2.2, "zorder": 3} if number == 0 else {"linewidth": 1.2}
            picture.plot(*zip(*points, strict=True) if points else ((), ()), "o-",
                         markersize=3, color=f"C{number}", label=name, **style)  # fmt: skip
        picture.set_title(op, fontsize=10)
        picture.set_yscale("log")
        picture.yaxis.set_major_locator(ticker.LogLocator(numticks=MOST_TICKS))
        picture.yaxis.set_major_formatter(ticker.FormatStrFormatter("%g"))
        picture.yaxis.set_minor_formatter(ticker.NullFormatter())
        if op == "barrier":
            picture.set_xticks([])
        else:
            sizes = sorted({max(1, case.nbytes) for case, _ in rows if case.op == op})
            shown = apart(sizes)
            picture.set_xscale("log", base=2)
            picture.set_xticks(shown, [size_text(nbytes) for nbytes in shown])
            picture.xaxis.set_minor_locator(ticker.NullLocator())
            picture.set_xlabel("bytes")
        picture.grid(True, which="major", alpha=0.3)
    for line in axes:
        line[0].set_ylabel("us per call")
    figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="lower center", ncols=len(names))
    figure.suptitle(title, fontsize=10)
    figure.tight_layout(rect=(0, 0.06, 1, 1))
    figure.savefig(path, dpi=150)
    plt.close(figure)
