"""What was abandoned is released once its batch has ended, and the interpreter does not exit in between."""

import subprocess
import sys

from tests.helpers import WAIT_S

PROGRAM = """
import asyncio, logging, threading, time

from asynctrt.backends.tensorrt.context import TensorRTContext
from asynctrt.devices.host import HostDevice
from asynctrt.errors import DeviceLostError
from tests.contract.devices import Subject

begun, close = threading.Event(), TensorRTContext.close


def slow(context):
    begun.set()
    time.sleep(0.3)
    close(context)
    print("released", flush=True)


async def main():
    logging.disable(logging.CRITICAL)
    subject = Subject(HostDevice(in_place="never", unified=False))
    engine = await subject.open(contexts=1, arenas=1, batch_timeout=None, close_timeout=0.1)
    subject.double.fail_next("hang")
    asked = asyncio.create_task(engine.infer(subject.rows(1)))
    while not subject.double.hanging:
        await asyncio.sleep(0)
    await engine.aclose()
    assert isinstance((await asyncio.gather(asked, return_exceptions=True))[0], DeviceLostError)
    TensorRTContext.close = slow
    subject.double.release_hangs()
    assert begun.wait(20)


asyncio.run(main())
print("exits", flush=True)
"""


def test_the_interpreter_waits_for_a_release_that_has_begun():
    """A library whose destructor came back to an interpreter that is gone would abort the process."""
    command = [sys.executable, "-c", PROGRAM]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=WAIT_S)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["exits", "released"]


HANGS = """
import asyncio, logging, threading

import asynctrt
from asynctrt.core import local
from asynctrt.devices.host import HostDevice
from tests.models import double_model, rows


class Hanging(HostDevice):
    def _gave_back(self, nbytes):
        if threading.current_thread() is not threading.main_thread():
            threading.Event().wait()


async def main():
    logging.disable(logging.CRITICAL)
    local.GIVE_BACK_S = 0.05
    device = Hanging(in_place="never", unified=False)
    async with asynctrt.open(double_model(), device=device, contexts=1) as engine:
        await engine.infer(rows(1))


asyncio.run(main())
print("exits", flush=True)
"""


def test_the_interpreter_exits_though_a_library_never_gives_back_what_an_engine_held():
    command = [sys.executable, "-c", HANGS]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=WAIT_S)
    assert (done.returncode, done.stdout.split()) == (0, ["exits"]), done.stderr
