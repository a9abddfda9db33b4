"""Share a limited number of places among little-known clients: the one with the most makes room."""

from collections.abc import Callable, Hashable
from typing import Final, Generic, TypeVar

T = TypeVar("T", bound=Hashable)

SHARE: Final = 4
"""What clients share has this many parts: of places, memory and pipelines, one is kept for clients that have
none yet."""


class Places(Generic[T]):
    """Places that holders take and give back."""

    def __init__(self, places_max: int) -> None:
        self.places_max = places_max
        self.taken = 0
        """Places taken now."""
        self._holders: dict[Hashable, dict[T, Callable[[], object]]] = {}

    def __repr__(self) -> str:
        return f"<Places {self.taken} of {self.places_max} clients={len(self._holders)}>"

    def has_room(self, client: Hashable) -> bool:
        """Return whether a client may take another place without another holder losing one."""
        kept = self.places_max // SHARE if client in self._holders else 0
        return self.taken < self.places_max - kept

    def take(self, client: Hashable, holder: T, leave: Callable[[], object]) -> None:
        """Take a place. If there is none, the client with the most loses the one that it has held longest.

        :param leave: called when ``holder`` loses its place, which it then need not give back.
        """
        while self.taken >= self.places_max:
            self.free_one()
        self._holders.setdefault(client, {})[holder] = leave
        self.taken += 1

    def free_one(self) -> None:
        """Take from the client with the most places the one that it has held longest, if any is taken."""
        if not self._holders:
            return
        client = max(self._holders, key=lambda one: len(self._holders[one]))
        holder = next(iter(self._holders[client]))
        leave = self._holders[client][holder]
        self.give_back(client, holder)
        leave()

    def give_back(self, client: Hashable, holder: T) -> None:
        """Give a place back. Idempotent."""
        holders = self._holders.get(client)
        if holders is not None and holders.pop(holder, None) is not None:
            self.taken -= 1
            if not holders:
                del self._holders[client]
