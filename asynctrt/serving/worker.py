"""Do in a thread what would hold the event loop for too long: decode and encode large messages."""

import asyncio
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
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

THREADS: Final = 2
"""Threads of a worker, so that one client's large messages do not hold up another's. More would only wait for
each other, and the event loop for all of them: one at a time has Python's lock."""

T = TypeVar("T")


def pause() -> None:
    """Let the event loop run, between two pieces of work."""
    clock.sleep_s(PAUSE_S)


def holding(work: Callable[[], T], *_: Hold | None) -> T:
    """Work, and hold the memory for it: its client may have gone, and others would be given the same."""
    return work()


class Worker:
    """A few threads that work for clients in turn: for each of them one at a time.

    What waits is bounded by who gives the work: one message a connection. What nobody waits for any more is
    dropped before it begins.

    :param name: of the threads.
    """

    def __init__(self, name: str = "asynctrt-decode") -> None:
        self._name = name
        self._executor: ThreadPoolExecutor | None = None
        self._is_closed = False
        self._served: set[Hashable] = set()
        """Clients for whom a thread works."""
        self._waiting: dict[Hashable, deque[asyncio.Future[None]]] = {}

    def __repr__(self) -> str:
        return f"<Worker {self._name} serves={len(self._served)} waiting={len(self._waiting)}>"

    async def run(
        self, work: Callable[[], T], client: Hashable, hold: Hold | None = None, nbytes: int = 0
    ) -> T:
        """Return what ``work`` returns; it calls :func:`pause` between pieces.

        Whoever is cancelled meanwhile goes on at once. What a thread has begun then ends for nothing.

        :param client: for whom it is.
        :param hold: memory of what is worked on, which is held until the thread has let go of it.
        :param nbytes: what the work takes besides, for as long as it is done. It is counted before it begins,
            and not waited for: there is one of these for each thread at most.
        :raises EngineClosedError: after :meth:`close`.
        """
        loop = asyncio.get_running_loop()
        if not self._may_begin(client) and not self._is_closed:
            turn: asyncio.Future[None] = loop.create_future()
            self._waiting.setdefault(client, deque()).append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if turn.done() and not turn.cancelled():
                    self._ended(client)  # It was its turn already.
                raise
        if self._is_closed:
            raise EngineClosedError("this server is stopping: use another one")
        self._served.add(client)
        if self._executor is None:
            self._executor = ThreadPoolExecutor(THREADS, thread_name_prefix=self._name)
        more = Hold(hold.account, nbytes) if hold is not None and nbytes else None
        job = self._executor.submit(partial(holding, work, hold, more))
        del work, hold, more
        job.add_done_callback(partial(self._end_soon, loop, client))
        return await asyncio.wrap_future(job)

    def _may_begin(self, client: Hashable) -> bool:
        return len(self._served) < THREADS and client not in self._served

    def _end_soon(self, loop: asyncio.AbstractEventLoop, client: Hashable, _: object) -> None:
        with suppress(RuntimeError):  # The loop is closed, and nobody waits.
            loop.call_soon_threadsafe(self._ended, client)

    def _ended(self, client: Hashable) -> None:
        """Let work begin for the clients that have waited longest."""
        self._served.discard(client)
        for one in list(self._waiting):
            if not self._may_begin(one):
                continue
            queue = self._waiting.pop(one)
            while queue and one not in self._served:
                turn = queue.popleft()
                if not turn.done():
                    self._served.add(one)
                    turn.set_result(None)
            if queue:
                self._waiting[one] = queue  # Behind the others.

    def close(self) -> None:
        """Take no more work. The threads end after what they are doing. Idempotent."""
        self._is_closed = True
        waiting, self._waiting = self._waiting, {}
        for queue in waiting.values():
            for turn in queue:
                if not turn.done():
                    turn.set_result(None)
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
            self._executor = None
