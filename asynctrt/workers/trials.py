"""Suspected requests of a link: which one is tried next, and whose turn it is. Pure."""

from collections import deque

from asynctrt.workers.groups import RequestGroup


class Trials:
    """The suspects of a link, which are tried one by one, in turns with all other requests.

    Each turn lasts as long as the one before. The suspects' turn ends when a worker dies, and
    includes the time to replace it. The others' turn ends early when none of them waits.
    """

    def __init__(self) -> None:
        # By original group.
        self._suspects: deque[list[RequestGroup]] = deque()
        self.tried: RequestGroup | None = None
        """The suspect that is being tried."""
        self.is_turn_of_others = False
        # When the turn began and when it ends; and how many rows the others may send even if it ends earlier.
        self._began_ns = 0
        self._until_ns = 0
        self._rows_left = 0

    def __repr__(self) -> str:
        return f"<Trials waiting={len(self.waiting)} tried={self.tried}>"

    @property
    def waiting(self) -> list[RequestGroup]:
        """The suspects that are still to be tried."""
        return [group for part in self._suspects for group in part]

    @property
    def are_waiting(self) -> bool:
        """Whether suspects are still to be tried."""
        return bool(self._suspects)

    @property
    def are_over(self) -> bool:
        """Whether no suspect is left, neither to be tried nor being tried."""
        return not (self._suspects or self.tried)

    def take_waiting(self) -> list[RequestGroup]:
        """Hand over the suspects that are still to be tried."""
        waiting = self.waiting
        self._suspects.clear()
        return waiting

    def add(self, suspects: list[RequestGroup]) -> None:
        """Add the requests of one group, one by one."""
        self._suspects.append(suspects)

    def convict(self) -> None:
        """Go on with another group's suspects: requests that came with a bad one may be as bad."""
        self._suspects.rotate(-1)
        self._until_ns = 0

    def next(self) -> RequestGroup:
        """Return the next suspect to try. One must be waiting."""
        suspect = self._suspects[0].pop()
        if not self._suspects[0]:
            self._suspects.popleft()
        return suspect

    def lets_in(self, now_ns: int) -> bool:
        """Return whether a group that is not suspected may go to the worker."""
        if self.is_turn_of_others:
            return self._rows_left > 0 or now_ns < self._until_ns
        return self.are_over

    def sent(self, rows: int) -> None:
        """Note that a group was sent to the worker, with the number of its rows."""
        self._rows_left -= rows

    def is_turn_over(self, now_ns: int) -> bool:
        """Return whether the turn has lasted as long as it may."""
        return now_ns >= self._until_ns

    def change_turns(self, now_ns: int, rows: int) -> None:
        """Begin the other side's turn.

        :param rows: how many rows others may send in any case: as many as fill all contexts of the worker.
        """
        took_ns = now_ns - self._began_ns if self._began_ns else 0
        self._began_ns, self._until_ns = now_ns, now_ns + took_ns
        self.is_turn_of_others = not self.is_turn_of_others
        self._rows_left = rows

    def end(self) -> None:
        """End the turns, after the last suspect."""
        self.is_turn_of_others, self._began_ns, self._until_ns = False, 0, 0
