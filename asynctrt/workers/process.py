"""A child process with a channel for messages: a worker of a front, or a front of a server's parent."""

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import weakref
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any, Final

from asynctrt._util.forks import in_child, seal
from asynctrt._util.loops import in_thread
from asynctrt._util.process import child_command
from asynctrt._util.version import __version__
from asynctrt.core.loading import gpu_memory_limit
from asynctrt.errors import DeviceUnavailableError
from asynctrt.workers.messages import Outbox, Record, Start, Want, channel, receive, send
from asynctrt.workers.tether import Tether

logger = logging.getLogger("asynctrt")

Hear = Callable[[Any, list[int]], object]
"""Called with a message and the file descriptors that came with it."""


class ChildProcess:
    """A child process, which ends with this one at the latest.

    :param hear: called with each message. It closes the descriptors.
    :param died: called once, when the process has ended, with a description: ``ended by SIGSEGV``.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        process: "subprocess.Popen[bytes]",
        end: socket.socket,
        tether: Tether,
        hear: Hear,
        died: Callable[[str], object],
    ) -> None:
        self._loop = loop
        self._process = process
        self._end = end
        self._tether = tether
        self._hear = hear
        self._died = died
        self.how_it_ended = ""
        """Empty while it runs."""
        self.outbox = Outbox(loop, end)
        self._pidfd = os.pidfd_open(process.pid)
        # Closes the descriptor with the last reference, in case the loop is closed before the process ends.
        self._close_pidfd = weakref.finalize(self, os.close, self._pidfd)
        in_child(self, ChildProcess._let_go)
        loop.add_reader(self._pidfd, self._ended)
        loop.add_reader(end.fileno(), self._readable)

    def __repr__(self) -> str:
        return f"<ChildProcess {self.pid} {self.how_it_ended or 'runs'}>"

    def _let_go(self) -> None:
        """Detach a forked child from the process, which is the parent's: neither read from it nor end it."""
        if not self.how_it_ended:
            self.how_it_ended = "belongs to the process that this one was forked from"
            seal(self._pidfd)

    @classmethod
    async def start(
        cls,
        module: str,
        first: Any,
        hear: Hear,
        died: Callable[[str], object],
        *,
        fds: Sequence[int] = (),
        own_session: bool = False,
    ) -> "ChildProcess":
        """Start a process that runs ``main`` of a module, with its end of the channel and our version.

        :param first: its first message, with the descriptors ``fds``.
        :param own_session: whether Ctrl-C in a terminal reaches only this process, which tells the child.
            Otherwise the child has :data:`UNHEARD` blocked until it can ignore them.
        :raises OSError: if the system refuses another process.
        """
        with ExitStack() as undo:
            own, its = channel()
            undo.callback(own.close)
            tether = Tether()
            undo.callback(tether.close)
            with its:
                process = await in_thread(
                    lambda: _spawn(module, its, tether, own_session=own_session), undo=_kill
                )
            undo.callback(_kill, process)
            tether.hold(process.pid)
            send(own, first, fds)
            own.settimeout(0)
            child = cls(asyncio.get_running_loop(), process, own, tether, hear, died)
            undo.pop_all()
        return child

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._process.pid

    def send(self, message: Any, fds: Sequence[int] = ()) -> None:
        """Send a message. A no-op once the process has ended."""
        if not self.how_it_ended:
            self.outbox.put(message, fds)

    def kill(self, _why: str = "") -> None:
        """Kill it with SIGKILL. ``died`` is called when it has ended."""
        if not self.how_it_ended:
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def _readable(self) -> None:
        while not self.how_it_ended:
            try:
                message, fds = receive(self._end)
            except BlockingIOError:
                return
            if message is None:
                self._loop.remove_reader(self._end.fileno())
                return
            self._hear(message, fds)

    def _ended(self) -> None:
        if self.how_it_ended or self._process.poll() is None:
            return
        # Read its last messages first: they may say why it ended.
        self._readable()
        self.how_it_ended = how_it_ended(self._process.returncode)
        self._loop.remove_reader(self._pidfd)
        self._loop.remove_reader(self._end.fileno())
        self._close_pidfd()
        self.outbox.close()
        self._end.close()
        self._tether.close()
        self._died(self.how_it_ended)


def first_message() -> tuple[socket.socket, Any, list[int]]:
    """Return the socket of this child process, and its parent's first message with its descriptors.

    The process ends if the parent has gone, or runs another version of the package, which was replaced
    meanwhile: the two would not understand each other.
    """
    number, version = sys.argv[1:]
    if version != __version__:
        sys.exit(f"asynctrt {__version__} is installed now, and its parent runs {version}: start it again")
    end = socket.socket(fileno=int(number))
    message, fds = receive(end)
    if message is None:
        sys.exit()
    return end, message, fds


async def start_worker(
    want: Want, hear: Callable[[Any], object], died: Callable[[str], object]
) -> ChildProcess:
    """Start a process that opens this engine.

    :param hear: called with each message, also with the outcome. Log records go to the log instead.
    :raises DeviceUnavailableError: if the system refuses another process.
    """

    def heard(message: Any, _: list[int]) -> None:
        if isinstance(message, Record):
            logging.getLogger(message.logger).log(message.level, "%s", message.text)
        else:
            hear(message)

    level = logger.getEffectiveLevel()
    start = Start(want.model, want.device, want.options, gpu_memory_limit(), level)
    try:
        return await ChildProcess.start("asynctrt.workers.child", start, heard, died)
    except OSError as error:
        raise DeviceUnavailableError(
            f"no process for a worker could be started: {error.strerror}. Look at the limits of processes "
            "and open files (ulimit -u, ulimit -n)"
        ) from error


UNHEARD: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals sent to every process of a terminal or a service. Workers ignore them and follow their front."""


def _spawn(
    module: str, its: socket.socket, tether: Tether, *, own_session: bool
) -> "subprocess.Popen[bytes]":
    number = its.fileno()
    command = child_command(module, str(number), __version__)
    fds = [number, tether.child_end]
    # In a child without these streams, the next opened descriptors would take their place.
    stdout = None if sys.__stdout__ is not None else subprocess.DEVNULL
    stderr = None if sys.__stderr__ is not None else subprocess.DEVNULL
    # A child inherits the signal mask of the thread that makes it. A worker ignores these signals once it
    # runs; before that they would end it with the traceback of an import.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, () if own_session else UNHEARD)
    try:
        return subprocess.Popen(  # noqa: S603  (itself)
            command,
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            pass_fds=fds,
            start_new_session=own_session,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _kill(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()


def how_it_ended(status: int) -> str:
    """Return a description of a process's end, given the ``returncode`` of its ``Popen``."""
    if status >= 0:
        return f"ended with status {status}"
    try:
        return f"ended by {signal.Signals(-status).name}"
    except ValueError:
        return f"ended by signal {-status}"
