"""Spans of what an application asks of its engines, with OpenTelemetry's own SDK."""

import asyncio
import importlib
import sys

import numpy as np
import pytest
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import Decision, Sampler, SamplingResult
from opentelemetry.trace import StatusCode

import asynctrt
from asynctrt.errors import MissingExtraError, UsageError
from asynctrt.observe.metrics import ENGINE, HISTOGRAM
from asynctrt.observe.opentelemetry import export_metrics, trace_requests
from asynctrt.tensors import TensorSpec
from asynctrt.testing import LatchDevice
from tests.models import double_model, failing_model, rows

pytestmark = pytest.mark.anyio


@pytest.fixture
def recorded():
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    yield provider, exporter.get_finished_spans
    provider.shutdown()


async def test_a_request_has_a_span_within_its_callers(recorded):
    provider, spans = recorded
    async with asynctrt.open(double_model()) as engine:
        trace_requests(engine, name="doubler", tracer_provider=provider)
        with provider.get_tracer("application").start_as_current_span("handler") as handler:
            result = await engine.infer(rows(1, 2, 3), timeout=5)
    span, _ = spans()
    assert (span.name, span.status.status_code) == ("infer doubler", StatusCode.UNSET)
    assert span.parent.span_id == handler.get_span_context().span_id
    timing = result.timing
    assert dict(span.attributes) == {
        "asynctrt.model": "doubler",
        "asynctrt.rows": 3,
        "asynctrt.batch_rows": 3,
        "asynctrt.launched_ns": result.launched_ns,
        "asynctrt.queue_s": timing.queue_ns / 1e9,
        "asynctrt.compute_s": timing.compute_ns / 1e9,
    }


async def test_requests_of_a_batch_say_when_it_was_launched(recorded):
    provider, spans = recorded
    device = LatchDevice()
    async with asynctrt.open(double_model(), device=device, max_rows=8, contexts=1) as engine:
        trace_requests(engine, tracer_provider=provider)
        first = asyncio.create_task(engine.infer(rows(1)))
        await device.wait_held(1)
        others = [asyncio.create_task(engine.infer({"input": rows(1, 2).tolist()})) for _ in range(2)]
        with engine.tracing() as batches:
            await asyncio.sleep(0)  # Those that are to share a batch are queued.
            device.open()
            await asyncio.gather(first, *others)
    (batch,) = [span for span in spans() if span.name.startswith("batch")]
    requests = [span for span in spans() if span is not batch]
    found = sorted(
        (span.attributes["asynctrt.launched_ns"], span.attributes["asynctrt.rows"]) for span in requests
    )
    assert [[link.context for link in span.links] for span in requests] == [[], *[[batch.context]] * 2]
    assert (batch.parent, batch.attributes["asynctrt.batch_rows"]) == (None, 4)
    last = requests[-1]
    assert last.start_time <= batch.start_time <= batch.end_time <= last.end_time
    launched = [batch.launched_ns for batch in batches]
    assert found == [(launched[0], 1), (launched[1], 2), (launched[1], 2)]


class OnlyRequests(Sampler):
    """A sampler that takes no batches, as one that takes a part of all traces often does."""

    def should_sample(self, parent_context, trace_id, name, *_, **__):
        return SamplingResult(Decision.DROP if name.startswith("batch") else Decision.RECORD_AND_SAMPLE)

    def get_description(self):
        return "OnlyRequests"


async def test_requests_have_no_link_to_a_batch_that_is_not_sampled():
    exporter, provider = InMemorySpanExporter(), TracerProvider(OnlyRequests())
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    async with asynctrt.open(double_model()) as engine:
        trace_requests(engine, tracer_provider=provider)
        await asyncio.gather(*[engine.infer(rows(1)) for _ in range(4)])
    assert [len(span.links) for span in exporter.get_finished_spans()] == [0] * 4
    provider.shutdown()


async def test_a_request_that_fails_or_is_cancelled_has_an_error(recorded):
    provider, spans = recorded
    device = LatchDevice()
    async with asynctrt.open(failing_model(), device=device) as engine:
        trace_requests(engine, tracer_provider=provider)
        with pytest.raises(asynctrt.InputError):
            await engine.infer(rows(1, dims=(3,)))
        gone = asyncio.create_task(engine.infer(rows(1)))
        await device.wait_held(1)
        gone.cancel()
        await asyncio.wait([gone])
        device.open()
        with pytest.raises(asynctrt.ExecutionError):
            await engine.infer(rows(-1))
    wrong, left, broken = spans()
    assert [span.status.status_code for span in spans()] == [StatusCode.ERROR] * 3
    assert wrong.status.description.startswith("InputError: ")
    assert left.status.description == "cancelled"
    assert broken.events[0].attributes["exception.type"].endswith("ExecutionError")


async def test_stages_of_a_pipeline_are_within_its_request(recorded):
    async def whole(inputs):
        return await engine.infer(inputs)

    provider, spans = recorded
    spec = TensorSpec("input", np.float32, (4,)), TensorSpec("output", np.float32, (4,))
    async with (
        asynctrt.open(double_model()) as engine,
        asynctrt.Pipeline(whole, inputs=spec[0], outputs=spec[1]) as pipeline,
    ):
        trace_requests(engine, name="stage", tracer_provider=provider)
        trace_requests(pipeline, tracer_provider=provider)
        await pipeline.infer(rows(1))
    stage, whole = spans()
    assert [stage.name, whole.name] == ["infer stage", "infer pipeline"]
    assert stage.parent.span_id == whole.context.span_id


async def test_calls_of_a_decorated_function(recorded):
    provider, spans = recorded

    @asynctrt.batch
    def double(x):
        return 2 * x

    async with double:
        trace_requests(double.engine, tracer_provider=provider)
        assert await double(3) == 6
    assert [span.name for span in spans()] == ["infer double"]


async def test_without_a_provider_or_twice():
    async with asynctrt.open(double_model()) as engine:
        assert "infer" not in vars(engine), "it costs nothing"
        trace_requests(engine)
        assert (await engine.infer(rows(1)))["output"].tolist() == rows(2).tolist()
        with pytest.raises(UsageError, match="are traced already"):
            trace_requests(engine)


def test_the_extra_is_named_where_it_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    monkeypatch.delitem(sys.modules, "asynctrt.observe.opentelemetry")
    with pytest.raises(MissingExtraError, match=r"pip install 'asynctrt\[otel\]'"):
        importlib.import_module("asynctrt.observe.opentelemetry")


async def test_metrics_have_prometheus_names_and_follow_the_engines():
    reader = InMemoryMetricReader()
    provider, engines = MeterProvider(metric_readers=[reader]), {}
    export_metrics(engines, meter_provider=provider)

    def collected():
        """Values by metric, each by the attributes of its points."""
        data = reader.get_metrics_data()
        if data is None:
            return {}
        (scope,) = data.resource_metrics[0].scope_metrics
        assert scope.scope.name == "asynctrt"
        return {
            metric.name: {tuple(point.attributes.values()): point.value for point in metric.data.data_points}
            for metric in scope.metrics
        }

    assert collected() == {}
    async with asynctrt.open(double_model()) as engine:
        engines["doubler"] = engine
        await engine.infer(rows(1, 2, 3))
        found = collected()
        assert found["nv_inference_count"] == {("doubler", "1"): 3}
        assert found["asynctrt_requests_total"]["doubler", "1", "succeeded"] == 1
        assert found["asynctrt_contexts"] == {("doubler", "1"): engine.statistics().contexts}
        absent = {"asynctrt_device_seconds_total", "asynctrt_held_seconds_total"}  # For want of a weight.
        assert set(found) == {metric.name for metric in ENGINE if metric.kind != HISTOGRAM} - absent
    assert collected() == {}
    provider.shutdown()
