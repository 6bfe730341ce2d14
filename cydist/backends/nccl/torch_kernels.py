"""numpy's functions that a plan's local steps call, for torch's tensors.

torch computes little on unsigned integers of 16 bits and more. Their bits are those of signed ones
in all these functions.
"""

from __future__ import annotations

import importlib
from typing import Any


class TorchFunctions:
    """Enqueue each function on torch's current stream."""

    def __init__(self) -> None:
        torch: Any = importlib.import_module("torch")
        self._torch = torch
        self._signed = {torch.uint16: torch.int16, torch.uint32: torch.int32,
                        torch.uint64: torch.int64}  # fmt: skip

    def _as_signed(self, tensor: Any) -> Any:
        kind = self._signed.get(getattr(tensor, "dtype", None))
        return tensor if kind is None else tensor.view(kind)

    def copyto(self, into: Any, source: Any, casting: str = "unsafe") -> None:
        """Copy, and convert to the dtype of `into`."""
        into.copy_(source)

    def bitwise_and(self, one: Any, other: Any, out: Any) -> None:
        """Combine the bits of two tensors, or of one with a number."""
        given = [self._as_signed(each) for each in (one, other)]
        self._torch.bitwise_and(*given, out=self._as_signed(out))

    def bitwise_or(self, one: Any, other: Any, out: Any) -> None:
        """Combine the bits of two tensors."""
        given = [self._as_signed(each) for each in (one, other)]
        self._torch.bitwise_or(*given, out=self._as_signed(out))

    def bitwise_xor(self, one: Any, other: Any, out: Any) -> None:
        """Combine the bits of two tensors."""
        given = [self._as_signed(each) for each in (one, other)]
        self._torch.bitwise_xor(*given, out=self._as_signed(out))

    def multiply(self, one: Any, other: Any, out: Any, dtype: str = "") -> None:
        """Multiply a tensor by another one or by a number, and round once: in `dtype`, if given."""
        if dtype and out.dtype != getattr(self._torch, dtype):
            out.copy_(self._torch.mul(one.to(getattr(self._torch, dtype)), other))
            return
        signed = self._as_signed(out)
        if isinstance(other, int) and signed is not out:
            bits = 8 * out.element_size()
            other -= (other >> (bits - 1)) << bits
        self._torch.mul(self._as_signed(one), self._as_signed(other), out=signed)

    def divide(self, source: Any, count: float, out: Any, dtype: str) -> None:
        """Divide in the dtype of `out`."""
        out.copy_(source)
        self._torch.div(out, count, out=out)
