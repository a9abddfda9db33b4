"""Tells from its heartbeats and answers whether a worker must be ended, or is stuck. Pure."""

from typing import Final

LOOK_S: Final = 0.5
"""How often a link looks at its worker."""

STUCK_S: Final = 2.0
"""If a worker that has groups has answered none for this long, other workers get them, if there are any."""

STUCK_FACTOR: Final = 4
"""The same limit as a multiple of the longest batch answered so far; the larger limit counts."""

SILENCE_S_MIN: Final = 0.9
"""A shorter silence means nothing, whatever the batch_timeout is."""


class Pulse:
    """Watch one worker after another.

    :param timeout_s: the batch_timeout, which is also how long an event loop may stand still.
    """

    def __init__(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s
        self.is_stuck = False
        """Whether it has answered nothing for so long that others take over its waiting groups."""
        self.longest_ns = 0
        """The time that the longest batch took."""
        self.looked_ns = 0
        """When it was last looked at."""
        # The heartbeat then, and for how long it has not changed.
        self._beat = 0
        self._silent_ns = 0
        # For how long it has had groups without answering any.
        self._waited_ns = 0
        self._has_answered = False

    def __repr__(self) -> str:
        return f"<Pulse silent={self._silent_ns / 1e9:.1f} s{' stuck' * self.is_stuck}>"

    def begin(self, now_ns: int) -> None:
        """Begin with another worker."""
        self.looked_ns, self._beat, self._silent_ns = now_ns, 0, 0
        self._waited_ns, self.is_stuck = 0, False

    def answered(self, took_ns: int) -> None:
        """Note that a batch was answered after this time."""
        self._has_answered, self.is_stuck = True, False
        self.longest_ns = max(self.longest_ns, took_ns)

    def looked(self, now_ns: int, beat: int, *, groups: int) -> str:
        """Return why the worker must be ended; an empty string if it need not.

        :param beat: when its event loop last ran.
        :param groups: how many groups it was given.
        """
        # If this process was stopped too (Ctrl-Z), it cannot know how long the worker was silent.
        seen_ns = min(now_ns - self.looked_ns, int(LOOK_S * 1e9))
        self._silent_ns = self._silent_ns + seen_ns if beat == self._beat else 0
        self.looked_ns, self._beat = now_ns, beat
        self._waited_ns = 0 if self._has_answered or not groups else self._waited_ns + seen_ns
        self._has_answered = False
        self.is_stuck = self._waited_ns > max(STUCK_S * 1e9, STUCK_FACTOR * self.longest_ns)
        limit_s = self._timeout_s
        if limit_s is not None and self._silent_ns > max(limit_s, SILENCE_S_MIN) * 1e9:
            silent_s = self._silent_ns / 1e9
            return f"its event loop had not run for {silent_s:.1f} s (batch_timeout is {limit_s:g} s)"
        return ""
