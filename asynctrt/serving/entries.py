"""What a repository knows of a model: its versions, where they come from, and why one is not served."""

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
"""Why a loaded model is not ready for a moment. Requests for it wait."""

NOT_READY: Final = {"lost": LOST, "restarting": RESTARTING}
"""The states of an engine in which a loaded model is not ready, and why."""

LOADING: Final = "LOADING"
UNLOADING: Final = "UNLOADING"

NOT_LOADED: Final = "not loaded yet"
"""Why a model is not served before its first load."""

UNLOADED: Final = "unloaded"
"""Why a model that was unloaded on purpose is not served."""


@dataclass(frozen=True, slots=True)
class Source:
    """Where a version of a model comes from."""

    opener: Callable[[], Awaitable[Engine]]
    """Opens its engine and warms it up."""
    mark: Callable[[], Any] | None = None
    """Returns a value that changes when the model does, such as the times and sizes of its files. While it is
    what it was, the version is not loaded again; without a mark, it is loaded at each request. Blocks."""


class Place(Protocol):
    """Where models are found, and found anew at each load: a folder, for one."""

    async def names(self) -> list[str]:
        """Return the names of its models."""

    async def versions(self, name: str) -> Mapping[str, Source]:
        """Return the versions of a model that are to be served.

        :raises UnknownModelError: if it has no such model.
        :raises AsynctrtError: if the model cannot be served as it is.
        """


@dataclass(slots=True)
class Entry:
    """One version of a model, served or not."""

    served: ServedModel | None = None
    source: Source | None = None
    """``None`` for an engine that the application opened itself."""
    reason: str = NOT_LOADED
    """Why it is not served; or why what is served is not what its files are now."""
    unloaded: ServedModel | None = None
    """The application's own engine after it was unloaded: it stays open, and can be loaded again."""
    is_awaited: bool = True
    """Whether the server is not ready before it is served: not, if it came while the server was running."""
    change: str = ""
    """``LOADING`` or ``UNLOADING`` meanwhile."""

    @property
    def is_ready(self) -> bool:
        """Whether it is served by an engine that can run batches now."""
        return self.served is not None and not self.why_not

    @property
    def is_put_aside(self) -> bool:
        """Whether it was unloaded on purpose, or came later and was never served."""
        return self.served is None and (self.reason == UNLOADED or not self.is_awaited)

    @property
    def why_not(self) -> str:
        """Why it is not ready; empty if it is, or if nothing is known against it."""
        if self.served is None:
            return self.reason
        return NOT_READY.get(self.served.engine.state, "")

    @property
    def state(self) -> str:
        """Triton's word for it."""
        return "READY" if self.is_ready else self.change or "UNAVAILABLE"


@dataclass(slots=True)
class Model:
    """The versions of a model, oldest first."""

    versions: dict[str, Entry] = field(default_factory=dict)
    place: Place | None = None
    """Where its versions are found; ``None`` if they were added one by one."""
    changing: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Held while it is loaded, unloaded or removed."""
    nothing: Entry = field(default_factory=Entry)
    """What is listed while it has no versions."""

    @property
    def entries(self) -> list[Entry]:
        """Its versions, or what stands for them."""
        return list(self.versions.values()) or [self.nothing]

    @property
    def is_serving(self) -> bool:
        """Whether a version of it is served."""
        return any(entry.served is not None for entry in self.versions.values())

    @property
    def is_put_aside(self) -> bool:
        """Whether it was unloaded on purpose."""
        return all(entry.served is None and entry.reason == UNLOADED for entry in self.entries)

    def listed(self) -> list[tuple[str, Entry]]:
        """Return its versions by their numbers; one without a number if there are none."""
        return list(self.versions.items()) or [("", self.nothing)]

    def add(self, version: str, entry: Entry) -> None:
        """Add a version. A request without one means the newest."""
        self.versions[version] = entry
        self.versions = dict(sorted(self.versions.items(), key=lambda item: int(item[0])))

    def blame(self, error: Exception) -> None:
        """Note why it could not be loaded as it is now. What is served of it stays."""
        for entry in self.entries:
            entry.reason = without_folders(str(error))


def is_name(text: str) -> bool:
    """Return whether a text can name a model: in URLs, JSON, metrics and logs."""
    return bool(text) and text.isprintable() and text == text.strip()


def is_version(text: str) -> bool:
    """Return whether a text is a version: a whole number, written without leading zeros."""
    return text.isascii() and text.isdigit() and str(int(text)) == text
