"""Which execution context and which arena a batch runs on."""

from collections.abc import Hashable
from typing import cast

SAME, NOTHING_RAN, OTHER_SHAPE, OTHER_PROFILE = range(4)
"""How a batch differs from the one before in a context, in the order in which contexts are taken."""


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
        self._groups = groups = max(arenas, 1)
        self._free = [list(reversed(range(group, contexts, groups))) for group in range(groups)]
        self._users = [0] * groups if arena_users is None else arena_users
        # The profile that each context last ran, and what it ran with it; and the context that last ran that.
        self._ran: dict[int, tuple[Hashable, Hashable]] = {}
        self._home: dict[tuple[Hashable, Hashable], int] = {}
        # When each last ran with a profile, counted in such batches.
        self._used: dict[int, int] = {}
        self._acquired = 0
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
        return {shape for shape, _ in self._sizes().values()}

    def sizes(self, shape: Hashable) -> tuple[list[int], bool]:
        """Return the sizes of a shape that free contexts ran last, and whether a busy one ran that shape.

        Profiles must be pairs of a shape and a size.
        """
        ran = {context: size for context, (its, size) in self._sizes().items() if its == shape}
        free = [size for context, size in ran.items() if self._is_free(context)]
        return free, len(free) < len(ran)

    def has_free(self, profile: Hashable) -> bool:
        """Return whether a free context last ran with a profile."""
        return any(its == profile and self._is_free(context) for context, (its, _) in self._ran.items())

    def acquire(self, profile: Hashable = None, run: Hashable = None) -> tuple[int, int | None]:
        """Take a context in the least used arena: without profiles, the one used last, because it is warm.

        With profiles, contexts that last ran the same come first: changing the shapes of a context takes
        time, and changing its profile takes more.

        :param run: the shape and the rows of the batch; ``None`` if no context has to change for it.
        :returns: the context and its arena.
        """
        if profile is None and self._groups == 1:
            context, group = self._free[0].pop(), 0
        else:
            context = self._find(profile, run)
            group = context % self._groups
            self._free[group].remove(context)
        self.free -= 1
        if profile is not None:
            self._note(context, (profile, run))
        if not self._arenas:
            return context, None
        self._users[group] += 1
        return context, group

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
        if arena is not None:
            self._users[arena] -= 1
            self.quarantine_arena(arena)

    def quarantine_arena(self, arena: int) -> None:
        """Never give out any context of this arena again. Idempotent."""
        free = self._free[arena]
        self.free -= len(free)
        free.clear()
        self.quarantined.update(range(arena, self._contexts, self._arenas))

    def _sizes(self) -> dict[int, tuple[Hashable, int]]:
        """Return the shape and size that each usable context ran last."""
        return {
            context: cast("tuple[Hashable, int]", profile)
            for context, (profile, _) in self._ran.items()
            if context not in self.quarantined
        }

    def _is_free(self, context: int) -> bool:
        return context in self._free[context % self._groups]

    def _note(self, context: int, ran: tuple[Hashable, Hashable]) -> None:
        """Note what a context runs next."""
        before = self._ran.get(context)
        if before is not None and self._home.get(before) == context:
            del self._home[before]
        self._ran[context] = ran
        self._home[ran] = context
        self._acquired += 1
        self._used[context] = self._acquired

    def _find(self, profile: Hashable, run: Hashable) -> int:
        """Return the free context for the next batch."""
        free, users = self._free, self._users
        home = self._home.get((profile, run))
        if home is not None and home in free[home % self._groups] and not users[home % self._groups]:
            return home  # No other context is better, which is usual.
        least = min(users[group] for group, contexts in enumerate(free) if contexts)
        groups = [group for group, contexts in enumerate(free) if contexts and users[group] == least]
        if profile is None:
            return free[groups[0]][-1]
        return min(
            (context for group in groups for context in reversed(free[group])),
            key=lambda context: self._cost(context, profile, run),
        )

    def _cost(self, context: int, profile: Hashable, run: Hashable) -> tuple[int, int]:
        """Return what a context would have to change for a batch, and when it was used: of equal ones, the
        one used least recently changes, since what it ran is rarely needed."""
        ran = self._ran.get(context)
        if ran is None:
            return NOTHING_RAN, 0
        used = self._used[context]
        if ran[0] != profile:
            return OTHER_PROFILE, used
        return (OTHER_SHAPE, used) if ran[1] != run else (SAME, -used)
