"""Metrics of an application's own engines, with the real library."""

import asyncio
import re
import threading
import urllib.request

import numpy as np
import prometheus_client
import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

import asynctrt
from asynctrt.errors import UsageError
from asynctrt.observe.metrics import ENGINE
from asynctrt.observe.prometheus import EngineCollector
from asynctrt.serving.repository import Repository
from asynctrt.tensors import TensorSpec
from tests.models import double_model, rows
from tests.serving.support import metrics_of

pytestmark = pytest.mark.anyio


def samples_of(text):
    """Return the samples of models, by name and labels. The parser adds _total to Triton's counters."""
    return {
        (re.sub(r"^(nv_\w+)_total$", r"\1", sample.name), *sorted(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "model" in sample.labels
    }


def scraped(registry):
    return samples_of(prometheus_client.generate_latest(registry).decode())


@pytest.fixture
def registry():
    return CollectorRegistry(auto_describe=True)


async def test_they_are_those_of_a_server(registry):
    async with asynctrt.open(double_model(), max_rows=8) as engine:
        registry.register(EngineCollector({"double": engine}))
        await asyncio.gather(*(engine.infer(rows(1)) for _ in range(20)))
        own = scraped(registry)
        repository = Repository()
        repository.add("double", engine)
        text = b"".join((await metrics_of(repository).answer({})).body).decode()
    assert own.items() <= samples_of(text).items()
    labels = ("model", "double"), ("version", "1")
    assert own["nv_inference_request_success", *labels] == 20
    assert own["asynctrt_model_ready", *labels] == 1
    assert own["asynctrt_batch_rows_sum", *labels] == 20


async def test_engines_come_and_go(registry):
    engines = {}
    registry.register(EngineCollector(engines))
    assert scraped(registry) == {}
    async with asynctrt.open(double_model()) as engine:
        engines["double"] = engine
        assert {dict(labels)["model"] for _, *labels in scraped(registry)} == {"double"}
        await engine.drain()
        assert scraped(registry)["asynctrt_model_ready", ("model", "double"), ("version", "1")] == 0
    assert scraped(registry) == {}


async def test_what_is_no_engine_is_refused_when_it_is_registered(registry):
    @asynctrt.batch
    def double(x):
        return 2 * x

    with pytest.raises(UsageError, match="'double' is not an engine but <asynctrt.batch"):
        registry.register(EngineCollector({"double": double}))
    async with double:
        registry.register(EngineCollector({"double": double.engine}))
        await double(1)
        assert scraped(registry)["nv_inference_count", ("model", "double"), ("version", "1")] == 1


async def test_threads_scrape_while_requests_are_answered(registry):
    """Every kind of engine, and sizes of batches that come while the scrape goes through them."""
    spec = TensorSpec("input", np.float32, (4,)), TensorSpec("output", np.float32, (4,))
    ended, failures, scrapes = threading.Event(), [], []

    def scrape(url):
        try:
            while not ended.is_set():
                with urllib.request.urlopen(url, timeout=10) as answer:
                    scrapes.append(samples_of(answer.read().decode()))
        except Exception as error:
            failures.append(error)

    async with (
        asynctrt.open(double_model(), max_rows=64) as engine,
        asynctrt.open("tests.models:double_model", isolation="process", max_rows=64) as isolated,
        asynctrt.Pipeline(engine.infer, inputs=spec[0], outputs=spec[1]) as pipeline,
    ):
        engines = {"engine": engine, "isolated": isolated, "pipeline": pipeline}
        registry.register(EngineCollector(engines))
        server, thread = prometheus_client.start_http_server(0, "127.0.0.1", registry)
        url = f"http://127.0.0.1:{server.server_port}/metrics"
        scraping = [threading.Thread(target=scrape, args=(url,)) for _ in range(2)]
        for one in scraping:
            one.start()
        while len(scrapes) < 20 and not failures:
            for count in range(1, 40):
                given = np.ones((count, 4), np.float32)
                await asyncio.gather(*(each.infer(given) for each in engines.values()))
        ended.set()
        for one in scraping:
            await asyncio.to_thread(one.join)
        server.shutdown()
        server.server_close()
        thread.join()
    assert failures == []
    assert {dict(labels)["model"] for _, *labels in scrapes[-1]} == set(engines)


def test_each_metric_of_an_engine_is_said_once():
    names = [metric.name for metric in ENGINE]
    assert len(names) == len(set(names)) > 20
