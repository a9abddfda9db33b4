"""One client of several servers: which one a call goes to, and what becomes of calls when servers go."""

import asyncio
import heapq
import random
import time
from collections import Counter
from contextlib import AsyncExitStack, suppress
from itertools import count

import numpy as np
import pytest

from asynctrt.client import NotConnectedError, connect, connect_blocking, records
from asynctrt.client.balanced import REFRESH_S, Latency, sooner_of_two
from asynctrt.errors import (
    ConnectionLostError,
    DeadlineError,
    QueueFullError,
    UnauthorizedError,
    UsageError,
)
from asynctrt.testing import LatchDevice
from tests.benchmarks.several import Best, arrivals_of, best_latencies_s, ends_of
from tests.helpers import free_port, until
from tests.models import double_model, rows
from tests.serving.support import WAIT_S, engine_of, serving
from tests.serving.test_lost_device import OPTIONS, Losing

pytestmark = pytest.mark.anyio


def slow_model(seconds):
    def function(inputs, outputs):
        time.sleep(seconds)
        outputs["output"][...] = 2 * inputs["input"]

    return double_model(function)


def url_of(server, scheme="http"):
    return server.http_url if scheme == "http" else server.http_url.replace("http", "ws") + "/v2/ws"


class Scripted:
    """A server that describes any model, breaks the connection, or never answers."""

    breaks = holds = False
    asked = 0

    async def __aenter__(self):
        self._server = await asyncio.start_server(self._answer, "127.0.0.1")
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_):
        self._server.close()

    async def _answer(self, reader, writer):
        with suppress(asyncio.IncompleteReadError):
            while await reader.readuntil(b"\r\n\r\n"):
                self.asked += 1
                if self.breaks:
                    break
                if not self.holds:
                    writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        writer.close()


async def drains(server):
    """Let a server drain, and wait until its answers say so."""
    server.repository.is_draining = True
    async with connect(url_of(server)) as client:
        while not client.is_draining:
            await client.metadata("double")
            await asyncio.sleep(0.02)


def answered(server):
    return engine_of(server).statistics().succeeded


async def infer(client, value=1, **given):
    outputs = await client.infer("double", {"input": rows(value)}, **given)
    assert outputs["output"][0, 0] == 2 * value


@pytest.mark.parametrize("scheme", ["http", "ws"])
async def test_a_slow_a_draining_and_a_killed_server_cost_no_call(scheme):
    """Of four servers: calls go to those that answer, and fewest to the slow one."""
    async with AsyncExitStack() as stack, asyncio.timeout(WAIT_S):
        servers = [
            await stack.enter_async_context(serving({"double": slow_model(0.03 if number == 0 else 0.001)}))
            for number in range(4)
        ]
        client = await stack.enter_async_context(
            connect([url_of(one, scheme) for one in servers], idempotent=True)
        )
        left = iter(range(1, 601))

        async def call():
            for value in left:
                await infer(client, value)

        async with asyncio.TaskGroup() as calls:
            for _ in range(8):
                calls.create_task(call())
            await until(lambda: min(map(answered, servers[1:])) > 20)
            stopping = asyncio.create_task(servers[1].stop())
            await until(lambda: answered(servers[3]) > 60)
            servers[2].hurry()
            await servers[2].stop()
            await stopping
        assert answered(servers[0]) < answered(servers[3]) / 4
        before = answered(servers[3])
        await asyncio.gather(*[infer(client) for _ in range(20)])
        assert answered(servers[3]) > before


class Simulated(Best):
    """A server in a time that jumps from one event to the next, and what a client knows of it."""

    def __init__(self, *given):
        super().__init__(*given)
        self.latency = Latency()
        self.calls = {}

    def expected_s(self, now_s):
        return self.latency.expected_s(len(self.calls), now_s)


def simulated_latencies_s(arrivals_s, rows_max, seconds):
    """Send calls where a client would, and return how long each took until it was answered."""
    servers = [Simulated(*given) for given in ends_of(rows_max, seconds)]
    order, found = count(), {}
    events = [(at_s, next(order), number, None, 0) for number, at_s in enumerate(arrivals_s)]
    events += [(server.end_s, next(order), None, server, 0) for server in servers]
    heapq.heapify(events)
    while events:
        now_s, _, number, server, calls = heapq.heappop(events)
        if number is None:
            for lost in server.calls:
                heapq.heappush(events, (now_s, next(order), lost, None, 0))
            server.calls = {}
        elif server is None:
            server = sooner_of_two([one for one in servers if one.end_s > now_s], now_s)
            calls = len(server.calls)
            heapq.heappush(events, (server.take(now_s), next(order), number, server, calls))
            server.calls[number] = now_s
        elif number in server.calls:
            server.latency.note(now_s - server.calls.pop(number), calls, now_s)
            found[number] = now_s - arrivals_s[number]
    return list(found.values())


@pytest.mark.parametrize(("rows_max", "rate"), [(1, 14), (64, 14), (64, 25), (64, 80), (64, 300)])
def test_calls_wait_hardly_longer_than_by_the_best_assignment(rows_max, rate):
    """Of four servers one is slow, one drains and one is killed, and the client knows nothing beforehand."""
    seconds, ratios = 90, []
    for seed in range(5):
        random.seed(seed)
        arrivals_s = arrivals_of(rate, seconds, seed)
        took_s = simulated_latencies_s(arrivals_s, rows_max, seconds)
        best_s = best_latencies_s(arrivals_s, rows_max, seconds)
        assert len(took_s) == len(best_s), "nothing is lost"
        ratios.append(np.percentile(took_s, 99) / np.percentile(best_s, 99))
    assert np.median(ratios) <= 1.2


def test_a_slow_server_is_called_more_often_once_it_is_fast():
    known = {"was slow": Latency(), "fast": Latency()}
    for latency, took_s in zip(known.values(), (0.1, 0.02), strict=True):
        for at_s in np.arange(0, 2, 0.1):
            latency.note(took_s, 0, at_s)
    taken = Counter()
    for now_s in np.arange(2, 122, 0.1):
        name = min(known, key=lambda one: known[one].expected_s(0, now_s))
        known[name].note(0.02, 0, now_s)
        taken[name] += now_s > 100
    assert taken["was slow"] > 0


async def test_a_server_that_hangs_gets_few_calls():
    engine = {"device": LatchDevice()}
    async with serving({"double": (double_model(), engine)}) as hangs, serving() as other:
        async with connect([url_of(hangs), url_of(other)], idempotent=True) as client:
            late = 0
            for _ in range(20):
                try:
                    await infer(client, deadline=0.3)
                except DeadlineError:
                    late += 1
            assert late <= 2
        engine["device"].open()


async def test_a_server_that_has_lost_its_device_costs_no_call():
    model = Losing()
    async with serving({"double": (double_model(model), OPTIONS)}) as lost, serving() as other:
        await model.lose(engine_of(lost))
        async with connect([url_of(lost), url_of(other)], idempotent=True) as client:
            for _ in range(20):
                await infer(client)
        model.go.set()


async def test_a_server_whose_queue_was_full_is_called_again():
    device = LatchDevice()
    engine = {"device": device, "max_queue_rows": 4, "max_rows": 4}
    async with serving({"double": (double_model(), engine)}) as once_full, serving() as other:
        servers = [url_of(once_full, "ws"), url_of(other, "ws")]
        async with AsyncExitStack() as stack, asyncio.timeout(WAIT_S):
            client = await stack.enter_async_context(connect(servers[:1]))
            calls = [asyncio.create_task(infer(client)) for _ in range(40)]
            await until(lambda: engine_of(once_full).statistics().refused)
            device.open()
            ended = await asyncio.gather(*calls, return_exceptions=True)
            assert any(isinstance(error, QueueFullError) for error in ended)
            await infer(client)
            (server,) = client._servers
            await until(lambda: server.expected_s(asyncio.get_running_loop().time()) < 0.1)
            await infer(client)
            assert server.expected_s(asyncio.get_running_loop().time()) < 0.1


async def test_a_call_that_is_not_idempotent_is_lost_with_its_server():
    async with serving({"double": slow_model(0.3)}) as one, serving({"double": slow_model(0.3)}) as two:
        async with connect([url_of(one), url_of(two)]) as client:
            calls = [asyncio.create_task(infer(client)) for _ in range(8)]
            await until(lambda: engine_of(one).statistics().in_flight_batches)
            one.hurry()
            await one.stop()
            errors = await asyncio.gather(*calls, return_exceptions=True)
        assert any(isinstance(error, ConnectionLostError) for error in errors)
        assert any(error is None for error in errors)


async def test_a_server_that_comes_back_is_called_again(monkeypatch):
    monkeypatch.setattr("asynctrt.client.balanced.FORGOTTEN_S", 0.1)
    port = free_port()
    async with (
        serving() as other,
        serving(http_port=port) as first,
        connect([url_of(first), url_of(other)]) as client,
    ):
        await infer(client)
        await first.stop()
        for _ in range(5):
            await infer(client)
        async with serving(http_port=port) as second, asyncio.timeout(WAIT_S):
            while not answered(second):
                await infer(client)
                await asyncio.sleep(REFRESH_S / 20)


async def test_addresses_are_asked_for_again(monkeypatch):
    monkeypatch.setattr("asynctrt.client.balanced.REFRESH_S", 0.01)
    async with serving() as one, serving() as two:
        known = [url_of(one)]

        async def find():
            return known

        async with connect(find) as client:
            await infer(client)
            known[:] = [url_of(two)]
            await until(lambda: url_of(two) in repr(client) and url_of(one) not in repr(client))
            await infer(client)
        assert (answered(one), answered(two)) == (1, 1)


async def test_what_a_server_says_of_its_queue_counts():
    async with serving() as one, serving() as two, connect([url_of(one), url_of(two)]) as client:
        for _ in range(8):
            await infer(client)
        (long,) = [server for server in client._servers if server.address == url_of(one)]
        long.free_s = asyncio.get_running_loop().time() + 60
        before = answered(one)
        for _ in range(8):
            await infer(client)
        assert answered(one) == before


async def test_answers_say_how_long_queues_take_and_that_a_server_drains():
    async with serving() as server, connect(url_of(server)) as client:
        await infer(client)
        assert (client.drain_s, client.is_draining) == (0.0, False)
        await drains(server)


@pytest.mark.parametrize("servers", [1, 2])
async def test_servers_that_all_drain_are_called_as_long_as_they_answer(servers):
    async with AsyncExitStack() as stack:
        draining = [await stack.enter_async_context(serving()) for _ in range(servers)]
        client = await stack.enter_async_context(connect([url_of(one) for one in draining]))
        for server in draining:
            await drains(server)
        for _ in range(20):
            await infer(client)


async def test_the_only_server_is_called_after_a_connection_was_lost():
    async with Scripted() as server, connect([server.url]) as client:
        server.breaks = True
        with pytest.raises(ConnectionLostError, match="was lost"):
            await client.metadata("double")
        server.breaks = False
        await client.metadata("double")


async def test_closing_ends_the_calls_of_a_server_that_was_left_out():
    async with Scripted() as one, Scripted() as two:
        async with connect([one.url, two.url]) as client:
            one.holds = two.holds = True
            calls = [asyncio.create_task(client.metadata("double")) for _ in range(2)]
            await until(lambda: one.asked and two.asked)
            client._leave_out(client._servers[0])
        async with asyncio.timeout(WAIT_S):
            ended = await asyncio.gather(*calls, return_exceptions=True)
        assert {type(error) for error in ended} <= {ConnectionLostError, NotConnectedError}


async def test_an_address_that_opens_late_beside_one_that_is_refused_is_opened_once(monkeypatch):
    monkeypatch.setattr("asynctrt.client.balanced.REFRESH_S", 0.01)
    async with serving() as first, serving(tokens=("s3cret",)) as refuses, Scripted() as late:
        late.holds = True
        addresses = [url_of(first, "ws")]
        async with connect(lambda: asyncio.sleep(0, addresses)):
            addresses = [url_of(first, "ws"), url_of(refuses, "ws"), late.url.replace("http", "ws")]
            await until(lambda: late.asked)
            await asyncio.sleep(0.1)
            assert late.asked == 1


async def test_all_addresses_of_a_name():
    async with serving() as server:
        found = await records(f"http://localhost:{server.http_url.rpartition(':')[2]}")()
        assert server.http_url in found
        async with connect(records(f"http://localhost:{server.http_url.rpartition(':')[2]}")) as client:
            await infer(client)
    with pytest.raises(UsageError, match="without TLS"):
        records("https://localhost:1")
    with pytest.raises(ConnectionLostError, match="cannot be resolved"):
        await records("http://no.such.name.invalid:1")()


async def test_no_server():
    where = [f"ws://127.0.0.1:{free_port()}/v2/ws"] * 2
    with pytest.raises(NotConnectedError, match="none of the servers can be reached: cannot connect"):
        async with connect(where):
            pass
    client = connect([f"http://127.0.0.1:{free_port()}"])
    async with client:
        for _ in range(2):
            with pytest.raises(NotConnectedError):
                await infer(client)
    with pytest.raises(NotConnectedError, match="closed"):
        await infer(client)
    with pytest.raises(UsageError, match="already entered"):
        await client.__aenter__()


@pytest.mark.parametrize("where", [[], ["http://"], ["ftp://x"], ("http://x:1", 3)])
def test_what_is_no_address(where):
    with pytest.raises(UsageError, match="address"):
        connect(where)


async def test_a_server_that_refuses_the_token_is_said_at_once_and_nothing_stays_open():
    async with serving() as one, serving(tokens=("s3cret",)) as two:
        with pytest.raises(UnauthorizedError):
            async with connect([url_of(one, "ws"), url_of(two, "ws")]):
                pass
        await until(lambda: not one._hub.connections)


async def test_addresses_that_cannot_be_found(monkeypatch, caplog):
    monkeypatch.setattr("asynctrt.client.balanced.REFRESH_S", 0.01)
    async with serving() as server:
        found = [[url_of(server)]]
        async with connect(lambda: asyncio.sleep(0, found.pop())) as client:
            await until(lambda: "the last ones stay: IndexError" in caplog.text)
            await infer(client)
        with pytest.raises(IndexError):
            async with connect(lambda: asyncio.sleep(0, found.pop())):
                pass


async def test_from_threads():
    async with serving() as one, serving() as two:

        def call():
            with connect_blocking([url_of(one), url_of(two)]) as client:
                return client.infer("double", {"input": rows(3)})["output"][0, 0]

        assert await asyncio.to_thread(call) == 6
