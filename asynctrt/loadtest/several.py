"""Several addresses as one target: requests go to them in turn."""

import asyncio
from collections.abc import Mapping, Sequence
from functools import reduce
from itertools import cycle
from typing import Any

from asynctrt.loadtest.targets import BatchCounters, Target
from asynctrt.tensors import Array


class SeveralTargets:
    """Send to several targets of the same kind in turn, for example to the replicas of a server."""

    def __init__(self, targets: Sequence[Target]) -> None:
        first = targets[0]
        self.name, self.kind, self.inputs = first.name, first.kind, first.inputs
        self.in_flight_max = first.in_flight_max
        self.has_connections = getattr(first, "has_connections", False)
        self.is_self_contained = getattr(first, "is_self_contained", False)
        self._targets = targets
        self._turns = cycle(range(len(targets)))
        self._starts = [target.start for target in targets]

    def prepare(self, inputs: Mapping[str, Array]) -> Any:
        """Prepare the request for each target, because their addresses differ."""
        return [target.prepare(inputs) for target in self._targets]

    def start(self, prepared: Any) -> "asyncio.Future[Any]":
        turn = next(self._turns)
        return self._starts[turn](prepared[turn])

    def outputs(self, answer: Any) -> Mapping[str, Array]:
        return self._targets[0].outputs(answer)

    async def batches(self) -> BatchCounters | None:
        """Return the sum of all counters; ``None`` if one target has none."""
        read = await asyncio.gather(*(target.batches() for target in self._targets))
        known = [counters for counters in read if counters is not None]
        return reduce(BatchCounters.plus, known) if len(known) == len(read) else None

    async def aclose(self) -> None:
        for target in self._targets:
            await target.aclose()
