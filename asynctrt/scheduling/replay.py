"""What would have become of the latest requests with other batches: the queue alone, without a device.

It is what an objective foretells by. Requests are served in the order of their arrival; what batches take was
measured. Priorities, shapes and copies are left out, so what it says is only a reason to try something.
"""

from collections.abc import Callable, Sequence
from heapq import heapreplace
from typing import NamedTuple

Takes = Callable[[int, bool], int]
"""Returns how long a batch of so many rows takes, and whether others run beside it matters for that."""


class Choice(NamedTuple):
    """How batches are formed. The zeros are work-conserving: what waits is launched as soon as it may be."""

    rows_max: int = 0
    """Rows that a batch takes at most; 0: as many as it holds."""
    concurrency: int = 0
    """Batches at once; 0: as many as keep the device busy."""
    delay_ns: int = 0
    """How long a batch that could grow is held back, although the device would take it."""

    def __str__(self) -> str:
        parts = []
        if self.rows_max:
            parts.append(f"batches of at most {self.rows_max} rows")
        if self.concurrency:
            parts.append(f"{self.concurrency} at once")
        if self.delay_ns:
            parts.append(f"held back for up to {self.delay_ns / 1e6:.3g} ms")
        return ", ".join(parts) or "work-conserving"


WORK_CONSERVING = Choice()


class Replayed(NamedTuple):
    """What would have become of some requests."""

    share: float
    """Of them, those that would have been answered in time."""
    latency_ns: int
    """The latency at the percentile that matters."""


def replay(
    arrivals: Sequence[tuple[int, int]],
    choice: Choice,
    takes: Takes,
    *,
    begin_ns: int,
    rows_max: int,
    width: int,
    is_split: bool,
    within_ns: int,
    percentile: float,
) -> Replayed:
    """Serve requests with batches as a choice says.

    :param arrivals: when they came, in order, and their rows.
    :param begin_ns: from when on the device takes batches: what waits by then is there at once.
    :param rows_max: rows that a batch holds; ``width``: how many can run at once.
    :param is_split: whether what waits is spread over all that could run.
    """
    most = choice.rows_max or rows_max
    free_ns = [begin_ns] * (choice.concurrency or width)
    latencies: list[int] = []
    at, count = 0, len(arrivals)
    while at < count:
        came_ns, rows = arrivals[at]
        begins_ns = max(free_ns[0], came_ns)
        limit = most
        if is_split and not choice.delay_ns:
            idle = sum(until_ns <= begins_ns for until_ns in free_ns)
            if idle > 1:
                waiting = 0
                for due_ns, its_rows in arrivals[at : at + most]:
                    if due_ns > begins_ns:
                        break
                    waiting += its_rows
                limit = max(1, min(most, -(-waiting // idle)))
        held_ns = came_ns + choice.delay_ns
        until = at + 1
        while until < count and rows + arrivals[until][1] <= limit:
            due_ns = arrivals[until][0]
            if due_ns > begins_ns:
                if due_ns > held_ns:
                    break
                begins_ns = due_ns  # It waits for that one.
            rows += arrivals[until][1]
            until += 1
        if rows < limit and held_ns > begins_ns and choice.delay_ns:
            begins_ns = held_ns
        is_beside = len(free_ns) > 1 and any(until_ns > begins_ns for until_ns in free_ns)
        end_ns = begins_ns + takes(rows, is_beside)
        heapreplace(free_ns, end_ns)
        latencies += [end_ns - due_ns for due_ns, _ in arrivals[at:until]]
        at = until
    latencies.sort()
    in_time = sum(took_ns <= within_ns for took_ns in latencies)
    place = min(int(percentile * len(latencies)), len(latencies) - 1)
    return Replayed(in_time / len(latencies), latencies[place])
