"""Is there room for another batch? A context, batches in flight, and a share of the device."""

from collections.abc import Mapping

from asynctrt.scheduling.batch import Batch, Flight
from asynctrt.scheduling.contexts import ContextAllocator
from asynctrt.scheduling.shares import Share


class Room:
    """What batches are launched into.

    :param in_flight: the batches in flight; ``in_flight_max``: how many there may be.
    """

    def __init__(
        self, contexts: ContextAllocator, in_flight: Mapping[Flight, Batch], in_flight_max: int
    ) -> None:
        self.contexts = contexts
        self._in_flight = in_flight
        self.in_flight_max = in_flight_max
        self.share: Share | None = None
        """Its part of a device that it divides with others; ``None`` if it takes what it can get."""
        self.until_ns: int | None = None
        """Until when the device is left to others at the latest; ``None`` if it is not."""
        self.bides = False
        """Whether what is queued waits for company, not for the device."""

    @property
    def is_free(self) -> bool:
        """Return whether a batch could be launched, if the device is not left to others."""
        return self.contexts.free > 0 and len(self._in_flight) < self.in_flight_max

    @property
    def is_for_two(self) -> bool:
        """Return whether two batches could be launched."""
        return self.contexts.free > 1 and self.in_flight_max > 1

    @property
    def is_held(self) -> bool:
        """Return whether the device was left to others when that was last asked."""
        return self.share is not None and self.share.is_held

    @property
    def is_wanted(self) -> bool:
        """Return whether what is queued would be launched now, or when what is in flight ends."""
        return bool(self._in_flight) or (not self.bides and self.contexts.free > 0)

    def has_room(self, now_ns: int) -> bool:
        """Return whether a batch may be launched now. Only if there is something to launch."""
        if not self.is_free:
            return False
        if self.share is None:
            return True
        self.bides = False
        self.until_ns = self.share.hold_until(now_ns)
        return self.until_ns is None
