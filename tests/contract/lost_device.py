"""A process whose device is lost by an illegal address; ``test_hazards`` runs it and reads its last line."""

import asyncio
import logging
import sys

import numpy as np

import asynctrt
from asynctrt.devices.host import HostDevice
from asynctrt.errors import DeviceError, DeviceLostError
from tests.contract.devices import TensorRTModel, four_floats
from tests.doubles.tensorrt import StrictTensorRT, double_plan
from tests.models import rows

WAIT_S = 30


def find(name):
    if name == "host":
        return HostDevice(in_place="never", unified=False)
    from asynctrt.devices.cuda import find_cuda_device

    return find_cuda_device(name)


async def main(name):
    logging.disable(logging.CRITICAL)
    device = find(name)
    double = StrictTensorRT(device)
    spec = four_floats(work_ns=200_000)
    models = [TensorRTModel(double_plan(spec), device=device, flavour=double) for _ in range(2)]
    options = {"contexts": 3, "arenas": 1, "max_rows": 2, "close_timeout": 5.0}
    first, other = [await asynctrt.open(model, device=device, **options) for model in models]
    sent = rows(1)
    result = await first.infer(sent)
    np.testing.assert_array_equal(result["output"], spec.expected({"input": sent})["output"])
    await other.infer(sent)

    double.fail_next("illegal-address")
    async with asyncio.timeout(WAIT_S):
        outcomes = await asyncio.gather(*[first.infer(rows(n)) for n in range(20)], return_exceptions=True)
    assert all(isinstance(outcome, DeviceLostError) for outcome in outcomes), outcomes
    if name != "host":
        assert "ILLEGAL_ADDRESS" in str(outcomes[0]), outcomes[0]
        assert "only a new process helps" in str(outcomes[0]), outcomes[0]
        assert isinstance(device.lost, DeviceLostError)
    assert first.state == "lost"

    # Refused at once: without a tick of the loop in between.
    refused = first.infer(sent)
    try:
        refused.send(None)
    except DeviceLostError:
        pass
    else:
        raise AssertionError("a call to a lost engine was taken")

    # Another engine on the device finds out with its next batch, and nobody hangs.
    async with asyncio.timeout(WAIT_S):
        (outcome,) = await asyncio.gather(other.infer(sent), return_exceptions=True)
    assert isinstance(outcome, DeviceLostError), outcome
    assert other.state == "lost"
    try:
        await asynctrt.open(models[0], device=device)
    except DeviceError as error:
        print("opening again:", type(error).__name__)
    else:
        raise AssertionError("an engine was opened on a lost device")
    async with asyncio.timeout(WAIT_S):
        await first.aclose()
        await other.aclose()
    for model in models:
        model.close()
    device.close()
    print("as it should be")


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
