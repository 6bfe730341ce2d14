"""OpenTelemetry: each call is a span with its fields, by OpenTelemetry's own SDK."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import cydist as dist
from cydist.testing import run_threads

sdk = pytest.importorskip("opentelemetry.sdk.trace")


@pytest.fixture
def exporter() -> Iterator[Any]:
    """The spans of the calls in a test."""
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from cydist.interop import otel_spans

    made = InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(made))
    made.tracer = provider.get_tracer("test")
    handle = otel_spans.add_spans(made.tracer)
    yield made
    handle.remove()


def test_a_collective_is_a_span(exporter: Any) -> None:
    """Of each rank, with the fields of the call."""
    run_threads(lambda rank: dist.all_reduce(np.ones(6, "float32")), 2)
    spans = exporter.get_finished_spans()
    assert [span.name for span in spans] == ["cydist.all_reduce"] * 2
    for span in spans:
        assert dict(span.attributes) == {
            "cydist.group": "0", "cydist.backend": "inproc", "cydist.nbytes": 24,
            "cydist.dtype": "float32", "cydist.peers": (0, 1), "cydist.async_op": False,
            "cydist.seq": 1,
        }  # fmt: skip
        assert span.status.is_unset
        assert span.end_time > span.start_time


@pytest.mark.parametrize("async_op", [False, True], ids=["blocking", "asynchronous"])
def test_its_parent_is_the_span_of_the_caller(exporter: Any, async_op: bool) -> None:
    """Also of a call that runs on another thread."""

    def body(rank: int) -> int:
        with exporter.tracer.start_as_current_span("step") as step:
            work = dist.all_reduce(np.ones(6), async_op=async_op)
            if work is not None:
                work.wait()
        number: int = step.get_span_context().span_id
        return number

    steps = run_threads(body, 2)
    found = [each for each in exporter.get_finished_spans() if each.name == "cydist.all_reduce"]
    assert sorted(each.parent.span_id for each in found) == sorted(steps)


def test_an_error(exporter: Any) -> None:
    """Its span has the exception and the status."""

    def body(rank: int) -> None:
        with pytest.raises(dist.MismatchError):
            dist.all_reduce(np.ones(3 + rank))

    run_threads(body, 2)
    for span in exporter.get_finished_spans():
        assert not span.status.is_ok
        assert "disagree about the number of elements" in span.status.description
        assert [event.attributes["exception.type"] for event in span.events] == [
            "cydist.MismatchError"
        ]
