"""Find NaN and infinity in an array of any library and any float or complex dtype."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cydist import _native

if TYPE_CHECKING:
    import numpy as np

    from cydist._native import Array

ELEMENTS = 1 << 20  # looked at together, so that the search takes little memory

# Floats in which all exponent bits mean NaN or infinity: their words, those bits, the others but
# the sign.
_IEEE = {
    "float64": ("u8", 0x7FF0_0000_0000_0000, 0x000F_FFFF_FFFF_FFFF),
    "float32": ("u4", 0x7F80_0000, 0x007F_FFFF),
    "float16": ("u2", 0x7C00, 0x03FF),
    "bfloat16": ("u2", 0x7F80, 0x007F),
    "float8_e5m2": ("u1", 0x7C, 0x03),
    "float8_e4m3": ("u1", 0x78, 0x07),
    "float8_e3m4": ("u1", 0x70, 0x0F),
}
# Floats without infinity: the bits of NaN, and the bits that count.
_NAN_ONLY = {
    "float8_e4m3fn": (0x7F, 0x7F),
    "float8_e4m3fnuz": (0x80, 0xFF),
    "float8_e4m3b11fnuz": (0x80, 0xFF),
    "float8_e5m2fnuz": (0x80, 0xFF),
    "float8_e8m0fnu": (0xFF, 0xFF),
}
_COMPLEX = {"complex64": "float32", "complex128": "float64"}


def first_nonfinite(array: Array) -> tuple[tuple[int, ...], str] | None:
    """Return the index of the first element that is NaN or infinite, in C order, and its value.

    None: there is none, or the dtype knows none. Arrays on a GPU are copied to the host: torch's
    and cupy's; others are not searched.
    """
    name = array.dtype_name
    part = _COMPLEX.get(name, name)
    if part not in _IEEE and part not in _NAN_ONLY and not _is_other_float(name):
        return None
    if array.device != "cpu":
        copied = _on_host(array)
        if copied is None:
            return None
        array = copied
    import numpy as np

    memory = memoryview(array.dense())
    if part in _IEEE:
        found = _first_ieee(memory, *_IEEE[part])
    elif part in _NAN_ONLY:
        value, counted = _NAN_ONLY[part]
        bits = np.frombuffer(memory, np.uint8)
        found = _first(bits, lambda some: (some & counted) == value, lambda _: "nan")
    else:
        values = np.frombuffer(memory, np.dtype(name))
        found = _first(values, lambda some: ~np.isfinite(some), _name_of)
    if found is None:
        return None
    place, value_text = found
    place //= 2 if name in _COMPLEX else 1
    return tuple(int(i) for i in np.unravel_index(place, array.shape)), value_text


def _name_of(value: Any) -> str:
    """Return whether this is "inf", "-inf" or "nan", which it is also if it is no number at all."""
    import numpy as np

    if np.iscomplexobj(value):
        value = value.imag if np.isfinite(value.real) else value.real
    if not np.isinf(value):
        return "nan"
    return "inf" if value > 0 else "-inf"


def _is_other_float(name: str) -> bool:
    """Return whether numpy knows it as a float, such as one of the other byte order."""
    import numpy as np

    try:
        return np.dtype(name).kind in "fc"
    except TypeError:
        return False


def _first_ieee(
    memory: memoryview, word: str, exponent: int, mantissa: int
) -> tuple[int, str] | None:
    import numpy as np

    bits = np.frombuffer(memory, word)
    kind = bits.dtype.type

    def value(one: Any) -> str:
        if one & kind(mantissa):
            return "nan"
        return "-inf" if int(one) > exponent else "inf"

    return _first(bits, lambda some: (some & kind(exponent)) == kind(exponent), value)


def _first(values: np.ndarray[Any, Any], is_bad: Any, text: Any) -> tuple[int, str] | None:
    """Return the place of the first of these, and its text."""
    for start in range(0, len(values), ELEMENTS):
        bad = is_bad(values[start : start + ELEMENTS])
        place = int(bad.argmax())
        if bad[place]:
            return start + place, text(values[start + place])
    return None


def _on_host(array: Array) -> Array | None:
    """Copy an array on a GPU, on its current stream, and wait for it."""
    owner = array.owner
    copy = getattr(owner, "cpu", None) or getattr(owner, "get", None)
    return None if copy is None else _native.asarray(copy())
