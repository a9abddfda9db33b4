"""Carries out what the scheduler decides, on one device. It decides nothing itself.

The path of a request: :meth:`Driver.submit` queues it and schedules a pump for the end of the tick, when all
requests of the tick have been queued. :meth:`_pump` launches the batches that the scheduler decides on.
:meth:`_start` stages a batch and puts it on its context's stream. When the batch ends, the reaper calls
:meth:`_landed`, which copies the outputs out, frees the context, launches the next batch and answers the
callers.
"""

import asyncio
import contextvars
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final

from asynctrt._util.alarm import Alarm
from asynctrt._util.loops import in_thread
from asynctrt.backends.base import Model
from asynctrt.devices.base import Device
from asynctrt.devices.host import raise_on_loop
from asynctrt.errors import (
    AsynctrtError,
    DeviceLostError,
    DeviceMemoryError,
    EngineClosedError,
    ExecutionError,
    InternalError,
    copy_for,
    describe,
)
from asynctrt.runtime import staging
from asynctrt.runtime.answers import answer_error, deadline_error, displaced_error, typed_errors
from asynctrt.runtime.completion import Reaper
from asynctrt.runtime.contexts import ComputeOrder, ContextPool
from asynctrt.runtime.inflight import InFlight
from asynctrt.runtime.jobs import Copiers, Jobs, SharedWork
from asynctrt.runtime.results import ResultMemory
from asynctrt.runtime.spans import copy_out, fills, outputs_of
from asynctrt.runtime.staging import RowSource, Slab
from asynctrt.scheduling.batch import Batch, RejectedBatch
from asynctrt.scheduling.key import BatchKey
from asynctrt.scheduling.request import NO_DEADLINE_NS, Request, holds
from asynctrt.scheduling.scheduler import Scheduler
from asynctrt.tensors import Array, BatchRecord, InferResult, restore_axes

GROW_ON_LOOP_NBYTES_MAX: Final = 256 << 10
"""The event loop allocates a slab of up to this size itself, unless it is pinned memory, which takes at least
0.6 ms, and 29 ms for 64 MiB (H200)."""

COPY_ON_LOOP_NBYTES_MAX: Final = 4 << 20
"""Outputs of more bytes than this are copied out in another thread: copying them would hold the loop up for
longer than handing them to a thread and back does (``tests/benchmarks/copies.py``)."""

GATHER_ON_LOOP_NBYTES_MAX: Final = 16 << 20
"""The same limit for copying rows into a batch. Such copies release the GIL for only a few µs per row, and
threads that wait for it after each row hold the loop up for longer than the copy itself (1.5 ms for 16
MiB)."""

STAGE_ON_LOOP_NBYTES_MAX: Final = 128 << 10
"""The same limit for a batch that a thread enqueues in any case: that thread can stage it as well."""

PUMP_NS_MAX: Final = 1_000_000
"""A pump that runs batches on the loop's thread returns to the loop after this long."""

logger = logging.getLogger("asynctrt")


class Driver:
    """Drives one scheduler and one pool on one event loop.

    :param rows_first: answer with rows first, whatever axis of an output counts rows.
    """

    def __init__(
        self,
        *,
        loop: asyncio.AbstractEventLoop,
        scheduler: Scheduler,
        pool: ContextPool,
        now_ns: Callable[[], int],
        model: Model,
        device: Device,
        batch_timeout_ns: int | None,
        bisects: bool,
        rows_first: bool = False,
    ) -> None:
        self._loop = loop
        self._create_future = loop.create_future
        # A model that runs on the loop's thread must not see the context variables of the first caller.
        self._context = contextvars.copy_context()
        self._scheduler = scheduler
        self._queue = scheduler.queue
        self._open = scheduler.queue.open
        self._pool = pool
        self._now_ns = now_ns
        self._name = repr(model.name)
        # Outputs that are answered with their rows on another axis than the first.
        self._moved = () if rows_first else tuple(spec for spec in model.outputs if spec.axis != 0)
        self._device = device
        self._batch_timeout_ns = batch_timeout_ns
        self._bisects = bisects
        self.lost: DeviceLostError | None = None
        """Why no batch can ever run here again; ``None`` as long as batches can."""
        # Whether any caller has named outputs so far. If none has, batches need not be searched for names.
        self._names_outputs = False
        self._pump_is_scheduled = False
        self._tick_ns = 0  # When the pump was scheduled.
        self._in_pump = False
        self._pumped_ns = 0
        self._flights: dict[InFlight, None] = {}  # In the order of their launch.
        # Batches for which a thread allocates memory.
        self._growing: list[Batch] = []
        self._lanes = [ComputeOrder() for _ in range(scheduler.lanes_max)]
        # Batches that were given up: the device may still read and write their memory.
        self._given_up: set[InFlight] = set()
        self._results = ResultMemory()
        self._to_deliver: tuple[Sequence[Request], Sequence[dict[str, Any]], BatchRecord] | None = None
        self._joining = 0  # How many calls' answers are being joined.
        self._idle_waiters: list[asyncio.Future[None]] = []
        self.on_answer: list[Callable[[InFlight], None]] = []
        """Called with each answered batch, just before its callers get their results; must not raise."""
        self.on_launch: Callable[[Batch], None] | None = None
        """Called with each batch before its rows are touched; must not raise."""
        # The requests that are being answered.
        self._answering: Sequence[Request] = ()
        self._reaper = Reaper(loop, now_ns, context=self._context, on_interrupt=self._interrupted)
        try:
            self._alarm = Alarm(loop, self._pump, context=self._context)
        except BaseException:
            self._reaper.close()
            raise
        self._copiers = Copiers(self._reaper, now_ns)
        # One call's answers are joined at a time: several threads gain nothing, and slow the loop down.
        self._join_turn = asyncio.Lock()
        # A thread for each context, and threads that help to stage a batch.
        threads_max = len(pool.contexts) + self._copiers.parts_max - 1
        self._enqueuers = Jobs("asynctrt-enqueue", threads_max, self._reaper, now_ns)
        self._forget_arenas: list[Callable[[], object]] = []
        for number, arena in enumerate(pool.arenas):
            avoid = partial(self._avoid, number)
            arena.on_given_up.append(avoid)
            self._forget_arenas.append(partial(arena.on_given_up.remove, avoid))

    def __repr__(self) -> str:
        return f"<Driver {self._name} {self._scheduler!r}>"

    def submit(
        self,
        payload: Any,
        rows: int,
        key: BatchKey,
        priority: int,
        timeout_ns: int | None,
        future: asyncio.Future[InferResult] | None = None,
        outputs: frozenset[str] | None = None,
    ) -> Request:
        """Queue rows. Raises as :meth:`Queue.submit` does, with nothing changed.

        :param outputs: the names of the outputs that the caller wants; ``None`` for all.
        """
        if future is None:
            future = self._create_future()
        now_ns = self._now_ns()
        deadline_ns = NO_DEADLINE_NS if timeout_ns is None else now_ns + timeout_ns
        request = Request(rows, key, priority, now_ns, deadline_ns, payload, future)
        if outputs is not None:
            request.outputs = outputs
            self._names_outputs = True
        self._do_queue(now_ns, self._queue.submit, request)
        return request

    def _do_queue(self, now_ns: int, queue: Callable[..., None], *what: Any) -> None:
        """Queue requests, and schedule a pump for the end of the tick."""
        try:
            queue(*what)
            if not self._pump_is_scheduled:
                self._loop.call_soon(self._pump, context=self._context)
                self._pump_is_scheduled = True
                self._tick_ns = now_ns
        except Exception:
            raise
        except BaseException as error:
            self._interrupted(error)
            raise

    def submit_plain(
        self, payload: Any, key: BatchKey, future: asyncio.Future[InferResult] | None = None
    ) -> asyncio.Future[InferResult]:
        """Queue a row without a deadline, a priority or a choice of outputs; raises as :meth:`submit` does.

        If it has the key of the open batch, it joins that: nothing is decided until the pump runs.
        """
        if future is None:
            future = self._create_future()
        opened = self._open
        if key is opened.joins and len(opened.entries) < opened.length_max:
            opened.entries.append((future, payload, opened.arrival_ns))  # As `join`, without the call.
        else:
            try:
                if not self._pump_is_scheduled:
                    self.pump_soon()
                # All requests of a tick arrived when its first one did.
                self._queue.submit_plain(key, future, payload, self._tick_ns)
            except Exception:
                raise
            except BaseException as error:
                self._interrupted(error)
                raise
        return future

    def submit_parts(
        self,
        parts: Sequence[tuple[Any, int]],
        key: BatchKey,
        priority: int,
        timeout_ns: int | None,
        outputs: frozenset[str] | None = None,
    ) -> list[Request]:
        """Queue all parts, each a payload and its rows, or none."""
        now_ns = self._now_ns()
        deadline_ns = NO_DEADLINE_NS if timeout_ns is None else now_ns + timeout_ns
        requests = [
            Request(rows, key, priority, now_ns, deadline_ns, payload, self._create_future())
            for payload, rows in parts
        ]
        if outputs is not None:
            self._names_outputs = True
            for request in requests:
                request.outputs = outputs
        self._do_queue(now_ns, self._queue.submit, *requests)
        return requests

    def cancel(self, request: Request) -> None:
        """Take the request of a caller who has gone away out of the queue, or mask it if it is in flight."""
        if self._scheduler.cancel(request):
            self._bury(request)

    def cancel_plain(self, future: asyncio.Future[InferResult]) -> None:
        """Do the same as :meth:`cancel` for what :meth:`submit_plain` queued."""
        if not future.done():
            future.cancel()
        if not future.cancelled() or (self._to_deliver is not None and holds(self._to_deliver[0], future)):
            return  # It is answered, or counts as answered.
        request = self._scheduler.cancel_plain(future)
        if request is not None:
            self._bury(request)

    def _bury(self, request: Request) -> None:
        """Drop what a request holds that was cancelled in the queue: its tombstone stays for a while."""
        request.payload = request.future = None
        self._tell_if_idle()

    async def wait_idle(self) -> None:
        """Return when nothing is queued and nothing is in flight."""
        while not self._is_idle:
            await self.next_idle()

    @property
    def _is_idle(self) -> bool:
        """Whether nothing is queued or in flight, and no answers are being joined."""
        return self._scheduler.is_idle and not self._joining

    @contextmanager
    def joining(self) -> Iterator[None]:
        """Until the end of the block, this is not idle: it waits for the parts of a call, and joins them."""
        self._joining += 1
        try:
            yield
        finally:
            self._joining -= 1
            self._tell_if_idle()

    async def join_in_thread(self, join: Callable[[], InferResult]) -> InferResult:
        """Join the answers to the parts of a call in another thread, one call after the other."""
        async with self._join_turn:
            return await in_thread(join)

    def next_idle(self) -> asyncio.Future[None]:
        """Return a future that is done when nothing is queued and nothing is in flight."""
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._idle_waiters.append(waiter)
        self._tell_if_idle()
        return waiter

    def uses(self, slab: Slab) -> bool:
        """Return whether a batch in flight uses a slab."""
        flights = (*self._flights, *self._given_up)
        return any(flight.source.slab is slab for flight in flights)

    def refuse(self, why: AsynctrtError) -> None:
        """Refuse new requests with a copy of ``why``; accepted ones are still answered."""
        self._queue.refuse(why)

    def fail_queued(self, why: EngineClosedError) -> None:
        """Refuse new requests and fail the queued ones. Batches in flight go on."""
        for request in self._scheduler.close(why):
            answer_error(request, copy_for(why))
        self._tell_if_idle()

    def close(self) -> None:
        """Fail batches that are still in flight, and never run another. The engine closes the pool."""
        self._reaper.close()
        self._alarm.close()
        for forget in self._forget_arenas:
            forget()
        self._forget_arenas.clear()
        if self._scheduler.room.share is not None:
            self._scheduler.room.share.leave()
        while self._growing:
            self._fail(self._growing.pop(), EngineClosedError(f"{self._name} is closed"))
        for flight in self._flights:
            # Do this before anything is freed: freeing memory must not wait for these batches.
            self._device.abandon(flight.context.stream)
        for flight in tuple(self._flights):
            flight.context.stream.abandon()
            arena = flight.context.arena
            if arena is not None and flight.context.is_enqueueing:
                arena.give_up()  # No callback will report that the thread has finished.
            error = DeviceLostError(
                f"batch {flight.batch.number} of {self._name} did not end within the close_timeout of its "
                "engine. What it uses stays allocated until it does; if that is never, only a new process "
                "helps"
            )
            self._fail(flight.batch, error, flight, quarantine=True)
        # A caller may keep the closed engine, but not this memory.
        self._results = ResultMemory()
        self.on_answer.clear()

    def end_threads(self, timeout_s: float) -> None:
        """End the threads, after :meth:`close`. Blocks, for up to ``timeout_s`` each for copying and
        enqueueing."""
        self._copiers.close(timeout_s)
        self._enqueuers.close(timeout_s)

    def pump_soon(self) -> None:
        """Schedule a pump for the end of the tick."""
        if not self._pump_is_scheduled:
            self._loop.call_soon(self._pump, context=self._context)
            self._pump_is_scheduled = True
            self._tick_ns = self._now_ns()

    def _pump(self) -> None:
        """Carry out what the scheduler decides, until it has nothing more to launch now."""
        if self._in_pump:
            return
        try:
            self._in_pump = True
            self._pump_is_scheduled = False
            self._launch_all()
        except Exception:
            raise
        except BaseException as error:
            self._interrupted(error)
            raise
        finally:
            self._in_pump = False
        if self._idle_waiters:
            self._tell_if_idle()

    def _launch_all(self) -> None:
        scheduler, queue, again, opened = self._scheduler, self._queue, self._scheduler.again, self._open
        started_ns = now_ns = self._now_ns()
        if queue.has_to_expire:
            # Requests that came after the last pump get a chance to be launched before they can expire.
            self._give_up_waiting(now_ns, self._pumped_ns)
        self._pumped_ns = started_ns
        while opened.entries or queue.rows or again.parts:
            if (decided := scheduler.next_batch(now_ns)) is None:
                break
            if isinstance(decided, Batch):
                self._start(decided)
            else:
                self._reject(decided)
            now_ns = self._now_ns()
            if now_ns - started_ns > PUMP_NS_MAX:
                self.pump_soon()
                return
        if queue.has_to_expire:
            self._give_up_waiting(now_ns)
        has_to_launch = opened.entries or queue.rows or again.parts
        if has_to_launch and (wakeup_ns := scheduler.next_wakeup()) is not None:
            self._alarm.set(wakeup_ns)

    def _give_up_waiting(self, now_ns: int, arrived_by_ns: int = NO_DEADLINE_NS) -> None:
        """Answer requests whose deadline has passed, and requests displaced from a full queue."""
        self._answering = self._queue.expire(now_ns, arrived_by_ns)
        for request in self._answering:
            answer_error(request, deadline_error(request, now_ns))
        self._answering = self._queue.take_displaced()
        for request in self._answering:
            answer_error(request, displaced_error(request))
        self._answering = ()

    def _reject(self, rejected: RejectedBatch) -> None:
        make = typed_errors(self._name, rejected.requests, rejected.error)
        for request in rejected.requests:
            answer_error(request, make())

    def _start(self, batch: Batch, *, has_grown: bool = False) -> None:
        """Stage one batch and put it on its stream. An error fails this batch and no other."""
        flight = None
        try:
            if self._pool.may_grow and not has_grown and self._grow(batch):
                return
            if self.on_launch is not None:
                self.on_launch(batch)
            source = self._source(batch)
            flight = InFlight(batch, self._pool.contexts[batch.context], source)
            self._flights[flight] = None
            self._scheduler.taken = ()
            nbytes = source.staged_nbytes
            if nbytes > STAGE_ON_LOOP_NBYTES_MAX and self._hand_over_unstaged(flight):
                return
            if nbytes > GATHER_ON_LOOP_NBYTES_MAX:
                parts = source.parts(self._copiers.parts_max)
                done = partial(self._staged_off_loop, flight, len(parts))
                self._copiers.copy_in_parts(parts, nbytes, done, flight.hold)
            else:
                source.stage()
                self._staged(flight)
        except Exception as error:
            self._fail(batch, error, flight)
        except BaseException as error:
            if flight is None or flight.is_out_of_hand or flight not in self._flights:
                raise  # A thread or the device may go on using its memory, and nothing reports the end.
            # Most of the time goes into staging, and Ctrl-C there fails this batch alone.
            self._fail(batch, error, flight)
            raise_on_loop(error)

    def _source(self, batch: Batch) -> RowSource:
        """Return where a batch's rows come from."""
        source = self._pool.source(batch)
        if self._names_outputs:
            source.wanted, differ = outputs_of(batch.requests)
            source.is_cut = source.is_cut or differ
        return source

    def _grow(self, batch: Batch) -> bool:
        """Have a thread allocate a slab, if that would hold the loop up; return whether one does."""
        nbytes = self._pool.missing_nbytes(batch)
        if not nbytes or (nbytes <= GROW_ON_LOOP_NBYTES_MAX and self._device.unified):
            return False
        self._copiers.copy(self._pool.growth(batch), nbytes, partial(self._grown, batch))
        self._growing.append(batch)
        return True

    def _grown(self, batch: Batch, error: BaseException | None) -> None:
        """Start a batch whose slab has been allocated."""
        if batch not in self._growing:
            return
        self._growing.remove(batch)
        if error is not None:
            self._fail(batch, error)
        else:
            self._start(batch, has_grown=True)

    def _staged_off_loop(self, flight: InFlight, parts: int, error: BaseException | None) -> None:
        """Enqueue a batch whose rows were copied by other threads; if they failed, copy them again in one."""
        if flight not in self._flights:
            return
        if error is not None and parts > 1:
            source = flight.source
            done = partial(self._staged_off_loop, flight, 1)
            self._copiers.copy(source.stage, source.staged_nbytes, done, flight.hold)
        elif error is not None:
            self._fail(flight.batch, error, flight)
        else:
            self._staged(flight)

    def _staged(self, flight: InFlight) -> None:
        """Put a staged batch on its stream, from here or from a thread, and await its end."""
        batch = flight.batch
        flight.record.copy_in_ns = self._now_ns() - batch.launched_ns
        if flight.source.refused:
            self._tell_refused(flight)
        if not flight.context.is_direct and self._hand_over(flight):
            return
        self._enqueue(flight)
        self._await_end(flight)
        if flight.error is not None and not isinstance(flight.error, Exception):
            # Ctrl-C belongs to the application; the batch on the stream runs on.
            raise_on_loop(flight.error)

    def _tell_refused(self, flight: InFlight) -> None:
        """Answer the requests whose rows could not be staged."""
        refused, flight.source.refused = flight.source.refused, ()
        for request, error in refused:
            self._scheduler.fail_one(request)
            answer_error(request, error)

    def _hand_over_unstaged(self, flight: InFlight) -> bool:
        """Have a thread stage a batch, with other threads to help, and then put it on its stream.

        :returns: False if no thread is needed or available, or if the batch may have to wait for a thread
            in its arena.
        """
        context, source = flight.context, flight.source
        if context.is_direct or context.arena is not None or not context.may_block(source):
            return False
        parts = SharedWork(source.parts(self._copiers.parts_max))
        work = partial(self._stage_and_enqueue, flight, parts)
        if not self._enqueue_in_thread(flight, work, self._staged_and_enqueued):
            return False
        for _ in range(len(parts) - 1):
            self._enqueuers.assist(parts.help)
        return True

    def _enqueue_in_thread(
        self,
        flight: InFlight,
        work: Callable[[], None],
        done: Callable[[InFlight, BaseException | None], None],
    ) -> bool:
        """Have a thread do ``work``, which puts a batch on its stream, and call ``done`` here when it has.

        :returns: False if the system refused to start a thread (ulimit -u). Enqueueing here may hold the loop
            up, but only for as long as the device takes.
        """
        context, arena = flight.context, flight.context.arena
        context.is_enqueueing = True
        if arena is not None:
            arena.is_enqueueing = True
        try:
            self._enqueuers.submit(
                work,
                partial(done, flight),
                hung_after_ns=self._batch_timeout_ns,
                on_hung=partial(self._hung, flight),
                hold=flight.hold,
            )
        except BaseException as error:
            context.is_enqueueing = False
            flight.job = None
            if arena is not None:
                arena.is_enqueueing = False
            if isinstance(error, RuntimeError):
                return False
            raise
        return True

    def _stage_and_enqueue(self, flight: InFlight, parts: SharedWork) -> None:
        """Stage a batch and put it on its stream, in a thread; keep any error with the batch."""
        try:
            self._device.activate()
            try:
                parts.do()
            except Exception:
                flight.source.stage()  # This finds the requests whose rows cannot be staged.
        except BaseException as error:
            flight.error = error
            flight.context.is_enqueueing = False
            return
        flight.record.copy_in_ns = self._now_ns() - flight.batch.launched_ns
        self._enqueue(flight)

    def _staged_and_enqueued(self, flight: InFlight, error: BaseException | None) -> None:
        """Await the end of a batch that a thread staged and enqueued; fail it if the thread could not."""
        if flight.put_ns is None and flight in self._flights:
            self._fail(
                flight.batch,
                flight.take_error() or error or InternalError(f"{flight.batch!r} was not staged"),
                flight,
            )
            return
        if flight in self._flights:
            self._tell_refused(flight)
        self._enqueued(flight, error)

    def _hand_over(self, flight: InFlight) -> bool:
        """Have a thread put a batch on its stream; if a thread is already doing so in its arena, wait for it.

        :returns: False if the batch can be put there at once, or has to be because no thread can be started.
        """
        context = flight.context
        arena = context.arena
        if arena is not None and arena.is_given_up:
            self._give_up(
                flight,
                f"batch {flight.batch.number} of {self._name} was not run: another batch in its arena did "
                "not end. No context in that arena is used any more; others go on",
            )
            return True
        if arena is not None and arena.is_enqueueing:
            arena.waiting.append(partial(self._go_on, flight))
            return True
        try:
            if not context.may_block(flight.source):
                return False
        except Exception:
            return False  # `_enqueue` will raise the same, and keep it with the batch.
        return self._enqueue_in_thread(flight, partial(self._enqueue, flight), self._enqueued)

    def _go_on(self, flight: InFlight) -> None:
        """Put a batch on its stream after waiting for another one in its arena."""
        if flight not in self._flights or self._hand_over(flight):
            return
        self._enqueue(flight)
        self._await_end(flight)
        if flight.error is not None and not isinstance(flight.error, Exception):
            raise_on_loop(flight.error)  # Not here: other batches may wait to go on.

    def _enqueue(self, flight: InFlight) -> None:
        """Put a batch on its stream, from the loop or from a thread; keep any error with the batch."""
        context = flight.context
        flight.put_ns = self._now_ns()
        try:
            self._device.activate()
            lane = flight.batch.lane
            context.enqueue(flight.source, flight.events, None if lane is None else self._lanes[lane])
        except BaseException as error:
            # Part of the batch may be on the stream already. Its context is free once that part has run.
            flight.error = error
            if self._device.lost is None:
                try:
                    context.enqueue_end(flight.source, flight.events)
                except Exception as worse:
                    flight.error = _UntrackedError(f"{describe(error)}, and then {describe(worse)}")
                    flight.error.__cause__ = worse
        finally:
            context.is_enqueueing = False

    def _enqueued(self, flight: InFlight, error: BaseException | None) -> None:
        """Await the end of a batch that a thread enqueued, and let batches behind it in its arena go on."""
        flight.error = flight.error or error
        if flight in self._flights:
            self._await_end(flight)
        else:
            # It was given up before. Release what it uses if it does end.
            self._reaper.watch(flight.end, partial(self._landed, flight), expected_ns=None)
        arena = flight.context.arena
        if arena is not None:
            arena.go_on()

    def _await_end(self, flight: InFlight) -> None:
        """Have a batch that is on its stream answered when it is done; it may be done already."""
        end, batch = flight.end, flight.batch
        if isinstance(flight.error, _UntrackedError) and self._device.lost is None:
            self._give_up(
                flight,
                f"batch {batch.number} of {self._name} failed when it was put on its stream, and so did "
                f"marking its end there: {flight.error}. Its context is not used any more, nor are others in "
                "its arena",
            )
        elif end.query() or self._device.lost is not None:
            self._landed(flight)
        else:
            self._reaper.watch(
                end,
                partial(self._landed, flight),
                expected_ns=self._scheduler.started(batch, self._now_ns(), flight.put_ns),
                hung_after_ns=self._batch_timeout_ns,
                on_hung=partial(self._hung, flight),
                order_group=batch.arena,
            )
        if not self._in_pump and self._lanes and self._scheduler.has_to_launch:
            self.pump_soon()  # The scheduler can now say when to launch the next batch.

    def _landed(self, flight: InFlight) -> None:
        """Copy out the outputs of a batch that the device has finished, off the loop if they are large."""
        batch = flight.batch
        if flight not in self._flights:
            # It was given up before, and has now ended: release what it held.
            if flight in self._given_up:
                self._given_up.remove(flight)
                flight.source.ended()
                self._device.ended(flight.context.stream)
            return
        error = self._device.lost or flight.take_error()
        if error is not None:
            self._end_failed(flight, error)
            return
        source = flight.source
        try:
            landed_ns = self._now_ns()
            self._note_end(flight, landed_ns)
            if source.device_outputs is not None:
                self._answer(flight, landed_ns, source.device_outputs)
                return
            outputs, nbytes = flight.outputs()
            if source.is_cut or nbytes > COPY_ON_LOOP_NBYTES_MAX:
                self._cut_out(flight, landed_ns, source.cut(outputs), nbytes)
                return
            values = copy_out(outputs, source.spans, batch.rows, self._results)
        except Exception as raised:
            self._fail(batch, raised, flight)
            return
        self._answer(flight, landed_ns, values)

    def _note_end(self, flight: InFlight, landed_ns: int) -> None:
        """Note that the device has finished a batch."""
        batch, scheduler = flight.batch, self._scheduler
        copies_ns = flight.note_times(scheduler.times)
        if scheduler.room.share is not None:
            scheduler.ran(batch, landed_ns, flight.ran_ns(landed_ns))
        if batch.lane is not None or batch.arena is not None or copies_ns is not None:
            self._leave_lane(flight)
            scheduler.landed(batch, landed_ns, copies_ns)

    def _cut_out(self, flight: InFlight, landed_ns: int, views: list[dict[str, Array]], nbytes: int) -> None:
        """Copy out the outputs of each request of a batch, off the loop if they are large."""
        if nbytes <= COPY_ON_LOOP_NBYTES_MAX:
            self._answer(flight, landed_ns, self._results.copied(views))
            return
        reserved = self._results.reserved(views)
        self._copiers.copy_in_parts(
            fills(reserved, views, nbytes, self._copiers.parts_max),
            nbytes,
            partial(self._copied_out, flight, landed_ns, reserved),
            flight.hold,
        )

    def _leave_lane(self, flight: InFlight) -> None:
        """Let no later batch wait for this one's event, which may be recorded for another batch next."""
        number = flight.batch.lane
        if number is not None and self._lanes[number].last is flight.events.computed:
            self._lanes[number].last = None

    def _end_failed(self, flight: InFlight, error: BaseException) -> None:
        """Have the halves of a batch that failed tried again, or fail it."""
        if self._scheduler.room.share is not None:
            now_ns = self._now_ns()
            self._scheduler.ran(flight.batch, now_ns, flight.ran_ns(now_ns))
        # Errors from the model are not of our types, and fewer rows may fit into memory. Our other errors
        # mean that trying again cannot help: the device is lost, or the engine closed.
        may_help = not isinstance(error, AsynctrtError) or type(error) in (ExecutionError, DeviceMemoryError)
        if self._bisects and may_help and self._device.lost is None and self._scheduler.bisect(flight.batch):
            del self._flights[flight]
            self._leave_lane(flight)
            flight.source.ended()
            self.pump_soon()
            self._tell_if_idle()
        else:
            self._fail(flight.batch, error, flight)

    def _copied_out(
        self,
        flight: InFlight,
        landed_ns: int,
        copied: list[dict[str, Array]],
        error: BaseException | None,
    ) -> None:
        """Answer a batch whose outputs were copied by another thread."""
        if flight not in self._flights:
            return
        if error is not None:
            self._fail(flight.batch, error, flight)
        else:
            self._answer(flight, landed_ns, copied)

    def _answer(self, flight: InFlight, landed_ns: int, outputs: Sequence[dict[str, Any]]) -> None:
        """Free the context, launch the next batch, and answer all callers before any of them continues."""
        batch, record = flight.batch, flight.record
        if self._moved:
            for values in outputs:
                restore_axes(self._moved, values)
        now_ns = self._now_ns()
        record.copy_out_ns += now_ns - landed_ns
        self._answering = batch.requests
        del self._flights[flight]
        flight.source.ended()
        self._scheduler.finished(batch, now_ns, record)
        for notice in self.on_answer:
            notice(flight)
        # The device gets its next batch before callers are answered. Batches are answered in their order.
        if self._to_deliver is not None:
            self._deliver()
        if self._in_pump or not self._scheduler.has_to_launch:
            staging.deliver(batch.requests, outputs, record)
            self._answering = ()
            if self._idle_waiters:
                self._tell_if_idle()
            return
        self._to_deliver = batch.requests, outputs, record
        self._answering = ()
        try:
            self._pump()
        finally:
            self._deliver()

    def _deliver(self) -> None:
        if self._to_deliver is not None:
            staging.deliver(*self._to_deliver)
            self._to_deliver = None

    def _fail(
        self, batch: Batch, error: BaseException, flight: InFlight | None = None, *, quarantine: bool = False
    ) -> None:
        """End a batch with an error for each caller who still waits; other batches go on."""
        self._answering = batch.requests
        if flight is not None:
            self._flights.pop(flight, None)
            self._leave_lane(flight)
        self._scheduler.failed(batch, quarantine=quarantine)
        make = typed_errors(self._name, batch.requests, error)
        for request in batch.requests:
            answer_error(request, make())
        self._answering = ()
        if flight is not None and quarantine:
            self._given_up.add(flight)
        elif flight is not None:
            flight.source.ended()
        lost = self._device.lost
        if lost is None and isinstance(error, DeviceLostError) and not quarantine:
            lost = error
        if lost is not None:
            self._lose(lost)
        elif not quarantine:
            self.pump_soon()
        self._tell_if_idle()

    def _hung(self, flight: InFlight) -> None:
        """Give up a batch that hangs, on the GPU or while it is enqueued, and go on with others."""
        batch = flight.batch
        if flight not in self._flights:
            return  # It was given up together with another batch that hangs.
        assert self._batch_timeout_ns is not None
        self._give_up(
            flight,
            f"batch {batch.number} of {self._name} ({batch.rows} rows, context {batch.context}) did not "
            f"end within the batch_timeout of {self._batch_timeout_ns / 1e9:g} s. Its context is not used "
            "any more, nor are others in its arena, and their memory stays allocated; other contexts go on. "
            "If batches may take that long, open the engine with a larger batch_timeout",
        )

    def _give_up(self, flight: InFlight, why: str) -> None:
        """Fail a batch whose end can no longer be observed, and never reuse its context or memory."""
        error = DeviceLostError(why)
        logger.error("%s", error)
        self._device.abandon(flight.context.stream)
        flight.context.stream.abandon()
        self._fail(flight.batch, error, flight, quarantine=True)
        if flight.context.arena is not None:
            flight.context.arena.give_up()
        self._lose_if_stuck()

    def _avoid(self, arena: int) -> None:
        """Stop using an arena in which a batch of this or another engine hangs."""
        self._scheduler.room.contexts.quarantine_arena(arena)
        self._lose_if_stuck()

    def _lose_if_stuck(self) -> None:
        if self._scheduler.is_stuck:
            self._lose(
                DeviceLostError(
                    f"no context of {self._name} is left: batches on all of them did not end. Only a new "
                    "process helps"
                )
            )
        else:
            self.pump_soon()

    def _lose(self, why: DeviceLostError) -> None:
        """Fail what is queued and in flight, and refuse new requests: nothing can run here any more."""
        if self.lost is not None:
            return
        self.lost = why
        if self._scheduler.room.share is not None:
            self._scheduler.room.share.leave()
        for request in self._scheduler.close(why):
            answer_error(request, copy_for(why))
        for flight in tuple(self._flights):
            self._fail(flight.batch, why, flight, quarantine=True)
        self._tell_if_idle()

    def _interrupted(self, error: BaseException) -> None:
        """Close after Ctrl-C interrupted this object's own work, which may be half done.

        How far the batches in flight have come is unknown, so their contexts and memory are never used again.
        Every caller who waits gets an error.
        """
        if self.lost is not None:
            return
        why = DeviceLostError(
            f"{describe(error)} interrupted the forming, running or answering of batches of {self._name}, "
            "so it cannot go on. Open it again"
        )
        logger.error("%s", why)
        flights = tuple(self._flights)
        grown = [batch.requests for batch in self._growing]
        ready = () if self._to_deliver is None else self._to_deliver[0]
        waiting = [self._scheduler.taken, self._answering, self._queue.displaced, ready, *grown]
        waiting += [flight.batch.requests for flight in flights]
        for flight in flights:
            arena = flight.context.arena
            if arena is not None and flight.context.is_enqueueing:
                arena.give_up()  # No callback may report that the thread has finished.
        try:
            self._lose(why)
        except Exception:
            logger.exception("%s", self._name)  # Half-done work may be inconsistent.
        for requests in waiting:
            for request in requests:
                answer_error(request, copy_for(why))
        self._given_up.update(flights)
        self._flights.clear()
        self._tell_if_idle()

    def _tell_if_idle(self) -> None:
        if self._idle_waiters and (self._is_idle or self.lost is not None):
            waiters, self._idle_waiters = self._idle_waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)


class _UntrackedError(DeviceLostError):
    """The end of a batch could not be marked on its stream, which may still run it."""
