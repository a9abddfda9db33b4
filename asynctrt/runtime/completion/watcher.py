"""The watched events: detecting which are done and which have hung."""

from collections.abc import Callable
from typing import Final

from asynctrt._util.clock import NEVER_NS
from asynctrt.devices.base import Completion

CHECKS: Final = 16
"""The number of checks within the time after which an event counts as hung."""

CHECK_NS_MIN: Final = 1_000_000
CHECK_NS_MAX: Final = 250_000_000
"""Bounds of the pause between two such checks."""

GIVEN_UP_NS: Final = 100_000_000
"""The pause between two looks at hung events, which may still end."""


class Watch:
    """One event, with the callbacks for when it is done or has hung."""

    __slots__ = (
        "_check_pause_ns",
        "_checked_ns",
        "_hung_after_ns",
        "_ran_ns",
        "_was_running",
        "calls",
        "check_ns",
        "event",
        "expected_ns",
        "late_ns",
        "look_ns",
        "on_done",
        "on_hung",
        "order_group",
        "start_ns",
    )

    def __init__(
        self,
        event: Completion,
        on_done: Callable[[], object],
        *,
        start_ns: int,
        expected_ns: int,
        hung_after_ns: int | None,
        on_hung: Callable[[], object] | None,
        order_group: int | None,
    ) -> None:
        self.event = event
        self.on_done = on_done
        self.on_hung = on_hung
        self.order_group = order_group
        self.start_ns = start_ns
        self.expected_ns = expected_ns
        self.calls = False
        """Whether the device will call when the event is done."""
        self.look_ns = start_ns
        """The time of the next query or, if ``calls``, of the guard's next look."""
        self.late_ns = NEVER_NS
        """The time from which on to query with pauses."""
        self.check_ns = NEVER_NS
        """The time of the next check whether it hangs."""
        if hung_after_ns is not None:
            self._hung_after_ns = hung_after_ns
            self._check_pause_ns = min(max(hung_after_ns // CHECKS, CHECK_NS_MIN), CHECK_NS_MAX)
            self._checked_ns = start_ns
            self._ran_ns = 0
            self._was_running = False
            self.check_ns = start_ns + self._check_pause_ns

    def is_hung(self, now_ns: int, *, is_first: bool) -> bool:
        """Check whether its work has run for too long.

        Only the time in which the work itself ran counts, not the time in which it waited for its turn, or in
        which there were no checks because the loop was blocked or the process was stopped.

        :param is_first: whether no earlier event of its order group is pending.
        """
        is_running = is_first and self.event.is_running()
        if is_running and self._was_running:
            self._ran_ns += min(now_ns - self._checked_ns, 2 * self._check_pause_ns)
        self._was_running = is_running
        self._checked_ns = now_ns
        self.check_ns = now_ns + self._check_pause_ns
        return self._ran_ns >= self._hung_after_ns


def look_ns(watch: Watch) -> int:
    """Return the time of the next look at an event."""
    return watch.look_ns


class Watcher:
    """The watched events, in the order in which they were launched."""

    def __init__(self) -> None:
        self.watches: list[Watch] = []
        self._given_up: list[Watch] = []
        self._given_up_ns = NEVER_NS

    @property
    def is_empty(self) -> bool:
        """Whether no events are watched, including hung ones."""
        return not self.watches and not self._given_up

    def look(self, now_ns: int, *, at_all: bool) -> tuple[list[Watch], list[Watch]]:
        """Query the events that may be done, and return the watches of done events and of hung events.

        Query events whose look is due; if the event that is expected next is done, query all. In an order
        group, query only the first pending event. If an event hangs, the later events of its group count as
        hung too, as they cannot end before it.

        :param at_all: query all events, including hung ones, which are otherwise queried rarely.
        """
        may_all, next_one = at_all, None
        if not may_all and self.watches:
            next_one = min(self.watches, key=look_ns)
            may_all = next_one.event.query()
        done: list[Watch] = []
        hung: list[Watch] = []
        pending: list[Watch] = []
        pending_groups = set()
        hung_groups = set()
        for watch in self.watches:
            group = watch.order_group
            is_first = group not in pending_groups
            may_be = may_all or (now_ns >= watch.look_ns and watch is not next_one)
            if is_first and may_be and watch.event.query():
                done.append(watch)
            elif group in hung_groups or (
                now_ns >= watch.check_ns and watch.is_hung(now_ns, is_first=is_first)
            ):
                hung.append(watch)
                if group is not None:
                    hung_groups.add(group)
            else:
                pending.append(watch)
                if group is not None:
                    pending_groups.add(group)
        self.watches = pending
        if self._given_up and (at_all or now_ns >= self._given_up_ns):
            self._look_at_given_up(now_ns, done)
        if hung:
            self._given_up += hung
            self._given_up_ns = now_ns + GIVEN_UP_NS
        return done, hung

    def next_ns(self) -> int:
        """Return the latest time for the next look, regardless of expected ends."""
        next_ns = self._given_up_ns
        for watch in self.watches:
            if watch.check_ns < next_ns:  # Takes a third of the time of min().
                next_ns = watch.check_ns
        return next_ns

    def clear(self) -> None:
        """Forget every event."""
        self.watches.clear()
        self._given_up.clear()
        self._given_up_ns = NEVER_NS

    def _look_at_given_up(self, now_ns: int, done: list[Watch]) -> None:
        pending: list[Watch] = []
        for watch in self._given_up:
            (done if watch.event.query() else pending).append(watch)
        self._given_up = pending
        self._given_up_ns = now_ns + GIVEN_UP_NS if pending else NEVER_NS
