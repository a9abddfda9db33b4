"""Serve a repository of models: listen, drain, stop. ``asynctrt serve`` adds signals and the command line.

::

    repository = Repository(ServerSettings(http_port=0))
    repository.add("resnet", engine)
    async with Server(repository) as server:
        print(server.http_url)
        await server.wait_stopped()
"""

import asyncio
import logging
import signal
import socket
import ssl
from typing import Any, Final, Self
from weakref import WeakSet

import anyio

from asynctrt._util import clock
from asynctrt._util.forks import Origin
from asynctrt._util.loops import in_lost_thread
from asynctrt.core.loading import limit_gpu_memory
from asynctrt.errors import OptionsError, UsageError
from asynctrt.kserve.json_codec import dump
from asynctrt.serving.api import Api, pages_alone
from asynctrt.serving.credentials import Certificate, Pem, is_readable_by_all, read_tokens
from asynctrt.serving.dashboard import dashboard_pages
from asynctrt.serving.frames import upgrade
from asynctrt.serving.grpc_server import GrpcServer, check_address
from asynctrt.serving.http import SWEEP_S, Hub
from asynctrt.serving.latency import LoopDelays
from asynctrt.serving.listener import Listener, cannot_listen
from asynctrt.serving.log import AccessLog
from asynctrt.serving.metrics import Metrics
from asynctrt.serving.openapi import ask_of, docs_pages
from asynctrt.serving.repository import Repository
from asynctrt.serving.sampler import Sampler
from asynctrt.serving.served import ServedModel
from asynctrt.serving.server_log import Failures, Refusals
from asynctrt.serving.settings import ServerSettings
from asynctrt.serving.signals import StopSignals
from asynctrt.serving.telemetry import find_tracing

BACKLOG: Final = 1024
SAMPLE_S: Final = 1.0
"""Time between two samples for the dashboard."""
logger = logging.getLogger("asynctrt.serving")


class Server:
    """A server of a repository over HTTP, websocket and gRPC, on the running event loop.

    :param repository: the models. The server closes the ones that the repository loaded.
    :param settings: ports, limits and times. Default: the repository's.
    :param is_front: whether it is one of several processes that share its ports.
    :param listening: a bound socket for HTTP, instead of the address in the settings.
    :raises UsageError: for several fronts, which only ``asynctrt serve`` can start.
    """

    def __init__(
        self,
        repository: Repository,
        settings: ServerSettings | None = None,
        *,
        is_front: bool = False,
        listening: socket.socket | None = None,
    ) -> None:
        self.repository = repository
        self.settings = settings or repository.settings
        self._is_front = is_front
        self._listening = listening
        if self.settings.fronts > 1 and not is_front:
            raise UsageError(
                f"fronts is {self.settings.fronts}, and a server in this process is one. Run asynctrt serve "
                "--fronts for several processes, or leave it out"
            )
        self._metrics: Metrics | None = None
        if self.settings.gpu_memory is not None:
            limit_gpu_memory(self.settings.gpu_memory)
        self._certificate: Certificate | None = None
        has_tokens = bool(self.settings.tokens) or self.settings.tokens_file is not None
        self.api = Api(repository, self.settings, checks_hosts=not has_tokens)
        self._hub: Hub | None = None
        self._metrics_hub: Hub | None = None
        self._listeners: list[Listener] = []
        self._addresses: list[str] = []
        self._grpc: GrpcServer | None = None
        self._sized: WeakSet[ServedModel] = WeakSet()
        self._grpc_port = 0
        self._log: AccessLog | None = None
        self._failures: Failures | None = None
        self._refusals: Refusals | None = None
        self._delays: LoopDelays | None = None
        self._sampling: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._hurry = asyncio.Event()
        self._asked = asyncio.Event()
        self._signals: StopSignals | None = None
        self.lost: tuple[str, ...] = ()
        """The models whose lost device made :meth:`serve` stop."""
        self._stopped = asyncio.Event()
        # The process in which it listens, once it does.
        self._origin: Origin | None = None

    def __repr__(self) -> str:
        return f"<Server {self.repository!r}>"

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        # In a forked child, an error only propagates.
        if error is None or self._origin is None or self._origin.is_here:
            await self.stop()

    @property
    def http_url(self) -> str:
        """The URL of the HTTP server, with the port that was bound."""
        scheme = "https" if self.settings.tls_certificate else "http"
        return f"{scheme}://{self._addresses[0]}"

    @property
    def websocket_url(self) -> str:
        """The address of the websocket for all models, as :func:`asynctrt.client.connect` takes it."""
        return f"ws{self.http_url.removeprefix('http')}/v2/ws"

    @property
    def metrics_url(self) -> str | None:
        """The URL of the metrics if they have a separate port."""
        return f"http://{self._addresses[1]}/metrics" if len(self._addresses) > 1 else None

    @property
    def grpc_target(self) -> str | None:
        """The address of the gRPC server, as ``host:port``."""
        if self._grpc is None:
            return None
        host = self.settings.host
        return f"{f'[{host}]' if ':' in host else host}:{self._grpc_port}"

    async def start(self) -> None:
        """Listen. ``repository.load_all()`` loads the models, before or after this.

        :raises UsageError: if it cannot listen on a port, or already listens in the process that this one was
            forked from.
        :raises OptionsError: if the certificate or the tokens' file cannot be used.
        """
        self._check_process()
        self._origin = Origin()
        settings = self.settings
        try:
            if settings.tls_certificate is not None and settings.tls_key is not None:
                self._certificate = Certificate(settings.tls_certificate, settings.tls_key)
            self.api.use_tokens(self._tokens())
            self._log = AccessLog(settings.access_log) if settings.access_log is not None else None
            if self._log is not None:
                self.api.log = self._log.write_inference
            hub = self._hub = Hub(self.api, upgrade, self._log)
            self._delays = LoopDelays()
            sampler = Sampler(
                self.repository,
                connections=lambda: len(hub.connections),
                in_flight=lambda: self.api.in_flight,
                lag_ns=self._delays.take_longest_ns,
            )
            metrics = self._metrics = Metrics(
                self.repository, sampler, self._delays, self.api.memory, self._count_refused
            )
            self.api.pages.update(dashboard_pages(self.repository, sampler, ask_of))
            self.api.pages.update(docs_pages(self.api))
            self.api.pages["/metrics"] = metrics.page()
            self.api.observe = find_tracing()
            self._failures = Failures()
            self.api.failed = self._failures.note
            self._refusals = Refusals(self.api, lambda: hub.refused)
            tls = self._certificate.context if self._certificate is not None else None
            await self._listen(hub, "http_port", tls)
            if settings.metrics_port is not None:
                pages = {"/metrics": metrics.page(is_open=True)}
                self._metrics_hub = Hub(pages_alone(pages, settings))
                await self._listen(self._metrics_hub, "metrics_port")
            if not self.repository.is_starting:
                await self.start_grpc()
            elif settings.grpc and not self._is_front:
                await check_address(settings.host, settings.grpc_port)
            self._sampling = asyncio.create_task(self._sample(sampler))
        except BaseException:
            await self._close()
            raise

    async def start_grpc(self) -> None:
        """Listen for gRPC, with room in a message for a full batch of any model that is loaded by now.

        :meth:`start` does this itself, unless the repository is starting.

        :raises UsageError: if it cannot listen on the port.
        """
        if not self.settings.grpc:
            return
        grpc = GrpcServer(self.api, self.settings, self._certificate, shares_port=self._is_front)
        self._grpc_port = await grpc.start()
        self._grpc = grpc
        if self.is_stopping:
            await grpc.stop(0)
        self._warn_of_sizes()

    def _warn_of_sizes(self) -> None:
        """Log a warning, once, for each model whose full batch exceeds gRPC's fixed limit."""
        if self._grpc is None:
            return
        limit = self._grpc.message_nbytes_max
        for served in self.repository:
            if served not in self._sized:
                self._sized.add(served)
                if served.batch_nbytes > limit:
                    logger.warning(
                        "model %s: a full batch has %d bytes, but a message over gRPC at most %d: use HTTP "
                        "or a websocket, or start the server with a larger max_grpc_message",
                        *(served.name, served.batch_nbytes, limit),
                    )

    async def reload(self) -> None:
        """Reread the file of tokens and the certificate; open connections continue.

        :raises OptionsError: if one of them cannot be used. Then nothing has changed.
        """
        tokens, pem = await asyncio.to_thread(self._read_again)
        self.api.use_tokens(tokens)
        if self._certificate is not None and pem is not None:
            self._certificate.pem = pem
        read = [] if self.settings.tokens_file is None else [f"{len(tokens)} token(s)"]
        read += [] if pem is None else ["the certificate"]
        if read:
            logger.info("reloaded %s", " and ".join(read))
        else:
            logger.info("nothing to reload: there is neither a tokens_file nor a tls_certificate")

    def _read_again(self) -> tuple[tuple[str, ...], Pem | None]:
        tokens = self._tokens()
        return tokens, self._certificate.read() if self._certificate is not None else None

    def _tokens(self) -> tuple[str, ...]:
        path = self.settings.tokens_file
        if path is None:
            return self.settings.tokens
        tokens = read_tokens(path)
        if is_readable_by_all(path):
            logger.warning("every user of this machine can read the tokens in %s: chmod 600 it", path)
        return self.settings.tokens + tokens

    async def _reload_on(self, hangup: asyncio.Event) -> None:
        while True:
            await hangup.wait()
            hangup.clear()
            try:
                if self._log is not None:
                    self._log.reopen()
                await self.reload()
            except (OptionsError, UsageError) as error:
                logger.error("SIGHUP: nothing has changed: %s", error)  # noqa: TRY400  (it says all)
            except Exception:
                logger.exception("SIGHUP: nothing has changed")

    async def stop(self) -> None:
        """Drain and close, within ``drain_timeout``, or at once after :meth:`hurry`. Idempotent."""
        self._check_process()
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop())
        with anyio.CancelScope(shield=True):
            await asyncio.shield(self._stopping)

    def _check_process(self) -> None:
        if self._origin is not None:
            self._origin.check(self)

    def hurry(self) -> None:
        """Stop at once: requests that are still being answered are abandoned."""
        self._hurry.set()

    def ask(self) -> None:
        """Make :meth:`serve` stop, as a first signal does."""
        self._asked.set()

    def end(self) -> None:
        """Make :meth:`serve` stop at once, as a second signal does."""
        self.hurry()
        self.ask()

    def signals(self) -> StopSignals:
        """Return the handler of SIGTERM and SIGINT, which is active while it is entered, as in :meth:`serve`.

        Enter it before :meth:`start`, or a signal in between ends the process and loses requests. A front
        hurries only when its parent says so: signals to all processes of a service reach the front as well.
        """
        if self._signals is None:
            self._signals = StopSignals(self.ask, self.ask if self._is_front else self.end)
        return self._signals

    async def metrics_text(self) -> bytes:
        """Return the metrics in Prometheus's format; empty before the server has started."""
        if self._metrics is None:
            return b""
        return b"".join((await self._metrics.answer({})).body)

    async def statistics_text(self) -> bytes:
        """Return this process's statistics of all models, as JSON."""
        return dump(self.api.statistics())

    async def wait_stopped(self) -> None:
        """Wait until the server has stopped."""
        await self._stopped.wait()

    @property
    def is_stopping(self) -> bool:
        """Whether it was asked to stop: by a signal, or by :meth:`stop`."""
        return self._asked.is_set() or self._stopping is not None

    @property
    def is_hurried(self) -> bool:
        """Whether it should stop at once."""
        return self._hurry.is_set()

    async def wait_hurried(self) -> None:
        """Wait until it should stop at once."""
        await self._hurry.wait()

    async def serve(self) -> None:
        """Serve until SIGTERM or SIGINT, then drain and stop; a second signal stops at once.

        On SIGHUP, reopen the access log and do as :meth:`reload`; errors are logged.

        With ``on_device_lost="exit"``, also stop at once when a device is lost; :attr:`lost` then names the
        models.
        """
        loop = asyncio.get_running_loop()
        hangup = asyncio.Event()
        with self.signals():
            loop.add_signal_handler(signal.SIGHUP, hangup.set)
            reloading = loop.create_task(self._reload_on(hangup))
            try:
                await self._asked.wait()
                await self.stop()
            finally:
                reloading.cancel()
                loop.remove_signal_handler(signal.SIGHUP)

    async def _listen(self, hub: Hub, option: str, tls: ssl.SSLContext | None = None) -> None:
        """Listen for a hub on the port of a setting."""
        host, port = self.settings.host, getattr(self.settings, option)
        where: dict[str, Any] = {"host": host, "port": port, "reuse_port": self._is_front}
        if option == "http_port" and self._listening is not None:
            where = {"sock": self._listening}
        try:
            listener = await hub.loop.create_server(hub, backlog=BACKLOG, start_serving=False, **where)
        except OSError as error:
            raise cannot_listen(host, port, error, option) from error
        self._listeners.append(Listener(hub, listener, BACKLOG, tls))
        self._addresses.append(_address(listener))

    async def _sample(self, sampler: Sampler) -> None:
        while True:
            await asyncio.sleep(SAMPLE_S)
            sampler.sample()
            self._look_for_losses()
            self._warn_of_sizes()
            if self._failures is not None and self._refusals is not None:
                self._failures.tick()
                self._refusals.tick()
            if self._log is not None:
                self._log.flush()
                self._log.tell_losses()

    def _look_for_losses(self) -> None:
        lost = self.repository.look_for_losses(clock.now_ns())
        if lost and self.settings.on_device_lost == "exit" and not self.lost:
            self.lost = tuple(lost)
            logger.critical("stopping, as nothing can run %s any more in this process", ", ".join(lost))
            self.end()

    def _count_refused(self) -> dict[str, int]:
        """Return how many connections and requests were refused before they reached a model, by reason."""
        return {
            "connections": self._hub.refused if self._hub is not None else 0,
            "credentials": self.api.unauthorized,
            "memory": self.api.memory.refused,
        }

    async def _stop(self) -> None:
        hurry = asyncio.create_task(self._hurry.wait())
        try:
            # Report not ready and keep answering, so that load balancers can send elsewhere.
            self.repository.is_draining = True
            await asyncio.wait([hurry], timeout=self.settings.drain_delay)
            for listener in self._listeners:
                listener.close()
            draining = asyncio.create_task(self._drain())
            await asyncio.wait(
                [hurry, draining], timeout=self.settings.drain_timeout, return_when="FIRST_COMPLETED"
            )
            if not draining.done():
                logger.warning("%r: abandoning %d requests", self, self.api.in_flight)
            draining.cancel()
            await asyncio.wait([draining])
        finally:
            hurry.cancel()
            await self._close()
            self._stopped.set()

    async def _drain(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.repository.drain())
            if self._hub is not None:
                self._hub.drain()
                tasks.create_task(self._hub.wait_empty())
            if self._grpc is not None:
                tasks.create_task(self._grpc.stop(self.settings.drain_timeout))

    async def _close(self) -> None:
        """Release everything acquired so far."""
        if self._sampling is not None:
            self._sampling.cancel()
        if self._delays is not None:
            self._delays.close()
        if self._refusals is not None:
            self._refusals.tick(is_last=True)
        for listener in self._listeners:
            listener.abort()
        for hub in (self._hub, self._metrics_hub):
            if hub is not None:
                hub.close()
        if self._grpc is not None:
            await self._grpc.stop(0)
        self.api.worker.close()
        await self.repository.aclose()
        if self._log is not None:
            # Aborted connections write their last lines in the next loop iteration.
            await asyncio.sleep(SWEEP_S if self._hub and self._hub.connections else 0)
            await in_lost_thread(self._log.close)


def _address(listener: asyncio.Server) -> str:
    host, port, *_ = listener.sockets[0].getsockname()
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
