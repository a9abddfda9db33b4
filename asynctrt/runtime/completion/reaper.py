"""The reaper: the loop's side of watching events."""

import asyncio
from collections import deque
from collections.abc import Callable
from contextvars import Context

from asynctrt._util.alarm import Alarm
from asynctrt.devices.base import Completion
from asynctrt.runtime.completion.callbacks import Guard
from asynctrt.runtime.completion.polling import Poller
from asynctrt.runtime.completion.watcher import Watch, Watcher, look_ns


class Reaper:
    """Watches events for one loop and calls back, on the loop, when they are done.

    :param context: the context to run callbacks in. Default: the context of the code that causes a look,
        which may be any caller of the engine.
    :param on_interrupt: called with an error that is not an :class:`Exception`, such as Ctrl-C, if it occurs
        during a look or a callback, before it propagates: a callback may have been lost.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        now_ns: Callable[[], int],
        *,
        context: Context | None = None,
        on_interrupt: Callable[[BaseException], object] | None = None,
    ) -> None:
        self._loop = loop
        self._on_interrupt = on_interrupt
        self._now_ns = now_ns
        self._context = context
        self._watcher = Watcher()
        self._guard = Guard(now_ns)
        self._poller = Poller()
        # Callbacks that are due: non-empty only while they run, and after one of them was interrupted.
        self._callbacks: deque[Callable[[], object]] = deque()
        self._tick_is_scheduled = False
        self._woken = False
        self._alarm = Alarm(loop, self._ring, context=context)

    def __repr__(self) -> str:
        return f"<Reaper watching={len(self._watcher.watches)}>"

    def watch(
        self,
        event: Completion,
        on_done: Callable[[], object],
        *,
        expected_ns: int | None,
        hung_after_ns: int | None = None,
        on_hung: Callable[[], object] | None = None,
        order_group: int | None = None,
    ) -> None:
        """Call ``on_done`` once ``event`` is done.

        An exception of ``on_done`` or ``on_hung`` goes to the loop's exception handler, and affects no other
        event.

        :param expected_ns: the expected time, if known.
        :param hung_after_ns: call ``on_hung`` and treat the event as hung after its work has run for this
            long. Time in which it waits for its turn or the loop is blocked does not count. If the event ends
            later, ``on_done`` is called then.
        :param order_group: events of one group end in the order in which they are watched. So only the first
            one is queried, and if one hangs, those after it count as hung too.
        """
        now_ns = self._now_ns()
        watch = Watch(
            event,
            on_done,
            start_ns=now_ns,
            expected_ns=expected_ns or 0,
            hung_after_ns=hung_after_ns,
            on_hung=on_hung,
            order_group=order_group,
        )
        watch.calls = event.on_done(self._wake)
        if watch.calls:
            self._guard.begin(watch)
        elif event.query():
            pass  # It is done already; the next tick finds it.
        else:
            self._poller.begin(watch)
        self._watcher.watches.append(watch)
        self._plan(now_ns)

    def close(self) -> None:
        """Forget every event and never call back again. Idempotent."""
        self._watcher.clear()
        self._callbacks.clear()
        self._alarm.close()
        self._on_interrupt = None

    def _wake(self) -> None:
        """Wake the loop, as an event is done. Called from any thread."""
        if not self._woken:
            self._woken = True
            try:  # noqa: SIM105  (a context manager costs as much as the call)
                self._loop.call_soon_threadsafe(self._look, context=self._context)
            except RuntimeError:
                pass  # The loop was closed with work in flight, so there is no loop to wake.

    def _tick(self) -> None:
        self._tick_is_scheduled = False
        looks = self._poller.tick(self._now_ns())
        if looks > 1 and self._watcher.watches:
            query = min(self._watcher.watches, key=look_ns).event.query
            for _ in range(looks):
                if query():
                    break
        self._look()

    def _ring(self) -> None:
        """Handle the alarm: the guard is due, a batch may be done soon, or the rest of a sleep is left."""
        now_ns = self._now_ns()
        watches = self._watcher.watches
        is_due = now_ns >= self._watcher.next_ns() or any(watch.look_ns <= now_ns for watch in watches)
        self._guard.look(watches, now_ns)
        if is_due:
            self._look()
        else:
            self._plan(now_ns)

    def _look(self) -> None:
        """Find events that are done or hung, and call back."""
        was_woken, self._woken = self._woken, False
        now_ns = self._now_ns()
        try:
            done, hung = self._watcher.look(now_ns, at_all=was_woken)
            for watch in done:
                self._guard.end()
                self._callbacks.append(watch.on_done)
            for watch in hung:
                if watch.on_hung is not None:
                    self._callbacks.append(watch.on_hung)
            self._poller.postpone(self._watcher.watches, now_ns)
            self._call_back()
        except Exception:
            raise
        except BaseException as error:
            if self._on_interrupt is not None:
                self._on_interrupt(error)
            raise
        finally:
            self._plan(now_ns)

    def _call_back(self) -> None:
        while self._callbacks:
            callback = self._callbacks.popleft()
            try:
                callback()
            except Exception as error:
                self._loop.call_exception_handler(
                    {"message": f"{self!r}: a callback raised", "exception": error}
                )

    def _plan(self, now_ns: int) -> None:
        """Schedule the next tick if a look is due, else the alarm for the next look or the guard."""
        watcher = self._watcher
        if watcher.is_empty and not self._callbacks:
            return
        if self._callbacks or self._poller.is_due(watcher.watches, now_ns):
            if not self._tick_is_scheduled:
                self._loop.call_soon(self._tick, context=self._context)
                self._tick_is_scheduled = True
            return
        next_ns = watcher.next_ns()
        if watcher.watches:
            first = min(watcher.watches, key=look_ns)
            next_ns = min(next_ns, self._poller.sleep_until_ns(first, now_ns))
        self._alarm.set(next_ns)
