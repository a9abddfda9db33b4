"""Checks of settings and arguments: what passes comes out in one form, and all else is one typed error."""

import dataclasses
import math
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from sys import maxsize

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynctrt._util.validation import (
    FLAG,
    PATH,
    PORT,
    TEXTS,
    TIMEOUT_NS_MAX,
    WORDS,
    Check,
    as_float,
    as_int,
    check_names,
    choice,
    count,
    docs_of,
    duration,
    number,
    priority_of,
    setting,
    timeout_ns_of,
    validate,
)
from asynctrt.errors import SHOWN_MAX, InputError, OptionsError, show

NAN, INF = float("nan"), float("inf")


class Hostile:
    """Whatever it is asked, it raises."""

    def _raise(self, *_):
        raise RuntimeError("on purpose")

    __index__ = __float__ = __repr__ = __str__ = __eq__ = __lt__ = __ge__ = __bool__ = __iter__ = _raise
    __fspath__ = __hash__ = _raise


@dataclass(frozen=True, slots=True, kw_only=True)
class Some:
    """Settings."""

    size: int | None = setting(default=None, check=count(1).or_none, doc="A size.")
    where: Path = setting(
        default=Path("a"),
        check=PATH,
        doc="""A file: ``-`` is
        standard output.""",
    )
    free: object = setting(default=3, doc="Anything.")
    token: str = setting(default="s3cret", is_secret=True, doc="A secret.")

    def __post_init__(self):
        validate(self)


def test_settings_are_checked_and_converted():
    some = Some(size=np.int64(3), where="b", free=NAN)
    assert (some.size, some.where) == (3, Path("b"))
    assert type(some.size) is int
    assert dataclasses.replace(some, size=None).size is None
    with pytest.raises(OptionsError, match=r"^size must be a whole number ≥ 1, not 'x'$"):
        Some(size="x")
    with pytest.raises(OptionsError, match="^where must be a path, not None$"):
        Some(where=None)


def test_settings_have_their_documentation_and_keep_their_secrets():
    assert docs_of(Some)["where"] == "A file: '-' is standard output."
    assert list(docs_of(Some)) == ["size", "where", "free", "token"]
    assert "s3cret" not in repr(Some())


PASS = [
    (count(1), 1, 1),
    (count(0, 5), np.uint8(5), 5),
    (PORT, 65535, 65535),
    (number(), Fraction(1, 2), 0.5),
    (number(), Decimal("0.5"), 0.5),
    (number(), np.float32(0.5), 0.5),
    (number(), 10**400, INF),
    (duration(0, 1), 1, 1.0),
    (duration(), INF, INF),
    (duration(0, 1), "2ms", 0.002),
    (duration(), "1m30.5s", 90.5),
    (duration().or_none, "1h", 3600.0),
    (duration(), "250us", 0.00025),
    (choice("a", "b"), "b", "b"),
    (FLAG, False, False),
    (TEXTS, "one", ("one",)),
    (TEXTS, ["one", "two"], ("one", "two")),
    (WORDS, ["one"], ("one",)),
    (count(1).or_none, None, None),
]
FAIL = [
    *[(count(1), value) for value in (0, -1, 1.0, "1", True, None, [1], np.zeros(2, int), np.bool_(1), 1j)],
    *[(PORT, value) for value in (-1, 65536, "80", -(10**5000))],
    *[(number(0, 1, above=True), value) for value in (0, -0.0, 1.5, NAN, INF, -INF, "0.5", None, True, 1j)],
    *[
        (duration(0, 1), value)
        for value in ("2s", "0.5", "", "2 ms", "-1ms", "ms", "1d", "1ms ", "1ms\n", b"1ms")
    ],
    *[(number(), value) for value in (Decimal("nan"), Decimal("sNaN"), -(10**400), np.array([1.0]))],
    *[(choice("a", "b"), value) for value in ("c", "", None, 1, ["a"], np.array(["a", "b"]))],
    *[(FLAG, value) for value in (0, 1, None, "True", np.True_)],
    *[(TEXTS, value) for value in (None, 5, [5], b"one")],
    *[(WORDS, value) for value in ("one", [""], ["two words"], ["t\u00f6ken"], ["a\n"], [None], None)],
    *[(PATH, value) for value in (None, 5, b"a", [])],
]


@pytest.mark.parametrize(("check", "value", "kept"), PASS)
def test_values_that_pass(check, value, kept):
    assert check("x", value) == kept
    assert type(check("x", value)) is type(kept)


def name_of(value):
    """Name a check by what it expects, since the names of tests must not have addresses in them."""
    return value.expected if isinstance(value, Check) else show(value)


@pytest.mark.parametrize(("check", "value"), FAIL, ids=name_of)
def test_values_that_are_refused(check, value):
    for one in (check, check.or_none) if value is not None else (check,):
        with pytest.raises(OptionsError, match=r"^x must be .*, not "):
            one("x", value)


def test_what_a_check_expects_reads_as_a_sentence():
    assert count(1).expected == "a whole number ≥ 1"
    assert count(0, 9).or_none.expected == "a whole number from 0 to 9"
    assert number().expected == "a number ≥ 0"
    assert number(0, 1, above=True).expected == "a number > 0 and ≤ 1"
    assert duration(0, 1).expected == "a number of seconds ≥ 0 and ≤ 1"
    assert choice("a", "b", "c").expected == "'a', 'b' or 'c'"


def test_a_fix_stands_at_the_end_of_the_message():
    with pytest.raises(OptionsError, match="not 3. Divide by 1000$"):
        duration(0, 1, fix="Divide by 1000").or_none("x", 3)


@given(st.one_of(st.none(), st.integers(), st.floats(), st.text(), st.binary(), st.lists(st.integers())))
def test_any_value_passes_or_is_refused_with_an_options_error(value):
    for check in {id(check): check for check, _ in FAIL}.values():
        try:
            kept = check("x", value)
        except OptionsError:
            continue
        assert check("x", kept) == kept


def test_an_unknown_name_is_refused_with_the_nearest():
    check_names({"a": 1}, ["a", "b"], "option")
    with pytest.raises(OptionsError, match=r"^unknown option 'zzz'; valid options: size, where$"):
        check_names(["zzz"], ["size", "where"], "option")
    with pytest.raises(
        OptionsError,
        match=r"^unknown setting 'sise' in a.toml; did you mean 'size'\? Valid settings in a.toml: size$",
    ):
        check_names(["sise"], ["size"], "setting in a.toml")
    with pytest.raises(OptionsError, match="did you mean 'size'"):
        check_names(["rows"], ["size"], "option", synonyms={"row": "size"})


@pytest.mark.parametrize("value", [5, "text", None, [1, 2], -1.5])
def test_a_short_value_is_shown_as_it_is(value):
    assert show(value) == repr(value)


@pytest.mark.parametrize("value", ["x" * 1000, 10**5000, Hostile(), list(range(1000))], ids=show)
def test_any_value_can_be_shown(value):
    assert len(show(value)) <= SHOWN_MAX + 1


@pytest.mark.parametrize(("given", "priority"), [(0, 0), (2, 2), (np.int64(1), 1), (np.array(2), 2)])
def test_priorities(given, priority):
    assert priority_of(given, 3) == priority
    assert type(priority_of(given, 3)) is int


@pytest.mark.parametrize(
    "given",
    [None, 0.0, 1.0, "", "1", [], 0j, True, False, np.True_, -1, 3, 10**5000, np.zeros(2, int), Hostile()],
    ids=show,
)
def test_any_other_priority_is_refused(given):
    with pytest.raises(InputError, match=r"^priority must be a whole number from 0 to 2, not "):
        priority_of(given, 3)


@pytest.mark.parametrize(
    ("given", "timeout_ns"),
    [
        (0, 0),
        (-0.0, 0),
        (1e-12, 0),
        (0.25, 250_000_000),
        (3, 3 * 10**9),
        (np.float32(0.5), 500_000_000),
        (np.int64(2), 2 * 10**9),
        (Decimal("0.5"), 500_000_000),
        (Fraction(1, 4), 250_000_000),
        (1e9, 10**18),
        *[(long, TIMEOUT_NS_MAX) for long in (1e10, 1e12, 1e18, 1e19, 1e30, 1e300, INF, maxsize, 10**400)],
    ],
)
def test_timeouts(given, timeout_ns):
    assert timeout_ns_of(given) == timeout_ns


REFUSED_TIMEOUTS = [-1, -1e-9, NAN, -INF, -(10**400), None, "1", True, False, 1j, [], Decimal("nan")]


@pytest.mark.parametrize("given", [*REFUSED_TIMEOUTS, np.array([1.0]), Hostile()], ids=show)
def test_any_other_timeout_is_refused(given):
    with pytest.raises(InputError, match="^timeout must be a number of seconds ≥ 0, not "):
        timeout_ns_of(given)


@given(st.floats(0, allow_nan=False))
def test_a_timeout_fits_into_every_timer(seconds):
    """A monotonic clock counts from boot: far less than the 146 years that are left of 63 bits."""
    timeout_ns = timeout_ns_of(seconds)
    assert 0 <= timeout_ns <= TIMEOUT_NS_MAX
    assert timeout_ns == TIMEOUT_NS_MAX or math.isclose(timeout_ns / 1e9, seconds, abs_tol=1e-9)


@pytest.mark.parametrize("given", [2**64, -(2**64), 10**5000], ids=["64", "-64", "unprintable"])
def test_what_does_not_fit_into_64_bits_counts_nothing(given):
    with pytest.raises(OptionsError, match="^rows must be a whole number ≥ 1, not "):
        count(1)("rows", given)


@given(st.integers(1 - 2**64, 2**64 - 1))
def test_whole_numbers_are_kept(value):
    assert as_int(value) == value
    assert as_float(value) == float(value)
