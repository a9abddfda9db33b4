"""``asynctrt serve --fronts N``: several server processes on one port, which share workers.

This is their parent. It listens only on the port for metrics. It starts fronts and workers, restarts the ones
whose process dies, and forwards signals. :mod:`asynctrt.serving.front` is a front.
"""

import asyncio
import logging
import os
import pickle
import signal
import socket
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

from asynctrt._util import clock
from asynctrt.core.loading import limit_gpu_memory
from asynctrt.errors import UsageError
from asynctrt.serving import command
from asynctrt.serving.api import Answer, Headers, Page, pages_alone
from asynctrt.serving.command import ServeConfig
from asynctrt.serving.http import Hub
from asynctrt.serving.listener import cannot_listen
from asynctrt.serving.metrics import compressed, merged_answer
from asynctrt.serving.server_log import set_up_logging
from asynctrt.serving.signals import StopSignals
from asynctrt.serving.systemd import notify_ready
from asynctrt.workers.messages import Beat, Failed, Stop, To
from asynctrt.workers.pool import WorkerPool
from asynctrt.workers.process import ChildProcess
from asynctrt.workers.spares import SOON_NS, pause_s

PAUSE_S_MAX: Final = 5.0
"""The maximum delay before restarting a front that died soon."""
GRACE_S: Final = 5.0
"""How long a front may take to return its metrics, to run its event loop again, and to stop after its
drain_timeout."""
LOOK_S: Final = 0.5
"""Interval at which fronts say that their event loops run, and of the checks for that."""
START_S: Final = 60.0
"""How long a front may take until its event loop first runs."""
HURRIED_S: Final = command.HURRIED_S / 2
"""How long fronts may take to stop when told to stop at once."""
METRICS, STATISTICS = "metrics", "statistics"
"""The texts that fronts and their parent request from each other."""

logger = logging.getLogger("asynctrt.serving")


@dataclass(frozen=True, slots=True)
class Begin:
    """Message to a new front: what to serve."""

    config: ServeConfig
    is_replacement: bool
    """Whether other fronts answer on the port while it loads its models, so that it need not listen yet: it
    would have to ask clients to retry."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Message from a front or its parent to the other: send a text."""

    what: str


@dataclass(frozen=True, slots=True)
class Told:
    """The text that was asked for, in a file that comes with it: a message is too small for it."""

    what: str


@dataclass(frozen=True, slots=True)
class Serving:
    """Message from a front: it answers, and its models are ready."""

    lines: tuple[str, ...]
    """Lines to print about it."""


class Texts:
    """The texts that a front and its parent ask each other for.

    Callers share an answer that is on its way.

    :param send: sends the other end a message with file descriptors.
    """

    def __init__(self, send: Callable[[Any, Sequence[int]], object]) -> None:
        self._send = send
        self.known: Mapping[str, Callable[[], Awaitable[bytes]]] = {}
        """Returns each text that the other end may ask for."""
        self._loop = asyncio.get_running_loop()
        self._asked: dict[str, asyncio.Future[bytes]] = {}
        self._telling: set[asyncio.Task[None]] = set()

    async def ask(self, what: str, timeout_s: float) -> bytes:
        """Request a text; return nothing if the other end does not answer in time, or ends."""
        asked = self._asked.get(what)
        if asked is None:
            asked = self._asked[what] = self._loop.create_future()
            self._send(Ask(what), ())
        await asyncio.wait([asked], timeout=timeout_s)
        return asked.result() if asked.done() else b""

    def hear(self, message: Ask | Told, fds: Sequence[int]) -> None:
        """Handle a message of the other end."""
        if isinstance(message, Ask):
            telling = self._loop.create_task(self._tell(message.what))
            self._telling.add(telling)
            telling.add_done_callback(self._telling.discard)
            return
        asked, text = self._asked.pop(message.what, None), content_of(fds)
        if asked is not None:
            asked.set_result(text)

    async def _tell(self, what: str) -> None:
        fds = []
        try:
            fds.append(file_of(await self.known[what]()))
        except Exception:
            logger.exception("no %s could be sent to another process", what)
        self._send(Told(what), fds)
        for fd in fds:
            os.close(fd)

    def close(self) -> None:
        """Answer pending requests with an empty text. Idempotent."""
        while self._asked:
            self._asked.popitem()[1].set_result(b"")


def file_of(content: bytes) -> int:
    """Return the file descriptor of a file in memory, to be sent with a message."""
    fd = os.memfd_create("asynctrt", os.MFD_CLOEXEC)
    try:
        with open(fd, "wb", closefd=False) as file:
            file.write(content)
    except OSError:
        os.close(fd)
        raise
    return fd


def content_of(fds: Sequence[int]) -> bytes:
    """Return the content of the file that came with a message, and close it; empty if none came."""
    content = b""
    for fd in fds:
        content = os.pread(fd, os.fstat(fd).st_size, 0)
        os.close(fd)
    return content


class Front:
    """One front, across its successive processes."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.process: ChildProcess | None = None
        self.texts: Texts | None = None
        self.ready_ns: int | None = None
        """Time since which it serves."""
        self.silent_ns: int = 0
        """How long its event loop has not run."""
        self.has_beaten = False
        self.is_lost = False
        """Whether one of its models can no longer run."""
        self.is_leaving = False
        """Whether it is stopping so that another process can replace it."""
        self.failures = 0
        """How often in a row it died soon."""
        self.error: Exception | None = None
        self.is_to_reload = False
        """Whether SIGHUP came before the front was ready to handle it."""

    def died(self, now_ns: int) -> float:
        """Return the delay before its next process."""
        self.silent_ns, self.has_beaten, self.is_lost, self.is_leaving = 0, False, False, False
        has_served = self.ready_ns is not None and now_ns - self.ready_ns > SOON_NS
        self.failures = 1 if has_served else self.failures + 1
        self.ready_ns = None
        return min(pause_s(self.failures), PAUSE_S_MAX)


class Fronts:
    """The fronts of a server, and the pool of workers behind them.

    :param config: the configuration, with the reserved ports.
    :param places: a file descriptor of the models in the folders. Replacement fronts serve exactly these.
    :param say: called with each line of progress.
    """

    def __init__(self, config: ServeConfig, places: int, say: Callable[[str], None]) -> None:
        self._config = config
        self._places = places
        self._say = say
        self._loop = asyncio.get_running_loop()
        self._pool = WorkerPool(self._loop)
        self._fronts = [Front(number) for number in range(config.settings.fronts)]
        self._ready: set[int] = set()
        self._told: dict[int, tuple[str, ...]] = {}
        self._was_ready = False
        self._changed = asyncio.Event()
        self._asked = False
        self._hurry = asyncio.Event()
        self._looked_ns = clock.now_ns()
        self._restarts: set[asyncio.Task[None]] = set()

    def __repr__(self) -> str:
        return f"<Fronts {len(self._ready)} of {len(self._fronts)} ready>"

    async def run(self, more: Sequence[str], warnings: Sequence[str]) -> None:
        """Serve until SIGTERM or SIGINT.

        :param more: lines to print once all fronts are ready.
        :param warnings: warnings to log at that time.
        """
        with StopSignals(self._stop, self._hurry.set):
            await self._run(more, warnings)

    async def _run(self, more: Sequence[str], warnings: Sequence[str]) -> None:
        self._loop.add_signal_handler(signal.SIGHUP, self._reload)
        looking = self._loop.create_task(self._look_after())
        try:
            await self._start_all()
            await self._until(lambda: self._asked or len(self._ready) == len(self._fronts) or self._error)
            if not self._asked and self._error is None:
                self._was_ready = True
                for line in (*self._told[0], *more):
                    self._say(line)
                for warning in warnings:
                    logger.warning("%s", warning)
                notify_ready()
            await self._until(lambda: self._asked or (self._error is not None and not self._was_ready))
            error = None if self._asked else self._error
            await self._end()
            if error is not None:
                raise error
        finally:
            looking.cancel()
            self._loop.remove_signal_handler(signal.SIGHUP)
            for front in self._fronts:
                self._kill(front)

    async def metrics(self, headers: Headers) -> Answer:
        """Return the metrics of all fronts, each with its number as a label."""
        known = await self._scrape(METRICS)
        return await compressed(headers, await asyncio.to_thread(merged_answer, known))

    async def statistics(self) -> bytes:
        """Return the statistics of the models in all fronts, as a list in JSON."""
        texts = (await self._scrape(STATISTICS)).values()
        return b"[%b]" % b",".join([text[1:-1] for text in texts if len(text) > 2])

    @property
    def _error(self) -> Exception | None:
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
        try:
            process = await ChildProcess.start(
                "asynctrt.serving.front",
                self._begin(front),
                partial(self._heard, front),
                partial(self._ended, front),
                fds=[self._places],
                own_session=True,
            )
        except OSError as error:
            raise UsageError(f"a front could not be started: {error.strerror}") from error
        front.process, front.error = process, None
        front.texts = Texts(process.send)
        front.texts.known = {STATISTICS: self.statistics}
        self._pool.add(front.number, process.outbox)
        if self._asked:
            self._tell(front, Stop(at_once=False))  # It did not exist when the others were stopped.

    def _begin(self, front: Front) -> Begin:
        settings = self._config.settings
        if settings.access_log is not None:
            # Two processes that write to one file would interleave their lines.
            log = settings.access_log.with_name(f"{settings.access_log.name}.{front.number}")
            settings = replace(settings, access_log=log)
        return Begin(replace(self._config, settings=settings), self._was_ready)

    def _heard(self, front: Front, message: Any, fds: list[int]) -> None:
        if isinstance(message, To):
            self._pool.hear(front.number, message, fds)
        elif isinstance(message, Beat):
            front.silent_ns, front.has_beaten = 0, True
            front.is_lost = message.is_lost
            self._replace_lost(front)
        elif isinstance(message, Ask | Told):
            assert front.texts is not None
            front.texts.hear(message, fds)
        elif isinstance(message, Serving):
            self._ready.add(front.number)
            front.ready_ns = clock.now_ns()
            if front.is_to_reload:
                self._reload_one(front)
            self._told.setdefault(front.number, message.lines)
            if len(self._ready) == len(self._fronts):
                self._pool.close_unused()
            self._changed.set()
        elif isinstance(message, Failed):
            front.error = message.error

    def _ended(self, front: Front, how: str) -> None:
        """Clean up after a front that has ended, and start another one, unless the server is stopping."""
        self._pool.remove(front.number)
        if front.texts is not None:
            front.texts.close()
        self._ready.discard(front.number)
        front.process = None
        self._changed.set()
        if self._asked:
            return
        if not self._was_ready:
            front.error = front.error or UsageError(f"a front {how} before it could serve: see its messages")
            return
        logger.error("front %d %s; another one takes its place", front.number, how)
        task = self._loop.create_task(self._start_again(front, front.died(clock.now_ns())))
        self._restarts.add(task)
        task.add_done_callback(self._restarts.discard)

    async def _start_again(self, front: Front, delay_s: float) -> None:
        while True:
            await asyncio.sleep(delay_s)
            try:
                await self._start(front)
            except (OSError, UsageError) as error:
                # The system is out of processes or file descriptors now; that may pass.
                delay_s = PAUSE_S_MAX
                logger.error("front %d: %s; it is tried again", front.number, error)  # noqa: TRY400
            else:
                return

    def _stop(self) -> None:
        self._asked = True
        for front in self._fronts:
            # Not by a signal: the sender may signal every process, and a second signal means to stop at once.
            self._tell(front, Stop(at_once=False))
        self._changed.set()

    def _tell(self, front: Front, message: Stop) -> None:
        if front.process is not None:
            front.process.send(message)

    def _kill(self, front: Front) -> None:
        if front.process is not None:
            front.process.kill()

    def _replace_lost(self, front: Front) -> None:
        """Stop a front whose engine is lost, if another one can answer. Otherwise it would keep accepting its
        share of the connections."""
        others = [self._fronts[number] for number in self._ready if number != front.number]
        can_go = front.number in self._ready and not front.is_leaving and not self._asked
        if front.is_lost and can_go and any(not one.is_lost and not one.is_leaving for one in others):
            front.is_leaving = True
            logger.error("front %d cannot run its models any more; another one takes its place", front.number)
            self._tell(front, Stop(at_once=False))

    async def _look_after(self) -> None:
        """Kill fronts whose event loops have not run for too long; others replace them."""
        while True:
            await asyncio.sleep(LOOK_S)
            now_ns = clock.now_ns()
            # Count at most one interval: if this process was stopped too (Ctrl-Z), it saw nothing.
            seen_ns, self._looked_ns = min(now_ns - self._looked_ns, int(LOOK_S * 1e9)), now_ns
            for front in self._fronts:
                if front.process is None:
                    continue
                front.silent_ns += seen_ns
                limit_s = GRACE_S if front.has_beaten else START_S
                if front.silent_ns > limit_s * 1e9:
                    logger.error("front %d hangs: its event loop had not run for %g s", front.number, limit_s)
                    front.silent_ns = 0
                    self._kill(front)

    def _reload(self) -> None:
        for front in self._fronts:
            self._reload_one(front)

    def _reload_one(self, front: Front) -> None:
        """Forward SIGHUP to a front once it is ready; before that, the signal would end it."""
        front.is_to_reload = front.number not in self._ready
        if not front.is_to_reload and front.process is not None:
            os.kill(front.process.pid, signal.SIGHUP)

    async def _end(self) -> None:
        """Stop all fronts, then all workers."""
        for task in self._restarts:
            task.cancel()
        if not self._asked:
            self._stop()
        settings = self._config.settings
        ended = self._loop.create_task(
            self._until(lambda: all(front.process is None for front in self._fronts))
        )
        if not await self._seen(ended, settings.drain_delay + settings.drain_timeout + GRACE_S):
            for front in self._fronts:
                self._tell(front, Stop(at_once=True))
            await asyncio.wait([ended], timeout=HURRIED_S)
        if not ended.done():
            logger.warning("%r: fronts that do not stop are ended", self)
            for front in self._fronts:
                self._kill(front)
        await ended
        closed = self._loop.create_task(self._pool.aclose(GRACE_S))
        if not await self._seen(closed, 2 * GRACE_S):
            self._pool.kill()
        await closed

    async def _seen(self, task: "asyncio.Task[None]", timeout_s: float) -> bool:
        """Return whether a task finished in time, and before the request to stop at once."""
        hurry = self._loop.create_task(self._hurry.wait())
        await asyncio.wait([task, hurry], timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
        hurry.cancel()
        return task.done()

    async def _scrape(self, what: str) -> dict[int, bytes]:
        """Request a text from every front; return the answers by front number, without missing ones."""
        asked = {front.number: front.texts for front in self._fronts if front.number in self._ready}
        known = {number: texts for number, texts in asked.items() if texts is not None}
        texts = await asyncio.gather(*[one.ask(what, GRACE_S) for one in known.values()])
        return {number: text for number, text in zip(known, texts, strict=True) if text}


async def serve(config: ServeConfig, say: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT, in this process or with several fronts."""
    command.find_modules(config)
    if config.settings.fronts == 1:
        await command.serve(config, say)
        return
    settings = config.settings
    set_up_logging(settings.log_format, settings.log_level)
    if settings.gpu_memory is not None:
        limit_gpu_memory(settings.gpu_memory)  # For the workers, which this process starts.
    await _serve(config, command.shower(settings, say))


async def _serve(config: ServeConfig, say: Callable[[str], None]) -> None:
    settings = config.settings
    with ExitStack() as stack:
        http_port = _reserve(stack, settings.host, settings.http_port, "http_port")
        grpc_port = _reserve(stack, settings.host, settings.grpc_port, "grpc_port") if settings.grpc else 0
        own = replace(settings, http_port=http_port, grpc_port=grpc_port, metrics_port=None)
        # All fronts serve the models found now, however often they are replaced.
        places = [await folder.found() for folder in config.folders()]
        held = file_of(pickle.dumps(places))
        stack.callback(os.close, held)
        fronts = Fronts(replace(config, settings=own, notes=()), held, say)
        listener = None
        if settings.metrics_port is not None:
            hub = Hub(pages_alone({"/metrics": Page(fronts.metrics, is_open=True)}, settings))
            try:
                listener = await hub.loop.create_server(hub, settings.host, settings.metrics_port)
            except OSError as error:
                raise cannot_listen(settings.host, settings.metrics_port, error, "metrics_port") from error
        try:
            say(f"starting {settings.fronts} fronts")
            more = ["metrics                     of one front at a time; of all fronts with --metrics-port"]
            if listener is not None:
                port = listener.sockets[0].getsockname()[1]
                more = [f"metrics                     http://{settings.host}:{port}/metrics"]
            await fronts.run(more, (*config.notes, *command.warnings_of(settings)))
        finally:
            if listener is not None:
                listener.close()
                hub.close()
    say("stopped")


def _reserve(stack: ExitStack, host: str, port: int, option: str) -> int:
    """Reserve a port that fronts can share, and that no other process listens on."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        # First without SO_REUSEPORT: with it, another server's fronts would share the port with these.
        with socket.socket(family) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            port = int(probe.getsockname()[1])
        kept = stack.enter_context(socket.socket(family))
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        kept.bind((host, port))
    except OSError as error:
        raise cannot_listen(host, port, error, option) from error
    return port
