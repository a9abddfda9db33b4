"""Runs the real scheduler through random events from a seed, and checks after each that its rules hold.

The scheduler is pure, so there is nothing to mock: time is a number that the simulation moves on.
"""

import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, field

from asynctrt.errors import EngineClosedError, InternalError, QueueFullError
from asynctrt.scheduling.ledger import Launch
from asynctrt.scheduling.policy import Policy
from asynctrt.scheduling.request import NO_DEADLINE_NS, Request, State, WholeBucket
from asynctrt.scheduling.scheduler import Scheduler

FINAL = (State.DONE, State.FAILED, State.CANCELLED, State.EXPIRED)


@dataclass(slots=True)
class Simulation:
    """What happened in one run. ``log`` is the same for the same seed, down to the last entry."""

    seed: int
    events: int = 0
    answered: Counter[State] = field(default_factory=Counter)
    refused: int = 0
    batches: int = 0
    quarantined: int = 0
    rows: int = 0
    rows_padded: int = 0
    wait_ns_max: int = 0
    log: list[tuple[int, str, int]] = field(default_factory=list)


class _Run:
    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)  # noqa: S311  (a simulation, not a secret)
        choose = self.random.choice
        self.rows_max = choose([1, 2, 8, 64])
        self.contexts = self.random.randint(1, 7)
        self.arenas = choose([0, self.contexts, *(self.random.randint(1, self.contexts) for _ in range(3))])
        self.in_flight_max = choose([self.contexts, self.random.randint(1, self.contexts)])
        self.priorities = choose([1, 3])
        self.buckets = choose([1, 2, 5])
        self.queue_rows_max = choose([self.rows_max, 4 * self.rows_max, 1024])
        self.policy = Policy(
            rows_max=self.rows_max,
            delay_ns_max=choose([0, 0, 500_000, 5_000_000]),
            slots=choose([1, 2, 4]),
            is_parallel=choose([True, False]),
        )
        self.sizes = sorted(self.random.sample(range(1, self.rows_max + 1), choose([0, 1])))
        # A slow device has many batches in flight, and a full queue; a fast one is idle at times.
        self.end_share, self.pause_ns_max = choose([(0.1, 500_000), (0.3, 10_000_000)])
        self.hang_share = choose([0.0, 0.0, 0.002, 0.02])
        # Batches in each arena of another engine that shares them, and of both together.
        self.foreign = [0] * self.arenas
        self.users: list[int] | None = choose([None, [0] * self.arenas])
        self.has_kinds = choose([True, False])
        self.contexts_of: dict[Hashable, set[int]] = {}
        self.quarantined: set[int] = set()
        self.scheduler = Scheduler(
            policy=self.policy,
            queue_rows_max=self.queue_rows_max,
            priorities=self.priorities,
            contexts=self.contexts,
            arenas=self.arenas,
            in_flight_max=self.in_flight_max,
            arena_users=self.users,
            kind_of=self.kind_of if self.has_kinds else None,
        )
        self.now_ns = 0
        self.queued: dict[Request, None] = {}
        self.in_flight: dict[int, tuple[Launch, int]] = {}
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

    def submit(self) -> None:
        rng = self.random
        timeout_ns = rng.choice([None, None, 0, 100_000, 20_000_000])
        rows = rng.randint(1, self.rows_max)
        bucket: Hashable = rng.randrange(self.buckets)
        whole = WholeBucket(bucket, 0)
        if rng.random() < 0.2 and self.scheduler.buckets().get(whole, 0) + rows <= self.rows_max:
            bucket = whole
        request = Request(
            rows,
            bucket,
            rng.randrange(self.priorities),
            self.now_ns,
            NO_DEADLINE_NS if timeout_ns is None else self.now_ns + timeout_ns,
        )
        before = self.scheduler.queued_rows
        try:
            self.scheduler.submit(request)
        except QueueFullError:
            _hold(before + request.rows > self.queue_rows_max, "refused with room left")
            self.result.refused += 1
        else:
            self.queued[request] = None

    def cancel(self) -> None:
        flying = [request for launch, _ in self.in_flight.values() for request in launch.requests]
        candidates = [*self.queued, *flying]
        if candidates:
            request = self.random.choice(candidates)
            was_queued = request.state is State.QUEUED
            _hold(self.scheduler.cancel(request) is was_queued, "cancelling misjudged a request")
            _hold(request.state in (State.CANCELLED, State.MASKED), "a cancelled request goes on")
            if was_queued:
                self.finish(request)

    def share_arenas(self) -> None:
        """The other engine launches a batch, or one of its batches ends."""
        if self.users:
            arena = self.random.randrange(self.arenas)
            more = -1 if self.foreign[arena] and self.random.random() < 0.5 else 1
            self.foreign[arena] += more
            self.users[arena] += more

    def kind_of(self, bucket: Hashable, rows: int) -> Hashable:
        """As profiles do it: by what is in a row, and by how many there are."""
        return bucket.bucket if isinstance(bucket, WholeBucket) else bucket, 2 * rows > self.rows_max

    def lane(self, context: int) -> set[int]:
        """The contexts that work in the same arena; all, if there is none."""
        lanes = max(self.arenas, 1)
        return set(range(context % lanes, self.contexts, lanes))

    def end_batch(self, *, closing: bool = False) -> None:
        if not self.in_flight:
            return
        number = self.random.choice(list(self.in_flight))
        launch, start_ns = self.in_flight.pop(number)
        roll = 1.0 if closing else self.random.random()
        if roll < self.hang_share:
            self.scheduler.fail(launch, quarantine=True)
            self.quarantined |= {launch.context} if launch.arena is None else self.lane(launch.context)
        elif roll < self.hang_share + 0.05:
            self.scheduler.fail(launch)
        else:
            self.complete(launch, self.now_ns - start_ns)
        self.result.batches += 1
        for request in launch.requests:
            self.finish(request)

    def complete(self, launch: Launch, took_ns: int) -> None:
        scheduler = self.scheduler
        scheduler.timeline.landed(launch, self.now_ns)
        times_ns = {"copy_in_ns": 1, "copy_out_ns": 3}
        is_timed = scheduler.timeline.wants_times(launch)
        if is_timed:
            scheduler.timeline.timed(launch, **times_ns)
        scheduler.complete(launch, self.now_ns, compute_ns=took_ns, is_timed=is_timed, **times_ns)
        self.result.rows += launch.rows
        self.result.rows_padded += launch.rows_run - launch.rows

    def pump(self) -> None:
        for request in self.scheduler.expire(self.now_ns):
            _hold(request.deadline_ns <= self.now_ns, "expired before its deadline")
            self.finish(request)
        while (launch := self.scheduler.next_launch(self.now_ns)) is not None:
            self.check_launch(launch)
            self.check_context(launch)
            self.run(launch)
            self.in_flight[launch.number] = (launch, self.now_ns)
            for request in launch.requests:
                del self.queued[request]
                waited_ns = self.now_ns - request.arrival_ns
                self.result.wait_ns_max = max(self.result.wait_ns_max, waited_ns)
            self.result.log.append((self.now_ns, "launch", launch.rows))

    def run(self, launch: Launch) -> None:
        """What the driver asks before it puts a batch on the device."""
        sizes = self.sizes
        launch.rows_run = self.scheduler.rows_to_run(launch, launch.rows, sizes)
        padded = sizes[bisect_left(sizes, launch.rows) :][:1]
        _hold(launch.rows_run in (launch.rows, *padded), "padded to a size that is not the next captured one")
        expected_ns = self.scheduler.timeline.launched(launch, self.now_ns)
        known_ns = self.scheduler.latency.expected_ns(launch.bucket, launch.rows_run)
        _hold((expected_ns is None) == (known_ns is None), "an expectation out of nothing")
        _hold(expected_ns is None or expected_ns >= (known_ns or 0), "expected before it can have computed")

    def finish(self, request: Request) -> None:
        _hold(request.state in FINAL, f"{request!r} was answered and is not final")
        self.queued.pop(request, None)
        self.result.answered[request.state] += 1
        self.result.log.append((self.now_ns, request.state.name, request.rows))

    def check_launch(self, launch: Launch) -> None:
        rows = sum(request.rows for request in launch.requests)
        _hold(launch.rows == rows, "a batch miscounts its rows")
        _hold(0 < rows <= self.rows_max, f"a batch of {rows} rows")
        _hold(all(r.bucket == launch.bucket for r in launch.requests), "buckets were mixed")
        _hold(all(r.state is State.IN_FLIGHT for r in launch.requests), "not in flight")
        _hold(all(r.deadline_ns > self.now_ns for r in launch.requests), "launched after its deadline")
        if isinstance(launch.bucket, WholeBucket):
            left = launch.bucket in self.scheduler.buckets()
            _hold(not left, "a whole bucket was launched in parts")
        urgent = max((r.priority for r in self.queued if r.bucket == launch.bucket), default=0)
        _hold(
            any(r.priority == urgent for r in launch.requests),
            "a batch left the most urgent requests of its bucket behind",
        )

    def check_context(self, launch: Launch) -> None:
        busy = {other.context for other, _ in self.in_flight.values()}
        free = set(range(self.contexts)) - busy - self.quarantined
        _hold(launch.context not in busy, "a context was leased twice")
        _hold(launch.context in free, "a context in quarantine was leased")
        if self.arenas:
            _hold(launch.arena == launch.context % self.arenas, "a context works in another arena")
            users = Counter(other.arena for other, _ in self.in_flight.values())
            least = min((users[lane] + self.foreign[lane]) for lane in {one % self.arenas for one in free})
            _hold(users[launch.arena] + self.foreign[launch.arena or 0] == least, "a fuller arena was taken")
        else:
            _hold(launch.arena is None, "an arena out of nowhere")
        if self.has_kinds:
            kind = self.kind_of(launch.bucket, launch.rows)
            others = free & self.lane(launch.context)
            ran = others & self.contexts_of.setdefault(kind, set())
            never_ran = others - set().union(*self.contexts_of.values())
            _hold(launch.context in (ran or never_ran or others), "a context of another kind was taken")
            for contexts in self.contexts_of.values():
                contexts.discard(launch.context)
            self.contexts_of[kind].add(launch.context)

    def check(self) -> None:
        scheduler = self.scheduler
        ledger = scheduler.ledger
        _hold(scheduler.queued_requests == len(self.queued), "queued requests miscounted")
        _hold(scheduler.queued_rows == sum(r.rows for r in self.queued), "queued rows miscounted")
        buckets = scheduler.buckets()
        _hold(sum(buckets.values()) == scheduler.queued_rows, "the buckets miscount their rows")
        _hold(all(buckets.values()), "an empty bucket is kept")
        _hold(scheduler.queued_rows <= self.queue_rows_max, "the queue is over its bound")
        _hold(len(ledger.in_flight) == len(self.in_flight), "batches in flight miscounted")
        _hold(len(ledger.in_flight) <= self.in_flight_max, "too many batches in flight")
        usable = self.contexts - len(self.quarantined)
        _hold(ledger.quarantined == self.quarantined, "the quarantine holds others than those that hang")
        _hold(ledger.usable_contexts == usable, "a context was lost")
        _hold(scheduler.is_stuck == (not usable), "stuck is not what it says")
        _hold(not (self.queued and usable) or bool(self.in_flight), "work waits while nothing is in flight")
        if self.users is not None:
            own = Counter(launch.arena for launch, _ in self.in_flight.values())
            expected = [own[arena] + self.foreign[arena] for arena in range(self.arenas)]
            _hold(self.users == expected, "the users of an arena are miscounted")
        wakeup_ns = scheduler.next_wakeup()
        deadlines = [r.deadline_ns for r in self.queued if r.deadline_ns != NO_DEADLINE_NS]
        if deadlines:
            _hold(wakeup_ns is not None and wakeup_ns <= min(deadlines), "a deadline is not watched")

    def end(self) -> None:
        """Close with work queued and in flight: everything is answered all the same."""
        for request in self.scheduler.close(EngineClosedError("closed")):
            self.finish(request)
        while self.in_flight:
            self.end_batch(closing=True)
        self.result.quarantined = len(self.quarantined)
        self.check_totals()
        _hold(self.scheduler.is_idle and not self.queued, "something is left after closing")
        try:
            self.scheduler.submit(Request(1, 0, 0, self.now_ns))
        except EngineClosedError:
            return
        _hold(condition=False, broken="a closed scheduler took a request")

    def check_totals(self) -> None:
        totals, result = self.scheduler.ledger.totals, self.result
        for state, count in (
            (State.DONE, totals.succeeded),
            (State.FAILED, totals.failed),
            (State.CANCELLED, totals.cancelled),
            (State.EXPIRED, totals.expired),
        ):
            _hold(result.answered[state] == count, f"{state.name} was counted {count} times")
        _hold(self.scheduler.submitted == sum(result.answered.values()), "submissions miscounted")
        _hold((totals.rows, totals.rows_padded) == (result.rows, result.rows_padded), "rows miscounted")


def simulate(seed: int, *, events: int = 2000) -> Simulation:
    """Run one simulation: its configuration and its events follow from ``seed`` alone.

    :raises InternalError: when a rule of the scheduler is broken; the message names seed and event.
    """
    run = _Run(seed)
    try:
        for _ in range(events):
            run.step()
        run.end()
    except InternalError as error:
        raise InternalError(f"seed {seed}, event {run.result.events}: {error}") from error
    return run.result


def _hold(condition: bool, broken: str) -> None:  # noqa: FBT001  (reads as an assertion)
    if not condition:
        raise InternalError(broken)
