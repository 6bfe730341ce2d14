"""Shapes of a drawing as SVG, in colours for light and for dark pages.

A drawing is 400 units wide, with text of 12 units and more: a phone shows it without zooming.
"""

from __future__ import annotations

import textwrap
from html import escape

WIDTH = 400
LEAST = 12  # size of the smallest text
SHOWN = 1.3  # pixels for each unit, where the page is wide enough

# Class: property, and its value on a light and on a dark page.
COLOURS = {
    "ink": ("fill", "#1d2733", "#e6ebf0"),
    "muted": ("fill", "#56626e", "#a3b0bc"),
    "accent": ("fill", "#0b6bcb", "#5aa9f7"),
    "second": ("fill", "#c2701c", "#e8a35b"),
    "third": ("fill", "#8d99a6", "#76828e"),
    "good": ("fill", "#1d7f4e", "#5cc48f"),
    "bad": ("fill", "#b3302c", "#f0807a"),
    "box": ("fill", "#eaf2fb", "#1b2c3f"),
    "pale": ("fill", "#f4f6f8", "#22282f"),
    "warm": ("fill", "#fdeeda", "#3b2d1c"),
    "edge": ("stroke", "#8fa9c4", "#5b7896"),
    "line": ("stroke", "#56626e", "#a3b0bc"),
    "grid": ("stroke", "#d5dbe1", "#3a434c"),
    "blue": ("stroke", "#0b6bcb", "#5aa9f7"),
    "grey": ("stroke", "#8d99a6", "#76828e"),
    "orange": ("stroke", "#c2701c", "#e8a35b"),
    "green": ("stroke", "#1d7f4e", "#5cc48f"),
    "fourth": ("fill", "#7b4fb5", "#b99aea"),
    "violet": ("stroke", "#7b4fb5", "#b99aea"),
    "red": ("stroke", "#b3302c", "#f0807a"),
}
# The fill of a stroke's colour.
FILL_OF = {
    "blue": "accent", "grey": "third", "orange": "second", "green": "good", "violet": "fourth",
}  # fmt: skip


class Drawing:
    """A picture of `height` units, with a description for those who cannot see it."""

    def __init__(self, height: float, description: str) -> None:
        self._height = height
        self._description = description
        self._shapes: list[str] = []

    def rectangle(
        self,
        x: float,
        y: float,
        width: float,
        height: float,
        kind: str = "box edge",
        round: int = 6,
    ) -> None:
        """Draw a box."""
        self._shapes.append(
            f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" '
            f'rx="{round}"/>'
        )

    def text(
        self, x: float, y: float, text: str, kind: str = "ink", at: str = "start", size: int = 14
    ) -> None:
        """Write one line; `at` is start, middle or end."""
        assert size >= LEAST, text
        bold = ' font-weight="600"' if "bold" in kind else ""
        self._shapes.append(
            f'<text class="{kind.replace("bold", "").strip()}" x="{x:g}" y="{y:g}" '
            f'text-anchor="{at}" font-size="{size}"{bold}>{escape(text)}</text>'
        )

    def lines(self, x: float, y: float, text: str, kind: str = "muted", size: int = LEAST) -> float:
        """Write text in as many lines as it needs, and return where the next would be."""
        for line in textwrap.wrap(text, int((WIDTH - 2 * x) / (0.53 * size))):
            self.text(x, y, line, kind, size=size)
            y += 1.35 * size
        return y

    def line(
        self, x: float, y: float, x2: float, y2: float, kind: str = "line", more: str = ""
    ) -> None:
        """Draw a line; `more` holds further attributes."""
        self._shapes.append(
            f'<line class="{kind}" x1="{x:g}" y1="{y:g}" x2="{x2:g}" y2="{y2:g}" {more}/>'
        )

    def arrow(self, x: float, y: float, x2: float, y2: float, both: bool = False) -> None:
        """Draw an arrow, or one with two heads."""
        start = ' marker-start="url(#head)"' if both else ""
        self.line(x, y, x2, y2, more=f'marker-end="url(#head)"{start}')

    def curve(self, points: list[tuple[float, float]], kind: str, width: float = 2) -> None:
        """Draw a line through points, with a dot at each."""
        joined = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self._shapes.append(
            f'<polyline class="{kind}" points="{joined}" fill="none" stroke-width="{width:g}"/>'
        )
        fill = FILL_OF[kind]
        self._shapes += [
            f'<circle class="{fill}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in points
        ]

    def written(self) -> str:
        """Return the picture as SVG."""
        height = round(self._height)
        light, dark = (
            "".join(f".{name}{{{each[0]}:{each[which]}}}" for name, each in COLOURS.items())
            for which in (1, 2)
        )
        style = (
            f"svg{{color-scheme:light dark;font-family:system-ui,sans-serif}}{light}"
            f".head{{fill:#56626e}}@media(prefers-color-scheme:dark){{{dark}.head{{fill:#a3b0bc}}}}"
        )
        head = (
            '<marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="9" '
            'markerHeight="9" markerUnits="userSpaceOnUse" orient="auto-start-reverse">'
            '<path class="head" d="M0 0L8 4L0 8z"/></marker>'
        )
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
                f'width="{WIDTH * SHOWN:g}" height="{height * SHOWN:g}" role="img">',
                f"<title>{escape(self._description)}</title>",
                f"<style>{style}</style><defs>{head}</defs>",
                *self._shapes,
                "</svg>\n",
            ]
        )
