"""Handle SIGTERM and SIGINT: the first one stops a server in good order, a further one at once."""

import asyncio
import logging
import signal
from collections.abc import Callable
from functools import partial
from typing import Final, Self

from asynctrt._util import clock

STOPS: Final = (signal.SIGTERM, signal.SIGINT)

SAME_NS: Final = 100_000_000
"""A signal that comes so soon after another counts as the same: a supervisor may send it to a process, then
to its group, as GNU timeout does. People do not type that fast."""

logger = logging.getLogger("asynctrt.serving")


class StopSignals:
    """Handle these signals while entered: the first calls ``stop``, each further one ``hurry``."""

    def __init__(self, stop: Callable[[], object], hurry: Callable[[], object]) -> None:
        self._loop = asyncio.get_running_loop()
        self._stop = stop
        self._hurry = hurry
        self._last_ns: int | None = None

    def __repr__(self) -> str:
        return f"<StopSignals {'none' if self._last_ns is None else 'heard'}>"

    def __enter__(self) -> Self:
        for number in STOPS:
            self._loop.add_signal_handler(number, partial(self._heard, number))
        return self

    def __exit__(self, *_: object) -> None:
        for number in STOPS:
            self._loop.remove_signal_handler(number)

    def _heard(self, number: int) -> None:
        now_ns, last_ns = clock.now_ns(), self._last_ns
        if last_ns is not None and now_ns - last_ns < SAME_NS:
            return
        self._last_ns = now_ns
        if last_ns is None:
            logger.info("%s: stopping", signal.Signals(number).name)
            self._stop()
        else:
            logger.info("%s again: stopping at once", signal.Signals(number).name)
            self._hurry()
