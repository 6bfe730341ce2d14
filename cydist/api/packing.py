"""Strided arrays and lists of arrays as contiguous memory, and back."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from cydist import _native

if TYPE_CHECKING:
    from cydist._native import Array


class ContiguousCopies:
    """Arrays of a call as contiguous memory: themselves, or packed copies.

    The constructor packs inputs; `copy_back` writes outputs back.

    Args:
        filled: False: the arrays are outputs, whose contents do not count.
        apart: Numbers of those outputs that share memory with the call's inputs. The group gets
            other memory for them, since it may write a result before it has read all inputs.
    """

    def __init__(
        self,
        arrays: Sequence[Array],
        *,
        filled: bool = True,
        apart: Collection[int] = (),
    ) -> None:
        self._arrays = arrays
        self.arrays = [
            array
            if array.contiguous and i not in apart
            else array.dense()
            if filled
            else array.empty_like()
            for i, array in enumerate(arrays)
        ]

    def copy_back(self) -> None:
        """Copy the received data into the user's arrays, in their own layout."""
        for array, dense in zip(self._arrays, self.arrays, strict=True):
            array.copy_from(dense)


class FlattenedList:
    """Several arrays of one dtype as one: the constructor flattens, `copy_back` unflattens. A
    single array is not copied, unless it is an output that shares memory with an input (`apart`).
    """

    def __init__(self, arrays: Sequence[Array], *, apart: bool = False) -> None:
        alone = apart and len(arrays) == 1
        self._dense = ContiguousCopies(arrays, filled=not alone, apart=(0,) if alone else ())
        self.array = self._dense.arrays[0]
        if len(arrays) == 1:
            return
        self.array = _native.empty(sum(array.size for array in arrays), arrays[0])
        if self.array.device == "cpu":
            _native.flatten_buffers(self.array, self._dense.arrays)
        else:
            for part, array in self._parts():
                part.copy_from(array)

    def copy_back(self) -> None:
        """Copy the one array back into the many."""
        if len(self._dense.arrays) > 1:
            if self.array.device == "cpu":
                _native.unflatten_buffers(self._dense.arrays, self.array)
            else:
                for part, array in self._parts():
                    array.copy_from(part)
        self._dense.copy_back()

    def _parts(self) -> Iterator[tuple[Array, Array]]:
        arrays = self._dense.arrays
        return zip(self.array.split([array.size for array in arrays]), arrays, strict=True)
