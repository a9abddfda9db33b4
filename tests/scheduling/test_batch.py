"""All of a batch is decided when it leaves the scheduler."""

from asynctrt.scheduling.batch import Batch, Reason
from asynctrt.scheduling.key import FIXED_SHAPE
from asynctrt.scheduling.policy import Captured
from tests.scheduling.support import Profiles, finish, make_batch, scheduler, submit


def test_everything_is_decided_when_it_leaves_the_scheduler():
    profiles = Profiles(ranges=((1, 2), (3, 8)), profile=lambda shape, rows: int(rows > 2))
    plan = scheduler(rows_max=8, profiles=profiles, contexts=2, arenas=2, captured=Captured((1, 8)))
    request = submit(plan, rows=3, shape=FIXED_SHAPE, now_ns=5)
    decided = Batch(
        number=1,
        key=FIXED_SHAPE,
        requests=(request,),
        rows=3,
        rows_run=8,
        profile=1,
        context=0,
        arena=0,
        is_timed=True,
        reason=Reason.IDLE,
        launched_ns=70,
    )
    assert vars(decided).items() <= vars(plan.next_batch(70)).items()


def test_whether_it_is_timed_depends_on_the_rows_that_are_executed():
    """A model of a fixed size runs one size only, which is known after a few batches of any rows."""
    plan = scheduler(rows_max=4, rows_fixed=4)
    timed = 0
    for _ in range(80):
        submit(plan)
        batch = plan.next_batch(0)
        assert batch.rows_run == 4
        timed += batch.is_timed
        finish(plan, batch)
    assert timed == 4 + 80 // 8
    assert plan.snapshot().counters.batches_timed == timed


def test_repr_shows_what_was_decided():
    assert repr(make_batch(7, rows=3, rows_run=4, context=1, arena=0)) == (
        "<Batch 7 idle rows=3 run=4 requests=0 context=1 arena=0>"
    )
