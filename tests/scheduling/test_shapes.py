"""What a model takes of each shape: asked once, checked, and never a raw exception of the model's."""

import pytest

from asynctrt.errors import DeviceLostError, ExecutionError, InputError
from asynctrt.scheduling.key import SHAPES_MAX
from asynctrt.scheduling.shapes import Shapes
from tests.scheduling.support import Profiles

SHAPE = (("n", 7),)


class Unprintable(Exception):
    def __str__(self):
        raise RuntimeError("no message either")


FOREIGN = [
    RuntimeError("bug"),
    KeyError("n"),
    AssertionError(),
    StopIteration(),
    GeneratorExit(),
    Unprintable(),
]
GARBAGE = [None, "two", float("nan"), float("inf"), object(), [1], 1j]
BAD_RANGES = [None, 3, (), [()], [(1,)], [(1, 2, 3)], [(0, 4)], [(3, 2)], [(None, 4)], [("a", "b")], "ab"]


def shapes(rows_max=8, rows_fixed=None, **kw):
    return Shapes(rows_max=rows_max, rows_fixed=rows_fixed, profiles=Profiles(**kw) if kw else None)


def test_without_profiles_the_shape_does_not_matter():
    rules = shapes()
    assert not rules.has_profiles
    assert (rules.limit(SHAPE), rules.padded_rows(SHAPE, 3), rules.profile(SHAPE, 3)) == (8, 3, None)


@pytest.mark.parametrize("rows", [1, 3, 8])
def test_a_model_of_a_fixed_size_runs_that_size(rows):
    assert shapes(rows_fixed=8).padded_rows(SHAPE, rows) == 8


@pytest.mark.parametrize(
    ("ranges", "limit"), [(((1, 4),), 4), (((1, 100),), 8), (((1, 2), (4, 6)), 6), (((5, 6), (1, 2)), 6)]
)
def test_a_batch_holds_what_the_largest_profile_takes_up_to_the_limit_of_the_engine(ranges, limit):
    assert shapes(ranges=ranges).limit(SHAPE) == limit


@pytest.mark.parametrize(
    ("ranges", "rows", "run"),
    [
        (((1, 8),), 3, 3),
        (((4, 8),), 3, 4),  # No smaller batch is taken.
        (((4, 8),), 5, 5),
        (((1, 2), (5, 8)), 2, 2),
        (((1, 2), (5, 8)), 3, 5),
        (((5, 8), (4, 6)), 3, 4),  # The least that some profile takes.
    ],
)
def test_rows_are_padded_to_the_smallest_batch_that_a_profile_takes(ranges, rows, run):
    assert shapes(ranges=ranges).padded_rows(SHAPE, rows) == run


@pytest.mark.parametrize(
    ("nbytes_max", "row_nbytes", "limit"),
    [
        (100, 1, 8),  # All that the engine takes.
        (8, 1, 8),
        (7, 1, 7),
        (100, 30, 3),
        (100, 100, 1),
        (100, 101, 1),  # One row at least: a single large request is no reason to refuse it.
        (100, 1 << 60, 1),
        (100, 0, 8),  # Rows without any values.
    ],
)
def test_large_rows_make_small_batches(nbytes_max, row_nbytes, limit):
    rules = Shapes(rows_max=8, profiles=None, nbytes_max=nbytes_max, row_nbytes=lambda shape: row_nbytes)
    assert (rules.limit(SHAPE), rules.rows_held(SHAPE)) == (limit, limit)
    assert rules.limit_varies
    assert not shapes().limit_varies


@pytest.mark.parametrize(
    ("ranges", "limit", "held"),
    [
        (((1, 8),), 3, 3),
        (((4, 8),), 4, 4),  # No smaller batch is taken, so that it may as well be full.
        (((1, 2), (5, 8)), 5, 5),
        (((1, 2),), 2, 2),
        (((9, 16),), 8, 9),  # Padded to more than the engine's own limit.
    ],
)
def test_large_rows_make_batches_as_small_as_profiles_let_them_be(ranges, limit, held):
    profiles = Profiles(ranges=ranges)
    rules = Shapes(rows_max=8, profiles=profiles, nbytes_max=100, row_nbytes=lambda shape: 30)
    assert (rules.limit(SHAPE), rules.rows_held(SHAPE)) == (limit, held)
    assert all(rules.padded_rows(SHAPE, rows) <= held for rows in range(1, limit + 1))


@pytest.mark.parametrize(
    ("rows_max", "ranges", "held"),
    [
        (8, ((1, 64),), 8),
        (4, ((8, 16),), 8),
        (4, ((1, 2), (8, 16)), 8),
        (4, ((1, 2), (4, 16)), 4),
        (64, ((1, 32),), 32),
    ],
)
@pytest.mark.parametrize("fills", [False, True])
def test_memory_has_room_for_what_pads_a_batch(rows_max, ranges, held, fills):
    rules = Shapes(rows_max=rows_max, profiles=Profiles(ranges=ranges), fills_batches=fills)
    assert rules.rows_held(SHAPE) == held
    assert max(rules.padded_rows(SHAPE, rows) for rows in range(1, rules.limit(SHAPE) + 1)) == held


def test_a_model_of_a_fixed_size_runs_it_whatever_its_rows_weigh():
    rules = Shapes(rows_max=8, rows_fixed=8, profiles=None, nbytes_max=1, row_nbytes=lambda shape: 100)
    assert (rules.limit(SHAPE), rules.padded_rows(SHAPE, 1), rules.rows_held(SHAPE)) == (8, 8, 8)


def test_the_bytes_of_a_row_are_asked_for_once_for_each_shape():
    asked = []
    rules = Shapes(
        rows_max=8, profiles=None, nbytes_max=8, row_nbytes=lambda shape: asked.append(shape) or shape
    )
    for _ in range(3):
        assert [rules.limit(shape) for shape in (1, 2, 4)] == [8, 4, 2]
    assert asked == [1, 2, 4]
    for size in range(1, SHAPES_MAX + 10):
        rules.limit(size)
        assert len(rules._limits) <= SHAPES_MAX


def test_rows_that_no_profile_takes():
    with pytest.raises(ExecutionError, match=r"no profile of the model takes 5 rows"):
        shapes(ranges=((1, 4),)).padded_rows(SHAPE, 5)


def test_the_profile_is_asked_for_once_for_each_shape_and_size():
    profiles = Profiles(profile=lambda shape, rows: rows)
    rules = Shapes(rows_max=8, profiles=profiles)
    for _ in range(3):
        assert [rules.profile(SHAPE, rows) for rows in (1, 2)] == [1, 2]
        assert rules.profile((), 1) == 1
        assert rules.limit(SHAPE) == 8
    assert profiles.asked == [(SHAPE, 1), (SHAPE, 2), ((), 1), SHAPE]


def test_what_is_remembered_is_bounded():
    rules = Shapes(rows_max=8, profiles=Profiles())
    for size in range(SHAPES_MAX + 10):
        rules.limit(size)
        rules.profile(size, 1)
        assert len(rules._limits) <= SHAPES_MAX
    assert rules.limit(0) == 8


@pytest.mark.parametrize("error", FOREIGN, ids=lambda error: type(error).__name__)
def test_what_a_model_raises_becomes_an_error_of_ours(error):
    for ask in (
        lambda: shapes(profile=error).profile(SHAPE, 1),
        lambda: shapes(ranges=error).limit(SHAPE),
        lambda: shapes(ranges=error).padded_rows(SHAPE, 1),
    ):
        with pytest.raises(ExecutionError, match="failed to say which of its profiles takes") as caught:
            ask()
        assert caught.value.__cause__ is error
        assert type(error).__name__ in str(caught.value)


@pytest.mark.parametrize("error", [InputError("no profile takes it"), DeviceLostError("lost")])
def test_errors_of_ours_are_passed_on(error):
    for ask in (
        lambda: shapes(profile=error).profile(SHAPE, 1),
        lambda: shapes(ranges=error).limit(SHAPE),
    ):
        with pytest.raises(type(error)) as caught:
            ask()
        assert caught.value is error


@pytest.mark.parametrize("answer", GARBAGE)
def test_a_profile_that_is_not_a_number(answer):
    with pytest.raises(ExecutionError, match="profile_of"):
        shapes(profile=answer).profile(SHAPE, 1)


@pytest.mark.parametrize("answer", BAD_RANGES, ids=repr)
def test_ranges_that_are_not_batch_sizes(answer):
    with pytest.raises(ExecutionError, match="rows_of"):
        shapes(ranges=answer).limit(SHAPE)


def test_a_failure_is_not_remembered():
    profiles = Profiles(ranges=RuntimeError(), profile=RuntimeError())
    rules = Shapes(rows_max=8, profiles=profiles)
    for _ in range(2):
        with pytest.raises(ExecutionError):
            rules.limit(SHAPE)
        with pytest.raises(ExecutionError):
            rules.profile(SHAPE, 1)
    profiles.ranges, profiles.profile = ((1, 4),), 2
    assert (rules.limit(SHAPE), rules.profile(SHAPE, 1)) == (4, 2)


def test_a_shape_may_have_batch_sizes_of_its_own():
    rules, other = shapes(), (("n", 9),)
    rules.restrict((1, 2, 4, 8))
    rules.specialise(SHAPE, (3, 6, 8))
    assert [rules.padded_rows(SHAPE, rows) for rows in (1, 3, 4, 7)] == [3, 3, 6, 8]
    assert [rules.padded_rows(other, rows) for rows in (1, 3, 4, 7)] == [1, 4, 4, 8]
    rules.specialise(SHAPE, ())
    assert rules.padded_rows(SHAPE, 3) == 4


def test_no_batch_is_padded_beyond_what_a_shape_holds():
    rules = Shapes(rows_max=8, profiles=None, nbytes_max=50, row_nbytes=lambda _: 10)
    rules.restrict((1, 2, 4, 8))
    assert (rules.limit(SHAPE), rules.padded_rows(SHAPE, 5), rules.rows_held(SHAPE)) == (5, 5, 5)


def test_a_model_whose_shapes_may_be_specialised_runs_other_rows_than_it_is_given():
    rules = shapes()
    assert rules.runs_as_many_as_it_takes
    rules.may_specialise = True
    assert not rules.runs_as_many_as_it_takes
