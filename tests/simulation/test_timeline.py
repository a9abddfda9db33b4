"""Virtual time: order, and a loop that stands still."""

from tests.simulation.timeline import Timeline


def test_things_happen_in_order_of_time_and_of_when_they_were_set():
    timeline, seen = Timeline(), []
    for time_ns, name in ((5, "b"), (3, "a"), (5, "c"), (9, "d")):
        timeline.at(time_ns, lambda name: seen.append((timeline.now_ns, name)), name)
    timeline.run_until(5)
    assert seen == [(3, "a"), (5, "b"), (5, "c")]
    assert timeline.now_ns == 5
    timeline.run_next()
    assert seen[-1] == (9, "d")
    timeline.at(1, seen.append, "late")
    timeline.run_until(10)
    assert (seen[-1], timeline.now_ns) == ("late", 10)


def test_what_comes_while_the_loop_stands_still_waits_for_it():
    timeline, seen = Timeline(), []

    def call(name):
        if not timeline.is_late(call, name):
            seen.append((timeline.now_ns, name))

    timeline.stalled_until_ns = 7
    for time_ns, name in ((2, "a"), (3, "b"), (8, "c")):
        timeline.at(time_ns, call, name)
    timeline.run_until(20)
    assert seen == [(7, "a"), (7, "b"), (8, "c")]
