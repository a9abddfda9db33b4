"""Answers in pieces: what ends one, what its events are, and the times of both from real servers."""

import asyncio
import json
from contextlib import asynccontextmanager

import pytest
from aiohttp import web
from hypothesis import given, settings
from hypothesis import strategies as st
from websockets.asyncio.server import serve

from asynctrt import loadtest
from asynctrt.errors import OptionsError, TargetError
from asynctrt.loadtest.plain_target import open_plain_target
from asynctrt.loadtest.streams import Events, Streamed, ending
from asynctrt.loadtest.targets import TargetSpec
from tests.loadtest.support import answering, serving_app

pytestmark = pytest.mark.anyio
QUICK = {"seconds": 0.3, "warmup": 0.0}
TWELVE = {"requests": 12, "seconds": 20.0, "warmup": 0.0}


@pytest.mark.parametrize(
    ("text", "number", "message", "is_last"),
    [
        ("3", 2, "anything", False),
        ("3", 3, "anything", True),
        ("[END]", 1, "END", False),  # It is no class of characters.
        ("[END]", 1, "it is the [END].", True),
        ("/end|stop/", 1, "will stop", True),
        ("/^end$/", 1, "the end", False),
        ("/", 1, "a/b", True),
        ("done=true", 1, '{"done": true}', True),
        ("done=true", 1, '{"done": "true"}', True),
        ("done=true", 1, '{"done": false}', False),
        ("done=true", 1, "done=true", False),
        ("type=response.done", 1, '{"type": "response.done", "n": 1}', True),
        ('type="end"', 1, '{"type": "end"}', True),
        ("n=3", 1, '{"n": 3}', True),
        ("error=null", 1, '{"error": null}', True),
        ("error=null", 1, "{}", False),
        ("choices.0.finish_reason=stop", 1, '{"choices": [{"finish_reason": "stop"}]}', True),
        ("choices.0.finish_reason=stop", 1, '{"choices": []}', False),
        ("choices.0.finish_reason=stop", 1, '{"choices": 7}', False),
        ("done=true", 1, '{"done": ' + "[" * 100_000, False),
    ],
)
def test_what_ends_an_answer(text, number, message, is_last):
    assert ending(text)(number, message) is is_last


@pytest.mark.parametrize("text", ["", "0", "/(/"])
def test_what_can_end_no_answer(text):
    with pytest.raises(OptionsError, match="until_message"):
        ending(text)


STREAM = b": hello\r\n\r\ndata: one\r\n\r\nevent: x\ndata:two\ndata:  2\nid: 7\n\n\ndata\n\n\rdata: last\r\r"
EVENTS = [(b"", b"one"), (b"x", b"two\n 2"), (b"", b""), (b"", b"last")]


@settings(deadline=None)
@given(st.lists(st.integers(0, len(STREAM)), max_size=8).map(sorted))
def test_events_are_the_same_however_the_bytes_come(cuts):
    events = Events()
    parts = [STREAM[start:end] for start, end in zip([0, *cuts], [*cuts, len(STREAM)], strict=True)]
    assert [event for part in parts for event in events.feed(part)] == EVENTS


class Service:
    """Streams as OpenAI's does: three pieces, 20 ms apart, and then its end."""

    def __init__(self):
        self.requests = 0
        self.connections = set()
        self.gap_s = 0.02
        self.end = b"data: [DONE]\n\n"
        self.may_end = asyncio.Event()
        self.may_end.set()

    async def chat(self, request):
        self.requests += 1
        self.connections.add(request.transport)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream; charset=utf-8"})
        await response.prepare(request)
        for number in range(3):
            await asyncio.sleep(self.gap_s)
            await response.write(f": ping\n\ndata: {json.dumps({'n': number})}\n\n".encode())
        await response.write(self.end)
        await self.may_end.wait()
        return response

    async def fails(self, request):
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await response.write(request.query["says"].encode())
        if "breaks" in request.query:
            request.transport.abort()
        return response

    @asynccontextmanager
    async def served(self):
        application = web.Application()
        application.add_routes([web.post("/chat", self.chat), web.get("/fails", self.fails)])
        async with serving_app(application) as url:
            try:
                yield url
            finally:
                self.may_end.set()


@pytest.mark.parametrize("end", [b"data: [DONE]\n\n", b"", b"data: 4"])
async def test_the_pieces_of_a_stream_of_events(end):
    service = Service()
    service.end = end
    async with service.served() as address:
        report = await loadtest.run(f"{address}/chat", body={"stream": True}, callers=4, **TWELVE)
    (run,) = report.runs
    assert run.answered == run.requests == 12
    pieces = 4 if end == b"data: 4" else 3
    assert run.stream.pieces * run.seconds == pytest.approx(pieces * 12)
    # Nothing is quicker than the server's pauses, whatever else the machine has to do.
    assert run.stream.first["p50"] >= 18
    assert run.latency["p50"] >= 54
    assert run.stream.between["max"] >= 18
    content = report.as_json()["runs"][0]["stream"]
    assert content["first"]["p50"] == run.stream.first["p50"]
    assert len(service.connections) <= 8  # Each is used again.


async def test_what_comes_after_the_end_of_a_stream_is_not_its_latency():
    service = Service()
    service.may_end.clear()
    async with service.served() as address:
        report = await loadtest.run(f"{address}/chat", body="{}", callers=2, **TWELVE)
    (run,) = report.runs
    assert run.answered == 12


@pytest.mark.parametrize(
    ("query", "says"),
    [
        ('says=data: {"error": {"message": "no room"}}%0A%0A', "an error in the stream: .*no room"),
        ("says=event: error%0Adata: no room%0A%0A", "an error in the stream: no room"),
        ("says=: nothing%0A%0A", "a stream without any event"),
        ("says=data: 1%0A%0A&breaks", "the connection .* was lost"),
    ],
)
async def test_a_stream_that_fails_is_no_answer(query, says):
    async with Service().served() as address:
        with pytest.raises(TargetError, match=says):
            await loadtest.run(f"{address}/fails?{query}".replace(" ", "%20"), **QUICK)


@pytest.mark.parametrize("length", ["", "\nContent-Length: 26"])
async def test_a_stream_in_pieces_of_a_byte(length):
    """The last event's data is the answer that is checked."""
    head = f"HTTP/1.1 200 OK\nContent-Type: Text/Event-Stream{length}\nConnection: close\n\n"

    letters = [bytes([letter]) for letter in b'data: 1\r\n\r\ndata: {"y": 2}\n\n']
    async with answering(head.replace("\n", "\r\n").encode(), *letters) as where:
        target = await open_plain_target(TargetSpec(where))
        got = await target.start(target.prepare({}))
        assert isinstance(got, Streamed)
        assert (len(got.came_ns), target.outputs(got)["y"]) == (2, 2)
        await target.aclose()


@asynccontextmanager
async def talking(talk):
    async with serve(talk, "127.0.0.1", 0) as server:
        yield "ws://{}:{}/chat".format(*server.sockets[0].getsockname()[:2])


async def chat(socket):
    async for _ in socket:
        for number in range(3):
            await asyncio.sleep(0.02)
            await socket.send(json.dumps({"n": number, "done": number == 2}))


@pytest.mark.parametrize("until", [3, "done=true", '/"n": *2/', '"n": 2'])
async def test_an_answer_of_several_messages(until):
    async with talking(chat) as address:
        report = await loadtest.run(address, body="hi", callers=4, until_message=until, **TWELVE)
    (run,) = report.runs
    assert run.answered == run.requests == 12
    assert run.stream.pieces * run.seconds == pytest.approx(3 * 12)
    assert run.stream.first["p50"] >= 18
    assert run.latency["p50"] >= 54


@pytest.mark.parametrize("until", [None, 2, '"n": 1'])
async def test_an_answer_that_goes_on_after_its_end_is_refused(until):
    """Its other messages would be taken for the answer to the next request."""
    async with talking(chat) as address:
        with pytest.raises(TargetError, match=r"unsolicited messages.*--until-message"):
            await loadtest.run(address, body="hi", callers=4, until_message=until, **QUICK)


async def test_an_answer_without_its_end():
    async with talking(chat) as address:
        with pytest.raises(TargetError, match="did not answer a first request within 0.3 s"):
            await loadtest.run(address, body="hi", until_message="never", answer_timeout=0.3, **QUICK)


async def test_what_ends_an_answer_is_for_other_websockets_only():
    for where in ("http://127.0.0.1:9/chat", "ws://127.0.0.1:9/v2/models/m/ws", "model.onnx"):
        with pytest.raises(OptionsError, match="until_message"):
            await loadtest.run(where, until_message="[END]", **QUICK)
    with pytest.raises(OptionsError, match="until_message must be a number of messages"):
        await loadtest.run("ws://127.0.0.1:9/chat", body="x", until_message=0, **QUICK)
