"""When a worker must be ended, and when it is stuck, by what it shows at each look."""

import pytest

from asynctrt.workers.pulse import LOOK_S, STUCK_S, Pulse

LOOK_NS = int(LOOK_S * 1e9)


def looks(pulse, *beats, groups=0, apart_ns=LOOK_NS):
    """Look at a worker with these heartbeats, and return the last answer."""
    why = ""
    for beat in beats:
        why = pulse.looked(pulse.looked_ns + apart_ns, beat, groups=groups)
    return why


@pytest.mark.parametrize(("timeout_s", "limit"), [(1.2, 2), (0.1, 1), (None, None)])
def test_only_a_silence_that_is_not_broken_ends_a_worker(timeout_s, limit):
    """And only one of about a second, however short the batch_timeout is."""
    pulse = Pulse(timeout_s)
    assert not looks(pulse, *[1 + turn // 2 for turn in range(20)])
    for number in range(1, 5):
        is_over = limit is not None and number >= limit
        assert looks(pulse, 10).startswith("its event loop had not run for") is is_over
    pulse.begin(pulse.looked_ns)
    assert not looks(pulse, 1)


def test_a_front_that_was_stopped_itself_does_not_blame_its_worker():
    assert not looks(Pulse(1.0), 0, apart_ns=100 * LOOK_NS)


def test_a_worker_without_an_answer_for_long_is_stuck_until_it_answers():
    patience = int(STUCK_S / LOOK_S)
    pulse = Pulse(None)
    for has_answered in (False, True):
        looks(pulse, *range(100, 100 + patience + has_answered), groups=1)
        assert not pulse.is_stuck
        looks(pulse, 200, groups=1)
        assert pulse.is_stuck
        pulse.answered(10)
        assert not pulse.is_stuck
    pulse.answered(int(STUCK_S * 1e9))
    assert not pulse.is_stuck
    looks(pulse, *range(300, 302 + 3 * patience), groups=1)
    assert not pulse.is_stuck, "its batches take that long"
