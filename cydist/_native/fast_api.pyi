from collections.abc import Callable
from typing import Any, TypeVar

from typing_extensions import disjoint_base

_F = TypeVar("_F", bound=Callable[..., Any])

@disjoint_base
class GeneralPath:
    def __init__(self, function: Callable[..., Any]) -> None: ...
    def __call__(self, *arguments: Any, **named: Any) -> Any: ...

def use_operation(op: object) -> None: ...
def fast_path(function: _F) -> _F: ...

__test__: dict[str, str]
