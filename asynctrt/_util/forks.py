"""What a process has of its parent after a fork and cannot use: threads, event loops, sockets, shared memory.

Of all threads a fork copies only its own, and what threads, timers and workers tell reaches the parent alone.
Descriptors and shared memory are not copied: what the child does with them happens to its parent. So whatever
holds one of these says in a child whose it is, and lets go of what the parent still uses.
"""

import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Final, TypeVar
from weakref import WeakKeyDictionary

from asynctrt.errors import UsageError

T = TypeVar("T")

_INHERITED: Final[WeakKeyDictionary[Any, Callable[[Any], object]]] = WeakKeyDictionary()
"""What to call in a child that was forked, for each object that has something to let go of there."""


class Origin:
    """The process that something was made in, which is the only one that can use it."""

    __slots__ = ("_pid",)

    def __init__(self) -> None:
        self._pid = os.getpid()

    def __repr__(self) -> str:
        return f"<Origin {self._pid}>"

    @property
    def is_here(self) -> bool:
        """Return whether that is this process."""
        return self._pid == os.getpid()

    def check(self, what: object) -> None:
        """Check that this is the process.

        :param what: what was made there, for the message.
        :raises UsageError: in a process that was forked since.
        """
        if not self.is_here:
            raise UsageError(
                f"{what} was made in process {self._pid} and is used in process {os.getpid()}, which was "
                "forked from it: its threads, connections and memory are the first one's. Make it anew in "
                "the new process, or start that with multiprocessing's start method 'spawn'"
            )


def in_child(thing: T, let_go: Callable[[T], object]) -> None:
    """Have ``let_go(thing)`` called in each process that is forked while the object exists.

    It must neither wait nor take a lock, which another thread of the parent may have had.
    """
    _INHERITED[thing] = let_go


def seal(fd: int) -> None:
    """Put something else in the place of a descriptor that this process has of its parent.

    Its number stays taken, so that whoever still uses it or closes it does no harm.
    """
    if fd < 0:
        return
    try:
        if hasattr(os, "eventfd"):
            other = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        else:
            other = os.open(os.devnull, os.O_RDWR)
    except OSError:
        os.close(fd)  # There are no descriptors left.
        return
    os.dup2(other, fd, inheritable=False)
    os.close(other)


def _let_go() -> None:
    with ExitStack() as stack:  # What one raises keeps no other from it.
        for thing, let_go in list(_INHERITED.items()):
            stack.callback(let_go, thing)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go)
