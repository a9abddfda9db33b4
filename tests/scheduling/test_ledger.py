"""Contexts and arenas: each held by one batch, or shared as evenly as can be."""

import pytest

from asynctrt.errors import InternalError
from asynctrt.scheduling.ledger import Ledger


def ledger(contexts=2, arenas=0, in_flight_max=2, **kw):
    return Ledger(contexts=contexts, arenas=arenas, in_flight_max=in_flight_max, **kw)


def launch_all(book, **kw):
    """Launch until nothing more can be."""
    launches = []
    while book.can_launch:
        launches.append(book.launch("b", [], 0, 0, **kw))
    return launches


def test_a_context_is_held_by_one_batch():
    book = ledger(contexts=3, in_flight_max=3)
    assert len({book.launch("b", [], 0, 0).context for _ in range(3)}) == 3
    assert not book.can_launch


def test_the_limit_on_batches_in_flight_holds_with_contexts_to_spare():
    book = ledger(contexts=3, in_flight_max=1)
    launch = book.launch("b", [], 0, 0)
    assert not book.can_launch
    book.release(launch)
    assert book.can_launch


def test_the_context_used_last_is_used_next():
    book = ledger(contexts=3)
    launch = book.launch("b", [], 0, 0)
    book.release(launch)
    assert book.launch("b", [], 0, 0).context == launch.context


def test_arenas_are_shared_evenly():
    book = ledger(contexts=4, arenas=2, in_flight_max=4)
    assert sorted(book.launch("b", [], 0, 0).arena for _ in range(4)) == [0, 0, 1, 1]


def test_a_released_arena_is_the_least_used():
    book = ledger(contexts=4, arenas=2, in_flight_max=4)
    first = book.launch("b", [], 0, 0)
    book.launch("b", [], 0, 0)
    book.release(first)
    assert book.launch("b", [], 0, 0).arena == first.arena


@pytest.mark.parametrize(("contexts", "arenas"), [(1, 1), (4, 1), (5, 2), (5, 3), (4, 4)])
def test_a_context_works_in_one_arena_for_ever(contexts, arenas):
    """What is bound or captured for both stays good."""
    book = ledger(contexts=contexts, arenas=arenas, in_flight_max=contexts)
    for _ in range(3):
        launches = launch_all(book)
        assert sorted(launch.context for launch in launches) == list(range(contexts))
        assert all(launch.arena == launch.context % arenas for launch in launches)
        for launch in launches[::2] + launches[1::2]:
            book.release(launch)


def test_an_arena_without_a_free_context_is_passed_over():
    book = ledger(contexts=3, arenas=2, in_flight_max=3)
    first, second, third = launch_all(book)
    assert [launch.arena for launch in (first, second, third)] == [0, 1, 0]
    book.release(first)
    book.release(third)
    again = [book.launch("b", [], 0, 0) for _ in range(2)]
    assert [launch.arena for launch in again] == [0, 0], "arena 1 is used less, and has no context left"


def test_engines_that_share_arenas_see_each_others_batches():
    users = [0, 0]
    one, other = (ledger(contexts=2, arenas=2, arena_users=users) for _ in range(2))
    first = one.launch("b", [], 0, 0)
    second = other.launch("b", [], 0, 0)
    assert (first.arena, second.arena) == (0, 1)
    third, fourth = one.launch("b", [], 0, 0), other.launch("b", [], 0, 0)
    assert (third.arena, fourth.arena) == (1, 0)
    assert users == [2, 2]
    one.release(third)
    other.release(second)
    assert users == [2, 0]
    assert one.launch("b", [], 0, 0).arena == 1


def test_a_batch_goes_to_a_context_that_ran_its_kind():
    book = ledger(contexts=3, in_flight_max=3)
    ran = {}
    for kind in ("a", "b", "c"):
        launch = book.launch("b", [], 0, 0, kind=kind)
        ran[kind] = launch.context
        book.release(launch)
    assert len(set(ran.values())) == 3, "one that never ran is taken before another kind's"
    for kind in ("b", "a", "c", "c", "a"):
        launch = book.launch("b", [], 0, 0, kind=kind)
        assert launch.context == ran[kind]
        book.release(launch)
    assert book.can_launch


def test_a_kind_without_a_context_of_its_own_takes_any_and_keeps_it():
    book = ledger(contexts=2)
    for kind in ("a", "b"):
        book.release(book.launch("b", [], 0, 0, kind=kind))
    taken = book.launch("b", [], 0, 0, kind="c").context
    other = book.launch("b", [], 0, 0, kind="a").context
    assert {taken, other} == {0, 1}
    for launch in list(book.in_flight.values()):
        book.release(launch)
    assert book.launch("b", [], 0, 0, kind="c").context == taken


def test_the_least_used_arena_comes_before_the_kind():
    book = ledger(contexts=4, arenas=2, in_flight_max=4)
    first = book.launch("b", [], 0, 0, kind="a")
    second = book.launch("b", [], 0, 0, kind="a")
    assert (first.arena, second.arena) == (0, 1)


def test_without_arenas_none_is_held():
    assert ledger().launch("b", [], 0, 0).arena is None


def test_a_quarantined_context_is_never_used_again():
    book = ledger()
    launch = book.launch("b", [], 0, 0)
    book.quarantine(launch)
    other = book.launch("b", [], 0, 0)
    assert other.context != launch.context
    assert book.usable_contexts == 1
    book.quarantine(other)
    assert not book.can_launch
    assert book.quarantined == {launch.context, other.context}


def test_with_a_context_its_whole_arena_is_quarantined():
    """A batch there would wait for the one that never ends."""
    book = ledger(contexts=5, arenas=2, in_flight_max=5)
    hung, other, mate = (book.launch("b", [], 0, 0) for _ in range(3))
    assert (hung.arena, other.arena, mate.arena) == (0, 1, 0)
    book.quarantine(hung)
    assert book.quarantined == {0, 2, 4}
    assert book.usable_contexts == 2
    assert [launch.arena for launch in launch_all(book)] == [1]
    book.release(mate)
    assert not book.can_launch, "a mate that ended all the same is not free again"
    book.release(other)
    assert book.launch("b", [], 0, 0).context == other.context


def test_the_mates_of_a_quarantined_context_may_hang_too():
    users = [0]
    book = ledger(contexts=3, arenas=1, in_flight_max=3, arena_users=users)
    for launch in launch_all(book)[:2]:
        book.quarantine(launch)
        assert book.usable_contexts == 0
    assert len(book.in_flight) == 1
    assert not book.can_launch
    assert repr(book) == "<Ledger free=0 in_flight=1 quarantined=3>"


@pytest.mark.parametrize("again", ["release", "quarantine"])
def test_a_batch_ends_once(again):
    book = ledger()
    launch = book.launch("b", [], 0, 0)
    book.release(launch)
    with pytest.raises(InternalError, match="not in flight"):
        getattr(book, again)(launch)
    assert repr(book) == "<Ledger free=2 in_flight=0 quarantined=0>"


def test_a_context_of_the_same_kind_comes_first_in_whichever_arena():
    book = ledger(contexts=4, arenas=4, in_flight_max=4)
    ran = {}
    launches = [book.launch("b", [], 0, 0, kind=kind) for kind in ("short", "long", "wide")]
    for launch, kind in zip(launches, ("short", "long", "wide"), strict=True):
        ran[kind] = launch.context
        book.release(launch)
    for kind in ("wide", "short", "long", "short"):
        launch = book.launch("b", [], 0, 0, kind=kind)
        assert launch.context == ran[kind]
        book.release(launch)
