"""Where a link has its workers from: it starts them, or shares them with the other fronts of a server."""

import asyncio
import socket
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from typing import Any, Final, Protocol

from asynctrt.errors import DeviceUnavailableError
from asynctrt.options import Options
from asynctrt.workers.messages import Beat, Gone, Kill, Outbox, Stop, To, Want, receive
from asynctrt.workers.process import WorkerProcess

ORPHANED: Final = "the server's parent process is gone"


class Worker(Protocol):
    """A worker, as a link has it."""

    @property
    def pid(self) -> int | None:
        """The id of its process, once that is known."""

    @property
    def how_it_ended(self) -> str:
        """Empty while it runs, or while it is used."""

    def send(self, message: Any, fds: Sequence[int] = ()) -> None:
        """Send a message."""

    def kill(self, why: str = "") -> None:
        """End it at once.

        :param why: for the log, if others have it, too.
        """


class Spawner(Protocol):
    """Gives workers."""

    is_shared: bool
    """Whether a worker may have other fronts, and spares are somebody else's business."""

    async def start(
        self,
        model: str,
        device: str,
        options: Options,
        hear: Callable[[Any], None],
        died: Callable[[str], None],
        *,
        place: str,
        alone: bool,
    ) -> Worker:
        """Return a worker that opens this engine.

        :param hear: called with its messages.
        :param died: called once, with how it ended.
        :param place: which of the workers of this process it is.
        :param alone: whether no other front may have it.
        :raises DeviceUnavailableError: if there cannot be another process.
        """


class OwnWorkers:
    """Starts each worker as a child of this process."""

    is_shared = False

    async def start(
        self,
        model: str,
        device: str,
        options: Options,
        hear: Callable[[Any], None],
        died: Callable[[str], None],
        *,
        place: str,
        alone: bool,
    ) -> Worker:
        return await WorkerProcess.start(model, device, options, hear, died)


class SharedWorker:
    """A worker that the server's parent process has started, for this front among others."""

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
        """Send it a message, by way of the parent."""
        if not self.how_it_ended:
            self._tell(self._ticket, message, fds)

    def kill(self, why: str = "") -> None:
        """Have it ended, for all fronts."""
        self.send(Kill(why))


class SharedWorkers:
    """Asks the server's parent process for workers.

    :param end: the socket to it.
    :param orphaned: called when the parent is gone.
    :param stop: called with ``at_once`` when it wants this process to end.
    """

    is_shared = True

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        end: socket.socket,
        orphaned: Callable[[], None],
        stop: Callable[..., None],
    ) -> None:
        self._loop = loop
        self._end = end
        self._orphaned = orphaned
        self._stop = stop
        self._workers: dict[int, SharedWorker] = {}
        self._last_ticket = 0
        self._is_orphaned = False
        self._outbox = Outbox(loop, end)
        loop.add_reader(end.fileno(), self._readable)

    async def start(
        self,
        model: str,
        device: str,
        options: Options,
        hear: Callable[[Any], None],
        died: Callable[[str], None],
        *,
        place: str,
        alone: bool,
    ) -> Worker:
        if self._is_orphaned:
            raise DeviceUnavailableError(f"no worker can be started: {ORPHANED}")
        self._last_ticket += 1
        worker = SharedWorker(self._last_ticket, self._tell, hear, died)
        self._workers[self._last_ticket] = worker
        self._tell(self._last_ticket, Want(model, device, options, place, alone))
        return worker

    def beat(self, *, is_lost: bool) -> None:
        """Show the parent that the event loop runs.

        :param is_lost: whether nothing can run one of the models now.
        """
        if self._outbox.is_empty and not self._is_orphaned:  # Else it does not read, and looks at none.
            self._outbox.put(Beat(is_lost))

    def close(self) -> None:
        """Read and send no more."""
        self._loop.remove_reader(self._end.fileno())
        self._outbox.close()

    def _tell(self, ticket: int, message: Any, fds: Sequence[int] = ()) -> None:
        self._outbox.put(To(ticket, message), fds)

    def _readable(self) -> None:
        while True:
            try:
                message, _ = receive(self._end)
            except BlockingIOError:
                return
            if message is None:
                # Workers end with the parent.
                self._is_orphaned = True
                self.close()
                for ticket in list(self._workers):
                    self._gone(Gone(ticket, f"ended: {ORPHANED}"))
                self._orphaned()
                return
            if isinstance(message, Stop):
                self._stop(at_once=message.at_once)
                continue
            worker = self._workers.get(message.ticket)
            if isinstance(message, Gone):
                self._gone(message)
            elif worker is not None:
                worker.pid = message.pid
                worker.hear(message.message)

    def _gone(self, message: Gone) -> None:
        worker = self._workers.pop(message.ticket, None)
        if worker is not None:
            worker.how_it_ended = message.how
            worker.died(message.how)


SPAWNER: ContextVar[Spawner | None] = ContextVar("SPAWNER", default=None)
"""Where engines that are opened in this context have their workers from; ``None``: from themselves."""
