"""The front: it accepts requests on the application's loop and sends them to workers.

It is the driver of an :class:`IsolatedEngine`, which checks and submits. Requests of one tick travel in
groups. Each group is in one place at any time: held here, or with one link. A link that loses its worker
returns its groups, which go to another link or to the next worker.
"""

import asyncio
import contextvars
import json
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from asynctrt import errors
from asynctrt._util import clock
from asynctrt._util.forks import in_child
from asynctrt.core.description import Description
from asynctrt.errors import (
    AsynctrtError,
    DeadlineError,
    DeadlineUnreachableError,
    DeviceLostError,
    DeviceMemoryError,
    EngineClosedError,
    ExecutionError,
    InputError,
    InternalError,
    PoisonError,
    QueueFullError,
    copy_for,
)
from asynctrt.options import Options
from asynctrt.runtime.answers import answer_error, deadline_error
from asynctrt.runtime.completion import Reaper
from asynctrt.runtime.jobs import Copiers
from asynctrt.runtime.results import ResultMemory
from asynctrt.runtime.spans import copy_out, outputs_of, spans_of, views_of
from asynctrt.scheduling.key import BatchKey
from asynctrt.scheduling.request import DONE, NO_DEADLINE_NS, QUEUED, Request, State
from asynctrt.tensors import Array, BatchRecord, InferResult, restore_axes
from asynctrt.workers.groups import PIECES, RequestGroup, formed
from asynctrt.workers.layout import Layouts, Placed
from asynctrt.workers.link import Link
from asynctrt.workers.memory import KEPT_NBYTES, Heap
from asynctrt.workers.messages import Kind
from asynctrt.workers.pace import Pace

COPY_ON_LOOP_NBYTES_MAX: Final = 4 << 20
"""Groups with more bytes than this are copied in and out by threads, as in-process batches are."""

DEATHS_MAX: Final = 2
"""A group that was in a batch when this many workers died is suspected, and tried apart from the others."""

GROUP_NBYTES_MAX: Final = KEPT_NBYTES // 4
"""Requests with more bytes than this travel in several groups, so that the heap keeps the pages of some."""

EXPIRY_S: Final = 0.05
"""How often deadlines are checked, and how far past they must be to expire here if a worker has the group: a
worker whose event loop runs enforces them itself."""

logger = logging.getLogger("asynctrt")


@dataclass(slots=True)
class RequestCounters:
    """The front's request counters, named as in :class:`Statistics`."""

    submitted: int = 0
    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0
    expired: int = 0
    refused: int = 0
    refused_late: int = 0
    queue_ns: int = 0
    copy_in_ns: int = 0
    compute_ns: int = 0
    copy_out_ns: int = 0
    total_ns: int = 0


class Dispatcher:
    """The driver of an isolated engine: it accepts requests, forms groups, gives them to links, answers.

    :param description: the description of the engine, which is the same in all workers.
    :param heap: the allocator of the memory shared with all workers.
    :param links: the links to its workers.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        description: Description,
        options: Options,
        heap: Heap,
        links: Sequence[Link],
    ) -> None:
        self._loop = loop
        self._options = options
        self._now_ns = clock.now_ns
        self._context = contextvars.copy_context()
        self._description = description
        self._rows_max = description.max_rows
        # The workers' schedulers bound their queues and decide what to drop. This bounds all accepted rows,
        # even while there is no worker.
        in_flight = description.max_rows * description.contexts
        self._rows_bound = (options.max_queue_rows + in_flight) * len(links)
        self._pace = Pace(description.parallel_batches * len(links))
        self._layouts = Layouts(
            description.inputs, description.outputs, places_outputs=description.batching.is_on
        )
        # Workers answer with rows first; callers get the model's own shapes.
        self._results = ResultMemory()
        self._moved = tuple(spec for spec in description.outputs if spec.axis != 0)
        self._memory = heap.memory
        self._heap = heap
        self.links = links
        self._refusing: AsynctrtError | None = None
        self._closed: EngineClosedError | None = None
        self.lost: DeviceLostError | None = None
        """Why nothing can be computed; ``None`` while something can."""
        self._pending: list[Request] = []
        # Whether any caller has named outputs so far. Workers write all outputs, and only the requested ones
        # are copied out of the shared memory.
        self._names_outputs = False
        self._flushes = False
        self._held: deque[RequestGroup] = deque()
        self._expiry: asyncio.TimerHandle | None = None
        # Whether links may have groups with deadlines.
        self._has_deadlines = False
        self.requests = 0
        """Requests that are neither answered nor cancelled."""
        self.rows = 0
        """The rows of those requests."""
        self._idle_waiters: list[asyncio.Future[None]] = []
        self._reaper: Reaper | None = None
        self._copiers: Copiers | None = None
        self._copying: set[RequestGroup] = set()
        self.counters = RequestCounters()
        in_child(self, Dispatcher._let_go)

    def _let_go(self) -> None:
        """Drop all rows in a forked child, which must not write to the memory shared with the workers."""
        self._pending.clear()
        self._held.clear()

    def __repr__(self) -> str:
        return f"<Front {self._description.name!r} requests={self.requests} held={len(self._held)}>"

    def submit(
        self,
        payload: Any,
        rows: int,
        key: BatchKey,
        priority: int,
        timeout_ns: int | None,
        future: "asyncio.Future[InferResult] | None" = None,
        outputs: frozenset[str] | None = None,
    ) -> Request:
        """Accept rows, or raise and change nothing."""
        if self._refusing is not None:
            self.counters.refused += 1
            raise copy_for(self._refusing)
        if self.rows + rows > self._rows_bound:
            self.counters.refused += 1
            raise QueueFullError(
                f"{self.rows} rows wait or are being computed, and there is no room for {rows} more: "
                f"max_queue_rows is {self._options.max_queue_rows}. Retry later, or send less"
            )
        now_ns = self._now_ns()
        deadline_ns = NO_DEADLINE_NS if timeout_ns is None else now_ns + timeout_ns
        if future is None:
            future = self._loop.create_future()
        request = Request(rows, key, priority, now_ns, deadline_ns, payload, future)
        if outputs is not None:
            request.outputs = outputs
            self._names_outputs = True
        self.counters.submitted += 1
        self.requests += 1
        self.rows += rows
        self._pending.append(request)
        if not self._flushes:
            self._flushes = True
            self._loop.call_soon(self._flush, context=self._context)
        return request

    def cancel(self, request: Request) -> None:
        """Drop the request of a caller who has gone away."""
        if request.state is not QUEUED:
            return
        self._over(1, request.rows)
        request.state = State.CANCELLED
        self.counters.cancelled += 1
        group, request.payload = request.payload, None
        if isinstance(group, RequestGroup):
            group.left -= 1
            if not group.left:
                for link in self.links:
                    link.cancel(group)

    async def wait_idle(self) -> None:
        """Wait until every request is answered."""
        while self.requests:
            await self.next_idle()

    def next_idle(self) -> "asyncio.Future[None]":
        """Return a future that is done when every request is answered."""
        waiter: asyncio.Future[None] = self._loop.create_future()
        self._idle_waiters.append(waiter)
        self._over(0, 0)
        return waiter

    def _over(self, requests: int, rows: int) -> None:
        """Count requests that have ended, and notify the waiters for idleness after the last one."""
        self.requests -= requests
        self.rows -= rows
        if self.requests:
            return
        waiters, self._idle_waiters = self._idle_waiters, []
        for waiter in waiters:
            if not waiter.done():
                waiter.set_result(None)

    def refuse(self, why: AsynctrtError) -> None:
        """Refuse new requests; still answer accepted ones."""
        self._refusing = why

    def fail_queued(self, why: EngineClosedError) -> None:
        """Refuse new requests, and fail those not yet launched. Launched ones continue."""
        self._refusing = self._closed = why
        self._fail_unsent(why)
        for link in self.links:
            for group in list(link.groups.values()):
                if not self._memory.words[group.launched]:
                    self._fail_all(group.waiting(), why)
                    group.left = 0
                    link.cancel(group)
            self._fail_groups(link.take_suspects(), why)

    def lose(self, why: DeviceLostError) -> None:
        """Fail all requests until there is a worker again, which may never happen."""
        if self._refusing is self.lost:
            self._refusing = why
        self.lost = why
        self._fail_unsent(why)

    def close(self) -> None:
        """Fail the remaining requests. The links must be closed first."""
        why = EngineClosedError(f"{self._description.name!r} is closed")
        self._fail_unsent(why)
        for group in self._copying:
            self._fail_all(group.requests, why)  # Its block is not freed: a thread may still use it.
            group.left = 0
        for link in self.links:
            self._fail_groups(link.groups.values(), why)
            link.groups.clear()
            # Its worker may have died after `fail_queued`.
            self._fail_groups(link.take_suspects(), why)
        self._has_deadlines = False
        if self._expiry is not None:
            self._expiry.cancel()
        if self._reaper is not None:
            self._reaper.close()
        self._layouts.forget_arrays()
        self._results = ResultMemory()  # A caller may keep the closed engine, but not their memory.

    @property
    def nbytes(self) -> int:
        """The bytes of shared memory used so far."""
        return self._heap.nbytes

    @property
    def row_ns(self) -> float:
        """The time that one more row takes, over all workers together, in ns; 0 while unknown."""
        return self._pace.added_row_ns

    def end_threads(self, timeout_s: float) -> None:
        """End the copy threads, after :meth:`close`. Blocks while they copy, up to ``timeout_s``."""
        if self._copiers is not None:
            self._copiers.close(timeout_s)

    # Out: from requests to links.

    def _flush(self) -> None:
        """Form groups of this tick's requests, and send them."""
        self._flushes = False
        pending, self._pending = self._pending, []
        kinds: dict[tuple[BatchKey, int, int], list[Request]] = {}
        last: tuple[BatchKey | None, int, int] = None, 0, 0
        for request in pending:
            if request.state is not QUEUED:
                continue
            deadline_ns = request.deadline_ns
            timeout_ns = -1 if deadline_ns == NO_DEADLINE_NS else deadline_ns - request.arrival_ns
            # Most requests are of the same kind as the one before; comparing is faster than a lookup.
            if request.key is not last[0] or request.priority != last[1] or timeout_ns != last[2]:
                kind = last = request.key, request.priority, timeout_ns
                requests = kinds.setdefault(kind, [])
            requests.append(request)
        alone = self._options.is_deterministic
        for (key, _, _), requests in kinds.items():
            layout = self._layouts.of_sizes(tuple([size for _, size in key.shape]))  # type: ignore[attr-defined]
            parts = self._pace.parts(sum([request.rows for request in requests]))
            rows_max = max(min(self._rows_max, GROUP_NBYTES_MAX // max(layout.row_nbytes, 1)), 1)
            pieces = 1 if layout.is_large and self._description.is_unified else PIECES
            for part in formed(requests, rows_max, alone=alone, parts=parts, pieces=pieces):
                self._begin(RequestGroup(part, layout))
        self.send_held()

    def _begin(self, group: RequestGroup) -> None:
        """Copy a group's rows into shared memory, here or in threads, and then send it."""
        try:
            group.allocate(self._heap)
        except MemoryError as error:
            self._fail_all(group.requests, QueueFullError(f"{error}. Retry later, or send less"))
            return
        payloads = [request.payload for request in group.requests]
        if group.nbytes > COPY_ON_LOOP_NBYTES_MAX:
            parts = group.writes(self._memory, payloads, self._copy_threads().parts_max)
            if self._copies(group, parts, group.nbytes, partial(self._written_off_loop, group, payloads)):
                return
        self._written(group, group.write(self._memory, payloads))

    def _copies(
        self,
        group: RequestGroup,
        parts: Sequence[Callable[[], object]],
        nbytes: int,
        then: Callable[[BaseException | None], object],
    ) -> bool:
        """Copy rows or outputs of a group in threads, and then call ``then`` on the loop.

        :returns: False if the system refuses threads: then the caller must copy on the loop.
        """
        self._copying.add(group)
        try:
            self._copy_threads().copy_in_parts(parts, nbytes, then)
        except BaseException as error:
            self._copying.discard(group)
            if not isinstance(error, RuntimeError):
                raise
            return False
        return True

    def _written_off_loop(
        self, group: RequestGroup, payloads: Sequence[Any], error: BaseException | None
    ) -> None:
        """Continue with a group after threads have copied its rows or failed to."""
        self._copying.discard(group)
        # If some cannot be copied, find them here: a caller has changed an array meanwhile, which is rare.
        is_changed = error is not None and self._closed is None
        self._written(group, group.write(self._memory, payloads) if is_changed else ())
        self.send_held()

    def _written(self, group: RequestGroup, refused: Iterable[tuple[Request, InputError]]) -> None:
        for request, error in refused:
            self._fail_all([request], error)
        group.left, group.pins = 0, ()
        for request in group.requests:
            if request.state is QUEUED:
                request.payload = group
                group.left += 1
        why = self.lost or self._closed
        if why is not None:
            self._fail_groups([group], why)
        else:
            self._held.append(group)

    def send_held(self) -> None:
        """Give held groups to links, as long as a link accepts more."""
        while self._held:
            link = min(
                (link for link in self.links if link.takes),
                key=lambda link: link.rows,
                default=None,
            )
            if link is None:
                break
            group = self._held.popleft()
            if group.left:
                link.put(group)
                self._has_deadlines |= group.deadline_ns != NO_DEADLINE_NS
            else:
                group.free(self._heap)
        for link in self.links:
            link.publish()
        if (self._held or self._has_deadlines) and self._expiry is None:
            self._expiry = self._loop.call_later(EXPIRY_S, self._expire_due, context=self._context)

    def _expire_due(self) -> None:
        """Expire requests whose deadline has passed, unless a worker will answer them."""
        self._expiry = None
        now_ns = self._now_ns()
        self._expire_overdue(now_ns)
        self._expire_held(now_ns)
        self.send_held()

    def _expire_overdue(self, now_ns: int) -> None:
        """Expire overdue requests that a worker has neither launched nor answered: it is stopped or hangs."""
        due_ns = now_ns - int(EXPIRY_S * 1e9)
        self._has_deadlines = False
        for link in self.links:
            for group in link.unanswered():
                if group.deadline_ns > due_ns or not group.left:
                    self._has_deadlines |= group.deadline_ns != NO_DEADLINE_NS
                elif not self._memory.words[group.launched]:
                    self._expire(group.waiting())
                    group.left = 0
                    link.cancel(group)

    def _expire_held(self, now_ns: int) -> None:
        """Expire overdue requests in held groups; free groups without a waiting caller."""
        kept: deque[RequestGroup] = deque()
        for group in self._held:
            if group.deadline_ns <= now_ns:
                self._expire(group.waiting())
                group.left = 0
            if group.left:
                kept.append(group)
            else:
                group.free(self._heap)
        self._held = kept

    # Back: from links to callers.

    def answered(self, link: Link, group: RequestGroup, fields: tuple[int, ...]) -> None:
        """Answer the requests of a group that a worker has finished."""
        try:
            self._answered(link, group, fields)
        except Exception as error:  # A bug of ours must not leave callers waiting.
            why = InternalError(f"an answer of the worker on {link.device} could not be taken: {error}")
            why.__cause__ = error
            logger.exception("%s", why)
            self._fail_groups([group], why)

    def _answered(self, link: Link, group: RequestGroup, fields: tuple[int, ...]) -> None:
        kind, batches, batch_rows, _, launched_ns, copy_in_ns, compute_ns, copy_out_ns, nbytes, is_large = (
            fields
        )
        if kind == Kind.GONE or not group.left:
            self._fail_groups([group], ExecutionError("it was cancelled in its worker"))
            return
        if self._memory.words[group.launched] != group.layout.stamp(group.number):
            link.kill()
            raise InternalError("what lies in its block was not written there for it, and is not read")
        if kind == Kind.ERROR:
            self._failed(group, self._error_of(group, nbytes, in_large=bool(is_large)))
            return
        self._pace.measured(batch_rows, compute_ns)
        record = BatchRecord(batch_rows, launched_ns)
        record.copy_in_ns, record.compute_ns, record.copy_out_ns = copy_in_ns, compute_ns, copy_out_ns
        records = (record, *[BatchRecord(batch_rows, launched_ns)] * (batches - 1))
        if is_large:
            assert group.large is not None
            views = Placed.read(self._memory, *group.large, self._description.outputs)
        else:
            views = group.arrays(self._memory).outputs
        callers_differ = False
        if self._names_outputs:
            wanted, callers_differ = outputs_of(group.requests)
            if wanted is not None:
                views = {name: view for name, view in views.items() if name in wanted}
        size = sum([view.nbytes for view in views.values()])
        if size > COPY_ON_LOOP_NBYTES_MAX:
            outputs: list[dict[str, Array]] = []

            def copy() -> None:
                outputs.extend(self._copied(group, views, callers_differ=callers_differ))

            if self._copies(group, [copy], size, partial(self._copied_off_loop, group, records, outputs)):
                return
        outputs = self._copied(group, views, callers_differ=callers_differ)
        self._deliver(group, outputs, records)

    def _copied(
        self, group: RequestGroup, views: dict[str, Array], *, callers_differ: bool
    ) -> list[dict[str, Array]]:
        """Return the outputs of each request, copied into arrays that its caller owns."""
        requests = group.requests
        if callers_differ:
            return self._results.copied(views_of(views, requests, spans_of(requests)))
        if len(requests) == 1:
            return self._results.copied([views])
        spans = None if len(requests) == group.rows else spans_of(requests)
        return copy_out(views, spans, group.rows, self._results)

    def _copied_off_loop(
        self,
        group: RequestGroup,
        records: tuple[BatchRecord, ...],
        outputs: list[dict[str, Array]],
        error: BaseException | None,
    ) -> None:
        self._copying.discard(group)
        if error is not None:
            why = ExecutionError(f"its outputs could not be copied: {errors.describe(error)}")
            self._fail_groups([group], why)
        else:
            self._deliver(group, outputs, records)

    def _deliver(
        self, group: RequestGroup, outputs: list[dict[str, Array]], records: tuple[BatchRecord, ...]
    ) -> None:
        group.free(self._heap)
        if self._moved:
            for values in outputs:
                restore_axes(self._moved, values)
        now_ns = self._now_ns()
        counters = self.counters
        record = records[0]
        answered = rows = arrived_ns = 0
        # This loop runs for every request, so work per group is done below it. No callback runs meanwhile.
        for number, request in enumerate(group.requests):
            if request.state is not QUEUED:
                continue
            request.state = DONE
            future = request.future
            request.future = request.payload = None
            answered += 1
            rows += request.rows
            arrived_ns += request.arrival_ns
            if not future.done():
                future.set_result(InferResult(outputs[number], records, request.arrival_ns))
        self._over(answered, rows)
        counters.queue_ns += answered * record.launched_ns - arrived_ns
        counters.total_ns += answered * now_ns - arrived_ns
        counters.succeeded += answered
        counters.copy_in_ns += answered * record.copy_in_ns
        counters.compute_ns += answered * record.compute_ns
        counters.copy_out_ns += answered * record.copy_out_ns

    def _error_of(self, group: RequestGroup, nbytes: int, *, in_large: bool) -> AsynctrtError:
        """Return the error that a worker has written."""
        if in_large:
            assert group.large is not None
            start = group.large[0]
        else:
            start = group.block + group.layout.room_for_text(group.rows)[0]
        told = json.loads(self._memory.buffer[start : start + nbytes])
        kind = getattr(errors, told["kind"], None)
        if not (isinstance(kind, type) and issubclass(kind, AsynctrtError)):
            kind = ExecutionError
        error = kind(told["text"])
        if isinstance(error, DeadlineUnreachableError):
            error.predicted_s = told["predicted_s"]
        for note in told["notes"]:
            error.add_note(note)
        if told["cause"]:
            error.add_note(f"Its cause, in the worker:\n{told['cause']}")
        return error

    def _failed(self, group: RequestGroup, error: AsynctrtError) -> None:
        """Fail the requests of a group, or retry each alone if one of several may be to blame."""
        if type(error) is DeadlineError:
            self._expire(group.waiting())
            group.free(self._heap)
            return
        # Count cancelled requests too: their rows may be to blame.
        may_help = type(error) in (ExecutionError, DeviceMemoryError) and len(group.requests) > 1
        if may_help and self._options.idempotent:
            if self._restored(group):
                self._held.extendleft(reversed(self._singles(group, error)))
            return
        if isinstance(error, QueueFullError | DeadlineUnreachableError):
            self.counters.submitted -= group.left
            self.counters.failed -= group.left
            self.counters.refused += group.left
            if isinstance(error, DeadlineUnreachableError):
                self.counters.refused_late += group.left
        self._fail_groups([group], error)

    # Groups whose worker died.

    def returned(self, groups: list[RequestGroup], how: str) -> list[list[RequestGroup]]:
        """Take back the groups of a worker that died; hold the ones to retry.

        :returns: for each group that was in a batch for the second time, or hung, its requests one by one.
        """
        suspects = []
        again = []
        limit_s = self._options.batch_timeout
        hung_ns = self._now_ns() - int(limit_s * 1e9) if limit_s is not None else -1
        for group in groups:
            if group.large is not None:
                self._heap.free(*group.large)
                group.large = None
            word = group.launched
            was_launched, self._memory.words[word] = self._memory.words[word], 0
            if not group.left:
                group.free(self._heap)
                continue
            if was_launched and not self._options.idempotent:
                why = DeviceLostError(
                    f"the worker process of {self._description.name!r} {how} while it computed the request. "
                    "It is not tried again, since the engine was opened with idempotent=False; others are"
                )
                self._fail_groups([group], why)
                continue
            if was_launched and not self._restored(group):
                continue
            if was_launched:
                group.deaths += 1
                group.hangs = group.hangs or group.sent_ns <= hung_ns
            if was_launched and (group.hangs or group.deaths >= DEATHS_MAX):
                error = DeviceLostError(f"its worker {how}, and there was no room to find out why")
                if singles := self._singles(group, error):
                    suspects.append(singles)
            else:
                again.append(group)
        self._has_deadlines = True
        self._held.extendleft(reversed(again))
        return suspects

    def _restored(self, group: RequestGroup) -> bool:
        """Restore the original rows of a group; return False if no caller waits for them any more."""
        for request, error in group.restore(self._memory):
            self._fail_all([request], error)
        group.left = len(group.waiting())
        if not group.left:
            group.free(self._heap)
        return bool(group.left)

    def room_for(self, group: RequestGroup, nbytes: int) -> int | None:
        """Return a block for an answer that does not fit the group's own; ``None`` if the group failed."""
        try:
            group.large = self._heap.allocate(nbytes), nbytes
        except MemoryError as error:
            self._fail_all(group.requests, ExecutionError(f"there is no room for its outputs: {error}"))
            group.left = 0
            return None
        return group.large[0]

    def link_lost(self) -> None:
        """Fail all requests if no link is left; otherwise give the work to the other links."""
        whys = [link.lost for link in self.links if link.lost is not None]
        if len(whys) == len(self.links):
            self.lose(whys[-1])
        else:
            self.send_held()

    def link_found(self) -> None:
        """Accept requests again if the engine was lost, and send the held groups."""
        if self._refusing is self.lost:
            self._refusing = None
        self.lost = None
        self.send_held()

    def hold(self, groups: Iterable[RequestGroup]) -> None:
        """Hold groups no longer suspected, before all others; free those without a waiting caller."""
        for group in reversed(list(groups)):
            if group.left:
                self._held.appendleft(group)
            else:
                group.free(self._heap)

    def _singles(self, group: RequestGroup, error: AsynctrtError) -> list[RequestGroup]:
        """Return each request of a group as its own group; if there is no room, fail them and return none."""
        if len(group.requests) == 1:
            return [group]
        try:
            singles = group.singles(self._heap)
        except MemoryError:
            self._fail_groups([group], error)
            return []
        group.free(self._heap)
        return singles

    def poisoned(self, group: RequestGroup, how: str) -> None:
        """Fail the request that ended every worker it was given to."""
        logger.error(
            "a request of %d rows to %r ended %d workers, the last time alone in it (%s)",
            group.rows,
            self._description.name,
            group.deaths,
            how,
        )
        error = PoisonError(
            f"the request ({group.rows} row{'s' * (group.rows != 1)}) ended each of the {group.deaths} "
            f"worker processes that computed it, the last one with nothing else in it ({how}). It is not "
            "tried again. Others are not affected"
        )
        self._fail_groups([group], error)

    # The ways in which a request ends.

    def _expire(self, requests: Iterable[Request]) -> None:
        now_ns = self._now_ns()
        for request in requests:
            self._over(1, request.rows)
            request.state = State.EXPIRED
            self.counters.expired += 1
            answer_error(request, deadline_error(request, now_ns))

    def _fail_all(self, requests: Iterable[Request], why: AsynctrtError) -> None:
        for request in requests:
            if request.state is QUEUED:
                self._over(1, request.rows)
                request.state = State.FAILED
                self.counters.failed += 1
                answer_error(request, copy_for(why))

    def _fail_unsent(self, why: AsynctrtError) -> None:
        """Fail the requests that no link has."""
        self._fail_all(self._pending, why)
        self._pending.clear()
        self._fail_groups(self._held, why)
        self._held.clear()

    def _fail_groups(self, groups: Iterable[RequestGroup], why: AsynctrtError) -> None:
        for group in list(groups):
            self._fail_all(group.requests, why)
            group.left = 0
            group.free(self._heap)

    def _copy_threads(self) -> Copiers:
        """Return the copy threads, made on first use: most engines never need them."""
        if self._copiers is None:
            self._reaper = Reaper(self._loop, self._now_ns, context=self._context)
            self._copiers = Copiers(self._reaper, self._now_ns)
        return self._copiers
