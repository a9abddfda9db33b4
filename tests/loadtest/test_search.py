"""The search against targets that are known: what it finds, in how many tries, and how it ends."""

import math

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from asynctrt.loadtest.search import RATE_LEAST, TRIES_MAX, Search

SLO = ("p99<20ms",)


def carry_out(search, target):
    """Ask and tell until it ends; the rates that were tried."""
    tried = []
    while (rate := search.next) is not None:
        assert len(tried) < TRIES_MAX, f"{search} does not end"
        tried.append(rate)
        search.tell(**target(rate))
    return tried


def up_to(capacity):
    """A target that holds up to its capacity."""
    return lambda rate: {"holds": rate <= capacity}


def answers(*given_answers):
    """A target that answers so, one after the other."""
    said = iter(given_answers)
    return lambda rate: {"holds": next(said)}


@settings(deadline=None)
@given(st.floats(0.1, 1e6), st.floats(1, 1e5), st.floats(0.001, 0.5))
def test_it_finds_the_capacity(capacity, start, precision):
    """Within the precision, whatever it begins from; and what it says holds was tried last."""
    search = Search(start, precision)
    tried = carry_out(search, up_to(capacity))
    found = search.result(SLO)
    assert found.holds <= capacity < found.fails
    assert found.fails / found.holds <= (1 + precision) * (1 + 1e-9)
    assert tried[-1] == found.holds
    assert found.why.startswith("the rates that hold and fail are less than")
    assert found.slo == SLO
    # Doublings to the first pair, halvings of its logarithm, and one to confirm.
    pair = abs(math.log2(capacity / start)) + 2
    middles = max(0, math.log2(1 / math.log2(1 + precision))) + 1
    assert len(tried) <= pair + middles + 1


@settings(deadline=None)
@given(st.floats(0.1, 1e6), st.floats(1, 1e5))
def test_each_try_is_between_what_is_known(capacity, start):
    """Nothing is tried above what failed or below what held, but to confirm it."""
    search = Search(start, 0.02)
    while (rate := search.next) is not None:
        low, high = search.holds or 0.0, search.fails or math.inf
        assert low <= rate < high
        search.tell(holds=rate <= capacity)


@pytest.mark.parametrize(
    ("start", "capacity", "first"),
    [
        (100, 1e9, [100, 200, 400, 800]),  # Up as long as it holds;
        (100, 10, [100, 50, 25, 12.5, 6.25]),  # down as long as it does not;
        (100, 150, [100, 200, math.sqrt(20_000), (math.sqrt(20_000) * 200) ** 0.5]),  # then the middle.
    ],
)
def test_the_first_tries(start, capacity, first):
    tried = carry_out(Search(start, 0.01), up_to(capacity))
    assert tried[: len(first)] == pytest.approx(first, rel=1e-4)  # Middles have five digits.


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("noise", [0.005, 0.05])
def test_a_target_that_is_noisy_near_its_edge(seed, noise):
    """Its capacity is another each time: there is a result, and it is near."""
    rng = np.random.default_rng(seed)
    found = []
    for _ in range(40):
        search = Search(float(rng.uniform(10, 10_000)), 0.05)
        carry_out(search, lambda rate: {"holds": rate <= 1000 * math.exp(rng.normal(0, noise))})
        found.append(search.result(SLO))
    assert all(item.holds is not None and item.fails is not None for item in found)
    assert all(item.holds < item.fails for item in found)
    rates = np.array([item.holds for item in found])
    # To be this far off, one try out of some fifteen would have to be four deviations from the capacity.
    assert (np.abs(np.log(rates / 1000)) <= 4 * noise + math.log(1.05) * 2).all()


@settings(deadline=None)
@given(st.lists(st.booleans(), min_size=TRIES_MAX, max_size=TRIES_MAX), st.floats(0.001, 1))
def test_whatever_it_is_told_it_ends(told, precision):
    """And what it says is in order: what holds is below what fails, and has not failed since."""
    search = Search(100.0, precision)
    tried = carry_out(search, answers(*told))
    found = search.result(SLO)
    said = dict(zip(tried, told, strict=False))
    assert found.holds is None or said[found.holds] is True
    assert found.fails is None or said[found.fails] is False
    assert 0 < len(tried) <= TRIES_MAX
    assert all(rate > 0 for rate in tried)
    assert found.why != "the search is not over"
    if found.holds is not None and found.fails is not None:
        assert found.holds < found.fails


def test_nothing_holds():
    search = Search(100.0, 0.05)
    tried = carry_out(search, up_to(0))
    found = search.result(SLO)
    assert (found.holds, found.fails) == (None, tried[-1])
    assert found.why == f"not even {tried[-1]:,.4g} requests/s hold it"
    assert RATE_LEAST <= tried[-1] < 2 * RATE_LEAST
    assert len(tried) == math.floor(math.log2(100 / RATE_LEAST)) + 1


@pytest.mark.parametrize(
    ("start", "last"), [(2 * RATE_LEAST, RATE_LEAST), (1.9 * RATE_LEAST, 1.9 * RATE_LEAST), (1e-9, 1e-9)]
)
def test_the_lowest_rate_that_is_tried(start, last):
    """Half of one that failed is tried if it is not below the least."""
    assert carry_out(Search(start, 0.05), up_to(0))[-1] == pytest.approx(last)


def test_everything_holds():
    search = Search(1.0, 0.05)
    tried = carry_out(search, up_to(math.inf))
    found = search.result(SLO)
    assert tried == [2.0**number for number in range(27)]  # One more is more than a rate may be.
    assert (found.holds, found.fails) == (tried[-1], None)
    assert found.why == "100,000,000 requests/s is the highest rate that can be tried"


def test_too_exact_for_so_many_tries():
    search = Search(1.0, 1e-13)
    tried = carry_out(search, up_to(777))
    found = search.result(SLO)
    assert len(tried) == TRIES_MAX
    assert found.holds <= 777 < found.fails
    assert found.why == f"{TRIES_MAX} rates were tried"


@settings(deadline=None)
@given(st.integers(0, 12), st.floats(1, 1e4), st.booleans())
def test_void_ends_it(after, capacity, holds):
    """With what is known by then: the generator says nothing about a rate that it cannot keep up."""
    search = Search(100.0, 0.05)
    for _ in range(after):
        rate = search.next
        assume(rate is not None)
        search.tell(holds=rate <= capacity)
    before, rate = (search.holds, search.fails), search.next
    assume(rate is not None)
    search.tell(holds=holds, void=True)
    assert search.next is None
    found = search.result(SLO)
    assert (found.holds, found.fails) == before
    assert f"the generator could not keep up {rate:,.4g} requests/s" in found.why


def test_what_held_by_luck_does_not_stand():
    """It failed when it was tried again: what is found then is lower, and was confirmed itself."""
    # 100 holds, 200 fails, 141 holds, 168 fails, 154 fails: 141 and 154 are near enough, and 141 fails again.
    lucky = [True, False, True, False, False, False]
    search = Search(100.0, 0.1)
    tried = []
    for answer in lucky:
        tried.append(search.next)
        search.tell(holds=answer)
    assert tried[-1] == tried[2] == pytest.approx(141.4, rel=1e-3)
    assert search.fails == tried[-1]
    assert search.holds is None
    after = carry_out(search, up_to(130))
    found = search.result(SLO)
    assert after[0] == pytest.approx(141.4 / 1.1**2, rel=1e-3)
    assert found.holds <= 130 < found.fails
    assert found.fails <= tried[-1]
    assert after[-1] == found.holds
    assert "the rates that hold and fail are" in found.why


def test_one_that_never_holds_twice_is_never_confirmed():
    """It ends nevertheless, and says that nothing holds."""
    seen = set()

    def target(rate):
        is_first = rate not in seen
        seen.add(rate)
        return {"holds": is_first and rate <= 100}

    search = Search(80.0, 0.1)
    assert len(carry_out(search, target)) == TRIES_MAX
    assert search.result(SLO).why == f"{TRIES_MAX} rates were tried"


def test_the_end_from_outside():
    search = Search(100.0, 0.05)
    search.tell(holds=True)
    search.end("it was stopped")
    assert search.next is None
    found = search.result(SLO)
    assert (found.holds, found.fails, found.why) == (100, None, "it was stopped")
