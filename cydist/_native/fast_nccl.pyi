from collections.abc import Callable
from typing import Any, final

DTYPES: dict[str, int]
UINT8: int

@final
class Enqueuer:
    paused: bool
    def __init__(
        self,
        group: Any,
        comm: Any,
        watch: Any,
        lock: Any,
        stream: int,
        torch: Any,
        at_once: Any,
        call: Callable[..., object],
        flight: Callable[..., object],
        work: Callable[..., object],
    ) -> None: ...
    def exchange(self, given: int, due: int, nbytes: int, stream: int) -> None: ...

__test__: dict[str, str]
__pyx_capi__: dict[str, Any]
