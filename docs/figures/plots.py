"""Plots of saved measurements."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from drawing import Drawing

MEASUREMENTS = Path(__file__).parent / "measurements"
FILLS = ("accent", "third", "second", "good", "fourth")  # of libraries, cydist first
STROKES = ("blue", "grey", "orange", "green", "violet")
Times = dict[str, dict[str, dict[int, float]]]  # microseconds by library, call and bytes


def measured(name: str) -> dict[str, Any]:
    """Return a file of measurements, which names its command and commit."""
    found: dict[str, Any] = json.loads((MEASUREMENTS / f"{name}.json").read_text())
    return found


def source(data: dict[str, Any]) -> str:
    """Return where and when it was measured."""
    about = data.get("header", data)
    return f"{about['machine']}. Commit {about['commit']}"


def times_of(data: dict[str, Any]) -> Times:
    """Return the times in a file.

    A file is what `python -m cydist.bench --json` writes, or several of them together.
    """
    found: Times = {}
    for cell in data["cells"]:
        for library, each in cell["participants"].items():
            if cell["bytes"] and each.get("median"):
                by_op = found.setdefault(library, {})
                by_op.setdefault(cell["op"], {})[cell["bytes"]] = each["median"] * 1e6
    return found


def microseconds(value: float) -> str:
    """Return a time: with two decimals, if it is short."""
    return f"{value:.2f} µs" if value < 100 else f"{value:.0f} µs"


def legend(picture: Drawing, libraries: list[str]) -> None:
    """Name the libraries by their colours."""
    x = 20
    for library, kind in zip(libraries, FILLS, strict=False):
        picture.rectangle(x, 40, 12, 12, kind, 2)
        picture.text(x + 18, 51, library, "muted", size=13)
        x += 36 + 8 * len(library)


def latency(data: dict[str, Any], ranks: str) -> Drawing:
    """Draw the time of the shortest calls: a bar for each library."""
    found = times_of(data)
    libraries = list(found)
    ops = list(found["cydist"])
    shortest = {op: min(found["cydist"][op]) for op in ops}
    values = {op: [found[name].get(op, {}).get(shortest[op]) for name in libraries] for op in ops}
    # A library that is far slower than cydist has a bar that is cut, so that the others differ.
    cut = 8 * max(row[0] for row in values.values() if row[0])
    most = min(cut, max(each for row in values.values() for each in row if each))
    left, scale, high = 190, 400 / most, 12 + 20 * len(libraries)
    picture = Drawing(
        760,
        96 + high * len(ops),
        f"Time of a short call on {ranks}, by library: {', '.join(libraries)}",
    )
    sizes = " to ".join(str(n) for n in sorted({*shortest.values()}))
    title = f"Calls of {sizes} bytes on {ranks}: time per call, shorter is better"
    picture.text(20, 28, title, "ink bold")
    legend(picture, libraries)
    for row, op in enumerate(ops):
        y = 68 + high * row
        picture.text(left - 12, y + high / 2 - 1, op, at="end", size=13)
        others = [each for each in values[op][1:] if each]
        for number, (value, kind) in enumerate(zip(values[op], FILLS, strict=False)):
            if not value:
                continue
            top, width = y + 2 + 20 * number, min(value, most) * scale
            picture.rectangle(left, top, max(2, width), 17, kind, 2)
            text = microseconds(value) + (", bar cut" if value > most else "")
            picture.text(left + width + 8, top + 13, text, "muted", size=12)
        text = f"{values[op][0] / min(others):.2f} of the fastest"
        picture.text(744, y + 13, text, "ink", "end", 12)
    picture.text(20, 86 + high * len(ops), source(data), "muted", size=11)
    return picture


def size(nbytes: int) -> str:
    """Return bytes as 8 B, 64 KiB, 16 MiB."""
    power = max(0, nbytes.bit_length() - 1) // 10
    return f"{nbytes >> 10 * power} {('B', 'KiB', 'MiB')[power]}"


def times(data: dict[str, Any], ranks: str) -> Drawing:
    """Draw time against bytes, one panel for each call, both on scales of powers."""
    found = times_of(data)
    libraries = list(found)
    width, height, across = 190, 150, 3
    ops = list(found["cydist"])
    picture = Drawing(
        760,
        110 + (height + 64) * math.ceil(len(ops) / across),
        f"Time against bytes on {ranks}, for each call, by library: {', '.join(libraries)}",
    )
    picture.text(20, 28, f"Time per call on {ranks}, against bytes", "ink bold")
    legend(picture, libraries)
    low, high = -1.0, 5.0  # powers of ten, in microseconds
    for number, op in enumerate(ops):
        x0 = 52 + number % across * (width + 48)
        y0 = 90 + number // across * (height + 64)
        picture.text(x0, y0 - 8, op, "ink bold", size=13)
        for power, text in ((-1, "0.1 µs"), (1, "10 µs"), (3, "1 ms"), (5, "100 ms")):
            y = y0 + height * (high - power) / (high - low)
            picture.line(x0, y, x0 + width, y, "grid")
            if number % across == 0:
                picture.text(x0 - 4, y + 4, text, "muted", "end", 10)
        sizes = list(found["cydist"][op])
        first, last = math.log2(sizes[0]), math.log2(sizes[-1])
        place = {n: x0 + width * (math.log2(n) - first) / (last - first) for n in sizes}
        right = place[sizes[-1]]
        for nbytes, x in place.items():
            if x == right or right - x > 36:
                picture.text(x, y0 + height + 16, size(nbytes), "muted", "middle", 10)
        for library, kind in reversed(list(zip(libraries, STROKES, strict=False))):
            row = found[library].get(op, {})
            points = [
                (place[n], y0 + height * (high - math.log10(value)) / (high - low))
                for n, value in row.items()
            ]
            picture.curve(points, kind)
    picture.text(
        20, 100 + (height + 64) * math.ceil(len(ops) / across), source(data), "muted", size=11
    )
    return picture


def hosts_bytes() -> Drawing:
    """Draw what a host sends for a call, a bar for each library."""
    data = measured("hosts_bytes")
    kinds = ("accent", "third", "second")
    rows = data["bytes"]
    left, scale = 150, 250
    picture = Drawing(
        760,
        100 + 62 * len(rows),
        "Bytes that each of two hosts sends for a call of 1 MiB, by library",
    )
    picture.text(
        20, 28, "Bytes that a host sends for a call of 1 MiB: shorter is better", "ink bold"
    )
    for number, (library, kind) in enumerate(zip(data["libraries"], kinds, strict=True)):
        picture.rectangle(20 + 110 * number, 40, 12, 12, kind, 2)
        picture.text(38 + 110 * number, 51, library, "muted", size=13)
    for row, (op, values) in enumerate(rows.items()):
        y = 68 + 62 * row
        picture.text(left - 12, y + 32, op, at="end", size=13)
        for number, (value, kind) in enumerate(zip(values, kinds, strict=True)):
            if value is None:
                picture.text(left + 8, y + 18 * number + 13, "does not have it", "muted", size=12)
                continue
            picture.rectangle(left, y + 18 * number + 1, value * scale, 15, kind, 2)
            picture.text(
                left + value * scale + 8, y + 18 * number + 13, f"{value:.2f} MiB", "muted", size=12
            )
    picture.text(20, 90 + 62 * len(rows), f"4 ranks on 2 {source(data)}", "muted", size=11)
    return picture


def ddp_steps() -> Drawing:
    """Draw the median of the runs, and a mark for each."""
    data = measured("ddp_steps")
    left, scale = 100, 500 / 350
    picture = Drawing(
        760, 190, "Training steps per second with DistributedDataParallel, on cydist and on gloo"
    )
    picture.text(20, 28, "Training steps per second on two ranks: longer is better", "ink bold")
    picture.text(20, 50, "bar: median of three runs; dots: the runs", "muted", size=13)
    for row, (library, kind) in enumerate((("cydist", "accent"), ("gloo", "second"))):
        runs = sorted(data["steps"][library])
        y = 66 + 46 * row
        picture.text(left - 12, y + 21, library, at="end", size=13)
        picture.rectangle(left, y, runs[1] * scale, 32, kind, 3)
        for each in runs:
            picture.rectangle(left + each * scale - 4, y + 12, 8, 8, "ink", 4)
        picture.text(left + runs[2] * scale + 14, y + 21, f"{runs[1]} steps/s", "ink", size=13)
    picture.text(20, 178, source(data), "muted", size=11)
    return picture
