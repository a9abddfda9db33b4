"""Calls with more rows than a batch holds: split into requests that each fit a batch, and rejoined."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from asynctrt.errors import DeadlineError, OverloadError, once_begun
from asynctrt.runtime.driver import COPY_ON_LOOP_NBYTES_MAX, Driver
from asynctrt.scheduling.key import BatchKey
from asynctrt.scheduling.request import Request
from asynctrt.tensors import InferResult, Views, too_many_rows


class Splitter:
    """Splits the calls of one engine.

    :param limit: returns the rows that one batch of a key holds.
    :param rows_max: the rows that the engine's queue can hold.
    :param axes: the axis on which to join rows of an output, by name; the first axis for other outputs.
    """

    def __init__(
        self,
        driver: Driver,
        limit: Callable[[BatchKey], int],
        rows_max: int,
        axes: Mapping[str, int],
    ) -> None:
        self._driver = driver
        self._limit = limit
        self._rows_max = rows_max
        self._axes = axes

    def submit(
        self,
        arrays: tuple[Any, ...],
        rows: int,
        key: BatchKey,
        priority: int,
        timeout_ns: int | None,
        outputs: frozenset[str] | None = None,
    ) -> "SplitCall":
        """Queue all parts of a call or none.

        :raises InputError: for more rows than the queue can ever hold.
        """
        if rows > self._rows_max:
            raise too_many_rows(rows, self._rows_max)
        size = self._limit(key)
        parts = [
            (Views(array[start : start + size] for array in arrays), min(size, rows - start))
            for start in range(0, rows, size)
        ]
        requests = self._driver.submit_parts(parts, key, priority, timeout_ns, outputs)
        return SplitCall(self._driver, requests, self._axes)


class SplitAnswer(asyncio.Task[InferResult]):
    """The answer to a call that was split. The engine counts each part as a request."""

    parts: "list[asyncio.Future[InferResult]]"


def are_small(results: Sequence[InferResult]) -> bool:
    """Return whether the answers to the parts of a call are joined on the event loop."""
    return sum(array.nbytes for one in results for array in one.values()) <= COPY_ON_LOOP_NBYTES_MAX


class SplitCall:
    """A call whose parts were all queued.

    :param requests: the requests of the parts, in order.
    :param axes: as for :class:`Splitter`.
    """

    __slots__ = ("_axes", "_driver", "_futures", "requests")

    def __init__(self, driver: Driver, requests: Sequence[Request], axes: Mapping[str, int]) -> None:
        self._driver = driver
        self.requests = requests
        # A request drops its future when it is answered.
        self._futures: list[asyncio.Future[InferResult]] = [request.future for request in requests]
        self._axes = axes

    def begin(self, loop: asyncio.AbstractEventLoop) -> "SplitAnswer":
        """Return a task that returns the answer. Cancelling it cancels all parts."""
        task = SplitAnswer(self.joined(), loop=loop)
        task.parts = self._futures
        # A task that is cancelled before it starts runs none of its code, so `joined` would not give up.
        task.add_done_callback(self._give_up)
        return task

    async def joined(self) -> InferResult:
        """Wait for the parts, and join their answers into one. Call it only once.

        :raises AsynctrtError: the error of the first part that fails.
        """
        with self._driver.joining():
            results = await self._answers()
            join = partial(InferResult.join, results, self._axes)
            return join() if are_small(results) else await self._driver.join_in_thread(join)

    async def _answers(self) -> list[InferResult]:
        try:
            return await asyncio.gather(*self._futures)
        except BaseException as error:
            answered = sum(
                future.done() and not future.cancelled() and future.exception() is None
                for future in self._futures
            )
            # A part failed or the caller was cancelled, so the other parts are useless now.
            self._give_up()
            if isinstance(error, OverloadError) and not isinstance(error, DeadlineError):
                raise once_begun(error) from error
            if not isinstance(error, DeadlineError):
                raise
            raise DeadlineError(
                f"{error}. The call was split into {len(self.requests)} batches; {answered} had been computed"
            ) from None
        finally:
            self._futures = []  # Breaks a cycle: they hold the error, whose traceback holds this frame.

    def _give_up(self, _task: object = None) -> None:
        """Cancel the parts that are not done. Idempotent."""
        for request, future in zip(self.requests, self._futures, strict=False):
            future.cancel()
            self._driver.cancel(request)
            if not future.cancelled():
                future.exception()  # Retrieved, so that asyncio does not log it as never retrieved.
