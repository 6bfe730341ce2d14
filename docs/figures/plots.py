"""Plots of saved measurements."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from drawing import LEAST, WIDTH, Drawing

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


def legend(picture: Drawing, libraries: list[str], y: float) -> None:
    """Name the libraries by their colours."""
    x = 12.0
    for library, kind in zip(libraries, FILLS, strict=False):
        picture.rectangle(x, y - 10, 11, 11, kind, 2)
        picture.text(x + 16, y, library, "muted", size=LEAST)
        x += 30 + 6.8 * len(library)


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
    left, scale, high = 12, 256 / most, 36 + 18 * len(libraries)
    picture = Drawing(
        112 + high * len(ops),
        f"Time of a short call on {ranks}, by library: {', '.join(libraries)}",
    )
    sizes = " to ".join(str(n) for n in sorted({*shortest.values()}))
    picture.text(left, 22, f"Calls of {sizes} bytes on {ranks}", "ink bold", size=15)
    picture.text(left, 41, "time per call: shorter is better", "muted", size=13)
    legend(picture, libraries, 63)
    for row, op in enumerate(ops):
        y = 76 + high * row
        picture.text(left, y + 14, op, "ink bold", size=13)
        others = [each for each in values[op][1:] if each]
        text = f"{values[op][0] / min(others):.2f} of the fastest"
        picture.text(WIDTH - 12, y + 14, text, "ink", "end", LEAST)
        for number, (value, kind) in enumerate(zip(values[op], FILLS, strict=False)):
            if not value:
                continue
            top, width = y + 21 + 18 * number, min(value, most) * scale
            picture.rectangle(left, top, max(2, width), 15, kind, 2)
            text = microseconds(value) + (", bar cut" if value > most else "")
            picture.text(left + width + 7, top + 12, text, "muted", size=LEAST)
    picture.lines(left, 86 + high * len(ops), source(data))
    return picture


def size(nbytes: int) -> str:
    """Return bytes as 8, 64 Ki, 16 Mi."""
    power = max(0, nbytes.bit_length() - 1) // 10
    return f"{nbytes >> 10 * power} {('', 'Ki', 'Mi')[power]}".strip()


def apart(sizes: list[int], place: dict[int, float]) -> list[int]:
    """Return those sizes, from the largest down, whose labels have room."""
    kept = [sizes[-1]]
    for each in reversed(sizes):
        if place[kept[-1]] - place[each] > (54 if kept == sizes[-1:] else 32):
            kept.append(each)
    return kept


def times(data: dict[str, Any], ranks: str) -> Drawing:
    """Draw time against bytes, one panel for each call, both on scales of powers."""
    found = times_of(data)
    libraries = list(found)
    width, height, across = 144, 130, 2
    ops = list(found["cydist"])
    below = 76 + (height + 62) * math.ceil(len(ops) / across)
    picture = Drawing(
        below + 36, f"Time against bytes on {ranks}, for each call, by library: "
        f"{', '.join(libraries)}",
    )  # fmt: skip
    picture.text(12, 22, f"Time per call on {ranks}, against bytes", "ink bold", size=15)
    legend(picture, libraries, 45)
    low, high = -1.0, 5.4  # powers of ten, in microseconds
    for number, op in enumerate(ops):
        x0 = 52 + number % across * (width + 32)
        y0 = 86 + number // across * (height + 62)
        picture.text(x0, y0 - 9, op, "ink bold", size=LEAST)
        for power, text in ((-1, "0.1 µs"), (1, "10 µs"), (3, "1 ms"), (5, "100 ms")):
            y = y0 + height * (high - power) / (high - low)
            picture.line(x0, y, x0 + width, y, "grid")
            if number % across == 0:
                picture.text(x0 - 5, y + 4, text, "muted", "end", LEAST)
        sizes = list(found["cydist"][op])
        first, last = math.log2(sizes[0]), math.log2(sizes[-1])
        place = {n: x0 + width * (math.log2(n) - first) / (last - first) for n in sizes}
        for nbytes in apart(sizes, place):
            at = {sizes[0]: "start", sizes[-1]: "end"}.get(nbytes, "middle")
            picture.text(place[nbytes], y0 + height + 18, size(nbytes), "muted", at, LEAST)
        for library, kind in reversed(list(zip(libraries, STROKES, strict=False))):
            row = found[library].get(op, {})
            points = [
                (place[n], y0 + height * (high - math.log10(value)) / (high - low))
                for n, value in row.items()
            ]
            picture.curve(points, kind)
    picture.lines(12, below + 8, source(data))
    return picture


def hosts_bytes() -> Drawing:
    """Draw what a host sends for a call, a bar for each library."""
    data = measured("hosts_bytes")
    rows = data["bytes"]
    left, scale, high = 112, 106, 62
    picture = Drawing(
        112 + high * len(rows),
        "Bytes that each of two hosts sends for a call of 1 MiB, by library",
    )
    picture.text(12, 22, "Bytes that a host sends for a call of 1 MiB", "ink bold", size=15)
    picture.text(12, 41, "shorter is better", "muted", size=13)
    legend(picture, data["libraries"], 63)
    for row, (op, values) in enumerate(rows.items()):
        y = 76 + high * row
        picture.text(left - 10, y + 32, op, at="end", size=13)
        for number, (value, kind) in enumerate(zip(values, FILLS, strict=False)):
            if value is None:
                picture.text(left + 8, y + 18 * number + 13, "does not have it", "muted", size=12)
                continue
            picture.rectangle(left, y + 18 * number + 1, value * scale, 15, kind, 2)
            picture.text(
                left + value * scale + 8, y + 18 * number + 13, f"{value:.2f} MiB", "muted", size=12
            )
    picture.lines(12, 86 + high * len(rows), f"4 ranks on 2 {source(data)}")
    return picture


def ddp_steps() -> Drawing:
    """Draw the median of the runs, and a mark for each."""
    data = measured("ddp_steps")
    left, scale = 64, 230 / 350
    picture = Drawing(
        206, "Training steps per second with DistributedDataParallel, on cydist and on gloo"
    )
    picture.text(12, 22, "Training steps per second on two ranks", "ink bold", size=15)
    picture.text(
        12, 41, "longer is better; bar: median of three runs; dots: the runs", "muted", size=13
    )
    for row, (library, kind) in enumerate((("cydist", "accent"), ("gloo", "second"))):
        runs = sorted(data["steps"][library])
        y = 58 + 46 * row
        picture.text(left - 10, y + 21, library, at="end", size=13)
        picture.rectangle(left, y, runs[1] * scale, 32, kind, 3)
        for each in runs:
            picture.rectangle(left + each * scale - 4, y + 12, 8, 8, "ink", 4)
        picture.text(left + runs[2] * scale + 14, y + 21, f"{runs[1]} steps/s", "ink", size=13)
    picture.lines(12, 172, source(data))
    return picture
