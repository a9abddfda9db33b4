"""The driver when work does not end, or the device is gone: nobody waits for ever, and others go on.

Time is moved on by the tests, so that a batch_timeout passes at once and nothing that is slow seems to hang.
"""

import asyncio
import threading
from dataclasses import replace

import numpy as np
import pytest

import asynctrt
from asynctrt._util import clock
from asynctrt.devices.arenas import Arenas
from asynctrt.devices.host import HostDevice
from asynctrt.errors import DeviceLostError, EngineClosedError
from asynctrt.runtime.completion.polling import Poller
from asynctrt.runtime.driver import GATHER_ON_LOOP_NBYTES_MAX
from asynctrt.testing import LatchDevice
from tests.helpers import until
from tests.models import double, double_model, rows

pytestmark = pytest.mark.anyio
WAIT_S = 30
TIMEOUT_S = 60
SKIP_NS = 20_000_000


@pytest.fixture
def skip(monkeypatch):
    """Moves the engine's time on by so many seconds. Its engines look every tick, whatever they expect.

    Each look at the clock moves it on by a little, as a jump would be time in which the loop was blocked.
    """
    left_ns, shift_ns, read_ns = [0], [0], clock.now_ns

    def now_ns():
        step_ns = min(left_ns[0], SKIP_NS)
        left_ns[0] -= step_ns
        shift_ns[0] += step_ns
        return read_ns() + shift_ns[0]

    def later(seconds):
        left_ns[0] += int(seconds * 1e9)

    monkeypatch.setattr(clock, "now_ns", now_ns)
    monkeypatch.setattr(Poller, "is_due", lambda poller, watches, now_ns: bool(watches))
    return later


class Hanging:
    """Doubles, but a batch with a negative number in it waits until the test lets it go on."""

    def __init__(self):
        self.go = threading.Event()
        self.hung = 0

    def __call__(self, inputs, outputs):
        if (inputs["input"] < 0).any():
            self.hung += 1
            assert self.go.wait(WAIT_S), "the test never let it go on"
        double(inputs, outputs)


@pytest.fixture
def hanging():
    made = Hanging()
    yield made
    made.go.set()


def in_arenas(function=double):
    """A model that needs enqueue memory, so that its contexts share arenas."""
    model = double_model(function, name="double")
    model.capabilities = replace(model.capabilities, enqueue_nbytes=1000)
    return model


def opening(model, device=None, **settings):
    settings = {"contexts": 2, "max_rows": 1, "batch_timeout": TIMEOUT_S, **settings}
    return asynctrt.open(model, device=device or HostDevice(threads=4, in_place="never"), **settings)


def send(engine, *values, **kw):
    return asyncio.create_task(engine.infer(rows(*values), **kw))


async def ticks(count=20):
    for _ in range(count):
        await asyncio.sleep(0)


async def ends(tasks):
    """What became of each: its error, or the first value of its answer."""
    async with asyncio.timeout(WAIT_S):
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    return [
        outcome if isinstance(outcome, BaseException) else float(outcome["output"][0, 0])
        for outcome in outcomes
    ]


def lost(outcomes):
    """Whether each is an error of its own that says that the device, or its work, is lost."""
    assert len({id(outcome) for outcome in outcomes}) == len(outcomes)
    return all(type(outcome) is DeviceLostError for outcome in outcomes)


async def hangs(engine, hanging):
    """Send a row whose batch hangs; return its call once it does."""
    call = send(engine, -1)
    await until(lambda: hanging.hung)
    return call


async def is_given_up(call, skip):
    """Let the batch_timeout pass, after which the call fails."""
    skip(TIMEOUT_S + 1)
    assert lost(await ends([call]))


async def refuses(engine, says):
    """Whether every way in is closed at once, with the reason, and nothing is left inside."""
    async with asyncio.timeout(WAIT_S):
        for values in ((1,), (1, 2, 3)):
            with pytest.raises(DeviceLostError, match=says):
                await engine.infer(rows(*values))
        with pytest.raises(DeviceLostError, match=says):
            engine.submit(rows(1))
    statistics = engine.statistics()
    assert statistics.state == engine.state == "lost"
    assert " lost " in repr(engine)
    assert statistics.queued_requests == statistics.queued_rows == statistics.in_flight_batches == 0
    return True


class TestABatchThatHangs:
    async def test_it_is_given_up_with_its_context_and_others_go_on(self, skip, hanging, caplog):
        async with opening(double_model(hanging, name="double")) as engine:
            with engine.tracing() as trace:
                hung = await hangs(engine, hanging)
                assert await ends([send(engine, value) for value in range(10)]) == [2 * n for n in range(10)]
                skip(TIMEOUT_S + 1)
                (error,) = await ends([hung])
                assert lost([error])
                for said in (
                    "batch 1 of 'double' (1 rows, context 0) did not end within the batch_timeout of 60 s",
                    "other contexts go on",
                    "open the engine with a larger batch_timeout",
                ):
                    assert said in str(error)
                assert caplog.text.count("did not end within the batch_timeout") == 1
                assert await ends([send(engine, value) for value in range(10)]) == [2 * n for n in range(10)]
                assert {batch.context for batch in trace} == {1}
            statistics = engine.statistics()
            assert (statistics.state, statistics.contexts, statistics.contexts_quarantined) == ("open", 2, 1)
            assert (statistics.failed, statistics.succeeded, statistics.in_flight_batches) == (1, 20, 0)
            hanging.go.set()

    @pytest.mark.parametrize("batch_timeout", [TIMEOUT_S, None])
    async def test_before_its_time_it_is_waited_for(self, skip, hanging, batch_timeout):
        async with opening(double_model(hanging, name="double"), batch_timeout=batch_timeout) as engine:
            slow = send(engine, -1)
            await until(lambda: hanging.hung)
            skip(TIMEOUT_S - 1 if batch_timeout else 10 * 365 * 86_400)
            await ticks()
            assert not slow.done()
            hanging.go.set()
            assert await ends([slow]) == [-2]
            assert engine.statistics().contexts_quarantined == 0

    async def test_it_is_found_on_a_loop_that_sleeps(self, hanging):
        model = double_model(hanging, name="double")
        async with opening(model, batch_timeout=0.02) as engine:
            assert lost(await ends([send(engine, -1)]))
            hanging.go.set()

    async def test_when_it_ends_after_all_its_context_stays_unused_and_nobody_is_answered_twice(
        self, skip, hanging
    ):
        async with opening(double_model(hanging, name="double")) as engine:
            hung = await hangs(engine, hanging)
            await is_given_up(hung, skip)
            hanging.go.set()
            await until(lambda: "busy" not in repr(engine._pool.contexts[0].stream))
            await ticks()
            with engine.tracing() as trace:
                assert await ends([send(engine, value) for value in range(10)]) == [2 * n for n in range(10)]
                assert {batch.context for batch in trace} == {1}
            statistics = engine.statistics()
            assert (statistics.failed, statistics.succeeded) == (1, 10)
            assert statistics.contexts_quarantined == 1

    async def test_a_caller_who_had_gone_away_is_told_nothing(self, skip, hanging):
        async with opening(double_model(hanging, name="double"), max_rows=2) as engine:
            gone, mate = send(engine, -1), send(engine, 1)
            await until(lambda: hanging.hung)
            gone.cancel()
            await ticks(1)
            skip(TIMEOUT_S + 1)
            outcomes = await ends([gone, mate])
            assert isinstance(outcomes[0], asyncio.CancelledError)
            assert lost(outcomes[1:])
            statistics = engine.statistics()
            assert (statistics.cancelled, statistics.failed) == (1, 1)
            hanging.go.set()

    async def test_large_batches_that_are_copied_off_the_loop_are_given_up_too(self, skip):
        model, dims = Hanging(), (GATHER_ON_LOOP_NBYTES_MAX // 4 + 1,)
        async with opening(double_model(model, dims=dims)) as engine:
            hung = asyncio.create_task(engine.infer(rows(-1, dims=dims)))
            await until(lambda: model.hung)
            await is_given_up(hung, skip)
            assert (await engine.infer(rows(2, dims=dims)))["output"][0, -1] == 4
            model.go.set()


class TestAnArenaThatHangs:
    async def test_no_context_in_it_is_used_again(self, skip, hanging):
        async with opening(in_arenas(hanging), contexts=5, arenas=2) as engine:
            hung = await hangs(engine, hanging)
            await is_given_up(hung, skip)
            assert engine.statistics().contexts_quarantined == 3
            with engine.tracing() as trace:
                assert await ends([send(engine, value) for value in range(20)]) == [2 * n for n in range(20)]
                assert {(batch.arena, batch.context) for batch in trace} <= {(1, 1), (1, 3)}
            assert engine.statistics().state == "open"
            hanging.go.set()

    async def test_those_behind_it_hang_with_it(self, skip, hanging):
        all_launched = threading.Event()

        def function(inputs, outputs):
            if (inputs["input"] == 2).any():
                assert all_launched.wait(WAIT_S)
            hanging(inputs, outputs)

        async with opening(in_arenas(function), contexts=4, arenas=2) as engine:
            tasks = [send(engine, value) for value in (-1, 2, 3)]
            await until(lambda: hanging.hung and engine.statistics().in_flight_batches == 3)
            all_launched.set()
            await until(tasks[1].done)
            await ticks()
            assert not tasks[2].done(), "it is in the arena of the first"
            skip(TIMEOUT_S + 1)
            outcomes = await ends(tasks)
            assert lost(outcomes[::2])
            assert outcomes[1] == 4
            assert engine.statistics().contexts_quarantined == 2
            assert await ends([send(engine, value) for value in range(5)]) == [0, 2, 4, 6, 8]
            hanging.go.set()
            await until(
                lambda: "busy" not in "".join(repr(context.stream) for context in engine._pool.contexts)
            )
            await ticks()
            assert engine.statistics().failed == 2

    @pytest.mark.parametrize("contexts", [1, 2, 4])
    async def test_with_the_last_one_the_engine_is_lost(self, skip, hanging, contexts):
        """All that are in flight there are found to hang at once, and more are queued."""
        async with opening(in_arenas(hanging), contexts=contexts, arenas=1) as engine:
            tasks = [send(engine, -value) for value in range(1, 8)]
            await until(lambda: hanging.hung)
            await ticks()
            assert engine.statistics().in_flight_batches == contexts
            skip(TIMEOUT_S + 1)
            assert lost(await ends(tasks))
            assert await refuses(engine, "no context of 'double' is left.*Only a new process helps")
            assert engine.statistics().contexts_quarantined == contexts
            assert engine.statistics().failed == 7
            hanging.go.set()
            await ticks()

    async def test_an_engine_that_shares_it_goes_on_in_the_others(self, skip, hanging):
        """It is told, so that no batch of its own waits for what hangs."""
        device = HostDevice(threads=4, in_place="never")
        arenas = Arenas(device, 2)
        settings = {"device": device, "shared_arenas": arenas, "contexts": 2}
        async with opening(in_arenas(hanging), **settings) as one, opening(in_arenas(), **settings) as other:
            hung = await hangs(one, hanging)
            await is_given_up(hung, skip)
            assert other.statistics().contexts_quarantined == 1
            for _ in range(3):
                assert await ends([send(other, value) for value in range(5)]) == [0, 2, 4, 6, 8]
            assert other.state == one.state == "open"
            assert other.statistics().failed == 0
            hanging.go.set()
        arenas.close()

    async def test_what_waits_in_it_of_another_engine_fails_with_it(self, skip, hanging):
        device = HostDevice(threads=4, in_place="never")
        arenas = Arenas(device, 1)
        settings = {"device": device, "shared_arenas": arenas, "contexts": 1}
        async with opening(in_arenas(hanging), **settings) as one, opening(in_arenas(), **settings) as other:
            hung = await hangs(one, hanging)
            behind = send(other, 1)
            await until(lambda: other.statistics().in_flight_batches == 1)
            skip(TIMEOUT_S + 1)
            assert lost(await ends([hung, behind]))
            assert one.state == other.state == "lost"
            hanging.go.set()
        arenas.close()


class TestWhenEverythingHangs:
    async def test_draining_ends(self, skip, hanging):
        async with opening(double_model(hanging, name="double"), contexts=1) as engine:
            tasks = [send(engine, -1), send(engine, 2)]
            await until(lambda: hanging.hung)
            draining = asyncio.create_task(engine.drain())
            await ticks()
            assert not draining.done()
            skip(TIMEOUT_S + 1)
            async with asyncio.timeout(WAIT_S):
                await draining
            assert lost(await ends(tasks))
            hanging.go.set()

    @pytest.mark.parametrize("kind", ["plain", "arenas", "shared"])
    async def test_closing_gives_up_what_runs_and_keeps_what_it_uses(self, skip, hanging, kind, caplog):
        model = double_model(hanging, name="double") if kind == "plain" else in_arenas(hanging)
        device = HostDevice(threads=4, in_place="never")
        arenas = Arenas(device, 1) if kind == "shared" else None
        engine = await opening(model, device, contexts=1, shared_arenas=arenas)
        hung = await hangs(engine, hanging)
        held_nbytes = device.memory().held_nbytes
        await is_given_up(hung, skip)
        async with asyncio.timeout(WAIT_S):
            await engine.aclose()
            await engine.aclose()
        assert "1 contexts were abandoned while they ran" in caplog.text
        assert device.memory().held_nbytes == held_nbytes
        assert engine.statistics().state == "closed"
        with pytest.raises(EngineClosedError):
            await engine.infer(rows(1))
        if arenas is not None:
            assert arenas.engines == 0
            arenas.close()

    @pytest.mark.parametrize("hanging_first", [True, False])
    async def test_nothing_is_freed_before_the_device_is_told_that_work_hangs(self, hanging, hanging_first):
        """On a GPU each call that frees memory waits for all work, what hangs included, and so for ever."""
        said = []

        class Noting(HostDevice):
            def abandon(self, stream):
                said.append("abandon")

            def _gave_back(self, nbytes):
                said.append("free")
                super()._gave_back(nbytes)

        device = Noting(threads=4, in_place="never", unified=False)
        model = double_model(hanging, name="double")
        settings = {"contexts": 3, "lanes": 3}
        engine = await opening(model, device, **settings, batch_timeout=None, close_timeout=0.01)
        tasks = [send(engine, value) for value in ((-1, 1, 2) if hanging_first else (1, 2, -1))]
        await until(lambda: hanging.hung and sum(task.done() for task in tasks) == 2)
        assert said == []
        async with asyncio.timeout(WAIT_S):
            await engine.aclose()
        assert set(said) == {"abandon"}
        assert sum(isinstance(outcome, DeviceLostError) for outcome in await ends(tasks)) == 1
        hanging.go.set()
        await until(lambda: "free" in said)

    async def test_closing_ends_while_a_library_waits_for_what_hangs(self, monkeypatch):
        """CUDA may make each call wait for a kernel that hangs, also those of other threads."""
        monkeypatch.setattr("asynctrt.core.local.GIVE_BACK_S", 0.05)
        go, freed = threading.Event(), threading.Event()

        class Waiting(HostDevice):
            def _gave_back(self, nbytes):
                go.wait(WAIT_S)
                super()._gave_back(nbytes)
                freed.set()

        device = Waiting(threads=4, in_place="never", unified=False)
        engine = await opening(double_model(name="double"), device, contexts=1)
        await send(engine, 2)
        try:
            async with asyncio.timeout(WAIT_S):
                await engine.aclose()
            assert engine.statistics().state == "closed"
            assert not freed.is_set()
        finally:
            go.set()
        await until(freed.is_set)

    async def test_a_batch_that_hangs_is_given_up_by_closing_even_without_a_batch_timeout(
        self, hanging, caplog
    ):
        engine = await opening(double_model(hanging, name="double"), batch_timeout=None, close_timeout=0.01)
        tasks = [send(engine, -1), send(engine, 1)]
        await until(lambda: hanging.hung and tasks[1].done())
        async with asyncio.timeout(WAIT_S):
            await engine.aclose()
        outcomes = await ends(tasks)
        assert lost(outcomes[:1])
        assert "close_timeout" in str(outcomes[0])
        assert outcomes[1] == 2


class LosableDevice(LatchDevice):
    """A device that can be lost, as a GPU after an illegal address: from then on all work on it fails.

    :param refuses: also refuse whatever is to be put on it, as CUDA does.
    """

    def __init__(self, *, refuses=True, **kw):
        super().__init__(**kw)
        self.refuses = refuses
        self._why = None

    @property
    def lost(self):
        return self._why

    def activate(self):
        if self.refuses:
            self.fail()

    def fail(self):
        """For work: what happens to it."""
        if self._why is not None:
            raise self._why

    def lose(self):
        """From now on."""
        self._why = DeviceLostError("work on a stream failed with CUDA_ERROR_ILLEGAL_ADDRESS")

    def model(self, make=double_model):
        """A model whose batches fail on it once it is lost."""

        def function(inputs, outputs):
            self.fail()
            double(inputs, outputs)

        return make(function)


@pytest.fixture(params=[True, False], ids=["refuses", "takes"])
def device(request):
    return LosableDevice(refuses=request.param, concurrency=3)


SAYS = "CUDA_ERROR_ILLEGAL_ADDRESS"


@pytest.mark.parametrize("make", [double_model, in_arenas], ids=["plain", "arenas"])
class TestADeviceThatIsLost:
    async def test_everything_in_flight_and_queued_fails_and_the_rest_is_refused_at_once(self, device, make):
        async with opening(device.model(make), device, contexts=3, arenas=2) as engine:
            tasks = [send(engine, value) for value in range(8)]
            await until(lambda: device.held == 3)
            assert engine.statistics().queued_requests == 5
            device.lose()
            device.open()
            outcomes = await ends(tasks)
            assert lost(outcomes)
            assert all(SAYS in str(outcome) for outcome in outcomes)
            assert await refuses(engine, SAYS)
            assert engine.statistics().failed == 8
            await ticks()
        assert engine.state == "closed"

    async def test_one_batch_by_which_it_is_found_is_enough(self, device, make):
        """The others are not waited for: nobody can know whether they end."""
        async with opening(device.model(make), device, contexts=3) as engine:
            tasks = [send(engine, value) for value in range(8)]
            await until(lambda: device.held == 3)
            device.lose()
            device.release()
            assert lost(await ends(tasks))
            assert await refuses(engine, SAYS)
            device.open()
            await ticks()
            statistics = engine.statistics()
            assert (statistics.failed, statistics.succeeded) == (8, 0)

    async def test_batches_that_had_ended_well_before_anybody_looked(self, device, make):
        """Some in the look by which the loss is found: they are told the same, and once."""
        async with opening(device.model(make), device, contexts=3) as engine:
            tasks = [send(engine, value) for value in range(3)]
            await until(lambda: device.held == 3)
            device.release(last=True)
            device.lose()
            device.release(device.held)
            outcomes = await ends(tasks)
            assert lost([outcome for outcome in outcomes if not isinstance(outcome, float)])
            assert lost(outcomes[:1])
            assert await refuses(engine, SAYS)
            await ticks()

    async def test_an_engine_that_was_idle_finds_out_by_its_next_batch(self, device, make):
        async with opening(device.model(make), device) as engine:
            device.open()
            assert await ends([send(engine, 1)]) == [2]
            device.lose()
            assert lost(await ends([send(engine, value) for value in range(5)]))
            assert await refuses(engine, SAYS)

    async def test_what_did_not_run_is_not_answered(self, device, make):
        """Lost by the hands of another, with work that is put on the device and never begins."""
        async with opening(device.model(make), device) as engine:
            device.lose()
            assert lost(await ends([send(engine, value) for value in range(5)]))
            assert engine.statistics().succeeded == 0
            device.open()

    async def test_another_engine_on_it_is_lost_too(self, device, make):
        async with (
            opening(device.model(make), device) as one,
            opening(device.model(make), device) as other,
        ):
            tasks = [send(engine, value) for value in range(3) for engine in (one, other)]
            await until(lambda: device.held == 4)
            device.lose()
            device.open()
            assert lost(await ends(tasks))
            for engine in (one, other):
                assert await refuses(engine, SAYS)

    async def test_cancelled_callers_are_told_nothing(self, device, make):
        async with opening(device.model(make), device, contexts=1, max_rows=2) as engine:
            tasks = [send(engine, value) for value in range(4)]
            await until(lambda: device.held)
            for task in tasks[::2]:
                task.cancel()
            await ticks(1)
            device.lose()
            device.open()
            outcomes = await ends(tasks)
            assert all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes[::2])
            assert lost(outcomes[1::2])
            statistics = engine.statistics()
            assert (statistics.cancelled, statistics.failed) == (2, 2)
            assert statistics.submitted == 4

    @pytest.mark.parametrize("how", ["open", "release"])
    async def test_while_closing(self, device, make, how):
        engine = await opening(device.model(make), device, close_timeout=5)
        tasks = [send(engine, value) for value in range(2)]
        await until(lambda: device.held == 2)
        closing = asyncio.create_task(engine.aclose())
        await ticks()
        assert engine.state == "closing"
        device.lose()
        getattr(device, how)()
        async with asyncio.timeout(WAIT_S):
            await closing
        assert lost(await ends(tasks))
        assert engine.state == "closed"
        device.open()

    @pytest.mark.parametrize("how", ["open", "release"])
    async def test_closing_afterwards(self, device, make, how):
        """Whether what was on it has ended or not."""
        engine = await opening(device.model(make), device)
        tasks = [send(engine, value) for value in range(5)]
        await until(lambda: device.held == 2)
        device.lose()
        getattr(device, how)()
        assert lost(await ends(tasks))
        async with asyncio.timeout(WAIT_S):
            await engine.aclose()
            await engine.aclose()
        assert engine.state == engine.statistics().state == "closed"
        with pytest.raises(EngineClosedError):
            await engine.infer(rows(1))
        device.open()


async def test_a_model_that_fails_is_no_lost_device():
    def broken(inputs, outputs):
        raise ValueError("broken")

    async with opening(double_model(broken), HostDevice()) as engine:
        for _ in range(5):
            with pytest.raises(asynctrt.ExecutionError):
                await engine.infer(rows(1))
        assert engine.state == "open"
        assert engine.statistics().contexts_quarantined == 0


async def test_answers_that_were_given_stay_valid_when_the_device_is_lost():
    device = LosableDevice(concurrency=2)
    async with opening(device.model(), device) as engine:
        device.open()
        result = await engine.infer(rows(21))
        device.lose()
        with pytest.raises(DeviceLostError):
            await engine.infer(rows(1))
        np.testing.assert_array_equal(result["output"], rows(42))
