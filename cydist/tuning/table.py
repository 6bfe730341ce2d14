"""The choice of an algorithm for each call: one table, as data.

Measurements on this machine (`tuning/file.py`) take precedence over it, and the user's settings
over both.

All ranks of a group must choose the same algorithm, so a choice depends only on values that all of
them know. In particular it does not depend on the sizes of an uneven gather, scatter or all_to_all.
The choice travels in the fingerprint of every call: ranks that differ raise MismatchError.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache, partial
from itertools import pairwise
from typing import NamedTuple

from cydist import config
from cydist._native import COLLECTIVE_NAMES, NEED_BITS, TRAIT_BITS, algorithms, forget_choices

KiB = 1024
MiB = 1024 * KiB

# Possible needs of an algorithm; see algorithm_table.pxd.
WINDOWS = NEED_BITS["WINDOWS"]
COMMUTATIVE = NEED_BITS["COMMUTATIVE"]
POWER_OF_TWO = NEED_BITS["POWER_OF_TWO"]
EVEN_BLOCKS = NEED_BITS["EVEN_BLOCKS"]
NATIVE = NEED_BITS["NATIVE"]
REACHABLE = NEED_BITS["REACHABLE"]
FOUND_IN_CALL = NEED_BITS["FOUND_IN_CALL"]
HOSTS = NEED_BITS["HOSTS"]
CONSECUTIVE = NEED_BITS["CONSECUTIVE"]
# Collectives by number. The others have no algorithms: they are made of messages.
COLLECTIVES = tuple(name for name in COLLECTIVE_NAMES if name != "monitored_barrier")

# The needs of every algorithm: (collective, name) -> Needs.
NEEDS = {(COLLECTIVES[code], name): needs for _, name, code, needs, _ in algorithms()}


def _with_trait(trait: str) -> frozenset[tuple[str, str]]:
    bit = TRAIT_BITS[trait]
    return frozenset(
        (COLLECTIVES[code], name) for _, name, code, _, traits in algorithms() if traits & bit
    )


# (collective, name) of those that reduce in rank order with one rounding, so they give the same
# bits everywhere.
ONE_ROUNDING = _with_trait("ONE_ROUNDING")
# Those that choose during a job between "direct" and their fallback.
ADAPTIVE = _with_trait("ADAPTIVE")
# Collectives with algorithms that copy from array to array.
DIRECT = frozenset(collective for (collective, _), needs in NEEDS.items() if needs & REACHABLE)
# Former names of algorithms, which users' settings and tuning files may contain.
FORMER_NAMES = {"either": "adaptive"}
REDUCING = frozenset({"all_reduce", "reduce", "reduce_scatter", "scan", "exscan"})

# No rank knows all blocks' sizes before these calls, so the sizes do not count.
UNSIZED = frozenset({"gather", "scatter"})
# No algorithm cuts the messages of these into segments.
UNCUT = UNSIZED | {"all_to_all", "barrier"}

DEFAULT_SEGMENT_BYTES = 256 * KiB
# Between hosts over a library's messages. So much travels with its header, and no rank waits for
# the other's answer before it sends the bytes.
LIBRARY_SEGMENT_BYTES = 32 * KiB

SCATTERED = "scattered"
_PART = r"[1-9]\d{0,6}(?:x[1-9]\d{0,6})?"
PLACEMENT = re.compile(rf"({_PART}(?:\+{_PART})*)(?: {SCATTERED})?", re.ASCII)


class Rule(NamedTuple):
    """One row: this algorithm, if its needs are met and the call is within the limits.

    Attributes:
        most_bytes: A power of two; limits the whole array that a call reduces or broadcasts, or all
            blocks together.
        above_bytes: A power of two; the call has more bytes.
        least_ranks, most_ranks, power_of_two: Of the group.
        library: The required name of the library below; "": any.
        between_hosts: Only where each rank is on a host of its own, as those that a hierarchical
            algorithm lets talk between hosts; False: only elsewhere; None: anywhere.
        constant: Why `python -m cydist.bench --tune` does not measure it; "": it does.
    """

    collective: str
    name: str
    most_bytes: int | None = None
    above_bytes: int = 0
    least_ranks: int = 1
    most_ranks: int | None = None
    power_of_two: bool = False
    library: str = ""
    between_hosts: bool | None = None
    constant: str = ""

    def fits(
        self, size_class: int, ranks: int, library: str = "", between_hosts: bool = False
    ) -> bool:
        """Return whether a call of at most 2**size_class bytes is within the limits."""
        return (
            self.library in ("", library)
            and self.between_hosts in (None, between_hosts)
            and 1 << size_class > self.above_bytes
            and (self.most_bytes is None or 1 << size_class <= self.most_bytes)
            and self.least_ranks <= ranks
            and (self.most_ranks is None or ranks <= self.most_ranks)
            and (not self.power_of_two or ranks & (ranks - 1) == 0)
        )


# Collectives that the library below a link may have itself.
IN_LIBRARIES = tuple(collective for (collective, _), needs in NEEDS.items() if needs & NATIVE)
# Above this many bytes cydist's algorithms are faster over the library's messages. On two ranks,
# Open MPI 5.0 took two to ten times as long for a reduce_scatter, MPICH 5.0 twice; for a reduce 1.6
# to 5 times from 16 KiB on, and Open MPI for an all_reduce 1.6 to 3 times from 1 MiB on, MPICH 1 to
# 1.3 times. With four ranks on two cores Open MPI took 1.2 to 2 times as long for both.
MOST_OF_LIBRARIES = {"reduce_scatter": 32 * KiB, "reduce": 8 * KiB, "all_reduce": 512 * KiB}
# On two ranks cydist's algorithms take one message each way, which carries its fingerprint; the
# library's all_reduce takes a further message for it. Up to this many bytes cydist's took 0.4 to
# 0.9 of the library's time with Open MPI 5.0 and MPICH 5.0; a barrier 0.6, and a reduce_scatter 0.3
# to 0.75, at all sizes. In a reduce the sending rank would receive nothing and miss a mismatch, so
# it uses the library's. Calls that only move data take one lighter message each way there, too:
# src/algorithms/mpi/mpi_pairwise.pyx.
MOST_OF_OURS_FOR_TWO = {
    "all_reduce": 4 * KiB,
    "all_gather": 0,
    "all_to_all": 0,
    "broadcast": 0,
    "reduce": 0,
}
# Three ranks and more leave short calls to the library, which is best under Open MPI. MPICH 5.0
# took 1.3 to 2.9 times as long as cydist's algorithms for these, with four ranks on two cores.
MOST_OF_OURS_IN_MPICH = {
    "all_reduce": ("doubling", 16 * KiB), "all_gather": ("bruck", 16 * KiB),
    "reduce_scatter": ("pairwise", 32 * KiB), "all_to_all": ("pairwise", 16 * KiB),
    "barrier": ("dissemination", None),
}  # fmt: skip
# Open MPI 5.0 writes beyond the end of an array if a rank of this host that disagrees about the
# call has sent more than the array holds, and more than this many bytes. So all ranks agree before
# it begins a longer call; cydist's algorithms send the size first. With three and four ranks on two
# cores cydist's took 0.5 to 0.75 of the time of both for a broadcast of 16 and 64 KiB and 0.8 to
# 1.1 for an all_gather, beyond that 0.7 to 1.3 and 1.0 to 1.35; and for an all_to_all of 16 KiB to
# 1 MiB 0.65 to 0.9. On two ranks cydist's take 0.6 of its time for an all_reduce.
SAFE_IN_OPEN_MPI = 4 * KiB
THE_LIBRARYS = "the library chooses among its own"
ours_in_open_mpi = partial(
    Rule, above_bytes=SAFE_IN_OPEN_MPI, library="Open MPI", constant=THE_LIBRARYS
)
OURS_IN_OPEN_MPI = (
    ours_in_open_mpi("all_reduce", "doubling", 32 * KiB),
    ours_in_open_mpi(
        "all_reduce", "halving_doubling", MOST_OF_LIBRARIES["all_reduce"], power_of_two=True
    ),
    ours_in_open_mpi("all_reduce", "ring", MOST_OF_LIBRARIES["all_reduce"]),
    ours_in_open_mpi("reduce", "tree", MOST_OF_LIBRARIES["reduce"]),
    ours_in_open_mpi("reduce_scatter", "bruck", MOST_OF_LIBRARIES["reduce_scatter"], least_ranks=5),
    ours_in_open_mpi("reduce_scatter", "pairwise", MOST_OF_LIBRARIES["reduce_scatter"]),
    ours_in_open_mpi("broadcast", "tree", 64 * KiB, least_ranks=3),
    ours_in_open_mpi("all_gather", "bruck", 64 * KiB, least_ranks=3),
    ours_in_open_mpi("all_to_all", "pairwise", least_ranks=3),
)
# Where each rank has a host of its own, the library takes a further message for each call, too,
# and it crosses the network. With two to four hosts that were namespaces on two cores, cydist's
# took 0.1 to 0.6 of the time of both libraries for a broadcast and a reduce up to 32 KiB, 0.4 to
# 0.8 for an all_reduce up to 32 KiB and 0.3 to 1.25 for a reduce_scatter, mostly below 0.8. For an
# all_gather and an all_to_all on three and four hosts they took 0.5 to 1.0 up to 64 KiB. A longer
# all_gather took 0.8 to 0.9 with Open MPI and 1.1 to 1.6 with MPICH, a longer broadcast 0.75 to
# 1.3 and 0.9 to 1.2. Two ranks that only move data have one message each way in the library's too.
not_between_hosts = partial(Rule, between_hosts=False, constant=THE_LIBRARYS)
between_hosts_only = partial(Rule, between_hosts=True, constant=THE_LIBRARYS)
LIBRARIES_BETWEEN_HOSTS = (
    between_hosts_only("broadcast", "native", above_bytes=32 * KiB),
    between_hosts_only("all_gather", "native", most_ranks=2),
    between_hosts_only("all_gather", "native", above_bytes=64 * KiB),
    between_hosts_only("all_to_all", "native", most_ranks=2),
    between_hosts_only(
        "all_reduce", "native", MOST_OF_LIBRARIES["all_reduce"], above_bytes=32 * KiB, least_ranks=3
    ),
)

# Where some ranks share a host, one of them talks to the other hosts for all up to this many bytes;
# above, each does for its part. With 4 and 6 ranks on two cores, on two and three hosts that were
# namespaces, in blocks and by turns, leaders took 0.6 to 1.0 of the time of lanes at 16 KiB for an
# all_reduce, all_gather, reduce_scatter, reduce, all_to_all and scan. Lanes took 0.55 to 1.05 of
# the time of leaders at 64 KiB and 0.5 to 0.9 at 128 KiB for the first three, and 0.8 to 0.95 and
# 0.5 to 0.6 for an all_to_all: each rank sends its own block without a copy. The same holds over
# Open MPI's messages: 0.5 to 0.75 at 64 KiB, 0.45 to 0.7 at 128 KiB. For a broadcast and a reduce
# lanes took 0.85 to 1.35 of the time of leaders from 64 to 512 KiB. Hosts with more cores gain more
# from lanes. Above their limits a scan and an exscan send the fewest bytes. cydist checks each
# call, and MPI's own need a message more for it: with it they took 1.5 to 13 times as long as
# leaders up to 256 KiB over Open MPI. Over MPICH nothing was measured.
MOST_OF_LEADERS = {
    "broadcast": 512 * KiB, "all_reduce": 32 * KiB, "reduce": 512 * KiB,
    "all_gather": 32 * KiB, "reduce_scatter": 32 * KiB, "all_to_all": 32 * KiB,
    "scan": 32 * KiB, "exscan": 32 * KiB,
}  # fmt: skip
# From so many ranks on leaders carry 64 KiB, too. With five, six and eight ranks on two and three
# hosts they took 0.6 to 0.85 of the time of lanes, and 0.75 to 2.5 at 128 KiB; 0.55 to 0.85 and 0.8
# to 1.0 for an all_to_all. With five ranks an all_reduce took 0.8 to 1.3. Over Open MPI's and
# MPICH's messages six ranks took 0.7 to 0.95 at 64 KiB. With 1 Gbit/s all took the same time.
LEAST_RANKS_AT_64_KIB = {
    "all_reduce": 6, "all_gather": 5, "reduce_scatter": 5, "all_to_all": 5,
}  # fmt: skip

# Over a library's messages the pieces of a broadcast by lanes travel with their headers where the
# whole would not: lanes took 0.45 to 0.8 of the time of leaders from 64 KiB to 512 KiB over Open
# MPI, and 0.6 to 1.4 over MPICH. An all_reduce by leaders took 0.65 and 0.85 of the time of lanes
# at 128 and 256 KiB over Open MPI, and 1.4 to 2.4 over MPICH.
HOSTS_OVER_LIBRARIES = (
    *(
        Rule("broadcast", "lanes", above_bytes=32 * KiB, library=each, constant=THE_LIBRARYS)
        for each in ("Open MPI", "MPICH")
    ),
    Rule(
        "all_reduce", "leaders", 256 * KiB, above_bytes=64 * KiB, library="Open MPI",
        constant=THE_LIBRARYS,
    ),
)  # fmt: skip

ORDER_MATTERS = "for reductions that do not commute, which are those of the schedules' tests"
OUT_OF_REACH = "in place of those that access arrays, where a call finds that it cannot"
WHOLE_CALLS = "--tune measures whole calls"
MANY_RANKS = "more ranks than were measured: by steps and bytes"

# The last of p ranks in a ring has a broadcast after p - 2 segments more than the array's, and a
# tree's root sends the array log2 p times. An all_reduce takes 2 (p - 1) steps there, and as many
# bytes in 2 log2 p steps of halving_doubling. So a ring is worth its steps only for so many bytes.
# These are the most ranks, and the bytes that it needs. With 16 ranks on two cores halving_doubling
# took 0.5 to 0.9 of the time of a ring up to 1 MiB, and as long at 2 and 4 MiB.
RINGS = (
    (8, 512 * KiB), (32, 2 * MiB), (128, 8 * MiB), (512, 32 * MiB), (2048, 128 * MiB),
    (8192, 512 * MiB),
)  # fmt: skip
# Along a chain each rank sends an array once, where dissemination sends it log2 p times. On 3, 4
# and 8 hosts a scan took 0.51 to 0.53, 0.44 to 0.53 and 0.29 to 0.34 of the time with 1 Gbit/s,
# from 8 and 32 KiB on. Without a limit it took 0.67 to 0.98, 0.64 to 0.87 and 0.38 to 0.58. Such
# calls followed each other. Over Open MPI's messages it took 0.35 and 0.5 of it at 64 KiB, and 1.1
# to 1.5 above; over MPICH's it was not measured, and is not taken.
CHAINS = ((4, 16 * KiB), (8, 64 * KiB), *RINGS[1:])
MOST_MEASURED = 32
IN_RANK_ORDER = "few algorithms give the bits of rank order; chosen by their steps and bytes"

# The first row that fits is taken. Rows that need windows come first, then those that need a
# library. A call that finds that it cannot run so, because it cannot reach the ranks' arrays or
# because the library does not have it, takes the first row that needs neither: see `fallback`.
# If there are windows, short arrays go through them. For longer ones the best choice depends on
# where the host has placed the cores, and on whether ranks share them. In one job with alternating
# algorithms (CYDIST_ALGORITHM), on two cores and for 64 KiB to 1 MiB, direct took 0.2 to 0.8 of the
# time of windows while the cores were far apart, and 0.9 to 2.4 while they were near. Where four
# and eight ranks shared these, it took 0.4 to 2.4 up to 64 MiB. So "adaptive" measures it.
# The rows for messages on 2 to 4 ranks are the results of `python -m cydist.bench --tune
# --transport tcp --ranks 2,4` on two cores when waits began to spin at sockets. Those for more
# ranks are estimates from steps and bytes.
# Two ranks that read each other's data write where they have just read (see slot_of), so windows
# are faster up to longer arrays. In an all_reduce they took 0.3 to 0.5 of the time of direct up to
# 64 KiB, and 0.5 to 0.95 up to 4 MiB.
# Arrays that both ranks can access where they are (empty_shared) gain from direct from 64 KiB on,
# which "adaptive" notices.
FLAT_FOR_TWO = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")

TABLE = (
    *(Rule(each, "flat", 64 * KiB, most_ranks=2) for each in FLAT_FOR_TWO),
    Rule("all_reduce", "adaptive", most_ranks=2),
    Rule("all_reduce", "flat", most_bytes=4 * KiB),
    Rule("all_reduce", "staged", most_bytes=128 * KiB, least_ranks=3),
    *(
        Rule(collective, "flat", most_bytes=most_bytes, least_ranks=least_ranks)
        for collective in sorted(DIRECT - UNSIZED - {"all_reduce"})
        for most_bytes, least_ranks in (
            (16 * KiB, 1),
            (64 * KiB, 3),
        )
    ),
    *(Rule(collective, "adaptive") for collective in sorted(DIRECT - UNSIZED)),
    *(Rule(collective, "direct") for collective in sorted(UNSIZED)),
    Rule("all_reduce", "flat", most_ranks=2, constant=OUT_OF_REACH),
    *(
        Rule(each, "staged" if each == "all_reduce" else "flat", constant=OUT_OF_REACH)
        for each in sorted(DIRECT)
    ),
    Rule("barrier", "flat"),
    Rule("barrier", "leaders"),
    *HOSTS_OVER_LIBRARIES,
    *(Rule(each, "leaders", most_bytes) for each, most_bytes in MOST_OF_LEADERS.items()),
    *(
        Rule(each, "leaders", 64 * KiB, least_ranks=ranks)
        for each, ranks in LEAST_RANKS_AT_64_KIB.items()
    ),
    *(Rule(each, "lanes") for each in MOST_OF_LEADERS),
    *(Rule(each, "leaders") for each in sorted(UNSIZED)),
    *(
        Rule(each, ours, most, least_ranks=3, most_ranks=8, library="MPICH", constant=THE_LIBRARYS)
        for each, (ours, most) in MOST_OF_OURS_IN_MPICH.items()
    ),
    *OURS_IN_OPEN_MPI,
    *(
        not_between_hosts(each, "native", MOST_OF_LIBRARIES.get(each), least_ranks=3)
        for each in IN_LIBRARIES
    ),
    *(
        not_between_hosts(each, "native", MOST_OF_LIBRARIES.get(each), above_bytes=ours)
        for each, ours in MOST_OF_OURS_FOR_TWO.items()
    ),
    *LIBRARIES_BETWEEN_HOSTS,
    # A tree's root sends the array to several hosts. With 1 Gbit/s, calls that follow each other
    # took 0.50 to 0.53 of the time of a tree from 64 to 256 KiB, on three hosts of one and two
    # ranks and on four of one. Without a limit, where all hosts shared two cores, they took 1.2 to
    # 2.0 of it. A few segments do not fill one of five hosts and more.
    Rule(
        "broadcast",
        "ring",
        above_bytes=32 * KiB,
        least_ranks=3,
        most_ranks=4,
        between_hosts=True,
        constant=WHOLE_CALLS,
    ),
    # Between two ranks a chain only cuts the array. A tree took 0.64 to 0.70 of its time from 1 to
    # 16 MiB without a limit, as long with 1 Gbit/s, and 0.84 to 0.89 over TCP on one host.
    Rule("broadcast", "tree", most_ranks=4),
    # Three hosts double in three steps, one after another, and one of them sends the array twice.
    # With 1 Gbit/s ordered_scatter took 0.57 to 0.68 of that time from 32 to 256 KiB, and 1.0 of a
    # ring's. Without a limit it took 1.3 to 2.1 of it at 32 and 64 KiB, and 0.85 to 1.1 of a ring's
    # above: it has more messages, and all hosts shared two cores.
    Rule(
        "all_reduce",
        "ordered_scatter",
        256 * KiB,
        above_bytes=16 * KiB,
        least_ranks=3,
        most_ranks=3,
        between_hosts=True,
        constant=WHOLE_CALLS,
    ),
    Rule("all_reduce", "doubling", most_bytes=32 * KiB),
    Rule("all_reduce", "halving_doubling", most_ranks=4, power_of_two=True),
    *(
        Rule(
            each,
            "ring",
            above_bytes=more_than,
            most_ranks=ranks,
            constant=MANY_RANKS if ranks > MOST_MEASURED else "",
        )
        for each in ("broadcast", "all_reduce")
        for ranks, more_than in RINGS
    ),
    Rule("broadcast", "tree"),
    Rule("all_reduce", "halving_doubling", power_of_two=True),
    Rule("all_reduce", "ring"),
    Rule("all_reduce", "halving_doubling", constant=ORDER_MATTERS),
    Rule("reduce", "tree"),
    Rule("all_gather", "bruck", most_bytes=8 * KiB, most_ranks=2),
    Rule("all_gather", "bruck", most_bytes=32 * KiB, least_ranks=3),
    Rule("all_gather", "ring"),
    Rule("gather", "linear"),
    Rule("scatter", "linear"),
    # With 5, 8 and 16 ranks on two cores bruck took 0.9, 0.6 and 0.4 of the time of pairwise up to
    # 128 KiB; at 512 KiB and more ring was as fast as both, or faster. Measured over TCP only.
    Rule("reduce_scatter", "pairwise", least_ranks=3, most_ranks=4),
    Rule("reduce_scatter", "pairwise", most_bytes=512 * KiB, most_ranks=2),
    Rule("reduce_scatter", "bruck", most_bytes=128 * KiB),
    Rule("reduce_scatter", "ring"),
    Rule("reduce_scatter", "ordered", constant=ORDER_MATTERS),
    Rule("all_to_all", "bruck", most_bytes=4 * KiB, least_ranks=5),
    Rule("all_to_all", "pairwise"),
    Rule("barrier", "dissemination"),
    *(
        Rule(each, "dissemination", library=library, constant=THE_LIBRARYS)
        for each in ("scan", "exscan")
        for library in ("Open MPI", "MPICH")
    ),
    *(
        Rule(
            each,
            "chain",
            above_bytes=more_than,
            least_ranks=3,
            most_ranks=ranks,
            constant=MANY_RANKS if ranks > MOST_MEASURED else "",
        )
        for each in ("scan", "exscan")
        for ranks, more_than in CHAINS
    ),
    Rule("scan", "dissemination"),
    Rule("exscan", "dissemination"),
)

# With CYDIST_DETERMINISTIC, these replace the rows above whose algorithm is not in ONE_ROUNDING.
DETERMINISTIC_TABLE = (
    Rule("all_reduce", "ordered", most_bytes=4 * KiB, constant=IN_RANK_ORDER),
    *(
        Rule(collective, name, constant=IN_RANK_ORDER)
        for collective, name in (
            ("all_reduce", "ordered_scatter"), ("reduce", "ordered"), ("reduce_scatter", "ordered"),
            ("scan", "ordered"), ("exscan", "ordered"),
        )
    ),
)  # fmt: skip


# Measurements, by (collective, ranks, windows, placement) and by (ranks, windows, placement).
_tuned: Mapping[tuple[str, int, bool, str], Sequence[Rule]] = {}
_segments: Mapping[tuple[int, bool, str], int] = {}


def choose(
    collective: str,
    nbytes: int,
    ranks: int,
    windows: bool,
    *,
    even: bool,
    commutative: bool,
    library: str = "",
    hosts: bool = False,
    consecutive: bool = False,
    placement: str = "",
    between_hosts: bool = False,
) -> str:
    """Return the name of the algorithm for a call.

    Args:
        nbytes: Of the whole array, or of all blocks together, if every rank knows it; else 0.
        windows: Whether the ranks can access each other's memory.
        even: Whether all ranks know that all blocks have the same size.
        library: The name of the library below that has the group, or "".
        hosts: Whether the ranks are on several hosts, and some of them share one.
        consecutive: Whether, besides, the ranks on each host are consecutive.
        placement: How the ranks are spread over hosts, as `placement_of` says it.
        between_hosts: Whether it is a part of a larger call, between one rank of each host. A group
            with a placement and without `hosts` is alike.

    Raises ValueError if CYDIST_ALGORITHM names an unknown algorithm.
    """
    size_class = _size_class(nbytes)
    return _chosen(
        collective, size_class, ranks, windows, even, commutative, library, hosts=hosts,
        consecutive=consecutive, placement=placement,
        between_hosts=between_hosts or (placement != "" and not hosts),
    )  # fmt: skip


def placement_of(hosts: Iterable[object]) -> str:
    """Return how ranks are spread over hosts, as a key of measurements; "" on one host.

    "3+1" has three ranks on a host and one on another, "2x4" four on each of two hosts. The order
    of the hosts makes no difference. "scattered" follows where some host's ranks are not
    consecutive, as in turn.

    Args:
        hosts: The host of each rank.
    """
    hosts = list(hosts)
    ranks = Counter(hosts)
    if len(ranks) < 2:
        return ""
    sizes = Counter(ranks.values())
    text = "+".join(
        f"{sizes[size]}x{size}" if sizes[size] > 1 else f"{size}"
        for size in sorted(sizes, reverse=True)
    )
    changes = sum(one != other for one, other in pairwise(hosts))
    return text if changes == len(ranks) - 1 else f"{text} {SCATTERED}"


def ranks_in(placement: str) -> int:
    """Return the number of ranks of a placement. Raises ValueError if it is none of several
    hosts."""
    match = PLACEMENT.fullmatch(placement)
    parts = [part.partition("x") for part in match[1].split("+")] if match else []
    counts = [(int(count), int(size)) if size else (1, int(count)) for count, _, size in parts]
    if sum(count for count, _ in counts) < 2:
        raise ValueError(f"{placement[:40]!r} is no placement on several hosts, such as 3+1 or 2x4")
    return sum(count * size for count, size in counts)


def fallback(
    collective: str, name: str, nbytes: int, ranks: int, *, even: bool, commutative: bool
) -> str:
    """Return the name of the algorithm for a call that finds that algorithm `name` cannot run it.

    It goes through windows if that one does. The other arguments are those of `choose`. Returns ""
    for an algorithm that always can.
    """
    needs = NEEDS[collective, name]
    if not needs & FOUND_IN_CALL:
        return ""
    windows = needs & WINDOWS != 0
    size_class = _size_class(nbytes)
    return _chosen(collective, size_class, ranks, windows, even, commutative, "", reachable=False)


def _size_class(nbytes: int) -> int:
    return (nbytes - 1).bit_length() if nbytes > 1 else 0


def choose_for_equal_blocks(
    collective: str, nbytes: int, ranks: int, windows: bool, library: str = "", *,
    hosts: bool = False, consecutive: bool = False, placement: str = "",
) -> str:  # fmt: skip
    """Return the same for blocks of one size, if that is known before the call."""
    known = collective not in UNSIZED
    return choose(
        collective, nbytes if known else 0, ranks, windows,
        even=known, commutative=True, library=library, hosts=hosts, consecutive=consecutive,
        placement=placement,
    )  # fmt: skip


def leaves_to_library(collective: str, ranks: int) -> bool:
    """Return whether a library below may serve such a call, regardless of size and speed: not if
    the settings demand one of cydist's algorithms."""
    able = candidates(collective, ranks, False, library="any")
    wanted = forced().get(collective)
    in_order = config.DETERMINISTIC.is_on() and collective in REDUCING
    return "native" in able and not in_order and (wanted == "native" or wanted not in able)


@lru_cache(maxsize=1)
def check() -> None:
    """Raise ValueError for invalid settings, before a call that they affect."""
    forced()
    segment_bytes()


def use_rules(
    rules: Mapping[tuple[str, int, bool, str], Sequence[Rule]],
    segments: Mapping[tuple[int, bool, str], int],
) -> None:
    """Try these rules before the table's from now on. They must be equal on all ranks.

    Args:
        rules: By collective, number of ranks, whether the ranks can access each other's memory,
            and placement (see `placement_of`).
        segments: The unit of pipelining in bytes, by ranks, access to memory, and placement.
    """
    global _tuned, _segments
    if (rules, segments) == (_tuned, _segments):
        return  # other ranks may be threads of this process in the middle of a call
    _tuned, _segments = rules, segments
    reload()


def reload() -> None:
    """Read the settings again. They are cached because every collective needs them."""
    check.cache_clear()
    _chosen.cache_clear()
    forget_choices()
    segment_bytes.cache_clear()


@lru_cache(maxsize=4096)
def _chosen(
    collective: str,
    size_class: int,
    ranks: int,
    windows: bool,
    even: bool,
    commutative: bool,
    library: str,
    reachable: bool = True,
    hosts: bool = False,
    consecutive: bool = False,
    placement: str = "",
    between_hosts: bool = False,
) -> str:
    able = candidates(
        collective, ranks, windows, even=even, commutative=commutative, library=library,
        reachable=reachable, hosts=hosts, consecutive=consecutive,
    )  # fmt: skip
    name = forced().get(collective)
    # A forced algorithm that cannot run here leaves the call to the table.
    if name in able:
        return name
    for rule in rules(collective, ranks, windows, library, hosts=hosts, placement=placement):
        if rule.fits(size_class, ranks, library, between_hosts) and rule.name in able:
            return rule.name
    raise LookupError(f"no algorithm for {collective} on {ranks} ranks")


def chosen(ranks: int, hosts: bool = False, placement: str = "") -> str:
    """Return what decides on the algorithms of groups of this many ranks, for logs."""
    places = ("",) if not placement else (placement,) if hosts else (placement, "")
    groups = [(size, where) for _, size, _, where in _tuned]
    groups += [(size, where) for size, _, where in _segments]
    measured = [where for size, where in groups if size == ranks and where in places]
    words = ["the shipped table"]
    if any(measured):
        words = [f"measured on hosts with {placement} ranks"]
    elif measured:
        words = ["measured on rank 0's host"]
    if names := forced():
        pairs = ",".join(f"{collective}:{name}" for collective, name in names.items())
        words.append(f"{config.ALGORITHM.names[0]}={pairs}")
    if config.DETERMINISTIC.is_on():
        words.append("in rank order with one rounding")
    return ", ".join(words)


def candidates(
    collective: str,
    ranks: int,
    windows: bool,
    *,
    even: bool = True,
    commutative: bool = True,
    library: str = "",
    reachable: bool = True,
    hosts: bool = False,
    consecutive: bool = False,
) -> list[str]:
    """Return the names of all algorithms whose needs such a call meets, as far as that is known
    before the call; without those that access arrays unless they are `reachable`."""
    offers = (
        (WINDOWS if windows else 0)
        | (COMMUTATIVE if commutative else 0)
        | (POWER_OF_TWO if ranks & (ranks - 1) == 0 else 0)
        | (EVEN_BLOCKS if even else 0)
        | (NATIVE if library else 0)
        | (REACHABLE if reachable else 0)
        | (HOSTS if hosts else 0)
        | (CONSECUTIVE if consecutive else 0)
    )
    return [name for (each, name), needs in NEEDS.items()
            if each == collective and needs & ~offers == 0]  # fmt: skip


@lru_cache(maxsize=64)
def segment_bytes(
    ranks: int = 0, windows: bool = False, library: str = "", hosts: bool = False,
    placement: str = "",
) -> int:  # fmt: skip
    """Return the unit of pipelining, equal on all ranks: CYDIST_SEGMENT_BYTES, the measured value
    for groups that `choose` describes in the same way, or the default. Measurements hold for groups
    as those of `rules` do.

    Raises ValueError when the setting is not a positive number.
    """
    value = config.SEGMENT_BYTES.get().strip()
    if not value:
        places = [] if library or not placement else [placement]
        places += [] if library or hosts else [""]
        found = (_segments.get((ranks, windows, place)) for place in places)
        return next(filter(None, found), DEFAULT_SEGMENT_BYTES)
    # More than 18 digits are not a possible number of bytes.
    if not (value.isascii() and value.isdecimal() and len(value) <= 18) or int(value) == 0:
        raise ValueError(f"{config.SEGMENT_BYTES.names[0]}={value!r} is not a number of bytes")
    return int(value)


def part_segment_bytes(
    whole: tuple[int, bool, str], library: str, ranks: int, windows: bool
) -> int:  # fmt: skip
    """Return the unit of pipelining in a part of a group on several hosts.

    A group's measurement holds for its parts, since the measured calls used it there.

    Args:
        whole: The group's ranks, windows and placement.
        library: The name of the library below that has the group, or "".
        ranks, windows: Of the part.
    """
    size, shared, placement = whole
    if placement and whole in _segments:
        return segment_bytes(size, shared, hosts=True, placement=placement)
    if library and not windows and not config.SEGMENT_BYTES.get().strip():
        return LIBRARY_SEGMENT_BYTES
    return segment_bytes(ranks, windows)


def rules(
    collective: str, ranks: int, windows: bool, library: str = "", *, hosts: bool = False,
    placement: str = "",
) -> list[Rule]:  # fmt: skip
    """Return the rows in force for a collective: the measurements, then the table.

    Groups of a library have no measurements. Those of ranks on one host hold for groups with one
    rank on each host too, where nothing was measured on such hosts, but not for other groups on
    several `hosts`."""
    rows: list[Rule] = []
    if not library and placement:
        rows += _tuned.get((collective, ranks, windows, placement), ())
    if not library and not hosts:
        rows += _tuned.get((collective, ranks, windows, ""), ())
    rows += [rule for rule in TABLE if rule.collective == collective]
    if config.DETERMINISTIC.is_on() and collective in REDUCING:
        rows = [rule for rule in rows if (collective, rule.name) in ONE_ROUNDING]
        rows += [rule for rule in DETERMINISTIC_TABLE if rule.collective == collective]
    return rows


def forced() -> dict[str, str]:
    """Return the algorithms that CYDIST_ALGORITHM forces: collective -> name.

    Raises ValueError if it names an unknown algorithm, or contradicts CYDIST_DETERMINISTIC.
    """
    setting = config.ALGORITHM.get().strip()
    names = {}
    for item in setting.split(",") if setting else ():
        collective, _, name = (part.strip() for part in item.partition(":"))
        name = FORMER_NAMES.get(name, name)
        if (collective, name) not in NEEDS:
            known = sorted(n for c, n in NEEDS if c == collective)
            raise ValueError(
                f"{config.ALGORITHM.names[0]}={setting!r}: no algorithm {item.strip()!r}; "
                + (f"{collective} has {', '.join(known)}" if known else "write collective:name")
            )
        in_order = collective not in REDUCING or (collective, name) in ONE_ROUNDING
        if config.DETERMINISTIC.is_on() and not in_order:
            raise ValueError(
                f"{config.ALGORITHM.names[0]}={setting!r}: {item.strip()} does not reduce in rank "
                f"order with one rounding, as {config.DETERMINISTIC.names[0]} demands"
            )
        names[collective] = name
    return names
