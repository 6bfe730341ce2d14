"""A real Prometheus scrapes a job with a planted straggler, and answers every query of the Grafana
dashboard. scripts/test-monitoring installs Prometheus."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from attacks import free_port

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("prometheus") is None, reason="no prometheus is installed"),
]

ROOT = Path(__file__).resolve().parents[2]
DASHBOARD = json.loads((ROOT / "docs/monitoring/grafana.json").read_text())
DEADLINE = 50.0
STARTS = 503  # HTTP's code for a server that is not ready
RANKS = 3
LATE = 1
# Rank 1 sleeps before each call.
PROGRAM = f"""import time, numpy as np, cydist as dist
dist.init_process_group(timeout=600)
while True:
    if dist.get_rank() == {LATE}:
        time.sleep(0.01)
    dist.all_reduce(np.ones(100))
"""


class Server:
    """A Prometheus that scrapes one job."""

    def __init__(self, port: int, run_id: str) -> None:
        self.run_id = run_id
        self._url = f"http://127.0.0.1:{port}/api/v1"

    def get(self, path: str, **parameters: str) -> Any:
        """What the server answers, or None while it does not. Raises AssertionError if the question
        is wrong."""
        url = f"{self._url}/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=DEADLINE) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            if error.code == STARTS:
                return None
            raise AssertionError(f"{parameters}: {error.read().decode()}") from None
        except OSError:
            return None

    def query(self, expression: str) -> dict[str, float]:
        """The values of a dashboard's query now, by what distinguishes them."""
        expression = expression.replace("$run", self.run_id).replace("$__rate_interval", "4s")
        found = self.get("query", query=expression)
        return {
            ",".join(each["metric"].values()): float(each["value"][1])
            for each in ([] if found is None else found["result"])
        }


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Provide a Prometheus that has scraped a running job for some seconds."""
    place = tmp_path_factory.mktemp("prometheus")
    metrics, port = free_port(), free_port()
    (place / "program.py").write_text(PROGRAM)
    (place / "prometheus.yml").write_text(
        "global: {scrape_interval: 200ms, scrape_timeout: 200ms}\n"
        f"scrape_configs: [{{job_name: cydist, static_configs: "
        f"[{{targets: ['127.0.0.1:{metrics}']}}]}}]\n"
    )
    job = subprocess.Popen(
        [sys.executable, "-m", "cydist.run", "-n", str(RANKS), "--rdzv-id", "planted",
         str(place / "program.py")],
        env={**os.environ, "CYDIST_METRICS": f":{metrics}", "TMPDIR": str(place)},
    )  # fmt: skip
    prometheus = subprocess.Popen(
        ["prometheus", f"--config.file={place}/prometheus.yml", f"--storage.tsdb.path={place}/data",
         f"--web.listen-address=127.0.0.1:{port}", "--log.level=error"],
    )  # fmt: skip
    try:
        made = Server(port, "planted")
        until = time.monotonic() + DEADLINE
        # The rate over four seconds takes as long.
        scraped = "min(count_over_time(cydist_calls_total[4s]))"
        while max(made.query(scraped).values(), default=0) < 10:
            assert time.monotonic() < until
            assert job.poll() is None
        yield made
    finally:
        for process in (job, prometheus):
            process.terminate()
            process.wait(DEADLINE)


EXPRESSIONS = {
    f"{panel['title']}, {target['refId']}": target["expr"]
    for panel in DASHBOARD["panels"]
    for target in panel["targets"]
}


@pytest.mark.parametrize("name", EXPRESSIONS)
def test_every_query_of_the_dashboard_is_answered(server: Server, name: str) -> None:
    """With numbers, none of which is NaN or infinite."""
    found = server.query(EXPRESSIONS[name])
    assert found, name
    assert all(0 <= value < 1e15 for value in found.values()), found


def test_the_dashboards_variable_lists_the_job(server: Server) -> None:
    """Its query is label_values(METRIC, LABEL), which Grafana asks for so."""
    (variable,) = (each for each in DASHBOARD["templating"]["list"] if each["name"] == "run")
    words = variable["query"]["query"].removeprefix("label_values(").removesuffix(")")
    metric, label = words.split(", ")
    assert server.get(f"label/{label}/values", **{"match[]": metric}) == ["planted"]


def test_the_dashboard_names_the_straggler(server: Server) -> None:
    """The others wait for it, and it waits least."""
    until = time.monotonic() + DEADLINE
    while True:
        awaited = server.query(EXPRESSIONS["Other ranks wait for, A"])
        waits = server.query(EXPRESSIONS["Waits, A"])
        assert set(awaited) == set(waits) == {str(rank) for rank in range(RANKS)}
        late = str(LATE)
        if (
            max(awaited, key=lambda rank: awaited[rank])
            == late
            == min(waits, key=lambda rank: waits[rank])
        ):
            return
        assert time.monotonic() < until, (awaited, waits)


def test_calls_are_as_many_on_each_rank(server: Server) -> None:
    """Since each is an all_reduce of all ranks: 800 bytes each."""
    calls = server.query("cydist_calls_total")
    assert len(calls) == RANKS
    assert max(calls.values()) - min(calls.values()) <= 1
    assert set(server.query("cydist_bytes_total / cydist_calls_total").values()) == {800.0}
