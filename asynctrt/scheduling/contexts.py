"""Which execution context and which arena a batch runs on."""

from collections.abc import Hashable
from typing import cast


class ContextAllocator:
    """Hands out contexts and arenas, as numbers: the runtime's pool holds the objects themselves.

    A context always works in the same arena (context modulo arenas), so what is bound or captured for one
    stays valid. Batches go to the arena with the fewest batches.

    :param arena_users: batches in flight in each arena; allocators of engines that share arenas share it.
    """

    def __init__(self, *, contexts: int, arenas: int, arena_users: list[int] | None = None) -> None:
        self._contexts = contexts
        self._arenas = arenas
        # Free contexts by arena, the one used last on top; a single list if there is no arena.
        groups = max(arenas, 1)
        self._free = [list(reversed(range(group, contexts, groups))) for group in range(groups)]
        self._users = [0] * arenas if arena_users is None else arena_users
        self._profiles: dict[int, Hashable] = {}
        # When each was last acquired with a profile, counted in acquisitions.
        self._used: dict[int, int] = {}
        self._acquired = 0
        # The context kept for the next batch, and the profile that this batch is expected to have.
        self._kept: tuple[int, Hashable] | None = None
        self.free = contexts
        """The number of free contexts."""
        self.quarantined: set[int] = set()

    def __repr__(self) -> str:
        return f"<ContextAllocator free={self.free} quarantined={len(self.quarantined)}>"

    @property
    def usable(self) -> int:
        """Return how many contexts are free or will be free again."""
        return self._contexts - len(self.quarantined)

    @property
    def shapes(self) -> set[Hashable]:
        """Return the shapes that contexts ran last. Profiles must be pairs of a shape and a size."""
        return {shape for shape, _ in self._sizes.values()}

    def sizes(self, shape: Hashable) -> tuple[list[int], bool]:
        """Return the sizes of a shape that free contexts ran last, and whether a busy one ran that shape.

        Profiles must be pairs of a shape and a size.
        """
        ran = {context: size for context, (its, size) in self._sizes.items() if its == shape}
        free = [size for context, size in ran.items() if self._is_free(context)]
        return free, len(free) < len(ran)

    def has_free(self, profile: Hashable) -> bool:
        """Return whether a free context last ran with a profile."""
        return any(its == profile and self._is_free(context) for context, its in self._profiles.items())

    @property
    def _sizes(self) -> dict[int, tuple[Hashable, int]]:
        return cast("dict[int, tuple[Hashable, int]]", self._profiles)

    def _is_free(self, context: int) -> bool:
        return any(context in contexts for contexts in self._free)

    def acquire(self, profile: Hashable = None) -> tuple[int, int | None]:
        """Take a context in the least used arena: the one used last, because it is warm.

        Contexts that last ran with the same ``profile`` come first, because changing the profile takes time.

        :returns: the context and its arena.
        """
        arena = None
        free = self._free[0]
        if self._arenas:
            arena = self._arena_for(profile)
            self._users[arena] += 1
            free = self._free[arena]
        kept, self._kept = self._kept, None
        if kept is not None and kept[1] == profile and kept[0] in free:
            context = kept[0]
            free.remove(context)
        elif profile is None:
            context = free.pop()
        else:
            context = self._with_profile(free, profile)
            free.remove(context)
        if profile is not None:
            self._profiles[context] = profile
            self._acquired += 1
            self._used[context] = self._acquired
        self.free -= 1
        return context, arena

    def keep(self, profile: Hashable = None) -> int | None:
        """Return the context that a batch with ``profile`` would get now; ``None`` if no context is free.

        The next batch with this profile gets it, if it is then still free and in the least used arena.
        """
        if not self.free:
            return None
        free = self._free[self._arena_for(profile) if self._arenas else 0]
        if self._kept is None or self._kept[1] != profile or self._kept[0] not in free:
            self._kept = free[-1] if profile is None else self._with_profile(free, profile), profile
        return self._kept[0]

    def release(self, context: int, arena: int | None) -> None:
        """Take back a context whose batch has ended."""
        if arena is not None:
            self._users[arena] -= 1
        if not self.quarantined or context not in self.quarantined:
            self._free[arena or 0].append(context)
            self.free += 1

    def quarantine(self, context: int, arena: int | None) -> None:
        """Never give out this context again, as its batch may still run.

        The same goes for all others in its arena: a batch there could wait forever for this one.
        """
        self.quarantined.add(context)
        self._profiles.pop(context, None)
        if arena is not None:
            self._users[arena] -= 1
            self.quarantine_arena(arena)

    def quarantine_arena(self, arena: int) -> None:
        """Never give out any context of this arena again. Idempotent."""
        free = self._free[arena]
        self.free -= len(free)
        free.clear()
        self.quarantined.update(range(arena, self._contexts, self._arenas))

    def _arena_for(self, profile: Hashable) -> int:
        """Return the least used arena with a free context.

        Of several, return one with a free context that last had this profile; if there is none, one with a
        context that had no profile yet; otherwise the one whose contexts were used least recently.
        """
        users, free = self._users, self._free
        least = min(users[arena] for arena, contexts in enumerate(free) if contexts)
        arenas = [arena for arena, contexts in enumerate(free) if contexts and users[arena] == least]
        if profile is None or len(arenas) == 1:
            return arenas[0]
        for wanted in (profile, None):
            for arena in arenas:
                if any(self._profiles.get(context) == wanted for context in free[arena]):
                    return arena
        return min(arenas, key=lambda arena: max(self._used.get(context, 0) for context in free[arena]))

    def _with_profile(self, free: list[int], profile: Hashable) -> int:
        """Return the free context to run a profile on: one that last had it, else one without a profile, else
        any."""
        for wanted in (profile, None):
            for context in reversed(free):
                if self._profiles.get(context) == wanted:
                    return context
        # The one used least recently: its profile is rarely needed.
        return free[0]
