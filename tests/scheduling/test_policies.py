"""Each policy is a class with one method, and an engine can be given another."""

import pytest

from asynctrt.scheduling.batch import Reason
from asynctrt.scheduling.batch_times import SURE_SAMPLES
from asynctrt.scheduling.company import MixedSizes
from asynctrt.scheduling.key import BatchKey
from asynctrt.scheduling.policies import TakeRows
from asynctrt.scheduling.shapes import Shapes
from tests.scheduling.support import finish, scheduler, submit


class AtMostTokens(TakeRows):
    """Takes no more tokens in a batch than given, of rows that are as long as their bucket says."""

    def __init__(self, tokens):
        self._tokens = tokens

    def rows_max(self, bucket, in_flight, reason):
        return max(
            self._tokens // dict(bucket.key.shape)["length"], bucket.head(by_age=reason is Reason.AGED).rows
        )


def length_of(batch):
    return dict(batch.key.shape)["length"]


def test_another_policy_is_a_class_with_one_method():
    plan = scheduler(rows_max=8, contexts=9, concurrency=9, queue_rows_max=32, rows=AtMostTokens(64))
    for length in (8, 16, 128):
        for _ in range(8):
            submit(plan, key=BatchKey((("length", length),)))
    batches = list(iter(lambda: plan.next_batch(0), None))
    assert [(length_of(batch), batch.rows) for batch in batches[:3]] == [(8, 8), (16, 4), (128, 1)]
    for batch in batches:
        finish(plan, batch)
    assert all(batch.rows * length_of(batch) <= 64 for batch in batches if batch.rows > 1)


@pytest.mark.parametrize("rows", [2, 3])
def test_a_request_that_is_larger_than_the_policy_wants_goes_alone(rows):
    plan = scheduler(rows_max=8, rows=AtMostTokens(64))
    requests = [submit(plan, rows=rows, key=BatchKey((("length", 64),))) for _ in range(2)]
    assert [plan.next_batch(0).requests for _ in range(2)] == [(one,) for one in requests]


class TestKeptSizes:
    """Contexts keep the size that they ran last, until that has cost as much as a change."""

    CHANGE_NS = 1000
    COPIES_NS = 301
    SIZES = (1, 2, 4, 8)

    def plan(self, **kw):
        self.shapes = Shapes(rows_max=8, profiles=None)
        self.shapes.restrict(self.SIZES)
        return scheduler(8, contexts=2, change_ns=self.CHANGE_NS, shapes=self.shapes, queue_rows_max=64, **kw)

    def plan_where_c_holds_b(self):
        """Rows of shape ``b`` may join a batch of shape ``c``."""
        return self.plan(
            company=MixedSizes(
                {("b",): 1, ("c",): 2}.__getitem__,
                lambda holder, shape: holder in (("c",), shape),
                [(units, 1000 + 10 * units) for units in (1, 100) for _ in range(SURE_SAMPLES)],
            )
        )

    def run(self, plan, rows=None, compute_ns=100, **kw):
        """Submit rows, run a batch, and return its rows, and those that it is run with."""
        for _ in range(rows or 0):
            submit(plan, **kw)
        batch = plan.next_batch(0)
        change_ns = self.CHANGE_NS if batch.changes_size else 0
        finish(plan, batch, self.COPIES_NS + compute_ns + change_ns, compute_ns=compute_ns)
        return batch.rows, batch.rows_run

    def test_a_batch_is_padded_or_cut_to_the_size_of_its_context(self):
        plan = self.plan()
        first = [submit(plan) for _ in range(3)]
        batch = plan.next_batch(0)
        assert (batch.requests, batch.rows_run, batch.is_timed) == (tuple(first), 4, False)
        finish(plan, batch)
        assert self.run(plan, 1) == (1, 4)
        assert self.run(plan, 8) == (4, 4)
        assert self.run(plan) == (4, 4)
        assert plan.next_batch(0) is None

    def test_another_shape_changes_a_context_and_each_goes_to_its_own(self):
        plan = self.plan()
        assert self.run(plan, 3) == (3, 4)
        assert self.run(plan, 8, shape="c") == (8, 8)
        assert self.run(plan, 2) == (2, 4)
        assert self.run(plan, 2, shape="c") == (2, 8)

    def test_what_a_wrong_size_costs_adds_up_until_it_pays_to_change(self):
        """Nothing is known of a smaller size at first, so it is tried once."""
        plan = self.plan()
        assert self.run(plan, 8) == (8, 8)
        ran = [self.run(plan, 1, compute_ns=400)[1] for _ in range(6)]
        assert ran == [8, 8, 8, 1, 1, 1], "the first time is not known, and 350 ns are lost each time"
        # Now there is a context of either size.
        assert self.run(plan, 8) == (8, 8)
        assert self.run(plan, 1) == (1, 1)

    def test_what_a_change_takes_is_learned_from_changes(self):
        """Before the first request it was measured with another shape, which took a hundredth of the time."""
        plan = self.plan()
        submit(plan)
        slow = plan.next_batch(0)
        finish(plan, slow, 100 * self.CHANGE_NS)
        assert [self.run(plan, 8, compute_ns=400) for _ in range(7)] == [(1, 1)] * 7, "each loses 350 ns"

    def test_a_batch_is_no_part_of_the_change_that_it_makes(self):
        """It may take longer than the change, and would take as long without."""
        plan = self.plan()
        assert self.run(plan, 8, compute_ns=1200) == (8, 8)
        ran = [self.run(plan, 1, compute_ns=1200)[1] for _ in range(3)]
        assert ran == [8, 1, 1], "the first time is not known, and then 1050 ns are lost"

    def test_rows_that_are_left_behind_count_as_well(self):
        plan = self.plan()
        assert self.run(plan, 1) == (1, 1)
        ran = [self.run(plan, 8 if not number else 1, compute_ns=400) for number in range(5)]
        assert ran == [(1, 1)] * 3 + [(8, 8), (1, 1)], "350 ns are lost each time"

    def test_a_size_that_takes_as_long_is_kept(self):
        plan = self.plan()
        self.run(plan, 8)
        for size in (1, 1, 1, 1, 1):
            self.run(plan, size)
        plan.times.seed(BatchKey(("b",)), {1: 100, 8: 100})
        assert {self.run(plan, 1)[1] for _ in range(50)} == {8}

    def test_a_batch_waits_for_a_context_of_its_shape_as_long_as_a_change_takes(self):
        plan = self.plan()
        submit(plan)
        busy = plan.next_batch(0)
        submit(plan)
        assert plan.next_batch(10) is None
        assert plan.next_wakeup() == 10 + self.CHANGE_NS
        assert plan.next_batch(9 + self.CHANGE_NS) is None
        second = plan.next_batch(10 + self.CHANGE_NS)
        assert {busy.context, second.context} == {0, 1}
        finish(plan, busy)
        submit(plan)
        assert plan.next_batch(0).context == busy.context

    def test_it_does_not_wait_for_a_context_that_is_lost(self):
        plan = self.plan()
        submit(plan)
        plan.failed(plan.next_batch(0), quarantine=True)
        submit(plan)
        assert plan.next_batch(10) is not None

    def test_a_request_of_more_rows_is_not_cut(self):
        plan = self.plan()
        assert self.run(plan, 1) == (1, 1)
        submit(plan, rows=3)
        submit(plan, rows=3)
        assert self.run(plan) == (3, 4)
        assert self.run(plan) == (3, 4)

    def test_rows_that_join_or_are_tried_again_are_padded_to_a_size_that_a_context_has(self):
        plan = self.plan_where_c_holds_b()
        assert self.run(plan, 8, shape="c") == (8, 8)
        assert self.run(plan, 8, shape="b") == (8, 8)
        for _ in range(3):
            submit(plan, shape="b")
            assert self.run(plan, 1, shape="c") == (2, 8)
        submit(plan, shape="c")
        submit(plan, shape="c")
        plan.bisect(plan.next_batch(0))
        assert [self.run(plan) for _ in range(2)] == [(1, 8)] * 2
        assert self.run(plan, 1, shape="b") == (1, 8)

    def test_what_rows_that_join_lose_counts_as_well(self):
        plan = self.plan_where_c_holds_b()
        self.run(plan, 8, shape="c")
        ran = []
        for _ in range(5):
            submit(plan, shape="b")
            ran.append(self.run(plan, 1, shape="c", compute_ns=400))
        assert ran == [(2, 8)] * 5
        assert self.run(plan, 1, shape="c") == (1, 1), "it has lost more than a change takes"

    def test_a_shape_with_contexts_of_its_own_runs_in_its_sizes(self):
        plan = self.plan()
        assert self.run(plan, 8) == (8, 8)
        self.shapes.specialise(("b",), (2, 8))
        assert self.run(plan, 1) == (1, 2)
        self.shapes.specialise(("b",), ())
        assert self.run(plan, 1) == (1, 8)


def test_the_scheduler_is_made_of_few_parts():
    """More of it than that belongs into one of them."""
    assert len(vars(scheduler())) <= 15
