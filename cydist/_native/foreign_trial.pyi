from typing import Self

from typing_extensions import disjoint_base

__test__: dict[str, str]

@disjoint_base
class ForeignTrial:
    def __new__(cls, rank: int, size: int, spins: int) -> Self: ...
    def polls_to_receive(self, arrives: int, stalls: int = 0) -> int: ...
