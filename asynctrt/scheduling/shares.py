"""How several schedulers divide the time of a device for which all of them have work, by weight.

Each batch is charged for the time that it computes, divided by the weight of its scheduler; while the device
has enough to do, only who was charged least so far launches. Who had nothing queued for a while starts from
where the others are, so that nobody saves time up. This is start-time fair queueing (Goyal, Vin and Cheng,
SIGCOMM 1996) for a device that takes several batches at once (SFQ(D): Jin, Chase and Kaur, SIGMETRICS 2004),
but that what a batch costs is known only when it has ended: until then it is charged what is usual.
"""

import math
from collections.abc import Callable, Hashable
from typing import Final, NamedTuple

KINDS_MAX: Final = 1024
"""Kinds of batches of which it is remembered what they take, until all of it is forgotten."""

LEARNED: Final = 0.25
"""How much of the difference to what is usual becomes usual."""

SLACK_NS: Final = 10_000_000
"""An engine is held for twice the time that the others need to catch up, and this much more, at the most:
they may take longer than is usual, but may also never end."""


ALONE_AGAIN_MAX: Final = 512
"""Where batches of several overlap, one of each is to compute alone now and then, to show what it takes:
after so many at the most, and after few at first."""

ALONE_MAX: Final = 0.05
"""The share of its time for which a batch that counts as alone may have had others' beside it."""


UNEQUAL_MAX: Final = 8.0
"""How many times more, or less, than an equal part a batch may be taken to have had of what it overlapped."""


class _Flight(NamedTuple):
    """One batch on the device."""

    kind: Hashable
    cost_ns: float
    """What was charged for it."""
    launched_ns: int
    computing_ns: int
    """The time that batches had computed when it was launched, summed over them."""
    own_ns: int
    """The same of its own scheduler's batches."""


class Share:
    """One scheduler's part of a device. Made by :meth:`DeviceShares.join`.

    :param weight: how much of the device's time it gets, in proportion to the weights of others.
    :param width: how many batches keep the device busy, if they compute one after the other.
    :param overlaps: whether its batches take longer while others compute, rather than begin later.
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
        self._flights: dict[int, _Flight] = {}
        self._usual_ns: dict[Hashable, float] = {}
        # What batches took with no others' beside them; of those that had some, what they would have taken
        # over an equal part of what they did.
        self._alone_ns: dict[Hashable, float] = {}
        self._unequal = 1.0
        # How many batches may still overlap with others' before one is to compute alone.
        self._until_alone = 0
        self._alone_again = 4
        # The batch that does, until it has left the device.
        self._alone_number: int | None = None
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

    @property
    def pending_ns(self) -> float:
        """Return what its batches on the device were charged."""
        return sum([flight.cost_ns for flight in self._flights.values()])

    @property
    def longest_ns(self) -> float:
        """Return the most that batches of one kind are usually charged."""
        return max(self._usual_ns.values(), default=0.0)

    def hold_until(self, now_ns: int) -> int | None:
        """Return until when the next batch is to be left to others, at the latest; ``None``: it may go."""
        shares = self._shares
        if not self._is_backlogged:
            self._is_backlogged = True
            self.charged_ns = max(self.charged_ns, shares.reached_ns)
        missing_ns = 0.0 if self._is_let_go else shares.missing_ns(self)
        if not missing_ns and not self._is_let_go and self._waits_to_be_alone():
            missing_ns = shares.pending_ns
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
        if self._until_alone <= 0:
            self._is_not_alone_for_a_while()
        return None

    def _is_not_alone_for_a_while(self) -> None:
        self._until_alone = self._alone_again
        self._alone_again = min(2 * self._alone_again, ALONE_AGAIN_MAX)

    def _waits_to_be_alone(self) -> bool:
        """Return whether the next batch is to compute with no others' beside it, and cannot yet."""
        shares = self._shares
        if not self._overlaps or self._until_alone > 0 or shares.alone not in (None, self):
            return False
        others = shares.in_flight - len(self._flights)
        if others or any(one.wants() for one in shares.members if one is not self):
            shares.alone = self
        return others > 0

    def launched(self, number: int, now_ns: int, kind: Hashable, *, lanes: int, computing: int) -> None:
        """Charge a batch that is launched what is usual.

        :param kind: batches of one kind take about as long.
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
        self._flights[number] = _Flight(kind, cost_ns, now_ns, shares.computing_ns, self.computed_ns)
        if shares.alone is self and self._alone_number is None:
            # Nobody else launches until it has ended.
            self._alone_number = number
            self._is_not_alone_for_a_while()
        else:
            self._until_alone -= 1
        self._move()
        shares.change(self, computing)

    def ran(self, number: int, now_ns: int, took_ns: int) -> None:
        """Charge a batch that has ended what it took, rather than what is usual."""
        flight = self._flights.get(number)
        if flight is None:
            return
        shares, cost_ns = self._shares, float(took_ns)
        shares.advance(now_ns)
        if self._overlaps and took_ns > 0:
            cost_ns = self._part_ns(flight, cost_ns)
        self.charged_ns += (cost_ns - flight.cost_ns) / self.weight
        self._flights[number] = flight._replace(cost_ns=cost_ns)
        usual_ns = self._usual_ns.get(flight.kind)
        if usual_ns is None:
            if len(self._usual_ns) >= KINDS_MAX:
                self._usual_ns.clear()
            usual_ns = cost_ns
        self._usual_ns[flight.kind] = usual_ns + LEARNED * (cost_ns - usual_ns)

    def _part_ns(self, flight: _Flight, took_ns: float) -> float:
        """Return what a batch has taken of the device, of the time for which it computed.

        Of what computed at once each may have taken an equal part, as kernels of several take turns, or one
        may have waited for the other. So what it takes alone counts where that is known.
        """
        shares = self._shares
        since_ns = max(1, shares.now_ns - flight.launched_ns)
        own_ns = self.computed_ns - flight.own_ns
        all_ns = shares.computing_ns - flight.computing_ns
        before_ns, self._ended_ns = self._ended_ns, shares.now_ns
        alone_ns = self._alone_ns.get(flight.kind)
        if all_ns - own_ns > ALONE_MAX * since_ns:
            equal_ns = took_ns / max(1.0, all_ns / since_ns)
            if alone_ns is None:
                return equal_ns * self._unequal
            unequal = alone_ns / max(equal_ns, 1.0)
            self._unequal += LEARNED * (min(max(unequal, 1 / UNEQUAL_MAX), UNEQUAL_MAX) - self._unequal)
            return alone_ns
        learned = LEARNED
        if all_ns > (1 + ALONE_MAX) * since_ns:
            # Beside others of its own, what each takes shows in how soon they end after one another.
            took_ns, learned = float(shares.now_ns - max(flight.launched_ns, before_ns)), LEARNED / 4
        if alone_ns is None:
            if len(self._alone_ns) >= KINDS_MAX:
                self._alone_ns.clear()
            alone_ns = took_ns
        self._alone_ns[flight.kind] = alone_ns + learned * (took_ns - alone_ns)
        return took_ns

    def left(self, number: int, *, computing: int) -> None:
        """Note that a batch has left the device. If no more is known of it, it stays charged as it is."""
        flight, shares = self._flights.pop(number, None), self._shares
        if flight is not None:
            self.used_ns += flight.cost_ns
            self._move()
            if number == self._alone_number:
                self.give_up_being_alone()
            if not shares.in_flight and not any(member.wants() for member in shares.members):
                shares.rest()
            shares.change(self, computing)

    def claims(self, in_flight: int) -> bool:
        """Return whether others who were charged more are to wait for it.

        They are also if all that it has is on the device: whom that answers may ask for more at once, but
        could not overtake what others had put there meanwhile.

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
        if self._alone_number is None:
            self.give_up_being_alone()
        self._let_go(now_ns)

    def leave(self) -> None:
        """Take no part any more. Idempotent."""
        self._shares.remove(self)

    def forget(self) -> None:
        """Forget what it has on the device."""
        self._flights.clear()
        self.give_up_being_alone()

    @property
    def is_busy_alone(self) -> bool:
        """Return whether a batch of it computes alone, or is to and will."""
        return not self.is_stalled and (self._alone_number is not None or self.wants())

    def give_up_being_alone(self) -> None:
        """Let others launch beside what it has on the device."""
        self._alone_number = None
        if self._shares.alone is self:
            self._shares.alone = None

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
        self.alone: Share | None = None
        """Whose batch is to compute alone, or does: the others launch nothing."""

    def __repr__(self) -> str:
        return f"<DeviceShares {self.members!r}>"

    @property
    def pending_ns(self) -> float:
        """Return how long what is on the device takes, as far as is known, and a little more."""
        return 1e6 + sum([member.pending_ns for member in self.members])

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
        alone = self.alone
        if alone is not None and alone is not share:
            if alone.is_busy_alone:
                missing_ns = SLACK_NS + self.pending_ns + alone.longest_ns
            else:
                alone.give_up_being_alone()
        for other in self.members:
            if other.charged_ns < share.charged_ns and other.claims(in_flight):
                missing_ns += (share.charged_ns - other.charged_ns) * other.weight
        return missing_ns

    def pass_over(self, share: Share, since_ns: int) -> None:
        """Hold nothing any more for those that ``share`` was held for in vain: they may hang."""
        for other in self.members:
            if other is not share and other.moved_ns <= since_ns and (other.in_flight or other.wants()):
                other.is_stalled = True
        if self.alone is not None:
            self.alone.give_up_being_alone()

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
            if member.charged_ns <= claimed_ns if self.alone is None else member is self.alone:
                member.wake()


def _nothing() -> bool:
    return False
