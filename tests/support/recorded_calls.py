"""Collectives whose messages are recorded and not sent."""

from cydist.bench.schedules import FROM_ROOT, TO_ROOT
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


def ranks_that_wait_for_ever(logs, hosts):
    """Return the ranks that never end if no send ends before its receive is posted.

    As cydist.bench.schedules.play, without clocks: which rank runs first changes no end.
    """
    partners = _partners(logs)
    members = {host: [r for r, each in enumerate(hosts) if each == host] for host in set(hosts)}
    at, met = [0] * len(logs), [0] * len(logs)
    meetings = {}  # (host, number) -> ranks that have come
    blocked = [[] for _ in logs]  # (line, rank) that waits until this rank is past that line
    ready = list(range(len(logs)))

    def meet(rank, root, code):
        """Come to a collective of the ranks of a host; return whether this rank goes on."""
        collective, host = tuning_table.COLLECTIVES[code], hosts[rank]
        come = meetings.setdefault((host, met[rank]), set())
        if rank not in come:
            come.add(rank)
            if len(come) == len(members[host]) or (collective in FROM_ROOT and rank == root):
                ready.extend(come - {rank})
        if collective in FROM_ROOT:
            goes = root in come
        else:
            goes = (collective in TO_ROOT and rank != root) or len(come) == len(members[host])
        met[rank] += goes
        return goes

    while ready:
        rank = ready.pop()
        log, (others, lines), line = logs[rank], partners[rank], at[rank]
        while line < len(log):
            what, peer, step, _, request = log[line]
            if what == "wait":
                other, posted = others[request], lines[request]
                if other < 0:
                    break
                if at[other] <= posted:
                    blocked[other].append((posted, rank))
                    break
            elif what == "together" and not meet(rank, peer, step):
                break
            line += 1
        at[rank] = line
        ready += [other for posted, other in blocked[rank] if posted < line]
        blocked[rank] = [each for each in blocked[rank] if each[0] >= line]
    return [rank for rank, log in enumerate(logs) if at[rank] < len(log)]


def _partners(logs):
    """Return for each rank two lists: the rank, and its line, that the request of a line meets.

    -1 if there is none. The first send of a tag between two ranks meets the first receive.
    """
    found = [([-1] * len(log), [-1] * len(log)) for log in logs]
    posted = {}  # of ends without a partner so far: [(rank, line)]
    for rank, log in enumerate(logs):
        ranks, lines = found[rank]
        for line, (what, peer, step, _, _) in enumerate(log):
            if what not in ("send", "recv"):
                continue
            sends = what == "send"
            ends = posted.get((not sends, peer, rank, step))
            if not ends:
                posted.setdefault((sends, rank, peer, step), []).append(line)
                continue
            other = ends.pop(0)
            if not ends:
                del posted[not sends, peer, rank, step]
            ranks[line], lines[line] = peer, other
            found[peer][0][other], found[peer][1][other] = rank, line
    return found
