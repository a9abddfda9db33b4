"""Which shapes recur, and which gives way to another."""

import pytest

from asynctrt.runtime.recurring import OFTEN, SEEN_MAX, SHAPES_MAX, WINDOW, RecurringShapes


def noted(recurring, *shapes):
    """Note batches of these shapes, and return which were reported as recurring."""
    return {shape for shape in shapes if recurring.note(shape)}


def test_a_shape_recurs_once_it_has_come_often():
    recurring = RecurringShapes()
    assert not noted(recurring, *["a"] * (OFTEN - 1))
    assert noted(recurring, "a") == {"a"}


def test_shapes_that_are_ever_new_do_not_recur():
    recurring = RecurringShapes()
    assert not noted(recurring, *range(10_000))
    assert len(recurring._counts) <= SEEN_MAX


def test_a_shape_that_comes_rarely_among_others_does_not_recur():
    """It would not pay off, however often it has come over the years."""
    recurring = RecurringShapes()
    assert not noted(recurring, *[shape for _ in range(1000) for shape in range(40)])


def test_a_shape_that_comes_often_recurs_whatever_comes_beside_it():
    recurring = RecurringShapes()
    sent = [shape for number in range(OFTEN + 4) for shape in ("often", *range(10 * number, 10 * number + 9))]
    assert noted(recurring, *sent) == {"often"}


def test_what_came_long_ago_is_forgotten():
    recurring = RecurringShapes()
    noted(recurring, *["old"] * WINDOW, *["new"] * (12 * WINDOW))
    assert not noted(recurring, "old")
    assert noted(recurring, "new") == {"new"}


def test_what_was_refused_does_not_recur():
    recurring = RecurringShapes()
    recurring.refuse("a")
    assert not noted(recurring, *["a"] * 100)
    assert noted(recurring, *["b"] * 100) == {"b"}


@pytest.mark.parametrize(("count", "is_enough"), [(SHAPES_MAX - 1, False), (SHAPES_MAX, True)])
def test_there_are_at_most_so_many(count, is_enough):
    assert RecurringShapes().is_full(range(count)) is is_enough


def test_the_shape_that_came_last_the_longest_time_ago_gives_way():
    recurring = RecurringShapes()
    noted(recurring, *["a"] * 20, *["b"] * 20, "a", *["new"] * 60)
    assert recurring.victim("new", {"a", "b"}) == "b"
    assert recurring.victim("new", {"a", "b", "never seen"}) == "never seen"


def test_no_shape_gives_way_to_one_that_comes_as_often():
    """Or shapes that take turns would be built for all day."""
    recurring = RecurringShapes()
    noted(recurring, *[shape for _ in range(30) for shape in range(9)])
    assert recurring.victim(8, set(range(8))) is None


def test_there_may_be_room_for_fewer():
    recurring = RecurringShapes()
    recurring.limit(2)
    assert recurring.is_full(range(2))
    assert not recurring.is_full(range(1))
