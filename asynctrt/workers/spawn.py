"""The sources of a link's workers: it starts them, or shares them with the other fronts of a server."""

import asyncio
import socket
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, Final

from asynctrt.errors import DeviceUnavailableError
from asynctrt.workers.messages import Beat, From, Gone, Kill, Outbox, Stop, To, Want, receive
from asynctrt.workers.process import ChildProcess, start_worker

ORPHANED: Final = "the server's parent process is gone"


class OwnWorkers:
    """A source of workers: it starts each one as a child of this process."""

    is_shared = False
    """Whether a worker may have other fronts. If so, the source manages spares."""

    async def start(
        self, want: Want, hear: Callable[[Any], None], died: Callable[[str], None]
    ) -> "WorkerHandle":
        """Return a worker that opens this engine.

        :param hear: called with its messages.
        :param died: called once, with a description of how it ended.
        :raises DeviceUnavailableError: if no further process can be started.
        """
        return await start_worker(want, hear, died)


class SharedWorker:
    """A worker that the server's parent process has started for this front and possibly others.

    It has the methods and attributes of :class:`ChildProcess` that a link uses.
    """

    def __init__(
        self,
        ticket: int,
        tell: Callable[[int, Any, Sequence[int]], None],
        hear: Callable[[Any], None],
        died: Callable[[str], None],
    ) -> None:
        self._ticket = ticket
        self._tell = tell
        self.hear = hear
        self.died = died
        self.pid: int | None = None
        self.how_it_ended = ""

    def __repr__(self) -> str:
        return f"<SharedWorker {self.pid} {self.how_it_ended or 'runs'}>"

    def send(self, message: Any, fds: Sequence[int] = ()) -> None:
        """Send it a message through the parent."""
        if not self.how_it_ended:
            self._tell(self._ticket, message, fds)

    def kill(self, why: str = "") -> None:
        """Ask the parent to end it, for all fronts."""
        self.send(Kill(why))


WorkerHandle = ChildProcess | SharedWorker


class SharedWorkers(OwnWorkers):
    """A source of workers that asks the server's parent process for them.

    :param end: the socket to the parent.
    :param hear: called with the parent's messages that are not about workers, and their descriptors; with a
        :class:`Stop` when the parent is gone.
    """

    is_shared = True

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        end: socket.socket,
        hear: Callable[[Any, list[int]], None],
    ) -> None:
        self._loop = loop
        self._end = end
        self._hear = hear
        self._workers: dict[int, SharedWorker] = {}
        self._last_ticket = 0
        self._is_orphaned = False
        self._outbox = Outbox(loop, end)
        loop.add_reader(end.fileno(), self._readable)

    async def start(
        self, want: Want, hear: Callable[[Any], None], died: Callable[[str], None]
    ) -> WorkerHandle:
        if self._is_orphaned:
            raise DeviceUnavailableError(f"no worker can be started: {ORPHANED}")
        self._last_ticket += 1
        worker = SharedWorker(self._last_ticket, self._tell, hear, died)
        self._workers[self._last_ticket] = worker
        self._tell(self._last_ticket, want)
        return worker

    def beat(self, *, is_lost: bool) -> None:
        """Show the parent that the event loop runs.

        :param is_lost: whether one of the models has no worker that can run it now.
        """
        # If earlier messages are unsent, the parent does not read: another heartbeat would be useless.
        if self._outbox.is_empty:
            self.send(Beat(is_lost))

    def send(self, message: Any, fds: Sequence[int] = ()) -> None:
        """Send the parent a message that is not about a worker."""
        if not self._is_orphaned:
            self._outbox.put(message, fds)

    def close(self) -> None:
        """Stop reading and sending."""
        self._loop.remove_reader(self._end.fileno())
        self._outbox.close()

    def _tell(self, ticket: int, message: Any, fds: Sequence[int] = ()) -> None:
        self._outbox.put(To(ticket, message), fds)

    def _readable(self) -> None:
        while True:
            try:
                message, fds = receive(self._end)
            except BlockingIOError:
                return
            if message is None:
                # Workers end with the parent.
                self._is_orphaned = True
                self.close()
                for ticket in list(self._workers):
                    self._gone(Gone(ticket, f"ended: {ORPHANED}"))
                self._hear(Stop(at_once=True), [])
                return
            if isinstance(message, Gone):
                self._gone(message)
            elif not isinstance(message, From):
                self._hear(message, fds)
            elif (worker := self._workers.get(message.ticket)) is not None:
                worker.pid = message.pid
                worker.hear(message.message)

    def _gone(self, message: Gone) -> None:
        worker = self._workers.pop(message.ticket, None)
        if worker is not None:
            worker.how_it_ended = message.how
            worker.died(message.how)


SPAWNER: ContextVar[OwnWorkers] = ContextVar("SPAWNER", default=OwnWorkers())  # noqa: B039  (it has no state)
"""The source of workers for engines opened in this context."""
