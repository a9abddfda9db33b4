"""Engines whose weights are taken off the device, and put back."""

import asyncio
import threading

import numpy as np
import pytest

import asynctrt
from asynctrt.backends.tensorrt import TensorRTModel, TensorRTOptions
from asynctrt.devices.host import HostDevice
from asynctrt.errors import (
    DeviceLostError,
    DeviceMemoryError,
    EngineClosedError,
    ExecutionError,
    SuspendedError,
    UsageError,
)
from asynctrt.testing import LatchDevice
from asynctrt.testing.tensorrt import EngineSpec, StrictTensorRT, TensorIO, double_plan
from tests.models import double_model, rows

WAIT_S = 20
SPEC = EngineSpec(inputs=(TensorIO("input", dims=(-1, 4)),), weights_nbytes=1 << 20)
pytestmark = pytest.mark.anyio


class Subject:
    """A model of the double of TensorRT for RTX, whose weights can be unloaded."""

    def __init__(self, device=None, spec=SPEC, **options):
        self.device = device or HostDevice(in_place="never", threads=2)
        self.trt = StrictTensorRT(self.device, flavour="tensorrt_rtx")
        self.spec = spec
        options = TensorRTOptions(**{"suspendable": True, **options})
        plan = double_plan(spec, flavour="tensorrt_rtx")
        self.model = TensorRTModel(plan, device=self.device, flavour=self.trt, options=options)

    def open(self, **kw):
        kw = {"contexts": 2, "arenas": 2, "max_rows": 4, "graphs": "off", **kw}
        return asynctrt.open(self.model, device=self.device, **kw)

    @property
    def weights_nbytes(self):
        return self.model.memory_statistics().held_nbytes

    async def check(self, engine, number=1, seed=0):
        sent = rows(number) + seed
        async with asyncio.timeout(WAIT_S):
            result = await engine.infer(sent)
        np.testing.assert_array_equal(result["output"], self.spec.expected(sent)["output"])

    def close(self):
        self.model.close()
        assert self.trt.violations() == ()
        assert self.device.memory().held_nbytes == 0


@pytest.fixture
def subject():
    made = Subject()
    yield made
    made.close()


class Held:
    """Makes a method of the model wait in its thread until it is let go."""

    def __init__(self, model, name):
        self.begun, self.go = threading.Event(), threading.Event()
        whole = getattr(model, name)

        def held(*args):
            self.begun.set()
            assert self.go.wait(WAIT_S)
            return whole(*args)

        setattr(model, name, held)

    async def wait(self):
        assert await asyncio.to_thread(self.begun.wait, WAIT_S)


async def until(condition):
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await asyncio.sleep(0)


@pytest.mark.parametrize("graphs", ["off", (1, 4)])
async def test_round_and_round(subject, graphs):
    async with subject.open(graphs=graphs) as engine:
        captured = engine.statistics().graphs
        assert captured == (() if graphs == "off" else graphs)
        for turn in range(3):
            for number in (1, 4, 3, 9):
                await subject.check(engine, number, turn)
            for _ in range(2):
                await engine.suspend()
                assert engine.state == engine.statistics().state == "suspended"
            assert "suspended" in repr(engine)
            assert subject.weights_nbytes == 0
            assert engine.statistics().graphs == ()
            for call in (engine.infer, engine.submit):
                with pytest.raises(SuspendedError, match=r"is suspended: call resume\(\) first"):
                    await call(rows(1))
            with pytest.raises(SuspendedError):
                await engine.infer(rows(9))
            for _ in range(2):
                await engine.resume()
                assert engine.state == "open"
            assert subject.weights_nbytes == 1 << 20
            assert engine.statistics().graphs == captured
        await subject.check(engine, 4)


async def test_slots(subject):
    async with subject.open() as engine:
        async with engine.slot(rows=2) as slot:
            slot["input"][:] = rows(2)
            await engine.suspend()
            with pytest.raises(SuspendedError):
                await slot.infer()
        await engine.resume()
        async with engine.slot(rows=2) as slot:
            slot["input"][:] = rows(2)
            assert (await slot.infer())["output"].shape == (2, 4)


def test_what_a_server_answers():
    assert (SuspendedError.http_status, SuspendedError.grpc_code) == (503, "UNAVAILABLE")


async def test_what_was_taken_is_answered_first():
    subject = Subject(LatchDevice())
    subject.device.open()
    async with subject.open(contexts=1, arenas=1) as engine:
        subject.device.shut()
        taken = [engine.submit(rows(4)) for _ in range(3)]
        suspending = asyncio.ensure_future(engine.suspend())
        await until(lambda: engine.state == "suspending")
        with pytest.raises(SuspendedError):
            await engine.infer(rows(1))
        assert subject.weights_nbytes == 1 << 20
        subject.device.open()
        async with asyncio.timeout(WAIT_S):
            await suspending
            for answer in taken:
                np.testing.assert_array_equal(
                    (await answer)["output"], subject.spec.expected(rows(4))["output"]
                )
        assert engine.state == "suspended"
    subject.close()


async def test_cancelled_while_requests_are_answered_it_is_open_again():
    subject = Subject(LatchDevice())
    subject.device.open()
    async with subject.open() as engine:
        subject.device.shut()
        taken = engine.submit(rows(4))
        suspending = asyncio.ensure_future(engine.suspend())
        await until(lambda: engine.state == "suspending")
        suspending.cancel()
        with pytest.raises(asyncio.CancelledError):
            await suspending
        assert engine.state == "open"
        subject.device.open()
        await subject.check(engine)
        await taken
        await engine.suspend()
        assert engine.state == "suspended"
    subject.close()


async def test_cancelled_while_it_unloads_it_is_suspended(subject):
    held = Held(subject.model, "suspend")
    async with subject.open() as engine:
        suspending = asyncio.ensure_future(engine.suspend())
        await held.wait()
        suspending.cancel()
        held.go.set()
        with pytest.raises(asyncio.CancelledError):
            await suspending
        assert engine.state == "suspended"
        assert subject.weights_nbytes == 0
        await engine.resume()
        await subject.check(engine)


async def test_cancelled_while_it_resumes_it_is_open(subject):
    held = Held(subject.model, "resume")
    async with subject.open(graphs=(4,)) as engine:
        await engine.suspend()
        resuming = asyncio.ensure_future(engine.resume())
        await held.wait()
        assert engine.state == "suspended"
        resuming.cancel()
        held.go.set()
        with pytest.raises(asyncio.CancelledError):
            await resuming
        assert engine.state == "open"
        await subject.check(engine, 4)


async def test_calls_take_turns(subject):
    held = Held(subject.model, "suspend")
    async with subject.open() as engine:
        calls = [asyncio.ensure_future(call()) for call in (engine.suspend, engine.suspend, engine.resume)]
        await held.wait()
        held.go.set()
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*calls)
        assert engine.state == "open"
        await subject.check(engine)


@pytest.mark.parametrize("name", ["suspend", "resume"])
async def test_closed_in_the_middle(subject, name):
    engine = await subject.open(graphs=(4,))
    if name == "resume":
        await engine.suspend()
    held = Held(subject.model, name)
    changing = asyncio.ensure_future(getattr(engine, name)())
    waiting = asyncio.ensure_future(engine.suspend())
    await held.wait()
    closing = asyncio.ensure_future(engine.aclose())
    await until(lambda: engine.state == "closing")
    assert not closing.done(), "nothing is freed under the thread's feet"
    held.go.set()
    async with asyncio.timeout(WAIT_S):
        await closing
        await changing
    with pytest.raises(EngineClosedError):
        await waiting
    assert engine.state == "closed"
    for call in (engine.suspend, engine.resume):
        with pytest.raises(EngineClosedError, match="is closed"):
            await call()


@pytest.mark.parametrize("end", ["aclose", "drain"])
async def test_closed_or_drained_while_requests_are_answered(end):
    subject = Subject(LatchDevice())
    subject.device.open()
    engine = await subject.open()
    subject.device.shut()
    taken = engine.submit(rows(4))
    suspending = asyncio.ensure_future(engine.suspend())
    await until(lambda: engine.state == "suspending")
    ending = asyncio.ensure_future(getattr(engine, end)())
    await until(lambda: engine.state in ("closing", "draining"))
    subject.device.open()
    async with asyncio.timeout(WAIT_S):
        await ending
        with pytest.raises(EngineClosedError, match="is (closing|closed|draining)"):
            await suspending
        await taken
    with pytest.raises(EngineClosedError):
        await engine.infer(rows(1))
    await engine.aclose()
    subject.close()


@pytest.mark.parametrize("end", ["aclose", "drain"])
async def test_closing_or_draining_a_suspended_engine(subject, end):
    engine = await subject.open(graphs=(1,))
    await engine.suspend()
    await getattr(engine, end)()
    for call in (engine.suspend, engine.resume, lambda: engine.infer(rows(1))):
        with pytest.raises(EngineClosedError):
            await call()
    await engine.aclose()


async def test_no_room_to_resume(subject, monkeypatch):
    async with subject.open() as engine:
        await engine.suspend()

        def full(self, nbytes):
            raise DeviceMemoryError("no room")

        with monkeypatch.context() as patched:
            patched.setattr(HostDevice, "allocate", full)
            with pytest.raises(
                DeviceMemoryError, match=r"stays suspended: make room .* call resume\(\) again"
            ):
                await engine.resume()
            assert engine.state == "suspended"
            with pytest.raises(SuspendedError):
                await engine.infer(rows(1))
        await engine.resume()
        await subject.check(engine)


async def test_no_room_for_graphs_any_more(subject, monkeypatch, caplog):
    async with subject.open(graphs=(4,)) as engine:
        await engine.suspend()

        def full(*_):
            raise DeviceMemoryError("no room")

        monkeypatch.setattr(engine._pool, "_begin_capture", full)
        await engine.resume()
        assert "has no room for CUDA graphs" in caplog.text
        assert engine.statistics().graphs == ()
        for number in (1, 4):
            await subject.check(engine, number)
        assert engine.statistics().rows_padded == 0


async def test_a_model_that_fails_to_unload(subject, monkeypatch):
    async with subject.open(graphs=(4,)) as engine:
        monkeypatch.setattr(subject.trt.ICudaEngine, "unload_weights", lambda self: False)
        with pytest.raises(ExecutionError, match="unloading the weights of 'plan' failed"):
            await engine.suspend()
        assert engine.state == "open"
        assert engine.statistics().graphs == (4,)
        await subject.check(engine, 4)


async def test_what_is_no_error_of_ours(subject, monkeypatch):
    async with subject.open() as engine:
        with monkeypatch.context() as patched:
            patched.setattr(subject.model, "suspend", lambda idle: 1 // 0)
            with pytest.raises(ExecutionError, match="weights were moved: ZeroDivisionError") as caught:
                await engine.suspend()
            assert isinstance(caught.value.__cause__, ZeroDivisionError)
        await engine.suspend()
        with monkeypatch.context() as patched:
            patched.setattr(subject.model, "resume", lambda: 1 // 0)
            with pytest.raises(ExecutionError) as caught:
                await engine.resume()
            assert caught.value.__notes__ == ["'plan' stays suspended."]
        assert engine.state == "suspended"


async def test_two_engines_of_one_model(subject):
    async with subject.open() as first, subject.open() as second:
        with pytest.raises(UsageError, match="2 of its contexts belong to somebody else"):
            await first.suspend()
        assert first.state == "open"
        for engine in (first, second):
            await subject.check(engine)


async def test_what_cannot_be_is_said_at_once():
    """Before anything is refused or waited for."""
    subject = Subject(LatchDevice())
    subject.device.open()
    async with subject.open() as first, subject.open() as second:
        subject.device.shut()
        taken = first.submit(rows(4))
        with pytest.raises(UsageError, match="belong to somebody else"):
            await first.suspend()
        assert (first.state, taken.done()) == ("open", False)
        subject.device.open()
        await taken
        await second.aclose()
        await first.suspend()
    subject.close()


async def test_two_models_on_one_device_take_turns():
    device = HostDevice(in_place="never", threads=2)
    subjects = [Subject(device), Subject(device)]
    engines = [await subject.open() for subject in subjects]
    await engines[1].suspend()
    for turn in range(4):
        at = turn % 2
        await subjects[at].check(engines[at], 4, turn)
        await engines[at].suspend()
        await engines[1 - at].resume()
    for engine in engines:
        await engine.aclose()
    for subject in subjects:
        subject.model.close()
        assert subject.trt.violations() == ()


async def test_models_that_cannot():
    async with asynctrt.open(double_model()) as engine:
        for call in (engine.suspend, engine.resume):
            with pytest.raises(UsageError, match=r"what runs it \(python\) cannot unload weights"):
                await call()
        assert engine.state == "open"
        await engine.infer(rows(1))
    subject = Subject(suspendable=False)
    async with subject.open() as engine:
        with pytest.raises(UsageError, match="'suspendable': True"):
            await engine.suspend()
        assert engine.state == "open"
        await engine.resume()
        await subject.check(engine)
    subject.close()


async def test_a_device_that_is_lost_meanwhile(subject, monkeypatch):
    async with subject.open() as engine:
        await engine.suspend()
        lost = DeviceLostError("an illegal address")
        with monkeypatch.context() as patched:
            patched.setattr(HostDevice, "lost", property(lambda self: lost))
            assert engine.state == "lost"
            for call in (engine.suspend, engine.resume):
                with pytest.raises(DeviceLostError, match="an illegal address"):
                    await call()
        assert engine.state == "suspended"


async def test_a_batch_that_was_given_up_may_still_run():
    subject = Subject(LatchDevice())
    subject.device.open()
    async with subject.open(batch_timeout=0.3) as engine:
        subject.device.shut()
        with pytest.raises(DeviceLostError, match="did not end within the batch_timeout"):
            await engine.infer(rows(1))
        with pytest.raises(ExecutionError, match="1 of its contexts are not used any more"):
            await engine.suspend()
        assert engine.state == "open"
        subject.device.open()
        await subject.check(engine)
    subject.model.close()


async def test_another_loop(subject):
    async with subject.open() as engine:
        for call in (engine.suspend, engine.resume):
            with pytest.raises(UsageError, match="belongs to the event loop"):
                await asyncio.to_thread(asyncio.run, call())
