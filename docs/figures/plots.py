"""Plots of saved measurements."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from drawing import Drawing

MEASUREMENTS = Path(__file__).parent / "measurements"


def measured(name: str) -> dict[str, Any]:
    """Return a file of measurements, which names its command and commit."""
    found: dict[str, Any] = json.loads((MEASUREMENTS / f"{name}.json").read_text())
    return found


def source(data: dict[str, Any]) -> str:
    """Return where and when it was measured."""
    return f"{data['machine']}. Commit {data['commit']}"


def microseconds(value: float) -> str:
    """Return a time with two decimals."""
    return f"{value:.2f} µs"


def latency(name: str, ranks: str) -> Drawing:
    """Draw a bar for cydist and one for the fastest other library, for each call of 8 bytes."""
    data = measured(name)
    times = {op: each[0] for op, each in data["times"].items()}
    peers = {op: times[op] / data["ratios"][op][0] for op in times}
    most = max([*times.values(), *peers.values()])
    left, scale = 190, 400 / most
    picture = Drawing(
        760,
        96 + 52 * len(times),
        f"Time of an 8-byte call on {ranks}: cydist, and the {data['peers']}",
    )
    picture.text(20, 28, f"8-byte calls on {ranks}: time per call, shorter is better", "ink bold")
    for x, kind, text in ((20, "accent", "cydist"), (100, "third", data["peers"])):
        picture.rectangle(x, 40, 12, 12, kind, 2)
        picture.text(x + 18, 51, text, "muted", size=13)
    for row, op in enumerate(times):
        y = 68 + 52 * row
        picture.text(left - 12, y + 25, op, at="end", size=13)
        for down, value, kind in ((2, times[op], "accent"), (22, peers[op], "third")):
            picture.rectangle(left, y + down, max(2, value * scale), 17, kind, 2)
            picture.text(
                left + value * scale + 8, y + down + 13, microseconds(value), "muted", size=12
            )
        ratio = data["ratios"][op][0]
        picture.text(744, y + 25, f"{ratio:.2f} of its time", "ink", "end", 12)
    picture.text(20, 86 + 52 * len(times), source(data), "muted", size=11)
    return picture


def size(nbytes: int) -> str:
    """Return bytes as 8 B, 64 KiB, 16 MiB."""
    power = max(0, nbytes.bit_length() - 1) // 10
    return f"{nbytes >> 10 * power} {('B', 'KiB', 'MiB')[power]}"


def times(name: str, ranks: str) -> Drawing:
    """Draw time against bytes, one panel for each call, both on scales of powers."""
    data = measured(name)
    width, height, across = 190, 150, 3
    ops = list(data["times"])
    picture = Drawing(
        760,
        110 + (height + 64) * math.ceil(len(ops) / across),
        f"Time against bytes on {ranks}, for each call: cydist, and the {data['peers']}",
    )
    picture.text(20, 28, f"Time per call on {ranks}, against bytes", "ink bold")
    for x, kind, text in ((20, "accent", "cydist"), (100, "third", data["peers"])):
        picture.rectangle(x, 40, 12, 12, kind, 2)
        picture.text(x + 18, 51, text, "muted", size=13)
    sizes = data["sizes"]
    low, high = -1.0, 5.0  # powers of ten, in microseconds
    first, last = math.log2(sizes[0]), math.log2(sizes[-1])
    for number, op in enumerate(ops):
        x0 = 52 + number % across * (width + 48)
        y0 = 90 + number // across * (height + 64)
        picture.text(x0, y0 - 8, op, "ink bold", size=13)
        for power, text in ((-1, "0.1 µs"), (1, "10 µs"), (3, "1 ms"), (5, "100 ms")):
            y = y0 + height * (high - power) / (high - low)
            picture.line(x0, y, x0 + width, y, "grid")
            if number % across == 0:
                picture.text(x0 - 4, y + 4, text, "muted", "end", 10)
        places = [x0 + width * (math.log2(each) - first) / (last - first) for each in sizes]
        right = places[-1]
        for x, each in zip(places, sizes, strict=True):
            if x == right or right - x > 36:
                picture.text(x, y0 + height + 16, size(each), "muted", "middle", 10)
        mine = data["times"][op]
        theirs = [a / b for a, b in zip(mine, data["ratios"][op], strict=True)]
        for values, kind in ((theirs, "grey"), (mine, "blue")):
            heights = [y0 + height * (high - math.log10(v)) / (high - low) for v in values]
            picture.curve(list(zip(places, heights, strict=True)), kind)
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
