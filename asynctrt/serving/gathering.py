"""Hold gRPC's calls back for a moment so that they can share a batch: gRPC hands them over one by one."""

import asyncio
from typing import Final

TURNS: Final = 12
"""Iterations of the event loop in which gRPC hands over its next call, if there is one: it accepts one at a
time, through a thread and several tasks."""

WAIT_S: Final = 0.004
"""The longest time for which a call is held back. gRPC hands over some 20 calls in it, which share the
cost of a launch."""


class Gathering:
    """Calls that wait for each other, between their message and their submission to an engine.

    Otherwise each call would be launched alone before gRPC hands over the next one, however many are ready.
    Calls wait only while it pays: once two have overlapped, and until one has waited in vain. So a lone
    caller's calls never wait.
    """

    def __init__(self) -> None:
        self.pays = False
        """Whether calls are to :meth:`wait`."""
        self._expected: set[object] = set()
        """Calls whose messages are being read, except slow ones."""
        self._held: list[asyncio.Future[None]] = []
        self._turns_left = 0
        self._loop: asyncio.AbstractEventLoop
        self._timer: asyncio.TimerHandle

    def __repr__(self) -> str:
        return f"<Gathering expected={len(self._expected)} held={len(self._held)} pays={self.pays}>"

    def expect(self, call: object) -> None:
        """Note that the message of a call is being read."""
        if self._expected or self._held:
            self.pays = True
        self._expected.add(call)

    def arrived(self, call: object) -> None:
        """Note that a call's message was read, or never will be."""
        self._expected.discard(call)
        if self._held:
            self._count_anew()

    async def wait(self, left_s: float | None) -> None:
        """Return once no further call is ready, together with the other calls that wait.

        :param left_s: the time until the call's deadline, if it has one. A call that could lose half of it
            does not wait.
        """
        if left_s is not None and left_s < 2 * WAIT_S:
            return
        if not self._held:
            self._loop = asyncio.get_running_loop()  # Not each time: it takes a system call in Python 3.11.
            self._timer = self._loop.call_later(WAIT_S, self._give_up)
        future: asyncio.Future[None] = self._loop.create_future()
        self._held.append(future)
        self._count_anew()
        await future

    def _count_anew(self) -> None:
        if not self._turns_left:
            self._loop.call_soon(self._turn)
        self._turns_left = TURNS

    def _turn(self) -> None:
        """Count an iteration of the loop; stop while the message of a further call is being read."""
        self._turns_left = 0 if self._expected or not self._held else self._turns_left - 1
        if self._turns_left:
            self._loop.call_soon(self._turn)
        elif self._held and not self._expected:
            self.pays = len(self._held) > 1
            self._release()

    def _give_up(self) -> None:
        """Release the calls although others are expected, which are not waited for again."""
        self._expected.clear()
        self._release()

    def _release(self) -> None:
        self._timer.cancel()
        held, self._held = self._held, []
        for future in held:
            if not future.done():
                future.set_result(None)
