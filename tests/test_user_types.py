"""What a user's type checker and editor make of asynctrt: strict mypy and pyright, `help()` and `dir()`."""

import dataclasses
import inspect
import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

import asynctrt
from asynctrt import loadtest, serving
from asynctrt.client import connect, connect_blocking
from asynctrt.loadtest.settings import LoadSettings
from asynctrt.serving.settings import ServerSettings
from tests.helpers import needed

ROOT = Path(__file__).parent.parent
PROJECT = """
import asyncio
from collections.abc import Mapping
from typing import assert_type

import numpy as np
import numpy.typing as npt

import asynctrt
from asynctrt import loadtest
from asynctrt.client import connect

Floats = npt.NDArray[np.float32]
anything: asynctrt.Array = np.ones(3)


@asynctrt.batch(max_rows=32)
def double(x: Floats) -> Floats:
    return x + x


@asynctrt.batch(key="model_id")
def keyed(x: Floats, model_id: str) -> Floats:
    return x + len(model_id)


@asynctrt.batch(items=True, key=("lang", "style"), max_rows=8)
async def translate(texts: list[str], lang: str, *, style: int = 0) -> list[bytes]:
    return [f"{text} {lang} {style}".encode() for text in texts]


@asynctrt.batch(items=True)
def shout(texts: list[str]) -> list[str]:
    return [text.upper() for text in texts]


@asynctrt.batch(items=True)
def rate(texts: list[str], models: list[int]) -> list[float]:
    return [float(len(text) + model) for text, model in zip(texts, models)]


class Models:
    @asynctrt.batch(items=True, key="model_id")
    def predict(self, items: list[str], model_id: int) -> list[float]:
        return [float(len(item) + model_id) for item in items]

    @asynctrt.batch(items=True)
    def rate(self, texts: list[str], models: list[int]) -> list[float]:
        return [float(len(text)) for text in texts]

    @asynctrt.batch(key="model_id")
    async def score(self, x: Floats, *, model_id: int) -> Floats:
        return x + model_id


async def use_keys(x: Floats) -> None:
    assert_type(await keyed(x, model_id="a"), Floats)
    assert_type(await translate("text", "de", style=2), bytes)
    assert_type(await translate("text", lang="de"), bytes)
    assert_type(await shout("text"), str)
    assert_type(await rate("text", 3), float)
    assert_type(await Models().rate("text", 3), float)
    assert_type(await Models().predict("item", 3), float)
    assert_type(await Models().predict("item", model_id=3), float)
    assert_type(await Models().score(x, model_id=3), Floats)


def model(inputs: Mapping[str, Floats]) -> Floats:
    return inputs["x"] + inputs["x"]


async def main() -> None:
    x = asynctrt.TensorSpec("x", "float32", (16,))
    y = asynctrt.TensorSpec("y", np.float32, ["length", 16])
    options = asynctrt.Options(max_rows=8, max_delay=0.002)
    served = asynctrt.FunctionModel(model, inputs=x, outputs=y)
    async with asynctrt.open(served, options=options, timeout=0.5) as engine:
        result = await engine.infer(np.ones((1, 16), np.float32), timeout=0.5)
        print(result["y"].shape, engine.statistics().batches, result.timing.queue_ns)
        rows = {"x": [[1.0] * 16]}
        report = await loadtest.run(engine, rate=500, seconds="1s", slo="p99<250ms", inputs=rows)
        report = await loadtest.run(engine, callers=4, seconds=0.5, slo=["p99<250ms", "errors<1%"])
        print(report.holds, report.runs[0].latency["p99"])
    async with connect("ws://127.0.0.1:8000/v2/ws") as client:
        print((await client.infer("m", {"x": np.ones((1, 16), np.float32)}))["y"])
    try:
        print(await double(np.ones(4, np.float32)))
    except asynctrt.OverloadError as error:
        print(error.http_status)
    asynctrt.tune_process()


asyncio.run(main())
"""
WRONG = """
import asynctrt
from asynctrt import loadtest

loadtest.run("model.onnx", rates=3)
loadtest.run("model.onnx", rate=[3])
asynctrt.OnnxModel(3)
asynctrt.TensorSpec(3, "float32")
asynctrt.open("model.onnx", max_row=3)
asynctrt.batch(key=3)


@asynctrt.batch(items=True, key="lang")
def translate(texts: list[str], lang: str) -> list[str]:
    return texts


translate("text", 3)
translate(["text"], "de")
"""


@pytest.mark.tier2
@pytest.mark.timeout(180)
@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_a_users_project_is_checked_strictly(checker, tmp_path):
    for name, text in (("good.py", PROJECT), ("wrong.py", WRONG)):
        (tmp_path / name).write_text(text)
    if checker == "mypy":
        command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent"]
    else:
        needed(find_spec("basedpyright"), "basedpyright is missing: pip install -e '.[types]'")
        (tmp_path / "pyrightconfig.json").write_text(
            json.dumps({"typeCheckingMode": "strict", "extraPaths": [str(ROOT)]})
        )
        command = [sys.executable, "-m", "basedpyright", "--pythonpath", sys.executable]
    good, wrong = (
        subprocess.run(
            [*command, name],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
            timeout=80,
            env={**os.environ, "MYPYPATH": str(ROOT)},
        )
        for name in ("good.py", "wrong.py")
    )
    assert good.returncode == 0, good.stdout
    assert wrong.returncode == 1
    assert wrong.stdout.count("error:") + wrong.stdout.count("- error") >= 8, wrong.stdout
    for word in ('"max_row"', '"rates"', '"rate"', *(f"wrong.py:{line}:" for line in (7, 10, 18, 19))):
        assert word in wrong.stdout, wrong.stdout


@pytest.mark.parametrize(
    "cls",
    [
        asynctrt.Options,
        asynctrt.TensorRTOptions,
        asynctrt.OnnxOptions,
        ServerSettings,
        LoadSettings,
    ],
)
def test_help_shows_each_setting(cls):
    for item in dataclasses.fields(cls):
        (line,) = (line for line in cls.__doc__.splitlines() if line.startswith(f":param {item.name}: "))
        assert len(line) > len(item.name) + 20
    assert cls.__doc__.splitlines()[-2].startswith((":param", ":raises")), "fields and errors are one list"


def test_blocking_clients_take_what_the_others_take():
    ours, theirs = (inspect.signature(one).parameters.values() for one in (connect_blocking, connect))
    assert [(one.name, one.default, one.annotation) for one in ours] == [
        (one.name, one.default, one.annotation) for one in theirs
    ]


@pytest.mark.parametrize("settings", [asynctrt.Options, asynctrt.BuildOptions, LoadSettings, ServerSettings])
def test_a_repr_shows_what_was_changed_and_no_more(settings):
    made = settings()
    assert repr(made) == f"{settings.__name__}()"
    name = {"LoadSettings": "rows", "ServerSettings": "http_port"}.get(settings.__name__, "max_rows")
    assert repr(dataclasses.replace(made, **{name: 7})) == f"{settings.__name__}({name}=7)"


def test_what_pages_use_is_there():
    """And none of it is imported before it is used: test_imports sees to that."""
    for name in (
        "Array",
        "OnnxModel",
        "TensorRTModel",
        "CudaDevice",
        "client",
        "loadtest",
        "serving",
        "testing",
    ):
        assert name in dir(asynctrt)
        assert getattr(asynctrt, name) is not None
    with pytest.raises(AttributeError, match="'asynctrt' has no attribute 'onnx'"):
        asynctrt.onnx


@pytest.mark.parametrize("module", [asynctrt, loadtest, serving])
def test_dir_shows_what_there_is(module):
    assert set(module.__all__) <= set(dir(module))
