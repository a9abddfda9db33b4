"""Fixtures of the GPU tests."""

import pytest

from tests.gpu.support import gpu_is_here


@pytest.fixture
def device():
    """The first GPU."""
    if not gpu_is_here():
        pytest.skip("needs a GPU")
    from asynctrt.devices.cuda import CudaDevice

    made = CudaDevice(0)
    yield made
    made.close()
