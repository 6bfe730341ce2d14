from collections.abc import Callable
from typing import Self

from typing_extensions import disjoint_base

from cydist._native import Link

__test__: dict[str, str]

@disjoint_base
class Recording(Link):
    def __init__(self, rank: int, size: int) -> None: ...
    def lines(self) -> list[tuple[str, int, int, int, int]]: ...

@disjoint_base
class ScheduleRecorder:
    def __new__(
        cls,
        link: Link,
        hosts: list[int] | None = None,
        choose: Callable[[str, int, int, bool, bool], tuple[bytes, bytes]] | None = None,
        segment_bytes: Callable[[int, bool], int] | None = None,
        together: bool = False,
    ) -> Self: ...
    def run(
        self,
        collective: int,
        name: bytes,
        inputs: list[object],
        outputs: list[object],
        *,
        root: int,
        commutative: bool,
        even: bool,
        segment_bytes: int,
        seq: int,
        deadline_ns: int,
        fallback: bytes = b"",
    ) -> int: ...
