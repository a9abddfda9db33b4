"""A server's models by name and version: load and unload them, and count their requests."""

import asyncio
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

from asynctrt._util.loops import in_lost_thread
from asynctrt.engine import Engine
from asynctrt.errors import (
    AsynctrtError,
    EngineClosedError,
    ModelError,
    ModelNotReadyError,
    UnknownModelError,
    UsageError,
    describe,
    show,
)
from asynctrt.serving.entries import (
    LOADING,
    NOT_LOADED,
    NOT_READY,
    UNLOADED,
    UNLOADING,
    Entry,
    ModelEntry,
    ModelPlace,
    VersionSource,
    is_name,
    is_version,
)
from asynctrt.serving.responses import without_folders
from asynctrt.serving.served import ServedModel
from asynctrt.serving.settings import ServerSettings

ALONE_S: Final = 60.0
"""How long a model is opened alone at the start. If one hangs, the others are served anyway."""

LOST_NS: Final = 30_000_000_000
"""How long a server whose device is lost stays alive: balancers notice before a supervisor ends it."""

logger = logging.getLogger("asynctrt.serving")


class Repository:
    """Models by name and version. Engines that were added open are closed by their owner.

    :param settings: its limits on requests apply: ``max_json`` and ``max_answer``. A server of it has these
        settings unless it is given others.
    """

    def __init__(self, settings: ServerSettings | None = None) -> None:
        self.settings = settings or ServerSettings()
        self._models: dict[str, ModelEntry] = {}
        self._places: list[ModelPlace] = []
        # Places that were not looked through yet: a server listens before it looks.
        self._unseen: list[ModelPlace] = []
        self._retiring: dict[asyncio.Task[None], ServedModel] = {}
        self.loading: set[asyncio.Task[Any]] = set()
        """The tasks that are loading a model."""
        self._is_started = False
        self._lost_ns: int | None = None
        self.is_draining = False
        self.is_live = True
        """Whether the process is of use: false once a device has been lost for long enough."""
        self.is_starting = False
        """Whether the server is still starting: it is not ready then, even if its models are."""
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<Repository {', '.join(f'{model.name}:{model.version}' for model in self)}>"

    def __iter__(self) -> Iterator[ServedModel]:
        """Iterate over the models that are served now."""
        for model in self._models.values():
            for entry in model.versions.values():
                if entry.served is not None:
                    yield entry.served

    @property
    def is_ready(self) -> bool:
        """Whether there are models, each that was not unloaded is ready, and the server is not draining.

        False until all places that the repository started with were looked through.
        """
        return (
            not (self.is_draining or self.is_starting or self._unseen)
            and bool(self._models)
            and all(
                entry.is_ready or entry.is_put_aside
                for model in self._models.values()
                for entry in model.entries
            )
        )

    def look_for_losses(self, now_ns: int) -> list[str]:
        """Return the names of models that can no longer run in this process.

        :data:`LOST_NS` after a loss :attr:`is_live` turns false; it is true again without losses.
        """
        lost = [served.name for served in self if served.engine.state == "lost"]
        self._lost_ns = (now_ns if self._lost_ns is None else self._lost_ns) if lost else None
        self.is_live = self._lost_ns is None or now_ns - self._lost_ns < LOST_NS
        return lost

    def add(
        self,
        name: str,
        engine: Engine | None = None,
        *,
        version: str = "1",
        opener: Callable[[], Any] | None = None,
        mark: Callable[[], Any] | None = None,
    ) -> None:
        """Serve an open engine, or one that :meth:`load` opens with ``opener``.

        :param mark: returns a value that changes with the model, in a thread: see :class:`VersionSource`.
        :raises UsageError: if that version of the model exists, or name or version are malformed.
        :raises ModelError: if KServe has no datatype for one of its tensors.
        """
        if not is_version(version):
            raise UsageError(
                f"a model's version must be a whole number, not {show(version)}, as in NAME:2=PATH"
            )
        if not is_name(name):
            raise UsageError(
                "a model's name must be printable, and not be empty or begin or end with a space, unlike "
                f"{show(name)}"
            )
        model = self._models.get(name) or ModelEntry()
        if model.place is not None:
            raise UsageError(
                f"the versions of model {name!r} come from {model.place!r}: give this one another name"
            )
        if version in model.versions:
            raise UsageError(f"duplicate version {version} of model {name!r}: give this one another version")
        served = None
        if engine is not None:
            served = ServedModel(name, version, engine, self.settings)
        entry = Entry(served, reason="" if served else NOT_LOADED)
        if opener is not None:
            entry.source = VersionSource(opener, mark)
        model.add(version, entry)
        self._models[name] = model

    def add_place(self, place: ModelPlace) -> None:
        """Serve the models of a place. :meth:`load_all` looks for them, and so does each :meth:`load`.

        The repository is not ready until one of these, or :meth:`look_for_models`, has looked through the
        place. A place added after :meth:`load_all` does not make it unready.
        """
        self._places.append(place)
        if not self._is_started:
            self._unseen.append(place)

    def find(self, name: str, version: str = "") -> ServedModel:
        """Return the model of that name; without a version, the newest that is served. Any thread may ask.

        :raises UnknownModelError: if the name or version is unknown.
        :raises ModelNotReadyError: if it is not loaded.
        """
        model = self._models.get(name)
        if model is None:
            known = ", ".join(map(repr, list(self._models)))
            raise UnknownModelError(f"unknown model {name!r:.200}; known models: {known or 'none'}")
        versions = model.versions
        if version:
            if version not in versions:
                raise UnknownModelError(
                    f"unknown version {version!r:.40} of {name!r}; known versions: {', '.join(versions)}"
                )
            entry = versions[version]
            if (served := entry.served) is None:
                raise ModelNotReadyError(f"version {version} of {name!r} is not served: {entry.reason}")
            return served
        for entry in reversed(list(versions.values())):
            if (served := entry.served) is not None:
                return served
        reasons = "; ".join(entry.reason for entry in model.entries)
        raise ModelNotReadyError(f"{name!r} is not served: {reasons}")

    def find_ready(self, name: str, version: str = "") -> ServedModel:
        """Return the model, as :meth:`find` does, if its engine can run batches now.

        :raises ModelNotReadyError: also if its device is lost.
        """
        served = self.find(name, version)
        why_not = NOT_READY.get(served.engine.state)
        if why_not is not None:
            raise ModelNotReadyError(f"version {served.version} of {name!r} is not served: {why_not}")
        return served

    def versions(self, name: str) -> list[str]:
        """Return the versions of a model that are served."""
        return [version for version, entry in self._models[name].versions.items() if entry.served]

    def index(self) -> list[dict[str, str]]:
        """Return the repository extension's list of models."""
        return [
            {
                "name": name,
                "version": version,
                "state": entry.state,
                "reason": entry.why_not or entry.reason,
            }
            for name, model in self._models.items()
            for version, entry in model.listed()
        ]

    async def load_all(self) -> None:
        """Load every model that is not loaded, including the models of all places.

        :raises AsynctrtError: the first failure, once the others were loaded; all are listed with reasons.
        """
        failures: list[AsynctrtError] = []

        async def load(name: str) -> None:
            try:
                await self.load(name)
            except AsynctrtError as error:
                if failures:  # The first failure is raised instead.
                    logger.warning("cannot load model %s: %s", name, error)
                failures.append(error)

        tasks: list[asyncio.Task[None]] = []
        try:
            for name in await self.look_for_models():
                model = self._models[name]
                if model.place is not None or any(entry.served is None for entry in model.versions.values()):
                    tasks.append(asyncio.create_task(load(name)))
                    # One by one, because measurements made while loading would be wrong beside others.
                    await asyncio.wait(tasks[-1:], timeout=ALONE_S)
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)
        self._is_started = True
        if failures:
            raise failures[0]

    async def look_for_models(self) -> list[str]:
        """Look for new models in all places, list them without loading them, and return all names.

        :raises AsynctrtError: if a place cannot be read, or two have a model of the same name.
        """
        for place in self._places:
            for name in await self._names(place):
                self._place(name, place)
        return list(self._models)

    async def _names(self, place: ModelPlace) -> list[str]:
        names = await place.names()
        # The caller lists them before anything else runs.
        if place in self._unseen:
            self._unseen.remove(place)
        return names

    def _place(self, name: str, place: ModelPlace) -> ModelEntry:
        """Return the model of that name, found in a place; add it if it is new."""
        model = self._models.get(name)
        if model is None:
            model = self._models[name] = ModelEntry(place=place)
            model.nothing.is_awaited = not self._is_started
        elif model.place is not place:
            raise UsageError(f"model {name!r} of {place!r} has the name of another: rename one of them")
        return model

    async def load(self, name: str) -> None:
        """Load a model, or reload it: all its versions, in their current state.

        A served version keeps answering until the new one is open and warm, and still answers the requests it
        was sent. Versions whose files are unchanged stay; missing ones are no longer served. If a version of
        a served model cannot be opened, nothing changes.

        :raises UnknownModelError: for a name that is not in the repository.
        :raises AsynctrtError: if a version cannot be opened; it is listed with the reason.
        """
        task = asyncio.current_task()
        assert task is not None
        self.loading.add(task)
        try:
            model = self._models.get(name)
            await self._load(name, await self._found(name) if model is None else model)
        finally:
            self.loading.discard(task)

    async def _load(self, name: str, model: ModelEntry) -> None:
        async with model.changing:
            # At most one engine per version may be on its way out.
            await self._settled(name)
            was_serving = model.is_serving
            try:
                wanted = await self._wanted(name, model)
            except AsynctrtError as error:
                model.blame(error)
                raise
            except Exception as raised:
                typed = _typed(raised, name)
                model.blame(typed)
                raise typed from raised
            opened, failures = await self._open(name, model, wanted)
            if failures and was_serving:
                await _close(opened.values())
            else:
                gone = [] if failures else [version for version in model.versions if version not in wanted]
                self._swap(model, opened, gone)
            if failures:
                raise failures[0]

    async def _found(self, name: str) -> ModelEntry:
        """Find and return a model that is new in its place."""
        for place in self._places:
            if name in await self._names(place):
                return self._place(name, place)
        return self._known(name)

    async def _wanted(self, name: str, model: ModelEntry) -> Mapping[str, VersionSource | None]:
        """Return the versions of a model to serve."""
        if model.place is not None:
            return await model.place.versions(name)
        return {version: entry.source for version, entry in model.versions.items()}

    async def _open(
        self, name: str, model: ModelEntry, wanted: Mapping[str, VersionSource | None]
    ) -> tuple[dict[str, ServedModel], list[AsynctrtError]]:
        """Open the versions whose current files are not served, without serving them yet."""
        opened: dict[str, ServedModel] = {}
        failures: list[AsynctrtError] = []
        is_awaited = not self._is_started and not model.is_serving
        try:
            for version, source in wanted.items():
                entry = model.versions.get(version)
                if entry is None:
                    entry = Entry(is_awaited=is_awaited)
                    model.add(version, entry)
                if entry.unloaded is not None:
                    entry.served, entry.unloaded, entry.reason = entry.unloaded, None, ""
                if source is None:
                    continue
                entry.source, entry.change = source, LOADING
                try:
                    served = await self._opened(name, version, entry, source)
                except Exception as raised:
                    error = _typed(raised, name)
                    entry.reason = without_folders(str(error))
                    # The first one is raised, and the caller reports it.
                    level = logging.WARNING if failures else logging.DEBUG
                    logger.log(level, "cannot load model %s version %s: %s", name, version, error)
                    failures.append(error)
                else:
                    if served is not None:
                        opened[version] = served
                finally:
                    entry.change = ""
            if self._is_closed:
                raise EngineClosedError("the server was closed while it was loading the model")
        except BaseException:
            await _close(opened.values())
            raise
        return opened, failures

    async def _opened(
        self, name: str, version: str, entry: Entry, source: VersionSource
    ) -> ServedModel | None:
        """Open one version; return ``None`` if the served one matches its files."""
        mark = None if source.mark is None else await in_lost_thread(source.mark)
        if entry.served is not None and mark is not None and mark == entry.served.mark:
            entry.reason = ""
            return None
        engine = await source.opener()
        try:
            if self._is_closed:
                raise EngineClosedError("the server was closed while it was loading the model")
            served = ServedModel(name, version, engine, self.settings)
            if source.mark is not None and mark != await in_lost_thread(source.mark):
                raise ModelError(
                    f"version {version} of {name!r} was changed while it was being loaded: load it again "
                    "when its files are complete"
                )
        except BaseException:
            await engine.aclose()
            raise
        served.mark = mark
        return served

    def _swap(self, model: ModelEntry, opened: Mapping[str, ServedModel], gone: Iterable[str]) -> None:
        """Serve the opened versions, and stop serving the ones that they replace or that are gone."""
        for version, served in opened.items():
            entry = model.versions[version]
            before, entry.served = entry.served, served
            entry.reason, entry.is_awaited = "", True
            inputs = ", ".join(str(spec) for spec in served.engine.inputs)
            logger.info(
                "%s model %s version %s on %s: %s",
                "replaced" if before else "loaded",
                served.name,
                version,
                served.engine.device_name,
                inputs,
            )
            if before is not None:
                self._retire(before)
        for version in gone:
            served_before = model.versions.pop(version).served
            if served_before is not None:
                logger.info(
                    "unloaded model %s version %s, which is not to be served any more",
                    served_before.name,
                    version,
                )
                self._retire(served_before)

    def _retire(self, served: ServedModel) -> None:
        """Let an engine that is no longer served answer the requests it was sent, then close it."""

        async def retire() -> None:
            try:
                await served.drain()
            finally:
                await served.aclose()

        task = asyncio.create_task(retire())
        self._retiring[task] = served
        task.add_done_callback(self._retired)

    def _retired(self, task: "asyncio.Task[None]") -> None:
        served = self._retiring.pop(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("%r could not be closed", served, exc_info=error)

    async def _settled(self, name: str | None = None) -> None:
        """Wait until the engines that a model, or any model, no longer uses are closed."""
        tasks = [task for task, served in self._retiring.items() if name in (None, served.name)]
        if tasks:
            await asyncio.wait(tasks)

    async def unload(self, name: str) -> None:
        """Stop serving every version of a model: new requests are refused, accepted ones are answered.

        :raises UnknownModelError: for a name that is not in the repository.
        """
        model = self._known(name)
        async with model.changing:
            entries = model.entries
            for entry in entries:
                served, entry.served = entry.served, None
                entry.reason = UNLOADED
                if served is None:
                    continue
                logger.info("unloaded model %s version %s", name, served.version)
                if entry.source is None:
                    entry.unloaded = served
                else:
                    entry.change = UNLOADING
                    self._retire(served)
            try:
                await self._settled(name)
            finally:
                for entry in entries:
                    entry.change = ""

    async def drain(self) -> None:
        """Refuse new requests, and return once the accepted ones are answered."""
        self.is_draining = True
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._settled())
            for served in self:
                tasks.create_task(served.drain())

    async def aclose(self) -> None:
        """Close the engines that the repository opened. Their remaining requests finish or fail."""
        self.is_draining = self._is_closed = True
        for model in self._models.values():
            for entry in model.entries:
                served, entry.served = entry.served, None
                entry.reason = "closed"
                if served is not None and entry.source is not None:
                    await served.aclose()
        await _close(list(self._retiring.values()))
        await self._settled()

    def _known(self, name: str) -> ModelEntry:
        if name not in self._models:
            raise UnknownModelError(f"unknown model {name!r:.200}; the repository does not list it")
        return self._models[name]


def _typed(error: Exception, name: str) -> AsynctrtError:
    """Return the error of a model that cannot be loaded: broken files must affect no other model."""
    if isinstance(error, AsynctrtError):
        return error
    return ModelError(f"{name!r} cannot be loaded: {describe(error)}")


async def _close(models: Iterable[ServedModel]) -> None:
    for served in models:
        await served.aclose()
