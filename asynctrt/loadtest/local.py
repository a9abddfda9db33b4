"""Sends from this process, on this event loop."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

from asynctrt._util import clock
from asynctrt.errors import AsynctrtError, ConnectionLostError, OptionsError, TargetError, describe
from asynctrt.loadtest.opening import opened
from asynctrt.loadtest.plans import ProcessPlan, make_plan, room
from asynctrt.loadtest.recorder import Windows
from asynctrt.loadtest.runner import ProcessResult, Runner
from asynctrt.loadtest.samples import Sample, make_samples
from asynctrt.loadtest.settings import LoadSettings
from asynctrt.loadtest.targets import SEND_APART, BatchCounters, Target

LEAD_NS: Final = 100_000_000
"""Delay before a run starts, in which every process gets the order and draws its arrivals."""
SERVERS: Final = ("http", "grpc", "websocket")
"""Kinds of targets that run in another process."""

Planned = Callable[[ProcessPlan], None]


class Local:
    """Run one process's part of a load test, one run at a time, with one target and its samples."""

    def __init__(self, target: Target, samples: Sequence[Sample]) -> None:
        self.target = target
        self._samples = samples
        self._prepared = [target.prepare(sample.inputs) for sample in samples]
        self._runner: Runner | None = None
        self._first: BatchCounters | None = None

    @classmethod
    @asynccontextmanager
    async def open(cls, target: Any, settings: LoadSettings) -> "AsyncIterator[Local]":
        """Open the target, make the samples, and check that the target answers them.

        :raises TargetError: if the target cannot be reached, or does not answer.
        :raises AsynctrtError: the target's own error, if it refuses the first requests.
        """
        async with opened(target) as found:
            if settings.processes > 1 and found.kind == "engine":
                raise OptionsError(SEND_APART)
            if settings.inputs is None and getattr(found, "is_self_contained", False):
                if settings.dims:
                    raise OptionsError(f"{found.name!r} has no inputs to give sizes to: leave dims out")
                samples = [Sample({}, settings.rows)]
            else:
                samples = await asyncio.to_thread(make_samples, settings, found.inputs)
            local = cls(found, samples)
            await local._try(settings.answer_timeout)
            yield local

    def plan(self, settings: LoadSettings, share: int = 0, shares: int = 1) -> ProcessPlan:
        """Plan this process's part of one run."""
        target, found = self.target, None
        if target.kind in SERVERS:
            nbytes = max(sum(array.nbytes for array in item.inputs.values()) for item in self._samples)
            has_connections = getattr(target, "has_connections", False)
            found = room(body_nbytes=nbytes, has_connections=has_connections, processes=shares)
        return make_plan(settings, self._samples, target.in_flight_max, share, shares, found)

    async def count(self) -> None:
        """Read the target's counters while no request of the next run has been sent."""
        self._first = None
        with contextlib.suppress(Exception):  # Without them, the run has no figures of batches.
            self._first = await self.target.batches()

    async def run(self, plan: ProcessPlan, emit: Callable[[Windows], None], start_ns: int) -> ProcessResult:
        """Perform one run; see :meth:`Runner.run`. Call :meth:`count` before."""
        self._runner = Runner(self.target, self._samples, self._prepared, plan, self._first)
        try:
            return await self._runner.run(start_ns, emit)
        finally:
            self._runner = None

    async def perform(
        self, settings: LoadSettings, emit: Callable[[Windows], None], planned: Planned
    ) -> tuple[ProcessPlan, list[ProcessResult]]:
        """Plan and perform one run; return the plan and the result of each process.

        :param emit: called repeatedly with the windows counted since its last call.
        :param planned: called with the plan, before anything is sent.
        """
        plan = self.plan(settings)
        planned(plan)
        await self.count()
        return plan, [await self.run(plan, emit, clock.now_ns() + LEAD_NS)]

    def stop(self) -> None:
        """End the current run, if there is one."""
        if self._runner is not None:
            self._runner.stop()

    async def _try(self, timeout: float) -> None:
        """Send one request of each kind, to raise an error that all requests would get before the run."""
        groups: dict[str, int] = {}
        for number, sample in enumerate(self._samples):
            groups.setdefault(sample.group, number)
        for group, number in groups.items():
            what = f"a first request{f' ({group})' if group else ''}"
            await answer(self.target, self._prepared[number], timeout, what)


async def answer(target: Target, prepared: Any, timeout: float, what: str) -> Any:
    """Send one request and return the answer.

    :raises TargetError: if it fails, or is not answered within ``timeout`` seconds.
    :raises AsynctrtError: the target's own error, if it refuses the request.
    """
    try:
        async with asyncio.timeout(timeout):
            return await target.start(prepared)
    except TimeoutError as error:
        if isinstance(error, AsynctrtError):
            raise
        raise TargetError(f"{target.name!r} did not answer {what} within {timeout:g} s") from error
    except ConnectionLostError as error:
        raise TargetError(str(error)) from error
    except AsynctrtError:
        raise
    except Exception as error:
        raise TargetError(f"{target.name!r} failed to answer {what}: {describe(error)}") from error
