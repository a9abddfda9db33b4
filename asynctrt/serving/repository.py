"""Hold a server's models by name and version: load and unload them, and count their requests."""

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
from asynctrt.kserve.codec import DecodedRequest
from asynctrt.kserve.datatypes import datatype_of
from asynctrt.kserve.json_codec import JSON_NBYTES_MAX, JsonCodec
from asynctrt.statistics import Statistics
from asynctrt.tensors import InferResult, TensorSpec

LATENCIES_MAX: Final = 65536
"""Latencies that are kept between two samples, which are a second apart."""

LOST: Final = "its device is lost, which only a new process can recover: restart the server"
"""Why a loaded model is not ready."""

SUSPENDED: Final = "it is suspended"
"""Why a loaded model whose engine the application has suspended is not ready."""

NOT_READY: Final = {"lost": LOST, "suspending": SUSPENDED, "suspended": SUSPENDED}
"""The states of an engine in which a loaded model is not ready, and why."""

UNLOADED: Final = "unloaded"
"""Why a model that was unloaded on purpose is not served."""

REASONS: Final = ("REJECTED", "CANCELED", "BACKEND", "OTHER")
"""Triton's labels for failures: overload, a client that went away, the model, a bad request."""


class ServedModel:
    """One version of a model, ready to serve: its engine, its codec, and counts of its requests.

    :raises ModelError: if KServe has no datatype for one of its tensors.
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
        self.codec = JsonCodec(
            name,
            version,
            engine.inputs,
            engine.outputs,
            tensors_max=tensors_max,
            rows_max=engine.options.max_queue_rows,
            json_max=json_max,
        )
        self.pending = 0
        self.failures = dict.fromkeys(REASONS, 0)
        self.failed_ns = 0
        self.parts = 0
        """Answers that the engine counted beyond one a request, as it counts each part of a split one."""
        self.last_ns = 0
        """When the last request was answered, or 0."""
        self.latencies_ns: list[int] = []

    def __repr__(self) -> str:
        return f"<ServedModel {self.name!r} version {self.version} {self.engine!r}>"

    def submit(self, request: DecodedRequest) -> "asyncio.Future[InferResult]":
        """Submit a decoded request to the engine; see :meth:`Engine.submit`."""
        layout = request.layout
        priority = layout.priority
        if priority:
            # On the wire 1 is the most urgent. Priorities beyond the last level mean the default.
            priority = max(0, self.engine.options.priorities - priority)
        future = self.engine.submit(request.inputs, timeout=layout.timeout, priority=priority)
        self.pending += 1
        return future

    def ended(self, future: "asyncio.Future[InferResult]", began_ns: int) -> None:
        """Count the outcome of a request that was submitted with :meth:`submit`."""
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
        """Count a request that failed or was refused."""
        self.failures[reason_of(error)] += 1
        self.failed_ns += took_ns

    def succeeded(self, done: Statistics) -> int:
        """Return the number of answered requests, in which a split one counts once."""
        return done.succeeded - self.parts

    def metadata(self, versions: list[str]) -> dict[str, Any]:
        """Return KServe's model metadata."""
        return {
            "name": self.name,
            "versions": versions,
            "platform": self.engine.platform,
            "inputs": [_described(spec) for spec in self.engine.inputs],
            "outputs": [_described(spec) for spec in self.engine.outputs],
        }

    def config(self) -> dict[str, Any]:
        """Return the part of Triton's model configuration that clients read. Dims exclude the batch axis."""
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
        """Return the statistics extension's figures. Counts are of requests unless they say executions.

        ``batches_launched``, batches by why they were launched, is asynctrt's own.
        """
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
            "batches_launched": dict(done.launched),
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
    """Opens an engine when awaited; ``None`` for an engine that the application opened itself."""
    reason: str = ""
    """Why it is not served."""
    unloaded: ServedModel | None = None
    """The application's own engine after it was unloaded: it stays open, and can be loaded again."""

    @property
    def is_ready(self) -> bool:
        """Whether it is served by an engine that can run batches now."""
        return self.served is not None and not self.why_not

    @property
    def is_put_aside(self) -> bool:
        """Whether it was unloaded or suspended on purpose."""
        return self.reason == UNLOADED if self.served is None else self.why_not == SUSPENDED

    @property
    def why_not(self) -> str:
        """Why it is not ready; empty if it is, or if nothing is known against it."""
        if self.served is None:
            return self.reason
        return NOT_READY.get(self.served.engine.state, "")


class Repository:
    """Models by name and version. Engines that were added open are closed by their owner.

    :param tensors_max: the largest number of inputs, and of outputs, that a request may name.
    :param json_max: the largest JSON part of a request, in bytes.
    """

    def __init__(self, *, tensors_max: int = 64, json_max: int = JSON_NBYTES_MAX) -> None:
        self._limits = {"tensors_max": tensors_max, "json_max": json_max}
        self._models: dict[str, dict[str, _Entry]] = {}
        self._served: dict[tuple[str, str], ServedModel] = {}
        self._loading = asyncio.Lock()
        self._lost_ns: int | None = None
        self.is_draining = False
        self.is_live = True
        """Whether the process is of use: not, once a device has been lost for long enough."""
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<Repository {', '.join(f'{model.name}:{model.version}' for model in self)}>"

    def __iter__(self) -> Iterator[ServedModel]:
        """Iterate over the models that are served now."""
        for versions in self._models.values():
            for entry in versions.values():
                if entry.served is not None:
                    yield entry.served

    @property
    def is_ready(self) -> bool:
        """Whether every model is ready that was not unloaded or suspended, and the server is not draining."""
        return not self.is_draining and all(
            entry.is_ready or entry.is_put_aside
            for versions in self._models.values()
            for entry in versions.values()
        )

    def look_for_losses(self, now_ns: int, grace_ns: int) -> list[str]:
        """Return the names of models that nothing can run any more in this process.

        :param grace_ns: after how long :attr:`is_live` turns False; it is True again without such models.
        """
        lost = [served.name for served in self if served.engine.state == "lost"]
        self._lost_ns = (now_ns if self._lost_ns is None else self._lost_ns) if lost else None
        self.is_live = self._lost_ns is None or now_ns - self._lost_ns < grace_ns
        return lost

    def add(
        self,
        name: str,
        engine: Engine | None = None,
        *,
        version: str = "1",
        opener: Callable[[], Any] | None = None,
    ) -> None:
        """Serve an open engine, or one that :meth:`load` opens with ``opener``.

        :raises UsageError: if that version of the model exists, or name or version are malformed.
        :raises ModelError: if KServe has no datatype for one of its tensors.
        """
        if not (version.isascii() and version.isdigit()) or str(int(version)) != version:
            raise UsageError(f"a model's version must be a whole number, not {version!r}, as in NAME:2=PATH")
        if not name or name != name.strip():
            raise UsageError(
                f"a model's name must not be empty or begin or end with a space, unlike {name!r}"
            )
        versions = self._models.get(name, {})
        if version in versions:
            raise UsageError(f"duplicate version {version} of model {name!r}: give this one another version")
        served = None
        if engine is not None:
            served = ServedModel(name, version, engine, **self._limits)
        versions[version] = _Entry(served, opener, "" if served else "not loaded yet")
        # A request without a version means the newest one.
        self._models[name] = dict(sorted(versions.items(), key=lambda item: int(item[0])))
        self._served.clear()

    def find(self, name: str, version: str = "") -> ServedModel:
        """Return the model of that name; without a version, the newest that is served.

        :raises UnknownModelError: if the name or version is unknown.
        :raises ModelNotReadyError: if it is not loaded.
        """
        served = self._served.get((name, version))
        if served is None:
            served = self._served[name, version] = self._find(name, version)
        return served

    def find_ready(self, name: str, version: str = "") -> ServedModel:
        """Return the model as :meth:`find` does, if its engine can run batches now.

        :raises ModelNotReadyError: also if its device is lost, or it is suspended.
        """
        served = self.find(name, version)
        why_not = NOT_READY.get(served.engine.state)
        if why_not is not None:
            raise ModelNotReadyError(f"version {served.version} of {name!r} is not served: {why_not}")
        return served

    def _find(self, name: str, version: str) -> ServedModel:
        versions = self._models.get(name)
        if versions is None:
            known = ", ".join(repr(known) for known in self._models)
            raise UnknownModelError(f"unknown model {name!r:.200}; known models: {known or 'none'}")
        if version:
            if version not in versions:
                raise UnknownModelError(
                    f"unknown version {version!r:.40} of {name!r}; known versions: {', '.join(versions)}"
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
        """Return the versions of a model that are served."""
        return [version for version, entry in self._models[name].items() if entry.served is not None]

    def index(self) -> list[dict[str, str]]:
        """Return the repository extension's list of models."""
        return [
            {
                "name": name,
                "version": version,
                "state": "READY" if entry.is_ready else "UNAVAILABLE",
                "reason": entry.why_not or entry.reason,
            }
            for name, versions in self._models.items()
            for version, entry in versions.items()
        ]

    async def load_all(self) -> None:
        """Load every model that is not loaded."""
        for name in list(self._models):
            await self.load(name)

    async def load(self, name: str) -> None:
        """Open every version of a model that is not served.

        :raises UnknownModelError: for a name that is not in the repository.
        :raises AsynctrtError: if opening it fails; it is then listed as unavailable, with the reason.
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
                            raise EngineClosedError("the server was closed while it was loading the model")
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
        """Stop serving every version of a model: new requests are refused, accepted ones are answered.

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
        """Refuse new requests, and return once the accepted ones are answered."""
        self.is_draining = True
        async with asyncio.TaskGroup() as tasks:
            for served in self:
                tasks.create_task(served.engine.drain())

    async def aclose(self) -> None:
        """Close the engines that the repository has opened. Their remaining requests finish or fail."""
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
            raise UnknownModelError(f"unknown model {name!r:.200}; the repository does not list it")
        return self._models[name]


def reason_of(error: BaseException) -> str:
    """Return Triton's label for a failure."""
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
