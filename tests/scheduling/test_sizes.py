"""Sizes to pad to: bounded, enough for all, as good as any on small cases, and calm while nothing changes."""

import random
from itertools import combinations, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from asynctrt.scheduling import sizes as module
from asynctrt.scheduling.sizes import (
    AS_GOOD,
    BINS_MAX,
    LOOK_FIRST,
    LOOK_USUAL,
    SIZES_MAX,
    STRANGE,
    WINDOW,
    Costs,
    Sizes,
    at_once,
    merged,
)

COSTS = Costs(200_000, 1_000)
RANGES = some.lists(some.tuples(some.integers(1, 300), some.integers(0, 200)), max_size=3).map(
    lambda found: [(least, least + more) for least, more in found]
)


def come(found, given_sizes, batch=8):
    """Let requests of one row come, so many of them in a batch."""
    for start in range(0, len(given_sizes), batch):
        found.answered([(size, 1) for size in given_sizes[start : start + batch]])


def texts(rng, count, mean=3.0):
    return [min(max(int(rng.lognormvariate(mean, 0.9)), 1), 256) for _ in range(count)]


# ---- what batches take


@given(
    some.integers(0, 10**7),
    some.integers(1, 10**6),
    some.integers(0, 10**6),
    some.lists(
        some.tuples(some.integers(1, 1000), some.integers(1, 64)), min_size=3, max_size=30, unique=True
    ),
)
def test_costs_are_found_again(batch_ns, unit_ns, row_ns, batches):
    points = [
        (size * rows, rows, batch_ns + unit_ns * size * rows + row_ns * rows, 1) for size, rows in batches
    ]
    found = Costs.fit(points)
    least, most = min(points)[0], max(points)[0]
    if most < 2 * least:
        assert found.row_ns == 0
        assert least / 2 < found.batch_ns / found.unit_ns < 2 * most
    elif not row_ns or (len({size for size, _ in batches}) > 9 and len({rows for _, rows in batches}) > 9):
        for units, rows, took_ns, _ in points:
            assert found.ns(units, rows) == pytest.approx(took_ns, rel=0.1)


def test_what_each_row_takes_is_not_taken_for_what_its_size_does():
    """A model that takes nothing to speak of: what takes time is to copy so many rows."""
    points = [
        (size * rows, rows, 30_000 + 5_000 * rows + 10 * size * rows, 4)
        for size in (16, 32, 256)
        for rows in (1, 5, 9, 30)
    ]
    assert Costs.fit(points) == pytest.approx((30_000, 10, 5_000), rel=1e-6)


def test_no_costs_are_known_before_any_were_measured():
    assert Costs.fit([]) is Costs.fit([(0, 1, 5, 1)] * 3) is None


@pytest.mark.parametrize("points", [[(7, 1, 50, 9)] * 9, [(7, 1, 50, 1)], [(7, 7, 50, 1), (7, 1, 50, 3)]])
def test_half_is_taken_to_be_for_the_batch_while_nothing_tells(points):
    found = Costs.fit(points)
    assert found.batch_ns == pytest.approx(25)
    assert found.ns(7) == pytest.approx(50)


def test_what_cannot_be_told_from_rows_is_taken_for_units():
    """As long as all are padded to one size."""
    found = Costs.fit([(8 * rows, rows, 1000 + 160 * rows, 4) for rows in (1, 2, 4, 8)])
    assert found == pytest.approx((1000, 20, 0))


@given(
    some.lists(
        some.tuples(
            some.integers(0, 10**9), some.integers(1, 64), some.integers(0, 10**9), some.integers(1, 16)
        ),
        max_size=20,
    )
)
def test_costs_are_never_negative(points):
    found = Costs.fit(points)
    assert found is None or min(found) >= 0


def test_a_batch_that_took_far_too_long_hardly_counts():
    points = [(each, 1, 1000 + 10 * each, 4) for each in (10, 100, 1000)]
    assert Costs.fit([*points, (10, 1, 10**7, 1)]).ns(10, 1) == pytest.approx(1100, rel=0.05)


# ---- sizes


def test_powers_of_two_at_first():
    assert [Sizes().rounded(size) for size in (0, 1, 2, 3, 33, 64, 1000)] == [1, 1, 2, 4, 64, 64, 1024]
    bounded = Sizes([(4, 100), (128, 300)])
    assert [bounded.rounded(size) for size in (1, 5, 70, 100, 101, 120, 257)] == [
        4,
        8,
        100,
        100,
        128,
        128,
        300,
    ]
    assert bounded.rounded(301) is None
    assert (bounded.largest, Sizes().largest) == (300, None)


@given(RANGES)
def test_ranges_are_joined(ranges):
    found = merged(ranges)
    taken = {size for least, most in ranges for size in range(least, most + 1)}
    assert {size for least, most in found for size in range(least, most + 1)} == taken
    assert all(most + 1 < least for (_, most), (least, _) in pairwise(found))


@given(
    ranges=RANGES,
    came=some.lists(some.tuples(some.integers(0, 600), some.integers(1, 3)), min_size=1, max_size=60),
    asked=some.lists(some.integers(0, 600), max_size=30),
    costs=some.tuples(some.floats(0, 1e7), some.floats(0, 1e6)).map(lambda pair: Costs(*pair)),
    sizes_max=some.integers(1, 6),
    rows_fixed=some.booleans(),
)
def test_every_size_is_covered_by_one_that_the_model_takes(ranges, came, asked, costs, sizes_max, rows_fixed):
    found = Sizes(ranges, sizes_max=sizes_max, rows_fixed=rows_fixed)
    for request in came:
        found.answered([request])
    at_once(found.look(costs))
    assert len(found.chosen) <= sizes_max
    assert list(found.chosen) == sorted(set(found.chosen))
    taken = merged(ranges)
    for size in [*asked, *(size for size, _ in came)]:
        padded = found.rounded(size)
        if taken and size > taken[-1][1]:
            assert padded is None
        else:
            assert padded >= size
            assert not taken or any(least <= padded <= most for least, most in taken)
    # A longer one is never padded to less.
    padded = [found.rounded(size) for size in range(601)]
    known = [size for size in padded if size is not None]
    assert known == sorted(known)


@settings(max_examples=200)
@given(
    came=some.dictionaries(some.integers(1, 40), some.integers(1, 50), min_size=1, max_size=7),
    batch=some.integers(1, 12),
    costs=some.tuples(some.floats(1, 1e6), some.floats(1, 1e5)).map(lambda pair: Costs(*pair)),
    sizes_max=some.integers(1, 4),
    rows_fixed=some.booleans(),
)
def test_no_other_sizes_are_better_on_small_cases(came, batch, costs, sizes_max, rows_fixed):
    found = Sizes(sizes_max=sizes_max, rows_fixed=rows_fixed)
    come(found, [size for size, count in came.items() for _ in range(count)], batch)
    together = found._together()

    def takes(sizes):
        shares = found._shares(lambda step: next(size for size in sizes if size >= step), found._seen)
        return found._expected_ns(shares, costs, together)

    steps = sorted(found._seen)
    possible = [
        (*others, steps[-1])
        for count in range(min(sizes_max, len(steps)))
        for others in combinations(steps[:-1], count)
    ]
    least = min(map(takes, possible))
    best = at_once(found._best(costs, together, (), 0.0, found._seen))
    assert takes(best) <= AS_GOOD * least * (1 + 1e-9)
    assert len(best) == min(len(sizes) for sizes in possible if takes(sizes) <= AS_GOOD * least * (1 + 1e-12))


def test_a_batch_that_costs_much_makes_sizes_few_and_padding_makes_them_many():
    few, many = Sizes(), Sizes()
    for found in (few, many):
        come(found, texts(random.Random(0), 4096))
    assert at_once(few.look(Costs(10_000_000, 100)))
    assert at_once(many.look(Costs(1_000, 10_000)))
    assert len(few.chosen) <= 2
    assert len(many.chosen) > 8


def test_requests_that_come_alone_are_padded_little():
    """They share no batch that a common size could fill."""
    together, alone = Sizes(), Sizes()
    come(together, texts(random.Random(0), 4096), batch=16)
    come(alone, texts(random.Random(0), 4096), batch=1)
    for found in (together, alone):
        assert at_once(found.look(Costs(20_000, 1_000)))
    assert len(alone.chosen) > len(together.chosen)


def test_a_size_that_costs_more_to_open_than_it_saves_is_not_opened():
    free, dear = Sizes(), Sizes()
    for found in (free, dear):
        come(found, texts(random.Random(0), 1024))
    assert at_once(free.look(COSTS))
    assert not at_once(dear.look(COSTS, opening_ns=1e9))
    assert dear.chosen == ()
    # Not even the only one that there would be.
    come(one := Sizes(), [130] * 1024)
    assert not at_once(one.look(COSTS, opening_ns=1e9))


def test_sizes_that_are_in_use_are_kept_where_others_are_hardly_better():
    free, dear = Sizes(), Sizes()
    for found in (free, dear):
        come(found, [33] * 4096 + texts(random.Random(0), 4096))
    assert at_once(free.look(Costs(1_000, 1_000)))
    assert at_once(dear.look(Costs(1_000, 1_000), opening_ns=10_000_000))
    powers = {1 << power for power in range(9)}
    assert len(powers.intersection(free.chosen)) < len(powers.intersection(dear.chosen))


def test_rows_that_share_no_batch_anyway_are_padded_little():
    """A batch is full with the rows of one size."""
    counts = []
    for rows_max in (2, 64):
        found = Sizes(rows_max=rows_max)
        come(found, texts(random.Random(0), 4096))
        best = at_once(found._best(Costs(200_000, 3_000), 32.0, (), 0.0, found._seen))
        counts.append(len(best))
    assert counts[0] > counts[1]


def test_what_does_not_pay_is_looked_at_less_and_less_often():
    found, looks = Sizes(), []
    assert list(run(found, [70] * 4000, lambda: COSTS))

    def looked():
        looks.append(1)
        return COSTS

    # Some are shorter than everything that was chosen for, and there are too few of them.
    assert list(run(found, [70 if number % 4 else 3 for number in range(200_000)], looked)) == []
    assert len(looks) < 200_000 / LOOK_USUAL + 10


def test_one_length_is_not_padded():
    found = Sizes()
    come(found, [130] * 1024)
    assert at_once(found.look(COSTS))
    assert found.chosen == (136,)
    assert found.rounded(130) == 136


def test_what_is_unlike_all_that_came_goes_to_the_next_power_of_two():
    found = Sizes()
    come(found, [130] * 1024)
    at_once(found.look(COSTS))
    assert [found.rounded(size) for size in (3, 60, 100, 137, 900)] == [4, 64, 128, 256, 1024]


def run(found, given_sizes, costs_of, batch_of=lambda _: 8):
    """Let requests come, and let the sizes be looked at when they are due; yield after each change."""
    batch = []
    for number, size in enumerate(given_sizes):
        batch.append((size, 1))
        if len(batch) >= batch_of(number):
            found.answered(batch)
            batch = []
        if found.is_due and at_once(found.look(costs_of())):
            yield number


@pytest.mark.parametrize("seed", range(5))
def test_they_stay_while_nothing_changes_but_by_chance(seed):
    """What batches take and how full they are is measured, and so never twice the same."""
    rng = random.Random(seed)
    found = Sizes()
    changed = list(
        run(
            found,
            texts(rng, 80_000),
            lambda: Costs(200_000 * rng.uniform(0.8, 1.25), 1_000 * rng.uniform(0.8, 1.25)),
            lambda _: rng.randrange(4, 13),
        )
    )
    assert found.chosen
    assert len(changed) <= 3
    assert all(number < 50_000 for number in changed)


def test_however_much_changes_they_are_not_changed_all_the_time():
    found = Sizes()
    rng = random.Random(0)
    lengths = [length for number in range(400) for length in texts(rng, 1000, mean=2 + 2 * (number % 2))]
    assert len(list(run(found, lengths, lambda: COSTS))) < 40


def test_they_follow_when_other_lengths_come():
    found = Sizes()
    list(run(found, [36, 40] * 4000, lambda: COSTS))
    assert found.rounded(40) == 40
    # Longer ones are not waited for: they are like nothing that came.
    [changed] = run(found, [130, 136] * STRANGE, lambda: COSTS)
    assert changed < STRANGE
    assert found.rounded(130) == found.rounded(136) == 136
    list(run(found, [100] * 40_000, lambda: COSTS))
    assert found.rounded(100) == 100


@pytest.mark.parametrize("seed", range(10))
def test_the_same_requests_make_the_same_choice_in_any_order(seed):
    rng = random.Random(seed)
    lengths = [rng.randint(1, 3000) for _ in range(LOOK_FIRST + 100 * seed)]
    first, again, shuffled = Sizes(), Sizes(), Sizes()
    come(first, lengths)
    come(again, lengths)
    come(shuffled, rng.sample(lengths, len(lengths)))
    for found in (first, again, shuffled):
        at_once(found.look(COSTS))
    assert first.chosen == again.chosen == shuffled.chosen
    assert first.reason == again.reason


def test_what_is_remembered_is_bounded():
    found = Sizes()
    rng = random.Random(0)
    for number in range(5 * WINDOW):
        found.answered([(int(10 ** rng.uniform(0, 9)), 1)])
        assert found._requests < 2 * WINDOW
        if number % 4096 == 4095:
            assert len(module._bins(found._seen)) < 2 * BINS_MAX
            at_once(found.look(COSTS))
            assert len(found.chosen) <= SIZES_MAX
    assert len(found._seen) < 600
    assert len(found._step_of) <= module.KNOWN_MAX


def test_nothing_is_chosen_before_anything_is_known():
    found = Sizes()
    assert not at_once(found.look(COSTS))
    come(found, [5] * LOOK_FIRST)
    assert found.is_due
    assert not at_once(found.look(None))
    assert not found.is_due
    assert found.chosen == ()
    assert found.reason.startswith("powers of two")
