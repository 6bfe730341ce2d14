from collections.abc import Callable
from typing import Any, TypeVar

_F = TypeVar("_F", bound=Callable[..., Any])

def use_operation(op: object) -> None: ...
def fast_path(function: _F) -> _F: ...

__test__: dict[str, str]
