"""Run ``asynctrt serve``: resolve flags, environment and TOML, and serve until a signal."""

import asyncio
import dataclasses
import ipaddress
import logging
import os
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, Final, NoReturn

from asynctrt._util.cgroup import memory_nbytes
from asynctrt._util.files import CONFIG_NBYTES_MAX, read_toml
from asynctrt._util.process import (
    DEVICE_LOST,
    add_cwd_to_path,
    calm_gc,
    open_files_max,
    raise_open_files,
    shorten_switch_interval,
)
from asynctrt._util.synonyms import ALL_SYNONYMS
from asynctrt._util.validation import check_names, printable
from asynctrt.backends.onnx_options import relative_to
from asynctrt.core.loading import ATTRIBUTE, is_attribute
from asynctrt.errors import AsynctrtError, DeviceLostError, ModelNotFoundError, OptionsError, show
from asynctrt.options import Options
from asynctrt.serving.entries import ModelPlace
from asynctrt.serving.folder import ModelFolder
from asynctrt.serving.models import ModelSource
from asynctrt.serving.openapi import ask_of
from asynctrt.serving.repository import Repository
from asynctrt.serving.served import ServedModel
from asynctrt.serving.server import Server
from asynctrt.serving.server_log import set_up_logging
from asynctrt.serving.settings import ServerSettings
from asynctrt.serving.systemd import notify_ready, passed_socket

SERVER_NAMES: Final = [item.name for item in dataclasses.fields(ServerSettings)]
ENGINE_NAMES: Final = [item.name for item in dataclasses.fields(Options)]

OTHER_DESCRIPTORS: Final = 256
"""Descriptors that a server may need besides its connections: models, workers, logs."""

PATH_NAMES: Final = ("tokens_file", "tls_certificate", "tls_key", "access_log")

HURRIED_S: Final = 0.6
"""How long a server that is to stop at once may take: a second signal ends it within a second."""

NOTHING: Final = "there is no model to serve: a folder must hold NAME/VERSION/model.onnx, or one model.onnx"

TRIED_MAX: Final = 8
"""Models for which the start shows a curl command, so that all fit on a terminal."""

logger = logging.getLogger("asynctrt.serving")


@dataclass(frozen=True, slots=True)
class ServeConfig:
    """A resolved configuration: the server's settings, the models, and their device."""

    settings: ServerSettings
    models: tuple[ModelSource, ...]
    device: str
    notes: tuple[str, ...] = ()
    """Earlier warnings, to be logged when the server starts."""

    def repository(self, places: Iterable[ModelPlace] | None = None) -> Repository:
        """Return a repository of the models, which are not loaded yet.

        :param places: what to serve instead of the folders as they are now.
        """
        repository = Repository(self.settings)
        for source in self.models:
            if not source.is_folder:
                opener = source.opener(self.device)
                repository.add(source.name, version=source.version, opener=opener, mark=source.mark)
        for place in self.folders() if places is None else places:
            repository.add_place(place)
        return repository

    def folders(self) -> list[ModelFolder]:
        """Return the folders of models."""
        return [
            ModelFolder(
                Path(source.path),
                device=source.device or self.device,
                settings=source.settings,
            )
            for source in self.models
            if source.is_folder
        ]


def read_config(path: Path) -> dict[str, Any]:
    """Read a TOML file of settings. Relative paths in it are taken from the file's folder."""
    content = read_toml(path, CONFIG_NBYTES_MAX, "the configuration")
    names = [*SERVER_NAMES, *ENGINE_NAMES, "device", "models"]
    check_names(content, names, f"setting in {path}", synonyms=ALL_SYNONYMS)
    tables = content.get("models")
    models = [table for table in tables if isinstance(table, dict)] if isinstance(tables, list) else []
    for table, keys in [(content, PATH_NAMES), *[(model, ("path",)) for model in models]]:
        for key in keys:
            value = table.get(key)
            if isinstance(value, str) and not ATTRIBUTE.fullmatch(value):
                table[key] = str(path.parent / value)
    for table in (content, *models):
        if isinstance(table.get("onnx"), dict):
            table["onnx"] = relative_to(table["onnx"], path.parent)
    return content


def configure(given: Mapping[str, Any], config: Mapping[str, Any]) -> ServeConfig:
    """Combine ``given`` flags and environment variables with a configuration file, over which they win."""
    both = {**config, **given}
    server = {name: both[name] for name in SERVER_NAMES if name in both}
    engine = {name: both[name] for name in ENGINE_NAMES if name in both}
    for name in PATH_NAMES:
        if isinstance(server.get(name), str):
            server[name] = Path(server[name])
    settings = ServerSettings(**server)
    if settings.fronts > 1:
        engine = {"isolation": "process", **engine}
    tables = config.get("models", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise OptionsError("models in a configuration must be [[models]] tables, each with a path")
    models = [ModelSource.read(table, engine) for table in tables]
    models += [ModelSource.parse(text, engine) for text in given.get("models") or []]
    if not models:
        raise OptionsError(
            "no model to serve: run asynctrt serve model.onnx, or list [[models]] in --config FILE"
        )
    if settings.fronts > 1:
        _check_isolation(models)
    device = both.get("device", "host")
    if not isinstance(device, str):
        raise OptionsError(f"device must be the name of a device, not {show(device)}")
    return ServeConfig(settings, tuple(models), device)


def _check_isolation(models: list[ModelSource]) -> None:
    """Check that all models run in worker processes, which several fronts need."""
    for source in models:
        if source.settings.get("isolation", "none") == "none":
            raise OptionsError(
                f"several fronts share worker processes, and the isolation of {source.path!r} is 'none'. "
                "Leave it out"
            )


def find_modules(config: ServeConfig) -> None:
    """Let models that are named ``module:attribute`` be in the working directory; nothing else is."""
    if any(is_attribute(source.path) for source in config.models):
        add_cwd_to_path()


async def serve(
    config: ServeConfig,
    say: Callable[[str], None],
    *,
    opened: Callable[[Server], None] | None = None,
    loaded: Callable[[], None] | None = None,
    listens_last: bool = False,
    places: Sequence[ModelPlace] | None = None,
) -> None:
    """Serve in this process, until SIGTERM or SIGINT.

    :param say: receives progress messages, a line each.
    :param opened: for one of several fronts: called with the server when it listens.
    :param loaded: called when the models are loaded and the addresses were reported.
    :param listens_last: whether to load models before listening, while other fronts answer at the port.
    :param places: what to serve instead of the folders of the configuration as they are now.
    """
    settings = config.settings
    set_up_logging(settings.log_format, settings.log_level)
    for note in config.notes:
        logger.warning("%s", note)
    show = shower(settings, say)
    shorten_switch_interval()
    raise_open_files()
    repository = config.repository(places)
    repository.is_starting = not listens_last
    server = Server(repository, settings, is_front=opened is not None, listening=passed_socket())
    if listens_last:
        await _load_first(server, show)
    leaving = asyncio.create_task(_leave_if_hurried(server))
    try:
        await _serve(server, show, opened, loaded, is_loaded=listens_last)
    finally:
        leaving.cancel()
    if server.lost:
        raise DeviceLostError(
            f"nothing can run {', '.join(server.lost)} any more in this process: start the server again"
        )


async def _serve(
    server: Server,
    show: Callable[[str], None],
    opened: Callable[[Server], None] | None,
    loaded: Callable[[], None] | None,
    *,
    is_loaded: bool,
) -> None:
    """Listen, load the models unless they are loaded, and serve."""
    settings = server.settings
    with server.signals():
        async with server:
            if opened is not None:
                opened(server)
            # It listens and handles signals before it loads models: health checks say live, not ready.
            serving = asyncio.create_task(server.serve())
            loading = asyncio.create_task(_load(server, show, is_loaded=is_loaded))
            tasks = [loading, serving]
            try:
                await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                if loading.done() and not server.is_stopping:
                    loading.result()
                    if loaded is not None:
                        loaded()
                    if opened is None:  # The parent of fronts notifies once all are ready.
                        notify_ready()
                await serving
            finally:
                tasks += server.repository.loading
                for task in tasks:
                    task.cancel()
                ended: asyncio.Future[Any] = asyncio.gather(*tasks, return_exceptions=True)
                with server.signals():  # serve() has given them up.
                    await asyncio.wait(
                        [ended], timeout=HURRIED_S / 2 if server.is_hurried else settings.drain_timeout
                    )
                if not ended.done():
                    _leave(server)
            show("stopped")


async def _leave_if_hurried(server: Server) -> None:
    """End the process soon after its server is to stop at once: closing may hang."""
    await server.wait_hurried()
    await asyncio.sleep(HURRIED_S)
    _leave(server)


def _leave(server: Server) -> NoReturn:
    """End the process before its server has stopped."""
    if server.repository.loading:  # Its library, or the module that is imported, may hang.
        logger.error("a model that is being loaded cannot be interrupted: the process ends without it")
    else:
        logger.error("stopping took too long, so the process ends now: %r", server)
    logging.shutdown()
    os._exit(DEVICE_LOST if server.lost else 1)


async def check(config: ServeConfig, say: Callable[[str], None]) -> None:
    """Check a configuration: read tokens and certificate, and load every model, without serving.

    It listens on free ports, not on the configured ones, so that a server may run meanwhile.
    """
    settings = dataclasses.replace(
        config.settings,
        http_port=0,
        grpc_port=0,
        metrics_port=None if config.settings.metrics_port is None else 0,
        access_log=None,
    )
    find_modules(config)
    repository = config.repository()
    repository.is_starting = True  # No client waits for the event loop.
    async with Server(repository, settings) as server:
        names = await repository.look_for_models()
        if not names:
            raise ModelNotFoundError(NOTHING)
        await repository.load_all()
        await server.start_grpc()
    for warning in (*config.notes, *warnings_of(config.settings)):
        say(f"warning: {warning}")
    say(f"all is well: {len(names)} model{'s' * (len(names) != 1)} on {config.device}")


def shower(settings: ServerSettings, say: Callable[[str], None]) -> Callable[[str], None]:
    """Return the function that reports the command's progress: to the log if its format is JSON."""
    if settings.log_format == "json":
        return lambda line: logger.info("%s", " ".join(line.split()))
    # Names of models may come from files of others: they must not control the terminal.
    return lambda line: say(printable(line))


async def _load_first(server: Server, say: Callable[[str], None]) -> None:
    """Load the models of a server that does not listen yet."""
    try:
        await _load_models(server, say)
    except BaseException:
        server.hurry()
        await server.stop()
        raise


async def _load(server: Server, say: Callable[[str], None], *, is_loaded: bool) -> None:
    """Load the models, and report the addresses."""
    settings = server.settings
    if not is_loaded:
        await _load_models(server, say)
        await server.start_grpc()
        server.repository.is_starting = False
    calm_gc()
    say(f"HTTP, websocket, dashboard  {server.http_url}")
    if server.grpc_target:
        say(f"gRPC                        {server.grpc_target}")
    if settings.fronts > 1:
        return  # The parent has the metrics of all fronts, and says what there is to warn of.
    say(f"the API, to read and try    {server.http_url}/docs")
    say(f"metrics                     {server.metrics_url or server.http_url + '/metrics'}")
    for served in islice(server.repository, TRIED_MAX):
        say(f"try                         {curl_line(server, served)}")
    for warning in warnings_of(settings):
        logger.warning("%s", warning)


def curl_line(server: Server, served: ServedModel) -> str:
    """Return a curl command that sends zeros to a model, or describes it if its inputs are too many."""
    settings = server.settings
    words = ["curl", "-s"]
    if settings.tls_certificate is not None:
        words.append("-k")
    if settings.tokens or settings.tokens_file is not None:
        words += ["-H", "Authorization: Bearer TOKEN"]
    ask = ask_of(served)
    words.append(server.http_url + ask["path"])
    return shlex.join([*words, "-d", ask["body"]] if ask["body"] else words)


async def _load_models(server: Server, say: Callable[[str], None]) -> None:
    repository, settings = server.repository, server.settings
    count = len(await repository.look_for_models())
    if settings.fronts == 1:
        say(f"loading {count} model{'s' * (count != 1)}")
    if not count and not settings.model_control:
        raise ModelNotFoundError(NOTHING)
    try:
        await repository.load_all()
    except AsynctrtError as error:
        if not settings.model_control:
            raise
        # It can be mended while the server runs.
        say(f"error: {error}")


def warnings_of(settings: ServerSettings) -> list[str]:
    """Return warnings about settings that are dangerous or that exceed what the machine has."""
    found = []
    limit = open_files_max()
    if limit < settings.max_connections + OTHER_DESCRIPTORS:
        found.append(
            f"max_connections is {settings.max_connections}, and this process may open {limit} files: raise "
            "the limit (ulimit -n; LimitNOFILE= of systemd), or lower max_connections"
        )
    total = memory_nbytes()
    if settings.max_memory is not None and total is not None and settings.max_memory > total / 2:
        found.append(
            f"max_memory is {settings.max_memory}, more than half of the {total} bytes that this machine, or "
            "its container, has; a request may be there several times over: lower it"
        )
    if _is_loopback(settings.host):
        return found
    has_tokens = settings.tokens or settings.tokens_file is not None
    if not has_tokens:
        found.append("anyone who can reach this address can use the server; set --tokens-file")
    elif settings.tls_certificate is None:
        found.append(
            f"tokens cross the network unencrypted to {settings.host}: set --tls-certificate and --tls-key, "
            "or listen on 127.0.0.1 behind a proxy that has TLS"
        )
    if settings.metrics_port is not None and has_tokens:
        found.append(f"anyone who can reach port {settings.metrics_port} can read the metrics")
    return found


def _is_loopback(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
