"""The websocket protocol without a socket: messages in, messages out."""

import json

import numpy as np
import pytest

import asynctrt
from asynctrt.serving import websocket
from asynctrt.serving.api import Api, ModelRoute
from asynctrt.serving.repository import Repository
from asynctrt.serving.settings import ServerSettings
from asynctrt.serving.websocket import WebSocketSession
from asynctrt.testing import LatchDevice
from tests.helpers import until
from tests.models import double_model, rows

pytestmark = pytest.mark.anyio


def tensor(values, *, binary):
    described = {"name": "input", "datatype": "FP32", "shape": [len(values), 4]}
    if binary:
        return described | {"parameters": {"binary_data_size": 16 * len(values)}}
    return described | {"data": rows(*values).ravel().tolist()}


def text(*values, **extra):
    return json.dumps({**extra, "model_name": "double", "inputs": [tensor(values, binary=False)]})


def binary(*values, **extra):
    parameters = {"binary_data_output": True, **extra.pop("parameters", {})}
    content = {
        **extra,
        "model_name": "double",
        "inputs": [tensor(values, binary=True)],
        "parameters": parameters,
    }
    head = json.dumps(content, separators=(",", ":")).encode()
    return len(head).to_bytes(4, "little") + head + rows(*values).tobytes()


def read(message):
    """Header and tensor of an answer."""
    if isinstance(message, str):
        content = json.loads(message)
        return content, content["outputs"][0]["data"][::4] if "outputs" in content else None
    stop = 4 + int.from_bytes(message[:4], "little")
    return json.loads(message[4:stop]), np.frombuffer(message[stop:], np.float32)[::4].tolist()


class Talk:
    """A session, and what it has said."""

    def __init__(self, api, **kw):
        self.said = []
        self.rooms = 0
        self.session = WebSocketSession(api, self.said.append, room=self._room, **kw)

    def _room(self):
        self.rooms += 1

    async def ask(self, message):
        count = len(self.said)
        self.session.receive(message)
        await until(lambda: len(self.said) > count)
        return read(self.said[-1])


@pytest.fixture
async def make():
    engines = []

    async def made(model=None, settings=None, **options):
        engine = await asynctrt.open(model or double_model(), **options)
        engines.append(engine)
        repository = Repository()
        repository.add("double", engine)
        return Api(repository, ServerSettings(**(settings or {}))), engine

    yield made
    for engine in engines:
        await engine.aclose()


async def test_a_path_that_names_the_model(make):
    api, _ = await make()
    talk = Talk(api, route=ModelRoute("double", "", "ws"))
    message = json.dumps({"inputs": [tensor([5], binary=False)]})
    assert (await talk.ask(message))[1] == [10]


async def test_headers_that_repeat_with_other_ids_and_other_values(make):
    """What a header means is remembered without its id: the ids and the tensors must not be."""
    api, _ = await make()
    talk = Talk(api)
    for number in range(50):
        content, values = await talk.ask(binary(number, id=f"id-{number}_x"))
        assert (content["id"], values) == (f"id-{number}_x", [2 * number])


def with_head(head, *values):
    return len(head).to_bytes(4, "little") + head + rows(*values).tobytes()


@pytest.mark.parametrize(
    ("start", "end"),
    [(b'{"id":"%b",', b"}"), (b'{ "id" : "%b", ', b" }"), (b"{", b',\n"id":"%b"}')],
    ids=["first", "spaces", "last"],
)
@pytest.mark.parametrize("route", [None, ModelRoute("double", "", "ws")])
async def test_a_known_head_is_not_parsed_again_and_only_if_it_means_the_same(
    make, route, start, end, monkeypatch
):
    api, _ = await make(settings={"max_requests_per_connection": 4})
    talk = Talk(api, route=route)
    codec = api.repository.find("double").codec
    inputs = json.dumps([tensor([1], binary=True)]).encode()
    rest = b'"model_name":"double","parameters":{"binary_data_output":true},"inputs":' + inputs

    def head(request_id, more=b""):
        return (start + rest + more + end) % request_id

    parsed = []
    parse = websocket.parse_object
    monkeypatch.setattr(websocket, "parse_object", lambda *given: parsed.append(given) or parse(*given))
    for number in range(3):
        content, values = await talk.ask(with_head(head(b"%d" % number), number))
        assert (content["id"], values) == (str(number), [2 * number])
    assert len(parsed) == 1
    assert list(codec._heads) == [head(b"")]
    # The last of two ids counts, and a name may be written in other ways.
    for twice in (b',"id":"last"', b',"\\u0069d":"last"', b', "id" : "last"'):
        for _ in range(2):
            content, _ = await talk.ask(with_head(head(b"first", twice), 1))
            assert content["id"] == ("last" if b"id" in start else "first")
    # An id within something else is not the request's.
    within = b',"outputs":[{"name":"y","parameters":{"id":"%b","binary_data":true}}]'
    for inner in (b"a", b"b"):
        content, _ = await talk.ask(with_head(b"{" + rest + within % inner + b"}", 1))
        assert "id" not in content
    assert list(codec._heads) == [head(b"")]
    # What is no request the first time is none the second time, even if another protocol took it for one.
    cancel, count = head(b"a", b',"cancel":"q"'), len(talk.said)
    codec.decode(cancel + rows(1).tobytes(), len(cancel))
    for _ in range(2):
        talk.session.receive(with_head(cancel, 1))
    assert len(talk.said) == count
    # Too few tensors, and an id that is too long.
    content, _ = await talk.ask(with_head(head(b"few"), 1)[:-4])
    assert (content["id"], content["type"]) == ("few", "RequestError")
    content, _ = await talk.ask(with_head(head(b"x" * 257), 1))
    assert content["type"] == "RequestError"


async def test_a_known_head_goes_to_the_model_that_it_names(make):
    api, _ = await make()
    async with await asynctrt.open(double_model()) as other:
        api.repository.add("other", other)
        talk = Talk(api)
        rest = b',"model_name":"%s","inputs":' + json.dumps([tensor([1], binary=True)]).encode() + b"}"
        for number in range(6):
            name = (b"double", b"other")[number % 2]
            content, _ = await talk.ask(with_head(b'{"id":"%d"' % number + rest % name, number))
            assert (content["id"], content["model_name"]) == (str(number), name.decode())


async def test_answers_come_as_they_finish(make):
    device = LatchDevice(concurrency=2)
    api, _ = await make(device=device, max_rows=1, contexts=2)
    talk = Talk(api)
    for name in "ab":
        talk.session.receive(binary(ord(name), id=name))
    await until(lambda: device.held == 2)
    assert talk.session.in_flight == 2
    device._latch.held.rotate(1)
    device.release()
    await until(lambda: talk.said)
    device.open()
    await until(lambda: len(talk.said) == 2)
    assert [read(message)[0]["id"] for message in talk.said] == ["b", "a"]


async def test_cancel_by_id(make):
    device = LatchDevice(concurrency=1)
    api, engine = await make(device=device, max_rows=1, contexts=1)
    talk = Talk(api)
    for name in ("1", "2", "3"):
        talk.session.receive(binary(int(name), id=name))
    await until(lambda: device.held == 1)
    talk.session.receive('{"cancel": "2"}')
    await until(lambda: talk.said)
    assert read(talk.said[0])[0] == {
        "id": "2",
        "error": "cancelled",
        "status": 499,
        "type": "CancelledError",
    }
    assert engine.statistics().queued_requests == 1
    talk.session.receive('{"cancel": "unknown"}')
    device.open()
    await until(lambda: len(talk.said) == 3)
    assert [read(message)[0]["id"] for message in talk.said[1:]] == ["1", "3"]
    assert api.in_flight == 0


async def test_it_is_full_and_has_room_again(make):
    device = LatchDevice()
    api, _ = await make(device=device, settings={"max_requests_per_connection": 2})
    talk = Talk(api)
    talk.session.receive(binary(1, id="1"))
    assert not talk.session.is_full
    talk.session.receive(binary(2, id="2"))
    assert talk.session.is_full
    device.open()
    await until(lambda: len(talk.said) == 2)
    assert talk.rooms
    assert not talk.session.is_full


async def test_draining(make):
    device = LatchDevice()
    api, _ = await make(device=device)
    talk = Talk(api)
    talk.session.receive(binary(1, id="1"))
    talk.session.is_draining = True
    content, _ = await talk.ask(binary(2, id="2"))
    assert (content["id"], content["status"], content["type"]) == ("2", 503, "EngineClosedError")
    device.open()
    await until(lambda: len(talk.said) == 2)
    assert read(talk.said[1])[1] == [2]


@pytest.mark.parametrize(
    ("message", "status", "says"),
    [
        ("", 400, "not valid JSON"),
        ("[]", 400, "object"),
        ("{}", 400, "model_name"),
        ('{"id": 7, "model_name": "double"}', 400, "id must be a string"),
        ('{"id": "' + "x" * 300 + '", "model_name": "double"}', 400, "256 characters"),
        ('{"cancel": 7}', 400, "cancel must be the id"),
        ('{"model_name": "double"}', 400, "no inputs"),
        ('{"model_name": ["double"], "inputs": []}', 400, "model_name must be"),
        ('{"model_name": "double", "model_version": 1, "inputs": []}', 400, "model_version must be a string"),
        ('{"model_name": "other", "inputs": []}', 404, "unknown model 'other'"),
        ('{"model_name": "double", "inputs": []}', 400, "missing: ['input']"),
        (text(1, parameters={"binary_data_output": True}), 400, "a text message is answered as text"),
        (text(1, parameters={"timeout": -1}), 400, "timeout"),
        (text(1, parameters={"priority": "high"}), 400, "priority"),
        ("\ud800", 400, "not valid JSON"),
        (b"", 400, "0 bytes in all"),
        (bytes(4), 400, "not valid JSON"),
        (b"\xff\xff\xff\xff{}", 400, "4 bytes"),
        (b"\x02\x00\x00\x00{}x", 400, "model_name"),
        (binary(1)[:-1], 400, "16 bytes of tensors"),
        (binary(1) + b"x", 400, "17 follow"),
    ],
)  # fmt: skip
async def test_what_is_wrong_is_answered_in_its_own_form(make, message, status, says):
    api, _ = await make()
    talk = Talk(api)
    content, _ = await talk.ask(message)
    assert type(talk.said[0]) is type(message)
    assert content["status"] == status
    assert says in content["error"]
    assert (await talk.ask(binary(1, id="good")))[1] == [2]


async def test_an_id_that_is_in_flight_already(make):
    device = LatchDevice()
    api, _ = await make(device=device)
    talk = Talk(api)
    talk.session.receive(binary(1, id="same"))
    content, _ = await talk.ask(binary(2, id="same"))
    assert (content["id"], content["status"]) == ("same", 400)
    assert "in flight" in content["error"]
    device.open()
    await until(lambda: len(talk.said) == 2)
    assert read(talk.said[1])[1] == [2]
    assert (await talk.ask(binary(3, id="same")))[1] == [6], "an id that was answered is free again"


async def test_an_id_that_is_too_long_for_a_header_that_is_known(make):
    api, _ = await make()
    talk = Talk(api)
    assert (await talk.ask(binary(1, id="a")))[1] == [2]
    content, _ = await talk.ask(binary(1, id="x" * 300))
    assert content["status"] == 400
    assert "256 characters" in content["error"]


async def test_json_that_would_hold_the_loop(make):
    api, _ = await make(settings={"max_json": 1000})
    talk = Talk(api)
    for message in (text(*range(100), id="a"), '{"cancel": "' + "x" * 1000 + '"}'):
        content, _ = await talk.ask(message)
        assert (content["status"], content["type"]) == (413, "TooLargeError")
    assert len((await talk.ask(binary(*range(100))))[1]) == 100
