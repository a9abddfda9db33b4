"""Sending from this process: what is opened, tried and checked before a run."""

import asyncio
import itertools

import numpy as np
import pytest

import asynctrt
from asynctrt import loadtest
from asynctrt.errors import AsynctrtError, InputError, OptionsError, TargetError
from asynctrt.loadtest.local import Local, answer
from asynctrt.loadtest.samples import Sample
from asynctrt.loadtest.settings import LoadSettings
from tests.loadtest.support import Target, at_once
from tests.models import double_model, double_onnx, sequence_onnx

pytestmark = pytest.mark.anyio

QUICK = {"seconds": 0.25, "warmup": 0.0}


async def test_a_target_that_never_answers_is_said_before_the_run():
    with pytest.raises(TargetError, match=r"did not answer a first request within 0\.1 s"):
        async with Local.open(Target(), LoadSettings(answer_timeout=0.1)):
            pass


async def test_a_target_that_fails_at_once():
    async def broken(inputs):
        raise ZeroDivisionError("odd")

    settings = LoadSettings(dims=())
    with pytest.raises(OptionsError, match="the inputs of this target are not known"):
        async with Local.open(broken, settings):
            pass
    target = Target(lambda target, future: future.set_exception(ZeroDivisionError("odd")))
    with pytest.raises(TargetError, match="failed to answer a first request: ZeroDivisionError: odd"):
        async with Local.open(target, settings):
            pass


async def test_a_model_that_refuses_the_shape(tmp_path):
    np.savez(tmp_path / "rows.npz", input=np.zeros((4, 7), np.float32))
    path = double_onnx(tmp_path / "double.onnx")
    with pytest.raises(InputError, match=r"takes shape \(rows, 4\), given \(1, 7\)"):
        await loadtest.run(path, inputs=tmp_path / "rows.npz", **QUICK)


async def test_dims_that_nobody_said(tmp_path):
    path = sequence_onnx(tmp_path / "sequence.onnx")
    with pytest.raises(OptionsError, match=r"missing: \['length'\].*Set dims length="):
        await loadtest.run(path, **QUICK)
    report = await loadtest.run(path, dims=["length=3", "length=9"], rate=200, **QUICK)
    assert report.runs[0].answered == report.runs[0].requests > 0


async def test_answers_are_checked_against_a_file(tmp_path):
    values = np.random.default_rng(0).random((6, 4), np.float32)
    np.savez(tmp_path / "in.npz", input=values)
    np.savez(tmp_path / "out.npz", output=2 * values)
    path = double_onnx(tmp_path / "double.onnx")
    files = {"inputs": tmp_path / "in.npz", "expect": tmp_path / "out.npz"}
    report = await loadtest.run(path, callers=3, **files, **QUICK)
    assert report.runs[0].error_share == 0
    assert report.runs[0].answered > 6
    np.savez(tmp_path / "out.npz", output=2 * values + (np.arange(6) == 2)[:, None])
    report = await loadtest.run(path, callers=3, seed=1, **files, **QUICK)
    assert 0.05 < report.runs[0].error_share < 0.4  # One of six samples.


async def test_requests_of_every_kind_are_tried():
    asked = []

    def refuse_long(target, future):
        shape = target.prepared[-1]["x"].shape
        asked.append(shape)
        if shape[0] == 3:
            future.set_exception(InputError("too many rows"))
        else:
            future.set_result({})

    target = Target(refuse_long)
    kinds = [
        Sample({"x": np.zeros((count, 2), np.float32)}, count, group=f"rows={count}") for count in (1, 2, 3)
    ]
    local = Local(target, [kind for kind in kinds for _ in range(5)])
    with pytest.raises(InputError, match="too many rows"):
        await local._try(5.0)
    assert asked == [(1, 2), (2, 2), (3, 2)]


async def test_a_refusal_keeps_its_class_and_a_timeout_of_the_target_is_its_own():
    error = asynctrt.DeadlineError("in the queue")
    target = Target(lambda target, future: future.set_exception(error))
    with pytest.raises(asynctrt.DeadlineError, match="in the queue"):
        await answer(target, None, 5.0, "a request")


async def test_a_run_in_an_applications_own_tests():
    async with asynctrt.open(double_model()) as engine:
        report = await loadtest.run(engine, rate=400, seconds=0.5, warmup=0.1, slo="errors<1%")
        assert report.holds, report.runs[0]
        (run,) = report.runs
        assert run.batches.requests >= run.requests
        assert run.generator_cores > 0
        assert engine.statistics().state == "open"


class SampledDevice(asynctrt.HostDevice):
    """A host device on which, as on a GPU, it costs something to time a batch; each takes 1 µs."""

    def __init__(self):
        ticks = itertools.count(0, 1000)
        super().__init__(in_place="always", now_ns=lambda: next(ticks))

    @property
    def timing_is_free(self):
        return False


async def test_a_load_test_does_not_change_how_the_engine_runs():
    """The device times a sample of the batches, as it does for any caller."""
    async with asynctrt.open(double_model(), device=SampledDevice()) as engine:
        report = await loadtest.run(engine, callers=1, requests=1000, seconds=60, warmup=0.0)
        statistics = engine.statistics()
    (run,) = report.runs
    assert run.answered == 1000
    assert statistics.batches_timed < statistics.batches / 2
    assert run.batches.by_rows == {1: 1000}
    assert run.batches.compute > 0


async def test_an_application_may_trace_the_engine_that_it_loads():
    async with asynctrt.open(double_model()) as engine:
        with engine.tracing() as trace:
            report = await loadtest.run(engine, callers=1, requests=20, **QUICK)
        assert report.runs[0].answered == 20
        assert sum(batch.requests for batch in trace) == 21  # And the first request.


async def test_an_async_function_of_the_application(tmp_path):
    calls = []

    async def endpoint(inputs):
        calls.append(inputs["x"].shape)
        await asyncio.sleep(0)
        return {"y": inputs["x"]}

    np.save(tmp_path / "x.npy", np.zeros((3, 2), np.float32))
    with pytest.raises(AsynctrtError, match="give arrays by name"):
        await loadtest.run(endpoint, inputs=tmp_path / "x.npy", **QUICK)
    np.savez(tmp_path / "x.npz", x=np.zeros((3, 2), np.float32))
    report = await loadtest.run(endpoint, inputs=tmp_path / "x.npz", callers=2, requests=20, **QUICK)
    assert report.runs[0].answered == 20
    assert len(calls) == 21  # And the first request.
    assert report.target["where"].endswith("in the application's own process")


async def test_a_target_that_is_the_applications_takes_no_options():
    with pytest.raises(asynctrt.UsageError, match="apply to paths and addresses"):
        await loadtest.run(Target(at_once), token="x")
    with pytest.raises(OptionsError, match=r"unknown setting 'rates' of a load test; did you mean 'rate'"):
        await loadtest.run(Target(at_once), rates=5)


async def test_an_engines_queue_bounds_what_is_on_the_way():
    """All is due within some 3 ms; the engine's queue is smaller than that, and nothing is refused."""
    async with asynctrt.open(double_model(), max_queue_rows=128, max_rows=16) as engine:
        report = await loadtest.run(engine, rate=1e6, requests=3000, warmup=0)
    (run,) = report.runs
    assert run.answered == 3000
    assert not run.errors
