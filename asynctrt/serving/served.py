"""Serve one version of a model: decode its requests, count them, describe it to clients."""

import asyncio
from collections.abc import Callable, Hashable, Iterable, Mapping
from math import prod
from typing import Any, Final, TypeVar

from asynctrt._util import clock
from asynctrt.engine import Engine
from asynctrt.errors import AsynctrtError, OverloadError, RequestError
from asynctrt.kserve.codec import DecodedRequest, ModelCodec
from asynctrt.kserve.datatypes import datatype_of
from asynctrt.kserve.json_codec import JsonCodec
from asynctrt.serving.admission import Admission, Caller, Inference, counted, error_of, has_result
from asynctrt.serving.latency import Latencies
from asynctrt.serving.settings import ServerSettings
from asynctrt.statistics import Statistics
from asynctrt.tensors import TensorSpec

LATENCIES_MAX: Final = 65536
"""The most latencies kept between two samples, which are a second apart."""

REASONS: Final = ("REJECTED", "CANCELED", "BACKEND", "OTHER")
"""Triton's labels for failures: overload, a client that disconnected, the model, a bad request."""

T = TypeVar("T", bound=ModelCodec)
Headers = Mapping[bytes, bytes]


class ServedModel:
    """One version of a model, ready to serve: its engine, its codec, and counts of its requests."""

    def __init__(
        self, name: str, version: str, engine: Engine, settings: ServerSettings | None = None
    ) -> None:
        self.name = name
        self.version = version
        self.engine = engine
        self._settings = settings or ServerSettings()
        self._codecs: dict[type[ModelCodec], Any] = {}
        self.codec = self.codec_of(JsonCodec)
        self.admission = Admission(engine)
        self.pending = 0
        self.failures = dict.fromkeys(REASONS, 0)
        self.failed_ns = 0
        self._rows_unsplit = engine.max_rows if all(spec.is_fixed for spec in engine.inputs) else 1
        self._divisible: set[Inference] = set()
        """Requests in progress that may be split."""
        self._parts = 0
        """The surplus of the engine's count of answers for requests that have ended: it counts each part of a
        split request."""
        self.last_ns = 0
        """When the last request was answered, or 0."""
        self.latencies_ns: list[int] = []
        """Latencies of the answers since the last sample."""
        self.latencies = Latencies()
        self._is_batched = engine.batching.is_on
        self.why_batched = engine.batching.reason
        """Why rows of different requests do or do not share its batches."""
        self.mark: Any = None
        """The mark of its source when the engine was opened: see :class:`Source`."""

    def __repr__(self) -> str:
        return f"<ServedModel {self.name!r} version {self.version} {self.engine!r}>"

    def codec_of(self, kind: type[T]) -> T:
        """Return the codec for the model's requests in one encoding."""
        codec: T | None = self._codecs.get(kind)
        if codec is None:
            codec = self._codecs[kind] = kind(
                self.name,
                self.version,
                self.engine.inputs,
                self.engine.outputs,
                rows_max=self.engine.options.max_queue_rows,
                json_max=self._settings.max_json,
                answer_max=self._settings.max_answer,
                pad=self.engine.options.pad,
            )
        return codec

    def submit(
        self,
        request: DecodedRequest,
        caller: Caller,
        name: Hashable,
        began_ns: int,
        headers: Headers,
        on_end: Callable[[Inference], None],
    ) -> Inference:
        """Submit a decoded request to the engine, once it is its client's turn.

        :param caller: the connection that it came from.
        :param name: the client that it is for.
        :param on_end: called when it has ended, to call :meth:`ended`.
        """
        priority = request.layout.priority
        if priority:
            # On the wire 1 is the most urgent. Priorities beyond the last level mean the default.
            priority = max(0, self.engine.options.priorities - priority)
        lane = caller.lane(self.admission.gate, name)
        inference = Inference(self, request, began_ns, headers, lane, self.admission, priority, on_end)
        self.admission.submit(inference)
        self.pending += 1
        if inference.rows > self._rows_unsplit:
            self._divisible.add(inference)
        return inference

    async def drain(self) -> None:
        """Refuse new requests, and return once the accepted ones are answered."""
        await self.admission.drain()
        await self.engine.drain()

    async def aclose(self) -> None:
        """Close the engine. Requests that have not reached it fail."""
        self.admission.fail()
        await self.engine.aclose()

    @property
    def drain_s(self) -> float:
        """Seconds until all accepted requests are answered; 0 if that is unknown."""
        if not self.pending:
            return 0.0
        return self.engine.statistics().drain_s(self.admission.gate.waiting_rows) or 0.0

    @property
    def refused(self) -> dict[str, int]:
        """Requests refused before the engine's queue, by reason."""
        return {
            "crowded": self.admission.crowded,
            "expired": self.admission.expired,
        }

    def ended(self, inference: Inference) -> BaseException | None:
        """Count the outcome of a request submitted with :meth:`submit`; return its error, if it failed."""
        now_ns = clock.now_ns()
        future, began_ns = inference.future, inference.began_ns
        self.pending -= 1
        if inference.rows > self._rows_unsplit:
            self._divisible.remove(inference)
            self._parts += counted(future) - has_result(future)
        took_ns = now_ns - began_ns
        error = error_of(future)
        if error is not None:
            self.count_failure(error, took_ns)
            return None if isinstance(error, asyncio.CancelledError) else error
        self.last_ns = now_ns
        result = future.result()
        self.latencies.add(took_ns, result._queue_ns, result._compute_ns)
        if len(self.latencies_ns) < LATENCIES_MAX:
            self.latencies_ns.append(took_ns)
        return None

    def count_failure(self, error: BaseException, took_ns: int) -> None:
        """Count a request that failed or was refused."""
        self.failures[reason_of(error)] += 1
        self.failed_ns += took_ns

    def succeeded(self, done: Statistics) -> int:
        """Return the number of answered requests. A split request counts once, when it is answered."""
        under_way = sum(counted(one.future) for one in self._divisible if one.has_future)
        return done.succeeded - self._parts - under_way

    @property
    def batch_nbytes(self) -> int:
        """Bytes of a full batch's inputs or outputs, whichever are more, without tensors of open sizes."""
        rows = self.engine.max_rows if self._is_batched else 1

        def nbytes(specs: Iterable[TensorSpec]) -> int:
            fixed = [spec for spec in specs if spec.is_fixed and not spec.dtype.hasobject]
            return sum([int(prod(spec.shape(rows))) * spec.dtype.itemsize for spec in fixed])

        return max(nbytes(self.engine.inputs), nbytes(self.engine.outputs))

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
        """Return the part of Triton's model configuration that clients read.

        If ``max_batch_size`` is more than 0, clients put a batch axis in front of the dims. So it is 0, and
        the dims are whole, if requests run alone or a tensor has its rows on another axis.
        """
        options, done = self.engine.options, self.engine.statistics()
        is_batched = self._is_batched
        has_batch_axis = is_batched and all(
            spec.axis == 0 for spec in (*self.engine.inputs, *self.engine.outputs)
        )

        def side(specs: tuple[TensorSpec, ...]) -> list[dict[str, Any]]:
            return [
                {
                    "name": spec.name,
                    "data_type": "TYPE_" + datatype_of(spec).replace("BYTES", "STRING"),
                    "dims": _sizes(spec.dims if has_batch_axis else spec.shape("rows")),
                    "is_shape_tensor": False,
                }
                for spec in specs
            ]

        config: dict[str, Any] = {
            "name": self.name,
            "platform": self.engine.platform,
            "backend": self.engine.platform.split("_")[0],
            "max_batch_size": self.engine.max_rows if has_batch_axis else 0,
            "version_policy": {"all": {}},
            "input": [
                item | {"format": "FORMAT_NONE", "optional": item["name"] in options.filled}
                for item in side(self.engine.inputs)
            ],
            "output": [item | {"label_filename": ""} for item in side(self.engine.outputs)],
            "instance_group": [
                {
                    "name": self.name,
                    "kind": "KIND_CPU" if self.engine.device_name == "host" else "KIND_GPU",
                    # Includes quarantined contexts, so that the reported configuration stays constant.
                    "count": done.arenas or done.contexts,
                }
            ],
        }
        if is_batched:
            config["dynamic_batching"] = {
                "preferred_batch_size": [self.engine.max_rows],
                "max_queue_delay_microseconds": int(options.max_delay * 1e6),
                "priority_levels": options.priorities,
                "default_priority_level": options.priorities,
            }
        config["parameters"] = {"batching": {"string_value": self.why_batched}}
        return config

    def statistics(self) -> dict[str, Any]:
        """Return the statistics extension's figures. They count requests unless they are named executions.

        ``batches_launched``, the batches by why they were launched, is asynctrt's own.
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


def summed(statistics: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Sum the results of :meth:`ServedModel.statistics` from several processes, by model and version."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for one in statistics:
        key = one["name"], one["version"]
        found[key] = _sum("", found[key], one) if key in found else one
    return list(found.values())


def _sum(name: str, one: Any, other: Any) -> Any:
    """Add two values of a field. Entries of lists are matched by their batch size or type."""
    if isinstance(one, dict):
        return one | {
            key: _sum(key, one[key], value) if key in one else value for key, value in other.items()
        }
    if isinstance(one, list):
        by_key = [
            {entry.get("batch_size", entry.get("type")): entry for entry in side} for side in (one, other)
        ]
        return list(_sum("", *by_key).values())
    if name == "last_inference":
        return max(one, other)
    return one if isinstance(one, str) or name in ("batch_size", "id") else one + other


def reason_of(error: BaseException) -> str:
    """Return Triton's label for a failure."""
    if isinstance(error, asyncio.CancelledError):
        return "CANCELED"
    if isinstance(error, OverloadError):
        return "REJECTED"
    if isinstance(error, RequestError | ValueError) or not isinstance(error, AsynctrtError):
        return "OTHER"
    return "BACKEND" if error.http_status >= 500 else "OTHER"


def _sizes(shape: Iterable[int | str]) -> list[int]:
    """Return sizes, with -1 for sizes that may differ between requests."""
    return [-1 if isinstance(size, str) else size for size in shape]


def _described(spec: TensorSpec) -> dict[str, Any]:
    return {"name": spec.name, "datatype": datatype_of(spec), "shape": _sizes(spec.shape("rows"))}
