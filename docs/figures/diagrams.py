"""Diagrams: the layers of a call, a job of two hosts, and the timeline of a timeout."""

from __future__ import annotations

from drawing import Drawing


def layers() -> Drawing:
    """Draw what a call passes through, from the program to the memory."""
    rows = [
        ("your program", ["dist.all_reduce(x)"], "pale edge"),
        (
            "public functions",
            ["torch.distributed's API: check arguments,", "pack strided arrays"],
            "box edge",
        ),
        (
            "group",
            ["tcp, mpi, nccl, inproc, torch:NAME,", "or a backend that you write"],
            "box edge",
        ),
        ("call queue", ["order, deadline, and number of each call"], "box edge"),
        (
            "algorithm",
            ["ring, tree, direct ...: chosen by size", "and number of ranks"],
            "box edge",
        ),
    ]
    parts = [
        ("transport", ["shared memory,", "authenticated TCP,", "or MPI"]),
        ("kernels", ["sums in AVX-512,", "AVX2 or plain C"]),
    ]
    picture = Drawing(
        508,
        "Layers of a call: program, public functions, group, call queue, algorithm, then transport "
        "and kernels; the fast path leads from the public functions to the algorithm",
    )
    picture.text(12, 24, "One call, from the program to the memory", "ink bold", size=15)
    left, width, y = 100, 288, 40.0
    middles = {}
    for name, lines, kind in rows:
        high = 28 + 16 * len(lines)
        if middles:
            picture.arrow(left + width / 2, y - 16, left + width / 2, y - 1)
        picture.rectangle(left, y, width, high, kind)
        picture.text(left + 12, y + 18, name, "ink bold", size=14)
        for number, line in enumerate(lines):
            picture.text(left + 12, y + 36 + 16 * number, line, "muted", size=13)
        middles[name] = y + high / 2
        y += high + 16
    for x, (name, lines) in zip((left, left + 148), parts, strict=True):
        picture.arrow(x + 70, y - 16, x + 70, y - 1)
        picture.rectangle(x, y, 140, 78)
        picture.text(x + 12, y + 18, name, "ink bold", size=14)
        for number, line in enumerate(lines):
            picture.text(x + 12, y + 36 + 16 * number, line, "muted", size=13)
    top, end = middles["public functions"], middles["algorithm"]
    picture.line(left, top, left - 16, top, "blue", 'stroke-width="2.5"')
    picture.line(left - 16, top, left - 16, end, "blue", 'stroke-width="2.5"')
    picture.line(
        left - 16, end, left - 2, end, "blue", 'stroke-width="2.5" marker-end="url(#head)"'
    )
    picture.text(left - 24, (top + end) / 2 - 8, "fast path", "accent bold", "end", 13)
    for number, word in enumerate(("plain", "arrays")):
        picture.text(left - 24, (top + end) / 2 + 10 + 16 * number, word, "muted", "end", 13)
    picture.lines(
        12, y + 98, "The queue, algorithms, transports and kernels are compiled code.", size=12
    )
    return picture


def two_hosts() -> Drawing:
    """Draw who talks to whom in a job of two hosts with two ranks each."""
    picture = Drawing(
        594,
        "A job of two hosts: each launcher starts two ranks; all ranks meet in the store "
        "of rank 0; ranks on one host share memory, ranks on different hosts connect over TCP",
    )
    picture.text(12, 24, "Connections in a job of two hosts", "ink bold", size=15)
    tops = (40, 312)
    for host, y, high in ((0, tops[0], 212), (1, tops[1], 168)):
        picture.rectangle(10, y, 380, high, "pale edge", 10)
        picture.text(24, y + 22, f"host{host}", "ink bold", size=14)
        picture.rectangle(24, y + 44, 100, 54)
        picture.text(74, y + 75, "cydistrun", at="middle", size=13)
        picture.line(100, y + 44, 100, y + 30)
        picture.line(100, y + 30, 320, y + 30)
        for local, x in ((0, 152), (1, 272)):
            picture.arrow(x + 48, y + 30, x + 48, y + 43)
            picture.rectangle(x, y + 44, 96, 54)
            picture.text(x + 48, y + 67, f"rank {2 * host + local}", "ink bold", "middle", 13)
            picture.text(x + 48, y + 86, "train.py", "muted", "middle", 12)
            picture.arrow(x + 48, y + 100, x + 48, y + 122, both=True)
        picture.arrow(249, y + 71, 271, y + 71, both=True)
        picture.rectangle(152, y + 124, 216, 30, "warm edge")
        picture.text(260, y + 144, "shared memory of the host", at="middle", size=13)
    picture.rectangle(152, tops[0] + 168, 96, 30, "box edge")
    picture.text(200, tops[0] + 188, "store", at="middle", size=13)
    picture.text(256, tops[0] + 181, "in rank 0,", "muted", size=12)
    picture.text(256, tops[0] + 197, "only to meet", "muted", size=12)
    # Connections between the hosts.
    first, second = (y + 71 for y in tops)
    picture.arrow(84, first + 28, 84, second - 28, both=True)
    picture.text(76, 286, "launchers", "muted", "end", 12)
    picture.line(381, first, 381, second)
    picture.arrow(381, first, 369, first)
    picture.arrow(381, second, 369, second)
    picture.text(373, 279, "TCP", "ink bold", "end", 13)
    picture.text(373, 295, "or MPI", "muted", "end", 12)
    y = picture.lines(
        12, 502, "Every connection proves first that both sides know the job's secret.", size=13
    )
    picture.lines(
        12, y + 4, "Two ranks connect when a message between them needs it. A collective sends "
        "each byte once to each host, and ranks on one host pass it on through their memory.",
        size=13,
    )  # fmt: skip
    return picture


def timeout() -> Drawing:
    """Draw what happens on two ranks from a call to its timeout."""
    picture = Drawing(
        388,
        "Timeline of a timeout: rank 0 calls, waits, asks rank 1 what it does, and raises "
        "DistTimeoutError at the deadline; rank 1 is in a data loader",
    )
    picture.text(12, 24, "A call that times out after 2 s", "ink bold", size=15)

    def at(seconds: float) -> float:
        return 80 + 132 * seconds

    for second in (0, 1, 2):
        picture.line(at(second), 58, at(second), 282, "grid")
        picture.text(at(second), 52, f"{second} s", "muted", "middle", 12)
    for y, rank in ((100, "rank 0"), (226, "rank 1")):
        picture.text(12, y + 5, rank, "ink bold", size=14)
    picture.rectangle(at(0), 82, at(2) - at(0), 36, "box edge")
    picture.text(at(1), 105, "all_reduce waits for rank 1", at="middle", size=13)
    picture.rectangle(at(0) - 8, 208, 396 - at(0), 36, "warm edge")
    picture.text(at(1), 231, "in load_batch(): no all_reduce yet", at="middle", size=13)
    picture.arrow(at(0.06), 120, at(0.06), 206)
    picture.text(at(0.06) + 8, 142, "after 50 ms rank 0 asks", size=13)
    picture.text(at(0.06) + 8, 159, "rank 1 what it does", size=13)
    picture.line(at(2), 64, at(2), 288, "red", 'stroke-width="2"')
    picture.arrow(at(1.94), 206, at(1.94), 122)
    picture.text(at(1.94) - 8, 190, "stack of rank 1", "ink", "end", 13)
    picture.text(at(2), 304, "deadline", "bad bold", "middle", 13)
    picture.text(12, 328, "rank 0 raises DistTimeoutError, which names rank 1", "bad bold", size=13)
    picture.lines(
        12, 352, "The other members are notified, and raise the error in their next call.", size=13
    )
    return picture
