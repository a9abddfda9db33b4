"""What the doctor adds to the error of a GPU that cannot be used."""

import asyncio

import pytest

import asynctrt
from asynctrt.doctor.children import Ending, ProbeOutcome
from asynctrt.doctor.diagnosis import ADVICE_PROBES, advise
from asynctrt.errors import DeviceUnavailableError
from tests.gpu.support import gpu_is_here

ERROR = DeviceUnavailableError("cuda:0 cannot be used: why not.")


def asking(outcome, asked):
    def ask(probe, *args, **_):
        asked.append(probe)
        return outcome if probe == "driver" else ProbeOutcome(Ending.FAILED, None, "no")

    return ask


def test_the_finding_and_the_way_to_all_of_them():
    asked = []
    outcome = ProbeOutcome(Ending.FAILED, None, "OSError: libcuda.so.1: file too short")
    error = advise(ERROR, "cuda:0", env={}, ask=asking(outcome, asked))
    assert type(error) is DeviceUnavailableError
    assert str(error).startswith("cuda:0 cannot be used: why not. asynctrt doctor: ")
    assert "file too short" in str(error)
    assert str(error).endswith("asynctrt doctor --device cuda:0")
    assert set(asked) == set(ADVICE_PROBES), "no library is loaded while somebody waits for an error"


def test_variables_that_hide_gpus():
    told = {"init": {"code": 100, "name": "CUDA_ERROR_NO_DEVICE"}, "version": 13000, "devices": []}
    error = advise(
        ERROR, "cuda:0", env={"CUDA_VISIBLE_DEVICES": ""}, ask=asking(ProbeOutcome(Ending.ANSWERED, told), [])
    )
    assert "CUDA_VISIBLE_DEVICES" in str(error)


def test_a_doctor_that_fails_hides_nothing():
    def ask(*args, **more):
        raise RuntimeError("no processes left")

    assert advise(ERROR, "cuda:0", ask=ask) is ERROR


@pytest.mark.tier2
@pytest.mark.skipif(gpu_is_here(), reason="there is a GPU")
def test_open_says_it():
    async def run():
        async with asynctrt.open("m.onnx", device="cuda:0"):
            pass

    with pytest.raises(DeviceUnavailableError, match="asynctrt doctor --device cuda:0") as caught:
        asyncio.run(run())
    assert "asynctrt doctor: " in str(caught.value)
