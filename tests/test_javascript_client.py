"""The client for browsers, in a browser, against a real server."""

import asyncio
import json
import re

import numpy as np
from playwright.async_api import async_playwright
from websockets.asyncio.server import serve

from asynctrt.backends.function import FunctionModel
from asynctrt.client import JAVASCRIPT
from asynctrt.tensors import TensorSpec
from asynctrt.testing import LatchDevice
from tests.helpers import until
from tests.models import double_model
from tests.serving.support import CHROMIUM_FLAGS, engine_of, serving, taken

TYPES = JAVASCRIPT.with_suffix(".d.ts")

START = """
import { Client, ServerError, tensor } from "/asynctrt.js";
const states = [];
const client = new Client("/v2/ws", { ...OPTIONS, onstate: (state) => states.push(state) });
const row = (value) => ({ input: tensor("FP32", [1, 4], Array(4).fill(value)) });
const caught = async (call) => {
  try {
    return await call;
  } catch (error) {
    return [error.name, error.message, error.status, error instanceof ServerError];
  }
};
Object.assign(window, { client, states, row, caught, tensor, Client });
"""


def echo(name, dtype):
    def function(inputs, outputs):
        outputs["y"][...] = inputs["x"]

    return FunctionModel(
        function, name=name, inputs=TensorSpec("x", dtype, (2,)), outputs=TensorSpec("y", dtype, (2,))
    )


class Page:
    """A page of a server's own origin with a client in it."""

    def __init__(self, server, chromium, options="{}"):
        self.server, self.chromium, self.options = server, chromium, options

    async def __aenter__(self):
        self.driver = await async_playwright().start()
        # The page does not come from the network, so Chromium takes it for one from elsewhere.
        flags = [*CHROMIUM_FLAGS, "--disable-features=LocalNetworkAccessChecks"]
        self.browser = await self.driver.chromium.launch(executable_path=self.chromium, args=flags)
        page = await self.browser.new_page()
        self.trouble = []
        page.on("pageerror", lambda error: self.trouble.append(str(error)))
        script = f'<script type="module">{START.replace("OPTIONS", self.options)}</script>'
        for path, kind, text in (
            ("page", "text/html", f"<!doctype html><title>t</title>{script}"),
            ("asynctrt.js", "text/javascript", JAVASCRIPT.read_text()),
        ):
            await page.route(f"**/{path}", self.answer(kind, text))
        await page.goto(f"{self.server.http_url}/page")
        await page.wait_for_function("window.client?.connected", timeout=20_000)
        self.page = page
        return self

    @staticmethod
    def answer(kind, text):
        async def fulfil(route):
            await route.fulfill(content_type=kind, body=text)

        return fulfil

    def run(self, code):
        return asyncio.ensure_future(self.page.evaluate(f"async () => {{ {code} }}"))

    async def __aexit__(self, *_):
        await self.browser.close()
        await self.driver.stop()
        assert not self.trouble


LIE = {"name": "y", "datatype": "FP32", "shape": [1], "parameters": {"binary_data_size": 4}}


def run(main):
    asyncio.run(asyncio.wait_for(main(), 55))


def test_answers_errors_and_types(chromium):
    models = {"double": double_model()}
    for name, dtype in (("int64", np.int64), ("bool", np.bool_), ("fp64", np.float64), ("bytes", "S8")):
        models[name] = echo(name, np.dtype(dtype))

    async def main():
        async with serving(models) as server, Page(server, chromium, "{ maxInFlight: 8 }") as page:
            answers = await page.run(
                """const calls = Array.from({ length: 200 }, (_, i) => client.infer("double", row(i)));
                return (await Promise.all(calls)).map(({ output }) =>
                  [output.datatype, ...output.shape, output.data.constructor.name, output.data[3]]);"""
            )
            assert answers == [["FP32", 1, 4, "Float32Array", 2 * value] for value in range(200)]
            assert taken(server) == 200
            assert await page.run(
                """const ask = async (name, type, data) => {
                  const options = { outputs: ["y"], version: 1 };
                  const { y } = await client.infer(name, { x: tensor(type, [1, 2], data) }, options);
                  const text = (one) => one?.byteLength >= 0 ? new TextDecoder().decode(one) : `${one}`;
                  return Array.from(y.data, text);
                };
                return [await ask("int64", "INT64", [-1, 2n ** 60n]),
                        await ask("bool", "BOOL", [1, 0]),
                        await ask("fp64", "FP64", [0.1, -2]), await ask("bytes", "BYTES", ["grüße", ""])];"""
            ) == [["-1", str(2**60)], ["1", "0"], ["0.1", "-2"], ["grüße", ""]]
            metadata = await page.run('return client.metadata("double");')
            assert metadata["inputs"] == [{"name": "input", "datatype": "FP32", "shape": [-1, 4]}]
            name, message, status, ours = await page.run('return caught(client.infer("none", row(1)));')
            assert (name, status, ours) == ("UnknownModelError", 404, True)
            assert "none" in message
            assert "4 elements" in await page.run(
                'try { tensor("FP32", [1, 4], [1]); } catch (error) { return String(error); }'
            )
            assert await page.run("client.close(); return [client.inFlight, states];") == [
                0,
                ["connected", "closed"],
            ]
            assert (await page.run('return caught(client.infer("double", row(1)));'))[
                0
            ] == "NotConnectedError"

    run(main)


def test_deadlines_cancelling_and_lost_connections(chromium):
    device = LatchDevice()

    async def main():
        async with (
            serving(engine={"device": device}, tokens=("geh+im/?~",)) as server,
            Page(server, chromium, '{ token: "geh+im/?~", attempts: 5, maxInFlight: 1 }') as page,
        ):
            said = await page.run('return caught(client.infer("double", row(1), { deadline: 100 }));')
            assert said[:2] == ["DeadlineError", "no answer within the deadline of 100 ms"]
            await until(lambda: server.api.in_flight == 0)  # It was cancelled on the server.
            call = page.run(
                """window.stop = new AbortController();
                return caught(client.infer("double", row(1), { signal: stop.signal }));"""
            )
            await until(lambda: server.api.in_flight == 1)
            waiting = page.run('return caught(client.infer("double", row(1), { deadline: 50 }));')
            assert (await waiting)[0] == "DeadlineError"  # It waited for its turn, and left.
            await page.run("stop.abort();")
            assert (await call)[0] == "AbortError"
            await until(lambda: server.api.in_flight == 0)

            before = taken(server)
            call = page.run('return caught(client.infer("double", row(1)));')
            await until(lambda: server.api.in_flight == 1)
            for connection in list(server._hub.connections):
                connection.abort()
            # Who knows what the server did with it: it is not sent again.
            assert (await call)[0] == "ConnectionLostError"
            await until(lambda: server.api.in_flight == 0)
            assert taken(server) == before + 1
            call = page.run('return client.infer("double", row(3), { idempotent: true });')
            await until(lambda: server.api.in_flight == 1)
            for connection in list(server._hub.connections):
                connection.abort()
            await until(lambda: engine_of(server).statistics().cancelled >= 1 and taken(server) == before + 3)
            device.open()
            assert (await call)["output"]["data"][0] == 6
            assert await page.run("return states.includes('connecting');")

    run(main)


LIES = {
    "size": ({"outputs": [LIE | {"parameters": {"binary_data_size": 3}}]}, b"abc"),
    "short": ({"outputs": [LIE | {"shape": [4], "parameters": {"binary_data_size": 16}}]}, b""),
    "shape": ({"outputs": [LIE | {"shape": [4]}]}, b"abcd"),
    "type": ({"outputs": [LIE | {"datatype": "FP7"}]}, b"abcd"),
    "bytes": ({"outputs": [LIE | {"datatype": "BYTES"}]}, b"\xff\xff\xff\xff"),
    "json": ({"outputs": [{"name": "y", "datatype": "FP32", "shape": [1], "data": [1]}]}, b""),
    "none": ({}, b""),
}


def test_answers_that_cannot_be_read_and_times_that_are_none(chromium):
    """Without a word of what is wrong, a page would wait for ever."""

    async def lie(socket):
        async for message in socket:
            size = int.from_bytes(message[:4], "little")
            request = json.loads(message[4 : 4 + size])
            if request["model_name"] == "babble":
                await socket.send("what?")
                continue
            content, raw = LIES.get(request["model_name"], ({"outputs": [LIE]}, b"\0\0\x80?"))
            head = json.dumps({"id": request["id"]} | content).encode()
            await socket.send(len(head).to_bytes(4, "little") + head + raw)

    async def main():
        async with (
            serving() as server,
            serve(lie, "127.0.0.1", 0) as unkind,
            Page(server, chromium) as page,
        ):
            port = unkind.sockets[0].getsockname()[1]
            await page.run(f"window.liar = new Client('ws://127.0.0.1:{port}');")
            for name in LIES:
                said = await page.run(f"return caught(liar.infer('{name}', row(1), {{ deadline: 20_000 }}));")
                assert said[0] == "AnswerError"
                assert await page.run("return (await liar.infer('m', row(1))).y.data[0];") == 1
            said = await page.run("return caught(liar.infer('babble', row(1), { deadline: 20_000 }));")
            assert said[0] == "AnswerError"
            # It has connected again.
            assert await page.run("return (await liar.infer('m', row(1))).y.data[0];") == 1
            for time in ("Infinity", "2 ** 40"):
                times = f"{{ deadline: {time}, timeout: {time} }}"
                code = f"return (await liar.infer('m', row(1), {times})).y.shape;"
                assert await page.run(code) == [1]
            for wrong in ("NaN", "-1"):
                said = await page.run(f"return caught(liar.infer('m', row(1), {{ deadline: {wrong} }}));")
                assert said[0] == "RangeError"
            for wrong in ("maxInFlight", "attempts"):
                said = await page.run(f"return caught((async () => new Client('/', {{ {wrong}: 0 }}))());")
                assert said[0] == "RangeError"
            assert page.trouble == []

    run(main)


def test_the_types_are_those_of_the_module():
    """A name that only one of both has would mislead an editor or a user."""
    module, types = JAVASCRIPT.read_text(), TYPES.read_text()
    exported = r"^export (?:function|class) (\w+)"
    assert set(re.findall(exported, module, re.MULTILINE)) == set(re.findall(exported, types, re.MULTILINE))
    client = module[module.index("export class Client") :]
    options = re.search(r"constructor\(url, \{(.*?)\} = \{\}\)", client).group(1)
    described = re.search(r"interface ClientOptions \{(.*?)\n\}", types, re.DOTALL).group(1)
    assert set(re.findall(r"(\w+) = ", options)) == set(re.findall(r"^  (\w+)\?:", described, re.MULTILINE))
    methods = set(re.findall(r"^  (?:async |get )?([a-z]\w*)\(", client, re.MULTILINE))
    typed = types[types.index("export class Client {") :]
    assert methods == set(re.findall(r"^  (?:readonly )?(\w+)[(:]", typed, re.MULTILINE))
