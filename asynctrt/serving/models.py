"""What a user writes for a model to serve, and what it comes to."""

import dataclasses
import difflib
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
    """One model to serve: under which name and version, from where, and with which engine options.

    :raises OptionsError: for an option that is unknown or impossible.
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
        """``PATH``, ``NAME=PATH`` or ``NAME:VERSION=PATH``.

        :raises OptionsError: for what is none of these.
        """
        named, equals, path = text.partition("=")
        if not equals:
            named, path = name_of(text), text
        if not path or not named:
            raise OptionsError(f"a model is PATH, NAME=PATH or NAME:VERSION=PATH, not {text!r}")
        name, colon, version = named.rpartition(":")
        if not colon or not version.isdigit():
            name, version = named, "1"
        return cls(name, version, path, settings)

    @classmethod
    def read(cls, table: Mapping[str, Any], settings: Mapping[str, Any]) -> "ModelSource":
        """A ``[[models]]`` table of a configuration file: ``path``, ``name``, ``version`` and engine options.

        :raises OptionsError: for a key that is none of these.
        """
        own = dict(table)
        path = own.pop("path", None)
        if not isinstance(path, str):
            raise OptionsError(f"each of the [[models]] has a path, a string; this one has {path!r}")
        name = own.pop("name", None) or name_of(path)
        version = own.pop("version", 1)
        if not isinstance(name, str) or isinstance(version, bool) or not isinstance(version, int | str):
            raise OptionsError(f"name is a string and version a number, not {name!r} and {version!r}")
        return cls(name, str(version), path, {**settings, **own})

    def opener(self, device: str) -> Callable[[], Awaitable[Engine]]:
        """A function that opens it, when awaited."""

        async def opened(opening: Callable[[], asynctrt.Opening]) -> Engine:
            return await opening()

        return partial(
            opened, partial(asynctrt.open, self.path, device=device, options=Options(**self.settings))
        )


def check_names(given: Mapping[str, Any], known: list[str], where: str) -> None:
    """Whether every name is known.

    :raises OptionsError: for the first that is not; it says which one is nearest.
    """
    for name in given:
        if name not in known:
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.4)
            hint = f"Did you mean {nearest[0]!r}? " if nearest else ""
            raise OptionsError(f"{name!r} is no setting in {where}. {hint}There are: {', '.join(known)}")


def engine_option_names() -> list[str]:
    """The names of the options that an engine has."""
    return [item.name for item in dataclasses.fields(Options)]
