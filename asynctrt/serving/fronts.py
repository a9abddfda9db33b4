"""``asynctrt serve --fronts N``: several server processes on one port, and the workers that they share.

This is their parent. It listens nowhere but at the port for metrics: it starts fronts and workers, starts
again what has died, and hands on signals. :mod:`asynctrt.serving.front` is a front.
"""

import asyncio
import logging
import os
import signal
import socket
import subprocess
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from asynctrt import clock
from asynctrt.errors import AsynctrtError, UsageError
from asynctrt.loading import limit_gpu_memory
from asynctrt.loops import in_thread
from asynctrt.process import child_command
from asynctrt.serving import command
from asynctrt.serving.api import Answer, Headers, Page
from asynctrt.serving.command import ServeConfig
from asynctrt.serving.grpc_server import reason_of
from asynctrt.serving.http import Hub
from asynctrt.serving.metrics import merged_answer
from asynctrt.serving.monitoring import open_pages
from asynctrt.serving.server_log import set_up_logging
from asynctrt.version import __version__
from asynctrt.workers.messages import To, channel, receive, send
from asynctrt.workers.pool import WorkerPool
from asynctrt.workers.process import how_it_ended

PAUSE_S: Final = 0.2
"""The pause before a front is started again that died soon; it doubles with each further one. There is none
after one that has served for a while."""
PAUSE_S_MAX: Final = 5.0
SOON_NS: Final = 2_000_000_000
"""Who has served for longer did not die of how it starts."""
SPARE_S: Final = 5.0
"""How much longer than their drain_timeout fronts may take to stop."""
SCRAPE_S: Final = 5.0
"""How long a front may take to tell its metrics."""
LENGTH: Final = 8

logger = logging.getLogger("asynctrt.serving")


@dataclass(frozen=True, slots=True)
class Begin:
    """To a new front: what to serve."""

    config: ServeConfig
    is_replacement: bool
    """Whether others answer at its port while it loads its models, so that it need not listen yet: what it
    accepted would be told to come again."""


@dataclass(frozen=True, slots=True)
class Serving:
    """From a front: it answers, and its models are ready."""

    lines: tuple[str, ...]
    """What there is to tell about it."""


@dataclass(frozen=True, slots=True)
class Refused:
    """From a front: why it cannot serve."""

    error: AsynctrtError


class Front:
    """One front, over all the processes that it has had."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.process: subprocess.Popen[bytes] | None = None
        self.end: socket.socket | None = None
        self.pidfd = -1
        self.ready_ns: int | None = None
        """Since when it serves."""
        self.pause_s = 0.0
        self.error: AsynctrtError | None = None
        self.streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None
        self.scraping: asyncio.Task[bytes] | None = None
        """It is asked for its metrics once at a time, however long it takes and however many want them."""
        self.is_to_reload = False
        """Whether SIGHUP came when it was not there to take it."""

    def died(self, now_ns: int) -> None:
        """Choose the pause before its next process."""
        has_served = self.ready_ns is not None and now_ns - self.ready_ns > SOON_NS
        self.pause_s = 0.0 if has_served else min(max(2 * self.pause_s, PAUSE_S), PAUSE_S_MAX)
        self.ready_ns = None


class Fronts:
    """The fronts of a server, and the pool of workers behind them.

    :param config: with the ports that were reserved.
    :param say: receives progress, a line each.
    """

    def __init__(self, config: ServeConfig, say: Callable[[str], None]) -> None:
        self._config = config
        self._say = say
        self._loop = asyncio.get_running_loop()
        self._pool = WorkerPool(self._loop)
        self._fronts = [Front(number) for number in range(config.settings.fronts)]
        self._ready: set[int] = set()
        self._told: dict[int, tuple[str, ...]] = {}
        self._was_ready = False
        self._changed = asyncio.Event()
        self._asked = False
        self._restarts: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<Fronts {len(self._ready)} of {len(self._fronts)} ready>"

    async def run(self, more: Sequence[str], warnings: Sequence[str]) -> None:
        """Serve until SIGTERM or SIGINT.

        :param more: lines to say once all fronts are ready; likewise ``warnings``, to log.
        :raises AsynctrtError: what a front says if it cannot serve.
        """
        signals = (signal.SIGTERM, signal.SIGINT)
        for number in signals:
            self._loop.add_signal_handler(number, partial(self._stop, number))
        self._loop.add_signal_handler(signal.SIGHUP, self._reload)
        try:
            await self._start_all()
            await self._until(lambda: self._asked or len(self._ready) == len(self._fronts) or self._error)
            if not self._asked and self._error is None:
                self._was_ready = True
                for line in (*self._told[0], *more):
                    self._say(line)
                for warning in warnings:
                    logger.warning("%s", warning)
            await self._until(lambda: self._asked or (self._error is not None and not self._was_ready))
            error = None if self._asked else self._error
            await self._end()
            if error is not None:
                raise error
        finally:
            for number in (*signals, signal.SIGHUP):
                self._loop.remove_signal_handler(number)
            for front in self._fronts:
                if front.process is not None and front.process.poll() is None:
                    front.process.kill()

    async def metrics(self, _headers: Headers) -> Answer:
        """Return the metrics of all fronts, each with its number as a label."""
        texts = await asyncio.gather(*[self._scrape(front) for front in self._fronts])
        known = {front.number: text for front, text in zip(self._fronts, texts, strict=True) if text}
        return await asyncio.to_thread(merged_answer, known)

    @property
    def _error(self) -> AsynctrtError | None:
        return next((front.error for front in self._fronts if front.error is not None), None)

    async def _until(self, condition: Callable[[], Any]) -> None:
        while not condition():
            self._changed.clear()
            await self._changed.wait()

    async def _start_all(self) -> None:
        for front in self._fronts:
            if not self._asked:
                await self._start(front)

    async def _start(self, front: Front) -> None:
        with ExitStack() as undo:
            try:
                own, its = channel()
                undo.callback(own.close)
                metrics, its_metrics = socket.socketpair()
                undo.callback(metrics.close)
                with its, its_metrics:
                    spawn = partial(_spawn, its.fileno(), its_metrics.fileno())
                    process = await in_thread(spawn, undo=_kill)
                undo.callback(_kill, process)
                front.pidfd = os.pidfd_open(process.pid)
            except OSError as error:
                raise UsageError(f"a front could not be started: {error.strerror}") from error
            undo.pop_all()
        front.process = process
        front.error = None
        front.end = own
        settings = self._config.settings
        if settings.access_log is not None:
            # Two processes that write to one file tear each other's lines.
            log = settings.access_log.with_name(f"{settings.access_log.name}.{front.number}")
            settings = replace(settings, access_log=log)
        send(own, Begin(replace(self._config, settings=settings), self._was_ready))
        own.settimeout(0)
        front.streams = await asyncio.open_connection(sock=metrics)
        self._pool.add(front.number, own)
        self._loop.add_reader(own.fileno(), self._readable, front)
        self._loop.add_reader(front.pidfd, self._ended, front)
        if self._asked:
            process.terminate()  # It was not there yet when the others were told.

    def _readable(self, front: Front) -> None:
        assert front.end is not None
        while True:
            try:
                message, fds = receive(front.end)
            except BlockingIOError:
                return
            if message is None:
                self._loop.remove_reader(front.end.fileno())
                return
            if isinstance(message, To):
                self._pool.hear(front.number, message, fds)
            elif isinstance(message, Serving):
                self._ready.add(front.number)
                front.ready_ns = clock.now_ns()
                if front.is_to_reload:
                    self._reload_one(front)
                self._told.setdefault(front.number, message.lines)
                self._changed.set()
            elif isinstance(message, Refused):
                front.error = message.error

    def _ended(self, front: Front) -> None:
        """Take back what a front had that has ended, and start another one, unless it was to end."""
        assert front.process is not None
        assert front.end is not None
        status = front.process.poll()
        if status is None:
            return
        self._readable(front)
        self._loop.remove_reader(front.pidfd)
        self._loop.remove_reader(front.end.fileno())
        os.close(front.pidfd)
        self._pool.remove(front.number)
        front.end.close()
        if front.streams is not None:
            front.streams[1].close()
            front.streams = front.scraping = None
        self._ready.discard(front.number)
        front.process = None
        self._changed.set()
        if self._asked:
            return
        how = how_it_ended(status)
        if not self._was_ready:
            front.error = front.error or UsageError(f"a front {how} before it could serve: see its messages")
            return
        logger.error("front %d %s; another one takes its place", front.number, how)
        front.died(clock.now_ns())
        task = self._loop.create_task(self._start_again(front))
        self._restarts.add(task)
        task.add_done_callback(self._restarts.discard)

    async def _start_again(self, front: Front) -> None:
        while True:
            await asyncio.sleep(front.pause_s)
            try:
                await self._start(front)
            except (OSError, UsageError) as error:
                # The system has no process or descriptor left now; it may have later.
                front.pause_s = PAUSE_S_MAX
                logger.error("front %d: %s; it is tried again", front.number, error)  # noqa: TRY400
            else:
                return

    def _stop(self, number: int) -> None:
        logger.info("%s: stopping", signal.Signals(number).name)
        self._asked = True
        self._signal_all(signal.SIGTERM)
        self._changed.set()

    def _reload(self) -> None:
        for front in self._fronts:
            self._reload_one(front)

    def _reload_one(self, front: Front) -> None:
        """Hand SIGHUP on to a front; once it is ready, as before it would end by it."""
        front.is_to_reload = front.number not in self._ready
        if not front.is_to_reload and front.process is not None:
            os.kill(front.process.pid, signal.SIGHUP)

    def _signal_all(self, number: int) -> None:
        for front in self._fronts:
            if front.process is not None and front.process.poll() is None:
                os.kill(front.process.pid, number)

    async def _end(self) -> None:
        """Stop all fronts, then all workers."""
        for task in self._restarts:
            task.cancel()
        if not self._asked:
            self._asked = True
            self._signal_all(signal.SIGTERM)
        settings = self._config.settings
        try:
            async with asyncio.timeout(settings.drain_delay + settings.drain_timeout + SPARE_S):
                await self._until(lambda: all(front.process is None for front in self._fronts))
        except TimeoutError:
            logger.warning("%r: fronts that do not stop are ended", self)
            self._signal_all(signal.SIGKILL)
            await self._until(lambda: all(front.process is None for front in self._fronts))
        await self._pool.aclose(SPARE_S)

    async def _scrape(self, front: Front) -> bytes:
        """Return the metrics of a front; nothing if it does not answer."""
        if front.streams is None or front.number not in self._ready:
            return b""
        task = front.scraping
        if task is None or task.done():
            task = front.scraping = self._loop.create_task(_metrics_of(*front.streams))
        await asyncio.wait([task], timeout=SCRAPE_S)
        return task.result() if task.done() else b""


async def _metrics_of(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """Return the metrics of a front; nothing if it ends."""
    try:
        writer.write(b"\n")
        return await reader.readexactly(int.from_bytes(await reader.readexactly(LENGTH)))
    except (OSError, asyncio.IncompleteReadError):
        return b""


def _kill(process: "subprocess.Popen[bytes]") -> None:
    process.kill()
    process.wait()


def _spawn(*fds: int) -> "subprocess.Popen[bytes]":
    command = child_command("asynctrt.serving.front", *map(str, fds), __version__)
    # A session of its own: Ctrl-C in a terminal is the parent's to hand on.
    return subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=fds, start_new_session=True)  # noqa: S603


async def serve(config: ServeConfig, say: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT, in this process or with several fronts.

    :param say: receives progress messages, a line each.
    :raises AsynctrtError: if it cannot listen on a port or load a model.
    """
    command.find_modules(config)
    if config.settings.fronts == 1:
        await command.serve(config, say)
        return
    settings = config.settings
    set_up_logging(settings.log_format, settings.log_level)
    if settings.gpu_memory is not None:
        limit_gpu_memory(settings.gpu_memory)  # Of the workers: they are started here.
    await _serve(config, command.shower(settings, say))


async def _serve(config: ServeConfig, say: Callable[[str], None]) -> None:
    settings = config.settings
    with ExitStack() as stack:
        http_port = _reserve(stack, settings.host, settings.http_port)
        grpc_port = _reserve(stack, settings.host, settings.grpc_port) if settings.grpc else 0
        own = replace(settings, http_port=http_port, grpc_port=grpc_port, metrics_port=None)
        fronts = Fronts(replace(config, settings=own, notes=()), say)
        listener = None
        if settings.metrics_port is not None:
            pages = open_pages({"/metrics": Page(fronts.metrics, is_open=True)}, settings)
            hub = Hub(pages)
            try:
                listener = await hub.loop.create_server(hub, settings.host, settings.metrics_port)
            except OSError as error:
                raise UsageError(
                    f"cannot listen on {settings.host} port {settings.metrics_port}: {reason_of(error)}. "
                    "Choose another port; 0 picks a free one"
                ) from error
        try:
            say(f"starting {settings.fronts} fronts")
            more = ["metrics                     of one front at a time: --metrics-port has those of all"]
            if listener is not None:
                port = listener.sockets[0].getsockname()[1]
                more = [f"metrics                     http://{settings.host}:{port}/metrics"]
            await fronts.run(more, (*config.notes, *command.warnings_of(settings)))
        finally:
            if listener is not None:
                listener.close()
                hub.close()
    say("stopped")


def _reserve(stack: ExitStack, host: str, port: int) -> int:
    """Return a port that fronts may share, and that nobody else listens on.

    :raises UsageError: if it cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        # Without SO_REUSEPORT first: another server's fronts would share the port with these.
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            port = int(probe.getsockname()[1])
        kept = stack.enter_context(socket.socket(family))
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        kept.bind((host, port))
    except OSError as error:
        raise UsageError(
            f"cannot listen on {host} port {port}: {reason_of(error)}. Choose another port; 0 picks a "
            "free one"
        ) from error
    return port


async def answer_scrapes(end: socket.socket, text: Callable[[], Awaitable[bytes]]) -> None:
    """Tell the parent the metrics of a front, as often as it asks."""
    reader, writer = await asyncio.open_connection(sock=end)
    while await reader.read(1):
        said = await text()
        writer.write(len(said).to_bytes(LENGTH) + said)
        await writer.drain()
