"""The highest rate that holds a target, by bisection. Pure: it says what to try, and is told what came."""

from typing import Final

from asynctrt.loadtest.arrivals import RATE_MAX
from asynctrt.loadtest.report import SearchResult

TRIES_MAX: Final = 40
RATE_LEAST: Final = 1e-2


class Search:
    """A search over the rate.

    It doubles or halves until one rate holds and one fails, and then tries the geometric middle of the two,
    until they are closer than the precision. What held is tried a last time: a rate that only held by luck
    does not stand.

    :param start: the first rate to try, in requests/s.
    :param precision: how far apart the two may be in the end, as a share.
    """

    def __init__(self, start: float, precision: float) -> None:
        self.holds: float | None = None
        self.fails: float | None = None
        self._next: float | None = start
        self._precision = precision
        self._tries = 0
        self._why = "it goes on"
        self._confirming = False

    def __repr__(self) -> str:
        return f"<Search holds={self.holds} fails={self.fails} next={self._next}>"

    def next_rate(self) -> float | None:
        """The rate to try next; ``None`` when it is over."""
        return self._next

    def tell(self, *, holds: bool, void: bool = False) -> None:
        """What came of the rate that was to be tried; ``void``: the generator could not keep it up."""
        assert self._next is not None
        rate, self._next = self._next, None
        self._tries += 1
        if void:
            self._give_up(
                f"the generator could not keep {rate:,.4g} requests/s up, so nothing above is known"
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
        """Stop here."""
        self._next = None
        self._why = why

    def result(self, slo: tuple[str, ...]) -> SearchResult:
        """What was found so far."""
        return SearchResult(slo, self.holds, self.fails, self._why)

    def _choose(self) -> None:
        if self._tries >= TRIES_MAX:
            self._give_up(f"it was tried {TRIES_MAX} times")
        elif self.holds is None:
            assert self.fails is not None
            if self.fails / 2 < RATE_LEAST:
                self.end(f"even {self.fails:,.4g} requests/s do not hold it")
            else:
                self._next = self.fails / 2
        elif self.fails is None and self.holds * 2 > RATE_MAX:
            self.end(f"{RATE_MAX:,.0f} requests/s are the most that can be asked for")
        elif self.fails is None:
            self._next = self.holds * 2
        elif self.fails / self.holds > 1 + self._precision:
            self._next = _rounded((self.holds * self.fails) ** 0.5)
        else:
            self._confirming = True
            self._next = self.holds

    def _confirmed(self, rate: float, *, holds: bool) -> None:
        if holds:
            self.end(f"between what holds and what fails is less than {self._precision:.0%}")
            return
        # What held once and failed once is not held.
        self.fails = rate
        self.holds = None
        self._confirming = False
        if self._tries >= TRIES_MAX:
            self._give_up(f"it was tried {TRIES_MAX} times")
        else:
            self._next = _rounded(rate / (1 + self._precision) ** 2)

    def _give_up(self, why: str) -> None:
        self._confirming = False
        self.end(why)


def _rounded(rate: float) -> float:
    """A rate that can be read: five digits are finer than any precision."""
    return float(f"{rate:.5g}")
