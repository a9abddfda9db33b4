"""The devices on which work can hang and fail, for the suites that do not choose devices of their own."""

import pytest

from tests.contract.devices import DEVICES, WITH_PLANS, subject_on

NAMES = ("host-threads", "host-separate-memory", "host-frees-wait", "cuda")


@pytest.fixture(params=[name for name in NAMES if name in DEVICES])
def device(request):
    made = DEVICES[request.param]()
    yield made
    made.close()


@pytest.fixture(params=[*(name for name in NAMES if name in DEVICES), *WITH_PLANS])
def subject(request):
    """A plan that can be made to fail: of the double on each device, and of the real TensorRT."""
    made = subject_on(request.param)
    yield made
    made.close()
    made.device.close()
