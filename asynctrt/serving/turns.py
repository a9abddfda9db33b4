"""Share the event loop's time among clients: each has one turn per round, however many connections it has.

A round is one iteration of the loop, or several in which little is done. A client's input is handled at once
while it has time left in the round. The rest waits for the next round, in which the client's connections
continue one after the other. Between two rounds the loop checks all sockets, so no client waits longer than
one turn of each of the others.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from asynctrt._util import clock
from asynctrt.serving.memory import ClientAccount

TURN_NS: Final = 500_000
"""A client's turn while there are others."""

LONE_TURN_NS: Final = 5_000_000
"""A client's turn while it is alone: short turns would split input that could share a batch."""

ACTIVE_MAX: Final = 64
"""Clients with little of their turns used before a new round renews their turns."""

SHARED_NS: Final = 1_000_000_000
"""How long turns are short after two clients were served within this time."""

logger = logging.getLogger("asynctrt.serving")


class Turns:
    """Rounds of turns on one event loop."""

    def __init__(self) -> None:
        self.turn_ns = LONE_TURN_NS
        self._shared_until_ns = 0
        self._latest: ClientAccount | None = None
        self._latest_ns = -SHARED_NS
        self._active: list[ClientAccount] = []
        """Clients that have used some of their turn in this round."""
        self._waiting: dict[ClientAccount, None] = {}
        self._going_on: ClientAccount | None = None
        """The account whose turn to continue it is."""
        self._is_due = False

    def __repr__(self) -> str:
        return f"<Turns active={len(self._active)} waiting={len(self._waiting)}>"

    def left_ns(self, account: ClientAccount) -> int:
        """Return the rest of a client's turn in this round; 0 while others of the client's callbacks wait."""
        if account.waiting and account is not self._going_on:
            return 0
        return max(0, self.turn_ns - account.spent_ns)

    def spend(self, account: ClientAccount, began_ns: int, now_ns: int) -> None:
        """Count the time from ``began_ns`` until now, spent on a client."""
        self.charge(account, max(1, now_ns - began_ns))
        if account is not self._latest:
            if now_ns - self._latest_ns < SHARED_NS:
                self._shared_until_ns = now_ns + SHARED_NS
                self.turn_ns = TURN_NS
            self._latest = account
        self._latest_ns = now_ns

    def charge(self, account: ClientAccount, cost_ns: int) -> None:
        """Count about ``cost_ns`` that a client is going to take."""
        if not account.spent_ns:
            self._active.append(account)
        account.spent_ns += cost_ns
        # Not each time: a round costs a loop iteration, which would otherwise wait for sockets.
        is_due = account.spent_ns > self.turn_ns // 2 or len(self._active) > ACTIVE_MAX
        if is_due and not self._is_due:
            self._begin_round()

    def wait(self, account: ClientAccount, go_on: Callable[[], None]) -> None:
        """Call ``go_on`` in a client's next turn, after the client's other waiting callbacks."""
        account.waiting.append(go_on)
        self._waiting[account] = None
        if not self._is_due:
            self._begin_round()

    async def enter(self, account: ClientAccount, cost_ns: int) -> None:
        """Wait for a client's turn, and count about ``cost_ns`` for the work that follows."""
        if not self.left_ns(account):
            future: asyncio.Future[None] = asyncio.get_running_loop().create_future()

            def go_on() -> None:
                if not future.done():
                    self.charge(account, cost_ns)
                    future.set_result(None)

            self.wait(account, go_on)
            await future
        else:
            now_ns = clock.now_ns()
            self.spend(account, now_ns - cost_ns, now_ns)

    def _begin_round(self) -> None:
        self._is_due = True
        asyncio.get_running_loop().call_soon(self._round)

    def _round(self) -> None:
        """Begin a new round: let waiting callbacks run, for one turn of each client."""
        self._is_due = False
        for account in self._active:
            account.spent_ns = 0
        self._active = []
        if self.turn_ns != LONE_TURN_NS and self._latest_ns > self._shared_until_ns:
            self.turn_ns = LONE_TURN_NS
        for account in list(self._waiting):
            waiting, self._going_on = account.waiting, account
            while waiting and account.spent_ns < self.turn_ns:
                go_on = waiting.popleft()
                try:
                    go_on()
                except Exception:
                    logger.exception("failed to go on with a connection")
            if not waiting:
                del self._waiting[account]
        self._going_on = None
        if self._waiting and not self._is_due:
            self._begin_round()
