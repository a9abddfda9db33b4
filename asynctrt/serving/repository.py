"""The models of a server: by name and version, each an engine; loaded, unloaded and counted."""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

from asynctrt import clock
from asynctrt.engine import Engine
from asynctrt.errors import (
    AsynctrtError,
    EngineClosedError,
    ModelNotReadyError,
    OverloadError,
    RequestError,
    UnknownModelError,
    UsageError,
)
from asynctrt.serving.datatypes import datatype_of
from asynctrt.serving.wire import JSON_NBYTES_MAX, Call, Codec
from asynctrt.statistics import Statistics
from asynctrt.tensors import InferResult, TensorSpec

LATENCIES_MAX: Final = 65536
"""Latencies that are kept between two looks at them; a second has fewer."""

LOST: Final = "its device is lost, and only a new process helps: restart the server"
"""Why a model is loaded and not ready."""

UNLOADED: Final = "unloaded"
"""Why a model is not served that was unloaded on purpose."""

REASONS: Final = ("REJECTED", "CANCELED", "BACKEND", "OTHER")
"""Why requests fail, in Triton's words: overload, the caller went away, the model, a bad request."""


class ServedModel:
    """One version of a model, ready to serve: its engine, its codec, and counts of what came of requests.

    :raises ModelError: for tensors that the protocol has no datatype for.
    """

    def __init__(
        self,
        name: str,
        version: str,
        engine: Engine,
        *,
        tensors_max: int = 64,
        json_max: int = JSON_NBYTES_MAX,
    ) -> None:
        self.name = name
        self.version = version
        self.engine = engine
        self.codec = Codec(
            name, version, engine.inputs, engine.outputs, tensors_max=tensors_max, json_max=json_max
        )
        self.pending = 0
        self.failures = dict.fromkeys(REASONS, 0)
        self.failed_ns = 0
        self.parts = 0
        """By how much the engine counts more answers than there were, as it counts the parts of each."""
        self.last_ns = 0
        """When the last request was answered; 0: none yet."""
        self.latencies_ns: list[int] = []

    def __repr__(self) -> str:
        return f"<ServedModel {self.name!r} version {self.version} {self.engine!r}>"

    def submit(self, call: Call) -> "asyncio.Future[InferResult]":
        """Hand a decoded request to the engine; see :meth:`Engine.submit`."""
        plan = call.plan
        priority = plan.priority
        if priority:
            # On the wire 1 is the most urgent; what is beyond the last level is the default.
            priority = max(0, self.engine.options.priorities - priority)
        future = self.engine.submit(call.inputs, timeout=plan.timeout, priority=priority)
        self.pending += 1
        return future

    def ended(self, future: "asyncio.Future[InferResult]", began_ns: int) -> None:
        """Count a request that :meth:`submit` has taken and that has come to its end."""
        now_ns = clock.now_ns()
        self.pending -= 1
        if future.cancelled():
            self.failures["CANCELED"] += 1
            self.failed_ns += now_ns - began_ns
        elif (error := future.exception()) is not None:
            self.count_failure(error, now_ns - began_ns)
        else:
            self.last_ns = now_ns
            self.parts += future.result().batches - 1
            if len(self.latencies_ns) < LATENCIES_MAX:
                self.latencies_ns.append(now_ns - began_ns)

    def count_failure(self, error: BaseException, took_ns: int) -> None:
        """Count a request that failed, or was refused."""
        self.failures[reason_of(error)] += 1
        self.failed_ns += took_ns

    def succeeded(self, done: Statistics) -> int:
        """Requests answered, of which a split one is one."""
        return done.succeeded - self.parts

    def metadata(self, versions: list[str]) -> dict[str, Any]:
        """What KServe calls a model's metadata."""
        return {
            "name": self.name,
            "versions": versions,
            "platform": self.engine.platform,
            "inputs": [_described(spec) for spec in self.engine.inputs],
            "outputs": [_described(spec) for spec in self.engine.outputs],
        }

    def config(self) -> dict[str, Any]:
        """What Triton's clients read of a model's configuration. Dims are without the batch axis."""
        options = self.engine.options

        def side(specs: tuple[TensorSpec, ...]) -> list[dict[str, Any]]:
            return [
                {
                    "name": spec.name,
                    "data_type": "TYPE_" + datatype_of(spec).replace("BYTES", "STRING"),
                    "dims": _dims(spec),
                    "is_shape_tensor": False,
                }
                for spec in specs
            ]

        return {
            "name": self.name,
            "platform": self.engine.platform,
            "backend": self.engine.platform.split("_")[0],
            "max_batch_size": self.engine.max_rows,
            "version_policy": {"all": {}},
            "input": [
                item | {"format": "FORMAT_NONE", "optional": False} for item in side(self.engine.inputs)
            ],
            "output": [item | {"label_filename": ""} for item in side(self.engine.outputs)],
            "instance_group": [
                {
                    "name": self.name,
                    "kind": "KIND_CPU" if self.engine.device_name == "host" else "KIND_GPU",
                    "count": self.engine.statistics().contexts,
                }
            ],
            "dynamic_batching": {
                "preferred_batch_size": [self.engine.max_rows],
                "max_queue_delay_microseconds": int(options.max_delay * 1e6),
                "priority_levels": options.priorities,
                "default_priority_level": options.priorities,
            },
        }

    def statistics(self) -> dict[str, Any]:
        """What KServe's statistics extension says of a model. Every count is that of requests but where
        it says executions."""
        done = self.engine.statistics()

        def duration(count: int, ns: int) -> dict[str, int]:
            return {"count": count, "ns": ns}

        succeeded = self.succeeded(done)
        failed = sum(self.failures.values())
        return {
            "name": self.name,
            "version": self.version,
            "last_inference": clock.wall_ms(self.last_ns) if self.last_ns else 0,
            "inference_count": done.rows,
            "execution_count": done.batches,
            "inference_stats": {
                "success": duration(succeeded, done.total_ns),
                "fail": duration(failed, self.failed_ns),
                "queue": duration(succeeded, done.queue_ns),
                "compute_input": duration(succeeded, done.copy_in_ns),
                "compute_infer": duration(succeeded, done.compute_ns),
                "compute_output": duration(succeeded, done.copy_out_ns),
                "cache_hit": duration(0, 0),
                "cache_miss": duration(0, 0),
            },
            "response_stats": {},
            "batch_stats": [
                {
                    "batch_size": rows,
                    "compute_input": duration(batch.count, batch.copy_in_ns),
                    "compute_infer": duration(batch.count, batch.compute_ns),
                    "compute_output": duration(batch.count, batch.copy_out_ns),
                }
                for rows, batch in done.by_batch_rows.items()
            ],
            "memory_usage": [
                {
                    "type": "CPU" if self.engine.device_name == "host" else "GPU",
                    "id": 0,
                    "byte_size": done.memory_nbytes,
                }
            ],
        }


@dataclass(slots=True)
class _Entry:
    """One version of a model, served or not."""

    served: ServedModel | None
    opener: Callable[[], Any] | None
    """Gives an engine when awaited; ``None`` for an engine that the application opened itself."""
    reason: str = ""
    """Why it is not served."""
    unloaded: ServedModel | None = None
    """What was unloaded, if it is the application's: it stays open, to be loaded again."""

    @property
    def is_ready(self) -> bool:
        """Whether it is served, by an engine that can still run batches."""
        return self.served is not None and self.served.engine.state != "lost"


class Repository:
    """Models by name and version. What is added open stays its owner's to close.

    :param tensors_max: inputs and outputs that one request may name; ``json_max``: bytes of its JSON.
    """

    def __init__(self, *, tensors_max: int = 64, json_max: int = JSON_NBYTES_MAX) -> None:
        self._limits = {"tensors_max": tensors_max, "json_max": json_max}
        self._models: dict[str, dict[str, _Entry]] = {}
        self._served: dict[tuple[str, str], ServedModel] = {}
        self._loading = asyncio.Lock()
        self.is_draining = False
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<Repository {', '.join(f'{model.name}:{model.version}' for model in self)}>"

    def __iter__(self) -> Iterator[ServedModel]:
        """The models that are served now."""
        for versions in self._models.values():
            for entry in versions.values():
                if entry.served is not None:
                    yield entry.served

    @property
    def is_ready(self) -> bool:
        """Whether every model is served that was not unloaded, and the server is not about to stop."""
        return not self.is_draining and all(
            entry.is_ready or (entry.served is None and entry.reason == UNLOADED)
            for versions in self._models.values()
            for entry in versions.values()
        )

    def add(
        self,
        name: str,
        engine: Engine | None = None,
        *,
        version: str = "1",
        opener: Callable[[], Any] | None = None,
    ) -> None:
        """Serve an open engine; or know how to open one, and serve it after :meth:`load`.

        :raises UsageError: for a name and version that there is already, or a version that is no number.
        :raises ModelError: for tensors that the protocol has no datatype for.
        """
        if not (version.isascii() and version.isdigit()) or str(int(version)) != version:
            raise UsageError(f"a model's version is a whole number, not {version!r}: NAME:2=PATH")
        if not name or name != name.strip():
            raise UsageError(f"a model needs a name that does not begin or end with a space, not {name!r}")
        versions = self._models.get(name, {})
        if version in versions:
            raise UsageError(
                f"there is a version {version} of {name!r} already: give this one another number"
            )
        served = None
        if engine is not None:
            served = ServedModel(name, version, engine, **self._limits)
        versions[version] = _Entry(served, opener, "" if served else "not loaded yet")
        # The newest version is the one that a request without a version means.
        self._models[name] = dict(sorted(versions.items(), key=lambda item: int(item[0])))
        self._served.clear()

    def find(self, name: str, version: str = "") -> ServedModel:
        """The model of that name; without a version, the newest that is served.

        :raises UnknownModelError: if there is none.
        :raises ModelNotReadyError: if it is not loaded.
        """
        served = self._served.get((name, version))
        if served is None:
            served = self._served[name, version] = self._find(name, version)
        return served

    def find_ready(self, name: str, version: str = "") -> ServedModel:
        """As :meth:`find`, if its engine can still run batches.

        :raises ModelNotReadyError: also if its device is lost.
        """
        served = self.find(name, version)
        if served.engine.state == "lost":
            raise ModelNotReadyError(f"version {served.version} of {name!r} is not served: {LOST}")
        return served

    def _find(self, name: str, version: str) -> ServedModel:
        versions = self._models.get(name)
        if versions is None:
            known = ", ".join(repr(known) for known in self._models)
            raise UnknownModelError(f"there is no model {name!r:.200}; there are: {known or 'none'}")
        if version:
            if version not in versions:
                raise UnknownModelError(
                    f"there is no version {version!r:.40} of {name!r}; there are: {', '.join(versions)}"
                )
            entry = versions[version]
            if entry.served is None:
                raise ModelNotReadyError(f"version {version} of {name!r} is not served: {entry.reason}")
            return entry.served
        newest = [entry.served for entry in versions.values() if entry.served is not None]
        if not newest:
            reasons = "; ".join(entry.reason for entry in versions.values())
            raise ModelNotReadyError(f"{name!r} is not served: {reasons}")
        return newest[-1]

    def versions(self, name: str) -> list[str]:
        """The versions of a model that are served."""
        return [version for version, entry in self._models[name].items() if entry.served is not None]

    def index(self) -> list[dict[str, str]]:
        """What KServe's repository extension lists."""
        return [
            {
                "name": name,
                "version": version,
                "state": "READY" if entry.is_ready else "UNAVAILABLE",
                "reason": entry.reason if entry.served is None or entry.is_ready else LOST,
            }
            for name, versions in self._models.items()
            for version, entry in versions.items()
        ]

    async def load_all(self) -> None:
        """Load every model that is not."""
        for name in list(self._models):
            await self.load(name)

    async def load(self, name: str) -> None:
        """Open every version of a model that is not served.

        :raises UnknownModelError: for a name that is not in the repository.
        :raises AsynctrtError: whatever opening it raises; it is then listed as unavailable, with the reason.
        """
        async with self._loading:
            for version, entry in self._known(name).items():
                if entry.served is not None:
                    continue
                if entry.unloaded is not None:
                    entry.served, entry.unloaded, entry.reason = entry.unloaded, None, ""
                    self._served.clear()
                if entry.opener is None:
                    continue
                try:
                    engine = await entry.opener()
                    try:
                        if self._is_closed:
                            raise EngineClosedError("the server was closed while it loaded the model")
                        served = ServedModel(name, version, engine, **self._limits)
                    except BaseException:
                        await engine.aclose()
                        raise
                except AsynctrtError as error:
                    entry.reason = str(error)
                    raise
                entry.served, entry.reason = served, ""
                self._served.clear()

    async def unload(self, name: str) -> None:
        """Stop serving every version of a model: new requests are refused, those taken are answered.

        :raises UnknownModelError: for a name that is not in the repository.
        """
        async with self._loading:
            for entry in self._known(name).values():
                served = entry.served
                if served is None:
                    continue
                entry.served, entry.reason = None, UNLOADED
                self._served.clear()
                if entry.opener is None:
                    entry.unloaded = served
                else:
                    await served.engine.drain()
                    await served.engine.aclose()

    async def drain(self) -> None:
        """Refuse new requests, and return when those taken have been answered."""
        self.is_draining = True
        async with asyncio.TaskGroup() as tasks:
            for served in self:
                tasks.create_task(served.engine.drain())

    async def aclose(self) -> None:
        """Close the engines that the repository has opened. What they still do is failed or finished."""
        self.is_draining = self._is_closed = True
        for versions in self._models.values():
            for entry in versions.values():
                served, entry.served = entry.served, None
                entry.reason = "closed"
                if served is not None and entry.opener is not None:
                    await served.engine.aclose()
        self._served.clear()

    def _known(self, name: str) -> Mapping[str, _Entry]:
        if name not in self._models:
            raise UnknownModelError(f"there is no model {name!r:.200} in the repository")
        return self._models[name]


def reason_of(error: BaseException) -> str:
    """Why a request failed, in Triton's words."""
    if isinstance(error, asyncio.CancelledError):
        return "CANCELED"
    if isinstance(error, OverloadError):
        return "REJECTED"
    if isinstance(error, RequestError | ValueError) or not isinstance(error, AsynctrtError):
        return "OTHER"
    return "BACKEND" if error.http_status >= 500 else "OTHER"


def _dims(spec: TensorSpec) -> list[int]:
    return [-1 if isinstance(dim, str) else dim for dim in spec.dims]


def _described(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "datatype": datatype_of(spec), "shape": [-1, *_dims(spec)]}
