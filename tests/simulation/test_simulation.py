"""The scheduler under random events from seeds: its rules hold after each, and a seed repeats itself."""

import pytest

from asynctrt.errors import InternalError
from asynctrt.scheduling.batch import Reason
from asynctrt.scheduling.contexts import ContextAllocator
from asynctrt.scheduling.estimates import CompletionEstimator
from asynctrt.scheduling.key import BatchKey
from asynctrt.scheduling.policy import Policy
from asynctrt.scheduling.queues import BucketQueue, Buckets, DeadlineHeap
from asynctrt.scheduling.request import NO_DEADLINE_NS, Change, State
from asynctrt.scheduling.scheduler import Scheduler
from asynctrt.scheduling.shapes import Shapes
from asynctrt.testing.simulator import simulate


@pytest.mark.tier2
@pytest.mark.parametrize("block", range(10))
def test_the_rules_hold_for_a_block_of_seeds(block):
    for seed in range(block * 20, block * 20 + 20):
        simulate(seed, events=500)


@pytest.mark.tier2
@pytest.mark.timeout(600)
@pytest.mark.parametrize("block", range(10))
def test_the_rules_hold_for_many_more_seeds(block):
    for seed in range(1000 + block * 60, 1000 + block * 60 + 60):
        simulate(seed, events=1500)


def test_the_same_seed_gives_the_same_run():
    assert simulate(7, events=600) == simulate(7, events=600)
    assert simulate(7, events=600).log != simulate(8, events=600).log


def test_the_seeds_together_see_whatever_can_happen():
    runs = [simulate(seed, events=300) for seed in range(60)]
    ends = set().union(*(run.answered for run in runs))
    assert ends == {State.DONE, State.FAILED, State.CANCELLED, State.EXPIRED}
    assert set().union(*(run.launched for run in runs)) == set(Reason) - {Reason.AHEAD}
    assert any(run.quarantined for run in runs)
    assert any(run.rows_padded for run in runs)
    assert any(run.rejected for run in runs)
    assert any(run.refused for run in runs)
    assert sum(not run.quarantined for run in runs) > 20, "most run undisturbed"


# Each of these plants a defect back that the scheduler once had, or could have. Every one must be found.


def ask_the_model_too_late(self, now_ns):
    """Take requests out of their queue first, and ask for their profile then."""
    picked = self._buckets.pick(now_ns, len(self._in_flight))
    if self._queued_rows and self._contexts.free and picked is not None:
        bucket = picked[0]
        chosen, rows = bucket.choose(bucket.rows_max)
        try:
            self._shapes.profile(bucket.key.shape, self._shapes.padded_rows(bucket.key.shape, rows))
        except Exception:
            self._take(bucket, chosen, rows, Change.LAUNCH)
            raise
    return next_batch(self, now_ns)


def starve_what_is_not_full(self, now_ns, in_flight):
    """Let only full buckets go while the device is busy, whoever waits."""
    if in_flight < self._policy.concurrency or not self._full:
        return pick(self, now_ns, in_flight)
    for level in reversed(self._levels):
        for bucket in level.ready:
            if bucket.is_full:
                return bucket, Reason.FULL
    return None


def go_first_again(self, bucket):
    """Leave a bucket at the head of its turn after it had it."""
    launched(self, bucket)
    if bucket.priority >= 0:
        level = self._levels[bucket.priority]
        (level.ready if bucket.is_ready else level.filling).move_to_end(bucket, last=False)


def forget_priorities(self, now_ns, in_flight):
    self._priority_max = 0
    return pick(self, now_ns, in_flight)


def count_the_delay_from_the_newest(self):
    return max((request.arrival_ns for request in self.waiting()), default=NO_DEADLINE_NS)


def let_deadlines_pass(self, oldest_arrival_ns, deadline_ns):
    return oldest_arrival_ns + self.delay_ns_max


def launch_at_once(self, oldest_arrival_ns, deadline_ns):
    return 0


def expire_whatever_is_due(self, now_ns, arrived_by_ns):
    return pop_due(self, now_ns, NO_DEADLINE_NS)


def forget_the_arena(self, context, arena):
    """Quarantine a context and leave those that share its arena in use."""
    self.quarantined.add(context)
    if arena is not None:
        self._users[arena] -= 1


def forget_the_quarantine(self, context, arena):
    if arena is not None:
        self._users[arena] -= 1
    self._free[arena or 0].append(context)
    self.free += 1


def forget_the_users(self, context, arena):
    if context not in self.quarantined:
        self._free[arena or 0].append(context)
        self.free += 1


def change_first_and_ask_then(self, request):
    """Count a request before its bucket has taken it."""
    self._queued_rows += request.rows
    submit(self, request)
    self._queued_rows -= request.rows


def take_in_parts(self, bucket, in_flight):
    head = bucket.head()
    return max(bucket.rows // 2, head.rows)


def pass_over_the_head(self, rows_max):
    chosen, rows = choose(self, rows_max)
    if len(chosen) > 1:
        return chosen[1:], rows - chosen[0].rows
    return chosen, rows


next_batch, submit = Scheduler.next_batch, Scheduler.submit
pick, launched = Buckets.pick, Buckets.launched
choose, pop_due = BucketQueue.choose, DeadlineHeap.pop_due


@pytest.mark.tier2
@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [
        (Scheduler, "next_batch", ask_the_model_too_late),
        (Scheduler, "submit", change_first_and_ask_then),
        (Scheduler, "cancel", lambda self, request: False),
        (Scheduler, "expire", lambda self, now_ns, arrived_by_ns=0: []),
        (Scheduler, "_mask", lambda self, request: False),
        (Scheduler, "_rows_to_take", take_in_parts),
        (Buckets, "pick", starve_what_is_not_full),
        (Buckets, "pick", forget_priorities),
        (Buckets, "launched", go_first_again),
        (Buckets, "wakeup_ns", lambda self, in_flight: None),
        (Buckets, "clear", lambda self: []),
        (BucketQueue, "choose", lambda self, rows_max: choose(self, rows_max + 1)),
        (BucketQueue, "choose", pass_over_the_head),
        (BucketQueue, "discard", lambda self, request: None),
        (BucketQueue, "oldest_arrival_ns", count_the_delay_from_the_newest),
        (DeadlineHeap, "pop_due", expire_whatever_is_due),
        (Policy, "ready_ns", let_deadlines_pass),
        (Policy, "ready_ns", launch_at_once),
        (Policy, "rows_to_run", lambda self, shape, rows, latency: max(self.captured.sizes, default=rows)),
        (Shapes, "padded_rows", lambda self, shape, rows: rows),
        (Shapes, "profile", lambda self, shape, rows: None),
        (ContextAllocator, "quarantine", forget_the_arena),
        (ContextAllocator, "release", forget_the_quarantine),
        (ContextAllocator, "release", forget_the_users),
        (ContextAllocator, "_with_profile", lambda self, free, profile: free[-1]),
        (CompletionEstimator, "started", lambda self, batch, now_ns: 0),
        (CompletionEstimator, "wants_times", lambda self, number, shape, rows: True),
        # Learned anew for each slab of slots.
        (BatchKey, "cost_key", property(lambda key: (key.shape, key.slab))),
    ],
)
def test_a_planted_defect_is_found(monkeypatch, owner, name, broken):
    monkeypatch.setattr(owner, name, broken)
    with pytest.raises(InternalError, match="seed"):
        for seed in range(100):
            simulate(seed, events=400)
