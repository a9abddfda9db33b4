"""The samples of every second, against engines that did what the test knows."""

import asyncio
import json
import sys

import numpy as np
import pytest

import asynctrt
from asynctrt.kserve.json_codec import dump
from asynctrt.serving import sampler as module
from asynctrt.serving.admission import Caller
from asynctrt.serving.repository import Repository
from asynctrt.serving.sampler import MODEL_FIELDS, Sampler, percentiles_ms, resident_nbytes
from asynctrt.statistics import batch_bounds
from asynctrt.testing import LatchDevice
from tests.helpers import until
from tests.models import double_model, failing_model, rows

pytestmark = pytest.mark.anyio
WAIT_S = 30
SECOND_NS = 1_000_000_000

SERVER = {"connections": lambda: 3, "in_flight": lambda: 2, "lag_ns": lambda: 250_000_000}
OF_THE_SECOND = MODEL_FIELDS[:11]
QUIET = dict.fromkeys(OF_THE_SECOND) | {"answers_per_s": 0, "rows_per_s": 0, "failures_per_s": 0}


class Clock:
    """Stands still until it is told to go on."""

    def __init__(self):
        self.ns = 5 * SECOND_NS
        self.cpu_ns = 0

    def __call__(self):
        return self.ns


class Bench:
    """A repository, a sampler of it and a clock."""

    def __init__(self, *engines, **kw):
        self.repository = Repository()
        for number, engine in enumerate(engines, 1):
            self.repository.add("double", engine, version=str(number))
        self.clock = Clock()
        self.sampler = Sampler(self.repository, self.clock, cpu_ns=lambda: self.clock.cpu_ns, **(SERVER | kw))

    def second(self, key="double:1", seconds=1.0):
        """Let a second pass and sample it; the model's figures by name."""
        self.clock.ns += round(seconds * SECOND_NS)
        self.sampler.sample()
        figures = self.last()["models"].get(key)
        return figures and dict(zip(MODEL_FIELDS, figures, strict=True))

    def last(self):
        return self.sampler.history()["samples"][-1]

    async def answered(self, *sizes, took_ns=1_000_000, version=""):
        """Requests of so many rows, one after another, answered as the server does it."""
        served = self.repository.find("double", version)
        for size in sizes:
            call = served.codec.decode(*message(size))
            began_ns = module.clock.now_ns()
            call = served.submit(call, Caller(), None, began_ns, {}, lambda _: None)
            await asyncio.wait([call.future])
            served.ended(call)
            if not call.future.exception():
                served.latencies_ns[-1] = took_ns


def message(size):
    data = np.ones((size, 4)).tolist()
    text = json.dumps({"inputs": [{"name": "input", "datatype": "FP32", "shape": [size, 4], "data": data}]})
    return text.encode(), len(text)


def of_the_second(figures):
    return {name: figures[name] for name in OF_THE_SECOND}


class TestRates:
    async def test_a_second_is_what_was_done_in_it(self):
        async with asynctrt.open(double_model(), max_rows=8) as engine:
            bench = Bench(engine)
            await bench.answered(1, 3, 8)
            figures = bench.second()
            assert figures["answers_per_s"] == 3
            assert figures["rows_per_s"] == 12
            assert figures["batch_rows"] == 4
            assert figures["failures_per_s"] == 0
            assert figures["batches"] == [1, 0, 1, 1]
            done = engine.statistics()
            for name, total_ns in (
                ("queue_ms", done.queue_ns),
                ("copy_in_ms", done.copy_in_ns),
                ("compute_ms", done.compute_ns),
                ("copy_out_ms", done.copy_out_ns),
            ):
                assert figures[name] == pytest.approx(total_ns / 3 / 1e6, abs=1e-4)
            await bench.answered(2)
            figures = bench.second(seconds=0.5)
            assert (figures["answers_per_s"], figures["rows_per_s"], figures["batch_rows"]) == (2, 4, 2)

    async def test_a_second_without_answers_has_no_latencies(self):
        async with asynctrt.open(double_model()) as engine:
            bench = Bench(engine)
            assert of_the_second(bench.second()) == QUIET
            await bench.answered(1)
            assert bench.second()["p50_ms"] is not None
            assert of_the_second(bench.second()) == QUIET

    async def test_what_was_done_before_is_no_second_s(self):
        async with asynctrt.open(double_model()) as engine:
            await engine.infer(rows(1))
            repository = Bench(engine).repository
            served = repository.find("double")
            served.latencies_ns.append(1)
            served.failures["OTHER"] = 7
            bench = Bench()
            bench.sampler = Sampler(repository, bench.clock, **SERVER)
            assert of_the_second(bench.second()) == QUIET

    async def test_failures(self):
        async with asynctrt.open(failing_model()) as engine:
            bench = Bench(engine)
            served = bench.repository.find("double")
            served.count_failure(asynctrt.QueueFullError("full"), 1)
            served.count_failure(ValueError("bad"), 1)
            assert bench.second()["failures_per_s"] == 2
            assert bench.second()["failures_per_s"] == 0

    async def test_what_is_of_the_moment(self):
        device = LatchDevice(concurrency=1)
        async with asynctrt.open(double_model(), device=device, max_rows=2, contexts=1) as engine:
            bench = Bench(engine)
            tasks = [asyncio.create_task(bench.answered(2))]
            await until(lambda: engine.statistics().in_flight_batches == 1)
            tasks += [asyncio.create_task(bench.answered(2)) for _ in range(2)]
            await until(lambda: engine.statistics().queued_requests == 2)
            figures = bench.second()
            assert figures["queued_requests"] == 2
            assert figures["queued_rows"] == 4
            assert figures["in_flight_batches"] == 1
            assert figures["pending_requests"] == 3
            assert figures["contexts"] == 1
            assert figures["memory_bytes"] == engine.statistics().memory_nbytes
            device.open()
            await asyncio.gather(*tasks)
            figures = bench.second()
            assert (figures["queued_requests"], figures["pending_requests"]) == (0, 0)


class TestLatencies:
    async def test_they_are_taken_and_the_next_second_begins_anew(self):
        async with asynctrt.open(double_model()) as engine:
            bench = Bench(engine)
            served = bench.repository.find("double")
            await bench.answered(1, 1, took_ns=2_000_000)
            taken = served.latencies_ns
            assert bench.second()["p99_ms"] == 2
            assert served.latencies_ns == []
            assert served.latencies_ns is not taken
            await bench.answered(1, took_ns=7_000_000)
            assert bench.second()["p50_ms"] == 7

    @pytest.mark.parametrize("count", [1, 2, 3, 99, 100, 101, 1000])
    async def test_percentiles_are_latencies_that_occurred(self, count):
        latencies = np.random.default_rng(count).permutation(count) + 1
        got = percentiles_ms((latencies * 1_000_000).tolist())
        # Of 1 to n, the smallest that at least so many percent are not above.
        assert got == [min(n for n in range(1, count + 1) if 100 * n >= p * count) for p in (50, 95, 99)]

    async def test_none_of_none(self):
        assert percentiles_ms([]) == [None, None, None]


class TestModelsThatComeAndGo:
    async def test_one_loaded_again_has_no_negative_rates(self):
        async def opener():
            return await asynctrt.open(double_model(), max_rows=8)

        bench = Bench()
        bench.repository.add("double", opener=opener)
        assert bench.second() is None
        await bench.repository.load("double")
        await bench.answered(1)
        figures = bench.second()
        assert set(of_the_second(figures).values()) == {None}, "nobody knows how it stood a second ago"
        assert figures["batches"] is None
        await bench.answered(1, 2, 3)
        assert bench.second()["answers_per_s"] == 3
        await bench.repository.unload("double")
        await bench.repository.load("double")
        await bench.answered(1)
        assert set(of_the_second(bench.second()).values()) == {None}
        await bench.answered(5)
        figures = bench.second()
        assert (figures["answers_per_s"], figures["rows_per_s"], figures["batches"]) == (1, 5, [0, 0, 0, 1])
        await bench.repository.aclose()
        assert bench.second() is None
        assert bench.last()["models"] == {}
        assert bench.sampler._readings == {}

    async def test_versions_are_told_apart(self):
        async with asynctrt.open(double_model()) as one, asynctrt.open(double_model()) as two:
            bench = Bench(one, two)
            await bench.answered(1, version="2")
            assert bench.second("double:2")["answers_per_s"] == 1
            assert bench.last()["models"]["double:1"][0] == 0
            assert bench.last()["models"].keys() == {"double:1", "double:2"}


class TestServer:
    async def test_its_own_figures(self):
        bench = Bench(connections=lambda: 4, in_flight=lambda: 9)
        bench.clock.cpu_ns += SECOND_NS // 4
        bench.second()
        connections, in_flight, lag_ms, cpu, resident = bench.last()["server"]
        assert (connections, in_flight, lag_ms, cpu) == (4, 9, 250, 25)
        assert resident is None or resident > 1 << 20

    async def test_memory_is_that_of_proc_or_unknown(self, monkeypatch, tmp_path):
        if sys.platform == "linux":
            assert resident_nbytes() > 1 << 20
        monkeypatch.setattr(module, "STATM", tmp_path / "statm")
        assert resident_nbytes() is None
        (tmp_path / "statm").write_text("nonsense")
        assert resident_nbytes() is None
        (tmp_path / "statm").write_text("9 3 1")
        assert resident_nbytes() == 3 * module.PAGE_NBYTES


class TestHistory:
    async def test_it_is_bounded_and_numbered(self, monkeypatch):
        monkeypatch.setattr(module.clock, "wall_ns", lambda at_ns: 1000 * SECOND_NS + at_ns)
        monkeypatch.setattr(module, "SAMPLES_MAX", 3)
        bench = Bench()
        for _ in range(5):
            bench.second()
        history = bench.sampler.history()
        assert [sample["number"] for sample in history["samples"]] == [3, 4, 5]
        assert history["number"] == 5
        assert [sample["number"] for sample in bench.sampler.history(2)["samples"]] == [4, 5]
        assert [sample["at_ms"] for sample in history["samples"]] == [1008_000, 1009_000, 1010_000]

    async def test_five_minutes_by_default(self):
        bench = Bench()
        for _ in range(301):
            bench.second()
        assert len(bench.sampler.history()["samples"]) == 300

    async def test_it_is_ready_for_json(self):
        async with asynctrt.open(double_model()) as engine:
            bench = Bench(engine)
            await bench.answered(1)
            bench.second()
            bench.second()
            history = json.loads(dump(bench.sampler.history()))
            assert len(history["model_fields"]) == len(history["samples"][0]["models"]["double:1"])
            assert len(history["server_fields"]) == len(history["samples"][0]["server"])
            assert history["started_ms"] > 0


@pytest.mark.parametrize(
    ("rows_max", "bounds"),
    [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (4, [1, 2, 4]), (48, [1, 2, 4, 8, 16, 32, 48])],
)
async def test_batches_are_counted_up_to_powers_of_two(rows_max, bounds):
    assert batch_bounds(rows_max) == bounds
