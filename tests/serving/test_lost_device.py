"""A server whose device is lost says that it is not ready, so that a supervisor starts it anew."""

import asyncio

import numpy as np
import pytest

import asynctrt
from asynctrt.backends.tensorrt import TensorRTModel
from asynctrt.errors import DeviceLostError, ModelNotReadyError
from asynctrt.serving.repository import LOST, Repository
from asynctrt.testing.tensorrt import EngineSpec, StrictTensorRT, double_plan

pytestmark = pytest.mark.anyio
WAIT_S = 30


async def test_a_model_whose_device_is_lost_is_not_ready():
    device = asynctrt.HostDevice()
    double = StrictTensorRT(device)
    model = TensorRTModel(double_plan(EngineSpec()), device=device, flavour=double)
    async with asynctrt.open(model, device=device, arenas=1) as engine:
        repository = Repository()
        repository.add("model", engine)
        assert repository.is_ready
        assert repository.find_ready("model").engine is engine
        double.fail_next("illegal-address")
        async with asyncio.timeout(WAIT_S):
            with pytest.raises(DeviceLostError):
                await engine.infer(np.ones((1, 16), np.float32))
        assert not repository.is_ready
        (entry,) = repository.index()
        assert (entry["state"], entry["reason"]) == ("UNAVAILABLE", LOST)
        with pytest.raises(ModelNotReadyError, match="only a new process can recover"):
            repository.find_ready("model")
        # Who asks for an inference is told by the engine itself.
        with pytest.raises(DeviceLostError):
            await repository.find("model").engine.infer(np.ones((1, 16), np.float32))
    model.close()
