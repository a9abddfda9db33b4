"""The devices on which work can hang and fail, for the suites that do not choose devices of their own."""

import pytest

from tests.contract.devices import DEVICES


@pytest.fixture(params=[name for name in ("host-threads", "host-separate-memory", "cuda") if name in DEVICES])
def device(request):
    made = DEVICES[request.param]()
    yield made
    made.close()
