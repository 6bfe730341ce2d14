"""What becomes of bytes on their way through something broken."""

from __future__ import annotations

from hypothesis import strategies as st

# Sizes and counts that parsers get wrong, as they stand in a message.
EDGES = [
    n.to_bytes(size, "little")
    for size in (1, 2, 4, 8)
    for n in (0, 1, 1 << (8 * size - 1), (1 << (8 * size - 1)) - 1, (1 << 8 * size) - 1)
] + [(1 << 60).to_bytes(8, "little"), (1 << 31).to_bytes(8, "little")]


@st.composite
def mutated(draw: st.DrawFn, whole: st.SearchStrategy[bytes]) -> bytes:
    """`whole` after one to four changes: bytes overwritten, lost, doubled, inserted, cut off."""
    data = bytearray(draw(whole))
    for _ in range(draw(st.integers(1, 4))):
        at = draw(st.integers(0, len(data)))
        match draw(st.sampled_from(["flip", "edge", "lose", "double", "insert", "cut"])):
            case "flip" if at < len(data):
                data[at] ^= 1 << draw(st.integers(0, 7))
            case "edge":
                edge = draw(st.sampled_from(EDGES))
                data[at : at + len(edge)] = edge
            case "lose":
                del data[at : at + draw(st.integers(1, 16))]
            case "double":
                data[at:at] = data[at : at + draw(st.integers(1, 64))]
            case "insert":
                data[at:at] = draw(st.binary(min_size=1, max_size=16))
            case "cut":
                del data[at:]
    return bytes(data)


@st.composite
def cut(draw: st.DrawFn, data: bytes) -> list[bytes]:
    """`data` in pieces."""
    at = sorted(draw(st.lists(st.integers(0, len(data)), max_size=4)))
    return [data[a:b] for a, b in zip([0, *at], [*at, len(data)], strict=True)]
