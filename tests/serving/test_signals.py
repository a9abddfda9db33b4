"""The first signal asks a server to stop, a further one to hurry, and one that came twice is one."""

import asyncio
import os
import signal

import pytest

from asynctrt.serving import signals
from asynctrt.serving.signals import SAME_NS, StopSignals
from tests.helpers import until

pytestmark = pytest.mark.anyio


class Clock:
    ns = 1

    def now_ns(self):
        return self.ns


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_that_came_twice_is_one_and_a_further_one_hurries(monkeypatch, number):
    clock, heard = Clock(), []
    monkeypatch.setattr(signals, "clock", clock)
    handled = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, handled.set)

    async def send(number):
        os.kill(os.getpid(), number)
        await until(lambda: len(heard) == expected)

    with StopSignals(lambda: heard.append("stop"), lambda: heard.append("hurry")):
        expected = 1
        await send(number)
        for later in (0, SAME_NS - 1):
            clock.ns = 1 + later
            os.kill(os.getpid(), number)
            os.kill(os.getpid(), signal.SIGUSR1)
            await handled.wait()
            handled.clear()
        for _ in range(2):
            clock.ns += SAME_NS
            expected += 1
            await send(signal.SIGTERM)
    asyncio.get_running_loop().remove_signal_handler(signal.SIGUSR1)
    assert heard == ["stop", "hurry", "hurry"]
