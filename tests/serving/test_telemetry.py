"""Spans, where the application has OpenTelemetry set up."""

import subprocess
import sys

import pytest
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from asynctrt.serving.telemetry import SCOPE, Tracing, find_tracing
from tests.models import failing_model
from tests.serving.support import connected, serving
from tests.serving.test_http import infer, outputs


@pytest.mark.anyio
async def test_spans():

    assert find_tracing() is None, "nobody has set it up"
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    async with serving() as server, connected(server) as raw:
        server.api.observe = Tracing(provider.get_tracer(SCOPE))
        parent = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
        raw.send(infer(1, Traceparent=parent))
        assert outputs(await raw.answer()) == [2]
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert set(spans) == {"infer double", "queue", "copy_in", "compute", "copy_out"}
    whole = spans["infer double"]
    assert f"{whole.context.trace_id:032x}" == "0af7651916cd43dd8448eb211c80319c"
    assert whole.attributes["asynctrt.batch_rows"] == 1
    for name in ("queue", "copy_in", "compute", "copy_out"):
        assert spans[name].parent.span_id == whole.context.span_id
        assert whole.start_time <= spans[name].start_time <= spans[name].end_time
    provider.shutdown()


@pytest.mark.anyio
async def test_a_request_that_fails():
    exporter = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    async with serving({"double": failing_model()}) as server, connected(server) as raw:
        server.api.observe = Tracing(provider.get_tracer(SCOPE))
        raw.send(infer(-1))
        assert (await raw.answer())[0] == 500
    (span,) = exporter.get_finished_spans()
    assert not span.status.is_ok
    assert "ExecutionError" in span.status.description
    assert span.events[0].name == "exception"
    provider.shutdown()


def test_it_is_found_where_a_provider_is_set():
    program = (
        "from opentelemetry import trace; from opentelemetry.sdk.trace import TracerProvider\n"
        "from asynctrt.serving.telemetry import find_tracing\n"
        "assert find_tracing() is None\n"
        "trace.set_tracer_provider(TracerProvider())\n"
        "assert find_tracing() is not None\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30)


def test_without_opentelemetry_nothing_is_done():
    program = (
        "import sys; sys.meta_path.insert(0, type('No', (), {'find_spec': staticmethod(lambda name, *_: "
        "(_ for _ in ()).throw(ImportError(name)) if name.startswith('opentelemetry') else None)}))\n"
        "import importlib.util, asynctrt.serving.telemetry as telemetry\n"
        "telemetry.find_spec = lambda name: None\n"
        "assert telemetry.find_tracing() is None\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=30)
