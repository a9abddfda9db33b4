"""Handle objects that a forked child inherits but cannot use: threads, event loops, sockets, shared memory.

A fork copies only the thread that forks, and only the parent hears from its threads, timers and workers. File
descriptors and shared memory are shared, not copied: what the child does to them affects the parent. So each
owner of such an object refuses to work in a child, and lets go of what the parent still uses.
"""

import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary

from asynctrt.errors import UsageError

T = TypeVar("T")

_INHERITED: Final[WeakKeyDictionary[Any, Callable[[Any], object]]] = WeakKeyDictionary()
"""The function to call in a forked child for each object that has to let go of something there."""


class Origin:
    """The process that an object was made in, which is the only one that can use it."""

    __slots__ = ("_pid",)

    def __init__(self) -> None:
        self._pid = os.getpid()

    def __repr__(self) -> str:
        return f"<Origin {self._pid}>"

    @property
    def is_here(self) -> bool:
        """Return whether it is the current process."""
        return self._pid == os.getpid()

    def check(self, what: object) -> None:
        """Check that the current process is the one that made the object.

        :param what: the object, for the message.
        :raises UsageError: in a forked process.
        """
        if not self.is_here:
            raise UsageError(
                f"{what} was made in process {self._pid} and is used in process {os.getpid()}, which was "
                "forked from it: its threads, connections and memory are the first one's. Make it anew in "
                "the new process, or start that with multiprocessing's start method 'spawn'"
            )


def in_child(thing: T, let_go: Callable[[T], object]) -> None:
    """Call ``let_go(thing)`` in each process that is forked while the object exists.

    ``let_go`` must not wait or take a lock, which another thread of the parent may have held.
    """
    _INHERITED[thing] = let_go


def seal(fd: int) -> None:
    """Replace a file descriptor that this process inherited from its parent.

    Its number stays in use, so that using it or closing it later does no harm.
    """
    if fd < 0:
        return
    try:
        other = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    except OSError:
        os.close(fd)  # No file descriptors are left.
        return
    os.dup2(other, fd, inheritable=False)
    os.close(other)


def _let_go() -> None:
    with ExitStack() as stack:  # If one raises, the others are still called.
        for thing, let_go in list(_INHERITED.items()):
            stack.callback(let_go, thing)


os.register_at_fork(after_in_child=_let_go)
