"""``asynctrt serve module:attribute``: what a module may have, from the command line and from TOML."""

import asyncio
import os
import shlex
import sys
import urllib.error
import urllib.request

import numpy as np
import pytest

import asynctrt
from asynctrt import FunctionModel, TensorSpec
from asynctrt.client import connect
from asynctrt.errors import ModelError, OptionsError
from asynctrt.serving.attributes import open_attribute
from asynctrt.serving.command import curl_line
from asynctrt.serving.models import ModelSource
from tests.models import double_model, double_onnx, rows
from tests.serving.support import serving
from tests.serving.test_server import ROOT, WAIT_S, command

MODULE = """
from contextlib import asynccontextmanager

import asynctrt
from tests.models import double_model

closed = []
model = double_model()


@asynctrt.batch(items=True)
async def repeat(words: list[str], times: list[int]) -> list[str | Exception]:
    answers = [str.upper(word) * count for word, count in zip(words, times)]
    return [answer or ValueError("nothing to say") for answer in answers]


@asynctrt.batch
def scale(x, factor: float) -> float:
    return factor * x


sizes = []


@asynctrt.batch(batch_sizes=(2, 4))
def sized(x: float) -> float:
    sizes.append(len(x))
    return 2 * x


class Own:
    pass


def path():
    return "model.onnx"


def opening():
    return asynctrt.open(double_model())


def pipeline_on_no_loop():
    return asynctrt.Pipeline(of_a_model, inputs=model.inputs, outputs=model.outputs)


async def of_a_model():
    return double_model()


def repeated():
    return repeat


async def repeated_later():
    return repeat


async def engine():
    return await asynctrt.open(double_model(), max_rows=3)


@asynccontextmanager
async def pipeline():
    async with asynctrt.open(double_model()) as engine:
        try:
            yield asynctrt.Pipeline(engine.infer, inputs=engine.inputs, outputs=engine.outputs)
        finally:
            closed.append(engine)


async def broken():
    raise KeyError("key")
"""

DOUBLES = ("double_model", "path", "opening", "of_a_model", "engine", "pipeline")
"""Functions of this kind and the other, each of whose models doubles."""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "things.py").write_text(MODULE)
    double_onnx(tmp_path / "model.onnx")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    sys.modules.pop("things", None)


async def asked(url, model, inputs):
    async with connect(url) as client:
        (output,) = (await client.infer(model, inputs)).values()
        return output.tolist()


def posted(url, body):
    """Return the status of what curl would post."""
    try:
        with urllib.request.urlopen(url, body.encode(), timeout=WAIT_S) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        with error:
            return error.status


@pytest.mark.anyio
async def test_over_http_by_the_command_line_and_toml(module):
    tables = "".join(f'[[models]]\npath = "things:{name}"\n' for name in DOUBLES)
    (module / "serve.toml").write_text(tables)
    arguments = "--http-port=0", "--no-grpc", "--config=serve.toml", "words=things:repeat"
    path = os.pathsep.join([str(ROOT), str(module)])
    with command(*arguments, env={"PYTHONPATH": path}, cwd=module) as (_, line):
        url = line(r"(http://\S+)")
        for _ in (*DOUBLES, "words"):
            *_, where, flag, body = shlex.split(line(r"try +(curl -s .*)"))
            status = await asyncio.to_thread(posted, where, body)
            assert (flag, status) == ("-d", 500 if "/words/" in where else 200)
        for name in DOUBLES:
            assert await asked(url, name, {"input": rows(1, 2)}) == rows(2, 4).tolist()
        said = await asked(url, "words", {"words": ["a", "bc"], "times": [3, 1]})
        assert said == [b"AAA", b"BC"]
        with pytest.raises(asynctrt.ExecutionError, match="nothing to say"):
            await asked(url, "words", {"words": ["a"], "times": [0]})


@pytest.mark.anyio
@pytest.mark.parametrize(
    ("name", "settings", "error", "says"),
    [
        (
            "Own",
            {},
            ModelError,
            "is <things.Own object at .*>, which cannot be served. It must be a model",
        ),
        ("scale", {}, ModelError, r"list\[str\], .*, and 'x' has None. .*FunctionModel"),
        ("broken", {}, ModelError, "'things:broken' raised KeyError: 'key'"),
        ("pipeline_on_no_loop", {}, ModelError, "If it needs an event loop, make it a coroutine function"),
        (
            "pipeline",
            {"max_rows": 4},
            OptionsError,
            "engine itself, which is where max_rows must be said",
        ),
        ("engine", {"isolation": "process"}, ModelError, "for asynctrt serve without isolation='process'"),
    ],
)
async def test_what_cannot_be_served_is_said(module, name, settings, error, says):
    with pytest.raises(error, match=says):
        await ModelSource.parse(f"things:{name}", settings).opener("host")()
    things = sys.modules.get("things")  # Not where a worker has it.
    assert [one.state for one in getattr(things, "closed", ())] == ["closed"] * (name == "pipeline")


@pytest.mark.anyio
async def test_what_an_engine_stands_on_is_closed_after_it(module):
    engine = await open_attribute("things:pipeline", "host", {})
    things = sys.modules["things"]
    assert (await engine.infer(rows(1)))["output"].tolist() == rows(2).tolist()
    assert things.closed == []
    await engine.aclose()
    await engine.aclose()
    assert [one.state for one in (engine, *things.closed)] == ["closed"] * 2


@pytest.mark.anyio
@pytest.mark.parametrize("name", ["repeat", "repeated", "repeated_later"])
async def test_a_decorated_function_is_closed_with_its_pipeline(module, name):
    engine = await open_attribute(f"things:{name}", "host", {})
    batched = sys.modules["things"].repeat
    within = batched.engine
    await engine.infer({"words": ["a"], "times": [2]})
    assert within.statistics().rows == 1
    await engine.aclose()
    assert within.state == "closed"


@pytest.mark.anyio
async def test_a_decorated_function_runs_its_batch_sizes_before_it_is_served(module):
    engine = await open_attribute("things:sized", "host", {})
    sizes = sys.modules["things"].sizes
    assert sizes == [4, 4, 2, 2, 2]
    assert (await engine.infer(np.array([1.0, 2, 3])))["output"].tolist() == [2, 4, 6]
    assert sizes[5:] == [4]
    await engine.aclose()


@pytest.mark.anyio
async def test_a_model_of_a_coroutine_function_takes_settings(module):
    engine = await open_attribute("things:of_a_model", "host", {"max_rows": 3})
    assert engine.max_rows == 3
    await engine.aclose()


@pytest.mark.anyio
async def test_how_to_ask_a_model_whose_inputs_are_too_many_for_a_line():
    async with serving({"wide": double_model(dims=(64,))}, tokens=("s3cret",)) as server:
        (served,) = server.repository
        url = f"{server.http_url}/v2/models/wide/versions/1"
        assert curl_line(server, served) == f"curl -s -H 'Authorization: Bearer TOKEN' {url}"


@pytest.mark.anyio
@pytest.mark.parametrize("dtype", ["str", "object", "bytes", "S8", "bool", "float16", "int64"])
async def test_the_line_at_start_asks_a_model_of_any_dtype(dtype):
    specs = {"inputs": TensorSpec("x", dtype, (2,)), "outputs": TensorSpec("n", "int64", ())}
    model = FunctionModel(lambda inputs: {"n": np.arange(len(inputs["x"]))}, **specs)
    async with serving({"some": model}) as server:
        (served,) = server.repository
        *_, url, _, body = shlex.split(curl_line(server, served))
        assert await asyncio.to_thread(posted, url, body) == 200
