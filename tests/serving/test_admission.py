"""One client floods a server, by each protocol: others are answered in time, and it is the one refused."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from asynctrt.serving.admission import address_of
from asynctrt.testing import LatchDevice
from tests.contract.test_transports import TRANSPORTS, of
from tests.helpers import until
from tests.models import double_model
from tests.serving.support import WAIT_S, ask, connected, serving
from tests.serving.test_frames import opened, receive
from tests.serving.test_http import infer, outputs
from tests.serving.test_websocket import binary

pytestmark = pytest.mark.anyio
BATCH = 8
GREEDY = {"Authorization": "Bearer greedy"}
MODEST = {"Authorization": "Bearer modest"}
TOKENS = ("greedy", "modest")
COUNT = 200


class Held:
    """A model whose batches of 8 rows run one after another, each when it is let."""

    def __init__(self, **options):
        self.seen = []
        self.device = LatchDevice(concurrency=1)
        self.options = {"device": self.device, "contexts": 1, "max_rows": BATCH} | options

    def serving(self, **settings):
        return serving({"double": double_model(self.note)}, engine=self.options, **settings)

    def note(self, inputs, outputs):
        self.seen += inputs["input"][:, 0].tolist()
        outputs["output"][...] = 2 * inputs["input"]

    async def run(self, batches):
        for _ in range(batches):
            await until(lambda: self.device.held)
            self.device.release()
            for _ in range(3):
                await asyncio.sleep(0)


@asynccontextmanager
async def flooding(server, transport, rows):
    """Send a flood of requests of some rows each. The test lets its batches run before it ends."""
    kind, options = TRANSPORTS[transport]
    client = kind(server, "greedy", **options)
    count = COUNT if rows == 1 else 2 * COUNT // rows
    calls = [of(*[1] * rows, id=str(number)) for number in range(count)]
    if transport == "grpc-stream":
        stream, tasks = client.stream(), []
        for call in calls:
            await stream.write(client.message(call).SerializeToString())
    else:
        tasks = [asyncio.create_task(client.ask(call)) for call in calls]
    try:
        yield
        async with asyncio.timeout(WAIT_S):
            await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await client.leave()


@pytest.mark.parametrize("rows", [1, BATCH, 2 * COUNT])
@pytest.mark.parametrize("transport", ["http", "grpc", "grpc-stream", "websocket"])
async def test_whoever_sends_little_does_not_wait_for_a_flood(transport, rows):
    held = Held()
    async with held.serving(grpc=True, tokens=TOKENS) as server, flooding(server, transport, rows):
        gate = server.repository.find("double").admission.gate
        # A connection that has four batches waiting is not read on.
        await until(lambda: gate.waiting_rows >= 4 * BATCH)
        async with connected(server) as raw:
            for _ in range(3):
                asked = len(held.seen)
                passed = server.api.in_flight
                raw.send(infer(2, **MODEST))
                await until(lambda passed=passed: server.api.in_flight > passed)
                answer = asyncio.create_task(raw.answer())
                # The first one finds the engine's queue as long as it was for who was alone: 16 batches.
                while not answer.done():
                    await held.run(1)
                assert outputs(answer.result()) == [4]
                assert len(held.seen) - asked <= (18 if not asked else 4) * BATCH
        held.device.open()
    assert held.seen.count(2) == 3


async def test_a_large_request_is_answered_in_parts():
    held = Held()
    values = [float(value) for value in range(COUNT)]
    async with held.serving(tokens=TOKENS) as server, connected(server) as large, connected(server) as small:
        gate = server.repository.find("double").admission.gate
        large.send(infer(*values, **GREEDY))
        await until(lambda: gate.waiting)
        small.send(infer(-1, **MODEST))
        await until(lambda: server.api.in_flight == 2)
        held.device.open()
        assert outputs(await large.answer()) == [2 * value for value in values]
        assert outputs(await small.answer()) == [-2]
        assert held.seen.index(-1) < COUNT
        assert (gate.rows, gate.waiting, gate.waiting_rows, server.api.in_flight) == (0, 0, 0, 0)


async def test_a_request_of_which_a_part_was_computed_does_not_say_that_it_was_not():
    held = Held(max_queue_rows=6 * BATCH)
    async with held.serving(tokens=TOKENS) as server, connected(server) as large, AsyncExitStack() as stack:
        gate = server.repository.find("double").admission.gate
        for _ in range(4):
            raw = await stack.enter_async_context(connected(server))
            raw.send(infer(*[1] * BATCH, **GREEDY))
        await until(lambda: server.api.in_flight == 4)
        large.send(infer(*[2] * 3 * BATCH, **GREEDY))
        await until(lambda: gate.waiting_rows == 3 * BATCH)
        await held.run(1)
        await until(lambda: gate.waiting_rows == 2 * BATCH)  # One of its parts was let in.
        raw = await stack.enter_async_context(connected(server))
        raw.send(infer(*[3] * BATCH, **MODEST))
        status, headers, body = await large.answer()
        assert (status, headers["asynctrt-error"]) == (503, "OverloadError")
        assert b"a part of the request had begun" in body
        held.device.open()
        await until(lambda: not server.api.in_flight)


@pytest.mark.parametrize("others", [0, 4], ids=["by the engine", "by the server"])
async def test_a_request_in_parts_is_counted_once_it_is_answered(others):
    """Whoever looks meanwhile never sees a count that falls again."""
    held = Held(max_queue_rows=8 * BATCH)
    async with held.serving(tokens=TOKENS) as server, connected(server) as large, AsyncExitStack() as stack:
        stack.callback(held.device.open)
        served = server.repository.find("double")
        for _ in range(others):  # They fill the engine, so that it waits.
            raw = await stack.enter_async_context(connected(server))
            raw.send(infer(*[1] * BATCH, **GREEDY))
        await until(lambda: server.api.in_flight == others)
        large.send(infer(*[2] * 3 * BATCH, **GREEDY))
        await until(lambda: server.api.in_flight == others + 1)
        assert served.admission.gate.waiting_rows == (3 * BATCH if others else 0)
        seen = []
        for count in range(1, others + 3):
            await held.run(1)
            await until(lambda count=count: served.engine.statistics().batches == count)
            seen.append(served.statistics()["inference_stats"]["success"]["count"])
        await held.run(1)
        assert outputs(await large.answer()) == [4] * 3 * BATCH
        seen.append(served.statistics()["inference_stats"]["success"]["count"])
        assert seen == [*range(1, others + 1), others, others, others + 1]


async def test_the_parts_of_a_request_that_fails_are_not_counted():
    held = Held(max_queue_rows=6 * BATCH)
    async with held.serving(tokens=TOKENS) as server, connected(server) as large, AsyncExitStack() as stack:
        stack.callback(held.device.open)
        served = server.repository.find("double")
        large.send(infer(*[2] * 3 * BATCH, **GREEDY))
        await held.run(1)
        await until(lambda: served.engine.statistics().succeeded == 1)
        large.writer.transport.abort()
        await until(lambda: served.failures["CANCELED"] == 1)
        held.device.open()
        await served.engine.drain()
        assert served.statistics()["inference_stats"]["success"]["count"] == 0


async def test_too_much_is_refused_to_who_floods():
    held = Held(max_queue_rows=6 * BATCH)  # Four batches are let in, and two wait.
    async with held.serving(tokens=TOKENS) as server, AsyncExitStack() as stack:
        served = server.repository.find("double")
        gate = served.admission.gate
        greedy = [await stack.enter_async_context(connected(server)) for _ in range(COUNT)]
        for raw in greedy:
            raw.send(infer(1, **GREEDY))
        full = 6 * BATCH + BATCH // 4  # What is little passes all the same.
        await until(lambda: served.failures["REJECTED"] == COUNT - full)
        assert (gate.waiting_rows, server.api.in_flight) == (2 * BATCH, full)
        modest = [await stack.enter_async_context(connected(server)) for _ in range(6)]
        for raw in modest:
            raw.send(infer(2, **MODEST))
        await until(lambda: gate.waiting_rows == 2 * BATCH and server.api.in_flight == full + 2)
        held.device.open()
        assert [outputs(await raw.answer()) for raw in modest] == [[4]] * 6
        answers = [await raw.answer() for raw in greedy]
        assert {status for status, _, _ in answers} == {200, 503}
        assert sum(status == 200 for status, _, _ in answers) == held.seen.count(1) == full - 4
        refused = next(body for status, _, body in answers if status == 503)
        assert b"this client has the most" in refused


async def test_connections_of_an_address_are_one_client():
    held = Held()
    async with held.serving() as server, AsyncExitStack() as stack:
        gate = server.repository.find("double").admission.gate
        for _ in range(COUNT):
            raw = await stack.enter_async_context(connected(server))
            raw.send(infer(1))
        await until(lambda: server.api.in_flight == COUNT)
        assert len(gate._clients) == 1
        held.device.open()
        await until(lambda: not server.api.in_flight)


async def test_a_header_names_the_client():
    held = Held()
    async with held.serving(client_header="X-Client") as server, AsyncExitStack() as stack:
        gate = server.repository.find("double").admission.gate
        for number in range(6):
            raw = await stack.enter_async_context(connected(server))
            raw.send(infer(1, X_Client=number % 3))
        await until(lambda: server.api.in_flight == 6)
        assert len(gate._clients) == 3
        held.device.open()
        await until(lambda: not server.api.in_flight)


def test_addresses():
    assert address_of(("10.0.0.1", 1234)) == address_of("ipv4:10.0.0.1:99") == "10.0.0.1"
    assert address_of(("::ffff:10.0.0.1", 1234, 0, 0)) == "10.0.0.1"
    one, same = ("2001:db8:1:2::1", 1, 0, 0), "ipv6:%5B2001:db8:1:2:ffff::9%5D:1"
    assert address_of(one) == address_of(same) != address_of(("2001:db8:1:3::1", 1, 0, 0))
    assert address_of("unix:") is address_of(None) is None


async def test_what_waits_can_be_cancelled_and_times_out():
    held = Held()
    async with held.serving(tokens=TOKENS) as server, opened(server, additional_headers=GREEDY) as socket:
        served = server.repository.find("double")
        for number in range(150):
            await socket.send(binary(1, id=str(number)))
        await until(lambda: served.pending == 150)
        await socket.send('{"cancel": "149"}')
        assert (await receive(socket))[0]["status"] == 499
        await socket.send(binary(1, id="late", parameters={"timeout": 2000}))
        content, _ = await receive(socket)
        assert (content["id"], content["type"]) == ("late", "DeadlineError")
        assert served.admission.expired == 1
        held.device.open()
        for _ in range(149):
            await receive(socket)


async def test_what_waits_is_answered_before_a_server_stops():
    held = Held()
    async with held.serving() as server, opened(server) as socket:
        served = server.repository.find("double")
        for number in range(160):
            await socket.send(binary(1, id=str(number)))
        await until(lambda: served.pending == 160)
        assert served.admission.gate.waiting
        stopping = asyncio.create_task(server.stop())
        await until(lambda: server.repository.is_draining)
        held.device.open()
        answers = [await receive(socket) for _ in range(160)]
        assert all(values == [2] for _, values in answers)
        async with asyncio.timeout(WAIT_S):
            await stopping


async def test_what_waits_fails_when_the_engine_is_closed():
    held = Held()
    async with held.serving() as server, opened(server) as socket:
        served = server.repository.find("double")
        for number in range(160):
            await socket.send(binary(1, id=str(number)))
        await until(lambda: served.admission.gate.waiting)
        closing = asyncio.create_task(served.aclose())
        await until(lambda: not served.admission.gate.waiting)
        held.device.open()
        async with asyncio.timeout(WAIT_S):
            await closing
        answers = [await receive(socket) for _ in range(160)]
        assert {content.get("type") for content, _ in answers} == {None, "EngineClosedError"}


async def test_metrics_tell_what_waits():
    held = Held(max_queue_rows=5 * BATCH)
    async with held.serving() as server, AsyncExitStack() as stack:
        served = server.repository.find("double")
        for _ in range(50):
            raw = await stack.enter_async_context(connected(server))
            raw.send(infer(1))
        await until(lambda: served.failures["REJECTED"] == 50 - 5 * BATCH - BATCH // 4)
        _, _, body = await ask(server, "/metrics")
        lines = body.decode().splitlines()
        labels = '{model="double",version="1"}'
        assert f"asynctrt_waiting_requests{labels} 8.0" in lines
        assert f"asynctrt_waiting_rows{labels} 8.0" in lines
        reasons = {"crowded": 8, "expired": 0}
        for reason, count in reasons.items():
            assert (
                f'asynctrt_waiting_refused_total{{model="double",reason="{reason}",version="1"}} {count}.0'
                in lines
                or f'asynctrt_waiting_refused_total{{model="double",version="1",reason="{reason}"}} {count}.0'
                in lines
            )
        held.device.open()
        await until(lambda: not server.api.in_flight)
