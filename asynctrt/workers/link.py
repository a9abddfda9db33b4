"""A link: a front's connection to one device's worker and to the workers that replace it.

When a worker dies, its groups go back to the front, and another worker takes its place: the spare, if there
is one. Requests that were in a batch when two workers died are suspected; requests that hung are suspected
at once. Suspects are tried one by one, with nothing else in the worker, until each is answered or has ended
a worker by itself. A trial takes hardly any time unless it ends the worker, so finding a bad request takes
at most three workers. Meanwhile other requests get every second turn.
"""

import asyncio
import logging
import os
import weakref
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any, Final, Protocol

from asynctrt._util import clock
from asynctrt._util.forks import in_child
from asynctrt.core.description import Description
from asynctrt.errors import AsynctrtError, DeviceLostError, DeviceUnavailableError, ModelError, copy_for
from asynctrt.scheduling.request import NO_DEADLINE_NS
from asynctrt.statistics import Statistics
from asynctrt.workers.groups import RequestGroup
from asynctrt.workers.memory import SharedMemory
from asynctrt.workers.messages import (
    Attach,
    Attached,
    Close,
    EngineCounts,
    Failed,
    Kind,
    Lost,
    Ready,
    Want,
)
from asynctrt.workers.original import Original
from asynctrt.workers.ring import Receiver, Sender, ring_nbytes
from asynctrt.workers.spares import SOON_NS, Spares, pause_s
from asynctrt.workers.spawn import OwnWorkers, WorkerHandle
from asynctrt.workers.trials import Trials

GROUPS_MAX: Final = 8192
"""The maximum number of groups of one worker; the front holds the rest."""

CAPACITY: Final = 4 * GROUPS_MAX
"""Entries of a ring: for each group at most SUBMIT, CANCEL and FETCH, or LARGE and an answer."""

FAILURES_MAX: Final = 5
"""The maximum number of workers in a row that fail while callers wait."""

LOOK_S: Final = 0.5
"""How often a link looks at its worker's heartbeat."""

SILENCE_S_MIN: Final = 0.9
"""A shorter silence means nothing, whatever the batch_timeout is: processes may wait for a core."""

KILL_S: Final = 5.0
"""How long a killed process may take to end."""

logger = logging.getLogger("asynctrt")


class LinkOwner(Protocol):
    """The part of the front that a link uses."""

    def answered(self, link: "Link", group: RequestGroup, fields: tuple[int, ...]) -> None:
        """Answer the requests of a group."""

    def room_for(self, group: RequestGroup, nbytes: int) -> int | None:
        """Return a block for an answer that does not fit into the group's own."""

    def returned(self, groups: list[RequestGroup], how: str) -> list[list[RequestGroup]]:
        """Take groups back from a worker that died; return the suspects of each group, one by one."""

    def hold(self, groups: list[RequestGroup]) -> None:
        """Take back groups that may go to any link."""

    def poisoned(self, group: RequestGroup, how: str) -> None:
        """Fail the request that ends workers."""

    def send_held(self) -> None:
        """Give held groups to links."""

    def link_lost(self) -> None:
        """Continue with the other links, if there are any."""

    def link_found(self) -> None:
        """Accept requests again, if they were refused."""


class Candidate:
    """A worker process from its start on, which becomes the link's worker when it is ready and needed."""

    def __init__(self, want: Want) -> None:
        self.process: WorkerHandle | None = None
        self.want = want
        """The engine that it opens."""
        self.description: Description | None = None
        self.counts: Statistics | None = None
        self.attached_ns: int | None = None
        """When it was given the front's memory, and the link was open."""
        self.has_answered = False
        self.is_refused = False
        """Whether the front cannot use it: they cannot share memory, or its engine is a different one."""
        self.is_hopeless = False
        """Whether the next one would fail in the same way, or callers have waited long enough."""
        self.started_ns = 0
        self.limit: asyncio.TimerHandle | None = None
        """The timer that ends it if it takes too long to open the engine."""
        self.error: Exception | None = None
        """Why it could not open the engine, or lost its device."""


class Link:
    """A front's link to the worker on one device.

    :param want: the engine that its workers open.
    :param memory: the heap of the front.
    :param spawner: where it gets workers.
    :param original: the engine that every worker must match.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        want: Want,
        memory: SharedMemory,
        spawner: OwnWorkers,
        original: Original,
    ) -> None:
        self._loop = loop
        self.want = want
        self.device = want.device
        self._options = want.options
        self._memory = memory
        self._spawner = spawner
        self.owner: LinkOwner | None = None
        self.state = "starting"
        """``starting``, ``open``, ``restarting``, ``lost``, ``closed``."""
        self.lost: DeviceLostError | None = None
        self._worker: Candidate | None = None
        self._spare: Candidate | None = None
        self._spares = Spares(loop, want.device, self._have_spare)
        self._tasks: set[asyncio.Task[None]] = set()
        self._sender: Sender | None = None
        self._receiver: Receiver | None = None
        # Close its eventfds, at the latest with the last reference, in case the loop was closed first.
        self._closes: list[weakref.finalize[[int], Link]] = []
        self.groups: dict[int, RequestGroup] = {}
        self._last_number = 0
        self.rows = 0
        """The rows that its worker has not answered yet."""
        self._unpublished = False
        self._trials = Trials()
        # Workers in a row that did not open the engine, or ended soon without an answer or a batch.
        self._failures = 0
        self._original = original
        self.deaths = 0
        """Workers that died."""
        self._look: asyncio.TimerHandle | None = None
        # When the worker was last looked at, its heartbeat then, and for how long that has not changed.
        self._looked_ns = self._beat_ns = self._silent_ns = 0
        self._counts_before: Statistics | None = None
        self.first: asyncio.Future[Description] = loop.create_future()
        """Done when the first worker is ready or has failed."""
        self._changed = asyncio.Event()
        """Set when a process has ended."""
        in_child(self, Link._let_go)

    def _let_go(self) -> None:
        """Disable the link in a forked child: the worker is the parent's."""
        self.state = "closed"

    def __repr__(self) -> str:
        return f"<Link {self.device} {self.state} groups={len(self.groups)} deaths={self.deaths}>"

    # The front's operations.

    @property
    def takes(self) -> bool:
        """Whether it accepts a group now."""
        if self.state != "open" or len(self.groups) >= GROUPS_MAX:
            return False
        return self._trials.lets_in(clock.now_ns())

    @property
    def spare(self) -> str:
        """The state of its spare: ``starting``, ``ready``, ``failed``, or ``""`` if the link manages none."""
        if self._options.isolation != "spare" or self._spawner.is_shared:
            return ""
        spare = self._spare
        return "starting" if spare is None or spare.description is None else "ready"

    @property
    def pid(self) -> int | None:
        """The worker's process id."""
        worker = self._worker
        return None if worker is None or worker.process is None else worker.process.pid

    def put(self, group: RequestGroup) -> None:
        """Give the worker a group, which it sees after :meth:`publish`."""
        assert self._sender is not None
        self._last_number += 1
        group.number = self._last_number
        group.sent_ns = clock.now_ns()
        self._trials.sent(group.rows)
        self.groups[group.number] = group
        self.rows += group.rows
        deadline_ns = group.deadline_ns
        where = group.block, group.rows, group.generation, 0, 0
        self._sender.put(Kind.SUBMIT, 0, group.priority, group.number, deadline_ns, *where)
        self._unpublished = True

    def cancel(self, group: RequestGroup) -> None:
        """Cancel a group in the worker, if the worker has it: no caller waits for it any more."""
        if self._sender is None or self.groups.get(group.number) is not group:
            return
        self._sender.put(Kind.CANCEL, 0, 0, group.number, NO_DEADLINE_NS, 0, 0, 0, 0, 0)
        self._sender.publish()

    def publish(self) -> None:
        """Publish the groups put so far to the worker."""
        if self._unpublished and self._sender is not None:
            self._unpublished = False
            self._sender.publish()

    def take_suspects(self) -> list[RequestGroup]:
        """Hand over the suspects that no worker has to the caller."""
        return self._trials.take_waiting()

    def unanswered(self) -> list[RequestGroup]:
        """Return its unanswered groups, including the suspects still to be tried."""
        return [*self.groups.values(), *self._trials.waiting]

    @property
    def counts(self) -> Statistics | None:
        """The latest statistics of all its workers so far; ``None`` if none has sent any."""
        latest = None if self._worker is None else self._worker.counts
        return _joined(latest, self._counts_before)

    # Starting and ending workers.

    def start(self) -> None:
        """Start the first worker."""
        self._worker = self._new_candidate()

    async def aclose(self, timeout_s: float) -> None:
        """Close the worker's engine and end its process, by force if that takes longer than ``timeout_s``."""
        was_closed, self.state = self.state == "closed", "closed"
        self._spares.cancel()
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        candidates = [one for one in (self._worker, self._spare) if one is not None]
        processes = [one.process for one in candidates if one.process is not None]
        try:
            for candidate in candidates:
                if candidate.process is None or was_closed:
                    continue
                if candidate.description is None:
                    self._give_up(candidate)  # It is still opening an engine that is no longer needed.
                else:
                    candidate.process.send(Close())
            await self._all_ended(processes, timeout_s)
        finally:
            for process in processes:
                process.kill()
        await self._all_ended(processes, KILL_S)
        for process in processes:
            if not process.how_it_ended:
                logger.error("%r does not end, although it was killed", process)
        self._detach()

    async def _all_ended(self, processes: list[WorkerHandle], timeout_s: float) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                while any(not process.how_it_ended for process in processes):
                    self._changed.clear()
                    await self._changed.wait()

    def _give_up(self, candidate: Candidate) -> None:
        """End a process that this front cannot use, or let go of it if other fronts share it."""
        assert candidate.process is not None
        if self._spawner.is_shared:
            candidate.process.send(Close())
        else:
            candidate.process.kill()

    def kill(self) -> None:
        """Kill the worker with SIGKILL, after a broken answer or for a test."""
        if self._worker is not None and self._worker.process is not None:
            self._worker.process.kill()

    def _new_candidate(self, pause_s: float = 0.0) -> Candidate:
        candidate = Candidate(self.want)
        task = self._loop.create_task(self._start(candidate, pause_s))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return candidate

    async def _start(self, candidate: Candidate, pause_s: float) -> None:
        if pause_s:
            await asyncio.sleep(pause_s)
        candidate.started_ns = clock.now_ns()
        limit_s = self._original.opening_s_max if self.first.done() else None
        if limit_s is not None:
            candidate.limit = self._loop.call_later(limit_s, self._hangs, candidate, limit_s)
        try:
            candidate.process = await self._spawner.start(
                candidate.want, partial(self._heard, candidate), partial(self._died, candidate)
            )
        except Exception as error:
            candidate.error = error
            self._died(candidate, "was not started")

    def _hangs(self, candidate: Candidate, limit_s: float) -> None:
        """End a process that takes too long to open the engine."""
        if candidate.process is not None and candidate.description is None:
            candidate.is_hopeless = True
            self._end(candidate, self._original.why_late(limit_s))

    def _end(self, candidate: Candidate, why: str) -> None:
        """Kill a process that hangs."""
        assert candidate.process is not None
        candidate.error = DeviceLostError(why)
        candidate.process.kill(why)

    def _heard(self, candidate: Candidate, message: Any) -> None:
        if isinstance(message, Ready):
            candidate.description = message.description
            candidate.counts = message.statistics
            opening_s = (clock.now_ns() - candidate.started_ns) / 1e9
            why_not = self._original.why_not(message.description, opening_s)
            if why_not:
                candidate.is_hopeless = True
                self._refuse(candidate, ModelError(why_not))
            elif candidate is self._worker and self.state != "closed":
                self._attach(candidate)
            elif self.state == "lost":
                self._give_up(candidate)
        elif isinstance(message, Attached):
            self._told_of_memory(candidate, message.error)
        elif isinstance(message, Failed):
            candidate.error, candidate.is_hopeless = message.error, message.is_hopeless
        elif isinstance(message, Lost):
            candidate.error = DeviceLostError(message.reason)
        elif isinstance(message, EngineCounts):
            candidate.counts = message.statistics

    def _attach(self, candidate: Candidate) -> None:
        """Make a ready candidate the worker: give it new rings, so that it accepts groups."""
        assert candidate.description is not None
        assert candidate.process is not None
        memory = self._memory
        nbytes = ring_nbytes(CAPACITY)
        flags = os.EFD_CLOEXEC | os.EFD_NONBLOCK
        try:
            theirs, own = self._eventfd(flags), self._eventfd(flags)
            rings = SharedMemory.create(2 * nbytes)
        except (OSError, AsynctrtError) as error:
            self._refuse(candidate, DeviceUnavailableError(f"no rings could be made for it: {error}"))
            return
        self._sender = Sender(rings, 0, CAPACITY, theirs)
        self._receiver = Receiver(rings, nbytes, CAPACITY, own)
        self._loop.add_reader(own, self._woken)
        message = Attach(memory.nbytes, rings.nbytes, 0, CAPACITY)
        candidate.process.send(message, [memory.fd, rings.fd, theirs, own])
        rings.close()
        self._receiver.sleep()
        candidate.attached_ns = self._looked_ns = clock.now_ns()
        self._beat_ns = self._silent_ns = 0
        if self._look is None:
            self._look = self._loop.call_later(LOOK_S, self._look_after)
        self.state, self.lost = "open", None
        self._spares.cancel()
        self._spares = Spares(self._loop, self.device, self._have_spare)
        self._have_spare()
        self._next_turn()
        if self.owner is not None:
            self.owner.link_found()

    def _eventfd(self, flags: int) -> int:
        number = os.eventfd(0, flags)
        self._closes.append(weakref.finalize(self, os.close, number))
        return number

    def _told_of_memory(self, candidate: Candidate, error: str) -> None:
        """Handle the worker's reply to ``Attach``: it has mapped the front's memory, or could not."""
        assert candidate.description is not None
        if error:
            self._refuse(candidate, DeviceUnavailableError(f"the worker {error}"))
            return
        if not self.first.done():
            self.first.set_result(candidate.description)

    def _refuse(self, candidate: Candidate, why: AsynctrtError) -> None:
        """Give up a worker that this front cannot use."""
        candidate.is_refused, candidate.error = True, why
        self._give_up(candidate)

    def _have_spare(self) -> None:
        """Start a spare, unless there is one already or the spawner manages them."""
        wanted = self._options.isolation == "spare" and not self._spawner.is_shared
        if wanted and self._spare is None and self.state == "open":
            self._spare = self._new_candidate()

    def _detach(self) -> None:
        """Release the rings."""
        self._trials.tried = None
        if self._look is not None:
            self._look.cancel()
            self._look = None
        if self._receiver is not None:
            self._loop.remove_reader(self._receiver.eventfd)
        for close in self._closes:
            close()
        self._closes.clear()
        self._sender = self._receiver = None
        self._unpublished = False

    def _died(self, candidate: Candidate, how: str) -> None:
        """Handle the end of a process."""
        self._changed.set()
        if candidate.limit is not None:
            candidate.limit.cancel()
        how += "" if candidate.error is None else f": {candidate.error}"
        if candidate is self._spare:
            self._spare = None
            if self.state in ("open", "restarting"):
                self._spares.died(how)
        elif candidate is self._worker and self.state != "closed":
            self._worker_died(candidate, how)

    def _worker_died(self, candidate: Candidate, how: str) -> None:
        """Take back the worker's groups, and replace it unless that is hopeless."""
        has_served = False
        if candidate.attached_ns is not None and not candidate.is_refused:
            self.deaths += 1
            self._look_at_answers()  # Answers from before its death count.
            idle_ns = 0 if self.groups else clock.now_ns() - candidate.attached_ns
            # A group that it launched is to blame, and trials will find it.
            has_launched = any(self._memory.words[group.launched] for group in self.groups.values())
            has_served = candidate.has_answered or has_launched or idle_ns > SOON_NS
        self._failures = 0 if has_served else self._failures + 1
        self._give_back(how)
        self._detach()
        self._keep_counts(candidate)
        # A worker that was ready has opened the engine: other fronts of the server may have ended it.
        if not self.first.done() and (candidate.description is None or candidate.is_refused):
            self.first.set_exception(_opening_error(candidate, how))
            self.state = "closed"
        elif candidate.is_hopeless or self.lost is not None:
            self._lose(how)
        elif self._failures >= FAILURES_MAX:
            self._lose(f"{how}, as did the {self._failures - 1} before it")
        else:
            self._replace(how)

    def _replace(self, how: str) -> None:
        """Replace the worker that died with the spare or a new one."""
        if not self._spawner.is_shared:  # Otherwise the server's parent logs it, once for all fronts.
            logger.error("the worker on %s %s; another one takes its place", self.device, how)
        self.state = "restarting"
        self._worker, self._spare = self._spare, None
        if self._worker is None:
            self._worker = self._new_candidate(pause_s(self._failures))
            # In a shared worker, a request of another front could end it, and our suspect would be blamed.
            if self._spawner.is_shared and self._trials.are_waiting:
                self._worker.want = replace(self.want, alone=True)
        elif self._worker.description is not None:
            self._attach(self._worker)
        if self.owner is not None:
            self.owner.send_held()

    def _give_back(self, how: str) -> None:
        """Return the worker's groups to the front, except suspects, which will be tried apart."""
        groups, self.groups, self.rows = list(self.groups.values()), {}, 0
        tried, self._trials.tried = self._trials.tried, None
        if self.owner is None:
            return
        for suspects in self.owner.returned(groups, how):
            if tried in suspects:
                self.owner.poisoned(suspects[0], how)
                self._trials.convict()
            else:
                self._trials.add(suspects)

    def _next_turn(self) -> None:
        """Try the next suspect, or begin the others' turn, once the worker has nothing else."""
        trials = self._trials
        while self.state == "open" and trials.are_waiting and not self.groups:
            assert self.owner is not None
            if trials.is_turn_of_others:
                trials.change_turns(clock.now_ns(), self._worker_rows)
            elif trials.is_turn_over(clock.now_ns()):
                trials.change_turns(clock.now_ns(), self._worker_rows)
                self.owner.send_held()
                if self.groups:
                    return
                trials.change_turns(clock.now_ns(), self._worker_rows)
            suspect = trials.next()
            if suspect.left:
                self._try(suspect)
            else:
                self.owner.hold([suspect])  # This frees it.
        if not trials.are_over:
            return
        trials.end()
        worker = self._worker
        if worker is not None and worker.want.alone and self.state == "open" and not self.groups:
            self._share_again(worker)

    @property
    def _worker_rows(self) -> int:
        """The rows that fill all contexts of the worker once."""
        assert self._worker is not None
        assert self._worker.description is not None
        return self._worker.description.max_rows * self._worker.description.contexts

    def _try(self, suspect: RequestGroup) -> None:
        """Give the worker one suspect and nothing else."""
        self._trials.tried = suspect
        self.put(suspect)
        self.publish()

    def _share_again(self, worker: Candidate) -> None:
        """Replace the unshared worker with a shared one, after the last suspect."""
        assert worker.process is not None
        worker.process.send(Close())
        self._detach()
        self._keep_counts(worker)
        self.state = "restarting"
        self._worker = self._new_candidate()

    def _lose(self, how: str) -> None:
        """Fail waiting callers; if the engine was ever open, try again later."""
        self._failures = max(self._failures, FAILURES_MAX)
        pause = pause_s(self._failures)
        what = "open the engine again"
        if self.first.done():
            what = f"another one is tried in {pause:g} s, and then less and less often"
        self.lost = DeviceLostError(f"the worker on {self.device} {how}. Fix the model or the device: {what}")
        logger.error("%s", self.lost)
        self.state = "lost"
        if self.first.done():
            self._worker = self._new_candidate(pause)
        else:
            self.first.set_exception(copy_for(self.lost))
        self._spares.cancel()
        if self._spare is not None and self._spare.process is not None:
            self._spare.process.kill()
        if self.owner is not None:
            self.owner.hold(self.take_suspects())
            self.owner.link_lost()

    def _keep_counts(self, candidate: Candidate) -> None:
        """Keep the statistics of a worker that has ended."""
        if candidate.counts is not None:
            self._counts_before = _joined(candidate.counts.without_gauges(), self._counts_before)
            candidate.counts = None

    # Answers.

    def _woken(self) -> None:
        assert self._receiver is not None
        self._receiver.wake()
        self._answers()

    def _answers(self) -> None:
        """Handle the answers in the ring; then sleep, or let the loop run before looking again."""
        if self._receiver is None:
            return
        self._look_at_answers()
        if self._receiver is not None and not self._receiver.sleep():
            self._loop.call_soon(self._answers)
        self._next_turn()
        if self.owner is not None:
            self.owner.send_held()

    def _look_at_answers(self) -> None:
        if self._receiver is None or self.owner is None:
            return
        assert self._worker is not None
        for fields in self._receiver.take():
            number, nbytes = fields[3], fields[8]
            group = self.groups[number]
            if fields[0] == Kind.LARGE:
                self._fetch(group, nbytes)
                continue
            del self.groups[number]
            self.rows -= group.rows
            if group is self._trials.tried:
                self._trials.tried = None
            self._worker.has_answered = True
            self.owner.answered(self, group, fields)

    def _fetch(self, group: RequestGroup, nbytes: int) -> None:
        """Allocate a block for an answer that does not fit into its group's, and request the answer."""
        assert self.owner is not None
        assert self._sender is not None
        block = self.owner.room_for(group, nbytes) if group.left else None
        if block is None:
            self.cancel(group)
            return
        self._sender.put(Kind.FETCH, 0, 0, group.number, NO_DEADLINE_NS, block, 0, 0, 0, 0)
        self._sender.publish()

    # Hangs.

    def _look_after(self) -> None:
        """Check the worker; end it if its event loop has not run for the batch_timeout."""
        self._look = self._loop.call_later(LOOK_S, self._look_after)
        if self._sender is None or self._worker is None or self._worker.process is None:
            return
        now_ns, beat_ns, limit_s = clock.now_ns(), self._sender.beat_ns, self._options.batch_timeout
        # If this process was stopped too (Ctrl-Z), it cannot know how long the worker was silent.
        seen_ns = min(now_ns - self._looked_ns, int(LOOK_S * 1e9))
        self._silent_ns = self._silent_ns + seen_ns if beat_ns == self._beat_ns else 0
        self._looked_ns, self._beat_ns = now_ns, beat_ns
        if limit_s is not None and self._silent_ns > max(limit_s, SILENCE_S_MIN) * 1e9:
            silent_s = self._silent_ns / 1e9
            why = f"its event loop had not run for {silent_s:.1f} s (batch_timeout is {limit_s:g} s)"
            self._end(self._worker, why)


def _joined(one: Statistics | None, other: Statistics | None) -> Statistics | None:
    return one.joined(other) if one is not None and other is not None else one or other


def _opening_error(candidate: Candidate, how: str) -> Exception:
    """Return why the engine could not be opened: the worker's own error, or that it died."""
    error = candidate.error
    if isinstance(error, AsynctrtError):
        return copy_for(error)
    return error or DeviceLostError(f"the worker {how} while it opened the engine")
