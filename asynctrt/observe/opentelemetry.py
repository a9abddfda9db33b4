"""Spans of requests and metrics of engines for OpenTelemetry. The only importer of ``opentelemetry``.

::

    trace_requests(engine)  # From now on each engine.infer has a span.
    export_metrics({"classifier": engine})  # And each collection has the engine's metrics.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import lru_cache, wraps
from typing import Any, Final

from asynctrt._util import clock
from asynctrt.core.inputs import Inputs
from asynctrt.engine import Engine
from asynctrt.errors import MissingExtraError, UsageError
from asynctrt.observe.metrics import COUNTER, ENGINE, HISTOGRAM, Metric, readings_of
from asynctrt.tensors import InferResult

try:
    from opentelemetry import metrics, propagate, trace
    from opentelemetry.context import Context
    from opentelemetry.metrics import CallbackOptions, MeterProvider, Observation
    from opentelemetry.trace import Span, SpanContext, Tracer, TracerProvider
except ImportError as error:
    raise MissingExtraError("spans need opentelemetry-api: pip install 'asynctrt[otel]'") from error

__all__ = ["Span", "Tracer", "add_outcome", "export_metrics", "propagate", "trace", "trace_requests"]
"""Includes the names that a server needs to make spans, because it imports them from here."""

SCOPE: Final = "asynctrt"

BATCHES_MAX: Final = 64
"""How many of the latest batches' spans are known: requests of a batch end together."""


def trace_requests(
    engine: Engine, *, name: str | None = None, tracer_provider: TracerProvider | None = None
) -> None:
    """Make a span for each later call of ``engine.infer``, as a child of the caller's current span.

    The attributes are ``asynctrt.model``, ``asynctrt.rows``, ``asynctrt.batch_rows``, ``asynctrt.queue_s``,
    ``asynctrt.compute_s``, and ``asynctrt.launched_ns``, which is equal for all requests of a batch: see
    :attr:`InferResult.launched_ns`. Requests that shared a batch link to its span, which is a separate trace.
    The span of a failed or cancelled request has an error status. Tracing costs nothing for engines that are
    not traced.

    :param name: the model's name in spans; the engine's name by default.
    :param tracer_provider: the provider that receives the spans; OpenTelemetry's global one by default.
    :raises UsageError: if the engine is traced already.
    """
    if "infer" in vars(engine):
        raise UsageError(f"the requests of {engine!r} are traced already")
    model = engine.name if name is None else name
    tracer = trace.get_tracer(SCOPE, tracer_provider=tracer_provider)
    infer = engine.infer
    batch_of = _batch_spans(tracer, model)

    @wraps(infer)
    async def traced(inputs: Inputs, **options: Any) -> InferResult:
        with tracer.start_as_current_span(
            f"infer {model}",
            attributes={"asynctrt.model": model},
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            try:
                result = await infer(inputs, **options)
            except BaseException as raised:
                add_outcome(span, raised)
                raise
            if span.is_recording():
                add_outcome(span, result)
                if (rows := _rows(engine, inputs)) is not None:
                    span.set_attribute("asynctrt.rows", rows)
                if result.batch_rows > (rows or 1):
                    timing = result.timing
                    took_ns = timing.copy_in_ns + timing.compute_ns + timing.copy_out_ns
                    batch = batch_of(result.launched_ns, result.batch_rows, took_ns)
                    if batch.trace_flags.sampled:  # A sampler decides on it by itself.
                        span.add_link(batch)
            return result

    vars(engine)["infer"] = traced


def _batch_spans(tracer: Tracer, model: str) -> Callable[[int, int, int], SpanContext]:
    """Return a function that makes a batch's span when its first request ends, and finds it for the others.

    It takes what these requests have in common: when the batch was launched, its rows, and how long it took.
    """

    @lru_cache(BATCHES_MAX)
    def batch_of(launched_ns: int, rows: int, took_ns: int) -> SpanContext:
        start_ns = clock.wall_ns(launched_ns)
        span = tracer.start_span(
            f"batch {model}",
            context=Context(),
            start_time=start_ns,
            attributes={"asynctrt.model": model, "asynctrt.batch_rows": rows},
        )
        span.end(start_ns + took_ns)
        return span.get_span_context()

    return batch_of


def export_metrics(engines: Mapping[str, Engine], *, meter_provider: MeterProvider | None = None) -> None:
    """Export the metrics of an application's own engines, under the names that they have in Prometheus.

    The attributes are ``model`` and ``version``. Closed engines are left out, and so is the histogram of
    batch sizes, because OpenTelemetry has no observable histograms. Call it once.

    :param engines: open engines by the names that label them. The mapping is read at each collection, so
        engines may be added to it later.
    :param meter_provider: the provider that receives the metrics; OpenTelemetry's global one by default.
    """
    meter = metrics.get_meter(SCOPE, meter_provider=meter_provider)
    for metric in ENGINE:
        if metric.kind != HISTOGRAM:
            counts = metric.kind == COUNTER
            create = meter.create_observable_counter if counts else meter.create_observable_gauge
            create(metric.name, [_callback(metric, engines)], description=metric.text)


def _callback(
    metric: Metric, engines: Mapping[str, Engine]
) -> Callable[[CallbackOptions], Iterable[Observation]]:
    """Return a function that reads one metric of all engines."""

    def observe(_: CallbackOptions) -> Iterator[Observation]:
        for reading in readings_of(engines):
            for _suffix, values, value in metric.samples(reading):
                yield Observation(value, dict(zip(metric.labels, values, strict=True)))

    return observe


def add_outcome(span: Span, outcome: InferResult | BaseException) -> None:
    """Add a request's outcome to its span: its batch and times, or its error."""
    if isinstance(outcome, InferResult):
        timing = outcome.timing
        span.set_attributes(
            {
                "asynctrt.batch_rows": outcome.batch_rows,
                "asynctrt.launched_ns": outcome.launched_ns,
                "asynctrt.queue_s": timing.queue_ns / 1e9,
                "asynctrt.compute_s": timing.compute_ns / 1e9,
            }
        )
    elif isinstance(outcome, Exception):
        span.record_exception(outcome)
        span.set_status(trace.StatusCode.ERROR, f"{type(outcome).__name__}: {outcome}")
    else:  # asyncio.CancelledError, or an exception that ends the process.
        span.set_status(trace.StatusCode.ERROR, "cancelled")


def _rows(engine: Engine, inputs: Inputs) -> int | None:
    """Return the number of rows of accepted inputs, or ``None`` if no input has rows."""
    named: Mapping[str, Any] = inputs if isinstance(inputs, Mapping) else {engine.inputs[0].name: inputs}
    for spec in engine.inputs:
        if spec.axis is not None and (array := named.get(spec.name)) is not None:
            return int(array.shape[spec.axis] if hasattr(array, "shape") else len(array))
    return None
