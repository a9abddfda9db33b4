"""The policy for spares that die: how soon to start another, and when to stop."""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from asynctrt._util import clock

SPARES_MAX: Final = 6
"""The maximum number of spares of one worker that die in a row: then they have no room, or cannot run."""

PAUSE_S: Final = 0.1
"""The pause after the first death; it doubles with each further one."""

LIVED_NS: Final = 10_000_000_000
"""A spare that was ready for this long worked: its end says nothing about the next one."""

logger = logging.getLogger("asynctrt")


class Spares:
    """The successive spares of a worker, until one takes its place.

    :param start: starts a spare, if one is still wanted.
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
        """Whether no further spare will be started."""
        return self._deaths >= SPARES_MAX

    @property
    def is_due(self) -> bool:
        """Whether a spare will be started after a pause."""
        return self._due is not None

    def died(self, ready_ns: int | None, how: str) -> None:
        """Replace a spare that died, after a pause, unless too many have died.

        :param ready_ns: when it became ready; ``None`` if it never did.
        """
        if ready_ns is not None and clock.now_ns() - ready_ns >= LIVED_NS:
            self._deaths = 0
        self._deaths += 1
        if self.is_given_up:
            logger.error(
                "the spare worker on %s %s, as did the %d before it. No further one is started while the "
                "worker itself lives: there may be no memory for a second one (isolation='spare')",
                self._device,
                how,
                self._deaths - 1,
            )
            return
        logger.warning("the spare worker on %s %s; another one takes its place", self._device, how)
        self._due = self._loop.call_later(PAUSE_S * 2 ** (self._deaths - 1), self._start_now)

    def cancel(self) -> None:
        """Cancel a pending start. Idempotent."""
        if self._due is not None:
            self._due.cancel()
            self._due = None

    def _start_now(self) -> None:
        self._due = None
        self._start()
