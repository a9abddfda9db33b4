"""The messages between a front and its worker, apart from rows: they are few, and go over a socket pair.

They are pickled, because both ends are one program: the front started the worker, and no other process has
an end of the socket.
"""

import asyncio
import os
import pickle
import socket
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

from asynctrt._util.forks import in_child, seal
from asynctrt.core.description import Description
from asynctrt.options import Options
from asynctrt.statistics import Statistics
from asynctrt.workers.tether import beyond_std

MESSAGE_NBYTES_MAX: Final = 128 << 10
ATTACH_FDS: Final = 4
"""The number of descriptors sent with an :class:`Attach`. Other messages have none."""


class Kind(IntEnum):
    """The kinds of entries in the rings."""

    # To the worker.
    SUBMIT = 1
    CANCEL = 2
    FETCH = 3
    """Write an answer that did not fit into its block into this larger one."""
    # To the front.
    ANSWER = 4
    ERROR = 5
    """The error's text is in the place of the outputs."""
    LARGE = 6
    """The answer or the error does not fit into the block."""
    GONE = 7
    """The group was cancelled. One ANSWER, ERROR or GONE follows each SUBMIT and releases its block."""


@dataclass(frozen=True, slots=True)
class Start:
    """To a new worker: open this model."""

    model: str
    device: str
    options: Options
    gpu_memory_nbytes: int | None
    """The limit of its GPU memory; ``None`` for no limit."""
    level: int
    """The lowest level of log records sent to the front."""


@dataclass(frozen=True, slots=True)
class Ready:
    """From a worker: the engine is open."""

    description: Description
    statistics: Statistics


@dataclass(frozen=True, slots=True)
class Failed:
    """From a worker: the engine could not be opened."""

    error: Exception
    is_hopeless: bool = False
    """Whether the next worker would fail as well, or callers have waited long enough."""


@dataclass(frozen=True, slots=True)
class Lost:
    """From a worker: it exits because nothing on its device can be trusted any more."""

    reason: str


@dataclass(frozen=True, slots=True)
class EngineCounts:
    """From a worker: its engine's statistics."""

    statistics: Statistics


@dataclass(frozen=True, slots=True)
class Record:
    """From a worker: a log record."""

    logger: str
    level: int
    text: str


@dataclass(frozen=True, slots=True)
class Attach:
    """To a worker, with four descriptors: heap, rings, the worker's eventfd and the front's."""

    heap_nbytes: int
    rings_nbytes: int
    number: int
    """The number for :class:`Detach`; 0 if the front does not share the worker."""
    capacity: int
    """The entries of each of the two rings: first the one read by the worker, then the front's."""


@dataclass(frozen=True, slots=True)
class Attached:
    """From a worker: whether it has mapped the memory of a front."""

    number: int
    """The number in the :class:`Attach`."""
    error: str
    """Why it could not; empty if it has."""


@dataclass(frozen=True, slots=True)
class Detach:
    """To a worker: a front has ended, or no longer needs it."""

    number: int


@dataclass(frozen=True, slots=True)
class Close:
    """To a worker: close the engine and exit. From one of several fronts: this front no longer needs it."""


# Between the fronts of a server and their parent, which owns the workers. A ticket is a front's id for one.


@dataclass(frozen=True, slots=True)
class Want:
    """From a front: a worker with this engine."""

    model: str
    """As :func:`asynctrt.open` takes it: a path, or ``module:attribute``."""
    device: str
    options: Options
    place: str
    """Which of the front's workers it is: two of one model on one device may differ in nothing else. Fronts
    that want the same one share it."""
    alone: bool = False
    """Whether no other front may share it, because it tries suspects of this front."""


@dataclass(frozen=True, slots=True)
class Kill:
    """From a front: kill the worker, because it hangs."""

    why: str


@dataclass(frozen=True, slots=True)
class To:
    """From a front: a message for a worker."""

    ticket: int
    message: Any


@dataclass(frozen=True, slots=True)
class From:
    """To a front: a message from a worker."""

    ticket: int
    pid: int
    message: Any


@dataclass(frozen=True, slots=True)
class Gone:
    """To a front: the worker has ended, or has detached the front."""

    ticket: int
    how: str


@dataclass(frozen=True, slots=True)
class Beat:
    """From a front, periodically: its event loop runs."""

    is_lost: bool
    """Whether one of its models has no worker that can run it now."""


@dataclass(frozen=True, slots=True)
class Stop:
    """To a front: finish accepted requests and exit."""

    at_once: bool
    """Whether to exit without finishing them."""


def send(end: socket.socket, message: Any, fds: Sequence[int] = (), flags: int = 0) -> None:
    """Send one message.

    :raises OSError: if the other end is gone, or with ``MSG_DONTWAIT`` if it does not read.
    """
    text = pickle.dumps(message)
    if len(text) > MESSAGE_NBYTES_MAX:
        raise ValueError(f"{type(message).__name__} has {len(text)} bytes; {MESSAGE_NBYTES_MAX} fit")
    # `socket.send_fds` would ignore the flags.
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
    end.sendmsg([text], rights, flags)


class Outbox:
    """A queue of messages to the other end of a socket. What the other end does not read now is sent later.

    :param end: the socket. Sending never blocks, even if the socket is a blocking one.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, end: socket.socket) -> None:
        self._loop = loop
        self._end = end
        self._unsent: deque[tuple[Any, tuple[int, ...]]] = deque()
        in_child(self, Outbox._let_go)

    def __repr__(self) -> str:
        return f"<Outbox unsent={len(self._unsent)}>"

    def _let_go(self) -> None:
        """Detach a forked child from the socket: it must neither send nor read in the parent's place."""
        self._unsent.clear()
        seal(self._end.fileno())

    @property
    def is_empty(self) -> bool:
        """Whether all messages were sent."""
        return not self._unsent

    def put(self, message: Any, fds: Sequence[int] = ()) -> None:
        """Send a message, later if the other end does not read now; drop it if the other end is gone.

        :param fds: descriptors to send with it. The caller may close them at once.
        """
        if not self._unsent and self._is_sent(message, fds):
            return
        self._unsent.append((message, tuple([os.dup(fd) for fd in fds])))
        if len(self._unsent) == 1:
            self._loop.add_writer(self._end.fileno(), self._send)

    def close(self) -> None:
        """Drop unsent messages. Idempotent; call it before closing the socket."""
        if self._unsent:
            self._loop.remove_writer(self._end.fileno())
        while self._unsent:
            _close_all(self._unsent.popleft()[1])

    def _send(self) -> None:
        while self._unsent and self._is_sent(*self._unsent[0]):
            _close_all(self._unsent.popleft()[1])
        if not self._unsent:
            self._loop.remove_writer(self._end.fileno())

    def _is_sent(self, message: Any, fds: Sequence[int]) -> bool:
        """Send a message; return whether it is done with: sent, or the other end is gone."""
        try:
            send(self._end, message, fds, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            pass  # The other end has died, which the reader of the socket notices.
        return True


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def receive(end: socket.socket, flags: int = 0) -> tuple[Any, list[int]]:
    """Return the next message and its descriptors; ``None`` when the other end is gone.

    :raises BlockingIOError: if there is none, and the socket does not block.
    """
    try:
        text, fds, _, _ = socket.recv_fds(end, MESSAGE_NBYTES_MAX, ATTACH_FDS, flags)
    except ConnectionError:
        return None, []
    if not text:
        return None, []
    return pickle.loads(text), fds  # noqa: S301  (from the other half of this program, see above)


def channel() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a new socket pair that keeps messages apart. A child may inherit one end."""
    first, second = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return socket.socket(fileno=beyond_std(first.detach())), socket.socket(fileno=beyond_std(second.detach()))
