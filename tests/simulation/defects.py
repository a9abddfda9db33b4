"""Defects to plant in the scheduler: what is replaced, and what by.

Each is one that a hasty change could make. A replacement takes the original as its first argument.
"""

from asynctrt.errors import QueueFullError
from asynctrt.scheduling.batch import Batch, Reason, RejectedBatch
from asynctrt.scheduling.batch_times import BatchTimes, Times
from asynctrt.scheduling.concurrency import Concurrency
from asynctrt.scheduling.contexts import ContextAllocator
from asynctrt.scheduling.counters import Counters
from asynctrt.scheduling.forecast import Forecast, Punctual
from asynctrt.scheduling.policies import KeptSizes, Room, Turns
from asynctrt.scheduling.policy import Policy
from asynctrt.scheduling.queue import Queue
from asynctrt.scheduling.queues import BucketQueue, Buckets, Deadlines, OpenBatch
from asynctrt.scheduling.request import NO_DEADLINE_NS, PlainRequest, State
from asynctrt.scheduling.scheduler import Scheduler
from asynctrt.scheduling.shapes import Shapes
from asynctrt.scheduling.shares import DeviceShares, Share


def last_come_first_served(original, self, rows_max, *more):
    chosen, rows, room = [], 0, rows_max
    for request in reversed(list(self.waiting())):
        if request.rows <= room:
            chosen.append(request)
            rows += request.rows
            room -= request.rows
    return tuple(chosen), rows


def leave_the_head_behind(original, self, rows_max, *more):
    chosen, rows = original(self, rows_max, *more)
    return (chosen[1:], rows - chosen[0].rows) if len(chosen) > 1 else (chosen, rows)


def one_row_too_many(original, self, rows_max, *more):
    return original(self, rows_max + 1, *more)


def an_open_batch_takes_any_key(original, self, key, future, payload):
    return original(self, self.joins or key, future, payload)


def an_open_batch_has_no_bound(original, self, key, *more):
    original(self, key, *more)
    self.open.length_max = 2 * self.open.length_max + 1


def an_open_batch_is_closed_once_too_often(original, self):
    bucket, entries = self.open.bucket, self.open.entries
    original(self)
    if len(entries) > 1:
        bucket.extend(entries[:1])
        self.rows += 1


def an_open_batch_is_launched_again(original, self, rows):
    kept = self.entries[-1:]
    original(self, rows)
    self.entries += kept


def an_open_batch_leaves_its_first_behind(original, self, now_ns):
    entries = self.queue.open.entries
    entries.append(entries.pop(0))
    return original(self, now_ns)


def an_open_batch_takes_a_row_too_many(original, self, now_ns):
    self.queue.open.rows_max += 1
    try:
        return original(self, now_ns)
    finally:
        self.queue.open.rows_max -= 1


def an_open_batch_waits_for_no_other(original, self, now_ns):
    for batch in tuple(self._in_flight):
        del self._in_flight[batch]
        decided = original(self, now_ns)
        self._in_flight[batch] = None
        return decided
    return original(self, now_ns)


def plain_requests_are_made_in_disorder(original, self, entries):
    original(self, entries)
    self._by_priority[-1].rotate(1)


def a_plain_request_is_launched_again(original, self, chosen, rows):
    kept = self.entries[-1:] if len(self.entries) == rows else []
    original(self, chosen, rows)
    self.entries += kept
    self.rows += bool(kept)


def plain_requests_never_leave(original, self, future):
    self._counters.cancelled += 1
    return False


def rows_counted_twice(original, self, request):
    original(self, request)
    self._bucket.rows += request.rows


def a_request_in_two_batches(original, self, chosen, rows):
    kept = chosen[-1]
    original(self, chosen, rows)
    if not self.requests and not isinstance(kept, PlainRequest):
        kept.state = State.QUEUED
        self._by_priority[-1 - kept.priority].append(kept)


def a_context_is_never_given_back(original, self, context, arena):
    if arena is not None:
        self._users[arena] -= 1


def a_context_is_given_back_early(original, self, profile=None, run=None):
    context, arena = original(self, profile, run)
    self._free[arena or 0].append(context)
    self.free += 1
    return context, arena


def any_arena_for_any_context(original, self, profile=None, run=None):
    context, arena = original(self, profile, run)
    if arena is not None:
        self._users[arena] -= 1
        arena = (arena + 1) % len(self._users)
        self._users[arena] += 1
    return context, arena


def users_are_never_less(original, self, context, arena):
    if arena is not None:
        self._users[arena] += 1
    original(self, context, arena)


def quarantine_of_one_context_alone(original, self, context, arena):
    self.quarantined.add(context)
    if arena is not None:
        self._users[arena] -= 1


def quarantine_for_a_while(original, self, context, arena):
    original(self, context, arena)
    self.quarantined.discard(context)
    self._free[arena or 0].append(context)
    self.free += 1


def an_arena_is_avoided_by_its_first_context(original, self, arena):
    self.quarantined.add(arena)


def a_bucket_keeps_its_turn(original, self, bucket):
    original(self, bucket)
    if bucket.priority >= 0:
        level = self._levels[bucket.priority]
        (level.ready if bucket.is_ready else level.filling).move_to_end(bucket, last=False)


def full_buckets_keep_their_turn_for_ever(original, self, bucket):
    return bucket.is_full


def only_full_buckets_while_busy(original, self, now_ns, in_flight):
    if in_flight < self._policy.concurrency or not self.full:
        return original(self, now_ns, in_flight)
    full = [bucket for level in reversed(self._levels) for bucket in level.ready if bucket.is_full]
    return (full[0], Reason.FULL) if full else None


def priorities_do_not_count(original, self, now_ns, in_flight):
    self.priority_max = 0
    return original(self, now_ns, in_flight)


def nothing_beside_another_batch(original, self, now_ns, in_flight):
    return None if in_flight else original(self, now_ns, in_flight)


def full_ones_wait_too(original, self, now_ns, in_flight):
    return None if in_flight >= self._policy.concurrency else original(self, now_ns, in_flight)


def deadlines_are_not_looked_at(original, self, now_ns, arrived_by_ns=NO_DEADLINE_NS):
    return []


def deadlines_come_early(original, self, now_ns, arrived_by_ns):
    return original(self, now_ns + 1_000_000, arrived_by_ns)


def deadlines_spare_nobody(original, self, now_ns, arrived_by_ns):
    return original(self, now_ns, NO_DEADLINE_NS)


def nobody_is_woken(original, self):
    return None


def the_wakeup_is_for_delays_alone(original, self):
    return self.queue.buckets.wakeup_ns(len(self._in_flight)) if self._policy.delay_ns_max else None


def the_delay_begins_anew_with_each(original, self):
    return max((request.arrival_ns for request in self.waiting()), default=NO_DEADLINE_NS)


def a_delay_of_no_length(original, self, oldest_arrival_ns, deadline_ns):
    return 0


def a_delay_passes_deadlines(original, self, oldest_arrival_ns, deadline_ns):
    return oldest_arrival_ns + self.delay_ns_max


def the_cancelled_stay_queued(original, self, request):
    if request.state is State.QUEUED:
        self._counters.cancelled += 1
        return True
    return original(self, request)


def the_cancelled_are_answered(original, self, request):
    if request.state is State.IN_FLIGHT:
        self._counters.cancelled += 1
        return False
    return original(self, request)


def a_tombstone_is_launched(original, self, request):
    self.requests -= 1
    self.rows -= request.rows


def batches_are_not_forgotten(original, self, batch, now_ns, took):
    original(self, batch, now_ns, took)
    self._in_flight[batch] = None


def failures_are_not_counted(original, self, batch, *, quarantine=False):
    before = self._counters.failed
    original(self, batch, quarantine=quarantine)
    self._counters.failed = before


def a_queue_without_a_bound(original, self, rows, requests):
    self.rows_max += rows


def a_queue_with_a_row_less(original, self, request):
    if self.rows + self.open.rows + request.rows == self.rows_max:
        raise QueueFullError("one row too soon")
    original(self, request)


def closing_forgets_the_queue(original, self):
    self.by_key.clear()
    return []


def too_much_in_flight(original, self, now_ns):
    self.in_flight_max += 1
    try:
        return original(self, now_ns)
    finally:
        self.in_flight_max -= 1


def rows_are_taken_before_the_model_is_asked(original, self, bucket, chosen, rows, *more):
    self.queue.rows -= rows
    decided = original(self, bucket, chosen, rows, *more)
    if not isinstance(decided, RejectedBatch):
        self.queue.rows += rows
    return decided


def padding_to_the_largest(original, self, shape, rows, compute):
    return max(self.captured.sizes, default=rows)


def no_padding_at_all(original, self, shape, rows):
    return rows


def the_profile_of_fewer_rows(original, self, shape, rows):
    return None if self._profiles is None else original(self, shape, max(rows // 2, 1))


def ends_are_expected_late(original, self, batch, now_ns, put_ns=None):
    expected_ns = original(self, batch, now_ns, put_ns)
    return None if expected_ns is None else 2 * expected_ns


def the_batch_says_another_number_of_rows(original, self, now_ns):
    decided = original(self, now_ns)
    if isinstance(decided, Batch) and len(decided.requests) > 1:
        decided.rows_run -= 1
    return decided


def padding_is_counted_as_rows(original, self, batch, *more):
    batch.rows = batch.rows_run
    original(self, batch, *more)


def masked_ones_fail_with_their_batch(original, self, batch, *, quarantine=False):
    for request in batch.requests:
        request.state = State.IN_FLIGHT
    original(self, batch, quarantine=quarantine)


def halves_are_forgotten(original, self, batch):
    is_done = original(self, batch)
    self.again.parts.clear()
    return is_done


def halves_overlap(original, self, batch):
    is_done = original(self, batch)
    if is_done and self.again.parts:
        self.again.parts.append(self.again.parts[-1])
    return is_done


def any_request_makes_room(original, self, below, rows):
    return original(self, below + 1, rows)


def an_empty_wakeup_storm(original, self):
    return 0


def any_context_for_any_profile(original, self, context, profile, run):
    return 0, 0


def the_first_arena_always(original, self, profile, run):
    return next(contexts[-1] for contexts in self._free if contexts)


def the_end_is_always_known(original, self, batch, now_ns, put_ns=None):
    return original(self, batch, now_ns, put_ns) or 0


def a_batch_waits_for_its_size_for_ever(original, self, now_ns):
    original(self, now_ns)
    return True


def every_batch_is_timed(original, self, number, shape, rows):
    return True


def deadlines_have_no_order(original, self, request):
    place = original(self, request)
    for queue in self._by_priority:
        queue_in_order = sorted(queue, key=lambda other: other.arrival_ns)
        queue.clear()
        queue.extend(queue_in_order)
    return place


def the_latest_deadline_first(original, self, request):
    return -original(self, request)


def what_is_overdue_has_no_turn(original, self, now_ns):
    return None


def what_is_overdue_has_every_turn(original, self, picked, number, now_ns, in_flight):
    aged = self._buckets.overdue(now_ns)
    return picked if aged is None else (aged, Reason.AGED)


def what_is_overdue_goes_with_the_urgent(original, self, rows_max, by_age=False):
    return original(self, rows_max)


def the_earliest_deadline_has_every_turn(original, self, *more):
    self._is_out_of_turn = False
    return original(self, *more)


def waits_are_told_ten_times_as_long(original, self, bucket, now_ns, batches, over):
    return 10 * original(self, bucket, now_ns, batches, over)


def one_sample_is_enough(original, self, key, rows):
    compute_ns = self.compute.typical(key.shape, rows)
    return (
        None if compute_ns is None else compute_ns + self.copy_in_ns(key, rows) + self.copy_out_ns(key, rows)
    )


def lateness_is_told_from_nothing(original, self, key, rows):
    return original(self, key, rows) or 1_000_000


def what_is_late_is_refused_for_ever(original, self, request, *more):
    self._probe_ns = NO_DEADLINE_NS
    return original(self, request, *more)


def the_idle_refuse_too(original, self, request, bucket, rows_before=0):
    compute_ns = self._times.service_ns(bucket.key, request.rows)
    if compute_ns is not None and compute_ns > request.deadline_ns - request.arrival_ns:
        self._refuse(request, bucket, 0, compute_ns, compute_ns)
    return original(self, request, bucket, rows_before)


def time_is_set_aside_twice(original, self, request, bucket, rows_before=0):
    original(self, request, bucket, rows_before)
    request.reserve_ns *= 2


def full_batches_pile_up(original, self, now_ns, in_flight):
    return original(self, now_ns, 0 if self.full else in_flight)


def the_wait_for_the_device_is_not_counted(original, self, key, rows, now_ns):
    return now_ns


def whatever_is_queued_is_in_time(original, self, bucket, rows_max, choose, now_ns, *, may_split):
    return Punctual(*choose(rows_max))


def batches_are_told_to_take_half_as_long(original, self, shape, rows):
    took_ns = original(self, shape, rows)
    return None if took_ns is None else took_ns // 2


def everybody_is_given_up(original, self, request, begins_ns):
    return True


def who_is_given_up_is_not_told(original, self, late):
    original(self, late)
    self._late.clear()


def who_fails_alone_is_answered(original, self, request):
    self._counters.failed += 1


def a_lane_is_never_left(original, self, batch):
    pass


def one_limit_for_all_shapes(original, self, shape):
    return self._rows_max


def the_device_is_left_to_the_idle(original, self, share):
    return float(sum(other is not share for other in self.members))


def batches_stay_in_flight(original, self, flight):
    self._shares.wake(self)


def who_is_held_is_forgotten(original, self, now_ns):
    return None if original(self, now_ns) is None else now_ns


PLANTED = [
    (BucketQueue, "choose", last_come_first_served),
    (BucketQueue, "choose", leave_the_head_behind),
    (BucketQueue, "choose", one_row_too_many),
    (Queue, "submit", rows_counted_twice),
    (OpenBatch, "join", an_open_batch_takes_any_key),
    (Queue, "submit_plain", an_open_batch_has_no_bound),
    (Scheduler, "_next_open", an_open_batch_takes_a_row_too_many),
    (Scheduler, "_next_open", an_open_batch_leaves_its_first_behind),
    (OpenBatch, "leave", an_open_batch_is_launched_again),
    (Scheduler, "_next_open", an_open_batch_waits_for_no_other),
    (Queue, "close_open", an_open_batch_is_closed_once_too_often),
    (BucketQueue, "_append_made", plain_requests_are_made_in_disorder),
    (BucketQueue, "take", a_plain_request_is_launched_again),
    (Scheduler, "cancel_plain", plain_requests_never_leave),
    (BucketQueue, "take", a_request_in_two_batches),
    (BucketQueue, "discard", a_tombstone_is_launched),
    (BucketQueue, "oldest_arrival_ns", the_delay_begins_anew_with_each),
    (ContextAllocator, "release", a_context_is_never_given_back),
    (ContextAllocator, "release", users_are_never_less),
    (ContextAllocator, "acquire", a_context_is_given_back_early),
    (ContextAllocator, "acquire", any_arena_for_any_context),
    (ContextAllocator, "quarantine", quarantine_of_one_context_alone),
    (ContextAllocator, "quarantine", quarantine_for_a_while),
    (ContextAllocator, "quarantine_arena", an_arena_is_avoided_by_its_first_context),
    (Buckets, "launched", a_bucket_keeps_its_turn),
    (Buckets, "_keeps_turn", full_buckets_keep_their_turn_for_ever),
    (Buckets, "pick", only_full_buckets_while_busy),
    (Buckets, "pick", priorities_do_not_count),
    (Buckets, "pick", nothing_beside_another_batch),
    (Buckets, "pick", full_ones_wait_too),
    (Buckets, "clear", closing_forgets_the_queue),
    (Deadlines, "pop_due", deadlines_come_early),
    (Deadlines, "pop_due", deadlines_spare_nobody),
    (Queue, "expire", deadlines_are_not_looked_at),
    (Scheduler, "next_wakeup", nobody_is_woken),
    (Scheduler, "next_wakeup", the_wakeup_is_for_delays_alone),
    (Scheduler, "next_wakeup", an_empty_wakeup_storm),
    (Scheduler, "cancel", the_cancelled_stay_queued),
    (Scheduler, "cancel", the_cancelled_are_answered),
    (Scheduler, "finished", batches_are_not_forgotten),
    (Scheduler, "failed", failures_are_not_counted),
    (Scheduler, "failed", masked_ones_fail_with_their_batch),
    (Queue, "_refuse", a_queue_without_a_bound),
    (Queue, "submit", a_queue_with_a_row_less),
    (Room, "has_room", too_much_in_flight),
    (Scheduler, "next_batch", the_batch_says_another_number_of_rows),
    (Scheduler, "_form", rows_are_taken_before_the_model_is_asked),
    (Scheduler, "bisect", halves_are_forgotten),
    (Scheduler, "bisect", halves_overlap),
    (Buckets, "least_urgent", any_request_makes_room),
    (Policy, "ready_ns", a_delay_of_no_length),
    (Policy, "ready_ns", a_delay_passes_deadlines),
    (Policy, "rows_to_run", padding_to_the_largest),
    (Shapes, "padded_rows", no_padding_at_all),
    (Shapes, "limit", one_limit_for_all_shapes),
    (Shapes, "profile", the_profile_of_fewer_rows),
    (Concurrency, "started", ends_are_expected_late),
    (Concurrency, "started", the_end_is_always_known),
    (BatchTimes, "wants_times", every_batch_is_timed),
    (ContextAllocator, "_cost", any_context_for_any_profile),
    (KeptSizes, "_waits", a_batch_waits_for_its_size_for_ever),
    (ContextAllocator, "_find", the_first_arena_always),
    (Scheduler, "fail_one", who_fails_alone_is_answered),
    (Counters, "add_batch", padding_is_counted_as_rows),
    (BucketQueue, "push", deadlines_have_no_order),
    (BucketQueue, "_due_ns", the_latest_deadline_first),
    (BucketQueue, "choose", what_is_overdue_goes_with_the_urgent),
    (Buckets, "overdue", what_is_overdue_has_no_turn),
    (Buckets, "pick", full_batches_pile_up),
    (Turns, "reconsider", what_is_overdue_has_every_turn),
    (Turns, "reconsider", the_earliest_deadline_has_every_turn),
    (Forecast, "_wait_ns", waits_are_told_ten_times_as_long),
    (Forecast, "_refuse", what_is_late_is_refused_for_ever),
    (Forecast, "check", the_idle_refuse_too),
    (Forecast, "check", time_is_set_aside_twice),
    (BatchTimes, "service_ns", one_sample_is_enough),
    (BatchTimes, "service_ns", lateness_is_told_from_nothing),
    (Forecast, "begins_ns", the_wait_for_the_device_is_not_counted),
    (Forecast, "fit", whatever_is_queued_is_in_time),
    (Forecast, "_is_hopeless", everybody_is_given_up),
    (Times, "late", batches_are_told_to_take_half_as_long),
    (Queue, "give_up", who_is_given_up_is_not_told),
    (Concurrency, "left", a_lane_is_never_left),
    (DeviceShares, "missing_ns", the_device_is_left_to_the_idle),
    (Share, "left", batches_stay_in_flight),
    (Share, "hold_until", who_is_held_is_forgotten),
]


def plant(monkeypatch, owner, name, defect):
    """Put a defect in the place of a method."""
    original = getattr(owner, name)
    if isinstance(original, property):
        monkeypatch.setattr(owner, name, property(lambda self: defect(original, self)))
        return
    monkeypatch.setattr(owner, name, lambda self, *args, **more: defect(original, self, *args, **more))
