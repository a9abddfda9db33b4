"""Who holds which context and arena, what is in flight, and how much has been done so far."""

from collections.abc import Hashable
from dataclasses import dataclass, field

from asynctrt.errors import InternalError
from asynctrt.scheduling.request import Request


class Launch:
    """A decision: these requests, as one batch, on this context and in this arena."""

    __slots__ = ("arena", "bucket", "context", "launched_ns", "number", "requests", "rows", "rows_run")

    def __init__(
        self,
        number: int,
        bucket: Hashable,
        requests: list[Request],
        rows: int,
        context: int,
        arena: int | None,
        launched_ns: int,
    ) -> None:
        self.number = number
        self.bucket = bucket
        self.requests = requests
        self.rows = rows
        self.rows_run = rows
        """Rows that the device computes: more than ``rows`` where a batch is padded."""
        self.context = context
        self.arena = arena
        self.launched_ns = launched_ns

    def __repr__(self) -> str:
        return (
            f"<Launch {self.number} rows={self.rows} requests={len(self.requests)} "
            f"context={self.context} arena={self.arena}>"
        )


@dataclass(slots=True)
class BatchTotals:
    """What the batches of one size have cost so far, in ns."""

    count: int = 0
    copy_in_ns: int = 0
    compute_ns: int = 0
    copy_out_ns: int = 0


@dataclass(slots=True)
class Totals:
    """Counts since the engine was opened. ``engine.statistics()`` is the public, frozen view."""

    succeeded: int = 0
    failed: int = 0
    cancelled: int = 0
    expired: int = 0
    refused: int = 0
    rows: int = 0
    rows_padded: int = 0
    batches: int = 0
    batches_timed: int = 0
    busy_ns: int = 0
    arena_waits: int = 0
    arena_wait_ns: int = 0
    queue_ns: int = 0
    copy_in_ns: int = 0
    compute_ns: int = 0
    copy_out_ns: int = 0
    total_ns: int = 0
    by_size: dict[int, BatchTotals] = field(default_factory=dict)


class Ledger:
    """Contexts and arenas as numbers. The pool holds the objects that the numbers stand for.

    A context always works in the same arena (context modulo arenas), so what is bound or captured for one
    stays good. Batches go to the arena with the fewest.

    :param arena_users: batches in flight in each arena; ledgers of engines that share arenas share it.
    """

    def __init__(
        self,
        *,
        contexts: int,
        arenas: int,
        in_flight_max: int,
        arena_users: list[int] | None = None,
    ) -> None:
        self._contexts = contexts
        self._arenas = arenas
        # Free contexts by arena, the last one used on top; a single list if there is no arena.
        lanes = max(arenas, 1)
        self._free = [list(reversed(range(lane, contexts, lanes))) for lane in range(lanes)]
        self._free_count = contexts
        self._users = [0] * arenas if arena_users is None else arena_users
        self._kinds: dict[int, Hashable] = {}
        self._in_flight_max = in_flight_max
        self.in_flight: dict[int, Launch] = {}
        self.quarantined: set[int] = set()
        self.totals = Totals()
        self._number = 0

    def __repr__(self) -> str:
        return (
            f"<Ledger free={self._free_count} in_flight={len(self.in_flight)} "
            f"quarantined={len(self.quarantined)}>"
        )

    @property
    def can_launch(self) -> bool:
        """Whether a context is free and the limit on batches in flight allows one more."""
        return self._free_count > 0 and len(self.in_flight) < self._in_flight_max

    @property
    def usable_contexts(self) -> int:
        """Contexts that are free or will be free again."""
        return self._contexts - len(self.quarantined)

    def launch(
        self, bucket: Hashable, requests: list[Request], rows: int, now_ns: int, kind: Hashable = None
    ) -> Launch:
        """Take a context in the least used arena: the last one used, because it is warm.

        One that ran the same ``kind`` before comes first: to change a context's profile costs time.
        """
        arena = None
        free = self._free[0]
        if self._arenas:
            arena = self._arena_for(kind)
            self._users[arena] += 1
            free = self._free[arena]
        if kind is None:
            context = free.pop()
        else:
            context = self._of_kind(free, kind)
            free.remove(context)
        self._free_count -= 1
        self._number += 1
        launch = Launch(self._number, bucket, requests, rows, context, arena, now_ns)
        self.in_flight[launch.number] = launch
        return launch

    def release(self, launch: Launch) -> None:
        """The batch is over and its context may be used again."""
        self._end(launch)
        if not self.quarantined or launch.context not in self.quarantined:
            self._free[launch.arena or 0].append(launch.context)
            self._free_count += 1

    def quarantine(self, launch: Launch) -> None:
        """Nobody can know whether the batch still runs: its context is never used again.

        Nor is any other in its arena, since a batch there would wait for this one for ever.
        """
        self._end(launch)
        self.quarantined.add(launch.context)
        if launch.arena is not None:
            free = self._free[launch.arena]
            self._free_count -= len(free)
            free.clear()
            self.quarantined.update(range(launch.arena, self._contexts, self._arenas))

    def _end(self, launch: Launch) -> None:
        if self.in_flight.pop(launch.number, None) is not launch:
            raise InternalError(f"{launch!r} is not in flight")
        if launch.arena is not None:
            self._users[launch.arena] -= 1

    def _arena_for(self, kind: Hashable) -> int:
        """The least used arena with a free context; among equals one whose contexts ran this kind before."""
        users, free = self._users, self._free
        least = min(users[lane] for lane, contexts in enumerate(free) if contexts)
        lanes = [lane for lane, contexts in enumerate(free) if contexts and users[lane] == least]
        if kind is not None:
            for lane in lanes:
                if any(self._kinds.get(context) == kind for context in free[lane]):
                    return lane
        return lanes[0]

    def _of_kind(self, free: list[int], kind: Hashable) -> int:
        """The free context to run this kind of batch on: one that ran it last, or never ran, or any."""
        for wanted in (kind, None):
            for context in reversed(free):
                if self._kinds.get(context) == wanted:
                    self._kinds[context] = kind
                    return context
        self._kinds[free[-1]] = kind
        return free[-1]
