"""Steps of a coroutine function, and users who keep their state from request to request."""

import asyncio
from contextlib import suppress

import numpy as np
import pytest
from aiohttp import ClientSession, web

from asynctrt import loadtest
from asynctrt.errors import OptionsError, TargetError
from asynctrt.loadtest import step
from asynctrt.loadtest.page import render
from asynctrt.loadtest.recorder import WARM_UP, RunRecorder, merge, total
from asynctrt.loadtest.settings import LoadSettings
from asynctrt.loadtest.steps import StepTime
from asynctrt.loadtest.summary import banners
from tests.loadtest.support import serving_app

pytestmark = pytest.mark.anyio
QUICK = {"seconds": 0.4, "warmup": 0.1}


async def test_each_step_has_its_own_figures():
    async def shop():
        async with step("login"):
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        async with step("buy"):
            await asyncio.sleep(0.02)

    report = await loadtest.run(shop, callers=4, **QUICK)
    (run,) = report.runs
    login, buy = run.steps["login"], run.steps["buy"]
    assert list(run.steps) == ["login", "buy"]
    assert (login.failed, buy.failed) == (0, 0)
    assert abs(login.count - run.answered) <= 4
    assert abs(buy.count - run.answered) <= 4
    # Timers of uvloop may ring up to 1 ms early, each.
    assert 0 < login.latency["mean"] < buy.latency["mean"]
    assert buy.latency["mean"] >= 19
    assert run.latency["mean"] >= 28
    assert report.as_json()["runs"][0]["steps"]["buy"]["count"] == buy.count
    assert "buy" in render(report).partition("<h2>Steps</h2>")[2].partition("</table>")[0]


async def test_a_step_that_fails_is_counted_and_not_timed():
    calls = 0

    async def flaky():
        nonlocal calls
        calls += 1
        async with step("first"):
            await asyncio.sleep(0)
        async with step("second"):
            if calls % 2 == 0:
                raise ValueError("no")

    report = await loadtest.run(flaky, callers=1, requests=20, seconds=20, warmup=0.0)
    (run,) = report.runs
    assert (run.steps["first"].count, run.steps["first"].failed) == (20, 0)
    assert (run.steps["second"].count, run.steps["second"].failed) == (20, 10)
    assert run.errors["ValueError"].count == 10


async def test_a_step_outside_a_load_test_does_nothing():
    async with step("login"):
        pass
    with pytest.raises(KeyError):
        async with step("login"):
            raise KeyError


def test_steps_are_counted_where_they_began():
    recorder = RunRecorder(1000, 100)
    recorder.stepped(
        [StepTime("a", 900, 1050, has_failed=False), StepTime("a", 1010, 1250, has_failed=False)]
    )
    recorder.stepped(
        [StepTime("a", 1120, 1130, has_failed=True), StepTime("b", 1150, 1160, has_failed=False)]
    )
    windows = recorder.take()
    assert sorted(windows) == [WARM_UP, 0, 1]
    more = RunRecorder(1000, 100)
    more.stepped([StepTime("a", 1011, 1013, has_failed=False)])
    merge(windows, more.take())
    whole = total(windows[number] for number in (0, 1))
    assert (len(whole.steps["a"].latency), whole.steps["a"].failed) == (2, 1)
    assert whole.steps["a"].latency.total_ns == 242
    assert len(whole.steps["b"].latency) == 1


def test_names_without_end_are_counted_together():
    recorder = RunRecorder(0, 100)
    recorder.stepped([StepTime(f"item {number}", 1, 2, has_failed=False) for number in range(1000)])
    steps = recorder.take()[0].steps
    assert len(steps) == 65
    assert len(steps["others"].latency) == 936


async def test_users_log_in_once_and_keep_their_state():
    seen = []

    async def login(request):
        seen.append("login")
        return web.json_response({"token": f"t{len(seen)}"})

    async def item(request):
        assert request.headers["Authorization"].startswith("t")
        return web.json_response({})

    application = web.Application()
    application.router.add_post("/login", login)
    application.router.add_get("/item", item)
    async with serving_app(application) as url:
        closed = []

        async def user():
            async with ClientSession() as session:
                async with step("login"), session.post(f"{url}/login") as answer:
                    token = (await answer.json())["token"]
                while True:
                    async with (
                        step("item"),
                        session.get(f"{url}/item", headers={"Authorization": token}) as got,
                    ):
                        assert got.status == 200
                    try:
                        yield
                    except GeneratorExit:
                        closed.append(token)
                        raise

        report = await loadtest.run(user, callers=5, **QUICK)
    (run,) = report.runs
    assert run.error_share == 0
    assert len(seen) == 5  # One of them for the first request, which is not measured.
    assert len(closed) == 5
    assert abs(run.steps["item"].count - run.answered) <= 5  # Steps count where they began.
    assert run.answered > 10


async def test_a_user_whose_session_ends_is_replaced_and_gets_the_inputs_of_each_request():
    begun = 0

    async def user(inputs):
        nonlocal begun
        begun += 1
        for _ in range(3):
            inputs = yield {"y": 2 * inputs["x"]}

    x = np.arange(8.0)[:, None]
    report = await loadtest.run(
        user, inputs={"x": x}, expect={"y": 2 * x}, callers=1, requests=30, seconds=20, warmup=0.0
    )
    (run,) = report.runs
    assert (run.answered, run.error_share) == (30, 0)
    assert begun == 11  # 31 requests with the first one.


async def test_a_user_who_fails_or_does_not_answer_is_replaced():
    begun = 0

    async def user():
        nonlocal begun
        begun += 1
        number = begun
        yield
        yield
        if number % 2:
            await asyncio.sleep(60)
        raise ValueError("no")

    report = await loadtest.run(user, callers=2, requests=20, seconds=20, warmup=0.0, answer_timeout=0.05)
    (run,) = report.runs
    assert run.errors["ValueError"].count
    assert run.errors["NoAnswer"].count
    assert run.answered
    assert begun > 2


async def test_a_generator_that_never_yields_is_an_error():
    async def user():
        if not QUICK:
            yield

    with pytest.raises(TargetError, match="ended before its first yield"):
        await loadtest.run(user, callers=1, **QUICK)


@pytest.mark.tier2
async def test_users_of_several_processes(tmp_path, monkeypatch):
    (tmp_path / "scenario.py").write_text(
        "import asyncio\n"
        "from asynctrt.loadtest import step\n"
        "async def user():\n"
        "    while True:\n"
        "        async with step('one'):\n"
        "            await asyncio.sleep(0.001)\n"
        "        yield\n"
    )
    monkeypatch.chdir(tmp_path)
    report = await loadtest.run("scenario:user", callers=4, processes=2, **QUICK)
    (run,) = report.runs
    assert run.error_share == 0
    assert abs(run.steps["one"].count - run.answered) <= 4
    assert run.answered > 10


async def test_an_slo_of_a_step():
    async def shopper():
        async with step("log in"):
            await asyncio.sleep(0.001)
        with suppress(ValueError):
            async with step("buy"):
                raise ValueError

    slo = ["log in:p50<1s,log in:errors<1%", "buy:errors<1%", "log in : mean<1us", "pay:p50<1s"]
    report = await loadtest.run(shopper, requests=20, callers=2, seconds=20, warmup=0, slo=slo)
    (run,) = report.runs
    assert run.slo == {
        "log in:p50<1s": True,
        "log in:errors<1%": True,
        "buy:errors<1%": False,
        "log in : mean<1us": False,
    }
    assert run.unjudged == {"pay:p50<1s": "no step 'pay' ended"}
    assert report.figure("buy errors") == 1
    (missed,) = (banner for banner in banners(report) if banner.level == "bad")
    assert missed.reasons[0] == "buy:errors<1%: buy errors is 100%"
    with pytest.raises(OptionsError, match="a step has latencies and errors, but no goodput"):
        LoadSettings(slo="buy:goodput>1")
