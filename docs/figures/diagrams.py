"""Diagrams: the layers of a call, a job of two hosts, and the timeline of a timeout."""

from __future__ import annotations

from drawing import Drawing


def layers() -> Drawing:
    """Draw what a call passes through, from the program to the memory."""
    rows = [
        ("your program", "dist.all_reduce(x)", "pale edge"),
        (
            "public functions",
            "torch.distributed's API: check arguments, pack strided arrays",
            "box edge",
        ),
        ("group", "tcp, mpi, nccl, inproc, torch:NAME, or a backend that you write", "box edge"),
        ("call queue", "order, deadline, and number of each call", "box edge"),
        ("algorithm", "ring, tree, direct ...: chosen by size and number of ranks", "box edge"),
    ]
    picture = Drawing(
        760,
        420,
        "Layers of a call: program, public functions, group, call queue, algorithm, then transport "
        "and kernels; the fast path leads from the public functions to the algorithm",
    )
    picture.text(20, 30, "One call, from the program to the memory", "ink bold", size=16)
    for number, (name, text, kind) in enumerate(rows):
        y = 50 + 58 * number
        picture.rectangle(150, y, 590, 44, kind)
        picture.text(166, y + 19, name, "ink bold", size=14)
        picture.text(166, y + 36, text, "muted", size=13)
        if number:
            picture.arrow(445, y - 14, 445, y - 1)
    for x, name, text in (
        (150, "transport", "shared memory, authenticated TCP, or MPI"),
        (455, "kernels", "sums in AVX-512, AVX2 or plain C"),
    ):
        picture.rectangle(x, 340, 285, 44)
        picture.text(x + 16, 359, name, "ink bold", size=14)
        picture.text(x + 16, 376, text, "muted", size=12)
        picture.arrow(x + 142, 326, x + 142, 339)
    picture.line(150, 130, 96, 130, "blue", 'stroke-width="2.5"')
    picture.line(96, 130, 96, 304, "blue", 'stroke-width="2.5"')
    picture.line(96, 304, 148, 304, "blue", 'stroke-width="2.5" marker-end="url(#head)"')
    picture.text(84, 208, "fast path", "accent bold", "end", 13)
    picture.text(84, 226, "plain arrays", "muted", "end", 12)
    picture.text(
        20, 408, "The queue, the algorithms, the transports and the kernels are compiled code.",
        "muted", size=12,
    )  # fmt: skip
    return picture


def two_hosts() -> Drawing:
    """Draw who talks to whom in a job of two hosts with two ranks each."""
    picture = Drawing(
        760,
        430,
        "A job of two hosts: each launcher starts two ranks; all ranks meet in the store "
        "of rank 0; ranks on one host share memory, ranks on different hosts connect over TCP",
    )
    picture.text(20, 30, "Who talks to whom in a job of two hosts", "ink bold", size=16)
    for host, x in ((0, 20), (1, 420)):
        picture.rectangle(x, 50, 320, 300, "pale edge", 10)
        picture.text(x + 16, 76, f"host{host}", "ink bold", size=15)
        picture.rectangle(x + 90, 62, 140, 42)
        picture.text(x + 160, 88, "cydistrun", at="middle")
        for local in (0, 1):
            left = x + 20 + 160 * local
            picture.rectangle(left, 150, 120, 62)
            picture.text(left + 60, 177, f"rank {2 * host + local}", "ink bold", "middle")
            picture.text(left + 60, 198, "train.py", "muted", "middle", 12)
            picture.arrow(x + 160 + (-30, 30)[local], 106, left + 60, 148)
        picture.arrow(x + 142, 181, x + 178, 181, both=True)
        picture.rectangle(x + 20, 244, 280, 40, "warm edge")
        picture.text(x + 160, 269, "shared memory of this host", at="middle", size=13)
        for local in (0, 1):
            picture.arrow(x + 80 + 160 * local, 214, x + 80 + 160 * local, 242, both=True)
    picture.rectangle(44, 300, 116, 36, "box edge")
    picture.text(102, 323, "store", at="middle", size=13)
    picture.text(168, 323, "in rank 0: only to meet", "muted", size=12)
    # Connections between the hosts.
    picture.arrow(252, 83, 508, 83, both=True)
    picture.text(380, 76, "launchers", "muted", "middle", 12)
    picture.arrow(322, 181, 438, 181, both=True)
    picture.text(380, 168, "TCP", "ink bold", "middle", 13)
    picture.text(380, 202, "or MPI", "muted", "middle", 12)
    picture.text(
        20,
        380,
        "Every connection proves first that both sides know the job's secret.",
        "muted",
        size=13,
    )
    picture.text(
        20,
        402,
        "Two ranks connect when a message between them needs it. A collective sends each byte",
        "muted",
        size=13,
    )
    picture.text(
        20,
        420,
        "once to each host, and ranks on one host pass it on through their memory.",
        "muted",
        size=13,
    )
    return picture


def timeout() -> Drawing:
    """Draw what happens on two ranks from a call to its timeout."""
    picture = Drawing(
        760,
        360,
        "Timeline of a timeout: rank 0 calls, waits, asks rank 1 what it does, and raises "
        "DistTimeoutError at the deadline; rank 1 is in a data loader",
    )
    picture.text(20, 30, "A call that times out after 2 s", "ink bold", size=16)

    def at(seconds: float) -> float:
        return 130 + 250 * seconds

    for second in (0, 1, 2):
        picture.line(at(second), 56, at(second), 292, "grid")
        picture.text(at(second), 50, f"{second} s", "muted", "middle", 12)
    for y, rank in ((100, "rank 0"), (236, "rank 1")):
        picture.text(20, y + 5, rank, "ink bold", size=14)
    picture.rectangle(at(0), 82, at(2) - at(0), 36, "box edge")
    picture.text(at(1.25), 105, "all_reduce waits for rank 1", at="middle", size=13)
    picture.rectangle(at(0) - 30, 218, at(2.35) - at(0) + 30, 36, "warm edge")
    picture.text(at(1.2), 241, "in load_batch(): has not called all_reduce", at="middle", size=13)
    picture.arrow(at(0.05), 120, at(0.05), 216)
    picture.text(at(0.05) + 8, 150, "after 50 ms rank 0 asks", size=12)
    picture.text(at(0.05) + 8, 167, "rank 1 what it does", size=12)
    picture.line(at(2), 62, at(2), 300, "red", 'stroke-width="2"')
    picture.text(at(2), 318, "deadline", "bad bold", "middle", 13)
    picture.arrow(at(1.96), 216, at(1.96), 122)
    picture.text(at(1.96) - 8, 180, "stack of rank 1", "ink", "end", 12)
    picture.text(at(2) + 12, 96, "DistTimeoutError", "bad bold", size=12)
    picture.text(at(2) + 12, 113, "names rank 1", "muted", size=12)
    picture.text(
        20,
        348,
        "All other members are notified at once, and raise the error in their next call.",
        "muted",
        size=12,
    )
    return picture
