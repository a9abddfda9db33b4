"""Parse a user's description of a model to serve."""

from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import asynctrt
from asynctrt.engine import Engine
from asynctrt.errors import OptionsError
from asynctrt.loading import name_of
from asynctrt.options import Options


@dataclass(frozen=True, slots=True)
class ModelSource:
    """One model to serve: its name, version and path, and options for its engine.

    :raises OptionsError: if an option is unknown or invalid.
    """

    name: str
    version: str
    path: str
    """An ``.onnx`` file, or ``module:attribute``."""
    settings: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        Options.from_settings(None, dict(self.settings))

    @classmethod
    def parse(cls, text: str, settings: Mapping[str, Any]) -> "ModelSource":
        """Parse ``PATH``, ``NAME=PATH`` or ``NAME:VERSION=PATH``.

        :raises OptionsError: if the text is none of these.
        """
        named, equals, path = text.partition("=")
        if not equals:
            named, path = name_of(text), text
        if not path or not named:
            raise OptionsError(f"a model must be PATH, NAME=PATH or NAME:VERSION=PATH, not {text!r}")
        name, colon, version = named.rpartition(":")
        if not colon or not version.isdigit():
            name, version = named, "1"
        return cls(name, version, path, settings)

    @classmethod
    def read(cls, table: Mapping[str, Any], settings: Mapping[str, Any]) -> "ModelSource":
        """Read a ``[[models]]`` table of a configuration: ``path``, ``name``, ``version`` and engine options.

        :raises OptionsError: if a key or value is invalid.
        """
        own = dict(table)
        path = own.pop("path", None)
        if not isinstance(path, str):
            raise OptionsError(f"each [[models]] table needs a path, a string; this one has {path!r}")
        name = own.pop("name", None) or name_of(path)
        version = own.pop("version", 1)
        if not isinstance(name, str) or isinstance(version, bool) or not isinstance(version, int | str):
            raise OptionsError(f"name must be a string and version a number, not {name!r} and {version!r}")
        return cls(name, str(version), path, {**settings, **own})

    def opener(self, device: str) -> Callable[[], Awaitable[Engine]]:
        """Return a function that opens the model's engine when awaited."""

        async def opened(opening: Callable[[], asynctrt.Opening]) -> Engine:
            return await opening()

        return partial(
            opened, partial(asynctrt.open, self.path, device=device, options=Options(**self.settings))
        )
