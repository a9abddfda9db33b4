"""Pauses before processes that failed are started again; and the spare of a worker."""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

PAUSE_S: Final = 0.1
"""The pause after the second failure; it doubles with each further one."""

PAUSE_S_MAX: Final = 300.0
"""The maximum pause, so that what was mended is found within minutes."""

SOON_NS: Final = 2_000_000_000
"""A process that has run for longer did not fail as it started."""

logger = logging.getLogger("asynctrt")


def pause_s(failures: int) -> float:
    """Return the pause before the next start, after this many failures in a row: none after the first."""
    return min(PAUSE_S * 2.0 ** min(failures - 2, 32), PAUSE_S_MAX) if failures > 1 else 0.0


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
        return f"<Spares deaths={self._deaths}>"

    @property
    def is_due(self) -> bool:
        """Whether a spare will be started after a pause."""
        return self._due is not None

    def died(self, how: str) -> None:
        """Replace a spare that died, after a pause: there may be no memory for a second worker."""
        self._deaths += 1
        pause = pause_s(self._deaths)
        logger.warning(
            "the spare worker on %s %s; another one takes its place after %g s", self._device, how, pause
        )
        self._due = self._loop.call_later(pause, self._start_now)

    def cancel(self) -> None:
        """Cancel a pending start. Idempotent."""
        if self._due is not None:
            self._due.cancel()
            self._due = None

    def _start_now(self) -> None:
        self._due = None
        self._start()
