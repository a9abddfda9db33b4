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
        self.next: float | None = start
        """The rate to try next; ``None`` when the search is over."""
        self._precision = precision
        self._tries = 0
        self._why = "the search is not over"
        self._confirming = False

    def __repr__(self) -> str:
        return f"<Search holds={self.holds} fails={self.fails} next={self.next}>"

    def tell(self, *, holds: bool, void: bool = False) -> None:
        """Record the result of the rate that was tried; ``void`` if the generator could not keep it up."""
        assert self.next is not None
        rate, self.next = self.next, None
        self._tries += 1
        if void:
            self.end(
                f"the generator could not keep up {rate:,.4g} requests/s, so nothing is known above that"
            )
        elif self._confirming and holds:
            self.end(f"the rates that hold and fail are less than {self._precision:.0%} apart")
        elif holds:
            self.holds = rate
            self._choose()
        else:
            self.fails = rate
            if self._confirming:  # A rate that held once and failed once does not hold.
                self.holds = None
            self._choose()

    def end(self, why: str) -> None:
        """End the search for the reason ``why``."""
        self.next = None
        self._why = why

    def result(self, slo: tuple[str, ...]) -> SearchResult:
        """Return the result so far."""
        return SearchResult(slo, self.holds, self.fails, self._why)

    def _choose(self) -> None:
        """Choose the next rate, or end the search."""
        was_confirming, self._confirming = self._confirming, False
        if self._tries >= TRIES_MAX:
            self.end(f"{TRIES_MAX} rates were tried")
        elif was_confirming:
            assert self.fails is not None
            self.next = _rounded(self.fails / (1 + self._precision) ** 2)
        elif self.holds is None:
            assert self.fails is not None
            if self.fails / 2 < RATE_LEAST:
                self.end(f"not even {self.fails:,.4g} requests/s hold it")
            else:
                self.next = self.fails / 2
        elif self.fails is None and self.holds * 2 > RATE_MAX:
            self.end(f"{RATE_MAX:,.0f} requests/s is the highest rate that can be tried")
        elif self.fails is None:
            self.next = self.holds * 2
        elif self.fails / self.holds > 1 + self._precision:
            self.next = _rounded((self.holds * self.fails) ** 0.5)
        else:
            self._confirming = True
            self.next = self.holds


def _rounded(rate: float) -> float:
    """Round a rate to five significant digits, which is finer than any precision."""
    return float(f"{rate:.5g}")
