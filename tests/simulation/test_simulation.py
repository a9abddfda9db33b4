"""The scheduler under random events from seeds: its rules hold after each, and a seed repeats itself."""

import pytest

from asynctrt.errors import InternalError
from asynctrt.scheduling.ledger import Ledger
from asynctrt.scheduling.policy import Policy
from asynctrt.scheduling.queues import BucketQueue
from asynctrt.scheduling.request import State
from asynctrt.scheduling.scheduler import Scheduler
from asynctrt.scheduling.timeline import Timeline
from asynctrt.testing.simulator import simulate


@pytest.mark.parametrize("block", range(10))
def test_the_rules_hold_for_a_block_of_seeds(block):
    for seed in range(block * 40, block * 40 + 40):
        simulate(seed, events=1000)


def test_the_same_seed_gives_the_same_run():
    assert simulate(7) == simulate(7)
    assert simulate(7).log != simulate(8).log


def test_the_seeds_together_see_every_way_for_a_request_to_end():
    ends = set()
    for seed in range(60):
        ends |= set(simulate(seed, events=500).answered)
    assert ends == {State.DONE, State.FAILED, State.CANCELLED, State.EXPIRED}


def test_the_seeds_together_see_contexts_hang_and_batches_padded():
    runs = [simulate(seed, events=500) for seed in range(60)]
    assert any(run.quarantined for run in runs)
    assert any(run.rows_padded for run in runs)
    assert sum(not run.quarantined for run in runs) > 20, "most run undisturbed"


def broken_take(self, rows_max):
    return original_take(self, rows_max + 1)


def broken_share(self, bucket, buckets, in_flight, latency):
    return max(bucket.head().rows, bucket.rows // 2)


def broken_cancel(self, request):
    return False


def broken_quarantine(self, launch):
    """Forgets those that share the arena."""
    self._end(launch)
    self.quarantined.add(launch.context)


def broken_release(self, launch):
    """Forgets the quarantine."""
    self._end(launch)
    self._free[launch.arena or 0].append(launch.context)
    self._free_count += 1


def broken_end(self, launch):
    """Forgets to count the users of an arena down."""
    del self.in_flight[launch.number]


def broken_kind(self, free, kind):
    return free[-1]


def broken_rows_to_run(self, bucket, rows, sizes, latency):
    return max(sizes, default=rows)


def broken_launched(self, launch, now_ns):
    return 0


original_take = BucketQueue.take


@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [
        (BucketQueue, "take", broken_take),
        (Policy, "rows_to_take", broken_share),
        (Scheduler, "cancel", broken_cancel),
        (Scheduler, "expire", lambda self, now_ns: []),
        (BucketQueue, "discard", lambda self, request: None),
        (Ledger, "quarantine", broken_quarantine),
        (Ledger, "release", broken_release),
        (Ledger, "_end", broken_end),
        (Ledger, "_of_kind", broken_kind),
        (Policy, "rows_to_run", broken_rows_to_run),
        (Timeline, "launched", broken_launched),
    ],
)
def test_a_broken_scheduler_is_found_out(monkeypatch, owner, name, broken):
    monkeypatch.setattr(owner, name, broken)
    with pytest.raises(InternalError, match="seed"):
        for seed in range(60):
            simulate(seed, events=500)
