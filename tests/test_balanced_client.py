"""One client of several servers: which one a call goes to, and what becomes of calls when servers go."""

import asyncio
import time
from contextlib import AsyncExitStack

import pytest

from asynctrt.client import NotConnectedError, connect, connect_blocking, records
from asynctrt.client.balanced import REFRESH_S
from asynctrt.errors import ConnectionLostError, UnauthorizedError, UsageError
from tests.helpers import free_port, until
from tests.models import double_model, rows
from tests.serving.support import WAIT_S, engine_of, serving

pytestmark = pytest.mark.anyio


def slow_model(seconds):
    def function(inputs, outputs):
        time.sleep(seconds)
        outputs["output"][...] = 2 * inputs["input"]

    return double_model(function)


def url_of(server, scheme="http"):
    return server.http_url if scheme == "http" else server.http_url.replace("http", "ws") + "/v2/ws"


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
        long.client.drain_s = 60.0
        before = answered(one)
        for _ in range(8):
            await infer(client)
        assert answered(one) == before


async def test_answers_say_how_long_queues_take_and_that_a_server_drains():
    async with serving() as server, connect(url_of(server)) as client:
        await infer(client)
        assert (client.drain_s, client.is_draining) == (0.0, False)
        server.repository.is_draining = True
        while not client.is_draining:
            await client.metadata("double")
            await asyncio.sleep(0.02)


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
