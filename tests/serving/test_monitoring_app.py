"""Metrics and the dashboard in an application of one's own, and at a port of their own."""

import gc
import re
import weakref

import aiohttp
import pytest
from starlette.applications import Starlette
from starlette.routing import Mount

import asynctrt
from asynctrt.serving import Repository, ServerSettings, kserve_app, monitoring, monitoring_app
from asynctrt.serving.sampler import Sampler
from tests.helpers import until
from tests.models import double_model, rows
from tests.serving.test_asgi import running
from tests.serving.test_http import json_body

pytestmark = [pytest.mark.anyio, pytest.mark.filterwarnings("ignore::DeprecationWarning")]


async def test_mounted_beside_the_models():
    async with asynctrt.open(double_model()) as engine:
        repository = Repository()
        repository.add("double", engine)
        settings = ServerSettings(tokens=("s3cret",))
        app = Starlette(
            routes=[
                Mount("/watch", monitoring_app(repository, settings=settings)),
                Mount("/", kserve_app(repository)),
            ]
        )
        token = {"Authorization": "Bearer s3cret"}
        async with running(app) as address, aiohttp.ClientSession(f"http://{address}") as session:
            async with session.post("/v2/models/double/infer", data=json_body(1)) as response:
                assert response.status == 200
            async with session.get("/watch/metrics", headers=token) as response:
                text = await response.text()
                assert 'asynctrt_request_seconds_count{model="double",version="1"} 1.0' in text
            for path in ("/watch/metrics", "/watch/dashboard/data"):
                async with session.get(path) as response:
                    assert response.status == 401
            async with session.get("/watch/") as response:
                page = await response.text()
                assert response.status == 200
            # What the page asks for is below it, wherever it is mounted.
            asked = re.findall(r'(?:src|href)="([^"#]+)"', page)
            assert len(asked) >= 6
            for path in asked:
                async with session.get(f"/watch/{path}", headers=token) as response:
                    assert response.status == 200, path
            async with session.get("/watch/dashboard/data", headers=token) as response:
                assert (await response.json())["models"][0]["answered"] == 1
            for path in ("/watch/v2", "/watch/v2/health/ready", "/watch/v2/models/double"):
                async with session.get(path, headers=token) as response:
                    assert (response.status, "nothing here but /, /metrics" in await response.text()) == (
                        404,
                        True,
                    )


async def test_what_an_application_asks_itself_is_not_shown_as_no_request():
    async with asynctrt.open(double_model()) as engine:
        await engine.infer({"input": rows(1)})
        async with (
            running(monitoring_app(engine, name="own")) as address,
            aiohttp.ClientSession(f"http://{address}") as session,
            session.get("/metrics") as response,
        ):
            text = await response.text()
    assert 'nv_inference_count{model="own",version="1"} 1.0' in text
    assert "asynctrt_request_seconds_count{" not in text


async def test_sampling_ends_with_the_application(monkeypatch):
    monkeypatch.setattr(monitoring, "SAMPLE_S", 0.001)
    samples = []
    monkeypatch.setattr(Sampler, "sample", lambda sampler: samples.append(weakref.ref(sampler)))
    api = monitoring._monitoring(Repository(), ServerSettings())
    await until(lambda: len(samples) > 3)
    assert api.pages
    del api
    gc.collect()
    assert samples[0]() is None, "the timer does not keep it"
    taken = len(samples)
    monitoring._sample(samples[0])
    assert len(samples) == taken
