"""When a worker must be ended, and when it is stuck, by what it shows at each look."""

import pytest

from asynctrt.workers.pulse import IDLE_LOOKS_MAX, LOOK_S, STUCK_S, Pulse

LOOK_NS = int(LOOK_S * 1e9)


def looks(pulse, *seen, groups=0, apart_ns=LOOK_NS):
    """Look at a worker with these heartbeats and works, and return the last answer."""
    why = ""
    for beat, works in seen:
        why = pulse.looked(pulse.looked_ns + apart_ns, beat, works, oldest=int(groups > 0), groups=groups)
    return why


@pytest.mark.parametrize(("timeout_s", "limit"), [(1.2, 2), (0.1, 1), (None, None)])
def test_only_a_silence_that_is_not_broken_ends_a_worker(timeout_s, limit):
    """And only one of about a second, however short the batch_timeout is."""
    pulse = Pulse(timeout_s)
    assert not looks(pulse, *[(1 + turn // 2, 0) for turn in range(20)])
    for number in range(1, 5):
        is_over = limit is not None and number >= limit
        assert looks(pulse, (10, 0)).startswith("its event loop had not run for") is is_over
    pulse.begin(pulse.looked_ns)
    assert not looks(pulse, (1, 0))


def test_a_front_that_was_stopped_itself_does_not_blame_its_worker():
    assert not looks(Pulse(1.0), (0, 0), apart_ns=100 * LOOK_NS)


def test_a_worker_that_works_on_none_of_its_groups_is_ended():
    pulse = Pulse(None)
    assert not looks(pulse, *[(beat, beat % 2) for beat in range(1, 10)], groups=3)
    assert not looks(pulse, *[(9, 0)] * 9, groups=3), "it does not run, and may yet see them"
    beats = [(10 + number, 0) for number in range(IDLE_LOOKS_MAX)]
    assert looks(pulse, *beats, groups=3) == "it worked on none of the 3 groups of requests that it was given"


def test_a_worker_without_an_answer_for_long_is_stuck_until_it_answers():
    patience = int(STUCK_S / LOOK_S)
    pulse = Pulse(None)
    looks(pulse, *[(beat, 1) for beat in range(1, 100)], groups=1)
    assert not pulse.is_stuck, "its first batch may take any time"
    pulse.answered(10)
    looks(pulse, *[(beat, 1) for beat in range(100, 101 + patience)], groups=1)
    assert not pulse.is_stuck
    looks(pulse, (200, 1), groups=1)
    assert pulse.is_stuck
    pulse.answered(int(STUCK_S * 1e9))
    assert not pulse.is_stuck
    looks(pulse, *[(beat, 1) for beat in range(300, 302 + 3 * patience)], groups=1)
    assert not pulse.is_stuck, "its batches take that long"
