"""Reduction operations, and the values that calls pass around."""

from __future__ import annotations

from enum import IntEnum
from typing import ClassVar, Final


class RedOpType(IntEnum):
    """The operations, numbered as on the wire (src/kernels/kernels.h)."""

    SUM = 1
    PRODUCT = 2
    MIN = 3
    MAX = 4
    BAND = 5
    BOR = 6
    BXOR = 7
    AVG = 8
    PREMUL_SUM = 9


class PremulSum:
    """The sum of every rank's contribution multiplied by ``factor`` (of the rank that calls)."""

    __slots__ = ("factor",)
    type: Final = RedOpType.PREMUL_SUM

    def __init__(self, factor: complex) -> None:
        self.factor = factor

    def __repr__(self) -> str:
        return f"ReduceOp.PREMUL_SUM({self.factor!r})"


class _PremulSumFactory(int):
    """``ReduceOp.PREMUL_SUM`` names the operation; called with a factor it makes one."""

    def __call__(self, factor: complex) -> PremulSum:
        return PremulSum(factor)


class ReduceOp:
    """The reductions that collectives take as ``op``.

    SUM PRODUCT MIN MAX         every numeric dtype (MIN and MAX: not complex)
    BAND BOR BXOR               integers and bool
    AVG                         SUM divided by the number of ranks, in the accumulator type;
                                integers truncate toward zero
    PREMUL_SUM(factor)          each rank's contribution times its factor, then SUM; the factor is
                                real for real dtypes and whole for integers
    (AVG and PREMUL_SUM: not bool)

    Integers wrap. MIN and MAX propagate NaN and hold -0 < +0; a result that is NaN is the dtype's
    positive quiet NaN on every machine. bool: SUM is or, PRODUCT is and.
    """

    RedOpType: ClassVar = RedOpType
    SUM: ClassVar = RedOpType.SUM
    PRODUCT: ClassVar = RedOpType.PRODUCT
    MIN: ClassVar = RedOpType.MIN
    MAX: ClassVar = RedOpType.MAX
    BAND: ClassVar = RedOpType.BAND
    BOR: ClassVar = RedOpType.BOR
    BXOR: ClassVar = RedOpType.BXOR
    AVG: ClassVar = RedOpType.AVG
    PREMUL_SUM: ClassVar = _PremulSumFactory(RedOpType.PREMUL_SUM)


# What a call takes as `op`.
Op = RedOpType | PremulSum


def op_and_factor(op: object) -> tuple[RedOpType, complex | None]:
    """The operation and its PREMUL_SUM factor.

    Raises TypeError for anything that is not a ReduceOp, ValueError for a bare PREMUL_SUM.
    """
    if isinstance(op, PremulSum):
        return op.type, op.factor
    if isinstance(op, _PremulSumFactory) or op is RedOpType.PREMUL_SUM:
        raise ValueError("PREMUL_SUM needs its factor: op=ReduceOp.PREMUL_SUM(0.5)")
    if isinstance(op, RedOpType):
        return op, None
    raise TypeError(f"op must be a ReduceOp such as ReduceOp.SUM, not {op!r}")
