"""The metrics, read by Prometheus's own parsers, against what was sent."""

import asyncio
import builtins
import gzip
import importlib
import json
import re
import sys

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

import asynctrt
from asynctrt.errors import MissingExtraError
from asynctrt.serving.api import Api
from asynctrt.serving.latency import BOUNDS_S, Latencies
from asynctrt.serving.memory import MemoryLimit
from asynctrt.serving.repository import Repository
from asynctrt.serving.sampler import Sampler
from asynctrt.serving.served import REASONS
from asynctrt.serving.settings import ServerSettings
from asynctrt.testing import LatchDevice
from tests.helpers import until
from tests.models import double_model, failing_model
from tests.serving.support import metrics_of

pytestmark = pytest.mark.anyio
REFUSED_OR_FAILED = (*REASONS, "crowded", "expired", "memory")
WAIT_S = 30

TRITON = {
    "nv_inference_request_success",
    "nv_inference_request_failure",
    "nv_inference_count",
    "nv_inference_exec_count",
    "nv_inference_request_duration_us",
    "nv_inference_queue_duration_us",
    "nv_inference_compute_input_duration_us",
    "nv_inference_compute_infer_duration_us",
    "nv_inference_compute_output_duration_us",
}
NV_TOTAL = re.compile(r"^(nv_\w+)_total$")
OPENMETRICS = b"application/openmetrics-text;version=1.0.0;q=0.5,text/plain;version=0.0.4;q=0.2"


def body(rows, value=1.0):
    data = np.full((rows, 4), value).tolist()
    return json.dumps(
        {"inputs": [{"name": "input", "datatype": "FP32", "shape": [rows, 4], "data": data}]}
    ).encode()


async def infer(api, rows=1, name="double", value=1.0):
    path = f"/v2/models/{name}/infer".encode()
    return (await api.respond("POST", path, {}, body(rows, value))).status


def served(*models, **settings):
    """An API whose models are given as ``(name, engine)``, with the metrics among its pages."""
    repository = Repository()
    for name, engine in models:
        repository.add(name, engine)
    memory = MemoryLimit(1000)
    memory.nbytes = 600
    pages = {"/metrics": metrics_of(repository, memory=memory).page()}
    return Api(repository, ServerSettings(**settings), pages=pages)


async def scrape(api, accept=b""):
    """The families by name, and all samples by name and labels; the format is checked on the way."""
    answer = await api.respond("GET", b"/metrics", {b"accept": accept}, b"")
    assert answer.status == 200
    text = b"".join(answer.body).decode()
    kind = dict(answer.headers)["Content-Type"]
    families = {family.name: family for family in text_string_to_metric_families(text)}
    samples = {
        # The classic parser gives every counter a _total; that the text has none is a test of its own.
        (NV_TOTAL.sub(r"\1", sample.name), *sorted(sample.labels.items())): sample.value
        for family in families.values()
        for sample in family.samples
    }
    assert len(samples) == sum(len(family.samples) for family in families.values()), "one is there twice"
    return families, samples, kind, text


def of(samples, name, model="double", **labels):
    return samples[(name, *sorted({"model": model, "version": "1", **labels}.items()))]


async def test_they_are_compressed_for_whoever_accepts_it():
    async with asynctrt.open(double_model(), max_rows=8) as engine:
        api = served(("double", engine))
        for accepted in (b"gzip", b"deflate, gzip, br"):
            answer = await api.respond("GET", b"/metrics", {b"accept-encoding": accepted}, b"")
            assert dict(answer.headers)["Content-Encoding"] == "gzip"
            assert b"nv_inference_count" in gzip.decompress(b"".join(answer.body))
        for refused in (b"gzip;q=0", b"br", b""):
            answer = await api.respond("GET", b"/metrics", {b"accept-encoding": refused}, b"")
            assert "Content-Encoding" not in dict(answer.headers)


class TestValues:
    async def test_they_are_what_was_sent_and_advance_truthfully(self):
        async with asynctrt.open(double_model(), max_rows=8) as engine:
            api = served(("double", engine))
            _, samples, _, _ = await scrape(api)
            assert {of(samples, name) for name in TRITON - {"nv_inference_request_failure"}} == {0}
            for round_number in (1, 2):
                for rows in (1, 3, 8):
                    assert await infer(api, rows) == 200
                assert (await api.respond("POST", b"/v2/models/double/infer", {}, b"{}")).status == 400
                before, samples = samples, (await scrape(api))[1]
                assert of(samples, "nv_inference_request_success") == 3 * round_number
                assert of(samples, "nv_inference_count") == 12 * round_number
                assert of(samples, "nv_inference_exec_count") == 3 * round_number
                assert of(samples, "nv_inference_request_failure", reason="OTHER") == round_number
                assert of(samples, "asynctrt_requests_total", state="succeeded") == 3 * round_number
                for name in TRITON:
                    if name.endswith("_us"):
                        assert of(samples, name) > of(before, name), name
                parts = ("queue", "compute_input", "compute_infer", "compute_output")
                known_us = sum(of(samples, f"nv_inference_{part}_duration_us") for part in parts)
                left_us = of(samples, "nv_inference_request_duration_us") - known_us
                assert left_us >= 0

    async def test_they_agree_with_the_statistics(self):
        async with asynctrt.open(double_model(), max_rows=8) as engine:
            api = served(("double", engine))
            for rows in (1, 2, 20):
                assert await infer(api, rows) == 200
            samples, done = (await scrape(api))[1], engine.statistics()
            assert of(samples, "nv_inference_request_success") == 3
            assert of(samples, "nv_inference_exec_count") == done.succeeded == 5, "20 rows are 3 parts"
            assert of(samples, "nv_inference_request_duration_us") == done.total_ns / 1e3
            assert of(samples, "nv_inference_queue_duration_us") == done.queue_ns / 1e3
            assert of(samples, "nv_inference_compute_input_duration_us") == done.copy_in_ns / 1e3
            assert of(samples, "nv_inference_compute_infer_duration_us") == done.compute_ns / 1e3
            assert of(samples, "nv_inference_compute_output_duration_us") == done.copy_out_ns / 1e3
            for reason, count in done.launched.items():
                assert of(samples, "asynctrt_batches_launched_total", reason=reason) == count
            assert sum(done.launched.values()) == done.batches == 5
            assert of(samples, "asynctrt_contexts") == done.contexts
            assert of(samples, "asynctrt_contexts_quarantined") == 0
            assert of(samples, "asynctrt_arenas") == done.arenas
            assert of(samples, "asynctrt_memory_bytes") == done.memory_nbytes > 0

    async def test_of_what_would_be_late(self):
        async with asynctrt.open(double_model()) as engine:
            samples = (await scrape(served(("double", engine))))[1]
            assert of(samples, "asynctrt_requests_refused_late_total") == 0

    async def test_of_a_device_that_is_divided(self):
        async with (
            asynctrt.open(double_model(), weight=2) as engine,
            asynctrt.open(double_model()) as plain,
        ):
            api = served(("double", engine), ("plain", plain))
            assert await infer(api, 1) == 200
            samples, done = (await scrape(api))[1], engine.statistics()
            assert of(samples, "asynctrt_device_seconds_total") == done.device_ns / 1e9 > 0
            assert of(samples, "asynctrt_held_seconds_total") == 0
            absent = {
                (f"asynctrt_{name}_seconds_total", ("model", "plain"), ("version", "1"))
                for name in ("device", "held")
            }
            assert not absent & samples.keys()

    @pytest.mark.parametrize(("rows_max", "bounds"), [(1, [1]), (6, [1, 2, 4, 6]), (8, [1, 2, 4, 8])])
    async def test_batches_are_counted_by_their_rows(self, rows_max, bounds):
        async with asynctrt.open(double_model(), max_rows=rows_max) as engine:
            api = served(("double", engine))
            sent = [rows for rows in (1, 1, 2, 3, 4, 5, 6) if rows <= rows_max]
            for rows in sent:
                assert await infer(api, rows) == 200
            families, samples, _, _ = await scrape(api)
            assert families["asynctrt_batch_rows"].type == "histogram"
            for bound in bounds:
                count = sum(rows <= bound for rows in sent)
                assert of(samples, "asynctrt_batch_rows_bucket", le=str(float(bound))) == count
            assert of(samples, "asynctrt_batch_rows_bucket", le="+Inf") == len(sent)
            assert of(samples, "asynctrt_batch_rows_count") == len(sent)
            assert of(samples, "asynctrt_batch_rows_sum") == sum(sent)
            assert sum(key[0] == "asynctrt_batch_rows_bucket" for key in samples) == len(bounds) + 1

    async def test_what_waits_and_what_runs(self):
        device = LatchDevice(concurrency=1)
        opening = asynctrt.open(double_model(), device=device, max_rows=2, contexts=1, max_queue_rows=4)
        async with opening as engine:
            api = served(("double", engine))
            tasks = [asyncio.create_task(infer(api, 2))]
            await until(lambda: engine.statistics().in_flight_batches == 1)
            tasks += [asyncio.create_task(infer(api, 2)) for _ in range(2)]
            await until(lambda: engine.statistics().queued_requests == 2)
            assert await infer(api, 2) == 503
            samples = (await scrape(api))[1]
            assert of(samples, "asynctrt_in_flight_batches") == 1
            assert of(samples, "nv_inference_pending_request_count") == 2
            assert of(samples, "asynctrt_queued_requests") == 2
            assert of(samples, "asynctrt_queued_rows") == 4
            assert of(samples, "asynctrt_pending_requests") == 3
            assert of(samples, "asynctrt_requests_total", state="refused") == 1
            assert of(samples, "nv_inference_request_failure", reason="REJECTED") == 1
            tasks[-1].cancel()
            await until(lambda: tasks[-1].done())
            samples = (await scrape(api))[1]
            assert of(samples, "asynctrt_requests_total", state="cancelled") == 1
            assert of(samples, "nv_inference_request_failure", reason="CANCELED") == 1
            assert of(samples, "asynctrt_queued_requests") == 1
            device.open()
            assert await asyncio.gather(*tasks[:2]) == [200, 200]
            samples = (await scrape(api))[1]
            assert of(samples, "asynctrt_pending_requests") == 0
            assert of(samples, "nv_inference_request_success") == 2

    async def test_a_model_that_fails(self):
        async with asynctrt.open(failing_model()) as engine:
            api = served(("double", engine))
            assert await infer(api, value=-1.0) == 500
            samples = (await scrape(api))[1]
            assert of(samples, "asynctrt_requests_total", state="failed") == 1
            assert of(samples, "nv_inference_request_failure", reason="BACKEND") == 1
            assert of(samples, "nv_inference_request_success") == 0

    async def test_the_server_and_the_process(self):
        api = served()
        samples = (await scrape(api))[1]
        assert samples["asynctrt_server_connections",] == 3
        assert samples["asynctrt_server_requests_in_flight",] == 2
        assert samples["asynctrt_server_memory_bytes",] == 600
        assert samples["asynctrt_server_memory_limit_bytes",] == 1000
        assert samples["asynctrt_server_refused_total", ("reason", "memory")] == 7
        assert samples["asynctrt_build_info", ("version", asynctrt.__version__)] == 1


class TestLatencies:
    async def test_histograms_are_of_the_requests_that_were_answered(self):
        async with asynctrt.open(double_model(), max_rows=8) as engine:
            api = served(("double", engine))
            known = api.repository.find("double").latencies
            for rows in (1, 3):
                assert await infer(api, rows) == 200
            assert known.total[-1] >= known.queue[-1] + known.compute[-1]
            assert await infer(api, 20) == 200  # Its batches may compute side by side.
            assert (await api.respond("POST", b"/v2/models/double/infer", {}, b"{}")).status == 400
            families, samples, _, _ = await scrape(api)
            done = engine.statistics()
            for name, values in (
                ("asynctrt_queue_seconds", known.queue),
                ("asynctrt_compute_seconds", known.compute),
                ("asynctrt_request_seconds", known.total),
            ):
                assert families[name].type == "histogram"
                assert of(samples, f"{name}_count") == 3 == sum(values[:-1])
                assert of(samples, f"{name}_sum") == values[-1] / 1e9 > 0
                counts = [of(samples, f"{name}_bucket", le=str(bound)) for bound in BOUNDS_S]
                assert counts == sorted(counts)
                assert of(samples, f"{name}_bucket", le="+Inf") == 3
            assert known.compute[-1] == done.compute_ns, "that of a split request is that of its batches"

    def test_a_latency_falls_into_the_bucket_whose_bound_it_does_not_exceed(self):
        known = Latencies()
        for ns in (0, 100_000, 100_001, 10_000_000_000, 10_000_000_001):
            known.add(ns, ns, 2 * ns)
        assert known.total[:2] == known.queue[:2] == [2, 1]
        assert known.total[-3:-1] == known.queue[-3:-1] == [1, 1]
        assert known.compute[:3] == [1, 2, 0]
        assert known.compute[-1] == 2 * known.total[-1] == 2 * 20_000_200_002


class TestScaling:
    async def test_what_is_queued_is_estimated_from_the_largest_batches(self):
        device = LatchDevice(concurrency=1)
        opening = asynctrt.open(double_model(), device=device, max_rows=2, contexts=1)
        async with opening as engine:
            api = served(("double", engine))
            samples = (await scrape(api))[1]
            assert of(samples, "asynctrt_drain_seconds") == 0
            tasks = [asyncio.create_task(infer(api, 2))]
            await until(lambda: engine.statistics().in_flight_batches == 1)
            samples = (await scrape(api))[1]
            assert not [key for key in samples if key[0] == "asynctrt_drain_seconds"], "nobody knows yet"
            device.open()
            assert await tasks[0] == 200
            device.shut()
            tasks = [asyncio.create_task(infer(api, 2)) for _ in range(4)]
            await until(lambda: engine.statistics().queued_requests == 3)
            await until(lambda: engine.statistics().in_flight_batches == 1)
            samples, done = (await scrape(api))[1], engine.statistics()
            (size,) = done.by_batch_rows.values()
            batch_s = (size.copy_in_ns + size.compute_ns + size.copy_out_ns) / 1e9
            assert of(samples, "asynctrt_drain_seconds") == pytest.approx(4 * batch_s)
            gate = api.repository.find("double").admission.gate
            gate.waiting_rows = 3  # As if they waited for their client's turn: two more batches.
            samples = (await scrape(api))[1]
            assert of(samples, "asynctrt_drain_seconds") == pytest.approx(6 * batch_s)
            gate.waiting_rows = 0
            device.open()
            assert await asyncio.gather(*tasks) == [200] * 4

    async def test_how_busy_a_model_was_between_samples(self):
        now_ns = 0
        async with asynctrt.open(double_model(), contexts=2) as engine:
            repository = Repository()
            repository.add("double", engine)
            sampler = Sampler(
                repository, lambda: now_ns, connections=lambda: 3, in_flight=lambda: 2, lag_ns=lambda: 0
            )
            api = Api(repository, pages={"/metrics": metrics_of(repository, sampler).page()})
            now_ns += 1_000_000_000
            sampler.sample()
            assert of((await scrape(api))[1], "asynctrt_busy_share") == 0
            before = engine.statistics().compute_ns
            assert await infer(api) == 200
            busy_ns = engine.statistics().compute_ns - before
            now_ns += 4 * busy_ns + 100_000_000
            sampler.sample()
            elapsed_ns = 4 * busy_ns + 100_000_000
            expected = busy_ns / elapsed_ns / engine.statistics().contexts
            assert of((await scrape(api))[1], "asynctrt_busy_share") == pytest.approx(expected)

    async def test_lost_devices_are_counted_once_each(self):
        device = LatchDevice()
        opening = asynctrt.open(double_model(), device=device, batch_timeout=0.05, contexts=1)
        async with opening as engine:
            api = served(("double", engine), ("same", engine))
            assert (await scrape(api))[1]["asynctrt_lost_devices",] == 0
            assert await infer(api) == 503
            assert engine.state == "lost"
            assert (await scrape(api))[1]["asynctrt_lost_devices",] == 1
            device.open()

    async def test_the_standard_collectors(self):
        families = (await scrape(served()))[0]
        assert {"python_gc_collections", "python_info"} <= families.keys()
        if sys.platform == "linux":
            assert {"process_open_fds", "process_cpu_seconds"} <= families.keys()


class TestFormats:
    async def test_a_scrape_gives_the_loop_back_and_is_whole(self, monkeypatch):
        """Whatever happens in between: every metric once, with all models, in one block."""
        async with asynctrt.open(double_model(), max_rows=8) as engine:
            api = served(*[(f"model-{number}", engine) for number in range(40)])
            whole = (await scrape(api))[3]
            monkeypatch.setattr("asynctrt.serving.metrics.SLICE_NS", -1)
            turns = 0

            async def others():
                nonlocal turns
                while True:
                    await asyncio.sleep(0)
                    turns += 1

            task = asyncio.create_task(others())
            families, _, _, text = await scrape(api)
            task.cancel()
            assert turns > 200, "after every piece"
            assert re.findall("^# TYPE .*", text, re.MULTILINE) == re.findall(
                "^# TYPE .*", whole, re.MULTILINE
            )
            for name in ("asynctrt_request_seconds", "asynctrt_requests", "nv_inference_count"):
                models = {sample.labels["model"] for sample in families[name].samples}
                assert len(models) == 40, name
            first, second = await asyncio.gather(scrape(api), scrape(api))
            assert first[1].keys() == second[1].keys()

    async def test_triton_s_names_are_counters_without_a_suffix(self):
        async with asynctrt.open(double_model()) as engine:
            families, _, kind, text = await scrape(served(("double", engine)))
            assert kind == "text/plain; version=0.0.4; charset=utf-8"
            for name in TRITON:
                assert f"\n# TYPE {name} counter\n" in f"\n{text}"
                assert families[name].type == "counter"
                assert f"\n{name}{{" in text
                assert f"{name}_total" not in text
            assert families["nv_inference_pending_request_count"].type == "gauge"
            assert " untyped\n" not in text

    @pytest.mark.parametrize("accept", [b"", b"*/*", OPENMETRICS, b";;,,\xff"])
    async def test_there_is_one_format_whatever_is_asked_for(self, accept):
        assert (await scrape(served(), accept))[2].startswith("text/plain; version=0.0.4")

    async def test_a_name_with_everything_in_it(self):
        name = 'a "quoted" \\ name/with ünïcode'
        async with asynctrt.open(double_model()) as engine:
            samples = (await scrape(served((name, engine))))[1]
            assert of(samples, "nv_inference_count", model=name) == 0


class TestBounds:
    async def test_labels_are_those_of_the_models_there_are(self):
        async with asynctrt.open(double_model()) as one, asynctrt.open(double_model()) as two:
            api = served(("one", one), ("two", two))
            before = (await scrape(api))[1]
            for number in range(50):
                assert await infer(api, name=f"made-up-{number}") == 404
                assert (
                    await api.respond("GET", f"/v2/models/one/versions/{number}".encode(), {}, b"")
                ).status
                assert await infer(api, rows=number % 3, name="one") in (200, 400)
            families, samples, _, _ = await scrape(api)
            assert samples.keys() == before.keys()
            labels = {
                label
                for name, family in families.items()
                for sample in family.samples
                for label in sample.labels
                if not name.startswith("python_")
            }
            assert labels <= {"model", "version", "reason", "le", "state"}
            for family in families.values():
                for sample in family.samples:
                    assert sample.labels.get("model", "one") in ("one", "two")
                    reasons = one.statistics().launched if "launched" in sample.name else REFUSED_OR_FAILED
                    assert sample.labels.get("reason", next(iter(reasons))) in reasons

    async def test_a_model_that_is_unloaded_has_no_figures_but_is_not_forgotten(self):
        async def opener():
            return await asynctrt.open(double_model())

        api = served()
        api.repository.add("double", opener=opener)
        assert of((await scrape(api))[1], "asynctrt_model_ready") == 0
        await api.repository.load("double")
        assert await infer(api) == 200
        samples = (await scrape(api))[1]
        assert of(samples, "asynctrt_model_ready") == 1
        assert of(samples, "nv_inference_count") == 1
        await api.repository.unload("double")
        samples = (await scrape(api))[1]
        assert of(samples, "asynctrt_model_ready") == 0
        known = {key[0] for key in samples if len(key) > 1 and not key[0].startswith("python_")}
        of_server = {
            "asynctrt_build_info",
            "asynctrt_loop_delay_seconds_bucket",
            "asynctrt_server_refused_total",
        }
        assert known == {"asynctrt_model_ready"} | of_server

    async def test_two_of_them_in_one_process(self):
        async with asynctrt.open(double_model()) as one, asynctrt.open(double_model()) as two:
            first, second = served(("double", one)), served(("double", two))
            assert await infer(first) == 200
            assert of((await scrape(first))[1], "nv_inference_count") == 1
            assert of((await scrape(second))[1], "nv_inference_count") == 0

    async def test_it_needs_the_token_unless_it_is_open(self):
        api = served(tokens=("secret",))
        assert (await api.respond("GET", b"/metrics", {}, b"")).status == 401
        assert (
            await api.respond("POST", b"/metrics", {b"authorization": b"Bearer secret"}, b"")
        ).status == 405
        api.pages["/metrics"] = metrics_of(api.repository).page(is_open=True)
        assert (await scrape(api))[1]


async def test_the_extra_is_named_where_it_is_missing(monkeypatch):
    real = builtins.__import__

    def no_prometheus(name, *rest, **kw):
        if name.startswith("prometheus_client"):
            raise ImportError(name)
        return real(name, *rest, **kw)

    for name in ("asynctrt.observe.prometheus", "asynctrt.serving.metrics"):
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", no_prometheus)
    with pytest.raises(MissingExtraError, match=r"pip install 'asynctrt\[serve\]'"):
        importlib.import_module("asynctrt.serving.metrics")
