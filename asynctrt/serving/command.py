"""What ``asynctrt serve`` does: from flags, environment and TOML to a server that stops on a signal."""

import asyncio
import dataclasses
import logging
import sys
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from asynctrt.errors import OptionsError, UsageError
from asynctrt.options import Options, check_names
from asynctrt.process import find_modules_here, keep_what_is_there, let_threads_in
from asynctrt.serving.models import ModelSource
from asynctrt.serving.repository import Repository
from asynctrt.serving.server import Server
from asynctrt.serving.settings import ServerSettings

SERVER_NAMES: Final = [item.name for item in dataclasses.fields(ServerSettings)]
ENGINE_NAMES: Final = [item.name for item in dataclasses.fields(Options)]


@dataclass(frozen=True, slots=True)
class ServePlan:
    """What a server is to be: its settings, its models, their device."""

    settings: ServerSettings
    models: tuple[ModelSource, ...]
    device: str


def read_config(path: Path) -> dict[str, Any]:
    """A TOML file of settings.

    :raises UsageError: if it cannot be read.
    :raises OptionsError: for a name in it that is no setting.
    """
    try:
        content = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"the configuration {str(path)!r} cannot be read: {error}") from error
    except tomllib.TOMLDecodeError as error:
        raise OptionsError(f"{str(path)!r} is no TOML: {error}") from error
    names = [*SERVER_NAMES, *ENGINE_NAMES, "device", "models"]
    check_names(content, names, f"setting in {path}")
    return content


def plan(given: Mapping[str, Any], config: Mapping[str, Any]) -> ServePlan:
    """What flags and environment (``given``, where they say something) and a configuration come to.

    :raises OptionsError: for a setting that is unknown or impossible, or if there is no model.
    """
    both = {**config, **given}
    server = {name: both[name] for name in SERVER_NAMES if name in both}
    engine = {name: both[name] for name in ENGINE_NAMES if name in both}
    for name in ("tls_certificate", "tls_key", "access_log"):
        if isinstance(server.get(name), str):
            server[name] = Path(server[name])
    tables = config.get("models", [])
    if not isinstance(tables, list) or not all(isinstance(table, dict) for table in tables):
        raise OptionsError("models in a configuration are tables: [[models]], each with a path")
    models = [ModelSource.read(table, engine) for table in tables]
    models += [ModelSource.parse(text, engine) for text in given.get("models") or []]
    if not models:
        raise OptionsError("no model to serve: asynctrt serve model.onnx, or [[models]] in --config FILE")
    device = both.get("device", "host")
    if not isinstance(device, str):
        raise OptionsError(f"device is the name of a device, not {device!r}")
    return ServePlan(ServerSettings(**server), tuple(models), device)


async def serve(planned: ServePlan, say: Callable[[str], None]) -> None:
    """Serve until SIGTERM or SIGINT.

    :param say: takes lines about how it goes.
    :raises AsynctrtError: if a port cannot be had or a model cannot be loaded.
    """
    logging.basicConfig(
        level=logging.WARNING, stream=sys.stderr, format="%(asctime)s %(levelname)s %(message)s"
    )
    logging.getLogger("asynctrt").setLevel(logging.INFO)
    let_threads_in()
    find_modules_here()
    settings = planned.settings
    repository = Repository(tensors_max=settings.max_tensors, json_max=settings.max_json)
    for source in planned.models:
        repository.add(source.name, version=source.version, opener=source.opener(planned.device))
    async with Server(repository, settings) as server:
        # It listens and heeds signals before it loads, so that who asks is told that it is alive, not ready.
        serving = asyncio.create_task(server.serve())
        loading = asyncio.create_task(_load(server, say))
        try:
            await asyncio.wait([loading, serving], return_when=asyncio.FIRST_COMPLETED)
            if loading.done():
                loading.result()
            await serving
        finally:
            for task in (loading, serving):
                task.cancel()
            await asyncio.wait([loading, serving])
        say("stopped")


async def _load(server: Server, say: Callable[[str], None]) -> None:
    """Load the models, and say where everything is."""
    repository, settings = server.repository, server.settings
    count = len(repository.index())
    say(f"loading {count} model{'s' * (count != 1)}")
    await repository.load_all()
    keep_what_is_there()
    for served in repository:
        inputs = ", ".join(str(spec) for spec in served.engine.inputs)
        say(f"{served.name} version {served.version} on {served.engine.device_name}: {inputs}")
    say(f"HTTP, websocket, dashboard  {server.http_url}")
    if server.grpc_target:
        say(f"gRPC                        {server.grpc_target}")
    say(f"metrics                     {server.metrics_url or server.http_url + '/metrics'}")
    if settings.host not in ("127.0.0.1", "::1", "localhost") and not settings.tokens:
        say("warning: open to everybody who reaches this address; set tokens to change that")
