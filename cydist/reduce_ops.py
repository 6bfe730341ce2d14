"""Reduction operations, and the values that calls pass as `op`."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from enum import Enum, IntEnum
from typing import TYPE_CHECKING, Any, ClassVar, Final

from cydist._native import DTYPES, OPS, supports

if TYPE_CHECKING:
    import numpy as np

    Elements = np.ndarray[Any, Any]


class RedOpType(IntEnum):
    """The operations, with the numbers of the wire (src/kernels/kernels.h)."""

    # Pickles name `cydist.ReduceOp`, since classes of this module may move.
    __module__ = "cydist"
    __qualname__ = "ReduceOp.RedOpType"

    SUM = OPS["SUM"]
    PRODUCT = OPS["PRODUCT"]
    MIN = OPS["MIN"]
    MAX = OPS["MAX"]
    BAND = OPS["BAND"]
    BOR = OPS["BOR"]
    BXOR = OPS["BXOR"]
    AVG = OPS["AVG"]
    PREMUL_SUM = OPS["PREMUL_SUM"]

    # As torch's, in place of the number.
    __str__ = Enum.__str__
    __format__ = Enum.__format__

    @property
    def op(self) -> RedOpType:
        """Return the operation itself, as an attribute of torch's ReduceOp objects does."""
        return self


PREMUL_SUM = RedOpType.PREMUL_SUM  # an attribute of an enumeration takes long to read


class PremulSum:
    """The sum of every rank's contribution multiplied by that rank's ``factor``.

    Args:
        factor: A number, or an array or tensor of one; kept as an int, float or complex.

    Raises TypeError if the factor is not a number.
    """

    __slots__ = ("factor",)
    type: Final = RedOpType.PREMUL_SUM
    op: Final = RedOpType.PREMUL_SUM  # torch's name of it

    def __init__(self, factor: Any) -> None:
        self.factor: complex = _number(factor)

    def __repr__(self) -> str:
        return f"ReduceOp.PREMUL_SUM({self.factor!r})"

    def __reduce__(self) -> tuple[_PremulSumFactory, tuple[complex]]:
        return ReduceOp.PREMUL_SUM, (self.factor,)


def _number(given: Any) -> complex:
    try:
        found = given.item() if hasattr(given, "item") else given
        if isinstance(found, str):  # complex() would parse their digits
            raise TypeError
        if isinstance(found, int):
            return int(found)
        number = complex(found)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise TypeError(f"PREMUL_SUM's factor must be a number, not {given!r:.100}") from None
    return number if number.imag else number.real


class _PremulSumFactory(int):
    """``ReduceOp.PREMUL_SUM`` names the operation; calling it with a factor makes one.

    Args:
        factor: What this rank's contribution is multiplied by; a number.

    Returns:
        An operation for `op`.

    Raises:
        TypeError: The factor is not a number.

    Examples:
        >>> x = np.array([2.0])
        >>> dist.all_reduce(x, dist.ReduceOp.PREMUL_SUM(0.5))
        >>> x
        array([2.])
    """

    __module__ = "cydist"

    # What every other operation has as a member of RedOpType.
    name: Final = "PREMUL_SUM"
    value: Final = int(RedOpType.PREMUL_SUM)
    op: Final = RedOpType.PREMUL_SUM

    def __str__(self) -> str:
        return str(self.op)

    def __repr__(self) -> str:
        return repr(self.op)

    def __call__(self, factor: Any) -> PremulSum:
        return PremulSum(factor)

    def __reduce__(self) -> str:
        return "ReduceOp.PREMUL_SUM"


class UserReduction:
    """A reduction with a user's function: see ReduceOp.create."""

    __slots__ = ("commutative", "function", "name")

    def __init__(
        self, function: Callable[[Elements, Elements], object], commutative: bool = True
    ) -> None:
        if not callable(function):
            raise TypeError(
                f"ReduceOp.create needs a function of two arrays, such as numpy.hypot, not "
                f"{function!r}"
            )
        self.function = function
        self.commutative = commutative
        self.name: str = getattr(function, "__name__", type(function).__name__)

    def __repr__(self) -> str:
        return f"ReduceOp.create({self.name})"

    def __reduce__(self) -> str | tuple[Callable[..., UserReduction], tuple[object, bool]]:
        return ReduceOp.create, (self.function, self.commutative)

    def refusal(self, dtype: np.dtype[Any]) -> str:
        """Return a sentence on why it cannot reduce elements of this dtype; "" if it can."""
        return ""


class _Located(UserReduction):
    """The extreme of pairs (value, index), with its index."""

    __module__ = "cydist"

    __slots__ = ()

    def __repr__(self) -> str:
        return f"ReduceOp.{self.name}"

    def __reduce__(self) -> str:
        return f"ReduceOp.{self.name}"

    def refusal(self, dtype: np.dtype[Any]) -> str:
        names = dtype.names or ()
        if len(names) == 2 and all(dtype[field].kind in "biufmM" for field in names):
            return ""
        return (
            f"{self.name} is of pairs: it needs numpy arrays of a dtype with two ordered fields, "
            f"such as [('value', 'f8'), ('index', 'i8')], not {dtype}"
        )


def _located(name: str, beats: Callable[[Elements, Elements], Elements]) -> UserReduction:
    def choose(low: Elements, high: Elements) -> Elements:
        import numpy as np

        value, index = low.dtype.names  # checked by refusal()
        a, b = low[value], high[value]
        a_number, b_number = a == a, b == b
        ties = (a == b) | ~(a_number | b_number)
        take_high = beats(b, a) | (a_number & ~b_number) | (ties & (high[index] < low[index]))
        return np.where(take_high, high, low)

    choose.__name__ = name
    return _Located(choose)


class _Operations(type):
    """The class of ReduceOp, of which every value that a call takes as `op` is an instance."""

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, RedOpType | PremulSum | UserReduction | _PremulSumFactory)


class ReduceOp(metaclass=_Operations):
    """The reductions that collectives take as ``op``.

    - SUM, PRODUCT: every numeric dtype.
    - MIN, MAX: every numeric dtype but complex ones.
    - BAND, BOR, BXOR: integers and bool.
    - AVG: SUM divided by the number of ranks, in the accumulator type; integers truncate toward
      zero. Not bool.
    - PREMUL_SUM(factor): each rank's contribution times its factor, then SUM. Not bool. The factor
      is real for real dtypes. For integers it is an integer that a float64 holds exactly: any up to
      2**53.
    - MAXLOC, MINLOC: pairs, that is numpy arrays of a dtype with two fields: the largest (smallest)
      first field, and the lowest second field among those pairs. NaN wins.
    - create(function): the function's result for two contributions.

    Integers wrap. MIN and MAX propagate NaN and hold -0 < +0; a result that is NaN is the dtype's
    positive quiet NaN on every machine. bool: SUM is or, PRODUCT is and.

    Calls also take torch.distributed's own operations, of which `ReduceOp(op)` returns cydist's.
    `isinstance(ReduceOp.SUM, ReduceOp)` is true. Of the operations that torch has too, `op` is the
    kind, so that `ReduceOp.PREMUL_SUM(2).op` is `ReduceOp.PREMUL_SUM.op`, and `factor` the number.

    Examples:
        >>> x = np.array([rank + 1.0])
        >>> dist.all_reduce(x, dist.ReduceOp.MAX)
        >>> x
        array([2.])
    """

    __module__ = "cydist"

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
    MAXLOC: ClassVar = _located("MAXLOC", lambda a, b: a > b)
    MINLOC: ClassVar = _located("MINLOC", lambda a, b: a < b)

    def __new__(cls, op: object) -> Op:  # type: ignore[misc]  # as torch's, it gives a value
        found = own_op(op)
        if not isinstance(found, ReduceOp):
            op_and_factor(found)  # raises
        return found  # type: ignore[no-any-return]

    @staticmethod
    def create(
        function: Callable[[Elements, Elements], object], commutative: bool = True
    ) -> UserReduction:
        """Return a reduction by `function(low, high)`, for arrays of any dtype.

        All ranks pass the same function: its name is compared, its code is not. If it raises, the
        call raises its exception on that rank; if it returns something else, a TypeError. The group
        has failed then. The function gets GPU arrays as numpy arrays, on backends that stage them
        ("tcp" and "mpi"). torch's bfloat16 and float8 need ml_dtypes.

        Args:
            function: Gets two numpy arrays (n,) of the call's dtype, any n >= 1: elements of lower
                ranks, reduced so far, and those of the next rank. Returns n elements, each made of
                the two at its index; it may write into either array and return it. Must be
                associative.
            commutative: Whether function(a, b) equals function(b, a). The contributions are
                currently reduced in rank order either way.

        Returns:
            An operation for `op`.

        Raises:
            TypeError: `function` is not callable.

        Examples:
            >>> x = np.array([(3.0, 4.0)[rank]])
            >>> dist.all_reduce(x, dist.ReduceOp.create(np.hypot))
            >>> x
            array([5.])
        """
        return UserReduction(function, commutative)


ReduceOp.create.__module__ = ReduceOp.__module__


# The values that a call takes as `op`.
Op = RedOpType | PremulSum | UserReduction


def own_op(op: Any) -> Any:
    """Return cydist's operation for one of torch.distributed's. Anything else is returned as it is,
    for `op_and_factor` to refuse. torch is not imported."""
    kind = type(op)
    if kind is RedOpType or not kind.__module__.startswith("torch."):
        return op
    torch_kind = getattr(op, "op", op)  # ReduceOp(ReduceOp.SUM).op is ReduceOp.SUM
    name = getattr(torch_kind, "name", None)
    if name == "PREMUL_SUM":
        return ReduceOp.PREMUL_SUM if torch_kind is op else PremulSum(op.__getstate__()[1])
    return RedOpType.__members__.get(str(name), op)


def op_and_factor(op: object) -> tuple[RedOpType, complex | None]:
    """Return the operation and its PREMUL_SUM factor.

    Raises TypeError for a value that is not an operation, ValueError for a bare PREMUL_SUM.
    """
    op = own_op(op)
    if type(op) is RedOpType and op is not PREMUL_SUM:
        return op, None
    if isinstance(op, PremulSum):
        return op.type, op.factor
    if isinstance(op, _PremulSumFactory) or op is PREMUL_SUM:
        raise ValueError("PREMUL_SUM needs its factor: op=ReduceOp.PREMUL_SUM(0.5)")
    raise TypeError(f"op must be a ReduceOp such as ReduceOp.SUM, not {op!r}")


def op_name(op: Op) -> str:
    """Return the operation's name for messages, which ranks also compare."""
    return op.name if isinstance(op, UserReduction) else op_and_factor(op)[0].name


class _FormerReduceOp:
    """The operations under the name that they had at first: reading one warns."""

    def __init__(self) -> None:
        self.__members__ = {
            name: RedOpType[name]
            for name in ("SUM", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")
        }

    def __repr__(self) -> str:
        return "reduce_op"

    def __getattr__(self, name: str) -> RedOpType:
        found = self.__members__.get(name) if name != "__members__" else None
        if found is None:
            raise AttributeError(f"reduce_op has no {name!r}: use ReduceOp")
        warnings.warn(f"reduce_op is deprecated: use ReduceOp.{name}", FutureWarning, stacklevel=2)
        return found


reduce_op = _FormerReduceOp()


def supports_complex(reduceOp: Any) -> bool:
    """Return whether arrays of complex numbers can be reduced by an operation.

    Args:
        reduceOp: An operation, cydist's or torch's.

    Returns:
        True for SUM, PRODUCT, AVG, PREMUL_SUM and reductions with a user's function; torch does
        not have PRODUCT.

    Raises:
        TypeError: It is no operation.

    Examples:
        >>> dist.supports_complex(dist.ReduceOp.SUM), dist.supports_complex(dist.ReduceOp.MAX)
        (True, False)
    """
    op = own_op(reduceOp)
    if isinstance(op, UserReduction):
        return not isinstance(op, _Located)
    kind = PREMUL_SUM if isinstance(op, _PremulSumFactory) else op_and_factor(op)[0]
    return bool(supports(kind, DTYPES["complex64"]))
