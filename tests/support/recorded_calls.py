"""Collectives whose messages are recorded and not sent."""

from cydist.tuning import table as tuning_table

CODES = {name: code for code, name in enumerate(tuning_table.COLLECTIVES)}
UNIT = 16  # bytes of an element


def blocks(collective, p, rank, count, root, make):
    """The inputs and the outputs of a rank; `make(elements)` makes one block."""
    one, many = [make(count)], [make(count) for _ in range(p)]
    at_root = rank == root
    return {
        "broadcast": (one, one),
        "all_reduce": (one, [make(count)]),
        "reduce": (one, [make(count)] if at_root else []),
        "all_gather": (one, many),
        "gather": (one, many if at_root else []),
        "scatter": (many if at_root else [], one),
        "reduce_scatter": (many, one),
        "all_to_all": (many, [make(count) for _ in range(p)]),
        "barrier": ([], []),
        "scan": (one, [make(count)]),
        "exscan": (one, [make(count)]),
    }[collective]


def unfinished_requests(log):
    """Return the lines that post a request which no line waits for, or several do."""
    posted = [i for i, line in enumerate(log) if line[0] in ("send", "recv")]
    waited = sorted(line[4] for line in log if line[0] == "wait")
    return sorted({*posted} ^ {*waited}) or waited[len({*waited}) :]
