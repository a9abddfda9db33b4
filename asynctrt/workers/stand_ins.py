"""Second workers on devices whose first worker has answered nothing for a while.

A batch may hang until the batch_timeout, and then its requests are tried apart. Other requests need not wait
for that: groups not yet launched go to a second worker, the spare if there is one, until the first accepts
requests again.
"""

import asyncio
import logging
from collections.abc import Callable
from functools import partial
from typing import Final, Protocol

from asynctrt.workers.link import Link
from asynctrt.workers.messages import Description

HOST: Final = "host"
"""The only device on which a second worker is started. Others may have no memory for it, or the first worker
may need the rest: there only the spare stands in."""

logger = logging.getLogger("asynctrt")


class StandInOwner(Protocol):
    """The part of the front that stand-ins use."""

    links: list[Link]

    def waits_for(self, link: Link) -> bool:
        """Return whether groups wait that the link does not work on."""

    def rescue(self, link: Link) -> None:
        """Move the groups that a link has not begun to others."""

    def link_lost(self) -> None:
        """Fail all requests if no link is left."""


class StandIns:
    """The second workers of a front.

    :param make: makes a link beside another one.
    :param timeout_s: how long a worker may take to close.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        front: StandInOwner,
        make: Callable[[Link], Link],
        timeout_s: float,
    ) -> None:
        self._loop = loop
        self._front = front
        self._make = make
        self._timeout_s = timeout_s
        self._of: dict[Link, Link] = {}
        # Links for which no stand-in could be started, until they accept requests again.
        self._in_vain: set[Link] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<StandIns {len(self._of)}>"

    def looked(self, link: Link) -> None:
        """Start, use or dismiss a link's stand-in. The link calls this periodically while it has a worker."""
        if link.is_stand_in:
            return
        stand_in = self._of.get(link)
        if link.takes and link.has_suspects:
            return  # It still tries suspects, and may hang again.
        if link.takes:
            self._in_vain.discard(link)
            if stand_in is not None:
                stand_in.is_leaving = True
                if not stand_in.groups:
                    self._dismiss(link, stand_in)
            return
        if not link.is_stuck or not self._front.waits_for(link):
            return
        if any(one.takes for one in self._front.links):
            self._front.rescue(link)
        elif stand_in is None and link not in self._in_vain:
            self._start(link)

    async def wait_closed(self) -> None:
        """Wait until dismissed stand-ins have ended."""
        if self._tasks:
            await asyncio.wait(self._tasks)

    def _start(self, link: Link) -> None:
        spare = link.give_spare()
        if spare is None and link.device != HOST:
            self._in_vain.add(link)
            return
        logger.warning("%r has stopped answering: a second worker takes its waiting requests for now", link)
        stand_in = self._of[link] = self._make(link)
        stand_in.is_stand_in = True
        stand_in.owner = link.owner
        self._front.links.append(stand_in)
        stand_in.first.add_done_callback(partial(self._started, link, stand_in))
        stand_in.start(spare)

    def _started(self, link: Link, stand_in: Link, first: "asyncio.Future[Description]") -> None:
        error = None if first.cancelled() else first.exception()
        if error is None or self._of.get(link) is not stand_in:
            return
        logger.warning("no second worker could be started on %s: %s", link.device, error)
        self._in_vain.add(link)
        self._dismiss(link, stand_in)
        self._front.link_lost()

    def _dismiss(self, link: Link, stand_in: Link) -> None:
        """End a stand-in that is no longer needed."""
        del self._of[link]
        self._front.links.remove(stand_in)
        task = self._loop.create_task(self._close(link, stand_in))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _close(self, link: Link, stand_in: Link) -> None:
        await stand_in.aclose(self._timeout_s)
        link.add_counts(stand_in)
