"""Measure, when an engine opens, how many batches the device computes side by side.

Batches of zeros of a few sizes run alone and side by side, on the contexts that callers' batches will use.
Only computing is measured: copies overlap with it anyway.
"""

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from math import ceil
from typing import Final, NamedTuple

import numpy as np

from asynctrt._util import clock
from asynctrt._util.cancellation import current
from asynctrt.devices.base import Buffer
from asynctrt.errors import DeviceLostError, UsageError, describe
from asynctrt.runtime.contexts import BatchEvents
from asynctrt.runtime.graphs import TRIAL_S
from asynctrt.runtime.inflight import InFlight
from asynctrt.runtime.prepare import CHANGE_NS_MIN, ROUNDS, time_of_change
from asynctrt.runtime.probe import Probe, Sample, Stage, scratch_of, staged
from asynctrt.scheduling.concurrency import ONE_LANE, Lanes, Rate, choose_lanes
from asynctrt.scheduling.key import BatchKey
from asynctrt.tensors import Array, split_shared

BUDGET_NS: Final = 400_000_000
"""Measuring begins with the largest batches and ends after this time. Smaller sizes that were not reached get
the lanes of the smallest one that was."""

RUN_NS: Final = 4_000_000
"""The shortest measurement, long enough that the time to start it and to notice its end does not matter."""

DEPTH: Final = 16
"""How many batches a lane has enqueued at a time. The enqueueing thread may wake up late. If a lane ran out
of short batches meanwhile, it would seem slow, and more lanes would seem to pay off."""

REPEATS_MAX: Final = 64
LONG_NS: Final = 30_000_000
"""Each measurement is made ``ROUNDS`` times and the best counts, because other work on the machine may
disturb some. One that takes longer than ``LONG_NS`` is hardly disturbed, so it is made once. ``REPEATS_MAX``
bounds the batches of one measurement in a lane."""

WARM_NS: Final = 20_000_000
"""How long the device is kept busy before the first measurement."""

SIZES_MAX: Final = 4
"""How many sizes are measured at most."""

USUAL: Final = 64
"""Dimensions that vary are measured at about this size, as far as the model supports it."""

logger = logging.getLogger("asynctrt")


class Calibration(NamedTuple):
    """How many batches compute side by side, and the measurements behind that."""

    lanes: Lanes = ONE_LANE
    rates: tuple[Rate, ...] = ()
    """The measurements; empty if there were none."""
    key: BatchKey = BatchKey()
    """The key of the batches that were measured."""
    change_ns: int = 0
    """How much longer a batch takes after one of another size, if it does; 0 if that was not measured."""

    @property
    def compute_ns(self) -> dict[int, int]:
        """How long batches take when they run alone, in ns, by their rows."""
        return {rate.rows: round(1e9 * rate.rows / rate.rows_per_s) for rate in self.rates if rate.lanes == 1}


class _TooLateError(Exception):
    """The time budget for measuring is used up."""


def sizes_to_measure(rows_max: int) -> tuple[int, ...]:
    """Return a few sizes from 1 to ``rows_max``, each larger than the one before by about the same factor."""
    step = max(4.0, rows_max ** (1 / (SIZES_MAX - 1)))
    sizes, size = {rows_max}, 1.0
    while size < rows_max:
        sizes.add(ceil(size))
        size *= step
    return tuple(sorted(sizes))


def calibrate(
    stage: Stage, lanes_max: int, *, for_times: bool = False, for_changes: bool = False
) -> Calibration:
    """Measure how many lanes pay off, up to ``lanes_max``. Blocks.

    A model that is not known to be safe to try, or that fails, gets one lane.

    :param for_times: also measure where only one lane is possible, to learn how long batches take.
    :param for_changes: also measure how long changes of the batch size take.
    :raises DeviceLostError: if the device is lost.
    :raises UsageError: if the opening of the engine was cancelled.
    """
    its = stage.model.capabilities
    if not (lanes_max > 1 or for_times or for_changes) or not (its.is_pure or its.is_capturable):
        return Calibration()
    bench = None
    try:
        bench = _Bench(stage, lanes_max)
        found = bench.measure()
        if for_changes and (change_ns := bench.measure_change()) >= CHANGE_NS_MIN:
            found = found._replace(change_ns=change_ns)
            logger.info(
                "%r: a batch takes %.0f ms longer in a context that ran another size or shape before, so "
                "contexts change their size only when keeping it has cost that time",
                stage.model.name,
                change_ns / 1e6,
            )
        bench.forget_slabs()
    except (DeviceLostError, UsageError):
        raise
    except Exception as error:
        logger.debug("%r: no batches were run side by side: %s", stage.model.name, describe(error))
        if bench is not None:
            bench.come_to_rest()
        return Calibration()
    finally:
        if bench is not None:
            bench.close()
    logger.debug("%r: %s", stage.model.name, found)
    return found


class _Bench:
    """Runs batches of zeros side by side on the contexts of an engine that is not open yet."""

    def __init__(self, stage: Stage, lanes_max: int) -> None:
        self._stage, self._lanes_max = stage, lanes_max
        self._ends_ns = clock.now_ns() + BUDGET_NS
        self._cancellation = current()
        self._threads = ThreadPoolExecutor(lanes_max, "asynctrt-calibrate")
        # Contexts in different arenas, as batches in one arena never compute side by side.
        self._contexts = stage.pool.contexts[:lanes_max]
        self._scratch: list[Buffer | None] = []
        # For each lane, the batches that run in turn, and their events.
        self._lanes: list[list[InFlight]] = []
        self._events: list[list[BatchEvents]] = []
        self._is_warm = False
        try:
            for _ in self._contexts:
                self._scratch.append(scratch_of(stage))
            self._sample = self._find_sample()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the threads and free the memory."""
        self._threads.shutdown()
        for memory in self._scratch:
            if memory is not None:
                memory.close()

    def come_to_rest(self) -> None:
        """Wait for batches still running after an error: batches of callers will use the same memory.

        :raises DeviceLostError: if they do not end.
        """
        self._threads.shutdown()
        self._stage.device.activate()
        for context in self._contexts:
            end = self._stage.device.create_event(is_timed=False)
            context.stream.record(end)  # Later batches must not get an error left there.
            if not end.synchronize(TRIAL_S):
                raise DeviceLostError(f"a batch of zeros did not end within {TRIAL_S:g} s")

    def measure(self) -> Calibration:
        """Measure, and return the lanes that pay off."""
        key, rates = self._key, []
        shapes = self._stage.shapes
        rows_max = shapes.limit(key.shape)
        sizes = {shapes.padded_rows(key.shape, rows) for rows in sizes_to_measure(rows_max)}
        captured = self._stage.pool.captured.sizes
        if captured:
            # Before their times are known, batches are padded to the next captured size.
            sizes = {next((size for size in captured if size >= rows), rows) for rows in sizes}

        @cache
        def rate_of(rows: int, lanes: int) -> float | None:
            try:
                rate = self._rate(rows, lanes)
            except _TooLateError:
                return None
            rates.append(Rate(rows, lanes, rate))
            return rate

        lanes = choose_lanes(sorted(sizes), rate_of, rows_max, self._lanes_max)
        for context, scratch in zip(self._contexts, self._scratch, strict=True):
            if context.arena is not None and scratch is None:
                context.arena.last_use = None  # That use is over.
        return Calibration(lanes, tuple(rates), key)

    def forget_slabs(self) -> None:
        """Free what slabs needed. Freeing it later, when larger shapes come, would wait for batches."""
        if self._stage.pool.may_grow:
            for context in self._contexts:
                context.forget_slabs()

    def measure_change(self) -> int:
        """Return how much longer a batch takes after one of another size, in ns; 0 if all have one size."""
        shapes, shape = self._stage.shapes, self._key.shape
        largest, smallest = shapes.padded_rows(shape, shapes.limit(shape)), shapes.padded_rows(shape, 1)
        if largest == smallest:
            return 0
        self._once(largest)  # Leaves the context at a size that the next batch has to change.
        # Once: a change may take most of a second. The smallest size has run before, as the sample.
        return max(time_of_change(self._once, [smallest], rounds=1).extra_ns, 0)

    def _once(self, rows: int) -> int:
        """Run a batch on the first context; return how long that took, in ns."""
        flight = self._make_flight(rows, 0)
        start_ns = clock.now_ns()
        self._enqueue(flight)
        self._wait_for(flight)
        return clock.now_ns() - start_ns

    def _find_sample(self) -> Sample:
        """Return a row that the model takes, with dimensions as close to ``USUAL`` as possible."""
        probe = Probe(self._stage)
        try:
            samples = sorted(probe.samples(), key=_distance)
            sample = next((one for one in samples if probe.runs(one, "z")), None)
            if sample is None:
                raise probe.failed[0][1] if probe.failed else ValueError("no made-up rows run")
            self._key = probe.key(sample)
        finally:
            probe.close()
        return sample

    def _rate(self, rows: int, lanes: int) -> float:
        """Return the rows computed per second with a number of lanes.

        :raises _TooLateError: if the time budget is used up.
        """
        self._make_lanes(rows, lanes)
        if not self._is_warm and self._stage.device.gpu is not None:
            self._warm_up()
        once_ns = self._run(lanes, 1)
        repeats = max(1, min(REPEATS_MAX, ceil(RUN_NS / max(once_ns, 1))))
        rounds = ROUNDS if once_ns < LONG_NS else 1
        best_ns = min([self._run(lanes, repeats) for _ in range(rounds)])
        if repeats == 1:
            best_ns = min(best_ns, once_ns)
        return 1e9 * rows * lanes * repeats / best_ns

    def _make_lanes(self, rows: int, lanes: int) -> None:
        """Prepare batches of one size for each lane, on contexts that have run that size once."""
        if self._lanes and self._lanes[0][0].batch.rows_run != rows:
            self._lanes = []
        made = []
        for number in range(len(self._lanes), lanes):
            self._check_time()
            made.append(self._make_flight(rows, number))
        # The first batch of a size in a context may take far longer than later ones.
        list(self._threads.map(self._enqueue, made))
        for flight in made:
            self._wait_for(flight)
            flight.source.has_copies_in = flight.source.has_copies_out = False
            if len(self._events) == len(self._lanes):
                device = self._stage.device
                self._events.append([BatchEvents(device, are_timed=False) for _ in range(DEPTH)])
            self._lanes.append([])
            for events in self._events[len(self._lanes) - 1]:
                one = InFlight(flight.batch, flight.context, flight.source)
                one.events, one.end = events, events.computed
                self._lanes[-1].append(one)

    def _make_flight(self, rows: int, number: int) -> InFlight:
        return staged(self._stage, self._key, [self._zeros(rows)], rows, number)

    def _warm_up(self) -> None:
        """Keep the device busy for a while: an idle GPU runs at a lower clock."""
        warm_ns = clock.now_ns() + WARM_NS
        while clock.now_ns() < warm_ns:
            self._run(1, 1)
        self._is_warm = True

    def _check_time(self) -> None:
        if clock.now_ns() > self._ends_ns:
            raise _TooLateError

    def _zeros(self, rows: int) -> tuple[Array, ...]:
        with_rows, _ = split_shared(self._stage.model.inputs)
        return tuple(
            np.zeros((rows, *dims), spec.dtype)
            for spec in with_rows
            if (dims := spec.resolve(self._sample.symbols)) is not None
        )

    def _run(self, lanes: int, repeats: int) -> int:
        """Run ``repeats`` batches in each of some lanes at once; return how long that took, in ns.

        :raises _TooLateError: if the time budget is used up.
        """
        self._check_time()
        used = self._lanes[:lanes]
        start_ns = clock.now_ns()
        if used[0][0].context.may_block(used[0][0].source):
            # Each lane has a thread that enqueues, as it has when the engine serves.
            list(self._threads.map(lambda lane: self._fill([lane], repeats), used))
        else:
            self._fill(used, repeats)
        for flights in used:
            for flight in flights[:repeats]:
                self._wait_for(flight)
        return clock.now_ns() - start_ns

    def _fill(self, lanes: Sequence[list[InFlight]], repeats: int) -> None:
        """Enqueue ``repeats`` batches in each lane, with at most ``DEPTH`` unfinished ones per lane."""
        for number in range(repeats):
            for flights in lanes:
                flight = flights[number % DEPTH]
                if number >= DEPTH:
                    self._wait_for(flight)
                self._enqueue(flight)

    def _enqueue(self, flight: InFlight) -> None:
        self._stage.device.activate()
        flight.context.enqueue(flight.source, flight.events, scratch=self._scratch[flight.batch.context])

    def _wait_for(self, flight: InFlight) -> None:
        if self._cancellation.is_cancelled:
            raise UsageError("no more batches of zeros are run, because the opening was cancelled")
        flight.wait("a batch of zeros", TRIAL_S)


def _distance(sample: Sample) -> float:
    """Return how far the sizes of dimensions are from ``USUAL``."""
    return max((abs(size - USUAL) for size in sample.symbols.values()), default=0)
