"""Map cydist's dtypes and operations to NCCL's.

NCCL's own reductions support twelve types. Others are composed of them, or computed here from all
ranks' contributions ("gathered").
"""

from __future__ import annotations

import struct
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from cydist._native import DTYPES, ITEMSIZES, fast_nccl, supports
from cydist.errors import UnsupportedError
from cydist.reduce_ops import RedOpType

if TYPE_CHECKING:
    from cydist.devices.array_libraries import ArrayLibrary

UINT8 = fast_nccl.UINT8
TYPES = {  # nccl.h, ncclDataType_t
    "int8": 0, "uint8": UINT8, "int32": 2, "uint32": 3, "int64": 4, "uint64": 5,
    "float16": 6, "float32": 7, "float64": 8, "bfloat16": 9,
    "float8_e4m3fn": 10, "float8_e5m2": 11,
}  # fmt: skip
SUM, PROD, MAX, MIN, AVG = range(5)  # ncclRedOp_t
PREMUL = -1  # created for each factor, by the communicator
OPERATIONS = {
    RedOpType.SUM: SUM,
    RedOpType.PRODUCT: PROD,
    RedOpType.MAX: MAX,
    RedOpType.MIN: MIN,
    RedOpType.AVG: AVG,
    RedOpType.PREMUL_SUM: PREMUL,
}
BITS = (RedOpType.BAND, RedOpType.BOR, RedOpType.BXOR)
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
FP8_SINCE = 22400  # NCCL's version
FP8_CAPABILITY = 90  # of the GPU: Hopper

# bool as bytes of 0 and 1. A sum that wraps keeps its parity.
_BOOL = {
    RedOpType.SUM: MAX,
    RedOpType.PRODUCT: MIN,
    RedOpType.MAX: MAX,
    RedOpType.MIN: MIN,
    RedOpType.BAND: MIN,
    RedOpType.BOR: MAX,
    RedOpType.BXOR: SUM,
}

# 1 in each type, which kernels multiply by the factor (NcclReduction.factor).
ONES = {
    **{f"{sign}int{bits}": (1).to_bytes(bits // 8, "little")
       for bits in (8, 32, 64) for sign in ("", "u")},
    "float16": struct.pack("<e", 1.0),
    "float32": struct.pack("<f", 1.0),
    "float64": struct.pack("<d", 1.0),
    "bfloat16": struct.pack("<f", 1.0)[2:],
    "float8_e4m3fn": b"\x38",
    "float8_e5m2": b"\x3c",
}  # fmt: skip


class NcclReduction(NamedTuple):
    """The implementation of one operation on one dtype.

    Attributes:
        op: NCCL's operation; None: gathered, and combined by cydist's of that name.
        dtype: Of the elements that NCCL reduces, or that are combined.
        width: Number of those per element of the user's.
        wide: The 16-bit dtype that is first widened to `dtype` and finally narrowed.
        mean: Whether the narrowed sum is then divided by the number of ranks.
        odd: Whether each element of the result is its last bit.
        scale: The user's dtype, if the elements are first multiplied by the factor.
    """

    name: str
    op: int | None
    dtype: str
    width: int = 1
    wide: str = ""
    mean: bool = False
    odd: bool = False
    scale: str = ""

    @property
    def type_code(self) -> int:
        """Return NCCL's number of the dtype."""
        return TYPES[self.dtype]


@cache
def reduction(kind: RedOpType, dtype: str, single_rank: bool = False) -> NcclReduction:
    """Return the implementation of the operation on this dtype. The caller has checked that it is
    defined.

    single_rank whether the group has one rank. Its contribution is the result, which NCCL copies
                as bytes; cydist multiplies a factor itself. NCCL would multiply for AVG and
                PREMUL_SUM, but before 2.29.7 it omits elements at the end (NVIDIA/nccl#1950), and
                it has no such kernel for 8-bit floats.
    """
    if single_rank:
        scale = dtype if kind is RedOpType.PREMUL_SUM else ""
        return NcclReduction(kind.name, SUM, "uint8", width=ITEMSIZES[dtype], scale=scale)
    if dtype == "bool":
        return NcclReduction(kind.name, _BOOL[kind], "uint8", odd=kind is RedOpType.BXOR)
    if kind in BITS:
        return NcclReduction(kind.name, None, dtype)
    op = OPERATIONS[kind]
    if dtype in ("complex64", "complex128"):
        if kind is RedOpType.PRODUCT:
            return NcclReduction(kind.name, None, dtype)
        real = "float32" if dtype == "complex64" else "float64"
        # A factor may be complex, on this rank or another, and NCCL's factors are real.
        scale = dtype if kind is RedOpType.PREMUL_SUM else ""
        return NcclReduction(kind.name, SUM if scale else op, real, width=2, scale=scale)
    if dtype in ("int16", "uint16"):
        # The sum wraps in 16 bits and is then divided, as in all other reductions.
        mean = kind is RedOpType.AVG
        return NcclReduction(kind.name, SUM if mean else op, "int32", wide=dtype, mean=mean)
    return NcclReduction(kind.name, op, dtype)


def at_once(kind: RedOpType, dtype: str, single_rank: bool) -> tuple[int, int, int, str] | None:
    """Return, for a reduction that is a single NCCL call, NCCL's type and operation, the number of
    its elements per element of the user's, and the operation's name. Return None for others, and
    for 8-bit floats of several ranks, which not every GPU reduces.

    Args:
        single_rank: Whether the group has one rank.
    """
    if not supports(int(kind), DTYPES[dtype]) or (dtype in FLOAT8 and not single_rank):
        return None
    how = reduction(kind, dtype, single_rank)
    if how.op is None or how.wide or how.odd or how.scale:
        return None
    return how.type_code, how.op, how.width, how.name


def check_fp8(call: str, dtype: str, version: int, capability: int) -> None:
    """Raise UnsupportedError if NCCL does not reduce 8-bit floats."""
    if dtype in FLOAT8 and (version < FP8_SINCE or capability < FP8_CAPABILITY):
        raise UnsupportedError(
            f"{call}: NCCL reduces {dtype} from version 2.24 on, on GPUs of compute capability "
            f"9.0 or more; here is version {version}, and the oldest "
            f"of the ranks' GPUs has {capability // 10}.{capability % 10}: convert to float16 first"
        )


def check_factor(call: str, dtype: str, library: ArrayLibrary) -> None:
    """Raise UnsupportedError if this library does not multiply this dtype, for a group of one
    rank."""
    if dtype in FLOAT8:
        raise UnsupportedError(
            f"{call}: PREMUL_SUM of {dtype} is not supported in a group of one rank, where neither "
            f"NCCL nor {library.name} multiplies it: convert to float16 first"
        )
    if dtype == "bfloat16" and not library.computes_bfloat16():
        raise UnsupportedError(
            f"{call}: PREMUL_SUM of bfloat16 in a group of one rank is multiplied by "
            f"{library.name}, which needs ml_dtypes for it: `pip install ml_dtypes`, or convert to "
            "float32 first"
        )
