"""Names for users: the public names of cydist and cydist.testing, and methods of classes."""

import inspect
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import cydist
import cydist.testing


def public() -> Iterator[tuple[str, Any]]:
    """Yield the name and the object of each public function, class and method."""
    for module in (cydist, cydist.testing):
        for name in module.__all__:
            found = getattr(module, name)
            if callable(found):
                yield name, found
            if isinstance(found, type):
                yield from ((f"{name}.{each}", method) for each, method in own_methods(found))


def own_methods(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield the public methods and properties that a class defines, and no base class before it."""
    for name, found in list(vars(kind).items()):  # a property may set itself
        inherited = any(hasattr(base, name) for base in kind.__mro__[1:])
        if name.startswith("_") or inherited:
            continue
        if isinstance(found, property):
            yield name, found.fget
        elif isinstance(found, FunctionType | classmethod | staticmethod) or inspect.isroutine(
            found
        ):
            yield name, getattr(kind, name)
