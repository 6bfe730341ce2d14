"""The pairs of arrays that share memory."""

from cydist._native.array cimport may_share

cdef enum:
    FEW = 8                 # up to this many arrays are compared with each other directly


def overlapping(arrays, size_t outputs):
    """Return the pairs (i, j) of arrays that may share memory (`Array.overlaps`), where i < j.

    outputs     i is one of the first `outputs`

    Sweeps over the arrays by address, so that a thousand separate ones cost no million comparisons.
    """
    cdef list found = [], open_ = []
    cdef size_t i, j, count = len(arrays)
    if count <= FEW:
        return [
            (i, j) for i in range(min(outputs, count)) for j in range(i + 1, count)
            if may_share(arrays[i], arrays[j])
        ]
    extents = [array.extent for array in arrays]
    for i in sorted(range(count), key=extents.__getitem__):
        start = extents[i][0]
        open_ = [j for j in open_ if extents[j][1] > start]
        for j in open_:
            if min(i, j) < outputs and may_share(arrays[i], arrays[j]):
                found.append((min(i, j), max(i, j)))
        open_.append(i)
    return found
