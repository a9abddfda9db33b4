"""Take an engine's weights off its device for a while, and put them back.

::

    open ──suspend()──> suspending ──idle, unloaded──> suspended ──resume()──> open
      ^                     │                              │
      └──cancelled, failed──┘                              └──failed──> suspended

An engine that drains or closes meanwhile leaves this diagram: what was begun is ended first.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import Final, Literal

from asynctrt.backends.base import Model, SuspendableModel
from asynctrt.errors import (
    AsynctrtError,
    DeviceMemoryError,
    ExecutionError,
    SuspendedError,
    UsageError,
    copy_for,
    describe,
)
from asynctrt.loops import see_through_in_thread
from asynctrt.parts import EngineParts
from asynctrt.runtime.driver import Driver
from asynctrt.scheduling.scheduler import Scheduler

Phase = Literal["open", "suspending", "suspended"]

WHY: Final = "is suspended: call resume() first, or send to another engine"


class Suspension:
    """Whether an engine is suspended. Changes come one after the other, in the order of the calls.

    :param check_open: raises if the engine is draining or closed.
    """

    def __init__(
        self, parts: EngineParts, driver: Driver, scheduler: Scheduler, check_open: Callable[[], None]
    ) -> None:
        self._parts = parts
        self._driver = driver
        self._scheduler = scheduler
        self._check_open = check_open
        self._name = repr(parts.model.name)
        self._turn = asyncio.Lock()
        self._why = SuspendedError(f"{self._name} {WHY}")
        self.phase: Phase = "open"
        self.work: asyncio.Future[None] | None = None
        """Done when the thread has ended that unloads or loads; ``None`` if there is none."""

    def __repr__(self) -> str:
        return f"<Suspension of {self._name}: {self.phase}>"

    async def suspend(self) -> None:
        """Let what was taken be answered, and unload. As :meth:`Engine.suspend`."""
        model = self._suspendable()
        async with self._turn:
            self._check_open()
            self._check_not_lost()
            if self.phase == "suspended":
                return
            model.check_suspendable(self._parts.pool.execution_contexts())
            self.phase = "suspending"
            self._driver.refuse(self._why)
            try:
                await self._driver.wait_idle()
                # Much may have happened meanwhile.
                self._check_open()
                self._check_not_lost()
                given_up = self._scheduler.snapshot().contexts_quarantined
                if given_up:
                    raise ExecutionError(
                        f"{self._name} cannot be suspended: {given_up} of its contexts are not used any more "
                        "since a batch did not end, which may still read the weights. Close the engine"
                    )
                cancelled = await self._in_thread(partial(self._unload, model))
            except BaseException:
                self._open_again()
                raise
            self.phase = "suspended"
        if cancelled is not None:
            raise cancelled

    async def resume(self) -> None:
        """Load again, and take requests. As :meth:`Engine.resume`."""
        model = self._suspendable()
        async with self._turn:
            self._check_open()
            self._check_not_lost()
            if self.phase == "open":
                return
            try:
                cancelled = await self._in_thread(partial(self._load, model))
            except DeviceMemoryError as error:
                raise DeviceMemoryError(
                    f"{error}. {self._name} stays suspended: make room on the device, and call resume() again"
                ) from error
            except AsynctrtError as error:
                error.add_note(f"{self._name} stays suspended.")
                raise
            self._scheduler.captured_again(self._parts.pool.captured)
            self._open_again()
        if cancelled is not None:
            raise cancelled

    def _open_again(self) -> None:
        self.phase = "open"
        # Nothing happens if the engine drains or closes, or its device is lost: that is the reason then.
        self._scheduler.accept(self._why)

    def _unload(self, model: SuspendableModel) -> None:
        pool = self._parts.pool
        model.suspend(pool.execution_contexts())
        # They were captured with weights that have gone, and that will lie elsewhere.
        pool.forget_captured()

    def _load(self, model: SuspendableModel) -> None:
        model.resume()
        self._parts.pool.capture_again()

    async def _in_thread(self, function: Callable[[], None]) -> asyncio.CancelledError | None:
        """Run a function in a thread to its end; return the cancellation that is still to be raised.

        :raises AsynctrtError: what it raised.
        """
        self.work = asyncio.get_running_loop().create_future()
        try:
            future, cancelled = await see_through_in_thread(function)
        finally:
            self.work.set_result(None)
            self.work = None
        error = future.exception()
        if error is None or isinstance(error, AsynctrtError):
            future.result()
            return cancelled
        raise ExecutionError(
            f"{self._name} failed while its weights were moved: {describe(error)}"
        ) from error

    def _check_not_lost(self) -> None:
        lost = self._parts.device.lost or self._driver.lost
        if lost is not None:
            raise copy_for(lost)

    def _suspendable(self) -> SuspendableModel:
        model: Model = self._parts.model
        if not isinstance(model, SuspendableModel):
            raise UsageError(
                f"{self._name} cannot be suspended: what runs it ({model.platform}) cannot unload weights. "
                "TensorRT for RTX can, and so can a model of your own that is an "
                "asynctrt.backends.base.SuspendableModel"
            )
        return model
