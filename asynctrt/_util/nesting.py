"""Detect calls that would wait for themselves: from within a function's own run, directly or indirectly.

A run of a function holds a context of its engine until it returns. If it meanwhile waits for an answer of
that engine, the two may deadlock. So each run knows which engines it waits for, and a call from within a run
is refused if the called engine waits for the engine that the run belongs to.
"""

import asyncio
from typing import Any

from asynctrt.errors import UsageError


class Runs:
    """The active runs of one engine or of a pipeline's threads.

    :param name: the name of the engine or pipeline, for messages.
    """

    __slots__ = ("active", "name")

    def __init__(self, name: str) -> None:
        self.name = name
        self.active: dict[NestedRun, None] = {}
        """In the order of their start. Threads and event loops add and remove runs."""

    def __repr__(self) -> str:
        return f"<Runs of {self.name!r} active={len(self.active)}>"

    def awaited(self) -> "list[Runs]":
        """Return the engines and pipelines that the active runs wait for."""
        return [runs for run in self.active.copy() for runs in run.awaited()]


class NestedRun:
    """One run of a function, active until :meth:`end`.

    Its context holds the run, so tasks and threads that it starts belong to it too.

    Whether the run waits for a task that it started, as with ``asyncio.gather``, cannot be detected. So such
    a task counts as part of the run until the run is over, and is independent from then on.
    """

    __slots__ = ("_calls", "_runs", "is_over")

    def __init__(self, runs: Runs) -> None:
        self._runs = runs
        self._calls: dict[asyncio.Future[Any], Runs] = {}
        self.is_over = False
        runs.active[self] = None

    def __repr__(self) -> str:
        return f"<Run of {self._runs.name!r} {'over' if self.is_over else 'under way'}>"

    def end(self) -> None:
        """Mark the run as over. Idempotent."""
        self.is_over = True
        self._runs.active.pop(self, None)

    def check(self, asked: Runs) -> None:
        """Check that the engine or pipeline to call does not wait for this run.

        :raises UsageError: if it does.
        """
        way = _way(asked, self._runs)
        if not way:
            return
        names = " → ".join(repr(runs.name) for runs in (self._runs, *way))
        raise UsageError(
            f"this call of {asked.name!r} would wait for itself ({names}): it comes from within a run that "
            "ends only when it has the answer, and that has to end first. Call the function without its "
            "engine (of @asynctrt.batch: its __wrapped__), or after the run. A task that the run does not "
            "wait for may call it in a separate context: "
            "asyncio.create_task(call, context=contextvars.Context())"
        )

    def wait_for(self, asked: Runs, answer: "asyncio.Future[Any]") -> None:
        """Record that the run waits for an answer."""
        self._calls[answer] = asked
        answer.add_done_callback(self._answered)

    def awaited(self) -> list[Runs]:
        """Return the engines and pipelines that the run waits for."""
        return [asked for answer, asked in self._calls.copy().items() if not answer.done()]

    def _answered(self, answer: "asyncio.Future[Any]") -> None:
        self._calls.pop(answer, None)


def _way(start: Runs, goal: Runs) -> list[Runs]:
    """Return the chain of waits from ``start`` to ``goal``, both included; empty if there is none."""
    came_from: dict[Runs, Runs | None] = {start: None}
    left = [start]
    while left:
        runs = left.pop()
        if runs is goal:
            way = [runs]
            while (before := came_from[way[0]]) is not None:
                way.insert(0, before)
            return way
        for further in runs.awaited():
            if further not in came_from:
                came_from[further] = runs
                left.append(further)
    return []
