"""Requests with every field missing, of the wrong type, too long, negative, nested, truncated or doubled.

``ASYNCTRT_FUZZ=N`` tries N times as many cases, others each time, and prints the seed that it began from;
``ASYNCTRT_FUZZ_SEED`` gives one. The properties are in tests/fuzz.
"""

import asyncio
import copy
import json
import math
import os
import random
import struct

import numpy as np
import orjson
import pytest
from hypothesis import HealthCheck, Phase, assume, given, seed, settings
from hypothesis import strategies as st

import asynctrt
from asynctrt.backends.function import FunctionModel
from asynctrt.kserve.datatypes import datatype_of
from asynctrt.serving.api import Api, ModelRoute
from asynctrt.serving.repository import Repository
from asynctrt.serving.settings import ServerSettings
from asynctrt.serving.websocket import ID_CHARS_MAX, WebSocketSession
from asynctrt.tensors import BatchRecord, InferResult
from tests.fuzz import parsers
from tests.fuzz.decoder import (
    INPUTS,
    OUTPUTS,
    RAW_INPUTS,
    check_bytes,
    check_message,
    check_plain,
    check_raw,
    good_message,
    make_codec,
    wire_of,
)
from tests.helpers import until
from tests.models import double_model
from tests.serving.support import WAIT_S, ask, connected, serving

FUZZ = int(os.environ.get("ASYNCTRT_FUZZ", "0"))
SEED = int(os.environ.get("ASYNCTRT_FUZZ_SEED", random.SystemRandom().randrange(2**32)))

pytestmark = pytest.mark.timeout(60 * max(1, FUZZ))


def fuzzed(count, **strategies):
    """A test of so many cases: always the same ones, unless there is a number to multiply them by."""

    def decorated(function):
        chosen = settings(
            max_examples=count * max(1, FUZZ),
            derandomize=not FUZZ,
            database=None,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            # To make a failure smaller takes minutes, which is more than a test has.
            phases=list(Phase) if FUZZ else [Phase.explicit, Phase.generate],
        )
        tested = chosen(given(**strategies)(function))
        return seed(SEED)(tested) if FUZZ else tested

    return decorated


@pytest.fixture(autouse=True, scope="module")
def _seed():
    if FUZZ:
        print(f"ASYNCTRT_FUZZ_SEED={SEED}")


# ---- what is sent: good requests, and what becomes of them


class Raw(bytes):
    """JSON as it stands, or what is none."""


def emit(value):
    """The JSON of a tree in which things may stand that no JSON library would write."""
    if isinstance(value, Raw):
        return bytes(value)
    if isinstance(value, dict):
        return b"{" + b",".join([emit(key) + b":" + emit(item) for key, item in value.items()]) + b"}"
    if isinstance(value, list):
        return b"[" + b",".join([emit(item) for item in value]) + b"]"
    return json.dumps(value).encode()


def nested(depth, opening=b"[", closing=b"]", core=b""):
    """Lists within lists."""
    return Raw(opening * depth + core + closing * depth)


ODD = [
    *(None, True, False, 0, -1, 1, 2, 4, 8, 2**31, 2**32, 2**40, 2**62, 2**63 - 1, 2**63, 2**64 - 1, 2**64),
    *(
        -(2**63),
        10**30,
        0.5,
        1.0,
        -0.0,
        1e308,
        1e-320,
        6.6e4,
        3.4e38,
        "",
        "x",
        "é",
        "\0",
        "\ud800",
        "16",
        "-1",
    ),
    *(
        [],
        {},
        [[]],
        [None],
        [0],
        [1, [2]],
        [[1], 2],
        {"name": "in0"},
        ["a"],
        [-1],
        [0, 2**62],
        [0, 2**64 - 1],
    ),
    *("BOOL", "FP32", "BYTES", "in0", "out1", "a" * 5000, "é" * 300, "\x7f\x1b", list(range(100)), [[]] * 70),
    *(
        Raw(raw)
        for raw in (b"NaN", b"-Infinity", b"1e400", b"01", b"", b",", b"\xff", b'"\xff"', b'"', b"[", b"}")
    ),
    *(Raw(b"9" * 400), Raw(b"-0"), Raw(b"1E2"), Raw(b'"\\u0000"'), Raw(b'"\\ud800"'), Raw(b"[" * 5000)),
    *(nested(depth) for depth in (1, 2, 31, 32, 33, 64, 65, 254, 255, 990, 1000, 1020, 1022, 2000)),
    *(nested(depth, b'{"a":', b"}", b"1") for depth in (2, 250, 995, 1020, 2000)),
    *(nested(depth, core=b"1") for depth in (3, 33, 500, 1000)),
]
"""What stands where something else should."""

KEYS = [
    *("id", "inputs", "outputs", "parameters", "name", "shape", "datatype", "data", "binary_data_size"),
    *("binary_data", "binary_data_output", "priority", "timeout", "shared_memory_region", "classification"),
    *("model_name", "model_version", "cancel", "instances", "signature_name", "", "\0"),
]

odd = st.one_of(
    st.integers(0, len(ODD) - 1).map(ODD.__getitem__),  # Named by their place: some are long.
    st.integers(-(2**65), 2**65),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=8),
    st.integers(1, 2000).map(nested),
    st.lists(st.one_of(st.integers(-2, 5), st.text(max_size=3), st.none()), max_size=6),
)


def array_for(spec, rng, row_count, length):
    """Values of a tensor: all of its bits, but no signalling of theirs and no NUL at an end."""
    shape = (row_count, *[length if isinstance(dim, str) else dim for dim in spec.dims])
    if spec.dtype.kind == "S":
        words = [b"", b"a", b"\0b", "é".encode(), b"12345678", b'\n"\\']
        return rng.choice(np.array(words, spec.dtype), shape)
    if spec.dtype.kind == "b":
        return rng.integers(0, 2, shape).astype(bool)
    return np.frombuffer(rng.bytes(math.prod(shape) * spec.dtype.itemsize), spec.dtype).reshape(shape)


def finite(array):
    """What JSON can hold of it."""
    if array.dtype.kind in "fV":
        with np.errstate(invalid="ignore"):  # To look at a signalling NaN is to be warned.
            return np.where(np.isfinite(array.astype(np.float64)), array, np.ones((), array.dtype))
    return array


class Request:
    """A good request: its header as a tree, its tensors, and the arrays that they are."""

    def __init__(self, number, specs, forms, row_count, length, request_id, extra):
        rng = np.random.default_rng(number)
        self.arrays = {}
        self.tensors = []
        inputs = []
        for spec, form in zip(specs, forms, strict=False):
            array = array_for(spec, rng, row_count, length)
            item = {"name": spec.name, "datatype": datatype_of(spec), "shape": list(array.shape)}
            if form == "binary":
                raw = wire_of(array)
                item["parameters"] = {"binary_data_size": len(raw)}
                self.tensors.append(raw)
            else:
                array = finite(array)
                shaped = array if form == "nested" else array.reshape(-1)
                item["data"] = _values(shaped)
            self.arrays[spec.name] = array
            inputs.append(item)
        self.content = {"id": request_id} if request_id is not None else {}
        self.content |= {"inputs": inputs, **copy.deepcopy(extra)}

    def message(self):
        """Body, and the length of its header."""
        head = emit(self.content)
        return head + b"".join(self.tensors), len(head)


def _values(array):
    """Numbers and text as JSON has them, nested as the array is."""
    if array.dtype.kind == "S":
        return (
            np.array([item.decode() for item in array.ravel().tolist()], object).reshape(array.shape).tolist()
        )
    if array.dtype.kind == "V":
        return array.astype(np.float64).tolist()
    return array.tolist()


EXTRAS = [
    {},
    {"parameters": {"binary_data_output": True}},
    {"parameters": {"priority": 1, "timeout": 60_000_000, "sequence_id": 0}},
    {"outputs": [{"name": "out3", "parameters": {"binary_data": True}}, {"name": "out0"}]},
    {"outputs": [{"name": "out13"}], "parameters": {"binary_data_output": False}},
]


@st.composite
def good_requests(draw, whole=False):
    """Good requests with some of the inputs as bytes and as JSON; or all of what the model "all" takes."""
    form = st.sampled_from(["binary", "nested", "flat"])
    if whole:
        chosen, forms = INPUTS, [draw(form)] * len(INPUTS)
    else:
        chosen = draw(st.lists(st.sampled_from(INPUTS), min_size=1, max_size=5, unique=True))
        forms = [draw(form) for _ in chosen]
    request = Request(
        draw(st.integers(0, 2**32)),
        chosen,
        forms,
        draw(st.integers(1, 3)),
        draw(st.integers(0, 3)),
        draw(st.sampled_from([None, "", "a", "b-1", 'é"', "x" * 300])),
        draw(st.sampled_from(EXTRAS)),
    )
    if whole:
        request.content |= {"model_name": "all", "model_version": "1"}
    return request


def places(tree):
    """Where something stands in a tree: each key of an object, and the ends of a list."""
    for key in list(tree) if isinstance(tree, dict) else {0, len(tree) - 1} if tree else ():
        yield tree, key
        if isinstance(tree[key], dict | list):
            yield from places(tree[key])


def mutate(draw, tree):
    """Break one thing in a tree, at any depth."""
    found = list(places(tree))
    if not found:
        return
    node, place = found[draw(st.integers(0, len(found) - 1))]
    action = draw(st.sampled_from(["set", "set", "set", "drop", "wrap", "double", "add", "rename"]))
    # What is drawn belongs to the strategy, and another mutation may change it.
    value = copy.deepcopy(draw(odd))
    if action == "set":
        node[place] = value
    elif action == "drop":
        del node[place]
    elif action == "wrap":
        node[place] = [node[place]]
    elif isinstance(node, dict):
        key = Key(place) if action == "double" else draw(st.sampled_from(KEYS))
        node[key] = node.pop(place) if action == "rename" else value
    elif action == "add":
        node.insert(place, value)
    elif len(emit(node)) < 300:  # Many of many would be more than there is memory for.
        node[:] = node * draw(st.sampled_from([2, 65, 300]))


class Key(str):
    """A key that is there a second time."""

    __slots__ = ()

    def __hash__(self):
        return id(self)

    def __eq__(self, other):
        return self is other


def lie(draw, body, head_nbytes):
    """Break the bytes of a message, or what is said of their number."""
    action = draw(st.sampled_from(["cut", "more", "flip", "remove", "insert", "length", "length", "random"]))
    position = draw(st.integers(0, len(body)))
    if action == "cut":
        return body[:position], head_nbytes
    if action == "more":
        return body + draw(st.binary(min_size=1, max_size=20)), head_nbytes
    if action == "flip":
        return body[:position] + draw(st.binary(min_size=1, max_size=4)) + body[position + 1 :], head_nbytes
    if action == "remove":
        return body[:position] + body[position + draw(st.integers(1, 40)) :], head_nbytes
    if action == "insert":
        return body[:position] + draw(st.binary(min_size=1, max_size=4)) + body[position:], head_nbytes
    if action == "random":
        return draw(st.binary(max_size=100)), draw(st.integers(0, 110))
    near = st.integers(-5, 5).map(lambda change: max(0, head_nbytes + change))
    return body, draw(st.one_of(near, st.integers(0, 2**40), st.just(0), st.just(len(body))))


@st.composite
def broken_messages(draw, requests=None):
    """Messages in which something may be wrong, and the length that is given for their header."""
    request = draw(good_requests() if requests is None else requests)
    for _ in range(draw(st.sampled_from([0, 1, 1, 1, 2, 3]))):
        mutate(draw, request.content)
    message = request.message()
    return lie(draw, *message) if draw(st.integers(0, 5)) == 0 else message


# ---- the codec


@pytest.mark.tier2
@fuzzed(1000, message=broken_messages())
def test_what_is_decoded_is_what_was_sent_and_all_else_is_the_callers_error(message):
    check_message(*message)


@st.composite
def plain_requests(draw):
    """Good requests in plain JSON, as rows or as whole tensors."""
    request = draw(good_requests())
    given = {name: _values(finite(array)) for name, array in request.arrays.items()}
    if draw(st.booleans()):
        return {"inputs": given}
    rows = [dict(zip(given, row, strict=True)) for row in zip(*given.values(), strict=True)]
    return {"instances": rows, "parameters": {"priority": 1}}


@fuzzed(120, content=plain_requests())
def test_good_plain_json_is_decoded_to_what_it_holds(content):
    raw = emit(content)
    assume(b"[]" not in raw)  # An empty list does not tell the sizes within it.
    assert check_plain(raw) == "call"


@st.composite
def broken_plain_requests(draw):
    """Plain JSON in which something may be wrong."""
    content = draw(plain_requests())
    for _ in range(draw(st.sampled_from([0, 1, 1, 1, 2, 3]))):
        mutate(draw, content)
    raw = emit(content)
    return lie(draw, raw, len(raw))[0] if draw(st.integers(0, 5)) == 0 else raw


@pytest.mark.tier2
@fuzzed(1000, raw=broken_plain_requests())
def test_broken_plain_json_is_decoded_to_what_it_holds_or_the_callers_error(raw):
    check_plain(raw)


@fuzzed(120, request=good_requests())
def test_a_good_request_is_decoded_to_what_it_was_made_of(request):
    call = make_codec().decode(*request.message())
    assert call.id == request.content.get("id", "")
    assert {name: array.shape for name, array in call.inputs.items()} == {
        name: array.shape for name, array in request.arrays.items()
    }
    for name, array in call.inputs.items():
        assert array.dtype == request.arrays[name].dtype
        assert array.tobytes() == request.arrays[name].tobytes(), name


@fuzzed(150, spec=st.sampled_from(RAW_INPUTS), body=st.one_of(st.binary(max_size=70), st.just(bytes(16))))
def test_a_raw_body_is_one_row_or_the_callers_error(spec, body):
    check_raw(spec, body)


@fuzzed(
    150,
    elements=st.lists(
        st.one_of(st.binary(max_size=10), st.sampled_from([b"", b"a", b"a\0", b"\0", b"\0b"])), max_size=5
    ),
    lies=st.lists(st.tuples(st.integers(0, 80), st.integers(0, 255)), max_size=3),
    change=st.integers(-2, 2),
)
def test_byte_strings_are_read_to_the_last_byte_or_refused(elements, lies, change):
    raw = bytearray(b"".join(struct.pack("<I", len(item)) + item for item in elements))
    for position, value in lies:
        if position < len(raw):
            raw[position] = value
    check_bytes(bytes(raw), max(0, len(elements) + change))


@fuzzed(
    100,
    number=st.integers(0, 2**32),
    row_count=st.integers(0, 3),
    length=st.integers(0, 3),
    wanted=st.lists(
        st.tuples(st.sampled_from(OUTPUTS), st.booleans()), min_size=1, unique_by=lambda it: it[0]
    ),
    request_id=st.text(st.characters(codec="utf-8"), max_size=5),
    transposed=st.booleans(),
)
def test_an_answer_says_what_the_model_gave(number, row_count, length, wanted, request_id, transposed):
    codec = make_codec()
    rng = np.random.default_rng(number)
    asked = [{"name": spec.name, "parameters": {"binary_data": binary}} for spec, binary in wanted]
    head = orjson.dumps({"id": request_id, "inputs": [], "outputs": asked})
    # An answer's header may be that of the one before, and must not if the shapes are others.
    for more in (0, 0, 1, 0):
        outputs = {}
        for spec, binary in wanted:
            array = array_for(spec, rng, row_count + more, length)
            array = np.asfortranarray(array) if transposed else array
            outputs[spec.name] = array if binary else finite(array)
        call = codec.decode(head, len(head))
        answer, tensors = codec.encode(call, InferResult(outputs, (BatchRecord(1, 0),), 0))
        check_answer(orjson.loads(answer), b"".join(tensors), request_id, wanted, outputs)


def check_answer(content, raw, request_id, wanted, outputs):
    """An answer, read by hand, is these outputs."""
    assert content.get("id", "") == request_id
    for (spec, binary), item in zip(wanted, content["outputs"], strict=True):
        array = outputs[spec.name]
        assert (item["name"], item["datatype"]) == (spec.name, datatype_of(spec))
        assert tuple(item["shape"]) == array.shape
        if binary:
            nbytes = item["parameters"]["binary_data_size"]
            assert raw[:nbytes] == wire_of(array)
            raw = raw[nbytes:]
        else:
            values = [item.encode() for item in item["data"]] if spec.dtype.kind == "S" else item["data"]
            assert np.array(values, spec.dtype).tobytes() == array.tobytes()
    assert not raw


def _head(content, tensors=b""):
    head = emit(content)
    return head + tensors, len(head)


def _one(shape, **more):
    return {"inputs": [{"name": "in10", "datatype": "FP32", "shape": shape} | more]}


FINDINGS = {
    "the rest of a known header without its beginning": (b',"inputs":[]}', 13),
    "a shape too large for NumPy, of no elements": _head(
        _one([0, 2**62], parameters={"binary_data_size": 0})
    ),
    "a dimension too large for C, of no elements": _head(_one([0, 2**64 - 1], data=[])),
    "lists so deep that nobody may walk through them": _head(_one([1, 1], data=nested(1000, core=b"1"))),
    "text of lists as deep, of byte strings": _head(
        {
            "inputs": [
                {"name": "in13", "datatype": "BYTES", "shape": [1, 2], "data": nested(1000, core=b'"a"')}
            ]
        }
    ),
    "an id so deep that it has no repr": _head({"id": nested(1000), "inputs": []}),
    "a priority so deep": _head({"inputs": [], "parameters": {"priority": nested(1000)}}),
    "a name so deep": _head({"inputs": [{"name": nested(1000)}]}),
    "a shape so deep": _head(_one(nested(1000))),
    "a name that is said in full": _head({"inputs": [{"name": "x" * 100_000}]}),
    "text that takes the room of the longest in each element": _head(
        _one([1, 10_001], data=["x" * 1_000_000] + [0] * 10_000)
    ),
    "a number beyond bfloat16's": _head(
        {"inputs": [{"name": "in12", "datatype": "BF16", "shape": [1], "data": [3.4e38]}]}
    ),
}
"""What was not refused once, or not in this way."""


@pytest.mark.parametrize("message", FINDINGS.values(), ids=FINDINGS)
def test_what_was_found_once_is_refused(message):
    assert check_message(*message) == "error"


GOOD_INPUT = b'{"name":"in0","datatype":"BOOL","shape":[1],"parameters":{"binary_data_size":1}}'
TWINS = {
    "an id twice": b'{"id":"a","inputs":[%b],"id":"b"}',
    "an id twice, once as an escape": b'{"id":"a","inputs":[%b],"\\u0069d":"b"}',
    "an id twice, the first as an escape": b'{"\\u0069d":"b","inputs":[%b],"id":"a"}',
    "an id that is another thing's": b'{"id":"a","inputs":[%b],"parameters":{"id":"b"}}',
    "an id in the end": b'{"inputs":[%b],"id":"b"}',
    "an id that is empty": b'{"id":"","inputs":[%b]}',
    "an id after a space": b'{ "id":"a","inputs":[%b]}',
    "an id with an escape": b'{"id":"a\\n","inputs":[%b]}',
    "inputs twice": b'{"id":"a","inputs":[],"inputs":[%b]}',
}
"""Headers of which a memory that leaves the id out might think that they say the same."""


@pytest.mark.parametrize("head", TWINS.values(), ids=TWINS)
def test_headers_that_differ_in_more_than_their_id_are_not_confused(head):
    head = head % GOOD_INPUT
    assert check_message(head + b"\1", len(head)) == "call"


def test_large_integers_are_taken_beside_small_ones():
    values = [1, 2**63, 2**64 - 1]
    item = {"name": "in4", "datatype": "UINT64", "shape": [3], "data": values}
    message = _head({"inputs": [item]})
    assert check_message(*message) == "call"
    assert make_codec().decode(*message).inputs["in4"].tolist() == values


def test_a_known_header_is_not_known_without_its_beginning():
    codec = make_codec()
    body, head_nbytes = good_message("1")
    codec.decode(body, head_nbytes)
    cut = len(b'{"id":"1"')
    with pytest.raises(asynctrt.CallerError, match="JSON"):
        codec.decode(body[cut:], head_nbytes - cut)


@fuzzed(
    300,
    begun=st.sampled_from(list(parsers.seeds())),
    sizes=st.lists(st.integers(1, 255), max_size=3),
    changes=st.lists(
        st.tuples(st.integers(0, 400), st.sampled_from((0, 1, 1, 9)), st.binary(max_size=4)), max_size=3
    ),
)
def test_parsers_say_the_same_however_it_comes(monkeypatch, begun, sizes, changes):
    for limit in parsers.SMALL:
        monkeypatch.setattr(*limit)
    check, raw = begun
    for start, removed, added in changes:
        start %= len(raw) + 1
        raw = raw[:start] + added + raw[start + removed :]
    check(raw, sizes)


# ---- the websocket's protocol


def echo(inputs, outputs):
    for spec in INPUTS:
        outputs[spec.name.replace("in", "out")][...] = inputs[spec.name]


def all_model():
    """Gives back what it takes, in every datatype."""
    return FunctionModel(echo, inputs=list(INPUTS), outputs=list(OUTPUTS))


class Talk:
    """A loop with a server's insides on it."""

    def __init__(self, runner):
        self._runner = runner
        self._engines = []
        self.api = runner.run(self._open())

    async def _open(self):
        repository = Repository()
        for name, model in (("all", all_model()), ("double", double_model())):
            self._engines.append(await asynctrt.open(model))
            repository.add(name, self._engines[-1])
        return Api(repository, ServerSettings())

    def close(self):
        for engine in self._engines:
            self._runner.run(engine.aclose())

    def say(self, messages, route):
        """What a session answers to these messages, in the end."""
        return self._runner.run(self._say(messages, route))

    async def _say(self, messages, route):
        said = []
        session = WebSocketSession(self.api, said.append, route=route)
        for message in messages:
            session.receive(message)
        async with asyncio.timeout(WAIT_S):
            await until(lambda: not session.in_flight)
        assert not self.api.in_flight
        assert not any(served.pending for served in self.api.repository)
        return said


@pytest.fixture(scope="module")
def talk():
    with asyncio.Runner() as runner:
        talk = Talk(runner)
        yield talk
        talk.close()


def as_binary(message):
    """A message as the websocket has it: the length of the header before it."""
    body, head_nbytes = message
    return struct.pack("<I", head_nbytes % 2**32) + body


def as_text(message):
    return message[0].decode("utf-8", "surrogateescape")


whole_requests = good_requests(whole=True)
double_requests = st.sampled_from(
    [
        Raw(
            b'{"id":"%d","model_name":"double","inputs":[{"name":"input","datatype":"FP32","shape":[1,4],%s}]}'
        )
        % (number, b'"data":[1,2,3,4]')
        for number in range(3)
    ]
)
controls = st.one_of(
    st.builds(lambda value: emit({"cancel": value}), st.one_of(odd, st.sampled_from(["0", "1", "2", "a"]))),
    st.builds(lambda name, value: emit({"model_name": "double", name: value}), st.sampled_from(KEYS), odd),
    double_requests,
).map(lambda head: (head, len(head)))
socket_messages = st.one_of(
    *(
        st.builds(form, st.one_of(messages, controls, broken_messages(whole_requests)))
        for form in (as_text, as_binary)
        for messages in (controls, whole_requests.map(Request.message), broken_messages(whole_requests))
    ),
    st.text(max_size=20),
    st.binary(max_size=40),
)


def answer_is_due(message):
    """Whether a message is answered: all are but those that cancel something."""
    if isinstance(message, str):
        raw = message.encode("utf-8", "surrogatepass")
    else:
        length = int.from_bytes(message[:4], "little")
        raw = message[4 : 4 + length] if len(message) >= 4 + length else b""
    try:
        content = orjson.loads(raw)
    except orjson.JSONDecodeError:
        return True
    if not isinstance(content, dict) or not isinstance(content.get("cancel"), str):
        return True
    request_id = content.get("id", "")
    return not isinstance(request_id, str) or len(request_id) > ID_CHARS_MAX


def read_said(message):
    """The JSON of an answer."""
    if isinstance(message, str):
        return orjson.loads(message)
    return orjson.loads(message[4 : 4 + int.from_bytes(message[:4], "little")])


@fuzzed(
    100,
    messages=st.lists(socket_messages, max_size=4),
    route=st.sampled_from([None, *(ModelRoute(name, "", "ws") for name in ("all", "double", "none"))]),
    request=whole_requests,
    binary=st.booleans(),
)
def test_each_message_of_a_websocket_has_its_answer_and_a_good_one_the_right_one(
    talk, messages, route, request, binary
):
    request.content = request.content | {
        "id": "good",
        "outputs": [{"name": spec.name, "parameters": {"binary_data": binary}} for spec in OUTPUTS],
        "parameters": {},
    }
    expected = {name.replace("in", "out"): array for name, array in request.arrays.items()}
    if not binary:
        request.content["inputs"] = [
            {"name": spec.name, "datatype": datatype_of(spec), "shape": list(request.arrays[spec.name].shape)}
            | {"data": _values(finite(request.arrays[spec.name]))}
            for spec in INPUTS
        ]
        request.tensors = []
        expected = {name: finite(array) for name, array in expected.items()}
    good = as_binary(request.message()) if binary else as_text(request.message())
    messages = [message for message in messages if b'"good"' not in _bytes(message)]
    said = talk.say([*messages, good], route)
    due = [good, *filter(answer_is_due, messages)]
    assert [sum(isinstance(message, kind) for message in said) for kind in (str, bytes)] == [
        sum(isinstance(message, kind) for message in due) for kind in (str, bytes)
    ], said
    for answer in map(read_said, said):
        assert ("error" in answer) != ("outputs" in answer), answer
        # 503 is what a timeout of a microsecond comes to, and 499 a request that was cancelled.
        assert answer.get("status", 400) in (400, 404, 413, 499, 501, 503), answer
        assert len(answer.get("error", "")) < 1000
    if route is not None and route.name != "all":
        return
    answers = [answer for answer in said if read_said(answer).get("id") == "good"]
    assert len(answers) == 1
    content = read_said(answers[0])
    assert [item["name"] for item in content["outputs"]] == list(expected)
    start = 4 + int.from_bytes(answers[0][:4], "little") if binary else 0
    for item, array in zip(content["outputs"], expected.values(), strict=True):
        assert tuple(item["shape"]) == array.shape
        if binary:
            raw = wire_of(array)
            assert answers[0][start : start + len(raw)] == raw
            start += len(raw)
        else:
            values = [one.encode() for one in item["data"]] if array.dtype.kind == "S" else item["data"]
            assert np.array(values, array.dtype).tobytes() == array.tobytes()


def _bytes(message):
    return message.encode("utf-8", "surrogatepass") if isinstance(message, str) else message


# ---- a server's socket


BODY = orjson.dumps(
    {"inputs": [{"name": "input", "datatype": "FP32", "shape": [1, 4], "data": [1.0, 2.0, 3.0, 4.0]}]}
)
PLAIN = b'{"instances":[[1,2,3,4]]}'


def http(line, *headers, body=b""):
    return b"\r\n".join([line, *headers, b"", b""]) + body


INFER = b"POST /v2/models/double/infer HTTP/1.1"
LENGTH = b"Content-Length: %d" % len(BODY)
WEBSOCKET = [
    b"Host: localhost",
    b"Connection: Upgrade",
    b"Upgrade: websocket",
    b"Sec-WebSocket-Version: 13",
    b"Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==",
]
PREDICT = b"POST /v1/models/double:predict HTTP/1.1"
PLAIN_DEEP = b'{"instances":%b}' % nested(1000)
INDEX = b"POST /v2/repository/index HTTP/1.1"
DEEP = b'{"ready":%b}' % nested(1000)
SOCKET_CASES = {
    "no request": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(200), 400),
    "a length beyond what is taken": (http(INFER, b"Host: localhost", b"Content-Length: 9999999"), 413),
    "chunks beyond what is taken": (
        http(INFER, b"Host: localhost", b"Transfer-Encoding: chunked", body=b"200000\r\n" + bytes(0x200000)),
        413,
    ),
    "headers beyond what is taken": (http(INFER, b"Host: localhost", b"X: " + b"y" * (20 << 10)), 431),
    "a line that never ends": (b"GET /" + b"a" * (9 << 10), 414),
    "a header's name that never ends": (b"GET / HTTP/1.1\r\nHost: localhost\r\n" + b"a" * (512 << 10), 431),
    "no body": (http(INFER, b"Host: localhost"), 400),
    "no JSON": (http(INFER, b"Host: localhost", b"Content-Length: 3", body=b"[1,"), 400),
    "compressed, it says": (
        http(INFER, b"Host: localhost", LENGTH, b"Content-Encoding: gzip", body=BODY),
        400,
    ),
    "expecting what there is not": (http(INFER, b"Host: localhost", LENGTH, b"Expect: x", body=BODY), 417),
    "a page that is not": (http(b"GET /x HTTP/1.1", b"Host: localhost"), 404),
    "another method": (http(b"DELETE /v2 HTTP/1.1", b"Host: localhost"), 405),
    "a websocket at no path of one": (http(b"GET /v2 HTTP/1.1", *WEBSOCKET), 404),
    "a websocket of no version": (http(b"GET /v2/ws HTTP/1.1", *WEBSOCKET[:3], WEBSOCKET[4]), 426),
    "a websocket of no key": (http(b"GET /v2/ws HTTP/1.1", *WEBSOCKET[:4]), 400),
    "a websocket from an origin that is none": (
        http(b"GET /v2/ws HTTP/1.1", *WEBSOCKET, b"Origin: http://["),
        403,
    ),
    "plain JSON so deep that it has no repr": (
        http(PREDICT, b"Host: localhost", b"Content-Length: %d" % len(PLAIN_DEEP), body=PLAIN_DEEP),
        400,
    ),
    "plain JSON": (
        http(PREDICT, b"Host: localhost", b"Content-Length: %d" % len(PLAIN), body=PLAIN),
        200,
    ),
    "tensors of KServe V2 as plain JSON": (http(PREDICT, b"Host: localhost", LENGTH, body=BODY), 400),
    "a header so deep that it has no repr": (
        http(INDEX, b"Host: localhost", b"Content-Length: %d" % len(DEEP), body=DEEP),
        400,
    ),
}


@pytest.mark.anyio
async def test_what_is_no_request_is_refused():
    limits = {"max_body": 1 << 20, "max_headers": 16 << 10, "model_control": True}
    faults = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: faults.append(context))
    async with serving(**limits) as server:
        for name, (raw, status) in SOCKET_CASES.items():
            async with connected(server) as broken:
                broken.send(raw)
                assert (await broken.answer())[0] == status, name
            answer = await ask(server, "/v2/models/double/infer", BODY)
            assert orjson.loads(answer[2])["outputs"][0]["data"] == [2.0, 4.0, 6.0, 8.0], name
            assert not faults, name
