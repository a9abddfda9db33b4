"""Find models in a folder in Triton's layout, ``NAME/VERSION/model.onnx``, or that of a single model."""

import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from asynctrt._util.files import SpecialFileError, check_within
from asynctrt._util.loops import in_lost_thread
from asynctrt.backends.registry import filenames
from asynctrt.engine import Engine
from asynctrt.errors import ModelError, ModelNotFoundError, UnknownModelError
from asynctrt.serving.entries import VersionSource, is_name, is_version
from asynctrt.serving.model_config import CONFIG, ModelConfig, read_model_config
from asynctrt.serving.models import ModelSource, files_mark

NOT_MODELS: Final = ("lost+found", "__pycache__")
"""Folders that file systems and Python create."""

logger = logging.getLogger("asynctrt.serving")


@dataclass(frozen=True, slots=True)
class FoundVersion:
    """A version of a model as it was found: where it is, and what its ``config.pbtxt`` said."""

    model: ModelSource
    config: ModelConfig
    folder: Path

    def source(self) -> VersionSource:
        """Return the source from which a repository opens it."""
        return VersionSource(self._opened, self._mark)

    async def _opened(self) -> Engine:
        engine = await self.model.opener("host")()
        try:
            self.config.check(engine.inputs, engine.outputs)
        except BaseException:
            await engine.aclose()
            raise
        return engine

    def _mark(self) -> Any:
        model, config = self.model, self.config
        stated = model.path, model.device, model.settings, config.inputs, config.outputs
        return repr(stated), files_mark(self.folder)


@dataclass(frozen=True, slots=True)
class FoundModels:
    """The models of a folder when it was read: a fixed :class:`~asynctrt.serving.entries.ModelPlace`."""

    path: Path
    models: Mapping[str, Mapping[str, FoundVersion]]

    async def names(self) -> list[str]:
        """Return the names of the models."""
        return list(self.models)

    async def versions(self, name: str) -> dict[str, VersionSource]:
        """Return the versions of a model by number."""
        return {version: found.source() for version, found in self.models[name].items()}


class ModelFolder:
    """A folder of models: a :class:`~asynctrt.serving.entries.ModelPlace` of a repository.

    :param path: the folder. Each folder in it is a model; in a model, each folder whose name is a number is a
        version. A ``model.onnx`` or ``model.plan`` right in it is version 1 of a model of the folder's name.
    :param device: the device of models whose ``config.pbtxt`` names none.
    :param settings: options of engines; those in a ``config.pbtxt`` take precedence.
    """

    def __init__(
        self, path: Path, *, device: str = "host", settings: Mapping[str, Any] | None = None
    ) -> None:
        self.path = path
        self._device = device
        self._settings = dict(settings or {})
        self._warned: dict[str, tuple[str, ...]] = {}
        self._left_out: set[str] = set()

    def __repr__(self) -> str:
        return f"<ModelFolder {str(self.path)!r}>"

    async def names(self) -> list[str]:
        """Return the names of the models.

        :raises ModelNotFoundError: if the folder cannot be read.
        """
        return await in_lost_thread(self._names)

    async def versions(self, name: str) -> dict[str, VersionSource]:
        """Return the versions of a model that its version policy chooses, by number.

        :raises UnknownModelError: if there is no such model.
        :raises ModelError: if it has no versions, or its ``config.pbtxt`` asks for something unsupported.
        """
        found = await in_lost_thread(partial(self._versions, name))
        return {version: one.source() for version, one in found.items()}

    async def found(self) -> FoundModels:
        """Return the models that the folder has now, for a server that does not follow changes.

        :raises AsynctrtError: if the folder cannot be read, or a model cannot be served in its current state.
        """

        def look() -> FoundModels:
            return FoundModels(self.path, {name: self._versions(name) for name in self._names()})

        return await in_lost_thread(look)

    def _names(self) -> list[str]:
        try:
            with os.scandir(self.path) as found:
                entries = {item.name: Path(item).is_dir() for item in found if item.name[0] != "."}
        except OSError as error:
            raise ModelNotFoundError(
                f"the models' folder {str(self.path)!r} cannot be read: {error}"
            ) from error
        files = set(filenames().values())
        folders = [name for name, is_dir in entries.items() if is_dir and name not in files.union(NOT_MODELS)]
        if not files.isdisjoint(entries):
            folders.append(self.path.resolve().name)
        names = {name for name in folders if is_name(name) and self._is_model(name)}
        left_out = set(folders) - names
        if left_out - self._left_out:
            logger.warning(
                "%d folders in %s are ignored, because their names are not printable, or because they have "
                "neither a version, such as 1/model.onnx, nor a %s; one is %r",
                *(len(left_out), self.path, CONFIG, min(left_out)),
            )
        self._left_out = left_out
        return sorted(names)

    def _is_model(self, name: str) -> bool:
        """Return whether the folder of that name is a model. If it does not exist, this one is meant."""
        try:
            with os.scandir(self.path / name) as found:
                return any(item.name == CONFIG or is_version(item.name) for item in found)
        except OSError:
            return True  # If it cannot be read, loading it says why.

    def _versions(self, name: str) -> dict[str, FoundVersion]:
        if name not in self._names():
            raise UnknownModelError(f"unknown model {name!r:.200}; there is none in {str(self.path)!r}")
        folder = self.path / name
        is_bare = not folder.is_dir()
        if is_bare:
            folder = self.path.resolve()
        self._check_within(folder)
        config = read_model_config(folder, self.path)
        if config.ignored != self._warned.get(name, ()):
            self._warned[name] = config.ignored
            for sentence in config.ignored:
                logger.warning("%s: %s", folder / CONFIG, sentence)
        if is_bare:
            return {"1": self._version(folder, "1", config, folder)}
        try:
            known = [item.name for item in folder.iterdir() if is_version(item.name) and item.is_dir()]
        except OSError as error:
            raise ModelNotFoundError(f"{str(folder)!r} cannot be read: {error}") from error
        if not known:
            raise ModelError(
                f"{str(folder)!r} has no versions: put the model into a folder with a number for a name, as "
                f"in {str(folder / '1' / filenames()['onnxruntime'])!r}"
            )
        chosen = config.policy.choose(known)
        return {version: self._version(folder, version, config, folder / version) for version in chosen}

    def _check_within(self, path: Path) -> None:
        try:
            check_within(path, self.path)
        except SpecialFileError as error:
            raise ModelError(
                f"{str(path)!r} is not read: {error.strerror}. Put the file itself there"
            ) from error

    def _version(self, folder: Path, version: str, config: ModelConfig, place: Path) -> FoundVersion:
        path = _file(place, config)
        self._check_within(path)
        device = config.device or self._device
        settings = {**self._settings, **config.options_on(device)}
        model = ModelSource(folder.name, version, str(path), settings, device)
        return FoundVersion(model, config, place)


def _file(folder: Path, config: ModelConfig) -> Path:
    """Return the file of a version. An ONNX model may be a folder that holds a file of the same name."""
    names = [config.filename] if config.filename else list(filenames().values())
    if config.backend and not config.filename:
        names = [filenames()[config.backend]]
    there = [folder / name for name in names if (folder / name).exists()]
    if len(there) > 1:
        raise ModelError(
            f"{str(folder)!r} has {' and '.join(names)}: state the backend in {CONFIG}, or remove one of them"
        )
    path = there[0] if there else folder / names[0]
    return path / path.name if path.is_dir() else path
