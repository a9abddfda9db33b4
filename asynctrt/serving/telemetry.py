"""Make spans for a server's requests if OpenTelemetry is set up.

If it is not installed, or has no provider, requests pay nothing.
"""

from collections.abc import Callable
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from asynctrt._util import clock
from asynctrt.serving.admission import Inference, error_of

if TYPE_CHECKING:
    from asynctrt.observe.opentelemetry import Tracer

SCOPE: Final = "asynctrt.serving"


def find_tracing() -> Callable[[Inference], None] | None:
    """Return a function that makes an ended request's spans; ``None`` if tracing is not set up."""
    if find_spec("opentelemetry") is None:
        return None
    from asynctrt.observe.opentelemetry import trace  # noqa: PLC0415  (it is optional)

    if isinstance(trace.get_tracer_provider(), trace.ProxyTracerProvider):
        return None
    return Tracing(trace.get_tracer(SCOPE))


class Tracing:
    """Make a span for each request, with child spans for the queue, the copies and the compute.

    A request with a ``traceparent`` header becomes part of that trace.
    """

    def __init__(self, tracer: "Tracer") -> None:
        from asynctrt.observe.opentelemetry import add_outcome, propagate, trace  # noqa: PLC0415

        self._tracer = tracer
        self._extract = propagate.extract
        self._in_span = trace.set_span_in_context
        self._kind = trace.SpanKind.SERVER
        self._add_outcome = add_outcome

    def __call__(self, inference: Inference) -> None:
        now_ns = clock.now_ns()
        offset_ns = clock.wall_ns(now_ns) - now_ns
        served, future = inference.served, inference.future
        carrier = {
            name.decode("latin-1"): value.decode("latin-1")
            for name, value in inference.headers.items()
            if name in (b"traceparent", b"tracestate", b"baggage")
        }
        span = self._tracer.start_span(
            f"infer {served.name}",
            context=self._extract(carrier),
            kind=self._kind,
            start_time=inference.began_ns + offset_ns,
            attributes={
                "asynctrt.model": served.name,
                "asynctrt.version": served.version,
                "asynctrt.request_id": inference.request.id,
            },
        )
        error = error_of(future)
        if error is not None:
            self._add_outcome(span, error)
        else:
            result = future.result()
            self._add_outcome(span, result)
            self._parts(span, result.timing, inference.began_ns + offset_ns)
        span.end(now_ns + offset_ns)

    def _parts(self, span: Any, timing: Any, start_ns: int) -> None:
        """Make the child spans back to back: their lengths are measured, the gaps between them are not."""
        context = self._in_span(span)
        for name in ("queue", "copy_in", "compute", "copy_out"):
            end_ns = start_ns + getattr(timing, f"{name}_ns")
            part = self._tracer.start_span(name, context=context, start_time=start_ns)
            part.end(end_ns)
            start_ns = end_ns
