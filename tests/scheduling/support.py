"""What the tests of the scheduler share: one with small numbers, and the profiles of a model."""

import gc
import sys
from types import SimpleNamespace

from asynctrt.scheduling.batch import Batch, Reason
from asynctrt.scheduling.key import BatchKey
from asynctrt.scheduling.policy import NOT_CAPTURED, Policy
from asynctrt.scheduling.request import Request
from asynctrt.scheduling.scheduler import Scheduler
from asynctrt.scheduling.shapes import Shapes

KEY = BatchKey(("b",))


class Profiles:
    """A model's profiles, by what it is told to answer; an exception is raised."""

    def __init__(self, ranges=((1, 64),), profile=0):
        self.ranges = ranges
        self.profile = profile
        self.asked = []

    def row_ranges(self, shape):
        self.asked.append(shape)
        return self._answer(self.ranges, shape)

    def profile_of(self, shape, rows):
        self.asked.append((shape, rows))
        return self._answer(self.profile, shape, rows)

    @staticmethod
    def _answer(answer, *question):
        if callable(answer):
            answer = answer(*question)
        if isinstance(answer, BaseException):
            raise answer
        return answer


def scheduler(
    rows_max=4,
    *,
    delay_ns_max=0,
    concurrency=2,
    is_parallel=False,
    captured=NOT_CAPTURED,
    rows_fixed=None,
    profiles=None,
    contexts=2,
    change_ns=0,
    shapes=None,
    **kw,
):
    return Scheduler(
        policy=Policy(rows_max, delay_ns_max, concurrency, is_parallel, captured, change_ns=change_ns),
        shapes=shapes or Shapes(rows_max=rows_max, rows_fixed=rows_fixed, profiles=profiles),
        contexts=contexts,
        **{"queue_rows_max": 16, "priorities": 3, "arenas": 0, "in_flight_max": contexts, **kw},
    )


def key_of(shape="b"):
    return shape if isinstance(shape, BatchKey) else BatchKey((shape,))


def submit(plan, rows=1, shape="b", priority=0, now_ns=0, *, key=None, **kw):
    request = Request(rows, key or key_of(shape), priority, now_ns, **kw)
    plan.queue.submit(request)
    return request


class Caller:
    """A future, as far as the scheduler knows one."""

    def __init__(self):
        self.is_done = False

    def done(self):
        return self.is_done


def enter(plan, count=1, key=KEY, now_ns=0):
    """Queue plain requests; return their futures."""
    futures = [Caller() for _ in range(count)]
    for number, future in enumerate(futures):
        if not plan.queue.open.join(key, future, number):
            plan.queue.submit_plain(key, future, number, now_ns)
    return futures


def usual_ns(plan, batch):
    """How long such a batch usually takes to be copied in, to compute and to be copied out."""
    return plan.times.usual_ns(batch.key, batch.rows_run)


def queued_by_key(plan):
    """The queued rows of each bucket with work."""
    plan.queue.close_open()
    return {bucket.key: bucket.rows for bucket in plan.queue.buckets}


def took(copy_in_ns=0, compute_ns=0, copy_out_ns=0, arena_wait_ns=0):
    """How long a batch took."""
    return SimpleNamespace(
        copy_in_ns=copy_in_ns, compute_ns=compute_ns, copy_out_ns=copy_out_ns, arena_wait_ns=arena_wait_ns
    )


def finish(plan, batch, now_ns=0, *, compute_ns=20, **kw):
    """Let a batch go through all that happens to one that is put on a stream and ends well."""
    plan.started(batch, now_ns)
    plan.landed(batch, now_ns)
    plan.finished(batch, now_ns, took(1, compute_ns, 300, **kw))


def make_batch(number=1, *, key=KEY, rows=1, rows_run=None, arena=None, is_timed=True, requests=(), **kw):
    """A batch that no scheduler decided."""
    fields = {"profile": None, "context": 0, "reason": Reason.IDLE, "launched_ns": 0, **kw}
    return Batch(
        number=number,
        key=key,
        requests=tuple(requests),
        rows=rows,
        rows_run=rows if rows_run is None else rows_run,
        arena=arena,
        is_timed=is_timed,
        **fields,
    )


def count_operations(function):
    """Return how many lines ``function`` and what it calls execute; one of a loop counts each time.

    Bytecodes would be finer, but Python 3.12 does not trace those of the first call.
    """
    operations = 0

    def trace(frame, event, argument):
        nonlocal operations
        operations += event == "line"
        return trace

    before = sys.gettrace()
    # A collection in the middle would count what finalises the garbage of other tests.
    gc.collect()
    gc.disable()
    sys.settrace(trace)
    try:
        function()
    finally:
        sys.settrace(before)
        gc.enable()
    return operations


def between_operations(function, *args, go_on):
    """Call a function, and ``go_on()`` between any two of its operations, as if threads took turns there.

    :return: how many times.
    """
    called = 0

    def trace(frame, event, _):
        nonlocal called
        frame.f_trace_opcodes = True
        if event in ("opcode", "line"):  # Python 3.12 tells no bytecodes of the first call.
            called += 1
            sys.settrace(None)
            go_on()
            sys.settrace(trace)
        return trace

    sys.settrace(trace)
    try:
        function(*args)
    finally:
        sys.settrace(None)
    return called
