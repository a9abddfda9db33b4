"""How a device is divided by weight: who is charged what, who is held, and for how long at the most."""

import pytest

from asynctrt.scheduling.shares import SLACK_NS, DeviceShares
from tests.scheduling.support import KEY, make_batch, scheduler, submit, took

MS = 1_000_000


class Member:
    """One that divides a device, with something to launch unless told otherwise."""

    def __init__(self, shares, weight=1.0, *, width=1, overlaps=False):
        self.woken = 0
        self.share = shares.join(weight, width=width, overlaps=overlaps, wake=self._wake)
        self.share.wants = lambda: self.has_work
        self.has_work = True
        self.number = 0

    def _wake(self):
        self.woken += 1

    def launch(self, now_ms, usual_ms=0, *, lanes=1):
        self.number += 1
        batch = make_batch(self.number)
        self.share.launched(batch, round(now_ms * MS), usual_ms * MS, lanes=lanes)
        return batch

    def end(self, number, now_ms, took_ms):
        self.share.ran(number, round(now_ms * MS), round(took_ms * MS))
        self.share.left(number)

    def fail(self, number):
        self.share.left(number)

    def is_held(self, now_ms):
        return self.share.hold_until(round(now_ms * MS)) is not None


@pytest.fixture
def shares():
    return DeviceShares()


def test_who_was_charged_most_is_held_while_the_device_is_busy(shares):
    ours, theirs = Member(shares, 3.0), Member(shares)
    assert not ours.is_held(0)
    first = ours.launch(0, 6)  # 2 by its weight.
    assert not theirs.is_held(0)
    theirs.launch(0, 4)
    assert theirs.is_held(0)
    assert not ours.is_held(0)
    ours.end(first, 6, 6)
    assert theirs.woken == 0, "it would not be let go yet"
    assert theirs.is_held(6)
    ours.launch(6, 6)
    assert theirs.woken == 1
    assert not theirs.is_held(6), "both were charged 4 by their weights"


def test_what_a_batch_took_is_charged_in_the_end(shares):
    ours, theirs = Member(shares), Member(shares)
    number = ours.launch(0)  # Nothing is known of it.
    theirs.launch(0, 5)
    assert not ours.is_held(0)
    ours.end(number, 9, 9)
    assert ours.is_held(9)
    assert ours.share.used_ns == 9 * MS


@pytest.mark.parametrize(
    ("usual", "took", "charged"),
    [((0, 0), (8, 10), (4, 10)), ((1, 7), (8, 8), (1, 7))],
    ids=["its part", "what is usual"],  # In the second, ours waited for theirs.
)
def test_of_what_computes_at_once_each_is_charged(shares, usual, took, charged):
    both = [Member(shares, overlaps=True) for _ in range(2)]
    batches = [one.launch(0, usual_ms) for one, usual_ms in zip(both, usual, strict=True)]
    for one, batch, took_ms in zip(both, batches, took, strict=True):
        one.end(batch, took_ms, took_ms)
    assert [one.share.used_ns for one in both] == [charged_ms * MS for charged_ms in charged]


def test_what_is_usual_was_measured_when_the_engine_opened_or_is_what_batches_take():
    plan = scheduler()
    assert plan.times.alone_ns(KEY, 4) == 0
    plan.times.compute.observe(KEY.shape, 4, 9 * MS)
    assert plan.times.alone_ns(KEY, 4) == 9 * MS
    plan.times.seed(KEY, {4: 5 * MS})
    plan.times.compute.observe(KEY.shape, 4, 90 * MS)
    assert plan.times.alone_ns(KEY, 4) == 5 * MS


def test_a_batch_that_fails_stays_charged_what_is_usual(shares):
    ours, theirs = Member(shares), Member(shares)
    ours.fail(ours.launch(0, 5))
    assert shares.in_flight == 0
    theirs.launch(0, 1)
    assert ours.is_held(0)
    assert ours.share.used_ns == 5 * MS


def test_while_the_device_has_room_nobody_is_held(shares):
    ours, theirs = Member(shares, width=2), Member(shares, width=2)
    ours.launch(0, 50)
    assert not ours.is_held(0)
    ours.launch(0, 50)
    assert ours.is_held(0)
    theirs.launch(0, 1, lanes=4)  # Whose batches fit side by side.
    assert not ours.is_held(0), "there is room for two more of them"


def test_nobody_is_held_for_one_who_wants_nothing(shares):
    ours, theirs = Member(shares), Member(shares)
    ours.launch(0, 50)
    theirs.has_work = False
    assert not ours.is_held(0)


@pytest.mark.parametrize("had_callers", [False, True])
def test_nothing_is_saved_up_while_there_is_nothing_to_do(shares, had_callers):
    """Whether there never was anything, or its callers have gone."""
    ours, theirs = Member(shares), Member(shares)
    assert not had_callers or not theirs.is_held(0)
    theirs.has_work = False
    for step in range(100):
        ours.end(ours.launch(10 * step, 10), 10 * step + 10, 10)
    theirs.has_work = True
    assert not theirs.is_held(1000)
    theirs.launch(1000, 10)
    theirs.launch(1000, 10)
    assert not ours.is_held(1000), "it would wait for a second that the other one did not ask for"


def test_what_was_computed_before_the_device_was_idle_is_forgotten(shares):
    ours, theirs = Member(shares), Member(shares, 10.0)
    theirs.has_work = False
    number = ours.launch(0, 1000)
    ours.has_work = False
    ours.end(number, 1000, 1000)
    ours.has_work = theirs.has_work = True
    assert not theirs.is_held(9000)
    theirs.launch(9000, 10)
    assert not ours.is_held(9000), "nobody waited for what it had computed"


def test_to_be_held_ends_though_the_others_do_nothing(shares):
    ours, theirs = Member(shares, 2.0), Member(shares)
    theirs.launch(0, 1)
    ours.launch(0, 60)
    until_ns = ours.share.hold_until(0)
    assert until_ns == SLACK_NS + 2 * 29 * MS
    assert ours.share.hold_until(until_ns - 1) == until_ns
    assert ours.share.hold_until(until_ns) is None
    assert ours.share.held_ns == until_ns
    ours.launch(until_ns / MS, 60)
    # They may hang, so that nobody waits for them any more, until something of theirs happens.
    assert not ours.is_held(until_ns / MS + 1)
    theirs.launch(until_ns / MS + 2, 1)
    assert ours.is_held(until_ns / MS + 2)


def test_who_is_held_is_asked_again_once_it_may_go(shares):
    """Not before: of many, each change would ask all the others in vain."""
    ours, theirs, third = Member(shares), Member(shares), Member(shares)
    third.has_work = False
    ours.launch(0, 50)
    assert ours.is_held(0)
    for count in range(5):
        number = theirs.launch(10 * count, 10)
        if count < 4:
            theirs.end(number, 10 * count + 10, 10)
            assert ours.woken == 0
    assert ours.woken == 1
    assert not ours.is_held(40)
    ours.launch(40, 10)
    assert ours.is_held(40)
    theirs.share.leave()
    assert ours.woken == 2
    assert theirs.woken == 0, "it was not held"


def test_of_several_who_may_go_the_one_that_was_charged_least_is_asked_first(shares):
    woken = []
    ours, theirs, third = (Member(shares, width=2) for _ in range(3))
    ours.share.wake = lambda: woken.append("ours")
    theirs.share.wake = lambda: woken.append("theirs")
    ours.launch(0, 50)
    second = theirs.launch(0, 40)
    assert theirs.is_held(0)
    assert ours.is_held(0)
    third.has_work = False
    third.launch(0, 1)
    theirs.end(second, 40, 40)
    woken.clear()
    third.share.leave()
    assert woken == ["theirs", "ours"]


def test_one_who_cannot_use_what_is_due_to_it_saves_nothing_up(shares):
    """It has as few contexts, say, and the others take what it leaves, in equal parts."""
    narrow, ours, theirs = Member(shares, 10.0, width=2), Member(shares, width=2), Member(shares, width=2)
    narrow.share.is_full = lambda: narrow.share.in_flight > 0
    for step in range(100):
        now_ms = 10 * step
        flights = [(narrow, narrow.launch(now_ms, 10))]
        # Who ended something looks first.
        flights += [(one, one.launch(now_ms, 10)) for one in (ours, theirs) if not one.is_held(now_ms)]
        for member, number in flights:
            member.end(number, now_ms + 10, 10)
    assert ours.number == pytest.approx(theirs.number, rel=0.1)
    assert shares.reached_ns - narrow.share.charged_ns <= 20 * MS


def test_who_leaves_takes_what_it_has_on_the_device_along(shares):
    ours, theirs = Member(shares, overlaps=True), Member(shares, overlaps=True)
    number = theirs.launch(0, 5)
    ours.launch(0, 50)
    assert ours.is_held(0)
    theirs.share.leave()
    theirs.share.leave()
    assert shares.in_flight == 1
    assert shares.members == [ours.share]
    assert not ours.is_held(0)
    theirs.end(number, 5, 5)  # What was left on the device ends after all.
    assert shares.in_flight == 1


def make(shares, **kw):
    made = scheduler(contexts=2, concurrency=1, queue_rows_max=64, **kw)
    made.divide(shares.join(1.0, width=1, overlaps=False, wake=lambda: None))
    return made


def end(plan, batch, now_ms, took_ms):
    plan.ran(batch, now_ms * MS, took_ms * MS)
    plan.finished(batch, now_ms * MS, took(0, took_ms * MS, 0))


def test_a_scheduler_launches_what_is_left_to_it(shares):
    ours, theirs = make(shares), make(shares)
    for _ in range(8):
        submit(ours, rows=4)
        submit(theirs, rows=4)
    first = ours.next_batch(0)
    second = theirs.next_batch(0)
    end(ours, first, 9, 9)
    assert ours.next_batch(9 * MS) is None
    assert ours.next_wakeup() == 9 * MS + SLACK_NS + 2 * 9 * MS
    end(theirs, second, 20, 11)
    assert ours.next_batch(20 * MS) is not None
    assert theirs.next_batch(20 * MS) is not None, "11 ms were charged, and 18 to the other one"
    assert theirs.next_batch(20 * MS) is None


def test_a_part_of_a_batch_that_failed_waits_for_its_turn_too(shares):
    ours, theirs = make(shares), make(shares)
    for _ in range(2):
        submit(ours, rows=2)
        submit(theirs, rows=4)
    ours.times.seed(KEY, {4: 9 * MS})
    batch = ours.next_batch(0)
    theirs.next_batch(0)
    assert ours.bisect(batch)
    submit(theirs, rows=4)
    assert ours.next_batch(0) is None
    assert ours.next_wakeup() is not None


def test_the_end_of_a_delay_wakes_nobody_who_is_held(shares):
    """He would be woken again and again."""
    ours, theirs = make(shares, delay_ns_max=MS), make(shares)
    for _ in range(8):
        submit(theirs, rows=4)
    submit(ours, rows=1)
    first = ours.next_batch(0)
    theirs.next_batch(0)
    end(ours, first, 9, 9)
    submit(ours, rows=1, now_ns=9 * MS)
    assert ours.next_batch(11 * MS) is None
    assert ours.next_wakeup() > 11 * MS
