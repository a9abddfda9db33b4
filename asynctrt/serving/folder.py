"""Find models in a folder in Triton's layout, ``NAME/VERSION/model.onnx``, and follow how it changes."""

import asyncio
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asynctrt.engine import Engine
from asynctrt.errors import AsynctrtError, ModelError, ModelNotFoundError, UnknownModelError
from asynctrt.serving.entries import Source, is_version
from asynctrt.serving.model_config import CONFIG, FILENAMES, ModelConfig, read_model_config
from asynctrt.serving.models import ModelSource, files_mark
from asynctrt.serving.repository import Repository
from asynctrt.serving.warmup import warm_all_sizes

logger = logging.getLogger("asynctrt.serving")


class ModelFolder:
    """A folder of models: a :class:`~asynctrt.serving.entries.Place` of a repository.

    :param path: the folder; each folder in it is a model, and each folder with a number for a name in that
        a version.
    :param device: the device of models whose ``config.pbtxt`` names none.
    :param settings: options of engines, over which those in a ``config.pbtxt`` win.
    :param warmup: rounds of warm-up for models without ``model_warmup``; see :func:`warm_all_sizes`.
    """

    def __init__(
        self, path: Path, *, device: str = "host", settings: Mapping[str, Any] | None = None, warmup: int = 0
    ) -> None:
        self.path = path
        self._device = device
        self._settings = dict(settings or {})
        self._warmup = warmup
        self._warned: dict[str, tuple[str, ...]] = {}

    def __repr__(self) -> str:
        return f"<ModelFolder {str(self.path)!r}>"

    async def names(self) -> list[str]:
        """Return the names of the models.

        :raises ModelNotFoundError: if the folder cannot be read.
        """
        return await asyncio.to_thread(self._names)

    async def versions(self, name: str) -> dict[str, Source]:
        """Return the versions of a model that its version policy chooses, by their numbers.

        :raises UnknownModelError: if there is no such model.
        :raises ModelError: if it has no versions, or its ``config.pbtxt`` asks for what asynctrt cannot do.
        """
        return await asyncio.to_thread(self._versions, name)

    async def marks(self) -> dict[str, Any]:
        """Return the state of each model's files, by its name.

        :raises ModelNotFoundError: if the folder cannot be read.
        """

        def look(name: str) -> Any:
            try:
                return files_mark(self.path / name)
            except ModelError as error:
                return str(error)

        return await asyncio.to_thread(lambda: {name: look(name) for name in self._names()})

    def _names(self) -> list[str]:
        try:
            with os.scandir(self.path) as found:
                return sorted(
                    item.name
                    for item in found
                    if not item.name.startswith(".") and item.name == item.name.strip() and item.is_dir()
                )
        except OSError as error:
            raise ModelNotFoundError(
                f"the models' folder {str(self.path)!r} cannot be read: {error}"
            ) from error

    def _versions(self, name: str) -> dict[str, Source]:
        if name not in self._names():
            raise UnknownModelError(f"unknown model {name!r:.200}; there is none in {str(self.path)!r}")
        folder = self.path / name
        config = read_model_config(folder)
        if config.ignored != self._warned.get(name, ()):
            self._warned[name] = config.ignored
            for sentence in config.ignored:
                logger.warning("%s: %s", folder / CONFIG, sentence)
        try:
            known = [item.name for item in folder.iterdir() if is_version(item.name) and item.is_dir()]
        except OSError as error:
            raise ModelNotFoundError(f"{str(folder)!r} cannot be read: {error}") from error
        if not known:
            raise ModelError(
                f"{str(folder)!r} has no versions: put the model into a folder with a number for a name, as "
                f"in {str(folder / '1' / FILENAMES['onnxruntime'])!r}"
            )
        return {version: self._source(folder, version, config) for version in config.policy.choose(known)}

    def _source(self, folder: Path, version: str, config: ModelConfig) -> Source:
        path = _file(folder / version, config)
        device = config.device or self._device
        settings = {**self._settings, **config.options_on(device)}
        model = ModelSource(folder.name, version, str(path), settings)
        opener = model.opener(device)
        stated = repr((str(path), device, settings, config.inputs, config.outputs, config.warmups))
        inputs = [tensor.path for item in config.warmups for tensor in item.tensors.values()]
        parts = [folder / version, *inputs]

        async def opened() -> Engine:
            engine = await opener()
            try:
                config.check(engine.inputs, engine.outputs)
                for warmup in config.warmups:
                    await warmup.run(engine)
                if not config.warmups:
                    await warm_all_sizes(engine, self._warmup)
            except BaseException:
                await engine.aclose()
                raise
            return engine

        return Source(opened, lambda: (stated, *(files_mark(part) for part in parts if part is not None)))


class FolderWatch:
    """Load what is new or changed in a folder of models, and unload what is gone.

    A model is loaded once its files have been the same for two looks in a row, so that files are not read
    while they are written; what could not be loaded is not tried again before it changes. A model that was
    unloaded on request stays so.
    """

    def __init__(self, repository: Repository, folder: ModelFolder) -> None:
        self._repository = repository
        self._folder = folder
        self._seen: dict[str, Any] | None = None
        self._done: dict[str, Any] = {}

    def __repr__(self) -> str:
        return f"<FolderWatch of {self._folder!r}, {len(self._seen or ())} models>"

    async def run(self, interval_s: float) -> None:
        """Look every ``interval_s`` seconds until cancelled."""
        while True:
            await asyncio.sleep(interval_s)
            try:
                await self.look()
            except AsynctrtError as error:
                logger.error("%r: %s", self, error)  # noqa: TRY400  (its message says all)

    async def look(self) -> None:
        """Compare the folder with how it was at the last look, and act on what has come to rest.

        :raises ModelNotFoundError: if it cannot be read; nothing is unloaded then.
        """
        marks = await self._folder.marks()
        seen, self._seen = self._seen, marks
        if seen is None:
            return
        for name, mark in marks.items():
            if seen.get(name) != mark or self._done.get(name) == mark or self._repository.is_put_aside(name):
                continue
            self._done[name] = mark
            try:
                await self._repository.load(name)
            except AsynctrtError as error:
                logger.error("%s is not loaded as it is now: %s", name, error)  # noqa: TRY400
        for name in self._repository.names(self._folder):
            if name not in marks and name not in seen:
                self._done.pop(name, None)
                await self._repository.remove(name)


def _file(folder: Path, config: ModelConfig) -> Path:
    """Return the file of a version. ONNX models may be a folder with a file of the same name."""
    names = [config.filename] if config.filename else list(FILENAMES.values())
    if config.backend and not config.filename:
        names = [FILENAMES[config.backend]]
    there = [folder / name for name in names if (folder / name).exists()]
    if len(there) > 1:
        raise ModelError(
            f"{str(folder)!r} has {' and '.join(names)}: state the backend in {CONFIG}, or remove one of them"
        )
    path = there[0] if there else folder / names[0]
    return path / path.name if path.is_dir() else path
