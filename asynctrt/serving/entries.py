"""A repository's records of a model: its versions, their sources, and why one is not served."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Protocol

from asynctrt.engine import Engine
from asynctrt.serving.responses import without_folders
from asynctrt.serving.served import ServedModel

LOST: Final = "nothing can run it now: see the log, and restart the server if that lasts"
"""Why a loaded model is not ready."""

RESTARTING: Final = "its worker process died, and another one is starting"
"""Why a loaded model is temporarily not ready. Requests for it wait."""

NOT_READY: Final = {"lost": LOST, "restarting": RESTARTING}
"""The states of an engine in which a loaded model is not ready, and why."""

LOADING: Final = "LOADING"
UNLOADING: Final = "UNLOADING"

NOT_LOADED: Final = "not loaded yet"
"""Why a model is not served before its first load."""

UNLOADED: Final = "unloaded"
"""Why a model that was unloaded on purpose is not served."""


@dataclass(frozen=True, slots=True)
class VersionSource:
    """The source that a version of a model is opened from."""

    opener: Callable[[], Awaitable[Engine]]
    """Opens its engine and warms it up."""
    mark: Callable[[], Any] | None = None
    """Returns a value that changes when the model does, such as the times and sizes of its files. While it is
    unchanged, the version is not loaded again; without a mark, every load request loads it. Blocks."""


class ModelPlace(Protocol):
    """A place that models are found in, and looked up again at each load, such as a folder."""

    async def names(self) -> list[str]:
        """Return the names of its models."""

    async def versions(self, name: str) -> Mapping[str, VersionSource]:
        """Return the versions of a model to serve.

        :raises UnknownModelError: if it has no such model.
        :raises AsynctrtError: if the model cannot be served in its current state.
        """


@dataclass(slots=True)
class Entry:
    """One version of a model, served or not."""

    served: ServedModel | None = None
    source: VersionSource | None = None
    """``None`` for an engine that the application opened itself."""
    reason: str = NOT_LOADED
    """Why it is not served; or why an earlier state of its files still is."""
    unloaded: ServedModel | None = None
    """The application's own engine after it was unloaded: it stays open and can be loaded again."""
    is_awaited: bool = True
    """Whether the server is not ready until it is served: false if it appeared while the server ran."""
    change: str = ""
    """``LOADING`` or ``UNLOADING`` while the version is being loaded or unloaded; otherwise empty."""

    @property
    def is_ready(self) -> bool:
        """Whether it is served by an engine that can run batches now."""
        return self.served is not None and not self.why_not

    @property
    def is_put_aside(self) -> bool:
        """Whether it was unloaded on purpose, or appeared later and has never been served."""
        return self.served is None and (self.reason == UNLOADED or not self.is_awaited)

    @property
    def why_not(self) -> str:
        """Why it is not ready; empty if it is ready, or if no reason is known."""
        if self.served is None:
            return self.reason
        return NOT_READY.get(self.served.engine.state, "")

    @property
    def state(self) -> str:
        """Triton's name for the state."""
        return "READY" if self.is_ready else self.change or "UNAVAILABLE"


@dataclass(slots=True)
class ModelEntry:
    """The versions of a model, oldest first."""

    versions: dict[str, Entry] = field(default_factory=dict)
    place: ModelPlace | None = None
    """Where its versions are found; ``None`` if they were added one by one."""
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while the model is loaded, unloaded or removed."""
    nothing: Entry = field(default_factory=Entry)
    """The entry to list while the model has no versions."""

    @property
    def entries(self) -> list[Entry]:
        """The entries of its versions, or the placeholder if there are none."""
        return list(self.versions.values()) or [self.nothing]

    @property
    def is_serving(self) -> bool:
        """Whether a version of it is served."""
        return any(entry.served is not None for entry in self.versions.values())

    def listed(self) -> list[tuple[str, Entry]]:
        """Return its entries by version number; the placeholder, without a number, if there are none."""
        return list(self.versions.items()) or [("", self.nothing)]

    def add(self, version: str, entry: Entry) -> None:
        """Add a version. A request that names none means the newest."""
        self.versions[version] = entry
        self.versions = dict(sorted(self.versions.items(), key=lambda item: int(item[0])))

    def blame(self, error: Exception) -> None:
        """Record why its current files could not be loaded. Versions being served stay."""
        for entry in self.entries:
            entry.reason = without_folders(str(error))


def is_name(text: str) -> bool:
    """Return whether a text is a valid model name in URLs, JSON, metrics and logs."""
    return bool(text) and text.isprintable() and text == text.strip()


def is_version(text: str) -> bool:
    """Return whether a text is a version: a whole number without leading zeros."""
    return text.isascii() and text.isdigit() and str(int(text)) == text
