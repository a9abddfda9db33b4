"""Run work in a thread that would block the event loop for too long: decoding and encoding large messages."""

import asyncio
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Final, TypeVar

from asynctrt._util import clock
from asynctrt.errors import EngineClosedError
from asynctrt.serving.memory import Hold

PAUSE_S: Final = 0.0001
"""How long the thread sleeps after each piece of work.

It holds the GIL while it works. If it did not release it, the event loop would wait for a switch interval
each time after releasing the GIL itself: 5 ms, or 0.5 ms in ``asynctrt serve``.
"""

THREADS: Final = 2
"""Threads of a worker: two, so that one client's large messages do not hold up another's. More would only
wait for each other, and the event loop for all of them, since only one at a time has the GIL."""

T = TypeVar("T")


def pause() -> None:
    """Let the event loop run between two pieces of work."""
    clock.sleep_s(PAUSE_S)


def holding(work: Callable[[], T], *_: Hold | None) -> T:
    """Run ``work`` while holding its memory: if its client disconnects, nothing else may get that memory
    yet."""
    return work()


class ClientThreads:
    """A few threads that work for clients in turn, on at most one piece of work for each client.

    Its callers bound the number of waiting pieces: one message per connection. Work that is cancelled while
    it waits never begins.

    :param name: the name of the threads.
    """

    def __init__(self, name: str = "asynctrt-decode") -> None:
        self._name = name
        self._executor: ThreadPoolExecutor | None = None
        self._is_closed = False
        self._served: set[Hashable] = set()
        """Clients that a thread is working for."""
        self._waiting: dict[Hashable, deque[asyncio.Future[None]]] = {}

    def __repr__(self) -> str:
        return f"<Worker {self._name} serves={len(self._served)} waiting={len(self._waiting)}>"

    async def run(
        self, work: Callable[[], T], client: Hashable, hold: Hold | None = None, nbytes: int = 0
    ) -> T:
        """Run ``work`` in a thread and return its result. It calls :func:`pause` between pieces.

        If this call is cancelled, it ends at once. Work that a thread has begun then runs to no effect.

        :param client: the client that the work is for.
        :param hold: the memory of the work's input, held until the thread has released it.
        :param nbytes: further bytes that the work takes while it runs. They are counted before it begins,
            without waiting for room, since there is at most one such piece per thread.
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
                    self._ended(client)  # Its turn had already come.
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
        with suppress(RuntimeError):  # The loop is closed, and nothing waits.
            loop.call_soon_threadsafe(self._ended, client)

    def _ended(self, client: Hashable) -> None:
        """Start work for the clients that have waited longest."""
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
                self._waiting[one] = queue  # Behind the other clients.

    def close(self) -> None:
        """Accept no more work. The threads end after their current work. Idempotent."""
        self._is_closed = True
        waiting, self._waiting = self._waiting, {}
        for queue in waiting.values():
            for turn in queue:
                if not turn.done():
                    turn.set_result(None)
        if self._executor is not None:
            self._executor.shutdown(wait=False, cancel_futures=True)
            self._executor = None
