"""What a front and its worker tell each other besides rows: few messages, over a socket pair.

They are pickled, since both ends are one program: the worker was started by the front, and nobody else has an
end of the socket.
"""

import asyncio
import fcntl
import os
import pickle
import socket
from array import array
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

from asynctrt.forks import in_child, seal
from asynctrt.options import Options
from asynctrt.statistics import TRUSTED, Batching, Statistics
from asynctrt.tensors import TensorSpec

MESSAGE_NBYTES_MAX: Final = 128 << 10
FDS_MAX: Final = 8
ATTACH_FDS: Final = 4
"""The descriptors that come with an :class:`Attach`."""
STDERR_FILENO: Final = 2


class Kind(IntEnum):
    """The kinds of entries in the rings."""

    # To the worker.
    SUBMIT = 1
    CANCEL = 2
    FETCH = 3
    """Write what did not fit into its block into this larger one."""
    # To the front.
    ANSWER = 4
    ERROR = 5
    """The text lies where the outputs would."""
    LARGE = 6
    """The answer or the error does not fit into the block."""
    GONE = 7
    """It was cancelled. Each SUBMIT is followed by one ANSWER, ERROR or GONE, which gives its block back."""


@dataclass(frozen=True, slots=True)
class Start:
    """To a new worker: what to open."""

    model: str
    device: str
    options: Options
    gpu_memory_nbytes: int | None
    """What it may hold on its GPU; ``None``: what there is."""
    level: int
    """From which level on log records are sent to the front."""


@dataclass(frozen=True, slots=True)
class Description:
    """What a front must know of the engine in its worker."""

    name: str
    platform: str
    device_name: str
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    max_rows: int
    contexts: int
    parallel_batches: int
    """Batches that may compute side by side."""
    is_unified: bool = True
    """Whether its device works in the host's memory."""
    batching: Batching = TRUSTED
    """Whether rows of different requests share batches, and why."""
    files: tuple[tuple[str, str], ...] = ()
    """The model's files, each with the SHA-256 of what was opened."""
    versions: tuple[tuple[str, str], ...] = ()
    """The packages that it computes with, each with its version."""


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
    """Whether the next one would fail as well, or callers have waited for long enough."""


@dataclass(frozen=True, slots=True)
class Lost:
    """From a worker: nothing on its device can be trusted any more, and so it ends."""

    reason: str


@dataclass(frozen=True, slots=True)
class Counts:
    """From a worker: what its engine has done."""

    statistics: Statistics


@dataclass(frozen=True, slots=True)
class Record:
    """From a worker: a record for the log."""

    logger: str
    level: int
    text: str


@dataclass(frozen=True, slots=True)
class Attach:
    """To a worker, with four descriptors: heap, rings, the worker's eventfd and the front's."""

    heap_nbytes: int
    rings_nbytes: int
    number: int
    """By which it is detached; 0 for a front that has the worker to itself."""
    capacity: int
    """Entries of each of the two rings: first the worker's, then the front's."""


@dataclass(frozen=True, slots=True)
class Attached:
    """From a worker: whether it has the memory of a front."""

    number: int
    """That of its :class:`Attach`."""
    error: str
    """Why not; empty if it has."""


@dataclass(frozen=True, slots=True)
class Detach:
    """To a worker: a front is gone, or wants nothing more."""

    number: int


@dataclass(frozen=True, slots=True)
class Close:
    """To a worker: close the engine, and end. From one of several fronts: it wants nothing more."""


# Between the fronts of a server and their parent, which has the workers. A ticket is a front's word for one.


@dataclass(frozen=True, slots=True)
class Want:
    """From a front: a worker with this engine."""

    model: str
    device: str
    options: Options
    place: str
    """Which of the workers of a front it is, as two of one model on one device may differ in nothing else.
    Fronts that want the same share it."""
    alone: bool
    """Whether no other front may have it."""


@dataclass(frozen=True, slots=True)
class Kill:
    """From a front: the worker hangs."""

    why: str


@dataclass(frozen=True, slots=True)
class To:
    """From a front: something for a worker."""

    ticket: int
    message: Any


@dataclass(frozen=True, slots=True)
class From:
    """To a front: what a worker said."""

    ticket: int
    pid: int
    message: Any


@dataclass(frozen=True, slots=True)
class Gone:
    """To a front: the worker has ended, or has let go of the front."""

    ticket: int
    how: str


@dataclass(frozen=True, slots=True)
class Beat:
    """From a front, again and again: its event loop runs."""

    is_lost: bool
    """Whether nothing can run one of its models now."""


@dataclass(frozen=True, slots=True)
class Stop:
    """To a front: answer what was taken, and end."""

    at_once: bool
    """Whether to answer nothing more."""


def send(end: socket.socket, message: Any, fds: Sequence[int] = (), flags: int = 0) -> None:
    """Send one message.

    :raises OSError: if the other end is gone, or with ``MSG_DONTWAIT`` if it does not read.
    """
    text = pickle.dumps(message)
    if len(text) > MESSAGE_NBYTES_MAX:
        raise ValueError(f"{type(message).__name__} has {len(text)} bytes; {MESSAGE_NBYTES_MAX} fit")
    # Not by `socket.send_fds`, which ignores the flags.
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
    end.sendmsg([text], rights, flags)


class Outbox:
    """Messages for the other end of a socket. What it does not read at once is sent later, in order.

    :param end: the socket, which does not block, or is sent to as if it did not.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, end: socket.socket) -> None:
        self._loop = loop
        self._end = end
        self._unsent: deque[tuple[Any, tuple[int, ...]]] = deque()
        in_child(self, Outbox._let_go)

    def __repr__(self) -> str:
        return f"<Outbox unsent={len(self._unsent)}>"

    def _let_go(self) -> None:
        """In a child that was forked: say nothing in the parent's name, and read nothing that is for it."""
        self._unsent.clear()
        seal(self._end.fileno())

    @property
    def is_empty(self) -> bool:
        """Whether everything was sent."""
        return not self._unsent

    def put(self, message: Any, fds: Sequence[int] = ()) -> None:
        """Send a message, later if the other end does not read now; nothing if it is gone.

        :param fds: descriptors that go with it, which the caller may close at once.
        """
        if not self._unsent and self._is_sent(message, fds):
            return
        self._unsent.append((message, tuple([os.dup(fd) for fd in fds])))
        if len(self._unsent) == 1:
            self._loop.add_writer(self._end.fileno(), self._send)

    def close(self) -> None:
        """Send nothing more. Idempotent; before the socket is closed."""
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
        """Send a message, and say whether the other end has room for it, or is gone."""
        try:
            send(self._end, message, fds, socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            pass  # It has died, which is seen by who reads from it.
        return True


def _close_all(fds: Sequence[int]) -> None:
    for fd in fds:
        os.close(fd)


def receive(end: socket.socket, flags: int = 0) -> tuple[Any, list[int]]:
    """Return the next message and its descriptors; ``None`` when the other end is gone.

    :raises BlockingIOError: if there is none, and the socket does not block.
    """
    try:
        text, fds, _, _ = socket.recv_fds(end, MESSAGE_NBYTES_MAX, FDS_MAX, flags)
    except ConnectionError:
        return None, []
    if not text:
        return None, []
    return pickle.loads(text), fds  # noqa: S301  (from the other half of this program, see above)


def channel() -> tuple[socket.socket, socket.socket]:
    """Return both ends of a new socket pair that keeps messages apart, for a child to have one of."""
    first, second = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    return _beyond_std(first), _beyond_std(second)


def _beyond_std(end: socket.socket) -> socket.socket:
    """Return the socket with a descriptor that is no child's standard stream.

    A process that began without standard streams (a daemon) has the descriptors 0 to 2 for anything.
    """
    if end.fileno() > STDERR_FILENO:
        return end
    with end:
        return socket.socket(fileno=fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, STDERR_FILENO + 1))
