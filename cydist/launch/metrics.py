"""Serve what the ranks of this host do as metrics for Prometheus: `cydist metrics`.

One process for each job and host, beside the ranks: it also answers while they hang, and takes none
of their time. cydistrun starts it where CYDIST_METRICS names an address.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

from cydist.launch.job_counters import JobCounters
from cydist.launch.processes import die_with
from cydist.launch.run_files import JobFile

if TYPE_CHECKING:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

INSTALL = 'metrics need prometheus_client: pip install "cydist[live]"'
_HERE = "127.0.0.1"
_BY_CALL = ("run_id", "rank", "group", "backend", "call")


class Address(NamedTuple):
    """The place where metrics are served.

    Attributes:
        host: An address of this host.
        port: 0: any that is free.
    """

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def address(text: str) -> Address:
    """Return the address in ":9400", "9400", "0.0.0.0:9400" or "[::]:9400". Without a host it is
    127.0.0.1. Raises ValueError if it is none."""
    host, _, port = text.strip().rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or _HERE
    if not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{text!r} is no address for metrics: give :9400, or HOST:9400")
    return Address(host, int(port))


class JobMetrics:
    """The metrics of a job, which prometheus_client collects at each scrape."""

    def __init__(self, job: JobFile) -> None:
        self._run_id = job.run_id
        self._counters = JobCounters(job.directory)
        self._lock = threading.Lock()  # scrapes have threads of their own

    def look(self) -> float:
        """Count what the ranks have done, since busy ones soon overwrite what they keep. Return the
        seconds until the next look."""
        with self._lock:
            return self._counters.look()

    def collect(self) -> Iterator[CounterMetricFamily | GaugeMetricFamily]:
        """Yield the metrics as they are now."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        with self._lock:
            self._counters.look()
            by_kind = self._counters.by_kind()
            totals = self._counters.totals()
            estimated = self._counters.estimated()
            running = self._counters.running_ns()
        calls = CounterMetricFamily(
            "cydist_calls", "Collectives and messages that have begun.", labels=_BY_CALL
        )
        nbytes = CounterMetricFamily(
            "cydist_bytes", "Bytes of the arrays of these calls.", labels=_BY_CALL
        )
        spent = CounterMetricFamily(
            "cydist_call_seconds",
            "Time in calls. A call on the fast path that did not wait adds nothing.",
            labels=_BY_CALL,
        )
        waited = CounterMetricFamily(
            "cydist_wait_seconds", "Time in which calls waited for other ranks.", labels=_BY_CALL
        )
        for (rank, kind), counts in sorted(by_kind.items()):
            labels = (self._run_id, str(rank), *kind)
            calls.add_metric(labels, counts.calls)
            nbytes.add_metric(labels, counts.nbytes)
            spent.add_metric(labels, counts.spent_ns / 1e9)
            waited.add_metric(labels, counts.waited_ns / 1e9)
        awaited = CounterMetricFamily(
            "cydist_awaited_seconds",
            "Time in which calls of this host's other ranks waited for a rank.",
            labels=("run_id", "peer"),
        )
        by_peer: dict[int, int] = dict.fromkeys(totals, 0)
        for total in totals.values():
            for peer, ns in total.awaited_ns.items():
                by_peer[peer] = by_peer.get(peer, 0) + ns
        for peer, ns in sorted(by_peer.items()):
            awaited.add_metric((self._run_id, str(peer)), ns / 1e9)
        guessed = CounterMetricFamily(
            "cydist_calls_estimated",
            "Calls, in cydist_calls, whose kind, bytes and times are estimates.",
            labels=("run_id", "rank"),
        )
        for rank, number in sorted(estimated.items()):
            guessed.add_metric((self._run_id, str(rank)), number)
        inside = GaugeMetricFamily(
            "cydist_running_call_seconds",
            "Time since the begin of the call that a rank is in; 0: it is in none.",
            labels=("run_id", "rank"),
        )
        for rank, ns in sorted(running.items()):
            inside.add_metric((self._run_id, str(rank)), ns / 1e9)
        yield from (calls, nbytes, spent, waited, awaited, guessed, inside)


def serve(job: JobFile, where: Address) -> None:
    """Serve the metrics of a job until its files are gone.

    Raises:
        ValueError: prometheus_client is not installed.
        OSError: The address is in use, or not this host's.
    """
    try:
        from prometheus_client import CollectorRegistry, start_http_server
    except ImportError:
        raise ValueError(INSTALL) from None
    metrics = JobMetrics(job)
    registry = CollectorRegistry(auto_describe=False)
    registry.register(metrics)
    try:
        server, _ = start_http_server(where.port, where.host, registry)
    except OSError as error:
        raise OSError(f"metrics at {where}: {error}") from None
    shown = where._replace(port=server.server_port)
    print(f"metrics of job {job.run_id} at http://{shown}/metrics", flush=True)
    ended = threading.Event()
    signal.signal(signal.SIGTERM, lambda number, frame: ended.set())
    signal.signal(signal.SIGINT, lambda number, frame: ended.set())
    while os.path.isdir(job.directory) and not ended.wait(metrics.look()):
        pass


def start_for_job(directory: str, listen: str) -> int:
    """Start `cydist metrics` for the ranks of a launcher, and return its pid. It ends with this
    process. Raises OSError."""
    parent = os.getpid()
    return subprocess.Popen(
        [sys.executable, "-m", "cydist", "metrics", directory, "--listen", listen],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, preexec_fn=lambda: die_with(parent),
    ).pid  # fmt: skip
