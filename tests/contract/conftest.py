"""The devices on which work can hang and fail, for the suites that do not choose devices of their own."""

import pytest

from tests.contract.devices import DEVICES

NAMES = ("host-threads", "host-separate-memory", "host-frees-wait", "cuda")


@pytest.fixture(params=[name for name in NAMES if name in DEVICES])
def device(request):
    made = DEVICES[request.param]()
    yield made
    made.close()
