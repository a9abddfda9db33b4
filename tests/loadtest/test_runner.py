"""The runner: what it sends and when, what it counts, how it ends, against a target that obeys the test."""

import asyncio

import numpy as np
import pytest

from asynctrt.errors import QueueFullError
from asynctrt.loadtest import runner
from asynctrt.loadtest.recorder import WARM_UP, total
from tests.helpers import until
from tests.loadtest.support import Clock, Target, at_once, run, run_by, sample

pytestmark = pytest.mark.anyio


@pytest.mark.parametrize("kind", ["http", "function"])
async def test_an_open_loop_sends_every_arrival_of_its_schedule_and_none_before_its_time(kind):
    target = Target(at_once)
    target.kind = kind
    plan, outcome, _, whole = await run(target, rate=2000, seed=3)
    due_ns = np.concatenate([block.due_ns for block in plan.schedule.blocks()])
    assert len(target.sent_ns) == len(due_ns) == whole.sent == whole.answered
    assert outcome.exhausted
    assert whole.completed == whole.answered
    # Sent in order, and each at its time or later; so the first shows where the run began.
    late_ns = np.array(target.sent_ns) - due_ns
    assert (np.diff(target.sent_ns) >= 0).all()
    assert late_ns.min() > 0
    start_ns = late_ns.min()
    assert whole.lateness.percentile(100) <= (late_ns - start_ns).max() + start_ns


async def test_shares_send_each_arrival_once():
    targets = [Target(at_once) for _ in range(3)]
    outcomes = await asyncio.gather(
        *(run(target, rate=900, share=share, shares=3) for share, target in enumerate(targets))
    )
    plan = outcomes[0][0]
    due_ns = np.concatenate([block.due_ns for block in plan.schedule.blocks()])
    assert sum(target.requests for target in targets) == len(due_ns)
    assert max(target.requests for target in targets) - min(target.requests for target in targets) <= 1


async def test_shares_have_all_callers_between_them():
    targets = [Target(at_once) for _ in range(2)]
    for target in targets:
        target.kind, target.in_flight_max = "http", None
    most = [0, 0]

    async def call(share, target):
        def answer_soon(target, future):
            most[share] = max(most[share], sum(not one.done() for one in target.futures))
            target.loop.call_soon(future.set_result, {})
            del target.futures[:-8]

        target.on_start = answer_soon
        await run(target, callers=3, share=share, shares=2, seconds=0.1)

    await asyncio.gather(*(call(share, target) for share, target in enumerate(targets)))
    assert most == [2, 1]


@pytest.mark.parametrize("how", [{"rate": 2000}, {"callers": 3}])
async def test_as_many_requests_as_asked_for_are_measured_after_the_warm_up(how):
    _, _, windows, _ = await run(Target(at_once), requests=30, warmup=0.1, seconds=20, **how)
    assert total(window for number, window in windows.items() if number >= 0).sent == 30
    assert windows[WARM_UP].sent > 30


async def test_what_waits_for_room_counts_from_when_it_was_due():
    """Two may be on the way, and are held until many are due: only the corrected latency tells."""

    async def let_go_late(local, target, task):
        await until(lambda: len(target.futures) == 2)
        await until(lambda: len(local._runner._backlog) >= 20)
        target.on_start = at_once
        for future in target.futures:
            future.set_result({})

    target = Target()
    target.in_flight_max = 2
    _, _, _, whole = await run(target, rate=500, started=let_go_late)
    assert whole.answered == whole.sent == target.requests
    # Those that waited were sent late and answered at once: only the first two took long since then.
    long_ns = whole.latency.percentile(100) // 2
    assert whole.answered - whole.latency.within(long_ns) > 2


async def test_no_more_are_on_the_way_than_may_be():
    most = 0

    async def watch(local, target, task):
        nonlocal most
        while not task.done():
            most = max(most, sum(not future.done() for future in target.futures))
            for future in [one for one in target.futures if not one.done()][:1]:
                future.set_result({})
            await asyncio.sleep(0)

    target = Target()
    target.in_flight_max = 3
    _, _, _, whole = await run(target, rate=3000, seconds=0.1, started=watch)
    assert most <= 3
    assert whole.answered == whole.sent > 100


async def test_a_closed_loop_has_as_many_on_the_way_as_callers():
    seen = set()

    def answer_soon(target, future):
        seen.add(sum(not one.done() for one in target.futures))
        target.loop.call_soon(future.set_result, {})
        del target.futures[:-8]

    _, outcome, _, whole = await run(Target(answer_soon), callers=4, seconds=0.1)
    assert max(seen) == 4
    assert outcome.exhausted
    assert whole.answered == whole.sent > 100


async def test_callers_come_and_go_with_a_profile():
    """1, then 5, then 1 caller: the third step ends four of them."""
    active = []

    def answer_soon(target, future):
        target.loop.call_soon(lambda: future.done() or future.set_result({}))
        target.futures.clear()

    async def watch(local, target, task):
        while not task.done():
            if local._runner is not None and local._runner._sending:
                active.append(local._runner._callers)
            await asyncio.sleep(0)

    await run(Target(answer_soon), callers="1,5,1", seconds=3, started=watch)
    most = active.index(5)
    assert set(active[:most]) <= {0, 1, 2, 3, 4}
    assert active[-1] == 1
    assert max(active) == 5


async def test_think_time_lies_between_answer_and_next_request():
    target = Target(at_once)
    _, _, _, whole = await run(target, callers=1, think=0.02, seconds=0.4)
    # 20 ms on average, exponential: some 20 requests, and not thousands.
    assert 3 <= whole.sent <= 60


async def test_so_many_requests_and_no_more():
    for settings in ({"rate": 5000}, {"callers": 3}):
        target = Target(at_once)
        _, outcome, _, whole = await run(target, requests=50, seconds=30, **settings)
        assert target.requests == whole.sent == whole.answered == 50
        assert outcome.exhausted


@pytest.mark.parametrize("settings", [{"rate": 300}, {"callers": 2}])
async def test_errors_are_counted_by_kind_and_nothing_stops(settings):
    def refuse(target, future):
        kinds = [None, ValueError("odd"), QueueFullError("full"), asyncio.CancelledError()]
        kind = kinds[target.requests % 4]
        if isinstance(kind, QueueFullError):
            raise kind
        if isinstance(kind, asyncio.CancelledError):
            future.cancel()
        elif kind is not None:
            future.set_exception(kind)
        else:
            future.set_result({})

    target = Target(refuse)
    _, _, _, whole = await run(target, requests=40, seconds=20, **settings)
    assert {kind: error.count for kind, error in whole.errors.items()} == {
        "ValueError": 10,
        "QueueFullError": 10,
        "CancelledError": 10,
    }
    assert whole.errors["ValueError"].example == "odd"
    assert whole.answered == 10
    assert whole.sent == 40


async def test_what_nobody_answers_is_given_up():
    """Also what waited for room behind it; and what comes after all is not counted twice."""
    target = Target()
    target.in_flight_max = 2
    _, outcome, _, whole = await run(target, rate=100, answer_timeout=0.1, requests=10, seconds=5)
    assert outcome.exhausted
    assert all(future.cancelled() for future in target.futures)
    counts = {kind: error.count for kind, error in whole.errors.items()}
    assert sum(counts.values()) == whole.sent == 10
    assert counts[runner.NO_ANSWER] >= 2
    assert not whole.answered


async def test_a_run_that_is_stopped_ends_with_what_there_is():
    """Of what is on the way, only what is answered within the grace counts; it is no error either."""

    async def stop(local, target, task):
        await until(lambda: len(target.futures) >= 5)
        local.stop()
        local.stop()
        target.futures[0].set_result({})

    target = Target()
    _, outcome, _, whole = await run(target, rate=1000, seconds=60, started=stop)
    assert not outcome.exhausted
    assert outcome.stopped_ns <= outcome.elapsed_ns < 20e9
    assert whole.answered == 1
    assert not whole.errors
    assert whole.sent >= 5
    assert all(future.done() for future in target.futures)


async def test_the_warm_up_is_apart():
    target = Target(at_once)
    plan, _, windows, _ = await run(target, rate=1000, warmup=0.2, seconds=0.4)
    due_ns = np.concatenate([block.due_ns for block in plan.schedule.blocks()])
    assert windows[WARM_UP].sent == (due_ns < plan.warmup_ns).sum()
    # Where the machine is busy, answers come in later windows than what was due in them.
    measured = [window for number, window in windows.items() if number != WARM_UP]
    assert sum(window.sent for window in measured) == (due_ns >= plan.warmup_ns).sum()


async def test_batches_are_those_of_this_run_with_its_warm_up():
    target = Target(at_once)
    target.requests = 1000  # Those of earlier runs.
    _, outcome, windows, whole = await run(target, rate=2000, warmup=0.1, seconds=0.1)
    assert outcome.batches.requests == outcome.answered == whole.answered > windows[0].answered


async def test_answers_are_checked():
    right = {"y": np.array([[1.0, 2.0]], np.float32)}

    def answer(target, future):
        wrong = {"y": right["y"] + (0.5 if target.requests % 5 == 0 else 1e-6)}
        future.set_result(wrong if target.requests % 7 else {})

    target = Target(answer)
    _, _, _, whole = await run(target, [sample(expected=right)], requests=70, callers=2, seconds=20)
    wrong = sum(number % 5 == 0 or number % 7 == 0 for number in range(1, 71))
    assert whole.errors[runner.WAS_WRONG].count == wrong
    assert "output 'y'" in whole.errors[runner.WAS_WRONG].example
    assert whole.answered == 70 - wrong


async def test_samples_are_drawn_equally_often():
    target = Target(at_once)
    samples = [sample(0.0), sample(1.0), sample(1.0), sample(1.0)]
    for settings in ({"rate": 20_000}, {"callers": 2}):
        target.prepared.clear()
        await run(target, samples, requests=2000, seconds=20, **settings)
        ones = sum(prepared["x"][0, 0] == 1.0 for prepared in target.prepared)
        assert 1350 < ones < 1650  # 1500, and eight standard deviations.


async def test_a_generator_that_falls_far_behind_gives_up(monkeypatch):
    """More than anything can send: it stops, and says that it was overwhelmed, and does not run on."""
    monkeypatch.setattr(runner, "BEHIND_NS_MAX", 50_000_000)
    _, outcome, _, _ = await run(Target(at_once), rate=1e8, seconds=10)
    assert outcome.is_overwhelmed
    assert not outcome.exhausted


async def test_a_loop_that_is_held_up_shows_in_the_latency_and_as_lateness():
    """For 100 ms nothing can be sent: what was due then counts from when it was due."""
    clock = Clock()

    async def hold(task):
        await clock.tick_until(lambda: target.requests >= 20, 10_000)
        clock.ns += 100_000_000
        await clock.tick_until(task.done, 10_000)

    target = Target(at_once)
    _, windows = await run_by(clock, target, hold, rate=1000, seconds=0.5)
    whole = total(windows.values())
    assert whole.sent == whole.answered == target.requests
    late = whole.answered - whole.latency.within(5e6)
    assert 50 <= late <= 150  # A hundred were due in that time, on average.
    assert whole.latency.percentile(100) >= 80e6
    assert whole.lateness.percentile(100) >= 80e6


async def test_a_target_that_no_longer_tells_its_batches_costs_nothing_else():
    target = Target(at_once)
    calls = 0

    async def batches():
        nonlocal calls
        calls += 1
        if calls > 1:
            raise OSError("gone")

    target.batches = batches
    _, outcome, _, whole = await run(target, rate=100)
    assert outcome.batches is None
    assert whole.answered == whole.sent > 0


async def test_a_cancelled_run_leaves_nothing_behind():
    target = Target()

    async def cancel(local, target, task):
        await until(lambda: len(target.futures) >= 3)
        task.cancel()

    with pytest.raises(asyncio.CancelledError):
        await run(target, rate=1000, seconds=60, started=cancel)
    assert all(future.cancelled() for future in target.futures)
    count = target.requests
    for _ in range(50):
        await asyncio.sleep(0)
    assert target.requests == count
