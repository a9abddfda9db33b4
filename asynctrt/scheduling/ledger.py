"""Who holds which context and arena, what is in flight, and how much has been done so far."""

from collections.abc import Hashable
from dataclasses import dataclass, field

from asynctrt.errors import InternalError
from asynctrt.scheduling.request import Request


class Launch:
    """A decision: these requests, as one batch, on this context and in this arena."""

    __slots__ = ("arena", "bucket", "context", "launched_ns", "number", "requests", "rows")

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
    batches: int = 0
    queue_ns: int = 0
    copy_in_ns: int = 0
    compute_ns: int = 0
    copy_out_ns: int = 0
    total_ns: int = 0
    by_size: dict[int, BatchTotals] = field(default_factory=dict)


class Ledger:
    """Contexts and arenas as numbers. The pool holds the objects that the numbers stand for."""

    def __init__(self, *, contexts: int, arenas: int, in_flight_max: int) -> None:
        self._free = list(reversed(range(contexts)))
        self._arena_users = [0] * arenas
        self._in_flight_max = in_flight_max
        self.in_flight: dict[int, Launch] = {}
        self.quarantined: set[int] = set()
        self.totals = Totals()
        self._number = 0

    def __repr__(self) -> str:
        return (
            f"<Ledger free={len(self._free)} in_flight={len(self.in_flight)} "
            f"quarantined={len(self.quarantined)}>"
        )

    @property
    def can_launch(self) -> bool:
        """Whether a context is free and the limit on batches in flight allows one more."""
        return bool(self._free) and len(self.in_flight) < self._in_flight_max

    @property
    def usable_contexts(self) -> int:
        """Contexts that are free or will be free again."""
        return len(self._free) + len(self.in_flight)

    def launch(self, bucket: Hashable, requests: list[Request], rows: int, now_ns: int) -> Launch:
        """Take a context, the last one used first because it is warm, and the least used arena."""
        context = self._free.pop()
        arena = None
        if self._arena_users:
            arena = self._arena_users.index(min(self._arena_users))
            self._arena_users[arena] += 1
        self._number += 1
        launch = Launch(self._number, bucket, requests, rows, context, arena, now_ns)
        self.in_flight[launch.number] = launch
        return launch

    def release(self, launch: Launch) -> None:
        """The batch is over and its context may be used again."""
        self._end(launch)
        self._free.append(launch.context)

    def quarantine(self, launch: Launch) -> None:
        """Nobody can know whether the batch still runs: its context is never used again."""
        self._end(launch)
        self.quarantined.add(launch.context)

    def _end(self, launch: Launch) -> None:
        if self.in_flight.pop(launch.number, None) is not launch:
            raise InternalError(f"{launch!r} is not in flight")
        if launch.arena is not None:
            self._arena_users[launch.arena] -= 1
