from collections.abc import Callable

from cydist._native import Link

class Recording(Link):
    def __init__(self, rank: int, size: int) -> None: ...
    def lines(self) -> list[tuple[str, int, int, int, int]]: ...

class ScheduleRecorder:
    def __init__(
        self,
        link: Link,
        hosts: list[int] | None = None,
        choose: Callable[[str, int, int, bool], tuple[bytes, bytes]] | None = None,
        segment_bytes: Callable[[int, bool], int] | None = None,
        together: bool = False,
    ) -> None: ...
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
