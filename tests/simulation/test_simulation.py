"""The scheduler under random events from seeds: its rules hold after each, and a seed repeats itself."""

import pytest

from asynctrt.errors import InternalError
from asynctrt.scheduling.policy import Policy
from asynctrt.scheduling.queues import BucketQueue
from asynctrt.scheduling.request import State
from asynctrt.scheduling.scheduler import Scheduler
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


def broken_take(self, rows_max):
    return original_take(self, rows_max + 1)


def broken_share(self, bucket, buckets, in_flight, latency):
    return max(bucket.head().rows, bucket.rows // 2)


def broken_cancel(self, request):
    return False


original_take = BucketQueue.take


@pytest.mark.parametrize(
    ("owner", "name", "broken"),
    [
        (BucketQueue, "take", broken_take),
        (Policy, "rows_to_take", broken_share),
        (Scheduler, "cancel", broken_cancel),
        (Scheduler, "expire", lambda self, now_ns: []),
        (BucketQueue, "discard", lambda self, request: None),
    ],
)
def test_a_broken_scheduler_is_found_out(monkeypatch, owner, name, broken):
    monkeypatch.setattr(owner, name, broken)
    with pytest.raises(InternalError, match="seed"):
        for seed in range(60):
            simulate(seed, events=500)
