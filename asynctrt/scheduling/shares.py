"""How several schedulers that all have work divide the time of a device, by weight.

A scheduler is charged for the time that its batches compute, divided by its weight. While the device has
enough to do, only the scheduler that was charged least launches. A scheduler that had nothing queued for a
while starts from where the others are, so that idle time cannot be saved up. This is start-time fair queueing
(Goyal, Vin and Cheng, SIGCOMM 1996) for a device that takes several batches at once (SFQ(D): Jin, Chase and
Kaur, SIGMETRICS 2004). One thing differs: the cost of a batch is known only when it has ended, so its usual
cost is charged until then.

If batches of several schedulers overlap, the device's times do not show how much of it each one had. A batch
is then charged the time that such batches take alone, measured when the engine opened, or when no others
happened to run; if there is neither, an equal part of the time.
"""

import math
from collections.abc import Callable, Hashable
from typing import Final

from asynctrt.scheduling.batch import Batch, Charge

KINDS_MAX: Final = 1024
"""The most kinds of batches (a shape and a number of rows) whose times are remembered. If there are more, all
are forgotten. It bounds memory if shapes keep changing; the number was not tuned."""

LEARNED: Final = 0.25
"""The weight of the latest batch in the usual cost of its kind: one slow batch changes it little, and after
ten batches a lasting change has almost fully arrived."""

SLACK_NS: Final = 10_000_000
"""A scheduler is held for at most twice the time that the others need to catch up, plus this much: batches
may take longer than usual, or never end. This part covers short batches, which a busy event loop may delay by
several times their length. The exact time was not tuned."""

ALONE_MAX: Final = 0.05
"""A batch counts as alone if others computed for at most this share of its time, so its time is wrong by no
more than that. With no overlap allowed, hardly a batch on a shared device would count as alone."""


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
        self._batches: dict[Batch, None] = {}
        self._usual_ns: dict[Hashable, float] = {}
        # The times of batches that computed alone.
        self._alone_ns: dict[Hashable, float] = {}
        # When its latest batch ended.
        self._ended_ns = 0
        self.computing = 0
        """How many of its batches compute at once."""
        self.computed_ns = 0
        """The total time for which its batches have computed, summed over batches."""
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

    def launched(
        self,
        batch: Batch,
        now_ns: int,
        kind: Hashable,
        *,
        lanes: int,
        computing: int,
        alone_ns: int | None = None,
    ) -> None:
        """Charge the usual cost for a batch that is launched.

        :param kind: batches of one kind take about as long.
        :param alone_ns: how long such a batch takes with no others beside it, if that was measured.
        :param lanes: how many such batches may compute side by side.
        :param computing: how many batches of this scheduler compute from now on.
        """
        shares, cost_ns, start_ns = self._shares, self._usual_ns.get(kind, 0.0), self.charged_ns
        shares.advance(now_ns)
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
        self.charged_ns += cost_ns / self.weight
        batch.charge = Charge(kind, cost_ns, now_ns, shares.computing_ns, self.computed_ns, alone_ns)
        self._batches[batch] = None
        self._move()
        shares.change(self, computing)

    def ran(self, batch: Batch, now_ns: int, took_ns: int) -> None:
        """Replace the usual cost of a batch that has ended with its real cost."""
        if batch not in self._batches:
            return
        charge = batch.charge
        shares, cost_ns = self._shares, float(took_ns)
        shares.advance(now_ns)
        if self._overlaps and took_ns > 0:
            cost_ns = self._part_ns(charge, cost_ns)
        self.charged_ns += (cost_ns - charge.cost_ns) / self.weight
        batch.charge = charge._replace(cost_ns=cost_ns)
        _learn(self._usual_ns, charge.kind, cost_ns, LEARNED)

    def _part_ns(self, charge: Charge, took_ns: float) -> float:
        """Return how much device time a batch has used of the time for which it computed.

        If batches overlapped, their kernels may have taken turns, or one batch may have waited for the other.
        So the time that such batches take alone counts, if it is known.
        """
        shares = self._shares
        since_ns = max(1, shares.now_ns - charge.launched_ns)
        own_ns = self.computed_ns - charge.own_ns
        all_ns = shares.computing_ns - charge.computing_ns
        before_ns, self._ended_ns = self._ended_ns, shares.now_ns
        if all_ns - own_ns > ALONE_MAX * since_ns:
            if charge.alone_ns is not None:
                return charge.alone_ns
            return self._alone_ns.get(charge.kind, took_ns / max(1.0, all_ns / since_ns))
        learned = LEARNED
        if all_ns > (1 + ALONE_MAX) * since_ns:
            # Only batches of the same scheduler overlapped: the time between their ends is the time of one.
            took_ns, learned = float(shares.now_ns - max(charge.launched_ns, before_ns)), LEARNED / 4
        _learn(self._alone_ns, charge.kind, took_ns, learned)
        return took_ns

    def left(self, batch: Batch, *, computing: int) -> None:
        """Note that a batch has left the device. What it was charged so far stays."""
        shares = self._shares
        if batch in self._batches:
            del self._batches[batch]
            self.used_ns += batch.charge.cost_ns
            self._move()
            if not shares.in_flight and not any(member.wants() for member in shares.members):
                shares.rest()
            shares.change(self, computing)

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
        self._shares.remove(self)
        self.wake = self.wants = self.is_full = _nothing

    def forget(self) -> None:
        """Forget its batches on the device."""
        self._batches.clear()

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
        self.computing_ns = 0
        """The total time for which batches have computed, summed over batches."""
        self.now_ns = 0
        """When anything last changed."""

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
        """Remove a scheduler, and forget its batches on the device."""
        if share in self.members:
            self.members.remove(share)
            share.forget()
            self.change(share, 0)

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

    def advance(self, now_ns: int) -> None:
        """Add up what has been computed until now."""
        if now_ns > self.now_ns:
            for member in self.members:
                if member.computing:
                    member_ns = (now_ns - self.now_ns) * member.computing
                    member.computed_ns += member_ns
                    self.computing_ns += member_ns
            self.now_ns = now_ns

    def change(self, share: Share, computing: int) -> None:
        """Note how many batches a member computes from now on, and wake held members that may launch."""
        share.computing = computing
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


def _learn(known_ns: dict[Hashable, float], kind: Hashable, took_ns: float, part: float) -> None:
    """Move the known time of a kind of batches towards ``took_ns``, by ``part`` of the difference."""
    before_ns = known_ns.get(kind)
    if before_ns is None:
        if len(known_ns) >= KINDS_MAX:
            known_ns.clear()
        before_ns = took_ns
    known_ns[kind] = before_ns + part * (took_ns - before_ns)


def _nothing() -> bool:
    return False
