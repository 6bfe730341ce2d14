"""Chromium without a window, driven over its debugging pipe: no port, no further library."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

DEADLINE = 120.0
_FIRST_FREE = 10  # descriptors that the pipe's ends must not have here


def why_no_browser() -> str:
    """Why there is no browser; "": there is one."""
    return "" if shutil.which("chromium") else "no chromium is installed"


class Page:
    """One page of the browser."""

    def __init__(self, to_browser: int, from_browser: int) -> None:
        self._to, self._from = to_browser, from_browser
        self._received = b""
        self._number = 0
        self._session: dict[str, str] = {}
        target = self.command("Target.createTarget", url="about:blank")["targetId"]
        attached = self.command("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        self.command("Page.enable")

    def command(self, method: str, **parameters: object) -> dict[str, Any]:
        """Give the browser a command, and return its answer. Raises AssertionError for an error."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters, **self._session}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        until = time.monotonic() + DEADLINE
        while True:
            while b"\0" not in self._received:
                ready, _, _ = select.select(
                    [self._from], [], [], max(0.0, until - time.monotonic())
                )
                data = os.read(self._from, 1 << 20) if ready else b""
                assert data, f"{method}: no answer"
                self._received += data
            first, _, self._received = self._received.partition(b"\0")
            answer = json.loads(first)
            if answer.get("id") == self._number:
                assert "error" not in answer, answer
                return dict(answer["result"])

    def open(self, url: str) -> None:
        """Go to a page."""
        self.command("Page.navigate", url=url)

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in JavaScript, awaited if it is a promise."""
        found = self.command(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def until(self, expression: str) -> None:
        """Wait until an expression is true."""
        until = time.monotonic() + DEADLINE
        while not self.evaluate(f"Boolean({expression})"):
            assert time.monotonic() < until, expression
            # A frame passes.
            self.evaluate("new Promise(done => setTimeout(done, 50))")

    def picture(self, path: Path) -> None:
        """Keep what the page shows, as PNG."""
        data = self.command("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))


@contextmanager
def headless_page(directory: Path) -> Iterator[Page]:
    """Provide an empty page of a browser with a new profile in a directory."""
    their_read, our_write = os.pipe()
    our_read, their_write = os.pipe()

    def as_three_and_four() -> None:
        read = fcntl.fcntl(their_read, fcntl.F_DUPFD, _FIRST_FREE)
        write = fcntl.fcntl(their_write, fcntl.F_DUPFD, _FIRST_FREE)
        os.dup2(read, 3)
        os.dup2(write, 4)

    with (directory / "browser.log").open("wb") as log:
        process = subprocess.Popen(
            ["chromium", "--headless=new", "--no-sandbox", "--disable-gpu",
             "--disable-dev-shm-usage", "--no-first-run", "--window-size=1400,900",
             f"--user-data-dir={directory}/profile", "--remote-debugging-pipe", "about:blank"],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, preexec_fn=as_three_and_four,
            close_fds=False, process_group=0,
        )  # fmt: skip
    os.close(their_read)
    os.close(their_write)
    try:
        page = Page(our_write, our_read)
        yield page
    finally:
        os.close(our_write)  # which ends the browser
        os.close(our_read)
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
