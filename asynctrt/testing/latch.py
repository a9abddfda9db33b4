"""A host device that holds its work until the test releases it, without sleeps or races.

::

    device = LatchDevice()
    async with asynctrt.open(model, device=device) as engine:
        task = asyncio.create_task(engine.infer(rows))
        await device.wait_held(1)
        device.release()            # the batch runs now, in this thread
        await task
"""

import asyncio
from collections import deque
from collections.abc import Callable, Hashable

from asynctrt._util import clock
from asynctrt.devices.base import Event
from asynctrt.devices.host import HostDevice, HostStream, RunOn, Work
from asynctrt.devices.host.threads import Served, StreamThreads


class LatchError(AssertionError):
    """A test expected more held batches than there are. The message gives the number."""


class LatchThreads(StreamThreads):
    """A substitute for stream threads that holds each stream with work until it is released."""

    def __init__(self, now_ns: Callable[[], int]) -> None:
        super().__init__(1, "asynctrt-latch", now_ns)
        self.held: deque[Served] = deque()
        self.is_open = False
        # One future for each call that waits for held batches; it is woken to count them again.
        self.waiters: list[asyncio.Future[None]] = []

    def schedule(self, stream: Served) -> None:
        if self.is_open:
            stream.serve()
        else:
            if isinstance(stream, HostStream):
                stream.is_computing = True  # Held work counts as computing on the device.
            self.held.append(stream)
            self.wake()

    def wake(self) -> None:
        """Wake all calls that wait for held batches, so that they count again."""
        for waiter in tuple(self.waiters):
            waiter.get_loop().call_soon_threadsafe(_wake, waiter)


def _wake(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)


class LatchStream(HostStream):
    """A stream of a :class:`LatchDevice` that knows whether it holds a complete batch."""

    has_batch = False
    """Whether the end of its work has been recorded. Until then a thread may still be adding work."""

    def launch(
        self,
        work: Work,
        *,
        label: Hashable = None,
        run_on: RunOn = "thread",
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.has_batch = False
        super().launch(work, label=label, run_on=run_on, loop=loop)

    def record(self, event: Event) -> None:
        super().record(event)
        self.has_batch = True
        if isinstance(self.threads, LatchThreads):
            self.threads.wake()


class LatchDevice(HostDevice):
    """A :class:`HostDevice` that holds every batch. It starts closed; :meth:`open` lets all batches run.

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

    def create_stream(self) -> HostStream:
        return self._keep(LatchStream)

    @property
    def is_parallel(self) -> bool:
        # The test decides how many rows form a batch; a measurement must not.
        return False

    @property
    def holds_batches(self) -> bool:
        """Whether batches wait for a release, so that opening an engine must not run one."""
        return not self._latch.is_open

    @property
    def held(self) -> int:
        """The number of batches that wait for a release."""
        return len(self._latch.held)

    async def wait_held(self, batches: int = 1, *, timeout: float = 10.0) -> None:
        """Wait until at least ``batches`` batches are held at once.

        :param timeout: seconds after which the test fails.
        :raises LatchError: if fewer are held by then, or if the latch is open and so holds none.
        """
        if self._latch.is_open:
            raise LatchError("the latch is open, so it holds no batch back: call shut() before the request")
        try:
            async with asyncio.timeout(timeout):
                while self._held_whole() < batches:
                    waiter = asyncio.get_running_loop().create_future()
                    self._latch.waiters.append(waiter)
                    try:
                        await waiter
                    finally:
                        self._latch.waiters.remove(waiter)
        except TimeoutError:
            raise LatchError(
                f"{self._held_whole()} of {batches} batches are held after {timeout:g} s. Requests sent "
                "together share a batch, and an engine has as many under way as `contexts` and the latch's "
                "`concurrency` allow; the others wait in its queue"
            ) from None

    def _held_whole(self) -> int:
        return sum(getattr(stream, "has_batch", True) for stream in tuple(self._latch.held))

    def release(self, batches: int = 1, *, last: bool = False) -> None:
        """Run held batches in this thread, the oldest first; the newest first if ``last``.

        :raises LatchError: if fewer batches are held; none is released then.
        """
        if self.held < batches:
            why = "a request reaches the device later"
            if self._latch.is_open:
                why = "the latch is open"
            raise LatchError(
                f"{batches} to be released, and {self.held} held: {why}. Wait for them: "
                f"await device.wait_held({batches})"
            )
        for _ in range(batches):
            held = self._latch.held
            stream = held.pop() if last else held.popleft()
            stream.serve()

    def open(self) -> None:
        """Run all held batches, and hold none from now on."""
        self._latch.is_open = True
        self.release(self.held)

    def shut(self) -> None:
        """Hold all batches again, as at the start."""
        self._latch.is_open = False
