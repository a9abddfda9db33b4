"""Parts of batches that failed, to be launched again until it is known whose requests fail."""

from bisect import insort
from collections.abc import Sequence

from asynctrt.scheduling.key import BatchKey
from asynctrt.scheduling.request import Request, awaited

Part = tuple[BatchKey, tuple[Request, ...]]


class Again:
    """Parts of batches that failed, the largest first, that take turns with what is queued.

    :param waiting_max: while more parts wait than this, none of the queue goes before them.
    """

    def __init__(self, waiting_max: int) -> None:
        self._waiting_max = waiting_max
        self.parts: list[Part] = []
        """Each is to be launched as a batch of its own."""
        self.is_over = False
        """Whether no part is launched any more."""
        # Whether the latest batch was such a part, so that it is the queue's turn.
        self._was_part = False

    @property
    def goes_first(self) -> bool:
        """Return whether it is the turn of a part."""
        return bool(self.parts) and not (self._was_part and len(self.parts) <= self._waiting_max)

    def divide(self, key: BatchKey, requests: Sequence[Request]) -> None:
        """Keep the halves of a batch that failed, without those whose callers have gone away."""
        left = awaited(requests)
        half = (len(left) + 1) // 2
        for part in (left[:half], left[half:]):
            if part:
                # What fails most likely waits behind what most are waiting for.
                insort(self.parts, (key, part), key=_smallness)

    def pop(self) -> Part | None:
        """Return the next part, without those whose callers have gone away since; ``None``: there is none."""
        while self.parts:
            key, requests = self.parts.pop(0)
            chosen = awaited(requests)
            if chosen:
                return key, chosen
        return None

    def launched(self, *, is_part: bool) -> None:
        """Note a launch: of a part, or of what was queued."""
        self._was_part = is_part

    def close(self) -> list[Request]:
        """Keep no part from now on; return the requests whose callers still wait."""
        self.is_over = True
        left = [request for _, part in self.parts for request in awaited(part)]
        self.parts.clear()
        return left


def _smallness(part: Part) -> int:
    return -len(part[1])
