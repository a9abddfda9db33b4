"""Engines over each supported version of TensorRT, as far as the double knows what it lacks."""

import asyncio

import numpy as np
import pytest

import asynctrt
from asynctrt.backends.tensorrt import TensorRTModel
from asynctrt.devices.host import HostDevice
from tests.contract.devices import WAIT_S
from tests.doubles.tensorrt import EngineSpec, StrictTensorRT, TensorIO, double_plan

pytestmark = pytest.mark.anyio
VERSIONS = ("10.9.0.34", "10.13.3.9", "10.14.1.48", "11.0.0.114", "11.4.0.106")
SEQUENCE = (TensorIO("input", dims=(-1, -1)),)
SPECS = {
    "rows of one shape": EngineSpec(),
    "two profiles": EngineSpec(
        inputs=SEQUENCE,
        profiles=({"input": ((1, 1), (4, 4), (8, 8))}, {"input": ((1, 1), (16, 8), (64, 32))}),
    ),
    "an output that depends on the data": EngineSpec(inputs=SEQUENCE, data_dependent=True),
    "auxiliary streams": EngineSpec(aux_streams=2),
    "plugins": EngineSpec(plugins=("ROIAlign_TRT",)),
}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("kind", SPECS)
async def test_every_kind_of_engine_runs_on_every_version(kind, version):
    spec = SPECS[kind]
    device = HostDevice(in_place="never", unified=False)
    double = StrictTensorRT(device, version=version)
    plan = double_plan(spec, version=version)
    model = TensorRTModel(plan, device=device, flavour=double)
    async with asynctrt.open(model, device=device, contexts=3, arenas=2) as engine, asyncio.timeout(WAIT_S):
        length = 16 if -1 not in spec.inputs[0].dims[1:] else None
        random = np.random.default_rng(1)
        sent = [
            random.integers(-9, 9, (1 + n % 5, length or 1 + n % 7)).astype(np.float32) for n in range(30)
        ]
        results = await asyncio.gather(*[engine.infer(one) for one in sent])
        for given, result in zip(sent, results, strict=True):
            expected = spec.expected(given)
            np.testing.assert_array_equal(result["output"], expected["output"])
            if "positives" in expected:
                # As long as the longest row of the whole batch.
                width = expected["positives"].shape[1]
                np.testing.assert_array_equal(result["positives"][:, :width], expected["positives"])
                assert not result["positives"][:, width:].any()
    model.close()
    assert double.violations() == ()
