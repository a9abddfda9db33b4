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
