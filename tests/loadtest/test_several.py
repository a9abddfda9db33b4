"""Several addresses as one target."""

import pytest

from asynctrt import loadtest
from asynctrt.errors import TargetError, UsageError
from asynctrt.loadtest.targets import TargetSpec
from tests.models import double_model
from tests.serving.support import serving

pytestmark = pytest.mark.anyio
QUICK = {"callers": 4, "seconds": 0.3, "warmup": 0.0}


def test_where_one_address_ends():
    spec = TargetSpec("http://a/x?ids=1,2,http://b/y,grpc://c:1/m")
    assert [part.where for part in spec.parts] == ["http://a/x?ids=1,2", "http://b/y", "grpc://c:1/m"]


def address(server, scheme):
    if scheme == "grpc":
        return f"grpc://{server.grpc_target}/double"
    return f"{server.http_url.replace('http', scheme)}/v2/models/double{'/ws' * (scheme == 'ws')}"


@pytest.mark.parametrize("scheme", ["http", "ws", "grpc"])
async def test_requests_go_to_each_in_turn_and_the_counters_add_up(scheme):
    async with serving(grpc=True) as one, serving(grpc=True, is_inner=True) as other:
        where = ",".join(address(server, scheme) for server in (one, other))
        report = await loadtest.run(where, **QUICK)
        counts = [next(iter(server.repository)).engine.statistics().succeeded for server in (one, other)]
    (run,) = report.runs
    assert run.error_share == 0
    assert abs(counts[0] - counts[1]) <= 1
    assert run.batches.requests == run.answered == sum(counts) - 1  # One was the first request.


async def test_what_is_not_one_target():
    async with serving() as one, serving({"double": double_model(dims=(9,))}) as other:
        path = "/v2/models/double"
        with pytest.raises(UsageError, match="have different inputs"):
            await loadtest.run(f"{one.http_url}{path},{other.http_url}{path}", **QUICK)
        with pytest.raises(UsageError, match="the same scheme"):
            await loadtest.run(f"{one.http_url}{path},{one.http_url}/any", **QUICK)
        with pytest.raises(TargetError, match="127.0.0.1:9"):
            await loadtest.run(f"{one.http_url}{path},http://127.0.0.1:9{path}", **QUICK)
