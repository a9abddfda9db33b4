"""A process whose device is lost by an illegal address; ``test_hazards`` runs it and reads its last line."""

import asyncio
import logging
import sys

import asynctrt
from asynctrt.devices.host import HostDevice
from asynctrt.errors import DeviceError, DeviceLostError
from tests.contract.devices import RealSubject, Subject

WAIT_S = 30


def find(name):
    """Return what runs on the host device, on a GPU, or on the GPU with the real TensorRT (``plans``)."""
    if name == "host":
        return Subject(HostDevice(in_place="never", unified=False), work_ns=200_000)
    from asynctrt.devices.cuda import find_cuda_device

    if name == "plans":
        return RealSubject(find_cuda_device("cuda:0"))
    return Subject(find_cuda_device(name), work_ns=200_000)


async def main(name):
    logging.disable(logging.CRITICAL)
    subject = find(name)
    device, double, rows = subject.device, subject.double, subject.rows
    models = [subject.model, subject.load()]
    options = {"contexts": 3, "arenas": 1, "max_rows": 2, "close_timeout": 5.0}
    if subject.is_real:
        options["graphs"] = "off"  # What follows a graph's launch is not made to fail.
    first, other = [await asynctrt.open(model, device=device, **options) for model in models]
    sent = rows(1)
    await subject.check(first)
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
