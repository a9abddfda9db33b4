"""What holds for every kind of engine: in this process, in workers, and made of others."""

from contextlib import asynccontextmanager

import pytest

import asynctrt
from asynctrt.backends.function import FunctionModel
from asynctrt.core.local import LocalEngine
from asynctrt.engine import Engine
from asynctrt.workers.engine import IsolatedEngine
from tests.helpers import WAIT_S
from tests.workers import local
from tests.workers.models import ROW, rows

pytestmark = pytest.mark.anyio

KINDS = {"local": LocalEngine, "isolated": IsolatedEngine, "pipeline": asynctrt.Pipeline}
PROPERTIES = [name for name, one in vars(Engine).items() if isinstance(one, property)]


def model():
    return FunctionModel(lambda inputs: {"x": inputs["x"]}, inputs=ROW, outputs=ROW, name="same")


@asynccontextmanager
async def opened(kind):
    if kind == "isolated":
        async with local.opened(model(), device="host") as (engine, _, _):
            yield engine
    elif kind == "pipeline":

        async def same(inputs):
            return inputs

        async with asynctrt.Pipeline(same, inputs=ROW, outputs=ROW) as engine:
            yield engine
    else:
        async with asynctrt.open(model()) as engine:
            yield engine


def test_an_engine_is_one_of_its_kinds():
    with pytest.raises(TypeError, match="abstract"):
        Engine()
    assert all(issubclass(kind, asynctrt.Engine) for kind in KINDS.values())
    assert not any(kind.__abstractmethods__ for kind in KINDS.values())


@pytest.mark.parametrize("kind", KINDS)
async def test_every_kind_has_all_that_users_may_ask_of_an_engine(kind):
    async with opened(kind) as engine:
        assert type(engine) is KINDS[kind]
        found = {name: getattr(engine, name) for name in PROPERTIES}
        assert (found["state"], found["device_name"], found["has_plain_rows"]) == ("open", "host", True)
        assert found["inputs"] == found["outputs"] == (ROW,)
        assert found["max_rows"] >= 1
        assert isinstance(found["options"], asynctrt.Options)
        assert engine.statistics().state == "open"
        answer = await engine.infer(rows(1, 2), outputs=["x"], timeout=WAIT_S)
        assert answer["x"].shape == rows(1, 2).shape
        assert (await engine.submit(rows(1, 2)))["x"].shape == rows(1, 2).shape
        await engine.drain()
        assert engine.state == "draining"
    assert engine.state == "closed"


@pytest.mark.parametrize("kind", ["isolated", "pipeline"])
async def test_what_batches_elsewhere_has_no_trace(kind):
    async with opened(kind) as engine:
        with pytest.raises(asynctrt.UsageError, match="trac"):
            engine.tracing()
