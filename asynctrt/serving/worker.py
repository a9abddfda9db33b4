"""Run work in a thread that would block the event loop for too long: decoding and encoding large messages."""

import asyncio
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from functools import partial
from typing import Final, TypeVar
from weakref import WeakValueDictionary

from asynctrt._util import clock
from asynctrt.errors import EngineClosedError
from asynctrt.serving.memory import Hold
from asynctrt.serving.responses import STOPPING

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
    """

    def __init__(self) -> None:
        self._executor = ThreadPoolExecutor(THREADS, thread_name_prefix="asynctrt-decode")
        self._free = asyncio.Semaphore(THREADS)
        # By client: only one of its pieces waits for a thread, so that clients take turns.
        self._turns: WeakValueDictionary[Hashable, asyncio.Semaphore] = WeakValueDictionary()
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<ClientThreads clients={len(self._turns)}>"

    async def run(
        self, work: Callable[[], T], client: Hashable, hold: Hold | None = None, nbytes: int = 0
    ) -> T:
        """Run ``work`` in a thread and return its result. It calls :func:`pause` between pieces.

        If this call is cancelled, it ends at once. Work that a thread has begun then runs to no effect.

        :param client: the client that the work is for.
        :param hold: the memory of the work's input, held until the thread has released it.
        :param nbytes: further bytes that the work takes while it runs. They are counted before it begins,
            without waiting for room, since there is at most one such piece per thread.
        """
        loop = asyncio.get_running_loop()
        turn = self._turns.setdefault(client, asyncio.Semaphore(1))
        with ExitStack() as undo:
            await turn.acquire()
            undo.callback(turn.release)
            await self._free.acquire()
            undo.callback(self._free.release)
            if self._is_closed:
                raise EngineClosedError(STOPPING)
            more = Hold(hold.account, nbytes) if hold is not None and nbytes else None
            job = self._executor.submit(partial(holding, work, hold, more))
            # The turn and the thread are given back when the work has ended, whether anybody waits or not.
            job.add_done_callback(partial(_soon, loop, undo.pop_all().close))
        del work, hold, more
        try:
            return await asyncio.wrap_future(job)
        finally:
            del job  # It holds the error, whose traceback holds this frame and what was worked on.

    def close(self) -> None:
        """Accept no more work. The threads end after their current work. Idempotent."""
        self._is_closed = True
        self._executor.shutdown(wait=False, cancel_futures=True)


def _soon(loop: asyncio.AbstractEventLoop, call: Callable[[], object], _: object) -> None:
    with suppress(RuntimeError):  # The loop is closed, and nothing waits.
        loop.call_soon_threadsafe(call)
