from typing_extensions import disjoint_base

__test__: dict[str, str]

@disjoint_base
class PaceTrial:
    def segment(self, segment: int) -> int: ...
    def carry(self, nbytes: int, microseconds: int) -> None: ...
