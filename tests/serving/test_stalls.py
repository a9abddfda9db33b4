"""Pauses of the event loop: measured, counted and logged."""

import asyncio
import time

import pytest

from asynctrt._util import clock
from asynctrt.serving.api import Answer, Page
from asynctrt.serving.command import check, configure
from asynctrt.serving.latency import BOUNDS_NS
from asynctrt.serving.stalls import BEAT_S, PERIOD_NS
from tests.helpers import until
from tests.models import double_model
from tests.serving.support import WAIT_S, ask, serving

pytestmark = pytest.mark.anyio

HELD_S = 2 * BEAT_S + 0.03


def held_by(server):
    """Give a server a page that holds its loop, as a handler must not, for longer than a beat."""

    def hold(_):
        time.sleep(HELD_S)
        return Answer(200, (), (b"held",))

    server.api.pages["/hold"] = Page(hold)
    return server._stalls


async def hold_once(server):
    stalls, count = server._stalls, server._stalls.count
    # A pause of the machine's own may have been logged just now, and would count as this period's line.
    stalls._said_ns -= PERIOD_NS
    stalls._unsaid = 0
    status, _, body = await ask(server, "/hold")
    assert (status, body) == (200, b"held")
    # The answer may be on its way before the late timer's callback runs.
    await until(lambda: stalls.count > count)


def lines(caplog):
    said = [record.getMessage() for record in caplog.records]
    return [line for line in said if line.startswith("the event loop was held for ")]


async def test_a_pause_is_logged_and_counted(caplog):
    async with serving(max_pause=0.02) as server:
        stalls = held_by(server)
        await hold_once(server)
        status, _, body = await ask(server, "/metrics")
    assert status == 200
    assert f"asynctrt_loop_stalls_total {stalls.count}.0".encode() in body
    assert b'asynctrt_loop_delay_seconds_bucket{le="+Inf"}' in body
    assert sum(stalls.delays[BOUNDS_NS.index(25_000_000) : -1]) >= 1
    assert stalls.delays[-1] >= 20_000_000
    assert "while its thread computed for" in lines(caplog)[0]


async def test_the_pause_in_which_the_heap_is_frozen_is_not_reported(caplog, monkeypatch):
    async with serving(max_pause=0.02) as server:
        stalls = server._stalls
        await until(lambda: sum(stalls.delays[:-1]))  # It has begun to watch.
        count, said = stalls.count, lines(caplog)
        monkeypatch.setattr("asynctrt.serving.server.calm_gc", lambda: time.sleep(HELD_S))
        server.freeze()
        assert stalls._due_ns > clock.now_ns()
        assert (stalls.count, lines(caplog)) == (count, said)


async def test_pauses_of_a_server_that_does_not_serve_yet_are_not_reported(caplog):
    async with serving(max_pause=0.02) as server:
        stalls = held_by(server)
        count, beats, said = stalls.count, sum(stalls.delays[:-1]), lines(caplog)
        server.repository.is_starting = True
        assert (await ask(server, "/hold"))[0] == 200
        await until(lambda: sum(stalls.delays[:-1]) > beats + 1)
        assert (stalls.count, lines(caplog)) == (count, said)


async def held_while_loading():
    time.sleep(HELD_S)  # noqa: ASYNC251  (what should not be done)
    await asyncio.sleep(2 * BEAT_S)
    return double_model()


async def test_a_configuration_that_is_checked_serves_nobody(caplog):
    model = f"{__name__}:held_while_loading"
    config = configure({"models": [model], "grpc": False, "max_pause": 0.02}, {})
    await check(config, lambda _: None)
    assert not lines(caplog)


async def test_of_many_pauses_one_is_logged(caplog):
    async with serving(max_pause=0.02) as server:
        stalls = held_by(server)
        await hold_once(server)
        count = stalls.count
        for _ in range(3):
            assert (await ask(server, "/hold"))[0] == 200
        await until(lambda: stalls.count >= count + 3)
        assert len(lines(caplog)) == 1
        stalls._said_ns -= PERIOD_NS
        assert (await ask(server, "/hold"))[0] == 200
        await until(lambda: stalls.count >= count + 4)
        _, line = lines(caplog)
    assert f"({stalls.count - count - 1} more pauses since the last such line)" in line


async def test_a_loop_that_is_not_held_says_nothing(caplog):
    async with serving(max_pause=WAIT_S) as server:
        await until(lambda: sum(server._stalls.delays[:-1]) > 3)
    assert not lines(caplog)
