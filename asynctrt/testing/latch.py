"""A host device whose work is held back until the test releases it: no sleeps, no races.

::

    device = LatchDevice()
    async with asynctrt.open(model, device=device) as engine:
        task = asyncio.create_task(engine.infer(rows))
        await asyncio.sleep(0)      # ... until device.held == 1
        device.release()            # the batch runs here and now
        await task
"""

from collections import deque
from collections.abc import Callable

from asynctrt import clock
from asynctrt.devices.crew import Crew, Served
from asynctrt.devices.host import HostDevice


class LatchCrew(Crew):
    """A crew without threads: a stream that has work is held until it is released."""

    def __init__(self, now_ns: Callable[[], int]) -> None:
        super().__init__(1, "asynctrt-latch", now_ns)
        self.held: deque[Served] = deque()
        self.is_open = False

    def schedule(self, stream: Served) -> None:
        if self.is_open:
            stream.serve()
        else:
            self.held.append(stream)


class LatchDevice(HostDevice):
    """A :class:`HostDevice` that holds every batch. It begins closed; :meth:`open` lets everything pass.

    :param unified: as of :class:`HostDevice`.
    :param slots: how many batches the scheduler is told that the device does at once.
    """

    def __init__(
        self,
        *,
        unified: bool = True,
        slots: int = 2,
        now_ns: Callable[[], int] = clock.now_ns,
    ) -> None:
        super().__init__(threads=slots, in_place="never", unified=unified, now_ns=now_ns)
        self._latch = LatchCrew(now_ns)
        self._crew = self._latch

    def __repr__(self) -> str:
        return f"<LatchDevice {'open' if self._latch.is_open else 'closed'} held={self.held}>"

    @property
    def is_parallel(self) -> bool:
        # A test says how many rows make a batch, not a measurement.
        return False

    @property
    def held(self) -> int:
        """How many batches wait to be released."""
        return len(self._latch.held)

    def release(self, batches: int = 1, *, last: bool = False) -> None:
        """Run that many held batches in this thread, the oldest first, or with ``last`` the newest."""
        for _ in range(batches):
            held = self._latch.held
            stream = held.pop() if last else held.popleft()
            stream.serve()

    def open(self) -> None:
        """Run all that is held, and hold nothing from now on."""
        self._latch.is_open = True
        self.release(self.held)

    def shut(self) -> None:
        """Hold everything again from now on."""
        self._latch.is_open = False
