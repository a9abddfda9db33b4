"""The workers of a server with several fronts: the parent process owns them and forwards messages.

The parent sees no rows: a front and a worker share memory, whose descriptors the parent only passes on.
"""

import asyncio
import dataclasses
import logging
import os
import pickle
from contextlib import suppress
from functools import partial
from typing import Any, Final

from asynctrt._util import clock
from asynctrt.errors import DeviceLostError, ModelError, describe
from asynctrt.workers.messages import (
    ATTACH_FDS,
    Attach,
    Attached,
    Close,
    Detach,
    EngineCounts,
    Failed,
    From,
    Gone,
    Kill,
    Lost,
    Outbox,
    Ready,
    To,
    Want,
)
from asynctrt.workers.original import Original
from asynctrt.workers.process import ChildProcess, start_worker
from asynctrt.workers.spares import Spares

CLOSED: Final = "was closed"

logger = logging.getLogger("asynctrt")


class Member:
    """The pool's handle on a front.

    :param outbox: sends messages to it.
    """

    def __init__(self, number: int, outbox: Outbox) -> None:
        self.number = number
        self.uses: dict[int, Use] = {}
        """The front's uses of workers, by its tickets."""
        self._outbox = outbox

    def tell(self, message: Any) -> None:
        """Send a message, later if the front does not read now; drop it if the front is gone."""
        if (
            isinstance(message, From)
            and isinstance(message.message, EngineCounts)
            and not self._outbox.is_empty
        ):
            return  # Newer statistics will follow.
        self._outbox.put(message)


class Use:
    """A front's use of a worker.

    :param number: unique among all uses of all workers.
    """

    def __init__(self, number: int, member: Member, ticket: int, worker: "Pooled") -> None:
        self.number = number
        self.member = member
        self.ticket = ticket
        self.worker = worker

    def tell(self, message: Any) -> None:
        """Forward a message of the worker to the front."""
        assert self.worker.process is not None
        self.member.tell(From(self.ticket, self.worker.process.pid, message))


class Pooled:
    """A worker, and the fronts that use it."""

    def __init__(self, key: bytes, want: Want, *, is_alone: bool) -> None:
        self.key = key
        self.want = want
        self.is_alone = is_alone
        self.process: ChildProcess | None = None
        self.ready: Ready | None = None
        self.failed: Failed | None = None
        """Why it could not open the engine; it is about to end."""
        self.uses: dict[int, Use] = {}
        self.why = ""
        """Why it is about to end, if the worker or a front gave a reason. Its fronts know it already."""
        self.is_closing = False
        self.started_ns = 0
        self.spares: Spares | None = None
        """Its spares, once one has died; ``None`` before."""


class WorkerPool:
    """The workers of all fronts, started on demand: one for each engine, and others for suspects."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._members: dict[int, Member] = {}
        self._shared: dict[bytes, Pooled] = {}
        self._spares: dict[bytes, Pooled] = {}
        self._all: set[Pooled] = set()
        # By engine: the original that all of its workers must match.
        self._originals: dict[bytes, Original] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._changed = asyncio.Event()
        self._last_use = 0
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<WorkerPool workers={len(self._all)} fronts={len(self._members)}>"

    def add(self, number: int, outbox: Outbox) -> None:
        """Add a front."""
        self._members[number] = Member(number, outbox)

    def remove(self, number: int) -> None:
        """Remove a front that is gone, and keep the workers that it did not close for the front in its place.

        Opening a model may take much longer than starting a front.
        """
        member = self._members.pop(number)
        for use in list(member.uses.values()):
            self._leave(use, is_gone=True)

    def hear(self, number: int, message: To, fds: list[int]) -> None:
        """Handle a message from a front, or forward it to its worker."""
        member = self._members[number]
        ticket, said = message.ticket, message.message
        if isinstance(said, Want):
            self._want(member, ticket, said)
            return
        use = member.uses.get(ticket)
        if use is None:
            pass  # The worker has ended; a `Gone` is on its way to the front.
        elif isinstance(said, Close):
            self._leave(use)
        elif isinstance(said, Kill) and use.worker.process is not None:
            if said.why:
                self._heard(use.worker, Lost(said.why))  # The other fronts that share it do not know.
            use.worker.process.kill()
        elif isinstance(said, Attach) and len(fds) != ATTACH_FDS:
            # With fewer descriptors the worker would end, and other fronts may share it.
            self._leave(
                use, "was not reached: the server's parent process has no descriptors left (ulimit -n)"
            )
        elif isinstance(said, Attach) and use.worker.process is not None:
            use.worker.process.send(dataclasses.replace(said, number=use.number), fds)
        for fd in fds:
            os.close(fd)  # The worker has its own copy by now.

    def close_unused(self) -> None:
        """Close what fronts left when they died, and the fronts in their places did not want."""
        for key in {*self._shared, *self._spares}:
            worker = self._shared[key] if key in self._shared else self._spares.pop(key)
            if not worker.uses:
                self._close(worker)

    async def aclose(self, timeout_s: float) -> None:
        """Close all workers, by force after ``timeout_s``."""
        self._is_closed = True
        for worker in self._all:
            self._close(worker)
        try:
            await self._all_ended(timeout_s)
        finally:
            self.kill()
        await self._all_ended(timeout_s)

    def kill(self) -> None:
        """End all workers by force."""
        for worker in self._all:
            if worker.process is not None:
                worker.process.kill()

    async def _all_ended(self, timeout_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while self._all:
                    self._changed.clear()
                    await self._changed.wait()

    def _want(self, member: Member, ticket: int, want: Want) -> None:
        key = pickle.dumps((want.model, want.device, want.options, want.place))
        worker = None if want.alone else self._shared.get(key)
        if worker is None:
            worker = self._spares.pop(key, None)
            if worker is None:
                worker = self._start(key, want, is_alone=want.alone)
            worker.is_alone = want.alone
            if not want.alone:
                self._shared[key] = worker
        self._last_use += 1
        use = Use(self._last_use, member, ticket, worker)
        worker.uses[use.number] = member.uses[ticket] = use
        if worker.ready is not None:
            _tell_ready(use, worker.ready)
            self._have_spare(worker)
        elif worker.failed is not None:
            use.tell(worker.failed)

    def _have_spare(self, worker: Pooled) -> None:
        """Start a spare for a worker that is ready and used, if one is wanted and there is none."""
        wanted = worker.want.options.isolation == "spare" and worker.uses and not worker.is_alone
        if wanted and worker.spares is None and not self._is_closed:
            self._start_spare(worker)

    def _start_spare(self, worker: Pooled) -> None:
        if worker.key not in self._spares:
            self._spares[worker.key] = self._start(worker.key, worker.want, is_alone=False)

    def _start(self, key: bytes, want: Want, *, is_alone: bool) -> Pooled:
        worker = Pooled(key, want, is_alone=is_alone)
        self._all.add(worker)
        task = self._loop.create_task(self._started(worker, want))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return worker

    async def _started(self, worker: Pooled, want: Want) -> None:
        original = self._originals.setdefault(worker.key, Original())
        worker.started_ns = clock.now_ns()
        if original.opening_s_max is not None:
            limit_s = original.opening_s_max
            self._loop.call_later(limit_s, self._hangs, worker, original.why_late(limit_s))
        try:
            worker.process = await start_worker(
                want, partial(self._heard, worker), partial(self._died, worker)
            )
        except Exception as error:
            self._died(worker, f"was not started: {describe(error)}")
            return
        if self._is_closed or worker.is_closing:
            worker.process.kill()

    def _heard(self, worker: Pooled, message: Any) -> None:
        assert worker.process is not None
        if isinstance(message, Ready):
            self._opened(worker, message)
        elif isinstance(message, Attached):
            asked = worker.uses.get(message.number)
            if asked is not None:
                asked.tell(message)
        elif isinstance(message, EngineCounts):
            # Only one front reports batches, so that the sum over all fronts is right.
            for use in list(worker.uses.values())[:1]:
                use.tell(message)
        elif isinstance(message, Failed | Lost):
            if isinstance(message, Failed):
                worker.failed = message
                worker.why = describe(message.error)
            else:
                worker.why = message.reason
            for use in worker.uses.values():
                use.tell(message)

    def _opened(self, worker: Pooled, message: Ready) -> None:
        """Give an opened worker to the fronts that want it, unless it differs from the engine's first one."""
        assert worker.process is not None
        opening_s = (clock.now_ns() - worker.started_ns) / 1e9
        why_not = self._originals[worker.key].why_not(message.description, opening_s)
        if why_not:
            worker.process.kill()
            self._heard(worker, Failed(ModelError(why_not), is_hopeless=True))
            return
        worker.ready = message
        for use in worker.uses.values():
            _tell_ready(use, message)
        self._have_spare(worker)

    def _hangs(self, worker: Pooled, why: str) -> None:
        """End a worker that takes too long to open its engine."""
        if worker.process is not None and worker.ready is None:
            self._heard(worker, Failed(DeviceLostError(why), is_hopeless=True))
            worker.process.kill()

    def _leave(self, use: Use, how: str = CLOSED, *, is_gone: bool = False) -> None:
        """Detach a front from a worker. Close the worker after the last front, or keep it if that is gone."""
        worker = use.worker
        del use.member.uses[use.ticket], worker.uses[use.number]
        if worker.process is not None and worker.ready is not None:
            worker.process.send(Detach(use.number))
        use.member.tell(Gone(use.ticket, how))
        if not worker.uses and (worker.is_alone or not is_gone):
            self._close(worker)

    def _close(self, worker: Pooled) -> None:
        """Close a worker that no front uses, and its spare."""
        worker.is_closing = True
        if worker.spares is not None:
            worker.spares.cancel()
        if self._shared.get(worker.key) is worker:
            del self._shared[worker.key]
            spare = self._spares.pop(worker.key, None)
            if spare is not None:
                self._close(spare)
        if worker.process is None:
            return  # `_started` ends it as soon as it has started.
        if worker.ready is None:
            worker.process.kill()
        else:
            worker.process.send(Close())

    def _died(self, worker: Pooled, how: str) -> None:
        self._all.discard(worker)
        if worker.spares is not None:
            worker.spares.cancel()
        is_spare = self._spares.get(worker.key) is worker
        if is_spare:
            del self._spares[worker.key]
        if self._originals[worker.key].description is not None and not (worker.is_closing or self._is_closed):
            said = how + f": {worker.why}" * bool(worker.why)
            if is_spare:
                self._spare_died(worker, said)
            else:
                logger.error("the worker on %s %s", worker.want.device, said)
        if self._shared.get(worker.key) is worker:
            del self._shared[worker.key]  # The next front that wants a worker gets the spare.
        for use in worker.uses.values():
            del use.member.uses[use.ticket]
            use.member.tell(Gone(use.ticket, how))
        worker.uses.clear()
        self._changed.set()

    def _spare_died(self, spare: Pooled, how: str) -> None:
        """Replace a spare that died, after a pause."""
        worker = self._shared.get(spare.key)
        if worker is None:
            return  # The worker has died as well; the next one will get a spare.
        if worker.spares is None:
            worker.spares = Spares(self._loop, worker.want.device, partial(self._start_spare, worker))
        worker.spares.died(how)


def _tell_ready(use: Use, ready: Ready) -> None:
    """Notify a front that a worker is ready. Only the worker's first front counts its contexts and memory."""
    if next(iter(use.worker.uses)) != use.number:
        ready = dataclasses.replace(ready, statistics=ready.statistics.without_gauges())
    use.tell(ready)
