"""The one place where decisions become device work.

A request's way: :meth:`Driver.submit` queues it and asks for a pump at the end of the tick, so that every
request of the tick is there; :meth:`_pump` carries out what the scheduler decides; :meth:`_launch` leases,
gathers and enqueues; the reaper calls :meth:`_landed`, which copies the outputs out, frees the lease, answers
the callers and lets the next batch go.
"""

import asyncio
import itertools
import logging
from collections.abc import Callable, Hashable, Sequence
from functools import partial
from typing import Any, Final

from asynctrt.alarm import create_alarm
from asynctrt.backends.base import Model
from asynctrt.devices.base import Device, Event
from asynctrt.devices.host import HostDevice, cores
from asynctrt.errors import (
    AsynctrtError,
    DeadlineError,
    DeviceLostError,
    EngineClosedError,
    ExecutionError,
)
from asynctrt.runtime import batch
from asynctrt.runtime.placement import place
from asynctrt.runtime.pool import Lease, Pool
from asynctrt.runtime.reaper import Reaper, Waiting
from asynctrt.runtime.slots import SlabRows, SlotSlab
from asynctrt.scheduling.ledger import Launch
from asynctrt.scheduling.request import NO_DEADLINE_NS, Request
from asynctrt.scheduling.scheduler import Scheduler
from asynctrt.tensors import BUCKET_FIXED, Array, BatchRecord, DeviceBucket, InferResult

COPY_ON_LOOP_NBYTES_MAX: Final = 4 << 20
"""A batch with more bytes than this is copied in another thread, in or out. Measured: 4 MiB hold the loop for
100 µs, 16 MiB for 530; a thread holds it for 40 and adds 200 to the batch's latency."""

COPIERS: Final = min(cores(), 4)
"""Threads that copy off the loop, each started when it is needed. One copies 6 to 13 GB/s, four copy 20."""

PUMP_NS_MAX: Final = 1_000_000
"""A pump that runs batches in place gives the loop back after this long."""

logger = logging.getLogger("asynctrt")


class _Flight:
    """A batch under way."""

    __slots__ = ("error", "is_timed", "launch", "lease", "owner", "rows", "spans")

    def __init__(
        self,
        launch: Launch,
        lease: Lease,
        spans: list[slice] | None,
        rows: int,
        owner: SlotSlab | None,
    ) -> None:
        self.launch = launch
        self.lease = lease
        self.spans = spans
        self.rows = rows
        self.owner = owner
        self.is_timed = False
        self.error: BaseException | None = None

    def end(self) -> None:
        """The device has done with it: others may have what it used."""
        self.lease.release()
        if self.owner is not None:
            self.owner.ended()


class Driver:
    """Drives one scheduler and one pool on one event loop."""

    def __init__(
        self,
        *,
        loop: asyncio.AbstractEventLoop,
        scheduler: Scheduler,
        pool: Pool,
        now_ns: Callable[[], int],
        model: Model,
        device: Device,
        waiting: Waiting,
        batch_timeout_ns: int | None,
        admitted: Callable[[Hashable, int], int] | None,
    ) -> None:
        self._loop = loop
        self._create_future = loop.create_future
        self._scheduler = scheduler
        self._pool = pool
        self._now_ns = now_ns
        self._rows_fixed = model.rows_fixed
        self._admitted = admitted
        self._name = repr(model.name)
        self._device = device
        self._times_all = device.timing_is_free
        self._batch_timeout_ns = batch_timeout_ns
        self.lost: DeviceLostError | None = None
        """Why no batch can run here ever again, once that is so."""
        self._pump_is_scheduled = False
        self._in_pump = False
        self._flights: dict[int, _Flight] = {}
        self._endless: list[tuple[_Flight, list[Any]]] = []
        self._idle_waiters: list[asyncio.Future[None]] = []
        self.observe: Callable[[Launch, BatchRecord, int], None] | None = None
        """Called with each batch that is answered, and the time; it must not raise."""
        self._reaper = Reaper(loop, now_ns, waiting=waiting)
        scheduler.latency.direct_ns = pool.direct_ns
        scheduler.latency.graph_ns = pool.graph_ns
        self._alarm = create_alarm(loop, self._pump, now_ns)
        self._host = HostDevice(threads=COPIERS, in_place="never", name="asynctrt-copy", now_ns=now_ns)
        self._copiers = [self._host.create_stream() for _ in range(COPIERS)]
        self._next_copier = itertools.cycle(self._copiers)

    def __repr__(self) -> str:
        return f"<Driver {self._name} {self._scheduler!r}>"

    def submit(
        self,
        payload: Any,
        rows: int,
        bucket: Hashable,
        priority: int,
        timeout_ns: int | None,
        future: asyncio.Future[InferResult] | None = None,
    ) -> Request:
        """Queue rows. Raises as :meth:`Scheduler.submit` does, with nothing changed."""
        # The hottest lines there are: what `_request` and `_schedule_pump` do, without the two calls.
        now_ns = self._now_ns()
        deadline_ns = NO_DEADLINE_NS if timeout_ns is None else now_ns + timeout_ns
        if future is None:
            future = self._create_future()
        request = Request(rows, bucket, priority, now_ns, deadline_ns, payload, future)
        self._scheduler.submit(request)
        if not self._pump_is_scheduled:
            self._pump_is_scheduled = True
            self._loop.call_soon(self._pump)
        return request

    def submit_parts(
        self,
        parts: Sequence[tuple[Any, int]],
        bucket: Hashable,
        priority: int,
        timeout_ns: int | None,
    ) -> list[Request]:
        """Queue all parts, each a payload and its rows, or none."""
        requests = [self._request(payload, rows, bucket, priority, timeout_ns) for payload, rows in parts]
        self._scheduler.submit_all(requests)
        self._schedule_pump()
        return requests

    def cancel(self, request: Request) -> None:
        """The caller has gone away: drop its request from the queue, or mask it in flight."""
        if self._scheduler.cancel(request):
            self._tell_if_idle()

    async def wait_idle(self) -> None:
        """Return when nothing is queued and nothing is in flight."""
        while not self._scheduler.is_idle:
            waiter = self._loop.create_future()
            self._idle_waiters.append(waiter)
            await waiter

    def refuse(self, why: AsynctrtError) -> None:
        """Take no new request; answer those there are."""
        self._scheduler.refuse(why)

    def fail_queued(self, why: EngineClosedError) -> None:
        """Take no new request, and fail those that are queued. What is in flight goes on."""
        for request in self._scheduler.close(why):
            self._answer_error(request, type(why)(*why.args))
        self._tell_if_idle()

    def close(self) -> None:
        """Fail what is still in flight, and never run again. The pool is the engine's to close."""
        self._reaper.close()
        self._alarm.close()
        for flight in list(self._flights.values()):
            error = DeviceLostError(
                f"batch {flight.launch.number} of {self._name} did not end within the close_timeout of its "
                "engine. What it uses stays allocated until it does; if that is never, only a new process "
                "helps"
            )
            self._fail(flight.launch, error, quarantine=True)

    def end_copies(self, timeout_s: float) -> None:
        """After :meth:`close`: end the threads that copied off the loop. Blocks, up to ``timeout_s`` each."""
        for copier in self._copiers:
            copier.close(timeout_s)

    def _request(
        self, payload: Any, rows: int, bucket: Hashable, priority: int, timeout_ns: int | None
    ) -> Request:
        now_ns = self._now_ns()
        deadline_ns = NO_DEADLINE_NS if timeout_ns is None else now_ns + timeout_ns
        future = self._loop.create_future()
        return Request(rows, bucket, priority, now_ns, deadline_ns, payload, future)

    def _schedule_pump(self) -> None:
        if not self._pump_is_scheduled:
            self._pump_is_scheduled = True
            self._loop.call_soon(self._pump)

    def _pump(self) -> None:
        """Carry out what the scheduler decides, until it has nothing more to launch now."""
        if self._in_pump:
            return
        self._in_pump = True
        self._pump_is_scheduled = False
        scheduler = self._scheduler
        started_ns = now_ns = self._now_ns()
        try:
            for request in scheduler.expire(now_ns):
                self._answer_error(request, _deadline_error(request, now_ns))
            while (launch := scheduler.next_launch(now_ns)) is not None:
                self._launch(launch)
                now_ns = self._now_ns()
                if now_ns - started_ns > PUMP_NS_MAX:
                    self._schedule_pump()
                    return
            wakeup_ns = scheduler.next_wakeup()
            if wakeup_ns is not None:
                self._alarm.set(wakeup_ns)
        finally:
            self._in_pump = False
        self._tell_if_idle()

    def _launch(self, launch: Launch) -> None:
        """Lease, gather and enqueue one batch. Whatever goes wrong fails this batch and no other."""
        payload = launch.requests[0].payload
        spans: list[slice] | None
        try:
            if isinstance(payload, SlabRows):
                owner = payload.owner
                is_timed = self._times_all or self._wants_times(launch)
                lease = self._pool.lease(launch, owner.slab, is_timed=is_timed)
                spans = [request.payload.span for request in launch.requests]
                # Rows of slots that were left behind or given up lie between: they run, unseen.
                rows = self._rows_fixed or max(span.stop for span in spans)
                if self._admitted is not None:
                    rows = self._admitted(launch.bucket, rows)
                launch.rows_run = rows
                flight = _Flight(launch, lease, spans, rows, owner)
                self._flights[launch.number] = flight
                owner.launched()
                self._enqueue(flight)
            else:
                one_row_each = launch.rows == len(launch.requests)
                spans = None if one_row_each else batch.spans_of(launch.requests)
                rows = self._rows_fixed or launch.rows
                if self._admitted is not None:
                    rows = self._admitted(launch.bucket, rows)
                if self._pool.graph_sizes and launch.bucket == BUCKET_FIXED:
                    rows = self._scheduler.rows_to_run(launch, rows, self._pool.graph_sizes)
                launch.rows_run = rows
                is_timed = self._times_all or self._wants_times(launch)
                lease = self._pool.lease(launch, None, is_timed=is_timed)
                flight = _Flight(launch, lease, spans, rows, None)
                self._flights[launch.number] = flight
                self._gather(flight)
        except Exception as error:
            self._fail(launch, error)

    def _gather(self, flight: _Flight) -> None:
        """Copy the rows into the slab, off the loop if they are many bytes, and enqueue the batch."""
        launch, slab = flight.launch, flight.lease.slab
        if isinstance(launch.bucket, DeviceBucket):
            flight.lease.placement = place(
                launch.requests,
                slab,
                device=self._device,
                stream=flight.lease.bay.stream,
                has_outputs=launch.bucket.has_outputs,
            )
            self._enqueue(flight)
            return
        nbytes = slab.layout.input_row_nbytes * launch.rows
        if nbytes > COPY_ON_LOOP_NBYTES_MAX:
            copy = partial(batch.gather, launch.requests, slab.inputs, launch.rows)
            self._copy_off_loop(copy, nbytes, partial(self._gathered, flight))
        else:
            batch.gather(launch.requests, slab.inputs, launch.rows)
            flight.lease.record.copy_in_ns = self._now_ns() - launch.launched_ns
            self._enqueue(flight)

    def _gathered(self, flight: _Flight, copied: Event) -> None:
        """The rows are in the slab, copied by another thread."""
        if flight.launch.number not in self._flights:
            return
        flight.lease.record.copy_in_ns = self._now_ns() - flight.launch.launched_ns
        if copied.error is not None:
            self._fail(flight.launch, copied.error)
        else:
            self._enqueue(flight)

    def _enqueue(self, flight: _Flight) -> None:
        lease, launch = flight.lease, flight.launch
        try:
            self._device.activate()
            lease.enqueue(flight.rows)
        except Exception as error:
            # Part of the batch may be on the stream already: the lease ends when that has run.
            flight.error = error
            if self._device.lost is None:
                lease.enqueue_end()
        end = lease.end
        if end.query() or self._device.lost is not None:
            self._landed(flight)
        else:
            self._reaper.watch(
                end,
                partial(self._landed, flight),
                expected_ns=self._scheduler.timeline.launched(launch, self._now_ns()),
                hung_after_ns=self._batch_timeout_ns,
                on_hung=partial(self._hung, flight),
                lane=launch.arena,
            )

    def _landed(self, flight: _Flight) -> None:
        """The device is done with a batch: copy its outputs out, off the loop if they are many bytes."""
        lease, launch = flight.lease, flight.launch
        if launch.number not in self._flights:
            return  # It was given up before, and has ended after all.
        error = flight.error or lease.error() or self._device.lost
        if error is not None:
            self._fail(launch, error)
            return
        timeline = self._scheduler.timeline
        rows = launch.rows if flight.owner is None else flight.rows
        nbytes = lease.slab.layout.output_row_nbytes * rows
        try:
            landed_ns = self._now_ns()
            copies = lease.note_times()
            if copies is None:
                self._note_usual_times(flight)
            else:
                flight.is_timed = True
                if copies[0] or copies[1]:
                    timeline.timed(launch, copy_in_ns=copies[0], copy_out_ns=copies[1])
            if launch.arena is not None:
                timeline.landed(launch, landed_ns)
            if lease.placement is not None and lease.placement.outputs is not None:
                self._answer(flight, landed_ns, lease.placement.outputs)
                return
            outputs = lease.outputs(flight.rows)
            if nbytes > COPY_ON_LOOP_NBYTES_MAX:
                reserved = batch.reserve(outputs, flight.spans, rows)
                self._copy_off_loop(
                    partial(batch.fill, reserved, outputs, flight.spans),
                    nbytes,
                    partial(self._copied_out, flight, landed_ns, reserved),
                )
                return
            shared = nbytes <= batch.SHARED_NBYTES_MAX
            values = batch.copy_out(outputs, flight.spans, rows, shared=shared)
        except Exception as raised:
            self._fail(launch, raised)
            return
        self._answer(flight, landed_ns, values)

    def _wants_times(self, launch: Launch) -> bool:
        return self.observe is not None or self._scheduler.timeline.wants_times(launch)

    def _note_usual_times(self, flight: _Flight) -> None:
        """The device took no times of this batch: note those that it took of others of its size."""
        record = flight.lease.record
        usual_ns = self._scheduler.timeline.usual_ns(flight.launch)
        record.copy_in_ns += usual_ns[0]
        record.compute_ns, record.copy_out_ns = usual_ns[1:]

    def _copied_out(
        self,
        flight: _Flight,
        landed_ns: int,
        copied: list[dict[str, Array]],
        done: Event,
    ) -> None:
        """The outputs were copied by another thread."""
        if flight.launch.number not in self._flights:
            return
        if done.error is not None:
            self._fail(flight.launch, done.error)
        else:
            self._answer(flight, landed_ns, copied)

    def _answer(self, flight: _Flight, landed_ns: int, outputs: Sequence[dict[str, Any]]) -> None:
        """Free the lease, answer the callers, and let the next batch go before any of them runs on."""
        lease, launch = flight.lease, flight.launch
        record = lease.record
        now_ns = self._now_ns()
        record.copy_out_ns += now_ns - landed_ns
        del self._flights[launch.number]
        flight.end()
        self._scheduler.complete(
            launch,
            now_ns,
            copy_in_ns=record.copy_in_ns,
            compute_ns=record.compute_ns,
            copy_out_ns=record.copy_out_ns,
            arena_wait_ns=record.arena_wait_ns,
            is_timed=flight.is_timed,
        )
        if self.observe is not None:
            self.observe(launch, record, now_ns)
        batch.deliver(launch.requests, outputs, record)
        self._pump()

    def _fail(self, launch: Launch, error: BaseException, *, quarantine: bool = False) -> None:
        """End a batch with an error for each caller that still waits; the next batch goes on."""
        flight = self._flights.pop(launch.number, None)
        if flight is not None and quarantine:
            # What a batch without an end uses may still be read and written: its lease never ends.
            self._endless.append((flight, [request.payload for request in launch.requests]))
        elif flight is not None:
            flight.end()
        self._scheduler.fail(launch, quarantine=quarantine)
        for request in launch.requests:
            self._answer_error(request, self._typed(launch, error))
        lost = self._device.lost
        if lost is None and isinstance(error, DeviceLostError) and not quarantine:
            lost = error
        if lost is not None:
            self._lose(lost)
        elif not quarantine:
            self._schedule_pump()
        self._tell_if_idle()

    def _hung(self, flight: _Flight) -> None:
        """A batch that does not end: give up its context and its arena, and go on with the others."""
        launch = flight.launch
        if launch.number not in self._flights:
            return  # Another one that hangs took it along.
        assert self._batch_timeout_ns is not None
        error = DeviceLostError(
            f"batch {launch.number} of {self._name} ({launch.rows} rows, context {launch.context}) did not "
            f"end within the batch_timeout of {self._batch_timeout_ns / 1e9:g} s. Its context is not used "
            "any more, nor are others in its arena, and their memory stays allocated; other contexts go on. "
            "If batches may take so long, open the engine with a larger batch_timeout"
        )
        logger.error("%s", error)
        self._device.abandon()
        self._fail(launch, error, quarantine=True)
        if self._scheduler.is_stuck:
            self._lose(
                DeviceLostError(
                    f"no context of {self._name} is left: batches on all of them did not end. Only a new "
                    "process helps"
                )
            )
        else:
            self._schedule_pump()

    def _lose(self, why: DeviceLostError) -> None:
        """Nothing can run here any more: fail what is queued and in flight, and refuse what comes."""
        if self.lost is not None:
            return
        self.lost = why
        for request in self._scheduler.close(why):
            self._answer_error(request, type(why)(*why.args))
        for flight in list(self._flights.values()):
            self._fail(flight.launch, why, quarantine=True)
        self._tell_if_idle()

    def _typed(self, launch: Launch, error: BaseException) -> AsynctrtError:
        """A fresh error for one caller: an instance that many raise would collect all their tracebacks."""
        if isinstance(error, AsynctrtError):
            typed: AsynctrtError = type(error)(*error.args)
        else:
            typed = ExecutionError(
                f"{self._name} failed while it ran a batch of {launch.rows} rows from "
                f"{len(launch.requests)} requests: {type(error).__name__}: {error}. Other batches are not "
                "affected; if one of the rows caused it, send them one by one to find which"
            )
        typed.__cause__ = error
        return typed

    @staticmethod
    def _answer_error(request: Request, error: AsynctrtError) -> None:
        future = request.future
        request.future = None
        if not future.done():
            future.set_exception(error)

    def _copy_off_loop(self, copy: Callable[[], None], nbytes: int, then: Callable[[Event], None]) -> None:
        """Run ``copy`` in a copier's thread and ``then(event)`` on the loop when it is done."""
        event = self._host.create_event()
        copier = next(self._next_copier)
        copier.launch(copy, label=nbytes)
        copier.record(event)
        self._reaper.watch(event, partial(then, event), expected_ns=None)

    def _tell_if_idle(self) -> None:
        if self._idle_waiters and self._scheduler.is_idle:
            waiters, self._idle_waiters = self._idle_waiters, []
            for waiter in waiters:
                if not waiter.done():
                    waiter.set_result(None)


def _deadline_error(request: Request, now_ns: int) -> DeadlineError:
    assert request.deadline_ns != NO_DEADLINE_NS
    waited_ms = (now_ns - request.arrival_ns) / 1e6
    timeout_ms = (request.deadline_ns - request.arrival_ns) / 1e6
    return DeadlineError(
        f"the timeout of {timeout_ms:.3f} ms passed after {waited_ms:.3f} ms in the queue; the request did "
        "not reach the device. Allow more time, or send less"
    )
