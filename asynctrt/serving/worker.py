"""Do in a thread what would hold the event loop for too long: decode and encode large messages."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Final, TypeVar

from asynctrt import clock
from asynctrt.errors import EngineClosedError
from asynctrt.serving.memory import Hold

PAUSE_S: Final = 0.0001
"""How long the thread sleeps after each piece of work.

It has Python's lock while it works. If it did not let go of it, the loop would wait for a switch interval
each time that it had let go of it itself: 5 ms, or 0.5 ms in ``asynctrt serve``.
"""

T = TypeVar("T")


def pause() -> None:
    """Let the event loop run, between two pieces of work."""
    clock.sleep_s(PAUSE_S)


def holding(work: Callable[[], T], _: Hold | None) -> T:
    """Work, and hold the memory for it: its client may have gone, and others would be given the same."""
    return work()


class Worker:
    """One thread, made when it is first needed. It gives way to the event loop after each piece of work.

    What is in its queue is bounded by who gives it work: one message a connection.
    """

    def __init__(self) -> None:
        self._executor: ThreadPoolExecutor | None = None
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<Worker {'idle' if self._executor is None else 'started'}>"

    async def run(self, work: Callable[[], T], hold: Hold | None = None) -> T:
        """Return what ``work`` returns; it calls :func:`pause` between pieces.

        Whoever is cancelled meanwhile goes on at once. ``work`` then ends in the thread, for nothing.

        :param hold: the memory of what is worked on, which is held until the thread has let go of it.
        :raises EngineClosedError: after :meth:`close`.
        """
        if self._is_closed:
            raise EngineClosedError("this server is stopping: use another one")
        if self._executor is None:
            self._executor = ThreadPoolExecutor(1, thread_name_prefix="asynctrt-decode")
        item = partial(holding, work, hold)
        del work, hold
        return await asyncio.get_running_loop().run_in_executor(self._executor, item)

    def close(self) -> None:
        """Take no more work. The thread ends after what it is doing. Idempotent."""
        self._is_closed = True
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
            self._executor = None
