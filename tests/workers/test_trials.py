"""Which suspect is tried next, and whose turn it is."""

from asynctrt.workers.trials import Trials


def started(*suspects):
    trials = Trials()
    for group in suspects:
        trials.add(list(group))
    return trials


def test_suspects_of_one_group_follow_each_other_until_one_is_bad():
    trials = started("ab", "cd")
    assert (trials.waiting, trials.are_over, trials.lets_in(0)) == (["a", "b", "c", "d"], False, False)
    assert trials.next() == "b"
    trials.tried = "b"
    trials.convict()
    assert [trials.next() for _ in range(3)] == ["d", "c", "a"]
    assert not trials.are_waiting
    assert not trials.are_over, "one is still being tried"
    trials.tried = None
    assert (trials.are_over, trials.lets_in(0)) == (True, True)
    assert started("ab").take_waiting() == ["a", "b"]


def test_each_turn_lasts_as_long_as_the_one_before():
    trials = started("a")
    assert trials.is_turn_over(0)
    trials.change_turns(1_000, 8)
    assert trials.lets_in(1_000), "as many rows as fill the worker, in any case"
    trials.sent(8)
    assert not trials.lets_in(1_000)
    trials.change_turns(1_001, 8)
    assert not trials.lets_in(1_001)
    trials.change_turns(1_501, 0)  # The suspects' turn took 500.
    assert (trials.lets_in(2_000), trials.lets_in(2_001), trials.is_turn_over(2_001)) == (True, False, True)
    trials.end()
    assert not trials.is_turn_of_others
