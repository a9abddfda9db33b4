"""Finds the highest rate that holds an slo, by bisection. Pure: the caller tries each rate."""

from typing import Final

from asynctrt.loadtest.arrivals import RATE_MAX
from asynctrt.loadtest.report import SearchResult

TRIES_MAX: Final = 40
RATE_LEAST: Final = 1e-2


class Search:
    """Search for the highest rate that holds.

    The rate is doubled or halved until one rate holds and one fails. Then the geometric mean of the two is
    tried until they differ by less than the precision. Finally the rate that held is tried again, because it
    may have held by chance.

    :param start: the first rate to try, in requests/s.
    :param precision: the largest final difference of the two rates, as a share.
    """

    def __init__(self, start: float, precision: float) -> None:
        self.holds: float | None = None
        self.fails: float | None = None
        self._next: float | None = start
        self._precision = precision
        self._tries = 0
        self._why = "the search is not over"
        self._confirming = False

    def __repr__(self) -> str:
        return f"<Search holds={self.holds} fails={self.fails} next={self._next}>"

    def next_rate(self) -> float | None:
        """Return the rate to try next; ``None`` when the search is over."""
        return self._next

    def tell(self, *, holds: bool, void: bool = False) -> None:
        """Record the result of the rate that was tried; ``void`` if the generator could not keep it up."""
        assert self._next is not None
        rate, self._next = self._next, None
        self._tries += 1
        if void:
            self._give_up(
                f"the generator could not keep up {rate:,.4g} requests/s, so nothing is known above that"
            )
            return
        if self._confirming:
            self._confirmed(rate, holds=holds)
            return
        if holds:
            self.holds = rate
        else:
            self.fails = rate
        self._choose()

    def end(self, why: str) -> None:
        """End the search for the reason ``why``."""
        self._next = None
        self._why = why

    def result(self, slo: tuple[str, ...]) -> SearchResult:
        """Return the result so far."""
        return SearchResult(slo, self.holds, self.fails, self._why)

    def _choose(self) -> None:
        if self._tries >= TRIES_MAX:
            self._give_up(f"{TRIES_MAX} rates were tried")
        elif self.holds is None:
            assert self.fails is not None
            if self.fails / 2 < RATE_LEAST:
                self.end(f"not even {self.fails:,.4g} requests/s hold it")
            else:
                self._next = self.fails / 2
        elif self.fails is None and self.holds * 2 > RATE_MAX:
            self.end(f"{RATE_MAX:,.0f} requests/s is the highest rate that can be tried")
        elif self.fails is None:
            self._next = self.holds * 2
        elif self.fails / self.holds > 1 + self._precision:
            self._next = _rounded((self.holds * self.fails) ** 0.5)
        else:
            self._confirming = True
            self._next = self.holds

    def _confirmed(self, rate: float, *, holds: bool) -> None:
        if holds:
            self.end(f"the rates that hold and fail are less than {self._precision:.0%} apart")
            return
        # A rate that held once and failed once does not hold.
        self.fails = rate
        self.holds = None
        self._confirming = False
        if self._tries >= TRIES_MAX:
            self._give_up(f"{TRIES_MAX} rates were tried")
        else:
            self._next = _rounded(rate / (1 + self._precision) ** 2)

    def _give_up(self, why: str) -> None:
        self._confirming = False
        self.end(why)


def _rounded(rate: float) -> float:
    """Round a rate to five significant digits, which is finer than any precision."""
    return float(f"{rate:.5g}")
