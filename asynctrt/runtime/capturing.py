"""The capture of batch sizes on the contexts of an engine, for as many sizes as fit into memory."""

import logging
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Final, Generic, Protocol, TypeVar

from asynctrt._util import clock
from asynctrt._util.cancellation import current
from asynctrt.backends.base import Model
from asynctrt.devices.base import Device, mib
from asynctrt.errors import DeviceMemoryError, UsageError
from asynctrt.runtime.graphs import Capture, CaptureCosts

SHARE_MAX: Final = 0.5
"""The share of the device's free memory that graphs may take: others use the device too."""

FEWEST: Final = 4
"""Give up if fewer sizes than this do not fit."""

logger = logging.getLogger("asynctrt")


class CapturingContext(Protocol):
    """A context of the pool."""

    def keep_captured(self, shape: Hashable, rows: int, capture: Capture) -> CaptureCosts:
        """Finish a warmed-up capture, and launch its graph for such batches from now on."""

    def forget_captured(self) -> None:
        """Forget every graph."""


C = TypeVar("C", bound=CapturingContext)


def are_dense(sizes: Sequence[int], rows_max: int) -> bool:
    """Return whether padding each batch to one of these sizes at most doubles its rows."""
    return (
        sizes[-1:] == (rows_max,)
        and sizes[0] <= 2
        and all(larger <= 2 * smaller for smaller, larger in pairwise(sizes))
    )


class Capturing(Generic[C]):
    """The capturing of batch sizes on every context of an engine.

    :param shapes: the shapes of batches, rising; each size is captured for each shape.
    :param begin: begins the capture of a size of a shape on a context.
    :param one_by_one: whether contexts warm up one after the other.
    :param limit_nbytes: the device memory that all of it may take. Default: half of what is free.
    """

    def __init__(
        self,
        device: Device,
        model: Model,
        contexts: Sequence[C],
        shapes: Sequence[Hashable],
        begin: Callable[[C, Hashable, int], Capture],
        *,
        one_by_one: bool,
        limit_nbytes: int | None = None,
    ) -> None:
        self._device = device
        self._model = model
        self._contexts = contexts
        self._shapes = shapes
        self._begin = begin
        self._one_by_one = one_by_one
        self._limit_nbytes = limit_nbytes
        self._cancellation = current()

    def run(self, sizes: Sequence[int]) -> tuple[Sequence[int], list[CaptureCosts]]:
        """Capture the sizes, or every second one as long as they do not fit. Blocks.

        :returns: the captured sizes, and the CPU time to launch each.
        :raises DeviceMemoryError: if they do not fit; nothing is captured then.
        :raises UsageError: if the opening of the engine was cancelled.
        """
        name, start_ns = self._model.name, clock.now_ns()
        logger.info(
            "%r: %d batch sizes%s are captured as CUDA graphs in %d contexts, which may take a while",
            name,
            len(sizes),
            f" of {len(self._shapes)} shapes" if len(self._shapes) > 1 else "",
            len(self._contexts),
        )
        captured, costs = self.fit(sizes)
        took_s = (clock.now_ns() - start_ns) / 1e9
        logger.info("%r: graphs of %s rows took %.1f s", name, ", ".join(map(str, captured)), took_s)
        return captured, costs

    def fit(self, sizes: Sequence[int]) -> tuple[tuple[int, ...], list[CaptureCosts]]:
        """Capture as many of the sizes as fit, as :meth:`run` does."""
        sizes = tuple(sizes)
        while True:
            try:
                return sizes, self._side_by_side(sizes)
            except DeviceMemoryError as error:
                for context in self._contexts:
                    context.forget_captured()
                if len(sizes) < FEWEST:
                    raise
                fewer = sizes[-1::-2][::-1]
                logger.info(
                    "%r: there is no room for %d batch sizes, but perhaps for %d: %s",
                    self._model.name,
                    len(sizes),
                    len(fewer),
                    error,
                )
                sizes = fewer

    def _side_by_side(self, sizes: Sequence[int]) -> list[CaptureCosts]:
        """Warm up the sizes on one context, then on the others in parallel, and capture them.

        Capture the largest first, to detect a model that cannot be captured before warming up all sizes.

        :raises DeviceMemoryError: also if all contexts would take more than their share of the free memory.
        """
        first, *others = self._contexts
        largest, *smaller = batches = self._batches(sizes)
        begun: list[tuple[C, Hashable, int, Capture]] = []
        try:
            room_nbytes = self._device.memory().room_nbytes
            costs = [first.keep_captured(*largest, self._warmed_up(first, *largest))]
            self._warm_up(first, smaller, begun)
            self._check_share(room_nbytes, len(sizes))
            if others:
                threads = 1 if self._one_by_one else len(others)
                with ThreadPoolExecutor(threads, "asynctrt-capture") as pool:
                    for done in [pool.submit(self._warm_up, context, batches, begun) for context in others]:
                        done.result()
            while begun:
                context, shape, rows, capture = begun.pop()
                costs.append(context.keep_captured(shape, rows, capture))
            return costs
        finally:
            for *_, capture in begun:
                capture.close()

    def _check_share(self, room_nbytes: int, sizes: int) -> None:
        """Check that all contexts together fit into their share of memory, after one has its graphs.

        :param room_nbytes: the free memory before.
        :raises DeviceMemoryError: if they would take more than their share.
        """
        contexts = len(self._contexts)
        taken_nbytes = max(room_nbytes - self._device.memory().room_nbytes, 0)
        limit_nbytes = int(room_nbytes * SHARE_MAX) if self._limit_nbytes is None else self._limit_nbytes
        if not self._device.unified and taken_nbytes * contexts > limit_nbytes:
            raise DeviceMemoryError(
                f"graphs of {sizes} batch sizes of {self._model.name!r} take {mib(taken_nbytes)} in one "
                f"context, and in {contexts} of them more than their share, {mib(limit_nbytes)} of "
                f"{mib(room_nbytes)} that were free. Name the sizes that matter most in graphs, or use fewer "
                "contexts"
            )

    def _batches(self, sizes: Sequence[int]) -> list[tuple[Hashable, int]]:
        """Return the shapes and rows to capture on each context, the largest first."""
        return [(shape, rows) for rows in reversed(sizes) for shape in reversed(self._shapes)]

    def _warm_up(
        self,
        context: C,
        batches: Sequence[tuple[Hashable, int]],
        begun: list[tuple[C, Hashable, int, Capture]],
    ) -> None:
        self._device.activate()
        for shape, rows in batches:
            begun.append((context, shape, rows, self._warmed_up(context, shape, rows)))

    def _warmed_up(self, context: C, shape: Hashable, rows: int) -> Capture:
        if self._cancellation.is_cancelled:
            raise UsageError("batches are not captured any more, since the opening was cancelled")
        capture = self._begin(context, shape, rows)
        capture.warm_up()
        return capture
