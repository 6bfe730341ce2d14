"""A browser shows each page of the site on a phone: nothing is wider, all pictures are there, and
text stands out, on light pages and dark ones. scripts/test-monitoring installs the browser."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from headless_browser import Page, headless_page, why_no_browser

pytest.importorskip("sphinx")

ROOT = Path(__file__).resolve().parents[2]
WIDTH = 390
DEADLINE = 150
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(bool(why_no_browser()), reason=why_no_browser() or "-"),
]

# What is wider than the page, pictures without content, and text that hardly differs from what is
# behind it: below the ratio that WCAG 2 asks for.
FAULTS = r"""(() => {
  const width = document.documentElement.clientWidth, found = [];
  if (document.documentElement.scrollWidth > width) found.push("the page scrolls sideways");
  for (const each of document.images)
    if (!each.complete || !each.naturalWidth) found.push("no picture " + each.src);
  const numbers = colour => { const n = colour.match(/[\d.]+/g).map(Number);
                              return n.length < 4 ? [...n, 1] : n; };
  const part = v => (v /= 255) <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4;
  const light = c => 0.2126 * part(c[0]) + 0.7152 * part(c[1]) + 0.0722 * part(c[2]);
  for (const each of document.querySelectorAll("article *")) {
    if (each.closest(".copybtn, .headerlink") || !each.offsetParent) continue;
    if (![...each.childNodes].some(n => n.nodeType === 3 && n.textContent.trim())) continue;
    let behind = each, colour = null;
    for (; behind && !colour; behind = behind.parentElement) {
      const c = numbers(getComputedStyle(behind).backgroundColor);
      if (c[3] > 0.5) colour = c;
    }
    const pair = [light(numbers(getComputedStyle(each).color)), light(colour || [255, 255, 255])];
    const ratio = (Math.max(...pair) + 0.05) / (Math.min(...pair) + 0.05);
    if (ratio < 4.5) found.push(ratio.toFixed(1) + " " + each.textContent.slice(0, 40));
  }
  return found;
})()"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built pages."""
    built = tmp_path_factory.mktemp("site")
    subprocess.run(
        [sys.executable, "-m", "sphinx", "--quiet", "-d", str(built / "doctrees"),
         str(ROOT / "docs"), str(built / "html")],
        timeout=DEADLINE, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True,
    )  # fmt: skip
    return built / "html"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """A page of a phone."""
    with headless_page(tmp_path_factory.mktemp("browser")) as found:
        found.command(
            "Emulation.setDeviceMetricsOverride",
            width=WIDTH, height=844, deviceScaleFactor=1, mobile=True,
        )  # fmt: skip
        yield found


def faults(page: Page, file: Path) -> Any:
    """What is wrong with a page."""
    page.open(file.as_uri())
    page.until(f"document.readyState === 'complete' && location.href.endsWith({file.as_uri()!r})")
    return page.evaluate(FAULTS)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_every_page(scheme: str, site: Path, page: Page) -> None:
    page.command(
        "Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}]
    )
    pages = sorted(site.rglob("*.html"))
    assert len(pages) > 40
    found = {str(each.relative_to(site)): faults(page, each) for each in pages}
    assert {name: wrong for name, wrong in found.items() if wrong} == {}


@pytest.mark.timeout(600)
def test_such_faults_are_found(page: Page, tmp_path: Path) -> None:
    """The former test can fail."""
    file = tmp_path / "page.html"
    file.write_text(
        "<!doctype html><meta name=viewport content='width=device-width'><article>"
        "<p style='color: #ccc; background: #fff'>pale</p><img src=none.png>"
        "<div style='width: 500px'>wide</div></article>"
    )
    found = faults(page, file)
    assert [each.split()[0] for each in found] == ["the", "no", "1.6"]
