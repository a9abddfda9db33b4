"""Contexts and arenas: each held by one batch, or shared as evenly as can be."""

import pytest

from asynctrt.errors import InternalError
from asynctrt.scheduling.ledger import Ledger


def ledger(contexts=2, arenas=0, in_flight_max=2):
    return Ledger(contexts=contexts, arenas=arenas, in_flight_max=in_flight_max)


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


@pytest.mark.parametrize("again", ["release", "quarantine"])
def test_a_batch_ends_once(again):
    book = ledger()
    launch = book.launch("b", [], 0, 0)
    book.release(launch)
    with pytest.raises(InternalError, match="not in flight"):
        getattr(book, again)(launch)
    assert repr(book) == "<Ledger free=2 in_flight=0 quarantined=0>"
