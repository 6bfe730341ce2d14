"""The site builds without a warning, loads nothing from elsewhere, and has every public name."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path

import pytest
from public_names import public

pytest.importorskip("sphinx")
import sphinx.util.inventory

ROOT = Path(__file__).resolve().parents[2]
DEADLINE = 150  # of the build, in seconds: it takes eight on an idle core
pytestmark = pytest.mark.timeout(DEADLINE + 30)
# Attributes from which a browser loads something by itself, and those that a reader follows.
LOADS = {"src", "srcset", "data", "poster", "background", "xlink:href"}
# Values of an attribute `rel` that make a browser load the link's target.
LOADED = {"stylesheet", "icon", "preload", "modulepreload", "prefetch", "preconnect", "manifest"}
ELSEWHERE = re.compile(r"^\s*(?:[a-z]+:)?//", re.I)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built pages. A broken link and a name that is not there are warnings, and so errors."""
    built = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning", "--keep-going"]
    done = subprocess.run(
        [*command, "-d", str(built / "doctrees"), str(ROOT / "docs"), str(built / "html")],
        capture_output=True,
        text=True,
        timeout=DEADLINE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    return built / "html"


class Loads(HTMLParser):
    """Collects the addresses that a browser loads for a page."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []
        self.style = False

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value or "" for name, value in attrs}
        self.style = tag == "style"
        self.found += [value for name, value in given.items() if name in LOADS]
        if tag == "link" and LOADED & set(given.get("rel", "").split()):
            self.found.append(given["href"])
        self.found += loads_of_style(given.get("style", ""))

    def handle_data(self, data: str) -> None:
        if self.style:
            self.found += loads_of_style(data)


def loads_of_style(text: str) -> list[str]:
    """The addresses in a style sheet."""
    urls = re.findall(r"url\(\s*['\"]?([^'\")]+)", text)
    return urls + re.findall(r"@import\s+['\"]([^'\"]+)", text)


def loads(path: Path) -> Iterator[str]:
    """Yield what a file of the site loads."""
    text = path.read_text(errors="replace")
    if path.suffix in (".html", ".svg"):
        parser = Loads()
        parser.feed(text)
        yield from parser.found
    elif path.suffix == ".css":
        yield from loads_of_style(text)
    elif path.suffix == ".js":
        # Calls that load, with an address written out.
        yield from re.findall(
            r"(?:fetch|import|importScripts|open|Worker|\.src\s*=)\s*\(?\s*['\"]([^'\"]+)", text
        )


def test_the_pages_load_nothing_from_elsewhere(site: Path) -> None:
    """No page, style sheet, script or drawing names another host to load from."""
    kinds = {".html", ".css", ".js", ".svg"}
    files = [each for each in site.rglob("*") if each.suffix in kinds]
    found = {str(each.relative_to(site)): list(loads(each)) for each in files}
    assert {kind for each in files for kind in [each.suffix]} == kinds
    assert sum(map(len, found.values())) > 100
    assert [
        (name, url) for name, urls in found.items() for url in urls if ELSEWHERE.match(url)
    ] == []


@pytest.mark.parametrize(
    ("suffix", "text"),
    [
        (".html", '<link rel="stylesheet" href="https://fonts.example/css">'),
        (".html", '<script src="//cdn.example/x.js"></script>'),
        (".html", '<style>p { background: url("http://a.example/b.png") }</style>'),
        (".css", "@import 'https://fonts.example/css';"),
        (".css", "@font-face { src: url(https://fonts.example/a.woff2) }"),
        (".js", 'fetch("https://api.example/v1")'),
        (".svg", '<image xlink:href="https://a.example/b.png"/>'),
    ],
)
def test_what_loads_from_elsewhere_is_found(suffix: str, text: str, tmp_path: Path) -> None:
    """The former test can fail."""
    path = tmp_path / f"page{suffix}"
    path.write_text(text)
    assert [url for url in loads(path) if ELSEWHERE.match(url)]


def test_every_page_is_in_the_navigation(site: Path) -> None:
    """A reader reaches every page from the list at its side."""
    pages = {
        str(each.relative_to(ROOT / "docs").with_suffix(".html"))
        for each in (ROOT / "docs").rglob("*.md")
    }
    side = (site / "index.html").read_text().split('class="sidebar-tree"')[1].split("</aside>")[0]
    assert pages - set(re.findall(r'href="([^"#]+)', side)) == {"index.html"}


def test_every_public_name_is_in_the_reference(site: Path) -> None:
    """All functions, classes and methods for users have an entry, from their docstrings."""
    stored = sphinx.util.inventory.InventoryFile.loads((site / "objects.inv").read_bytes(), uri="")
    names = {each.rpartition("cydist.")[2] for kind in stored.data for each in stored.data[kind]}
    ends = {each.removeprefix("testing.") for each in names}
    missing = {name: found for name, found in public() if name not in ends}
    # The methods of a class that has a second name are listed below the first.
    assert [n for n, found in missing.items() if found.__qualname__ not in ends] == []


def test_every_option_of_the_launcher_is_in_the_reference(site: Path) -> None:
    """commands.html has each option of `cydistrun --help`."""
    shown = subprocess.run(
        [sys.executable, "-m", "cydist.run", "--help"],
        capture_output=True,
        text=True,
        timeout=30,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=True,
    ).stdout
    options = set(re.findall(r"^  (--[\w-]+)", shown, re.M))
    page = (site / "reference/commands.html").read_text()
    assert len(options) > 20
    assert {each for each in options if f">{each}<" not in page} == set()
