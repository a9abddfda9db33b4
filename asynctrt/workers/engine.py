"""An engine whose driver is a front, as returned by ``asynctrt.open(..., isolation="process")``."""

import asyncio
import dataclasses
import os
from collections.abc import Sequence
from functools import partial, reduce
from typing import Final, NoReturn

from asynctrt._util.cgroup import memory_nbytes
from asynctrt._util.loops import see_through_in_thread, wait_shielded
from asynctrt.core.description import Description
from asynctrt.core.driven import DrivenEngine
from asynctrt.core.loading import ENGINE_NAME
from asynctrt.core.padded_inputs import front_check
from asynctrt.engine import STREAM_END_S
from asynctrt.errors import EngineClosedError, InputError
from asynctrt.options import Options
from asynctrt.scheduling.key import BatchKey
from asynctrt.statistics import Statistics, WorkerState
from asynctrt.tensors import too_many_rows
from asynctrt.workers.front import Dispatcher
from asynctrt.workers.link import Link
from asynctrt.workers.memory import Heap, SharedMemory
from asynctrt.workers.messages import Want
from asynctrt.workers.original import Original
from asynctrt.workers.spawn import SPAWNER

SHARE_OF_MEMORY: Final = 0.5
"""The maximum share of the machine's memory for a front's shared memory. Only used pages take any."""


class IsolatedEngine(DrivenEngine):
    """A model in worker processes that may die.

    What needs the device in this process is refused: ``tracing`` raises ``UsageError``, and
    ``outputs="device"`` raises ``InputError``.

    :param description: describes the engine in the workers, which is the same in all.
    :param memory: the memory shared with the workers, which the engine gives back.
    """

    _elsewhere = "open it with isolation='none' for that"

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        description: Description,
        options: Options,
        memory: SharedMemory,
        links: list[Link],
    ) -> None:
        front = Dispatcher(loop, description, options, Heap(memory), links)
        for link in links:
            link.owner = front

        def too_many(_: object, rows: int, *_args: object) -> NoReturn:
            raise too_many_rows(rows, options.max_queue_rows)

        super().__init__(
            loop,
            options,
            description,
            driver=front,
            check=front_check(description.name, description.inputs, description.outputs, options),
            limit=lambda _: description.max_rows,
            # The workers split what is larger than a batch.
            rows_unsplit=options.max_queue_rows,
            split=too_many,
        )
        self._front = front
        self._memory = memory
        self._state = "open"

    def __repr__(self) -> str:
        return f"<Engine {self.name!r} on {self.device_name} {self.state} requests={self._front.requests}>"

    @property
    def state(self) -> str:
        """The engine's state, or ``restarting`` after the last worker died, until another is ready."""
        if self._state != "open":
            return self._state
        if self._front.lost is not None:
            return "lost"
        return "open" if any(link.state == "open" for link in self._front.links) else "restarting"

    @property
    def device_name(self) -> str:
        """The devices of the workers: ``cuda:0,cuda:1``."""
        return ",".join(link.device for link in self._front.links)

    @property
    def workers(self) -> tuple[WorkerState, ...]:
        """The current state of each device's worker."""
        return tuple(
            WorkerState(link.device, link.state, link.pid, link.deaths, len(link.groups), link.spare)
            for link in self._front.links
        )

    def _key_on_device(self, key: BatchKey, rows: int) -> BatchKey:
        raise InputError(
            "outputs='device' would leave them in the worker process, out of your reach. Leave it out, "
            "or open the engine with isolation='none'"
        )

    def statistics(self) -> Statistics:
        """Return the workers' latest batch statistics (at most 0.1 s old) and the front's request counts."""
        self._origin.check(self)
        of_links = [link.counts for link in self._front.links]
        joined = reduce(Statistics.joined, [counts for counts in of_links if counts is not None])
        waiting = max(self._front.requests - joined.in_flight_batches, 0) if self._front.requests else 0
        return dataclasses.replace(
            joined,
            **dataclasses.asdict(self._front.counters),
            state=self.state,
            worker_deaths=sum([link.deaths for link in self._front.links]),
            queued_requests=waiting,
            queued_rows=self._front.rows if waiting else 0,
            memory_nbytes=joined.memory_nbytes + self._front.nbytes,
            row_ns_foreign=self._front.row_ns,
        )

    async def _close(self) -> None:
        why = f"{self.name!r} is closed"
        self._state = "closing"
        front = self._front
        front.fail_queued(EngineClosedError(why))
        await wait_shielded(front.next_idle(), self._options.close_timeout)
        closing = [self._loop.create_task(link.aclose(self._options.close_timeout)) for link in front.links]
        for task in closing:
            await wait_shielded(task)
        front.close()
        await see_through_in_thread(partial(front.end_threads, STREAM_END_S))
        self._memory.discard(front.nbytes)
        self._state = "closed"
        for task in closing:
            task.result()


async def open_isolated(model: str, devices: Sequence[str], options: Options) -> IsolatedEngine:
    """Start a worker for each device, wait until all have opened the model, and return an engine.

    :param model: a path, or ``module:attribute``.
    :raises DeviceUnavailableError: if the system refuses memory or a process, or there is no such device.
    :raises AsynctrtError: whatever opening the model in this process would raise.
    """
    loop = asyncio.get_running_loop()
    own = dataclasses.replace(options, timeout=None)
    total = memory_nbytes() or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    memory = SharedMemory.create(int(total * SHARE_OF_MEMORY))
    spawner = SPAWNER.get()
    name, original = ENGINE_NAME.get(), Original()
    links = [
        Link(loop, Want(model, device, own, f"{name}, worker {number}"), memory, spawner, original)
        for number, device in enumerate(devices)
    ]
    try:
        for link in links:
            link.start()
        descriptions = [await link.first for link in links]
    except BaseException:
        closing = [loop.create_task(link.aclose(options.close_timeout)) for link in links]
        for task in closing:
            await wait_shielded(task)
        for link in links:
            if link.first.done() and not link.first.cancelled():
                link.first.exception()  # Mark it as retrieved: only the first error is raised.
        memory.close()
        raise
    return IsolatedEngine(loop, descriptions[0], options, memory, links)
