"""Parse a user's description of a model to serve."""

import os
import stat
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, Final, Self

import asynctrt
from asynctrt.core.loading import ENGINE_NAME, is_attribute, name_of
from asynctrt.engine import Engine
from asynctrt.errors import ModelError, OptionsError, show
from asynctrt.options import Options
from asynctrt.serving.attributes import open_attribute

FILES_MAX: Final = 10_000
"""Files that a model may have, so that a home directory given by mistake is refused."""


@dataclass(frozen=True, slots=True)
class ModelSource:
    """One model to serve: its name, version and path, and options for its engine."""

    name: str
    version: str
    path: str
    """An ``.onnx`` file or a TensorRT plan, a folder of models, or ``module:attribute``."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    device: str | None = None
    """Its device; ``None``: the server's."""

    def __post_init__(self) -> None:
        Options.from_settings(None, dict(self.settings))

    @classmethod
    def parse(cls, text: str, settings: Mapping[str, Any]) -> "ModelSource":
        """Parse ``PATH``, ``NAME=PATH`` or ``NAME:VERSION=PATH``."""
        named, equals, path = text.partition("=")
        if not equals and text and is_folder(text):
            return cls("", "", text, settings)
        if not equals:
            named, path = name_of(text), text
        if not path or not named:
            raise OptionsError(f"a model must be PATH, NAME=PATH or NAME:VERSION=PATH, not {show(text)}")
        name, colon, version = named.rpartition(":")
        if not colon or not version.isdigit():
            name, version = named, "1"
        return cls(name, version, path, settings)

    @classmethod
    def read(cls, table: Mapping[str, Any], settings: Mapping[str, Any]) -> "ModelSource":
        """Read a ``[[models]]`` table of a configuration.

        It has a ``path``, and may have a ``name``, a ``version``, a ``device`` and engine options.
        """
        own = dict(table)
        path = own.pop("path", None)
        if not isinstance(path, str):
            raise OptionsError(f"each [[models]] table needs a path, a string; this one has {show(path)}")
        device = own.pop("device", None)
        if not isinstance(device, str | None):
            raise OptionsError(f"the device of {path!r} must be the name of a device, not {show(device)}")
        if is_folder(path):
            if "name" in own or "version" in own:
                raise OptionsError(
                    f"{path!r} is a folder, which gives its models names and versions: leave them out"
                )
            return cls._checked("", "", path, {**settings, **own}, device)
        name = own.pop("name", None) or name_of(path)
        version = own.pop("version", 1)
        if not isinstance(name, str) or isinstance(version, bool) or not isinstance(version, int | str):
            raise OptionsError(
                f"name must be a string and version a number, not {show(name)} and {show(version)}"
            )
        return cls._checked(name, str(version), path, {**settings, **own}, device)

    @classmethod
    def _checked(cls, name: str, version: str, path: str, settings: Any, device: Any) -> Self:
        """Return one that a table describes; an error says which of several it is."""
        try:
            return cls(name, version, path, settings, device)
        except OptionsError as error:
            raise OptionsError(f"the model {name or path!r}: {error}") from None

    @property
    def is_folder(self) -> bool:
        """Whether its path is that of a folder of models."""
        return not self.name

    def opener(self, device: str) -> Callable[[], Awaitable[Engine]]:
        """Return a function that opens the model's engine when awaited.

        :param device: the device if the model names none.
        """

        async def opened() -> Engine:
            token = ENGINE_NAME.set(f"{self.name}:{self.version}")
            try:
                on = self.device or device
                if is_attribute(self.path) and self.settings.get("isolation", "none") == "none":
                    return await open_attribute(self.path, on, self.settings)
                return await asynctrt.open(self.path, device=on, options=Options(**self.settings))
            finally:
                ENGINE_NAME.reset(token)

        return opened

    def mark(self) -> Any:
        """Return the state of the model's file; ``None`` if it is not one. Blocks."""
        return files_mark(Path(self.path)) or None


def is_folder(path: str) -> bool:
    """Return whether a path is that of a folder of models. One that is called like a model is a model."""
    return Path(path).is_dir() and Path(path).suffix != ".onnx"


def files_mark(path: Path) -> tuple[tuple[str, int, int, int], ...]:
    """Return name, size, time of change and inode of a file, or of all files in a folder. Blocks.

    Files that go away meanwhile are left out; so is all of a path that does not exist. A folder that several
    links lead to counts once.
    """
    found: list[tuple[str, int, int, int]] = []
    folders: set[tuple[int, int]] = set()
    waiting, looked_at = [path], 0
    while waiting:
        part = waiting.pop()
        looked_at += 1
        try:
            status = part.stat()
            if not stat.S_ISDIR(status.st_mode):
                found.append((str(part), status.st_size, status.st_mtime_ns, status.st_ino))
            elif (status.st_dev, status.st_ino) not in folders:
                folders.add((status.st_dev, status.st_ino))
                with os.scandir(part) as entries:
                    waiting += [part / entry.name for entry in islice(entries, FILES_MAX + 1)]
        except OSError:
            continue
        if looked_at + len(waiting) > FILES_MAX:
            raise ModelError(f"{str(path)!r} has more than {FILES_MAX} files: is it a model?")
    return tuple(sorted(found))
