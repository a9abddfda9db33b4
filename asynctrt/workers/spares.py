"""How soon a spare that died is replaced, and when no further one is started."""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from asynctrt import clock

SPARES_MAX: Final = 6
"""Spares of one worker that may die one after another. Then there is no room for them, or they do not run."""

PAUSE_S: Final = 0.1
"""The pause after the first one; it doubles with each further one."""

LIVED_NS: Final = 10_000_000_000
"""A spare that was ready for so long was a good one: what ended it says nothing of the next."""

logger = logging.getLogger("asynctrt")


class Spares:
    """The spares that a worker has, one after the other, until one takes its place.

    :param start: starts one, if one is still wanted.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, device: str, start: Callable[[], None]) -> None:
        self._loop = loop
        self._device = device
        self._start = start
        self._deaths = 0
        self._due: asyncio.TimerHandle | None = None

    def __repr__(self) -> str:
        return f"<Spares deaths={self._deaths}{' given up' * self.is_given_up}>"

    @property
    def is_given_up(self) -> bool:
        """Whether no further one is to be started."""
        return self._deaths >= SPARES_MAX

    @property
    def is_due(self) -> bool:
        """Whether one is to be started after a pause."""
        return self._due is not None

    def died(self, ready_ns: int | None, how: str) -> None:
        """Start another one in place of one that died, after a pause, if there is hope.

        :param ready_ns: when it was ready; ``None`` if it never was.
        """
        if ready_ns is not None and clock.now_ns() - ready_ns >= LIVED_NS:
            self._deaths = 0
        self._deaths += 1
        if self.is_given_up:
            logger.error(
                "the spare worker on %s %s, as did the %d before it. No further one is started while the "
                "worker itself lives: there may be no memory for a second one (warm_spare)",
                self._device,
                how,
                self._deaths - 1,
            )
            return
        logger.warning("the spare worker on %s %s; another one takes its place", self._device, how)
        self._due = self._loop.call_later(PAUSE_S * 2 ** (self._deaths - 1), self._start_now)

    def cancel(self) -> None:
        """Start none that is due. Idempotent."""
        if self._due is not None:
            self._due.cancel()
            self._due = None

    def _start_now(self) -> None:
        self._due = None
        self._start()
