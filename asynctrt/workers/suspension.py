"""Take an engine in worker processes off its devices for a while: its workers end, and are started again."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, Literal

from asynctrt.errors import EngineClosedError, SuspendedError, copy_for
from asynctrt.loops import wait_shielded
from asynctrt.workers.front import Front

Phase = Literal["open", "suspending", "suspended"]


class WorkerSuspension:
    """Whether an engine's workers are ended. Changes come one after another, in the order of the calls.

    :param timeout_s: how long workers may take to close before they are killed.
    :param check_open: raises if the engine is draining or closed.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        name: str,
        front: Front,
        timeout_s: float,
        check_open: Callable[[], None],
    ) -> None:
        self._loop = loop
        self._name = name
        self._front = front
        self._timeout_s = timeout_s
        self._check_open = check_open
        self._turn = asyncio.Lock()
        self._why = SuspendedError(f"{name!r} is suspended: call resume() first, or send to another engine")
        self.phase: Phase = "open"
        self._work: asyncio.Task[None] | None = None

    def __repr__(self) -> str:
        return f"<WorkerSuspension of {self._name!r}: {self.phase}>"

    async def suspend(self) -> None:
        """Let what was taken be answered, and end the workers. As :meth:`IsolatedEngine.suspend`."""
        async with self._turn:
            self._check()
            if self.phase == "suspended":
                return
            self.phase = "suspending"
            self._front.refuse(self._why)
            try:
                await self._front.wait_idle()
                self._check()  # Much may have happened meanwhile.
            except BaseException:
                self._open_again()
                raise
            cancelled = await self._seen_through(self._end())
            self.phase = "suspended"
        if cancelled is not None:
            raise cancelled

    async def resume(self) -> None:
        """Start the workers again, and take requests. As :meth:`IsolatedEngine.resume`."""
        async with self._turn:
            self._check()
            if self.phase == "open":
                return
            cancelled = await self._seen_through(self._start())
            self._open_again()
        if cancelled is not None:
            raise cancelled

    async def give_up(self) -> None:
        """For an engine that is closed: start no worker any more; return when what was begun has ended."""
        for link in self._front.links:
            if not link.first.done():
                link.first.set_exception(EngineClosedError(f"{self._name!r} was closed meanwhile"))
        if self._work is not None:
            await wait_shielded(self._work)

    def _check(self) -> None:
        self._check_open()
        if self._front.lost is not None:
            raise copy_for(self._front.lost)

    def _open_again(self) -> None:
        self.phase = "open"
        self._front.accept(self._why)

    async def _seen_through(self, work: Coroutine[Any, Any, None]) -> asyncio.CancelledError | None:
        self._work = self._loop.create_task(work)
        cancelled = await wait_shielded(self._work)
        work_done, self._work = self._work, None
        work_done.result()
        return cancelled

    async def _end(self) -> None:
        ending = [self._loop.create_task(link.suspend(self._timeout_s)) for link in self._front.links]
        await asyncio.wait(ending)
        if self._front.stand_ins is not None:
            self._front.stand_ins.forget()
        for task in ending:
            task.result()

    async def _start(self) -> None:
        links = self._front.links
        for link in links:
            link.resume()
        await asyncio.wait([link.first for link in links])
        errors = [error for link in links if (error := link.first.exception()) is not None]
        if errors:
            await self._end()
            errors[0].add_note(f"{self._name!r} stays suspended.")
            raise errors[0]
