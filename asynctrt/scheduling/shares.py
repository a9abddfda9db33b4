"""How several schedulers divide the time of a device for which all of them have work, by weight.

Each batch is charged for the time that it computes, divided by the weight of its scheduler; while the device
has enough to do, only who was charged least so far launches. Who had nothing queued for a while starts from
where the others are, so that nobody saves time up. This is start-time fair queueing (Goyal, Vin and Cheng,
SIGCOMM 1996) for a device that takes several batches at once (SFQ(D): Jin, Chase and Kaur, SIGMETRICS 2004),
but that what a batch costs is known only when it has ended: until then it is charged what is usual.

Where batches of several schedulers overlap, the device's times do not tell which of them had how much of it.
So a batch is then charged what such batches take with no others beside them, as was measured when the engine
was opened, or when none happened to be there; if neither was, an equal part of the time.
"""

import math
from collections.abc import Callable, Hashable
from typing import Final

from asynctrt.scheduling.batch import Charge, Flight

KINDS_MAX: Final = 1024
"""Kinds of batches of which it is remembered what they take, until all of it is forgotten."""

LEARNED: Final = 0.25
"""How much of the difference to what is usual becomes usual."""

SLACK_NS: Final = 10_000_000
"""A scheduler is held at most for twice the time that the others need to catch up, plus this much: batches
may take longer than usual, or never end."""

ALONE_MAX: Final = 0.05
"""A batch still counts as alone if others computed for at most this share of its time."""


class Share:
    """One scheduler's part of a device. Made by :meth:`DeviceShares.join`.

    :param weight: how much of the device's time it gets, in proportion to the weights of others.
    :param width: how many batches keep the device busy, if they compute one after the other.
    :param overlaps: whether the times told of its batches include what others computed meanwhile.
    :param wake: asks its scheduler again, soon, which may launch by now.
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
        """Has its scheduler asked again, soon."""
        self.wants: Callable[[], bool] = _nothing
        """Says whether its scheduler has something that it would launch, or will when what it has on the
        device ends."""
        self.is_full: Callable[[], bool] = _nothing
        """Says whether its scheduler would launch nothing more now, however much room the device has."""
        self.charged_ns = 0.0
        """The time that its batches have computed, divided by its weight, from where it last began."""
        self.used_ns = 0.0
        """The time of the device that its batches took: of what computed at once, each has its part."""
        self.held_ns = 0
        """How long something of it was held for others, in sum."""
        self._flights: dict[Flight, None] = {}
        self._usual_ns: dict[Hashable, float] = {}
        # What batches took that had no others beside them.
        self._alone_ns: dict[Hashable, float] = {}
        # When one of its batches ended last.
        self._ended_ns = 0
        self.computing = 0
        """How many of its batches compute at once."""
        self.computed_ns = 0
        """How long they have, summed over them."""
        self.is_stalled = False
        """Whether others were held for it in vain: none is, until it launches or something of it ends."""
        self.moved_ns = 0
        """When it last launched something, or something of it ended."""
        self._is_backlogged = False
        self._held_since_ns: int | None = None
        # Whether it was held for long enough, and may launch once.
        self._is_let_go = False
        self._until_ns = 0

    def __repr__(self) -> str:
        return f"<Share weight={self.weight:g} in_flight={len(self._flights)} charged={self.charged_ns:.0f}>"

    @property
    def is_held(self) -> bool:
        """Return whether it was to launch nothing, when it was last asked."""
        return self._held_since_ns is not None

    @property
    def in_flight(self) -> int:
        """Return how many of its batches are on the device."""
        return len(self._flights)

    def hold_until(self, now_ns: int) -> int | None:
        """Return until when the next batch is to be left to others, at the latest; ``None``: it may go."""
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
        flight: Flight,
        now_ns: int,
        kind: Hashable,
        *,
        lanes: int,
        computing: int,
        alone_ns: int | None = None,
    ) -> None:
        """Charge a batch that is launched what is usual.

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
                # It would save up what it cannot use, and those that can would be held for it.
                other.charged_ns = start_ns
        self.charged_ns += cost_ns / self.weight
        flight.charge = Charge(kind, cost_ns, now_ns, shares.computing_ns, self.computed_ns, alone_ns)
        self._flights[flight] = None
        self._move()
        shares.change(self, computing)

    def ran(self, flight: Flight, now_ns: int, took_ns: int) -> None:
        """Charge a batch that has ended what it took, rather than what is usual."""
        if flight not in self._flights:
            return
        charge = flight.charge
        shares, cost_ns = self._shares, float(took_ns)
        shares.advance(now_ns)
        if self._overlaps and took_ns > 0:
            cost_ns = self._part_ns(charge, cost_ns)
        self.charged_ns += (cost_ns - charge.cost_ns) / self.weight
        flight.charge = charge._replace(cost_ns=cost_ns)
        _learn(self._usual_ns, charge.kind, cost_ns, LEARNED)

    def _part_ns(self, charge: Charge, took_ns: float) -> float:
        """Return what a batch has taken of the device, of the time for which it computed.

        Where batches overlap, their kernels may have taken turns, or one batch may have waited for the other.
        So it counts what such batches take alone, if that is known.
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
            # Beside others of its own, what each takes shows in how soon they end after one another.
            took_ns, learned = float(shares.now_ns - max(charge.launched_ns, before_ns)), LEARNED / 4
        _learn(self._alone_ns, charge.kind, took_ns, learned)
        return took_ns

    def left(self, flight: Flight, *, computing: int) -> None:
        """Note that a batch has left the device. If no more is known of it, it stays charged as it is."""
        shares = self._shares
        if flight in self._flights:
            del self._flights[flight]
            self.used_ns += flight.charge.cost_ns
            self._move()
            if not shares.in_flight and not any(member.wants() for member in shares.members):
                shares.rest()
            shares.change(self, computing)

    def claims(self, in_flight: int) -> bool:
        """Return whether others who were charged more are to wait for it.

        They wait also while all that it has is on the device: callers may ask again as soon as that answers
        them, and their requests could not overtake what others had launched meanwhile.

        :param in_flight: the batches on the device.
        """
        if in_flight < self._width or self.is_stalled:
            return False
        return bool(self._flights) or self.wants()

    def leaves_room(self, in_flight: int) -> bool:
        """Return whether it leaves room on the device that it cannot use, as it has too few contexts, say.

        :param in_flight: the batches on the device.
        """
        return in_flight < self._width and self.is_full()

    def rest(self, now_ns: int) -> None:
        """Note that it had nothing to launch: when it has, it begins from where the others are."""
        self._is_backlogged = self._is_let_go = False
        self._let_go(now_ns)

    def leave(self) -> None:
        """Take no part any more, and let go of the scheduler, which holds this object. Idempotent."""
        self._shares.remove(self)
        self.wake = self.wants = self.is_full = _nothing

    def forget(self) -> None:
        """Forget what it has on the device."""
        self._flights.clear()

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
        """Those that divide it."""
        self.reached_ns = 0.0
        """The most that any had been charged when it launched; one that had nothing queued begins there."""
        self.computing_ns = 0
        """The time that batches have computed, summed over them."""
        self.now_ns = 0
        """When something last changed."""

    def __repr__(self) -> str:
        return f"<DeviceShares {self.members!r}>"

    @property
    def in_flight(self) -> int:
        """Return how many batches are on the device, of all."""
        return sum([member.in_flight for member in self.members])

    def join(self, weight: float, *, width: int, overlaps: bool, wake: Callable[[], object]) -> Share:
        """Add a scheduler. As :class:`Share`."""
        share = Share(self, weight, width=width, overlaps=overlaps, wake=wake)
        self.members.append(share)
        return share

    def remove(self, share: Share) -> None:
        """Forget a scheduler and what it has on the device."""
        if share in self.members:
            self.members.remove(share)
            share.forget()
            self.change(share, 0)

    def rest(self) -> None:
        """Note that there is nothing to launch and nothing in flight: what was charged before is settled."""
        self.reached_ns = max([member.charged_ns for member in self.members])
        for member in self.members:
            member.rest(self.now_ns)

    def missing_ns(self, share: Share) -> float:
        """Return how long the device has to compute for others until none of them is behind ``share``.

        Those count for whose batches it has no room now; others need not wait for it.
        """
        missing_ns, in_flight = 0.0, self.in_flight
        for other in self.members:
            if other.charged_ns < share.charged_ns and other.claims(in_flight):
                missing_ns += (share.charged_ns - other.charged_ns) * other.weight
        return missing_ns

    def pass_over(self, share: Share, since_ns: int) -> None:
        """Hold nothing any more for those that ``share`` was held for in vain: they may hang."""
        for other in self.members:
            if other is not share and other.moved_ns <= since_ns and (other.in_flight or other.wants()):
                other.is_stalled = True

    def advance(self, now_ns: int) -> None:
        """Note what has been computed until now."""
        if now_ns > self.now_ns:
            for member in self.members:
                if member.computing:
                    member_ns = (now_ns - self.now_ns) * member.computing
                    member.computed_ns += member_ns
                    self.computing_ns += member_ns
            self.now_ns = now_ns

    def change(self, share: Share, computing: int) -> None:
        """Note what a member computes from now on, and ask those again that were held and may go."""
        share.computing = computing
        held = [one for one in self.members if one.is_held and one is not share]
        if not held:
            return
        in_flight = self.in_flight
        claimed_ns = min([one.charged_ns for one in self.members if one.claims(in_flight)], default=math.inf)
        # If several may go, who was charged least looks first.
        held.sort(key=lambda one: one.charged_ns)
        for member in held:
            if member.charged_ns <= claimed_ns:
                member.wake()


def _learn(known_ns: dict[Hashable, float], kind: Hashable, took_ns: float, part: float) -> None:
    """Move what is known of a kind of batches by ``part`` of the way to what one took."""
    before_ns = known_ns.get(kind)
    if before_ns is None:
        if len(known_ns) >= KINDS_MAX:
            known_ns.clear()
        before_ns = took_ns
    known_ns[kind] = before_ns + part * (took_ns - before_ns)


def _nothing() -> bool:
    return False
