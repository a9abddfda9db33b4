"""An engine whose model runs on a device in this process: one driver, one scheduler, one pool of contexts."""

import asyncio
import atexit
import logging
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from asynctrt._util import clock
from asynctrt._util.loops import see_through_in_thread, wait_shielded
from asynctrt._util.validation import timeout_ns_of
from asynctrt.core.assembly import EngineParts
from asynctrt.core.driven import DrivenEngine
from asynctrt.core.intake import Intake
from asynctrt.core.splitting import Splitter
from asynctrt.engine import STREAM_END_S
from asynctrt.errors import EngineClosedError, InputError, UsageError
from asynctrt.options import Options
from asynctrt.runtime.driver import Driver
from asynctrt.runtime.inflight import InFlight
from asynctrt.scheduling.key import BatchKey
from asynctrt.statistics import BatchStatistics, BatchTrace, Statistics

BUILD_END_S: Final = 10.0
"""How long closing an engine waits for contexts that are being built, in seconds. The build was cancelled,
and ends once the session that it loads is there."""

GIVE_BACK_S: Final = 30.0
"""How long closing an engine waits until everything is given back, in seconds. While a kernel hangs, any CUDA
call may wait for it: loading another kernel does, and holds up all calls of the process."""

EXIT_S: Final = 10.0
"""How long the exit of the interpreter waits for a release that has begun: a library may wait for the GPU."""

ABANDONED_S: Final = 3600.0
"""How long each wait for abandoned batches lasts, in seconds."""

logger = logging.getLogger("asynctrt")


class LocalEngine(DrivenEngine):
    """A model on one device in this process.

    :param parts: the parts of the engine, which it closes.
    :param rows_first: take and return arrays with rows first, whatever axis the model has them on. For
        workers.
    """

    _driver: Driver

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        parts: EngineParts,
        options: Options,
        *,
        rows_first: bool = False,
    ) -> None:
        device, model, pool, capacity = parts.device, parts.model, parts.pool, parts.capacity
        scheduler = parts.create_scheduler(options)
        check = parts.create_check(options, scheduler.limit, rows_first=rows_first)
        driver = Driver(
            loop=loop,
            scheduler=scheduler,
            pool=pool,
            now_ns=clock.now_ns,
            model=model,
            device=device,
            batch_timeout_ns=None if options.batch_timeout is None else timeout_ns_of(options.batch_timeout),
            bisects=options.idempotent,
            rows_first=rows_first,
        )
        # The axis on which to join rows of an output, if a call was split.
        self._axes = {} if rows_first else {spec.name: spec.axis for spec in model.outputs if spec.axis}
        self._splitter = Splitter(driver, scheduler.limit, options.max_queue_rows, self._axes)
        super().__init__(
            loop,
            options,
            parts.described(),
            driver=driver,
            check=check,
            limit=scheduler.limit,
            rows_unsplit=0 if parts.shapes.limit_varies else capacity.rows_max,
            split=self._splitter.submit,
            plain=driver,
        )
        parts.divide_device(scheduler, options, loop, driver.pump_soon)
        scheduler.times.seed(parts.calibration.key, parts.calibration.compute_ns)
        self._parts = parts
        self._device, self._model, self._pool = device, model, pool
        self._capacity = capacity
        self._scheduler = scheduler
        self._opened_ns = clock.now_ns()
        padding = parts.padding
        if padding is not None and padding.is_default:
            driver.on_answer.append(lambda flight: padding.ran(flight.batch.key.shape))
        for made in pool.specialised.values():
            scheduler.run_anew(made.shape, made.statistics.after_ns)
        self._specialiser = parts.create_specialiser(loop, driver.uses, scheduler.run_anew)
        if self._specialiser is not None:
            driver.on_answer.append(self._specialiser.answered)
        self._is_traced = False
        self._state = "open"

    def __repr__(self) -> str:
        return (
            f"<Engine {self.name!r} on {self.device_name} {self.state} "
            f"queued={self._scheduler.queue.requests} "
            f"in_flight={self._scheduler.in_flight}>"
        )

    @property
    def state(self) -> str:
        if self._state != "open":
            return self._state
        is_lost = self._device.lost is not None or self._driver.lost is not None
        return "lost" if is_lost else "open"

    @property
    def intake(self) -> Intake:
        """The entry point for a worker's rows, which are in memory that it shares with its front."""
        return Intake(
            driver=self._driver,
            splitter=self._splitter,
            check=self._check_of_inputs,
            pool=self._pool,
            device=self._device,
            fits=self._fits,
        )

    def statistics(self) -> Statistics:
        self._origin.check(self)
        snapshot = self._scheduler.snapshot()
        counters, share = snapshot.counters, self._scheduler.room.share
        return Statistics(
            state=self.state,
            submitted=snapshot.submitted,
            succeeded=counters.succeeded,
            failed=counters.failed,
            cancelled=counters.cancelled,
            expired=counters.expired,
            refused=counters.refused,
            refused_late=counters.refused_late,
            rows=counters.rows,
            batches=counters.batches,
            queue_ns=counters.queue_ns,
            copy_in_ns=counters.copy_in_ns,
            compute_ns=counters.compute_ns,
            copy_out_ns=counters.copy_out_ns,
            total_ns=counters.total_ns,
            queued_requests=snapshot.queued_requests,
            queued_rows=snapshot.queued_rows,
            in_flight_batches=snapshot.in_flight_batches,
            rows_padded=counters.rows_padded,
            batches_timed=counters.batches_timed,
            batches_bisected=counters.bisected,
            launched={str(reason): count for reason, count in counters.launched.items()},
            contexts=self._capacity.contexts,
            contexts_quarantined=snapshot.contexts_quarantined,
            arenas=self._capacity.arenas,
            arena_waits=counters.arena_waits,
            arena_wait_ns=counters.arena_wait_ns,
            arena_busy_share=self._busy_share(counters.busy_ns),
            arena_nbytes=self._pool.arenas_nbytes,
            arena_nbytes_private=self._capacity.contexts * self._model.capabilities.enqueue_nbytes,
            lanes=self._parts.lanes_by_rows,
            graphs=self._pool.captured.sizes,
            batch_sizes=self._pool.prepared,
            memory_nbytes=self._pool.nbytes,
            device_ns=0 if share is None else round(share.used_ns),
            held_ns=0 if share is None else share.held_ns,
            by_batch_rows={
                rows: BatchStatistics(size.count, size.copy_in_ns, size.compute_ns, size.copy_out_ns)
                for rows, size in counters.by_rows.items()
            },
            batching=self.batching,
            lane_rates=tuple([(rows, lanes, rate) for rows, lanes, rate in self._parts.calibration.rates]),
            specialised=tuple([made.statistics for made in tuple(self._pool.specialised.values())]),
        )

    @contextmanager
    def tracing(self, *, batches: int = 4096, timed: bool = True) -> Iterator[deque[BatchTrace]]:
        self._origin.check(self)
        if self._is_traced:
            raise UsageError("this engine's batches are being traced already")
        trace: deque[BatchTrace] = deque(maxlen=batches)

        def observe(flight: InFlight) -> None:
            batch, record = flight.batch, flight.record
            trace.append(
                BatchTrace(
                    context=batch.context,
                    arena=batch.arena,
                    rows=batch.rows,
                    rows_run=batch.rows_run,
                    requests=len(batch.requests),
                    reason=str(batch.reason),
                    is_timed=batch.is_timed,
                    launched_ns=batch.launched_ns,
                    copy_in_ns=record.copy_in_ns,
                    compute_ns=record.compute_ns,
                    copy_out_ns=record.copy_out_ns,
                    answered_ns=clock.now_ns(),
                )
            )

        self._is_traced = True
        self._driver.on_answer.append(observe)
        self._scheduler.times.times_all = timed or self._device.timing_is_free
        try:
            yield trace
        finally:
            self._is_traced = False
            with suppress(ValueError):  # The engine was closed meanwhile.
                self._driver.on_answer.remove(observe)
            self._scheduler.times.times_all = self._device.timing_is_free

    async def _close(self) -> None:
        why = f"{self.name!r} is closed"
        self._state = "closing"
        if self._specialiser is not None:
            self._specialiser.stop()
        self._driver.fail_queued(EngineClosedError(why))
        await wait_shielded(self._driver.next_idle(), self._options.close_timeout)
        self._driver.close()
        given_back, _ = await see_through_in_thread(self._give_back, timeout_s=GIVE_BACK_S)
        self._state = "closed"
        if given_back.done():
            given_back.result()
        else:
            logger.error(
                "%r: giving back what it holds takes longer than %g s, and goes on in a thread. If work on "
                "the device hangs, only the end of the process gives it back",
                self,
                GIVE_BACK_S,
            )

    def _give_back(self) -> None:
        """Join threads, free memory and unload the model. Blocks."""
        self._driver.end_threads(STREAM_END_S)
        if self._specialiser is not None:
            self._specialiser.close(BUILD_END_S)
        abandoned = self._parts.close(STREAM_END_S)
        if abandoned:
            logger.error("%r: %d contexts were abandoned while they ran or were built", self, abandoned)
            _LateRelease(self._parts).start()

    def _busy_share(self, busy_ns: int) -> float:
        """Return the share of the time since the engine was opened that its arenas computed for it."""
        passed_ns = max(clock.now_ns() - self._opened_ns, 1) * self._capacity.arenas
        return busy_ns / passed_ns if passed_ns else 0.0

    def _key_on_device(self, key: BatchKey, rows: int) -> BatchKey:
        if self._axes:
            raise InputError(
                "outputs='device' leaves rows where they are computed, and rows of "
                f"{next(iter(self._axes))!r} do not lie one after the other. Ask for outputs='host'"
            )
        if self._parts.padding is not None and not self._parts.padding.is_default:
            raise InputError("outputs='device' leaves no way to cut them back, and this engine pads its rows")
        rows_max = self._scheduler.limit(key)
        if rows > rows_max:
            raise InputError(
                f"outputs='device' takes the rows of one batch ({rows_max}), given {rows}. "
                "Send them in several calls"
            )
        return key._replace(outputs_on_device=True)


class _LateRelease:
    """Releases abandoned parts in a thread once their batches have ended.

    The thread is a daemon: a batch that never ends must not keep the interpreter from exiting. But what a
    library destroys may call back into Python, and a thread that comes from a library to an interpreter that
    is gone ends the process with an error. So the interpreter waits for a release that has begun.
    """

    def __init__(self, parts: EngineParts) -> None:
        self._parts = parts
        self._releasing = threading.Lock()
        self._is_exiting = False

    def start(self) -> None:
        """Start the thread."""
        atexit.register(self._let_end)
        threading.Thread(target=self._run, name="asynctrt-abandoned", daemon=True).start()

    def _run(self) -> None:
        try:
            abandoned = 1
            while abandoned:
                for context in self._parts.pool.contexts:
                    context.comes_to_rest(ABANDONED_S)
                with self._releasing:
                    if self._is_exiting:
                        return
                    abandoned = self._parts.close(STREAM_END_S)
        finally:
            atexit.unregister(self._let_end)

    def _let_end(self) -> None:
        self._is_exiting = True
        self._releasing.acquire(timeout=EXIT_S)
