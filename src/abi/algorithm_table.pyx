"""The table of algorithms, and the choices of tuning/table.py, stored where a call finds them
without Python."""
from libc.string cimport memset, strcmp


cdef extern from *:
    int clzll "__builtin_clzll"(unsigned long long) nogil

# The values of Needs that Python uses
NEED_BITS = {
    "WINDOWS": WINDOWS, "COMMUTATIVE": COMMUTATIVE, "POWER_OF_TWO": POWER_OF_TWO,
    "EVEN_BLOCKS": EVEN_BLOCKS, "NATIVE": NATIVE,
}

cdef enum:
    TABLE_ROWS = 128

cdef Entry table[TABLE_ROWS]
cdef int rows = 0

cdef dict known = {}            # (ranks, windows, native) -> ChosenAlgorithms


cdef int add(const char *name, int collective, int needs, Algorithm run) except -1:
    global rows
    if find(name, collective) != NULL:
        raise ValueError(f"two algorithms are called {name.decode()!r} for collective {collective}")
    if rows == TABLE_ROWS:
        raise MemoryError(f"the table of algorithms holds {TABLE_ROWS} rows")
    table[rows] = Entry(name, collective, needs, run)
    rows += 1
    return 0


cdef const Entry *find(const char *name, int collective) noexcept nogil:
    cdef int row
    for row in range(rows):
        if table[row].collective == collective and strcmp(table[row].name, name) == 0:
            return &table[row]
    return NULL


cdef int index_of(const Entry *entry) noexcept nogil:
    return <int>(entry - table)


cdef const Entry *row_of(uint32_t index) noexcept nogil:
    return &table[index] if index < <uint32_t>rows else NULL


def algorithms() -> list[tuple[str, int, int]]:
    """Return every row of the table: name, collective, needs."""
    return [
        (table[row].name.decode(), table[row].collective, table[row].needs) for row in range(rows)
    ]


cdef int size_class(size_t nbytes) noexcept nogil:
    if nbytes <= 1:
        return 0
    return 64 - clzll(nbytes - 1)


cdef class ChosenAlgorithms:
    """Return the choices for groups of one size, with or without windows and a library."""


cdef ChosenAlgorithms choices_for(int ranks, bint windows, bint native):
    cdef ChosenAlgorithms found = known.get((ranks, windows, native))
    if found is None:
        found = known[ranks, windows, native] = ChosenAlgorithms()
    return found


def forget_choices():
    """Drop all choices, since the settings have changed; table.py will choose again."""
    cdef ChosenAlgorithms each
    for each in known.values():
        memset(each.rows, 0, sizeof(each.rows))
