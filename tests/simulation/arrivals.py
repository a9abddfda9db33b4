"""When simulated requests arrive, and what they are; all of it follows from a seed."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from asynctrt.loadtest.arrivals import LoadProfile, Process, Schedule
from asynctrt.scheduling.key import FIXED_SHAPE, BatchKey


class Arrival(NamedTuple):
    """One request of a simulated world."""

    due_ns: int
    """From the beginning of the world."""
    rows: int = 1
    key: BatchKey = FIXED_SHAPE
    priority: int = 0
    timeout_ns: int | None = None
    """How long after its arrival its answer is of any use."""
    patience_ns: int | None = None
    """How long its caller waits for an answer before going away; ``None``: forever."""


def at_random(rate: float, seconds: float, seed: int) -> list[int]:
    """Return the times in ns of requests that arrive at random, at a mean rate per second."""
    return _times_ns("poisson", LoadProfile.parse(f"{rate:f}", seconds), seed)


def evenly(rate: float, seconds: float) -> list[int]:
    """Return the times in ns of requests that arrive at equal intervals."""
    return _times_ns("constant", LoadProfile.parse(f"{rate:f}", seconds), 0)


def in_bursts(
    rate: float, seconds: float, seed: int, *, factor: float = 5.0, share: float = 0.1, period_s: float = 1.0
) -> list[int]:
    """Return the times in ns of requests that arrive ``factor`` times faster for a ``share`` of the time.

    :param rate: the mean rate per second.
    :param period_s: the mean length of a burst and the pause after it.
    """
    rng = np.random.default_rng((seed, 3))
    ends, levels = [], []
    # The world begins in a burst with probability `share`, so that short ones also keep their mean.
    now_s, is_burst = 0.0, bool(rng.random() < share)
    while now_s < seconds:
        now_s = min(now_s + rng.exponential(period_s * (share if is_burst else 1 - share)), seconds)
        ends.append(now_s)
        levels.append(rate * (factor if is_burst else (1 - share * factor) / (1 - share)))
        is_burst = not is_burst
    return _times_ns("poisson", LoadProfile(np.array(ends), np.array(levels)), seed)


def _times_ns(process: Process, profile: LoadProfile, seed: int) -> list[int]:
    blocks = Schedule(process, profile, 1, seed).blocks()
    return [due_ns for block in blocks for due_ns in block.due_ns.tolist()]


def requests(
    times_ns: Sequence[int],
    *,
    shapes: Sequence[tuple[str, float]] = (),
    timeout_s: float | None = None,
    cancel_share: float = 0.0,
    patience_s: float = 0.1,
    seed: int = 0,
) -> Iterator[Arrival]:
    """Yield a request of one row for each time.

    :param shapes: names of shapes and how often each occurs, relative to the others.
    :param cancel_share: the share of callers who go away, after ``patience_s`` on average.
    """
    rng = np.random.default_rng((seed, 2))
    count = len(times_ns)
    keys = [FIXED_SHAPE] * count
    if shapes:
        weights = np.array([weight for _, weight in shapes])
        named = [BatchKey(name) for name, _ in shapes]
        keys = [named[place] for place in rng.choice(len(named), count, p=weights / weights.sum())]
    goes = (rng.random(count) < cancel_share).tolist()
    after_ns = (rng.exponential(patience_s, count) * 1e9).astype(np.int64).tolist()
    timeout_ns = None if timeout_s is None else int(timeout_s * 1e9)
    for due_ns, key, does, patience_ns in zip(times_ns, keys, goes, after_ns, strict=True):
        yield Arrival(due_ns, key=key, timeout_ns=timeout_ns, patience_ns=patience_ns if does else None)
