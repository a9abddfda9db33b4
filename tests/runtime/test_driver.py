"""The driver on an event loop: what becomes of requests whose model, deadline or caller goes away."""

import asyncio
import dataclasses
import gc
import threading
import weakref

import numpy as np
import pytest

import asynctrt
from asynctrt._util import clock
from asynctrt.backends.base import Capabilities
from asynctrt.backends.function import FunctionModel
from asynctrt.devices.host import HostDevice
from asynctrt.errors import DeviceMemoryError, EngineClosedError, ExecutionError, InputError
from asynctrt.runtime.driver import GROW_ON_LOOP_NBYTES_MAX
from asynctrt.tensors import TensorSpec
from tests.helpers import until
from tests.models import double, double_model, rows

pytestmark = pytest.mark.anyio
WAIT_S = 30


async def test_requests_of_a_tick_arrived_together_but_a_timeout_counts_from_its_call():
    async with asynctrt.open(double_model(), device="host", max_rows=4) as engine:
        first = engine.submit(rows(1))
        began_ns = clock.now_ns()
        while clock.now_ns() - began_ns < 1_000_000:
            pass
        others = [engine.submit(rows(2)), engine.submit(rows(3), timeout=WAIT_S)]
        queued = [(await future).timing.queue_ns for future in (first, *others)]
    assert queued[0] == queued[1] >= queued[2] + 1_000_000


class Profiled(FunctionModel):
    """Doubles rows of any length; what it is told to answer about profiles may be an exception."""

    def __init__(self):
        specs = [TensorSpec(name, "float32", ("n",)) for name in ("input", "output")]
        super().__init__(double, inputs=specs[0], outputs=specs[1], name="profiled")
        self.capabilities = Capabilities(has_profiles=True)
        self.rows, self.profile = {}, {}

    def rows_of(self, dims):
        return self._answer(self.rows.get(dims[0][0], ((1, 4),)))

    def profile_of(self, dims, count):
        return self._answer(self.profile.get(dims[0][0], 0))

    @staticmethod
    def _answer(answer):
        if isinstance(answer, BaseException):
            raise answer
        return answer


class Silent(Exception):
    def __str__(self):
        raise RuntimeError("no message either")


class TestAModelThatFailsWhenItIsAsked:
    @pytest.mark.parametrize(
        "fault",
        [
            RuntimeError("third-party bug"),
            Silent(),
            InputError("none takes it"),
            "garbage",
            None,
            float("nan"),
        ],
        ids=lambda fault: type(fault).__name__,
    )
    async def test_about_a_profile_answers_these_callers_and_goes_on_with_others(self, fault):
        model = Profiled()
        model.profile[3] = fault
        async with asynctrt.open(model, contexts=2, max_rows=4) as engine, asyncio.timeout(WAIT_S):
            for _ in range(3):
                answers = await asyncio.gather(
                    *[engine.infer(rows(1, dims=(2 + number % 2,))) for number in range(8)],
                    return_exceptions=True,
                )
                for answer in answers[::2]:
                    assert answer["output"].tolist() == [[2, 2]]
                expected = InputError if isinstance(fault, InputError) else ExecutionError
                assert all(type(answer) is expected for answer in answers[1::2])
                assert len({id(answer) for answer in answers}) == 8, "each caller has an error of its own"
            assert (engine.statistics().failed, engine.statistics().succeeded) == (12, 12)
            model.profile.clear()
            assert (await engine.infer(rows(1, dims=(3,))))["output"].tolist() == [[2, 2, 2]]
            await engine.drain()

    async def test_about_the_rows_of_a_shape_refuses_the_call(self):
        model = Profiled()
        model.rows[3] = RuntimeError("third-party bug")
        async with asynctrt.open(model, contexts=2, max_rows=4) as engine, asyncio.timeout(WAIT_S):
            for _ in range(2):
                with pytest.raises(ExecutionError, match="rows_of"):
                    await engine.infer(rows(1, dims=(3,)))
                with pytest.raises(ExecutionError, match="rows_of"):
                    engine.submit(rows(1, dims=(3,)))
            assert engine.statistics().submitted == 0
            assert (await engine.infer(rows(1, dims=(2,))))["output"].tolist() == [[2, 2]]
            await engine.drain()


class TestRequestsWithoutAnyTimeToWait:
    async def test_nor_are_they_lost_behind_a_batch_that_is_rejected(self):
        model = Profiled()
        model.profile[3] = RuntimeError("third-party bug")
        async with asynctrt.open(model, contexts=1, max_rows=4) as engine, asyncio.timeout(WAIT_S):
            bad = asyncio.create_task(engine.infer(rows(1, dims=(3,)), timeout=0))
            good = asyncio.create_task(engine.infer(rows(1, dims=(2,)), timeout=0))
            assert isinstance((await asyncio.gather(bad, return_exceptions=True))[0], ExecutionError)
            assert (await good)["output"].tolist() == [[2, 2]]


async def test_a_batch_that_is_rejected_keeps_no_arrays_of_its_callers():
    model = Profiled()
    model.profile[4] = RuntimeError("third-party bug")
    async with asynctrt.open(model, contexts=1, max_rows=4) as engine, asyncio.timeout(WAIT_S):
        arrays = [np.full((1, 4), 1, np.float32) for _ in range(3)]
        kept = [weakref.ref(array) for array in arrays]
        tasks = [asyncio.create_task(engine.infer(arrays.pop())) for _ in range(3)]
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
        assert all(isinstance(outcome, ExecutionError) for outcome in outcomes)
        del tasks, outcomes
        await asyncio.sleep(0)  # The callback ends that has brought the outcomes, and lets go of them.
        gc.collect()
        assert [array() for array in kept] == [None] * 3


class TestSlabsThatGrow:
    """A large slab is allocated in a thread: pinned memory takes milliseconds."""

    @staticmethod
    def opened(allocate=None, **kw):
        class Device(HostDevice):
            def allocate_staging(self, nbytes):
                return super().allocate_staging(nbytes) if allocate is None else allocate(super(), nbytes)

        model = FunctionModel(
            lambda arrays: {"output": arrays["input"] * 2},
            inputs=TensorSpec("input", "float32", ("length",)),
            outputs=TensorSpec("output", "float32", ("length",)),
            name="sized",
        )
        return asynctrt.open(model, device=Device(**kw), contexts=2, max_rows=64)

    async def test_the_loop_goes_on_meanwhile(self):
        go, by = threading.Event(), []

        def allocate(device, nbytes):
            by.append(threading.get_ident())
            if nbytes > GROW_ON_LOOP_NBYTES_MAX:
                assert go.wait(WAIT_S)
            return device.allocate_staging(nbytes)

        async with self.opened(allocate) as engine:
            large = asyncio.create_task(engine.infer(np.ones((3, 5000), np.float32)))
            async with asyncio.timeout(WAIT_S):
                while not by:
                    await asyncio.sleep(0)
                for length in (3, 7, 5):
                    result = await engine.infer(np.ones((2, length), np.float32))
                    assert result["output"].tolist() == [[2.0] * length] * 2
            assert not large.done()
            assert engine.statistics().in_flight_batches == 1
            go.set()
            async with asyncio.timeout(WAIT_S):
                assert (await large)["output"].shape == (3, 5000)
            # On the second context as well, and no more than once on each.
            async with asyncio.timeout(WAIT_S):
                await asyncio.gather(*[engine.infer(np.ones((1, 5000 - n), np.float32)) for n in range(20)])
        here = threading.get_ident()
        assert here not in by[:1]
        assert sum(thread != here for thread in by) <= 2

    async def test_what_does_not_fit_fails_its_batch_alone(self):
        async with self.opened(memory_nbytes=3_000_000) as engine:
            for _ in range(2):
                with pytest.raises(DeviceMemoryError, match="has no room for"):
                    await engine.infer(np.ones((1, 50_000), np.float32))
                assert (await engine.infer(np.ones((2, 2000), np.float32)))["output"].shape == (2, 2000)

    async def test_closing_does_not_wait_for_it_beyond_the_timeout(self):
        go, begun = threading.Event(), threading.Event()

        def allocate(device, nbytes):
            begun.set()
            assert go.wait(WAIT_S)
            return device.allocate_staging(nbytes)

        engine = await self.opened(allocate)
        engine._options = dataclasses.replace(engine._options, close_timeout=0.05)
        large = asyncio.create_task(engine.infer(np.ones((3, 5000), np.float32)))
        async with asyncio.timeout(WAIT_S):
            while not begun.is_set():
                await asyncio.sleep(0)
            closing = asyncio.create_task(engine.aclose())
            with pytest.raises(EngineClosedError):
                await large
            go.set()
            await closing
        assert engine._device.memory().held_nbytes == 0

    async def test_a_caller_who_goes_away_meanwhile(self):
        go, begun = threading.Event(), threading.Event()

        def allocate(device, nbytes):
            begun.set()
            assert go.wait(WAIT_S)
            return device.allocate_staging(nbytes)

        async with self.opened(allocate) as engine:
            large = asyncio.create_task(engine.infer(np.ones((3, 5000), np.float32)))
            async with asyncio.timeout(WAIT_S):
                while not begun.is_set():
                    await asyncio.sleep(0)
            large.cancel()
            go.set()
            async with asyncio.timeout(WAIT_S):
                assert (await engine.infer(np.ones((3, 5000), np.float32)))["output"].shape == (3, 5000)
            assert engine.statistics().cancelled == 1


def test_ctrl_c_in_an_enqueue_frees_its_context_once_what_it_had_put_there_has_run():
    go, begun, order = threading.Event(), threading.Event(), []

    class Interrupted:
        """Puts half of the first batch on the stream, and is interrupted."""

        def __init__(self, binding):
            self._binding = binding

        def enqueue(self, rows, *, profile, stream, arena):
            if not order:
                order.append("half a batch")
                stream.launch(lambda: (begun.set(), go.wait(WAIT_S), order.append("its end")), label="half")
                raise KeyboardInterrupt
            stream.launch(lambda: order.append("the next batch"), label="next")
            self._binding.enqueue(rows, profile=profile, stream=stream, arena=arena)

        def unbound_outputs(self, rows):
            return {}

    model = double_model()
    create = model.create_context

    def create_context(device):
        context = create(device)
        bind = context.bind
        context.bind = lambda inputs, outputs: Interrupted(bind(inputs, outputs))
        return context

    model.create_context = create_context
    loop = asyncio.new_event_loop()
    device = HostDevice(in_place="never", threads=2)
    engine = loop.run_until_complete(asynctrt.open(model, device=device, contexts=1, max_rows=1)._open())
    first = loop.create_task(engine.infer(rows(1)))
    with pytest.raises(KeyboardInterrupt):
        loop.run_until_complete(until(lambda: False))
    assert begun.wait(WAIT_S)
    second = loop.create_task(engine.infer(rows(2)))
    for _ in range(20):
        loop.run_until_complete(asyncio.sleep(0))
    assert (engine.statistics().in_flight_batches, engine.statistics().queued_requests) == (1, 1)
    assert order == ["half a batch"], "its context was given to the next batch while the GPU worked for it"
    go.set()
    result = loop.run_until_complete(asyncio.wait_for(second, WAIT_S))
    np.testing.assert_array_equal(result["output"], 2 * rows(2))
    with pytest.raises(ExecutionError, match="KeyboardInterrupt"):
        loop.run_until_complete(first)
    assert order == ["half a batch", "its end", "the next batch"]
    loop.run_until_complete(engine.aclose())
    loop.close()
