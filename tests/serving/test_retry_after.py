"""Who is refused for being too late is told when to come again."""

import asyncio
import json

import aiohttp
import grpc
import pytest

from asynctrt.errors import DeadlineError, DeadlineUnreachableError, QueueFullError
from asynctrt.serving.api import error_answer
from asynctrt.serving.grpc_server import SERVICE
from asynctrt.serving.responses import PUSHBACK, pushback
from asynctrt.testing import LatchDevice
from tests.helpers import until
from tests.serving.support import WAIT_S, serving
from tests.serving.test_grpc_server import request as grpc_request
from tests.serving.test_http import json_body


@pytest.mark.parametrize(("predicted_s", "header"), [(0.0, "1"), (0.02, "1"), (1.0, "1"), (2.3, "3")])
def test_in_whole_seconds_and_one_at_least(predicted_s, header):
    error = DeadlineUnreachableError("too late")
    error.predicted_s = predicted_s
    answer = error_answer(error)
    assert answer.status == DeadlineUnreachableError.http_status
    assert dict(answer.headers)["Retry-After"] == header


@pytest.mark.parametrize(("predicted_s", "ms"), [(0.0, "1"), (0.02, "20"), (2.3, "2300"), (0.0201, "21")])
@pytest.mark.parametrize("kind", [DeadlineUnreachableError, QueueFullError])
def test_in_milliseconds_over_grpc(kind, predicted_s, ms):
    error = kind("too late")
    error.predicted_s = predicted_s
    assert pushback(error) == ((PUSHBACK, ms),)


def test_others_are_not():
    for error in (DeadlineError("expired"), QueueFullError("before any batch was measured")):
        assert "Retry-After" not in dict(error_answer(error).headers)
        assert pushback(error) == ()


RETRIES = {
    "name": [{"service": SERVICE}],
    "retryPolicy": {
        "maxAttempts": 2,
        # What a server says goes before it.
        "initialBackoff": "3600s",
        "maxBackoff": "3600s",
        "backoffMultiplier": 1,
        "retryableStatusCodes": ["UNAVAILABLE"],
    },
}


@pytest.mark.anyio
async def test_who_finds_the_queue_full_is_told():
    """Over HTTP in the header; a gRPC client with a retry policy waits for as long as it is told."""
    device = LatchDevice(concurrency=1)
    engine = {"device": device, "contexts": 1, "max_rows": 1, "max_queue_rows": 1}
    options = [("grpc.service_config", json.dumps({"methodConfig": [RETRIES]})), ("grpc.enable_retries", 1)]
    body = grpc_request().SerializeToString()

    async def post():
        async with session.post(f"{server.http_url}/v2/models/double/infer", data=json_body(1)) as answer:
            return answer.status, answer.headers.get("Retry-After")

    async with serving(grpc=True, engine=engine) as server, aiohttp.ClientSession() as session:
        method = f"/{SERVICE}/ModelInfer"
        served = server.api.repository.find("double")
        async with grpc.aio.insecure_channel(server.grpc_target, options=options) as channel:
            measured = asyncio.create_task(post())
            await device.wait_held(1)
            device.release()
            assert await measured == (200, None)
            waiting = []
            for held in (1, 2):
                waiting.append(asyncio.create_task(post()))
                await until(lambda held=held: served.pending == held)
            assert await post() == (503, "1")
            assert served.failures["REJECTED"] == 1
            retried = asyncio.ensure_future(channel.unary_unary(method)(body))
            await until(lambda: served.failures["REJECTED"] == 2)
            device.open()
            async with asyncio.timeout(WAIT_S):
                assert await asyncio.gather(*waiting) == [(200, None)] * 2
                assert await retried
