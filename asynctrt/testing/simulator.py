"""Runs the real scheduler through random events from a seed, and checks after each that its rules hold.

The scheduler is pure, so there is nothing to mock: time is a number that the simulation moves on. The model
that it asks about profiles is foreign, so the simulated one raises now and then.
"""

import random
from bisect import bisect_left
from collections import Counter, deque
from collections.abc import Hashable
from contextlib import suppress
from dataclasses import dataclass, field

from asynctrt.errors import EngineClosedError, InternalError, QueueFullError
from asynctrt.scheduling.batch import Batch, Reason
from asynctrt.scheduling.key import BatchKey
from asynctrt.scheduling.policy import DEADLINE_MARGIN_NS, Captured, Policy
from asynctrt.scheduling.request import NO_DEADLINE_NS, Request, State
from asynctrt.scheduling.scheduler import Scheduler
from asynctrt.scheduling.shapes import Shapes

FINAL = (State.DONE, State.FAILED, State.CANCELLED, State.EXPIRED)

STARVED_BATCHES = 200
"""Batches of other buckets that may be launched while a request waits at the head of its own."""


@dataclass(slots=True)
class Simulation:
    """What happened in one run. ``log`` is the same for the same seed, down to the last entry."""

    seed: int
    events: int = 0
    answered: Counter[State] = field(default_factory=Counter)
    launched: Counter[Reason] = field(default_factory=Counter)
    refused: int = 0
    rejected: int = 0
    displaced: int = 0
    batches: int = 0
    quarantined: int = 0
    rows: int = 0
    rows_padded: int = 0
    wait_ns_max: int = 0
    log: list[tuple[int, str, int]] = field(default_factory=list)


class _ModelError(Exception):
    """What the simulated model raises when it is asked about a profile."""


class _Model:
    """The profiles of a simulated model: small batches and large ones, and a defect now and then."""

    def __init__(self, rng: random.Random, rows_max: int, fault_share: float) -> None:
        self._random = rng
        self._rows_max = rows_max
        self._fault_share = fault_share

    def row_ranges(self, shape: Hashable) -> list[tuple[int, int]]:
        """Return two ranges: any batch, and one from half of the rows on."""
        self._fail_now_and_then()
        return [(1, self._rows_max), (max(self._rows_max // 2, 1), self._rows_max)]

    def profile_of(self, shape: Hashable, rows: int) -> int:
        """Return 1 for batches of more than half of the rows."""
        self._fail_now_and_then()
        return int(2 * rows > self._rows_max)

    def _fail_now_and_then(self) -> None:
        if self._random.random() < self._fault_share:
            raise _ModelError


class _Run:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)  # noqa: S311  (a simulation, not a secret)
        choose = self.random.choice
        self.rows_max = choose([1, 2, 8, 64])
        self.contexts = self.random.randint(1, 7)
        self.arenas = choose([0, self.contexts, *(self.random.randint(1, self.contexts) for _ in range(3))])
        self.in_flight_max = choose([self.contexts, self.random.randint(1, self.contexts)])
        self.priorities = choose([1, 3])
        self.shapes = choose([1, 2, 5])
        self.queue_rows_max = choose([self.rows_max, 4 * self.rows_max, 1024])
        sizes = sorted(self.random.sample(range(1, self.rows_max + 1), choose([0, 1])))
        # Every eighth engine is deterministic; that leaves the numbers drawn for the others as they are.
        is_alone = seed % 8 == 7
        self.policy = Policy(
            rows_max=self.rows_max,
            delay_ns_max=choose([0, 0, 500_000, 5_000_000]),
            concurrency=choose([1, 2, 4]),
            is_parallel=choose([True, False]),
            captured=Captured(tuple(sizes), direct_ns=choose([0, 40_000]), graph_ns=choose([0, 5_000])),
            is_alone=is_alone,
        )
        # A slow device has many batches in flight, and a full queue; a fast one is idle at times.
        self.end_share, self.pause_ns_max = choose([(0.1, 500_000), (0.3, 10_000_000)])
        self.hang_share = choose([0.0, 0.0, 0.002, 0.02])
        # Batches in each arena of another engine that shares them, and of both together.
        self.foreign = [0] * self.arenas
        self.users: list[int] | None = choose([None, [0] * self.arenas])
        self.rows_fixed = choose([None, None, None, self.rows_max])
        self.has_profiles = self.rows_fixed is None and choose([True, False])
        self.contexts_of: dict[Hashable, set[int]] = {}
        self.quarantined: set[int] = set()
        self.times_all = choose([True, False])
        model = _Model(self.random, self.rows_max, choose([0.0, 0.0, 0.05]))
        self.scheduler = Scheduler(
            policy=self.policy,
            shapes=Shapes(
                rows_max=self.rows_max,
                rows_fixed=self.rows_fixed,
                profiles=model if self.has_profiles else None,
                fills_batches=is_alone,
            ),
            queue_rows_max=self.queue_rows_max,
            priorities=self.priorities,
            contexts=self.contexts,
            arenas=self.arenas,
            in_flight_max=self.in_flight_max,
            arena_users=self.users,
            times_all=self.times_all,
        )
        self.now_ns = 0
        self.pumped_ns = 0
        self.queued: dict[Request, None] = {}
        self.passed_over: Counter[BatchKey] = Counter()
        self.in_flight: dict[int, tuple[Batch, int]] = {}
        self.again: deque[list[Request]] = deque()
        self.timed: Counter[tuple[Hashable, int]] = Counter()
        self.result = Simulation(seed)

    def step(self) -> None:
        roll = self.random.random()
        if roll < 0.55:
            self.submit()
        elif roll < 0.65:
            self.cancel()
        elif roll < 0.65 + self.end_share:
            self.end_batch()
        elif roll < 0.98:
            self.now_ns += self.random.randrange(self.pause_ns_max)
        else:
            self.share_arenas()
        self.now_ns += self.random.randrange(50_000)
        self.pump()
        self.check()
        self.result.events += 1

    def key(self, rows: int) -> BatchKey:
        """Return the key of a new request: of a shape, of a slab, or of arrays on the device."""
        rng = self.random
        # Only rows of one shape are captured, and their shape is empty.
        number = rng.randrange(self.shapes)
        shape: Hashable = () if number == 0 else (("n", number),)
        whole = BatchKey(shape, slab=0)
        if rng.random() < 0.2 and self.scheduler.queued_by_key().get(whole, 0) + rows <= self.rows_max:
            return whole
        return BatchKey(shape, on_device=rng.random() < 0.1)

    def submit(self) -> None:
        rng = self.random
        self.now_ns += 1  # It comes after the last pump, and not with it.
        timeout_ns = rng.choice([None, None, 0, 100_000, 20_000_000])
        rows = rng.randint(1, self.rows_max)
        key = self.key(rows)
        request = Request(
            rows,
            key,
            rng.randrange(self.priorities),
            self.now_ns,
            NO_DEADLINE_NS if timeout_ns is None else self.now_ns + timeout_ns,
        )
        before = repr(self.scheduler)
        queued_rows = self.scheduler.queued_rows
        if rng.random() < 0.01:
            request.priority = None  # type: ignore[assignment]  # What nothing checked must not tear it either.
            with suppress(TypeError, QueueFullError):
                self.scheduler.submit(request)
            _hold(repr(self.scheduler) == before, "a submission that raised changed something")
            return
        try:
            self.scheduler.submit(request)
        except QueueFullError:
            # There are fewer buckets than are looked through.
            kept = sum(other.rows for other in self.queued if other.priority >= request.priority)
            _hold(kept + request.rows > self.queue_rows_max, "refused with room left")
            self.result.refused += 1
        except Exception as error:
            _hold(isinstance(error.__cause__, _ModelError), f"submit raised {error!r}")
            _hold(repr(self.scheduler) == before, "a submission that was refused changed something")
        else:
            self.displace(request, queued_rows)
            self.queued[request] = None

    def displace(self, request: Request, queued_rows: int) -> None:
        """Expect the least urgent requests to be gone, as many as had to make room."""
        displaced, self.scheduler.displaced = self.scheduler.displaced, []
        room = self.queue_rows_max - queued_rows
        for other in displaced:
            _hold(room < request.rows, "more requests were displaced than had to be")
            _hold(other.priority < request.priority, "a request was displaced by one that is not more urgent")
            _hold(other.state is State.FAILED, "a displaced request goes on")
            room += other.rows
            self.finish(other)
        _hold(room >= request.rows, "the queue is over its bound")
        if displaced:
            urgency = max(other.priority for other in displaced)
            least = min((other.priority for other in self.queued), default=urgency)
            _hold(least >= urgency, "a more urgent request was displaced though a less urgent one waits")
            self.result.displaced += len(displaced)

    def cancel(self) -> None:
        flying = [request for batch, _ in self.in_flight.values() for request in batch.requests]
        flying += [request for part in self.again for request in part]
        candidates = [*self.queued, *flying]
        if candidates:
            request = self.random.choice(candidates)
            was_queued = request.state is State.QUEUED
            _hold(self.scheduler.cancel(request) is was_queued, "cancelling misjudged a request")
            _hold(request.state in (State.CANCELLED, State.MASKED), "a cancelled request goes on")
            if was_queued:
                self.finish(request)

    def share_arenas(self) -> None:
        """Let the other engine launch a batch, or end one."""
        if self.users:
            arena = self.random.randrange(self.arenas)
            more = -1 if self.foreign[arena] and self.random.random() < 0.5 else 1
            self.foreign[arena] += more
            self.users[arena] += more

    def neighbours(self, context: int) -> set[int]:
        """Return the contexts that work in the same arena; all, if there is none."""
        groups = max(self.arenas, 1)
        return set(range(context % groups, self.contexts, groups))

    def end_batch(self, *, closing: bool = False) -> None:
        if not self.in_flight:
            return
        number = self.random.choice(list(self.in_flight))
        batch, start_ns = self.in_flight.pop(number)
        roll = 1.0 if closing else self.random.random()
        if roll < self.hang_share:
            self.scheduler.failed(batch, quarantine=True)
            lost = {batch.context} if batch.arena is None else self.neighbours(batch.context)
            self.quarantined |= lost
        elif roll < self.hang_share + 0.05:
            # Half of those that fail do so because of a row.
            if number % 2 and self.scheduler.bisect(batch):
                self.bisect(batch)
                return
            self.scheduler.failed(batch)
        else:
            self.complete(batch, self.now_ns - start_ns)
        self.result.batches += 1
        for request in batch.requests:
            self.finish(request)

    def bisect(self, batch: Batch) -> None:
        """Expect the halves of a batch that failed, without those who have gone away."""
        self.result.batches += 1
        left = [request for request in batch.requests if request.state is State.IN_FLIGHT]
        _hold(len(batch.requests) > 1, "a batch of one request was bisected")
        self.again += [half for half in (left[: (len(left) + 1) // 2], left[(len(left) + 1) // 2 :]) if half]
        for request in batch.requests:
            if request.state is not State.IN_FLIGHT:
                self.finish(request)

    def take_again(self, requests: tuple[Request, ...]) -> None:
        """Expect these to be the part of a failed batch that has waited longest, but for who left since."""
        self.forget_again()
        _hold(bool(self.again), "a batch again of which no part failed")
        part = self.again.popleft()
        for request in part:
            if request.state is State.CANCELLED:
                self.finish(request)
        left = tuple(request for request in part if request.state is not State.CANCELLED)
        _hold(requests == left, "a part of a failed batch came back as something else")

    def forget_again(self) -> None:
        """Let go of the parts whose callers have all left."""
        while self.again and all(request.state is State.CANCELLED for request in self.again[0]):
            for request in self.again.popleft():
                self.finish(request)

    def launch_again(self, batch: Batch) -> None:
        self.take_again(batch.requests)
        _hold(all(request.state is State.IN_FLIGHT for request in batch.requests), "not in flight")
        self.check_rows_run(batch)
        self.check_context(batch)
        self.scheduler.started(batch, self.now_ns)
        self.in_flight[batch.number] = (batch, self.now_ns)
        self.result.launched[batch.reason] += 1

    def complete(self, batch: Batch, took_ns: int) -> None:
        scheduler = self.scheduler
        scheduler.landed(batch, self.now_ns)
        if batch.is_timed:
            scheduler.observe_copies(batch, copy_in_ns=1, copy_out_ns=3)
            self.timed[batch.key.shape, batch.rows_run] += 1
        scheduler.finished(batch, self.now_ns, copy_in_ns=1, compute_ns=took_ns, copy_out_ns=3)
        self.result.rows += batch.rows
        self.result.rows_padded += batch.rows_run - batch.rows

    def pump(self) -> None:
        """Do what the driver does at the end of a tick."""
        pumped_ns = self.now_ns
        self.expire(arrived_by_ns=self.pumped_ns)
        while (decided := self.scheduler.next_batch(self.now_ns)) is not None:
            if isinstance(decided, Batch):
                self.launch(decided)
                continue
            cause = decided.error.__cause__
            _hold(isinstance(cause, _ModelError), f"a batch was rejected: {decided.error!r}")
            self.result.rejected += 1
            if decided.requests[0] not in self.queued:
                self.take_again(decided.requests)
            for request in decided.requests:
                _hold(request.state is State.FAILED, "a rejected request goes on")
                self.finish(request)
        self.forget_again()
        self.expire()
        self.pumped_ns = pumped_ns

    def launch(self, batch: Batch) -> None:
        if batch.reason is Reason.AGAIN:
            self.launch_again(batch)
            return
        self.check_batch(batch)
        self.check_reason(batch)
        self.check_rows_run(batch)
        self.check_context(batch)
        self.check_turn(batch)
        expected_ns = self.scheduler.started(batch, self.now_ns)
        seen = any(self.timed[batch.key.shape, rows] for rows in range(1, batch.rows_run + 1))
        _hold((expected_ns is not None) == seen, "an expectation out of nothing, or none out of something")
        _hold(expected_ns is None or expected_ns >= 0, "expected in the past")
        self.in_flight[batch.number] = (batch, self.now_ns)
        for request in batch.requests:
            del self.queued[request]
            waited_ns = self.now_ns - request.arrival_ns
            self.result.wait_ns_max = max(self.result.wait_ns_max, waited_ns)
        self.result.launched[batch.reason] += 1
        self.result.log.append((self.now_ns, f"launch {batch.reason}", batch.rows))

    def expire(self, *, arrived_by_ns: int = NO_DEADLINE_NS) -> None:
        for request in self.scheduler.expire(self.now_ns, arrived_by_ns=arrived_by_ns):
            _hold(request.deadline_ns <= self.now_ns, "expired before its deadline")
            _hold(request.arrival_ns <= arrived_by_ns, "expired before it had a chance to be launched")
            self.finish(request)

    def finish(self, request: Request) -> None:
        _hold(request.state in FINAL, f"{request!r} was answered and is not final")
        self.queued.pop(request, None)
        self.result.answered[request.state] += 1
        self.result.log.append((self.now_ns, request.state.name, request.rows))

    def check_batch(self, batch: Batch) -> None:
        rows = sum(request.rows for request in batch.requests)
        _hold(batch.rows == rows, "a batch miscounts its rows")
        _hold(0 < rows <= self.rows_max, f"a batch of {rows} rows")
        _hold(all(r.key == batch.key for r in batch.requests), "keys were mixed")
        _hold(all(r.state is State.IN_FLIGHT for r in batch.requests), "not in flight")
        late = [r for r in batch.requests if r.deadline_ns <= self.now_ns and r.arrival_ns <= self.pumped_ns]
        _hold(not late, "launched after its deadline, though it had a chance before")
        if self.policy.is_alone:
            _hold(len(batch.requests) == 1, "a request that is to be alone has company")
        elif batch.key.slab is not None:
            left = batch.key in self.scheduler.queued_by_key()
            _hold(not left, "the rows of a slab were launched in parts")
        urgent = max((r.priority for r in self.queued if r.key == batch.key), default=0)
        _hold(
            any(r.priority == urgent for r in batch.requests),
            "a batch left the most urgent requests of its bucket behind",
        )

    def check_reason(self, batch: Batch) -> None:
        in_flight = len(self.in_flight)
        queued: Counter[BatchKey] = Counter()
        for request in self.queued:
            queued[request.key] += request.rows
        is_full = queued[batch.key] >= self.rows_max
        is_saturated = in_flight >= self.policy.concurrency
        some_full = any(rows >= self.rows_max for rows in queued.values())
        _hold(
            (batch.reason is Reason.FULL) == is_full, f"{batch.reason} with {queued[batch.key]} rows queued"
        )
        _hold(not is_saturated or some_full, "launched although the device has enough to do")
        _hold((batch.reason is Reason.TURN) <= is_saturated, "a turn on a device that has room")
        # Cancelled and expired requests make a bucket smaller that was ready already.
        has_shrunk = {State.CANCELLED, State.EXPIRED} & set(self.result.answered)
        if not is_full and in_flight and self.policy.delay_ns_max and not has_shrunk:
            mates = [request for request in self.queued if request.key == batch.key]
            waited_ns = self.now_ns - min(request.arrival_ns for request in mates)
            due_ns = min(request.deadline_ns for request in mates) - DEADLINE_MARGIN_NS
            over = waited_ns >= self.policy.delay_ns_max or due_ns <= self.now_ns
            _hold(over, "a batch that was filling was launched before its delay was over")

    def check_rows_run(self, batch: Batch) -> None:
        sizes = self.policy.captured.sizes if batch.key.shape == () else ()
        padded = sizes[bisect_left(sizes, batch.rows) :][:1]
        allowed = (self.rows_fixed,) if self.rows_fixed is not None else (batch.rows, *padded)
        if self.policy.is_alone:
            allowed = (self.rows_max,)
        _hold(batch.rows_run in allowed, "padded to a size that is not the next captured one")
        if self.has_profiles:
            _hold(batch.profile == int(2 * batch.rows_run > self.rows_max), "a profile of other rows")
        else:
            _hold(batch.profile is None, "a profile out of nowhere")
        if self.times_all:
            _hold(batch.is_timed, "a batch was not timed although all are")
        elif batch.number % 8 and self.timed[batch.key.shape, batch.rows_run] >= 16:
            known_ns = self.scheduler.usual_ns(batch)[1]
            _hold(not batch.is_timed or known_ns >= 5_000_000, "a well-known size was timed out of turn")

    def check_context(self, batch: Batch) -> None:
        busy = {other.context for other, _ in self.in_flight.values()}
        free = set(range(self.contexts)) - busy - self.quarantined
        _hold(batch.context not in busy, "a context was given out twice")
        _hold(batch.context in free, "a context in quarantine was given out")
        if self.arenas:
            _hold(batch.arena == batch.context % self.arenas, "a context works in another arena")
            users = Counter(other.arena for other, _ in self.in_flight.values())
            least = min((users[arena] + self.foreign[arena]) for arena in {one % self.arenas for one in free})
            taken = users[batch.arena] + self.foreign[batch.arena or 0]
            _hold(taken == least, "a fuller arena was taken")
        else:
            _hold(batch.arena is None, "an arena out of nowhere")
        if self.has_profiles:
            others = free & self.neighbours(batch.context)
            ran = others & self.contexts_of.setdefault(batch.profile, set())
            never_ran = others - set().union(*self.contexts_of.values())
            _hold(batch.context in (ran or never_ran or others), "a context of another profile was taken")
            for contexts in self.contexts_of.values():
                contexts.discard(batch.context)
            self.contexts_of[batch.profile].add(batch.context)

    def check_turn(self, batch: Batch) -> None:
        """No bucket whose requests are as urgent is passed over for ever."""
        urgency = max(request.priority for request in batch.requests)
        waiting: dict[BatchKey, int] = {}
        for request in self.queued:
            waiting[request.key] = max(waiting.get(request.key, 0), request.priority)
        del self.passed_over[batch.key]
        for key in list(self.passed_over):
            if key not in waiting:
                del self.passed_over[key]
        for key, priority in waiting.items():
            if key != batch.key and priority >= urgency:
                self.passed_over[key] += 1
                # Every other bucket may have its turn, and those that fill up while one waits for its delay.
                # There are three keys a shape: for arrays on the host, on the device, and in a slab.
                turns = 2 * 3 * self.shapes + (STARVED_BATCHES if self.policy.delay_ns_max else 0)
                _hold(self.passed_over[key] <= turns, "a bucket is passed over again and again")
                if priority > urgency and not self.policy.delay_ns_max:
                    _hold(condition=False, broken="a less urgent bucket went first")

    def check(self) -> None:
        scheduler = self.scheduler
        snapshot = scheduler.snapshot()
        _hold(snapshot.queued_requests == len(self.queued), "queued requests miscounted")
        _hold(snapshot.queued_rows == sum(r.rows for r in self.queued), "queued rows miscounted")
        by_key = scheduler.queued_by_key()
        _hold(sum(by_key.values()) == snapshot.queued_rows, "the buckets miscount their rows")
        _hold(snapshot.queued_rows <= self.queue_rows_max, "the queue is over its bound")
        _hold(snapshot.in_flight_batches == len(self.in_flight), "batches in flight miscounted")
        _hold(snapshot.in_flight_batches <= self.in_flight_max, "too many batches in flight")
        usable = self.contexts - len(self.quarantined)
        _hold(snapshot.contexts_quarantined == len(self.quarantined), "quarantined contexts miscounted")
        _hold(scheduler.is_stuck == (not usable), "stuck although a context is left, or the other way round")
        has_work = bool(self.queued or self.again)
        _hold(not (has_work and usable) or bool(self.in_flight), "work waits while nothing is in flight")
        if self.users is not None:
            own = Counter(batch.arena for batch, _ in self.in_flight.values())
            expected = [own[arena] + self.foreign[arena] for arena in range(self.arenas)]
            _hold(self.users == expected, "the users of an arena are miscounted")
        wakeup_ns = scheduler.next_wakeup()
        deadlines = [r.deadline_ns for r in self.queued if r.deadline_ns != NO_DEADLINE_NS]
        if deadlines:
            _hold(wakeup_ns is not None and wakeup_ns <= min(deadlines), "a deadline is not watched")
        has_room = usable > 0 and len(self.in_flight) < min(self.policy.concurrency, self.in_flight_max)
        if self.policy.delay_ns_max and self.queued and has_room and len(self.in_flight) < usable:
            oldest_ns = min(request.arrival_ns for request in self.queued)
            end_ns = oldest_ns + self.policy.delay_ns_max
            end_ns = min([end_ns, *(deadline_ns - DEADLINE_MARGIN_NS for deadline_ns in deadlines)])
            _hold(wakeup_ns is not None and wakeup_ns <= end_ns, "the end of a delay is not watched")

    def end(self) -> None:
        """Close with work queued and in flight: everything is answered all the same."""
        closed = self.scheduler.close(EngineClosedError("closed"))
        masked = [request for part in self.again for request in part if request.state is State.CANCELLED]
        self.again.clear()
        for request in [*closed, *masked]:
            self.finish(request)
        while self.in_flight:
            self.end_batch(closing=True)
        self.result.quarantined = len(self.quarantined)
        self.check_counters()
        _hold(self.scheduler.is_idle and not self.queued, "something is left after closing")
        try:
            self.scheduler.submit(Request(1, BatchKey(), 0, self.now_ns))
        except EngineClosedError:
            return
        _hold(condition=False, broken="a closed scheduler took a request")

    def check_counters(self) -> None:
        snapshot, result = self.scheduler.snapshot(), self.result
        counters = snapshot.counters
        for state, count in (
            (State.DONE, counters.succeeded),
            (State.FAILED, counters.failed),
            (State.CANCELLED, counters.cancelled),
            (State.EXPIRED, counters.expired),
        ):
            _hold(result.answered[state] == count, f"{state.name} was counted {count} times")
        _hold(snapshot.submitted == sum(result.answered.values()), "submissions miscounted")
        _hold((counters.rows, counters.rows_padded) == (result.rows, result.rows_padded), "rows miscounted")
        launched = {reason: count for reason, count in counters.launched.items() if count}
        _hold(launched == result.launched, "the reasons of batches are miscounted")


def simulate(seed: int, *, events: int = 2000) -> Simulation:
    """Run one simulation: its configuration and its events follow from ``seed`` alone.

    :raises InternalError: when a rule of the scheduler is broken; the message names seed and event.
    """
    run = _Run(seed)
    try:
        for _ in range(events):
            run.step()
        run.end()
    except Exception as error:
        what = error if isinstance(error, InternalError) else f"{type(error).__name__}: {error}"
        raise InternalError(f"seed {seed}, event {run.result.events}: {what}") from error
    return run.result


def _hold(condition: bool, broken: str) -> None:  # noqa: FBT001  (reads as an assertion)
    if not condition:
        raise InternalError(broken)
