"""Pauses of the event loop: counted, and named by what held it."""

import logging
import threading
import time

import pytest

from asynctrt._util import clock
from asynctrt.serving import stalls as module
from asynctrt.serving.api import Answer, Page
from asynctrt.serving.latency import BOUNDS_NS
from asynctrt.serving.server import Server
from asynctrt.serving.settings import ServerSettings
from asynctrt.serving.stalls import PERIOD_NS, Stalls
from tests.helpers import until
from tests.serving.support import WAIT_S, ask, connected, request, serving

pytestmark = pytest.mark.anyio


def hold(is_over):
    """Block this thread, as a handler must not, until something is so."""
    end_ns = clock.now_ns() + WAIT_S * 1_000_000_000
    while not is_over() and clock.now_ns() < end_ns:
        time.sleep(0.002)
    return Answer(200, (), (b"held",))


def held_by(server, is_over=None):
    """Give a server a page that holds its loop until the watchdog has seen it."""
    stalls = server._stalls
    is_over = is_over or (lambda: stalls._seen is not None)
    server.api.pages["/hold"] = Page(lambda headers: hold(is_over))
    return stalls


async def hold_once(server):
    stalls = server._stalls
    count = stalls.count
    # A pause of the machine's own may have been logged just now, and would count as this period's line.
    stalls._said_ns -= PERIOD_NS
    stalls._unsaid = 0
    status, _, body = await ask(server, "/hold")
    assert (status, body) == (200, b"held")
    # The answer may be on its way before the late timer's callback runs.
    await until(lambda: stalls.count > count)


def lines(caplog, of="hold (test_stalls.py:"):
    """What was logged of pauses that were made here; the machine may have others."""
    said = [record.getMessage() for record in caplog.records]
    return [line for line in said if line.startswith("the event loop") and of in line]


async def test_what_holds_the_loop_is_logged_and_counted(caplog):
    async with serving(max_pause=0.02) as server:
        stalls = held_by(server)
        await hold_once(server)
        status, _, body = await ask(server, "/metrics")
    assert status == 200
    assert f"asynctrt_loop_stalls_total {stalls.count}.0".encode() in body
    assert b'asynctrt_loop_delay_seconds_bucket{le="+Inf"}' in body
    late = sum(stalls.delays[BOUNDS_NS.index(25_000_000) : -1])
    assert late >= 1
    assert stalls.delays[-1] >= 20_000_000
    (line,) = lines(caplog)
    assert line.startswith("the event loop was held for ")


async def test_the_pause_in_which_the_heap_is_frozen_is_not_reported(caplog, monkeypatch):
    async with serving(max_pause=0.02) as server:
        stalls = server._stalls
        await until(lambda: sum(stalls.delays[:-1]))  # It has begun to watch.
        count, due_ns = stalls.count, stalls._due_ns
        frozen = []

        def freeze():
            frozen.append(hold(lambda: stalls._seen is not None))

        monkeypatch.setattr("asynctrt.serving.server.calm_gc", freeze)
        server.freeze()
        assert frozen
        assert stalls._seen is None
        assert stalls._due_ns > clock.now_ns() > due_ns + 20_000_000
        assert (stalls.count, lines(caplog, "")) == (count, [])


async def test_the_request_and_the_model_are_named(caplog, monkeypatch):
    """Here an inference is decoded so slowly that the watchdog sees it."""
    async with serving(max_pause=0.02) as server:
        codec = server.repository.find("double").codec
        decode = type(codec).decode

        def slow(self, *arguments):
            hold(lambda: server._stalls._seen is not None)
            return decode(self, *arguments)

        monkeypatch.setattr(type(codec), "decode", slow)
        body = b'{"inputs":[{"name":"input","datatype":"FP32","shape":[1,4],"data":[1,2,3,4]}]}'
        status, *_ = await ask(server, "/v2/models/double/infer", body)
        assert status == 200
        await until(lambda: server._stalls.count)
    line = lines(caplog)[0]
    assert "POST /v2/models/double/infer" in line
    assert "model double version 1" in line


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


async def test_a_pause_that_does_not_end_is_logged_by_the_watchdog(caplog, monkeypatch):
    monkeypatch.setattr(module, "STILL_NS", 60_000_000)
    async with serving(max_pause=0.02) as server:
        held_by(server, is_over=lambda: lines(caplog))
        await hold_once(server)
    still, after = lines(caplog)
    assert still.startswith("the event loop has been held for ")
    assert "and still is: " in still
    assert "hold (test_stalls.py:" in still
    assert after.startswith("the event loop was held for ")
    assert [record.levelno for record in caplog.records if "still" in record.getMessage()] == [logging.ERROR]


async def test_a_loop_that_is_not_held_says_nothing_and_its_watchdog_sleeps(caplog, monkeypatch):
    looks = []
    monkeypatch.setattr(Stalls, "_look", lambda self: looks.append(self))
    async with serving(max_pause=WAIT_S) as server, connected(server) as raw:
        await until(lambda: sum(server._stalls.delays[:-1]) > 10)
        raw.send(request("/v2/health/live"))
        assert (await raw.answer())[0] == 200
    assert not looks
    assert not lines(caplog, of="")


async def test_the_thread_ends_with_the_server():
    def threads():
        return [thread for thread in threading.enumerate() if thread.name == "asynctrt-stalls"]

    before = len(threads())
    async with serving() as server:
        assert len(threads()) == before + 1
        stalls = server._stalls
    assert len(threads()) == before
    stalls.close()


async def test_without_a_timerfd_pauses_are_counted_all_the_same(caplog, monkeypatch):
    def missing(look):
        raise AttributeError("timerfd_create")

    monkeypatch.setattr(module, "_Watchdog", missing)
    async with serving(max_pause=0.02) as server:
        end_ns = clock.now_ns() + 100_000_000
        held_by(server, is_over=lambda: clock.now_ns() > end_ns)
        await hold_once(server)
    line = lines(caplog, of="")[-1]
    assert line.endswith(
        "no Python code was seen: the process had no CPU, or the event loop itself was at work"
    )


async def test_a_server_that_cannot_start_leaves_no_thread_behind():
    async with serving() as other:
        port = int(other.http_url.rpartition(":")[2])
        before = threading.active_count()
        server = Server(other.repository, ServerSettings(http_port=port, grpc=False))
        with pytest.raises(Exception, match="cannot listen"):
            await server.start()
        assert not [t for t in threading.enumerate() if t.name == "asynctrt-stalls"][1:]
        assert threading.active_count() <= before + 1
