"""A host device that holds its work back until the test releases it: no sleeps, no races.

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
from asynctrt.devices.host import HostDevice, HostStream
from asynctrt.devices.host.threads import Served, StreamThreads


class LatchThreads(StreamThreads):
    """Hold a stream that has work until it is released; there are no threads."""

    def __init__(self, now_ns: Callable[[], int]) -> None:
        super().__init__(1, "asynctrt-latch", now_ns)
        self.held: deque[Served] = deque()
        self.is_open = False

    def schedule(self, stream: Served) -> None:
        if self.is_open:
            stream.serve()
        else:
            if isinstance(stream, HostStream):
                stream.is_computing = True  # Work that is held takes its time on the device.
            self.held.append(stream)


class LatchDevice(HostDevice):
    """A :class:`HostDevice` that holds every batch. It begins closed; :meth:`open` lets everything pass.

    :param unified: as for :class:`HostDevice`.
    :param concurrency: the number of batches that the scheduler may run at once.
    """

    def __init__(
        self,
        *,
        unified: bool = True,
        concurrency: int = 2,
        now_ns: Callable[[], int] = clock.now_ns,
    ) -> None:
        super().__init__(threads=concurrency, in_place="never", unified=unified, now_ns=now_ns)
        self._latch = LatchThreads(now_ns)
        self._stream_threads = self._latch

    def __repr__(self) -> str:
        return f"<LatchDevice {'open' if self._latch.is_open else 'closed'} held={self.held}>"

    @property
    def is_parallel(self) -> bool:
        # The test decides how many rows make a batch, not a measurement.
        return False

    @property
    def held(self) -> int:
        """The number of batches that wait to be released."""
        return len(self._latch.held)

    def release(self, batches: int = 1, *, last: bool = False) -> None:
        """Run held batches in this thread: the oldest, or the newest if ``last``."""
        for _ in range(batches):
            held = self._latch.held
            stream = held.pop() if last else held.popleft()
            stream.serve()

    def open(self) -> None:
        """Run everything that is held, and let everything pass from now on."""
        self._latch.is_open = True
        self.release(self.held)

    def shut(self) -> None:
        """Hold everything back again, as at first."""
        self._latch.is_open = False
