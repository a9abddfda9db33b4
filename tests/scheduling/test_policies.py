"""Each policy is a class with one method, and an engine can be given another."""

import pytest

from asynctrt.scheduling.batch import Reason
from asynctrt.scheduling.key import BatchKey
from asynctrt.scheduling.policies import TakeRows
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


def test_the_scheduler_is_made_of_few_parts():
    """More of it than that belongs into one of them."""
    assert len(vars(scheduler())) <= 15
