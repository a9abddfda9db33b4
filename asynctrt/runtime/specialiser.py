"""Specialise shapes while an engine serves: count which ones recur, and build for one at a time in a thread.

Everything that batches see changes on the loop, between two batches: see :meth:`ContextPool.adopt`.
"""

import asyncio
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from typing import Final

from asynctrt._util import clock
from asynctrt.errors import AsynctrtError, DeviceLostError, DeviceMemoryError, UsageError
from asynctrt.runtime.contexts import ContextPool
from asynctrt.runtime.inflight import InFlight
from asynctrt.runtime.specialised import (
    BUILD_S_MAX,
    Builder,
    Deadline,
    NoGainError,
    Specialised,
    named,
)
from asynctrt.runtime.staging import Slab
from asynctrt.scheduling.shapes import Shapes

SHAPES_MAX: Final = 8
"""The most shapes that are specialised at once, because each needs memory and build time for all of its
sizes. The number was not tuned."""

OFTEN: Final = 16
"""A shape recurs only if at least this many of the last ``WINDOW`` batches had it: a rarer one could gain
little, and takes memory and a build, which may take seconds. The number was not tuned."""

WINDOW: Final = 512
"""After this many batches, earlier ones count half, so that shapes which no longer come make room, and few
are remembered."""

HYSTERESIS: Final = 2
"""A shape replaces another one only if it came this many times as often, so that two equally common shapes do
not replace each other again and again."""

REST: Final = 3
"""The pause after a build, as a multiple of its time, before another shape may replace a specialised one.
While there is room, shapes are built one after the other."""

FAILURES_MAX: Final = 3
"""Give up on a model after this many shapes in a row that could not be specialised."""

logger = logging.getLogger("asynctrt")


class RecurringShapes:
    """Counts the shapes of batches, and decides which recur and which give way to others."""

    def __init__(self) -> None:
        # In the order in which they came last, the latest at the end.
        self._counts: OrderedDict[Hashable, float] = OrderedDict()
        self._total = 0.0

    def __repr__(self) -> str:
        return f"<RecurringShapes {len(self._counts)} of {self._total:.0f} batches>"

    def note(self, shape: Hashable) -> bool:
        """Count a batch of a shape; return whether the shape recurs."""
        count = self._counts[shape] = self._counts.get(shape, 0.0) + 1
        self._counts.move_to_end(shape)
        self._total += 1
        if self._total >= WINDOW:
            self._forget()
        return count >= OFTEN

    def victim(self, shape: Hashable, specialised: Collection[Hashable]) -> Hashable | None:
        """Return the specialised shape to replace with ``shape``; ``None`` if all of them come about as
        often.

        Of several, return the one that has not come for the longest time.
        """
        least = self._counts.get(shape, 0.0) / HYSTERESIS
        order = [other for other in self._counts if other in specialised]
        gone = [other for other in specialised if other not in self._counts]
        return next((other for other in [*gone, *order] if self._counts.get(other, 0.0) <= least), None)

    def _forget(self) -> None:
        """Let all batches so far count half."""
        for shape, count in tuple(self._counts.items()):
            if count < 1:
                del self._counts[shape]
            else:
                self._counts[shape] = count / 2
        self._total = sum(self._counts.values())


class Specialiser:
    """Gives shapes that recur separate contexts, one shape at a time.

    :param uses: whether a batch in flight uses a slab.
    :param sizes_of: the batch sizes to build for a shape, rising.
    :param run_anew: called with a shape whose batches run in another way from now on, and with how long
        batches take then in ns, by their rows.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        name: str,
        pool: ContextPool,
        shapes: Shapes,
        builder: Builder,
        *,
        sizes_of: Callable[[Hashable], Sequence[int]],
        uses: Callable[[Slab], bool],
        run_anew: Callable[[Hashable, Mapping[int, int]], object],
    ) -> None:
        self._loop, self._name = loop, name
        self._pool, self._shapes, self._builder = pool, shapes, builder
        self._sizes_of, self._uses = sizes_of, uses
        self._run_anew = run_anew
        self._recurring = RecurringShapes()
        self._shapes_max = SHAPES_MAX
        self._refused: set[Hashable] = set()
        self._failures = 0
        self._rests_until_ns = 0
        self._is_over = False
        self._thread: threading.Thread | None = None
        self._deadline: Deadline | None = None
        self._built: Specialised | None = None
        # Shapes that gave way, whose slabs batches may still use.
        self._leaving: list[Specialised] = []

    def __repr__(self) -> str:
        state = "over" if self._is_over else "idle" if self._thread is None else "building"
        return f"<Specialiser {self._name} {state} shapes={len(self._pool.specialised)}>"

    def answered(self, flight: InFlight) -> None:
        """Note a batch that was answered, and begin to build for its shape if that recurs."""
        if self._leaving:
            self._close_unused()
        shape = flight.batch.key.shape
        if not self._recurring.note(shape) or self._is_over or self._thread is not None:
            return
        specialised = self._pool.specialised
        if shape in specialised or shape in self._refused:
            return
        if len(specialised) < self._shapes_max:
            self._begin(shape)
        elif clock.now_ns() >= self._rests_until_ns:
            victim = self._recurring.victim(shape, specialised)
            if victim is not None:
                self._release(victim)  # Its memory is free once no batch uses it any more.

    def stop(self) -> None:
        """Begin and adopt nothing more."""
        self._is_over = True
        if self._deadline is not None:
            self._deadline.cancel()

    def close(self, timeout_s: float) -> None:
        """Release what was built and not adopted, after :meth:`stop`. Blocks."""
        if self._thread is not None:
            self._thread.join(timeout_s)
        built, self._built = self._built, None
        for made in (*self._leaving, *([] if built is None else [built])):
            made.close(timeout_s)
        self._leaving.clear()

    def _begin(self, shape: Hashable) -> None:
        self._deadline = deadline = Deadline(BUILD_S_MAX)
        sizes = self._sizes_of(shape)
        self._thread = threading.Thread(
            target=self._build, args=(shape, sizes, deadline), name="asynctrt-specialise", daemon=True
        )
        self._thread.start()

    def _build(self, shape: Hashable, sizes: Sequence[int], deadline: Deadline) -> None:
        """Build in the thread, and tell the loop."""
        error: Exception | None = None
        start_ns = clock.now_ns()
        try:
            self._built = self._builder.build(
                shape, sizes, one_by_one=True, cancellation=deadline, held_nbytes=held_nbytes(self._pool)
            )
        except Exception as raised:
            # Its frames refer to what was closed.
            error = raised.with_traceback(None)
        took_ns = clock.now_ns() - start_ns
        try:
            self._loop.call_soon_threadsafe(self._end, shape, error, took_ns, deadline)
        except RuntimeError:
            logger.debug("%s: the loop was closed while %s was built for", self._name, named(shape))

    def _end(self, shape: Hashable, error: Exception | None, took_ns: int, deadline: Deadline) -> None:
        """Adopt what was built, or note that it could not be."""
        self._thread = None
        self._rests_until_ns = clock.now_ns() + REST * took_ns
        if self._is_over:
            return  # What was built is closed with the engine.
        made, self._built = self._built, None
        if made is not None:
            self._failures = 0
            adopt(self._name, self._pool, self._shapes, made)
            self._run_anew(shape, made.statistics.after_ns)
            return
        assert error is not None
        if isinstance(error, DeviceMemoryError) and self._pool.specialised:
            # It is tried again once another shape has given way.
            self._shapes_max = len(self._pool.specialised)
            logger.info("%s: no more shapes get separate contexts: %s", self._name, error)
            return
        is_late = deadline.is_over
        if len(self._refused) >= WINDOW:
            self._refused.clear()
        self._refused.add(shape)
        self._failures += 1
        if isinstance(error, NoGainError | DeviceLostError) or is_late or self._failures >= FAILURES_MAX:
            self._is_over = True
        said = f"it took more than {BUILD_S_MAX:g} s" if is_late else str(error)
        log_refusal(self._name, shape, error, said, is_over=self._is_over)

    def _release(self, shape: Hashable) -> None:
        self._shapes.specialise(shape, ())
        self._leaving.append(self._pool.release(shape))
        self._run_anew(shape, {})
        logger.info("%s: batches of %s, which are rare by now, run like others", self._name, named(shape))
        self._close_unused()

    def _close_unused(self) -> None:
        """Have a thread close what no batch uses any more."""
        if self._thread is not None:
            return
        unused = [
            made
            for made in self._leaving
            if not any(site.slab is not None and self._uses(site.slab) for site in made.sites)
        ]
        if unused:
            self._leaving = [made for made in self._leaving if made not in unused]
            self._thread = threading.Thread(
                target=self._close_all, args=(unused,), name="asynctrt-specialise", daemon=True
            )
            self._thread.start()

    def _close_all(self, unused: Sequence[Specialised]) -> None:
        for made in unused:
            try:
                made.close()
            except AsynctrtError as error:
                logger.debug("%s: %s is not released: %s", self._name, named(made.shape), error)
        try:
            self._loop.call_soon_threadsafe(self._closed)
        except RuntimeError:
            logger.debug("%s: the loop was closed while a shape was released", self._name)

    def _closed(self) -> None:
        self._thread = None


def held_nbytes(pool: ContextPool) -> int:
    """Return the device memory that shapes with separate contexts hold."""
    return sum(made.statistics.nbytes for made in tuple(pool.specialised.values()))


def adopt(name: str, pool: ContextPool, shapes: Shapes, made: Specialised) -> None:
    """Run batches of a shape in the contexts that were built for it from now on."""
    shapes.specialise(made.shape, made.statistics.batch_sizes)
    pool.adopt(made)
    logger.info("%s: batches of a shape that recurs have separate contexts: %s", name, made.statistics)


def log_refusal(name: str, shape: Hashable, error: Exception, said: str, *, is_over: bool) -> None:
    """Log why a shape has no separate contexts."""
    is_usual = isinstance(error, NoGainError | DeviceMemoryError | UsageError)
    logger.log(
        logging.INFO if is_usual else logging.WARNING,
        "%s: batches of %s have no separate contexts%s: %s",
        name,
        named(shape),
        ", nor will other shapes" if is_over else "",
        said,
    )
