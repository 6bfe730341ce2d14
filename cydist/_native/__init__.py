"""The one door to compiled code: everything above imports it from here."""

import sys

if sys.platform != "linux":
    raise ImportError(f"cydist works on Linux only for now, and this is {sys.platform!r}")

try:
    from cydist._native.array import Array, empty
    from cydist._native.exporters import asarray
except ModuleNotFoundError as error:
    if not (error.name or "").startswith("cydist._native"):
        raise
    raise ImportError(
        f"cydist's compiled part is not built ({error.name} is missing): run `pip install -e .` "
        "in the source tree, or import from another directory to use an installed cydist"
    ) from error

__all__ = ["Array", "asarray", "empty"]
