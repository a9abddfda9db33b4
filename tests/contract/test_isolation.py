"""One request whose rows make the model fail takes nobody along: on all devices, however rows are sent."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest

import asynctrt
from asynctrt.devices.host import HostDevice
from asynctrt.errors import EngineClosedError, ExecutionError
from tests.contract.devices import Subject
from tests.helpers import until
from tests.models import Gate, double, double_model, failing_model, rows

pytestmark = pytest.mark.anyio
WAIT_S = 30

HOSTS = {
    "in-place": lambda: HostDevice(in_place="always"),
    "threads": lambda: HostDevice(in_place="never"),
    "separate-memory": lambda: HostDevice(unified=False),
}
POISONED = {
    "first": {0},
    "last": {15},
    "neighbours": {6, 7},
    "far": {0, 5, 10, 15},
    "half of them": set(range(8)),
}


@pytest.fixture(params=list(HOSTS))
def host(request):
    return HOSTS[request.param]()


async def send(engine, poisoned, requests=16):
    """Send requests of one to three rows, with negative numbers from some; check who is answered."""
    async with asyncio.timeout(WAIT_S):
        outcomes = await asyncio.gather(
            *[
                engine.infer(rows(*[-1 if number in poisoned else number + 1] * (number % 3 + 1)))
                for number in range(requests)
            ],
            return_exceptions=True,
        )
    for number, outcome in enumerate(outcomes):
        if number in poisoned:
            assert type(outcome) is ExecutionError, outcome
            assert f"while it ran this request alone ({number % 3 + 1} row" in str(outcome)
            assert isinstance(outcome.__cause__, ValueError)
        else:
            assert outcome["output"].tolist() == [[2.0 * (number + 1)] * 4] * (number % 3 + 1)
    return outcomes


@pytest.mark.parametrize("poisoned", POISONED.values(), ids=POISONED)
@pytest.mark.parametrize("fixed", [None, 64])
async def test_only_they_fail(host, poisoned, fixed):
    model = failing_model()
    model.capabilities = replace(model.capabilities, rows_fixed=fixed)
    async with asynctrt.open(model, device=host, contexts=3, max_rows=64) as engine:
        for _ in range(2):
            await send(engine, poisoned)
        statistics = engine.statistics()
        assert (statistics.failed, statistics.succeeded) == (2 * len(poisoned), 32 - 2 * len(poisoned))
        assert statistics.batches_bisected
        assert statistics.submitted == 32
        assert (statistics.queued_requests, statistics.in_flight_batches) == (0, 0)


async def test_switched_off():
    async with asynctrt.open(failing_model(), idempotent=False) as engine:
        outcomes = await asyncio.gather(
            *[engine.infer(rows(number - 1)) for number in range(3)], return_exceptions=True
        )
        assert [type(outcome) for outcome in outcomes] == [ExecutionError] * 3
        assert "idempotent=True" in str(outcomes[1])
        assert engine.statistics().batches_bisected == 0


async def test_a_decorated_function_is_not_called_twice_unless_that_was_asked_for():
    calls = []

    def invert(values: list[float]) -> list[float]:
        calls.append(list(values))
        return [1 / value for value in values]

    async def outcomes(**settings):
        batched = asynctrt.batch(items=True, **settings)(invert)
        async with batched:
            return await asyncio.gather(*map(batched, (1, 0, 4)), return_exceptions=True)

    assert [type(outcome) for outcome in await outcomes()] == [ExecutionError] * 3
    assert calls == [[1, 0, 4]]
    isolated = await outcomes(idempotent=True)
    assert (isolated[0], isolated[2]) == (1, 0.25)
    assert isinstance(isolated[1].__cause__, ZeroDivisionError)


async def test_a_model_that_fails_for_a_while_is_asked_for_each_request_and_isolates_afterwards():
    asked, broken = 0, True

    def function(inputs, outputs):
        nonlocal asked
        asked += 1
        if broken or (inputs["input"] < 0).any():
            raise ValueError("broken")
        double(inputs, outputs)

    async with asynctrt.open(double_model(function), max_rows=64) as engine:
        for _ in range(5):
            await send(engine, set(range(64)), requests=64)
        assert asked <= 5 * (2 * 64 - 1)
        broken = False
        await send(engine, {3})


@pytest.mark.parametrize("run_on", ["thread", "loop"])
@pytest.mark.parametrize("bad_callers", [12, 64])
async def test_callers_who_always_send_what_fails_fail_nobody_else(run_on, bad_callers):
    """So many that each batch has one: nothing that was done in vain adds up to giving up."""
    answered = dict.fromkeys(range(128), 0)

    async def call(engine, number):
        while min([answered[one] for one in range(bad_callers, 128)]) < 5:
            value = number - bad_callers
            if number < bad_callers:
                with pytest.raises(ExecutionError, match="while it ran this request alone"):
                    await engine.infer(rows(value))
            else:
                assert (await engine.infer(rows(value)))["output"][0, 0] == 2 * value
                answered[number] += 1

    async with asyncio.timeout(WAIT_S), asynctrt.open(failing_model(run_on=run_on), max_rows=32) as engine:
        await asyncio.gather(*[call(engine, number) for number in answered])


@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt, GeneratorExit, asyncio.CancelledError])
async def test_whatever_a_model_raises_in_a_thread_fails_one_request(kind):
    def function(inputs, outputs):
        if (inputs["input"] < 0).any():
            raise kind("bad")
        double(inputs, outputs)

    async with asynctrt.open(double_model(function), device=HostDevice(in_place="never")) as engine:
        outcomes = await asyncio.gather(
            *[engine.infer(rows(number - 1)) for number in range(16)], return_exceptions=True
        )
        assert type(outcomes[0]) is ExecutionError
        assert kind.__name__ in str(outcomes[0])
        assert [outcome["output"][0, 0] for outcome in outcomes[1:]] == [2 * number for number in range(15)]


@pytest.mark.parametrize("then", ["cancel", "close"])
async def test_what_was_to_be_tried_again_is_given_up(then):
    """A caller goes away, or the engine closes, while a half waits for its turn."""
    gate = Gate()
    failed = []

    def function(inputs, outputs):
        if not failed:
            failed.append(True)
            raise ValueError("once")
        gate(inputs, outputs)

    device = HostDevice(in_place="never")
    engine = await asynctrt.open(double_model(function), device=device, contexts=1, close_timeout=WAIT_S)
    tasks = [asyncio.create_task(engine.infer(rows(number))) for number in range(4)]
    await until(lambda: engine.statistics().launched["again"])
    statistics = engine.statistics()
    assert (statistics.submitted, statistics.in_flight_batches, statistics.queued_requests) == (4, 1, 0)
    if then == "cancel":
        for task in tasks[2:]:
            task.cancel()
        await asyncio.wait(tasks[2:], timeout=WAIT_S)
        gate.go.release()
        async with asyncio.timeout(WAIT_S):
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            await engine.aclose()
        assert [type(outcome) for outcome in outcomes[2:]] == [asyncio.CancelledError] * 2
        assert engine.statistics().cancelled == 2
    else:
        closing = asyncio.create_task(engine.aclose())
        await until(lambda: all(task.done() for task in tasks[2:]))
        gate.go.release()
        async with asyncio.timeout(WAIT_S):
            outcomes = await asyncio.gather(*tasks, return_exceptions=True)
            await closing
        assert [type(outcome) for outcome in outcomes[2:]] == [EngineClosedError] * 2
    assert [outcome["output"][0, 0] for outcome in outcomes[:2]] == [0, 2]
    assert engine.statistics().batches == 1


async def test_a_refused_enqueue_is_tried_again(device):
    subject = Subject(device)
    try:
        async with subject.open(graphs="off") as engine:
            await subject.check(engine)
            subject.double.fail_next("enqueue")
            async with asyncio.timeout(WAIT_S):
                results = await asyncio.gather(*[engine.infer(rows(number)) for number in range(7)])
            for number, result in enumerate(results):
                assert np.isfinite(result["output"]).all(), number
            assert engine.statistics().failed == 0
            assert engine.statistics().batches_bisected == 1
            await subject.check(engine)
        assert subject.double.violations() == ()
    finally:
        subject.model.close()
