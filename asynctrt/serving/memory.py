"""Count the memory that a server holds for its clients: stop reading before it is too much, then refuse.

Small amounts are not counted: input that a connection may have without asking, and small requests, whose
number is limited. Everything else is a :class:`Hold`, which ends with the last reference to it, so that its
release cannot be forgotten.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Hashable
from contextlib import suppress
from threading import get_ident
from typing import Final, Protocol
from weakref import ReferenceType, WeakValueDictionary, ref

from asynctrt._util import clock
from asynctrt._util.cgroup import memory_nbytes
from asynctrt.kserve.codec import FAST_NBYTES
from asynctrt.serving.places import SHARE
from asynctrt.serving.settings import ServerSettings

UNCOUNTED_NBYTES: Final = 256 << 10
"""Bytes of a message, and of unsent answers, that a connection may have unasked. It is what uvloop
reads at once."""

SMALL_NBYTES: Final = FAST_NBYTES
"""Requests with at most this many bytes of inputs and outputs are limited by ``max_requests`` alone."""

WAIT_NS: Final = 5_000_000_000
"""How long a connection that needs memory to continue reading waits for it before it is refused."""

SHORT_NS: Final = 1_000_000_000
"""After a wait of this length, clients that send or read slowly have to make room. A message over gRPC is
slow if it takes longer itself."""

SHORT_AFTER_NS: Final = WAIT_NS
"""How long memory counts as short after a refusal."""

PACE_TICKS: Final = 4
"""Ticks over which a client's pace is measured."""

NBYTES_MAX: Final = 1 << 30
"""The smallest default limit, if there is enough memory."""

SHARE_OF_MEMORY: Final = 0.2
"""The largest share of the machine's, or the container's, memory for the default limit. Requests are in
memory several times: as received, in memory shared with a worker, and as answers."""


def default_limit(settings: ServerSettings) -> int:
    """Return the default limit on the bytes held for all clients."""
    # The largest body is one part of what clients share.
    wanted, total = max(NBYTES_MAX, SHARE * settings.max_body), memory_nbytes()
    if total is not None:
        wanted = min(wanted, int(total * SHARE_OF_MEMORY / settings.fronts))
    return max(settings.max_body, wanted)  # The largest request must fit.


class ClientPace:
    """Distinguishes a client that sends or takes bytes from a stalled one, while others wait for memory."""

    __slots__ = ("_nbytes", "_tick")

    def __init__(self, tick: int) -> None:
        self._tick = tick
        self._nbytes = 0

    def is_low(self, tick: int, nbytes: int, whole_nbytes: int, ticks_max: int) -> bool:
        """Return whether, at the recent pace, ``whole_nbytes`` would take longer than ``ticks_max``."""
        ticks = tick - self._tick
        if ticks < PACE_TICKS:
            return False
        is_low = (nbytes - self._nbytes) * ticks_max < whole_nbytes * ticks
        self._tick, self._nbytes = tick, nbytes
        return is_low


class Decided(Protocol):
    """The callback at the end of a wait for memory."""

    def __call__(self, *, is_granted: bool) -> None:
        """Continue: the memory is held now, or it never will be."""


class ClientAccount:
    """One client's account: bytes held for it, and its turn on the event loop."""

    __slots__ = ("__weakref__", "memory", "nbytes", "spent_ns", "waiting")

    def __init__(self, memory: "MemoryLimit") -> None:
        self.memory = memory
        self.nbytes = 0
        self.spent_ns = 0
        """Time used of its turn in this round: see :class:`~asynctrt.serving.turns.Turns`."""
        self.waiting: deque[Callable[[], None]] = deque()
        """Callbacks to continue with in its next turn."""

    def __repr__(self) -> str:
        return f"<Account nbytes={self.nbytes}>"

    def add(self, nbytes: int) -> None:
        """Count more bytes; fewer, if ``nbytes`` is negative."""
        self.nbytes += nbytes
        memory = self.memory
        memory.nbytes += nbytes
        if nbytes <= 0 and memory.waiting:
            memory.look_soon()


class Hold:
    """Bytes held for one purpose, until nothing refers to this object any more."""

    __slots__ = ("__weakref__", "_decided", "_since_ns", "_wanted_nbytes", "account", "nbytes")

    def __init__(self, account: ClientAccount, nbytes: int = 0) -> None:
        self.account = account
        self.nbytes = 0
        self._wanted_nbytes = 0
        self._since_ns = 0
        self._decided: Decided | None = None
        if nbytes:
            self.set(nbytes)

    def __repr__(self) -> str:
        return f"<Hold nbytes={self.nbytes}{' waiting' if self.is_waiting else ''}>"

    def __del__(self) -> None:
        if self.nbytes or self._decided is not None:  # Others may wait behind a hold that has nothing yet.
            self.account.memory.give_back(self.account, self.nbytes)

    @property
    def is_waiting(self) -> bool:
        """Whether it waits to grow."""
        return self._decided is not None

    def set(self, nbytes: int) -> None:
        """Hold ``nbytes`` from now on, whether or not there is room: they exist already.

        If it was waiting, the wait ends without a callback.
        """
        is_waiting, self._decided = self._decided is not None, None
        if nbytes != self.nbytes or is_waiting:
            self.account.add(nbytes - self.nbytes)
            self.nbytes = nbytes
            if is_waiting:
                self.account.memory.look_soon()  # Others may have waited behind it.

    def grow(self, nbytes: int, decided: Decided) -> bool:
        """Hold ``nbytes`` in total, if there is room now. Return whether there is.

        :param decided: called if not: with ``True`` as soon as they are held, or with ``False`` after
            :data:`WAIT_NS`.
        """
        memory = self.account.memory
        if not memory.waiting and memory.has_room(self.account, nbytes - self.nbytes):
            self.set(nbytes)
            return True
        self._wanted_nbytes, self._decided, self._since_ns = nbytes, decided, clock.now_ns()
        memory.wait(self)
        return False

    async def reserve(self, nbytes: int) -> bool:
        """Wait for room for ``nbytes`` in total, and hold them. Return whether there was room in time."""
        future: asyncio.Future[bool] = asyncio.get_running_loop().create_future()

        def decided(*, is_granted: bool) -> None:
            if not future.done():
                future.set_result(is_granted)

        return self.grow(nbytes, decided) or await future

    def waited_ns(self, now_ns: int) -> int:
        """Return how long it has waited to grow."""
        return now_ns - self._since_ns if self._decided is not None else 0

    def try_again(self) -> bool:
        """Grow to the wanted size, if there is room. Return whether there is."""
        if not self.account.memory.has_room(self.account, self._wanted_nbytes - self.nbytes):
            return False
        decided = self._decided
        self.set(self._wanted_nbytes)
        if decided is not None:
            decided(is_granted=True)
        return True

    def refuse(self) -> None:
        """End the wait: there was no room in time."""
        decided, self._decided = self._decided, None
        if decided is not None:
            decided(is_granted=False)


class MemoryLimit:
    """The limit on memory held for all clients together. It belongs to one event loop.

    A quarter of the limit is for clients that hold nothing yet: one that holds much cannot keep others out.

    :param nbytes_max: the limit in bytes. A message may exceed it while nothing else is held.
    """

    def __init__(self, nbytes_max: int) -> None:
        self.nbytes_max = nbytes_max
        self.nbytes = 0
        """Bytes held now."""
        self.refused = 0
        """Messages refused for lack of memory."""
        self.waiting: dict[ClientAccount, deque[ReferenceType[Hold]]] = {}
        """The holds that wait to grow, by account, in the order of the clients' turns."""
        self._accounts: WeakValueDictionary[Hashable, ClientAccount] = WeakValueDictionary()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = 0
        self._is_due = False
        self._timer: asyncio.TimerHandle | None = None
        self._short_until_ns = 0

    def __repr__(self) -> str:
        waiting = sum(map(len, self.waiting.values()))
        return f"<Memory {self.nbytes} of {self.nbytes_max} waiting={waiting}>"

    def account(self, client: Hashable) -> ClientAccount:
        """Return a client's account; for ``None``, a new one."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._thread = get_ident()
        if client is None:
            return ClientAccount(self)
        account = self._accounts.get(client)
        if account is None:
            account = self._accounts[client] = ClientAccount(self)
        return account

    def has_room(self, account: ClientAccount, nbytes: int) -> bool:
        """Return whether a client may hold ``nbytes`` more."""
        limit = self.nbytes_max - self.nbytes_max // SHARE * (account.nbytes > 0)
        return nbytes <= 0 or self.nbytes + nbytes <= limit or not self.nbytes

    def refuse(self) -> str:
        """Count a refusal, and return the reason."""
        self.refused += 1
        self._short_until_ns = clock.now_ns() + SHORT_AFTER_NS
        return (
            f"the server holds {self.nbytes} bytes for its clients, of at most {self.nbytes_max}: send less "
            "at once, or retry later"
        )

    def is_short(self, now_ns: int) -> bool:
        """Return whether clients that send or read slowly should make room for others."""
        if now_ns < self._short_until_ns:
            return True
        heads = [self._head(account) for account in list(self.waiting)]
        return any(hold is not None and hold.waited_ns(now_ns) > SHORT_NS for hold in heads)

    def wait(self, hold: Hold) -> None:
        """Queue a hold that is to grow when there is room."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(WAIT_NS / 1e9, self._expire)
        self.waiting.setdefault(hold.account, deque()).append(ref(hold))
        self.look_soon()  # It may overtake holds that only their own client's bytes block.

    def look_soon(self) -> None:
        """Schedule a check for room after the current callback, which may take the room itself."""
        if not self._is_due and self._loop is not None:
            self._is_due = True
            with suppress(RuntimeError):  # The loop is closed, and nothing waits.
                self._loop.call_soon(self._look)

    def give_back(self, account: ClientAccount, nbytes: int) -> None:
        """Count fewer bytes. Safe in any thread, because Python may collect garbage in any."""
        if self._loop is None or get_ident() == self._thread:
            account.add(-nbytes)
        else:
            with suppress(RuntimeError):  # The loop is closed, and the count is no longer used.
                self._loop.call_soon_threadsafe(account.add, -nbytes)

    def _head(self, account: ClientAccount) -> Hold | None:
        """Return a client's first waiting hold; ``None``, and forget the client, if none is left."""
        queue = self.waiting[account]
        while queue:
            hold = queue[0]()
            if hold is not None and hold.is_waiting:
                return hold
            queue.popleft()
        del self.waiting[account]
        return None

    def _look(self) -> None:
        """Let waiting holds grow, one of each client in turn, as far as there is room."""
        self._is_due = False
        is_changed = True
        while is_changed:
            is_changed = False
            for account in list(self.waiting):
                hold = self._head(account)
                if hold is None:
                    continue
                if hold.try_again():
                    is_changed = True
                    self.waiting[account] = self.waiting.pop(account)
                elif not account.nbytes:
                    return  # A hold blocked only by its own client's bytes does not block others.

    def _expire(self) -> None:
        """Refuse the holds that have waited too long."""
        self._timer = None
        now_ns = clock.now_ns()
        longest_ns = 0
        for account in list(self.waiting):
            while (hold := self._head(account)) is not None:
                if hold.waited_ns(now_ns) < WAIT_NS:
                    longest_ns = max(longest_ns, hold.waited_ns(now_ns))
                    break
                hold.refuse()
        if self.waiting:
            delay_s = (WAIT_NS - longest_ns) / 1e9
            self._timer = asyncio.get_running_loop().call_later(delay_s, self._expire)
