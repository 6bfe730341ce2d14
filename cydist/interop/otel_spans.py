"""OpenTelemetry spans: one for each collective and message. Needs the package opentelemetry-api.

`pip install "cydist[otel]"` installs it.
"""

from __future__ import annotations

import importlib
from typing import Any

from cydist.groups.hooks import CallInfo, HookHandle, add_hook


def add_spans(tracer: Any = None) -> HookHandle:
    """Record a span for each call of this process from now on.

    A span is named "cydist.all_reduce", begins when the program makes the call, and ends when the
    call has completed. Its parent is the current span of the thread that makes the call. Its
    attributes are the fields of `CallInfo` under "cydist.", such as "cydist.nbytes". After an error
    it has the exception, and its status is ERROR.

    Args:
        tracer: Of OpenTelemetry; None: that of the global provider, called "cydist".

    Returns:
        A `HookHandle`, whose `remove()` ends the recording.

    Raises:
        ImportError: There is no package opentelemetry-api.
    """
    trace: Any = importlib.import_module("opentelemetry.trace")
    used = trace.get_tracer("cydist") if tracer is None else tracer

    def before(call: CallInfo) -> Any:
        fields = {
            "cydist.group": call.group,
            "cydist.backend": call.backend,
            "cydist.nbytes": call.nbytes,
            "cydist.dtype": call.dtype,
            "cydist.peers": call.peers,
            "cydist.async_op": call.async_op,
        }
        return used.start_span(f"cydist.{call.name}", attributes=fields)

    def after(call: CallInfo, span: Any, error: BaseException | None) -> None:
        span.set_attribute("cydist.seq", call.seq)
        if error is not None:
            span.record_exception(error)
            span.set_status(trace.Status(trace.StatusCode.ERROR, str(error)))
        span.end()

    return add_hook(before, after)
