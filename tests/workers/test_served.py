"""A server whose models are in worker processes: clients see neither, but for what a death takes."""

import asyncio
import os
import signal
from contextlib import asynccontextmanager

import aiohttp
import pytest

from tests.helpers import until
from tests.serving.support import engine_of, serving
from tests.workers.models import SEGFAULT, workers_left

pytestmark = [pytest.mark.anyio, pytest.mark.tier2, pytest.mark.timeout(120)]


def body(*firsts):
    return {
        "inputs": [
            {
                "name": "x",
                "shape": [len(firsts), 4],
                "datatype": "FP32",
                "data": [value for first in firsts for value in (first, 1, 2, 3)],
            }
        ]
    }


@asynccontextmanager
async def serving_kind():
    """A server of the model ``kind``, which is in a worker process, and a client of the server."""
    settings = {"isolation": "process", "max_rows": 8}
    async with (
        asyncio.timeout(
            110
        ),  # A worker takes long to start on a busy machine, and the first test has several.
        serving({"kind": "tests.workers.models:kind"}, engine=settings) as server,
        aiohttp.ClientSession(server.http_url) as client,
    ):
        yield server, client


async def test_a_server_outlives_its_workers():
    async with serving_kind() as (server, client):

        async def asked(*firsts):
            async with client.post("/v2/models/kind/infer", json=body(*firsts)) as answer:
                return answer.status, await answer.json()

        async def status(path):
            async with client.get(path) as answer:
                return answer.status

        engine = engine_of(server, "kind")
        assert (await asked(5))[1]["outputs"][0]["data"] == [10, 2, 4, 6]
        os.kill(engine.workers[0].pid, signal.SIGKILL)
        await until(lambda: engine.state == "restarting")
        assert await status("/v2/health/ready") == 503
        assert await status("/v2/health/live") == 200
        assert await status("/v2/models/kind/ready") == 400
        answers = await asyncio.gather(*[asked(first) for first in (1, 2, SEGFAULT, 3)])
        assert [code for code, _ in answers] == [200, 200, 500, 200]
        assert "ended each of the" in answers[2][1]["error"]
        assert answers[3][1]["outputs"][0]["data"] == [6, 2, 4, 6]
        # The others need not wait for what ends workers, so that the last of them may still be replaced.
        await until(lambda: engine.state == "open")
        assert await status("/v2/health/ready") == 200
        async with client.get("/metrics") as answer:
            lines = (await answer.text()).splitlines()
        deaths = next(line for line in lines if line.startswith("asynctrt_worker_deaths_total{"))
        assert float(deaths.split()[-1]) == engine.workers[0].deaths > 1
    assert not workers_left()


async def test_a_request_that_a_worker_splits_is_one_request():
    async with serving_kind() as (_, client):
        async with client.post("/v2/models/kind/infer", json=body(*[5] * 20)) as answer:
            assert answer.status == 200, await answer.text()
        async with client.get("/v2/models/kind/stats") as answer:
            found = (await answer.json())["model_stats"][0]
        assert found["inference_stats"]["success"]["count"] == 1
