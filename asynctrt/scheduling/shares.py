"""How several schedulers that all have work divide the time of a device, by weight.

A scheduler is charged for the time that its batches compute, divided by its weight. While the device has
enough to do, only the scheduler that was charged least launches. A scheduler that had nothing queued for a
while starts from where the others are, so that idle time cannot be saved up. This is start-time fair queueing
(Goyal, Vin and Cheng, SIGCOMM 1996) for a device that takes several batches at once (SFQ(D): Jin, Chase and
Kaur, SIGMETRICS 2004).

A batch is charged the usual time of such batches, and once it has ended, its own time. If the times of
batches include the time for which others computed beside them, the charge stays at the usual time.
"""

import math
from collections.abc import Callable
from typing import Final

from asynctrt.scheduling.batch import Batch

SLACK_NS: Final = 10_000_000
"""A scheduler is held for at most twice the time that the others need to catch up, plus this much: batches
may take longer than usual, or never end. This part covers short batches, which a busy event loop may delay by
several times their length. The exact time was not tuned."""


class Share:
    """One scheduler's part of a device. Made by :meth:`DeviceShares.join`.

    :param weight: how much of the device's time it gets, in proportion to the weights of others.
    :param width: how many batches keep the device busy, if they compute one after the other.
    :param overlaps: whether the times of its batches include the time that others computed meanwhile.
    :param wake: has its scheduler asked again soon, as it may be allowed to launch by then.
    """

    def __init__(
        self,
        shares: "DeviceShares",
        weight: float,
        *,
        width: int,
        overlaps: bool,
        wake: Callable[[], object],
    ) -> None:
        self._shares = shares
        self.weight = weight
        self._width = self._width_least = width
        self._overlaps = overlaps
        self.wake = wake
        """Has its scheduler asked again soon."""
        self.wants: Callable[[], bool] = _nothing
        """Returns whether its scheduler has something to launch now, or when one of its batches ends."""
        self.is_full: Callable[[], bool] = _nothing
        """Returns whether its scheduler would launch nothing now, however much room the device has."""
        self.charged_ns = 0.0
        """The compute time that it was charged, divided by its weight, counted from where it last started."""
        self.used_ns = 0.0
        """The device time that its batches used. If batches overlapped, each is counted for its part."""
        self.held_ns = 0
        """The total time for which its batches were held for others."""
        # What its batches on the device were charged.
        self._batches: dict[Batch, float] = {}
        self.is_stalled = False
        """Whether others were held for it in vain. Until it launches, or a batch of it ends, no other is held
        for it."""
        self.moved_ns = 0
        """When it last launched a batch, or a batch of it ended."""
        self._is_backlogged = False
        self._held_since_ns: int | None = None
        # Whether it was held for the longest allowed time, and so may launch once.
        self._is_let_go = False
        self._until_ns = 0

    def __repr__(self) -> str:
        return f"<Share weight={self.weight:g} in_flight={len(self._batches)} charged={self.charged_ns:.0f}>"

    @property
    def is_held(self) -> bool:
        """Return whether it was held when it last asked."""
        return self._held_since_ns is not None

    @property
    def in_flight(self) -> int:
        """Return how many of its batches are on the device."""
        return len(self._batches)

    def hold_until(self, now_ns: int) -> int | None:
        """Return until when, at the latest, it must leave the device to others; ``None`` if it may launch."""
        shares = self._shares
        if not self._is_backlogged:
            self._is_backlogged = True
            self.charged_ns = max(self.charged_ns, shares.reached_ns)
        missing_ns = 0.0 if self._is_let_go else shares.missing_ns(self)
        if not missing_ns:
            self._let_go(now_ns)
            return None
        if self._held_since_ns is None:
            self._held_since_ns = now_ns
            self._until_ns = now_ns + SLACK_NS + 2 * round(missing_ns)
        if now_ns < self._until_ns:
            return self._until_ns
        shares.pass_over(self, self._held_since_ns)
        self._let_go(now_ns)
        self._is_let_go = True
        return None

    def launched(self, batch: Batch, now_ns: int, usual_ns: int, *, lanes: int) -> None:
        """Charge the usual cost for a batch that is launched.

        :param usual_ns: how long such a batch computes with no others beside it; 0 if that is not known.
        :param lanes: how many such batches may compute side by side.
        """
        shares, start_ns = self._shares, self.charged_ns
        shares.now_ns = now_ns
        self._let_go(now_ns)
        self._is_let_go = False
        self._width = self._width_least + lanes - 1
        shares.reached_ns = max(shares.reached_ns, start_ns)
        in_flight = shares.in_flight
        for other in shares.members:
            if other is self:
                continue
            if not other.wants():
                other.rest(now_ns)
            elif other.charged_ns < start_ns and other.leaves_room(in_flight):
                # It must not save up time that it cannot use, or others, which can, would be held for it.
                other.charged_ns = start_ns
        self.charged_ns += usual_ns / self.weight
        self._batches[batch] = usual_ns
        self._move()
        shares.wake(self)

    def ran(self, batch: Batch, now_ns: int, took_ns: int) -> None:
        """Replace the usual cost of a batch that has ended with its real cost."""
        usual_ns = self._batches.get(batch)
        if usual_ns is None:
            return
        shares, cost_ns = self._shares, float(took_ns)
        shares.now_ns = now_ns
        if self._overlaps:
            cost_ns = usual_ns or took_ns / shares.in_flight
        self.charged_ns += (cost_ns - usual_ns) / self.weight
        self._batches[batch] = cost_ns

    def left(self, batch: Batch) -> None:
        """Note that a batch has left the device. What it was charged so far stays."""
        shares = self._shares
        if batch in self._batches:
            self.used_ns += self._batches.pop(batch)
            self._move()
            if not shares.in_flight and not any(member.wants() for member in shares.members):
                shares.rest()
            shares.wake(self)

    def claims(self, in_flight: int) -> bool:
        """Return whether schedulers that were charged more must wait for this one.

        They also wait while all of its requests are on the device: callers who are answered may send more
        at once, and those requests could not overtake batches that others had launched meanwhile.

        :param in_flight: the batches on the device.
        """
        if in_flight < self._width or self.is_stalled:
            return False
        return bool(self._batches) or self.wants()

    def leaves_room(self, in_flight: int) -> bool:
        """Return whether the device has room that it cannot use, for instance because it has too few
        contexts.

        :param in_flight: the batches on the device.
        """
        return in_flight < self._width and self.is_full()

    def rest(self, now_ns: int) -> None:
        """Note that it has nothing to launch. When it has again, it starts from where the others are."""
        self._is_backlogged = self._is_let_go = False
        self._let_go(now_ns)

    def leave(self) -> None:
        """Stop sharing the device, and let go of the scheduler, which holds this object. Idempotent."""
        self._batches.clear()
        self._shares.remove(self)
        self.wake = self.wants = self.is_full = _nothing

    def _move(self) -> None:
        self.is_stalled, self.moved_ns = False, self._shares.now_ns

    def _let_go(self, now_ns: int) -> None:
        if self._held_since_ns is not None:
            self.held_ns += max(0, min(now_ns, self._until_ns) - self._held_since_ns)
            self._held_since_ns = None


class DeviceShares:
    """Divides one device among schedulers on one event loop."""

    def __init__(self) -> None:
        self.members: list[Share] = []
        """The shares of the schedulers that divide the device."""
        self.reached_ns = 0.0
        """The most that any scheduler had been charged at a launch: idle schedulers start from there."""
        self.now_ns = 0
        """When a batch was last launched or ended."""

    def __repr__(self) -> str:
        return f"<DeviceShares {self.members!r}>"

    @property
    def in_flight(self) -> int:
        """Return how many batches of all schedulers are on the device."""
        return sum([member.in_flight for member in self.members])

    def join(self, weight: float, *, width: int, overlaps: bool, wake: Callable[[], object]) -> Share:
        """Add a scheduler. As :class:`Share`."""
        share = Share(self, weight, width=width, overlaps=overlaps, wake=wake)
        self.members.append(share)
        return share

    def remove(self, share: Share) -> None:
        """Remove a scheduler."""
        if share in self.members:
            self.members.remove(share)
            self.wake(share)

    def rest(self) -> None:
        """Settle what was charged before, because nothing is queued and nothing is in flight."""
        self.reached_ns = max([member.charged_ns for member in self.members])
        for member in self.members:
            member.rest(self.now_ns)

    def missing_ns(self, share: Share) -> float:
        """Return how long the device must compute for others until none of them is behind ``share``.

        Only schedulers that claim the device count: others do not wait for it.
        """
        missing_ns, in_flight = 0.0, self.in_flight
        for other in self.members:
            if other.charged_ns < share.charged_ns and other.claims(in_flight):
                missing_ns += (share.charged_ns - other.charged_ns) * other.weight
        return missing_ns

    def pass_over(self, share: Share, since_ns: int) -> None:
        """Stop holding batches for schedulers that ``share`` was held for in vain, as their batches may
        hang."""
        for other in self.members:
            if other is not share and other.moved_ns <= since_ns and (other.in_flight or other.wants()):
                other.is_stalled = True

    def wake(self, share: Share) -> None:
        """Wake held members that may launch, after a change of ``share``."""
        held = [one for one in self.members if one.is_held and one is not share]
        if not held:
            return
        in_flight = self.in_flight
        claimed_ns = min([one.charged_ns for one in self.members if one.claims(in_flight)], default=math.inf)
        # If several may launch, the one that was charged least is asked first.
        held.sort(key=lambda one: one.charged_ns)
        for member in held:
            if member.charged_ns <= claimed_ns:
                member.wake()


def _nothing() -> bool:
    return False
