"""The table of algorithms, and the choices of tuning/table.py, stored where a call finds them
without Python."""
from libc.string cimport memset, strcmp

from cydist._native.abi cimport (
    ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, BARRIER, BROADCAST, EXSCAN, GATHER, REDUCE, REDUCE_SCATTER,
    SCAN, SCATTER,
)

from cydist._native.abi import COLLECTIVE_NAMES

cdef extern from *:
    int clzll "__builtin_clzll"(unsigned long long) nogil

# The values of Needs and Traits that Python uses
NEED_BITS = {
    "WINDOWS": WINDOWS, "COMMUTATIVE": COMMUTATIVE, "POWER_OF_TWO": POWER_OF_TWO,
    "EVEN_BLOCKS": EVEN_BLOCKS, "NATIVE": NATIVE, "REACHABLE": REACHABLE,
    "FOUND_IN_CALL": FOUND_IN_CALL, "HOSTS": HOSTS,
    "CONSECUTIVE": CONSECUTIVE,
}
TRAIT_BITS = {"ONE_ROUNDING": ONE_ROUNDING, "ADAPTIVE": ADAPTIVE}

# Every algorithm: its number, name, collective, needs and traits. The number is part of the wire
# format, because the fingerprints of calls carry it. A new row takes the next number, at the end.
# No row changes its number, and the number of a deleted row is not used again.
DECLARED = (
    (0, b"bruck", ALL_GATHER, MESSAGES, 0),
    (1, b"bruck", ALL_TO_ALL, EVEN_BLOCKS, 0),
    (2, b"direct", GATHER, WINDOWS | REACHABLE, 0),
    (3, b"direct", SCATTER, WINDOWS | REACHABLE, 0),
    (4, b"direct", BROADCAST, WINDOWS | REACHABLE, 0),
    (5, b"direct", ALL_GATHER, WINDOWS | REACHABLE, 0),
    (6, b"direct", ALL_TO_ALL, WINDOWS | REACHABLE, 0),
    (7, b"direct", ALL_REDUCE, WINDOWS | REACHABLE, ONE_ROUNDING),
    (8, b"direct", REDUCE, WINDOWS | REACHABLE, ONE_ROUNDING),
    (9, b"direct", REDUCE_SCATTER, WINDOWS | REACHABLE, ONE_ROUNDING),
    (10, b"direct", SCAN, WINDOWS | REACHABLE, ONE_ROUNDING),
    (11, b"direct", EXSCAN, WINDOWS | REACHABLE, ONE_ROUNDING),
    (12, b"adaptive", BROADCAST, WINDOWS | REACHABLE, ADAPTIVE),
    (13, b"adaptive", ALL_GATHER, WINDOWS | REACHABLE, ADAPTIVE),
    (14, b"adaptive", ALL_TO_ALL, WINDOWS | REACHABLE, ADAPTIVE),
    (15, b"adaptive", ALL_REDUCE, WINDOWS | REACHABLE, ONE_ROUNDING | ADAPTIVE),
    (16, b"adaptive", REDUCE, WINDOWS | REACHABLE, ONE_ROUNDING | ADAPTIVE),
    (17, b"adaptive", REDUCE_SCATTER, WINDOWS | REACHABLE, ONE_ROUNDING | ADAPTIVE),
    (18, b"adaptive", SCAN, WINDOWS | REACHABLE, ONE_ROUNDING | ADAPTIVE),
    (19, b"adaptive", EXSCAN, WINDOWS | REACHABLE, ONE_ROUNDING | ADAPTIVE),
    (20, b"dissemination", BARRIER, MESSAGES, 0),
    (21, b"dissemination", SCAN, MESSAGES, 0),
    (22, b"dissemination", EXSCAN, MESSAGES, 0),
    (23, b"flat", BROADCAST, WINDOWS, 0),
    (24, b"flat", ALL_GATHER, WINDOWS, 0),
    (25, b"flat", GATHER, WINDOWS, 0),
    (26, b"flat", SCATTER, WINDOWS, 0),
    (27, b"flat", ALL_TO_ALL, WINDOWS, 0),
    (28, b"flat", BARRIER, WINDOWS, 0),
    (29, b"flat", ALL_REDUCE, WINDOWS, ONE_ROUNDING),
    (30, b"flat", REDUCE, WINDOWS, ONE_ROUNDING),
    (31, b"flat", REDUCE_SCATTER, WINDOWS, ONE_ROUNDING),
    (32, b"flat", SCAN, WINDOWS, ONE_ROUNDING),
    (33, b"flat", EXSCAN, WINDOWS, ONE_ROUNDING),
    (34, b"doubling", ALL_REDUCE, MESSAGES, 0),
    (35, b"halving_doubling", ALL_REDUCE, MESSAGES, 0),
    (36, b"linear", GATHER, MESSAGES, 0),
    (37, b"linear", SCATTER, MESSAGES, 0),
    (38, b"native", BROADCAST, NATIVE, 0),
    (39, b"native", ALL_REDUCE, NATIVE, 0),
    (40, b"native", REDUCE, NATIVE, 0),
    (41, b"native", BARRIER, NATIVE, 0),
    (42, b"native", ALL_GATHER, EVEN_BLOCKS | NATIVE, 0),
    (43, b"native", REDUCE_SCATTER, EVEN_BLOCKS | NATIVE, 0),
    (44, b"native", ALL_TO_ALL, EVEN_BLOCKS | NATIVE, 0),
    (45, b"ordered", ALL_REDUCE, MESSAGES, ONE_ROUNDING),
    (46, b"ordered_scatter", ALL_REDUCE, MESSAGES, ONE_ROUNDING),
    (47, b"ordered", REDUCE, MESSAGES, ONE_ROUNDING),
    (48, b"ordered", REDUCE_SCATTER, MESSAGES, ONE_ROUNDING),
    (49, b"ordered", SCAN, MESSAGES, ONE_ROUNDING),
    (50, b"ordered", EXSCAN, MESSAGES, ONE_ROUNDING),
    (51, b"pairwise", ALL_TO_ALL, MESSAGES, 0),
    (52, b"pairwise", REDUCE_SCATTER, COMMUTATIVE, 0),
    (53, b"ring", ALL_REDUCE, COMMUTATIVE, 0),
    (54, b"ring", REDUCE_SCATTER, COMMUTATIVE, 0),
    (55, b"ring", ALL_GATHER, MESSAGES, 0),
    (56, b"ring", BROADCAST, MESSAGES, 0),
    (57, b"staged", ALL_REDUCE, WINDOWS, ONE_ROUNDING),
    (58, b"tree", BROADCAST, MESSAGES, 0),
    (59, b"tree", REDUCE, MESSAGES, 0),
    (60, b"leaders", BROADCAST, HOSTS, 0),
    (61, b"leaders", ALL_REDUCE, HOSTS | COMMUTATIVE, 0),
    (62, b"leaders", REDUCE, HOSTS | COMMUTATIVE, 0),
    (63, b"leaders", ALL_GATHER, HOSTS, 0),
    (64, b"leaders", REDUCE_SCATTER, HOSTS | COMMUTATIVE, 0),
    (65, b"leaders", BARRIER, HOSTS, 0),
    (66, b"lanes", BROADCAST, HOSTS, 0),
    (67, b"lanes", ALL_REDUCE, HOSTS | COMMUTATIVE, 0),
    (68, b"lanes", REDUCE, HOSTS | COMMUTATIVE, 0),
    (69, b"lanes", ALL_GATHER, HOSTS, 0),
    (70, b"lanes", REDUCE_SCATTER, HOSTS | COMMUTATIVE, 0),
    (71, b"leaders", GATHER, HOSTS, 0),
    (72, b"leaders", SCATTER, HOSTS, 0),
    (73, b"leaders", ALL_TO_ALL, HOSTS, 0),
    (74, b"lanes", ALL_TO_ALL, HOSTS, 0),
    (75, b"leaders", SCAN, HOSTS | CONSECUTIVE, 0),
    (76, b"leaders", EXSCAN, HOSTS | CONSECUTIVE, 0),
    (77, b"lanes", SCAN, HOSTS | CONSECUTIVE | COMMUTATIVE, 0),
    (78, b"lanes", EXSCAN, HOSTS | CONSECUTIVE | COMMUTATIVE, 0),
    (79, b"bruck", REDUCE_SCATTER, COMMUTATIVE, 0),
    (80, b"chain", SCAN, MESSAGES, 0),
    (81, b"chain", EXSCAN, MESSAGES, 0),
)

cdef enum:
    TABLE_ROWS = 128

cdef Entry table[TABLE_ROWS]

cdef dict known = {}            # (ranks, windows, native, placement) -> ChosenAlgorithms


cdef int declare(tuple rows) except -1:
    cdef bytes name             # lives as long as DECLARED
    cdef int number, collective, needs, traits
    memset(table, 0, sizeof(table))
    for number, name, collective, needs, traits in rows:
        if not 0 <= number < TABLE_ROWS:
            raise ValueError(f"{name.decode()!r} has number {number}; the table of algorithms "
                             f"holds {TABLE_ROWS} rows")
        if table[number].name != NULL or declared(name, collective) != NULL:
            raise ValueError(f"row {number} of the table of algorithms, {name.decode()!r} for "
                             f"collective {collective}, is declared twice")
        table[number].name = name
        table[number].collective = collective
        table[number].needs = needs
        table[number].traits = traits
    return 0


cdef Entry *declared(const char *name, int collective) noexcept nogil:
    cdef int number
    for number in range(TABLE_ROWS):
        if (table[number].name != NULL and table[number].collective == collective
                and strcmp(table[number].name, name) == 0):
            return &table[number]
    return NULL


cdef int implement(const char *name, int collective, Algorithm run) except -1:
    cdef Entry *row = declared(name, collective)
    if row == NULL or row.run != NULL:
        raise ValueError(
            f"{name.decode()!r} for collective {collective} "
            + ("is not declared in algorithm_table.pyx" if row == NULL else "has two functions"))
    row.run = run
    return 0


cdef const Entry *find(const char *name, int collective) noexcept nogil:
    cdef const Entry *row = declared(name, collective)
    return row if row != NULL and row.run != NULL else NULL


cdef int number_of(const Entry *entry) noexcept nogil:
    return <int>(entry - table)


cdef const Entry *row_of(uint32_t number) noexcept nogil:
    return &table[number] if number < TABLE_ROWS and table[number].run != NULL else NULL


cdef Choice choice_of(str collective, int code, bytes algorithm, bytes fallback) except *:
    cdef const Entry *other
    cdef Choice choice
    choice.entry = find(algorithm, code)
    choice.fallback = NULL
    if choice.entry == NULL:
        raise ValueError(f"no algorithm for {collective} is called {algorithm.decode()!r}")
    if choice.entry.needs & FOUND_IN_CALL:
        other = find(fallback, code)
        if other == NULL or other.needs & FOUND_IN_CALL:
            raise ValueError(
                f"{algorithm.decode()!r} needs a fallback for {collective} that always runs; "
                f"{fallback.decode()!r} is none")
        choice.fallback = other.run
    return choice


def algorithms() -> list[tuple[int, str, int, int, int]]:
    """Return every row of the table: number, name, collective, needs, traits."""
    return [
        (number, table[number].name.decode(), table[number].collective, table[number].needs,
         table[number].traits)
        for number in range(TABLE_ROWS) if table[number].run != NULL
    ]


cdef int size_class(size_t nbytes) noexcept nogil:
    if nbytes <= 1:
        return 0
    return 64 - clzll(nbytes - 1)


cdef class ChosenAlgorithms:
    """The choices for groups of one size, and alike in what choices_for distinguishes."""


cdef ChosenAlgorithms choices_for(int ranks, bint windows, bint native, object placement):
    cdef ChosenAlgorithms found = known.get((ranks, windows, native, placement))
    if found is None:
        found = known[ranks, windows, native, placement] = ChosenAlgorithms()
    return found


# What hierarchical algorithms run on parts of a group
cdef tuple ON_PARTS = (BROADCAST, ALL_REDUCE, REDUCE, ALL_GATHER, GATHER, SCATTER, REDUCE_SCATTER,
                       ALL_TO_ALL, BARRIER, SCAN, EXSCAN)


cdef ChosenAlgorithms choices_for_part(int ranks, bint windows, bint between_hosts, choose,
                                       size_t segment_bytes):
    # Not those of a whole group, whose blocks are even where a part's may not be. Groups differ in
    # their segments, and not all of their ranks meet them in the same order.
    cdef ChosenAlgorithms chosen = choices_for(ranks, windows, False,
                                               ("a part", between_hosts, segment_bytes))
    cdef int code, k
    if chosen.filled:
        return chosen
    for code in ON_PARTS:
        collective = COLLECTIVE_NAMES[code]
        for k in range(SIZE_CLASSES):
            algorithm, fallback = choose(collective, 1 << k, ranks, windows, between_hosts)
            chosen.rows[code][k] = choice_of(collective, code, algorithm, fallback)
    chosen.segment_bytes = segment_bytes
    chosen.for_parts = chosen.filled = True
    return chosen


def forget_choices():
    """Drop all choices, since the settings have changed; table.py will choose again."""
    cdef ChosenAlgorithms each
    for each in known.values():
        each.filled = False
        if not each.for_parts:      # where a call finds none; a part's call looks for no other
            memset(each.rows, 0, sizeof(each.rows))


declare(DECLARED)
