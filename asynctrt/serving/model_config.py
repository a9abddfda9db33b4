"""Read Triton's ``config.pbtxt``: use the settings that asynctrt supports, and report the others clearly.

A field that asynctrt has no use for is ignored with a warning. If ignoring it could change a model's answers,
or let through something it was meant to block, the model is refused.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from asynctrt._util.files import CONFIG_NBYTES_MAX, read_regular
from asynctrt.backends.registry import backend_names
from asynctrt.errors import AsynctrtError, ModelError
from asynctrt.kserve.datatypes import datatype_of
from asynctrt.kserve.protobuf import parse_model_config
from asynctrt.options import MAX_ROWS_DEFAULT, Options
from asynctrt.tensors import TensorSpec

CONFIG: Final = "config.pbtxt"

READ: Final = {
    "name": "must be the name of its folder",
    "platform": "the runtime: `onnxruntime_onnx` or `tensorrt_plan`",
    "backend": "the runtime: `onnxruntime` or `tensorrt`",
    "version_policy": "the versions that are served; the newest where it is not stated",
    "max_batch_size": '`max_rows`; a stated 0 is `batching="off"`: each request runs alone',
    "default_model_filename": "the file in a version's folder",
    "input.name": "must be one of the model's",
    "input.data_type": "must be the model's",
    "input.dims": "must be the model's: of a row, or of the whole tensor",
    "output.name": "must be one of the model's",
    "output.data_type": "must be the model's",
    "output.dims": "must be the model's: of a row, or of the whole tensor",
    "instance_group.name": "has no meaning",
    "instance_group.kind": "the device: `KIND_CPU` is `host`; `KIND_MODEL` is ignored",
    "instance_group.count": (
        "`contexts` on the host; on a GPU `arenas`, with two contexts each, since an instance of Triton's "
        "copies one batch while it computes another"
    ),
    "instance_group.gpus": "the device; more than one is refused",
    "dynamic_batching.max_queue_delay_microseconds": "`max_delay`",
    "dynamic_batching.priority_levels": "`priorities`",
    "dynamic_batching.default_priority_level": "must be the last; any other is ignored",
    "dynamic_batching.default_queue_policy.timeout_action": (
        "`DELAY` has the default timeout ignored: requests whose timeout has passed are refused"
    ),
    "dynamic_batching.default_queue_policy.default_timeout_microseconds": "`timeout`",
    "dynamic_batching.default_queue_policy.max_queue_size": "`max_queue_rows`: in rows, and at least a batch",
    "dynamic_batching.default_queue_policy.allow_timeout_override": "is always true",
    "optimization.cuda.graphs": 'false is `graphs="off"`',
    "optimization.cuda.graph_spec.batch_size": "the sizes in `graphs`",
}
"""The supported fields, each with its meaning here, for the documentation."""

REFUSED: Final = {
    "runtime": "asynctrt has no backends that are loaded by name",
    "batch_input": "asynctrt gives a model only what requests have",
    "batch_output": "asynctrt splits outputs by rows alone",
    "sequence_batching": "asynctrt does not keep the requests of a sequence together",
    "ensemble_scheduling": "asynctrt serves no ensembles",
    "cc_model_filenames": "asynctrt does not choose a file by the GPU: state default_model_filename",
    "model_operations": "asynctrt loads no libraries of operators for a model",
    "model_transaction_policy.decoupled": "asynctrt gives each request one answer",
    "model_repository_agents": "asynctrt runs no agents, which may check or decrypt a model",
    "instance_group.passive": "asynctrt has no instances that are loaded and take no requests",
    "instance_group.profile": "asynctrt chooses the optimization profile by the shapes of a batch",
    "instance_group.secondary_devices": "an engine runs on one device",
    "input.reshape": "asynctrt takes the model's own shapes: leave it out, and state the model's dims",
    "output.reshape": "asynctrt gives the model's own shapes: leave it out, and state the model's dims",
    "input.is_shape_tensor": "asynctrt has no inputs that are one for a whole batch",
    "output.is_shape_tensor": "asynctrt has no outputs that are one for a whole batch",
    "input.allow_ragged_batch": "the rows of a batch have the same shape",
    "input.optional": "every input of a model is needed",
    "input.is_non_linear_format_io": "tensors lie in memory in row-major order",
    "output.is_non_linear_format_io": "tensors lie in memory in row-major order",
}
"""The fields that could change answers if ignored, each with why it is refused."""

IGNORED: Final = {
    "model_warmup": "an engine runs made-up rows before it is ready",
    "dynamic_batching.preferred_batch_size": "the scheduler learns which sizes pay",
    "dynamic_batching.preserve_ordering": "answers are sent as they are ready, each with its request's id",
    "dynamic_batching.priority_queue_policy": "all priorities have the limits of the model's queue",
    "instance_group.rate_limiter": "contexts take turns by what is queued",
    "instance_group.host_policy": "processes are bound to cores from outside, as by numactl",
    "response_cache.enable": "asynctrt has no cache of answers",
    "output.label_filename": "the classification extension is not supported",
    "input.format": "it says nothing that the dims do not",
    "parameters": "they are for Triton's backends: the options of engines are settings of the server",
    "metric_tags": "metrics have the model's name and version",
    "model_metrics": "the bounds of histograms are the same for all models",
    "optimization.cuda.graph_spec.input": "graphs are captured for the model's own shapes",
    "optimization.cuda.graph_spec.graph_lower_bound": "a batch is padded to the next captured size",
    "optimization.cuda.busy_wait_events": "asynctrt chooses how it waits for a batch",
    "optimization.cuda.output_copy_stream": "one batch is copied while another computes",
    "optimization.execution_accelerators": "it is for other backends; build a TensorRT plan for model.plan",
    "optimization.graph.level": "it is for other backends",
    "optimization.priority": "models share a device by their weight",
    "optimization.input_pinned_memory.enable": "what is copied to a GPU is always in pinned memory",
    "optimization.output_pinned_memory.enable": "what is copied from a GPU is always in pinned memory",
    "optimization.gather_kernel_buffer_threshold": "rows are gathered on the host",
    "optimization.eager_batching": "a batch is filled while requests arrive",
}
"""The fields that are ignored with a warning, each with why. The tables have all fields of Triton's."""


@dataclass(frozen=True, slots=True)
class VersionPolicy:
    """The versions of a model to serve: the ``latest`` newest, the ``named`` ones, or all."""

    latest: int | None = 1
    named: tuple[str, ...] = ()

    def choose(self, versions: Sequence[str]) -> list[str]:
        """Return the versions to serve, oldest first."""
        ordered = sorted(versions, key=int)
        if self.named:
            missing = [version for version in self.named if version not in ordered]
            if missing:
                raise ModelError(
                    f"version_policy names version {missing[0]}, and there are {', '.join(ordered) or 'none'}"
                )
            return [version for version in ordered if version in self.named]
        return ordered if self.latest is None else ordered[-self.latest :]


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The contents of a ``config.pbtxt``, as asynctrt's settings. Without a file, all have defaults."""

    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the engine, except the ones that follow from ``instances``."""
    instances: int | None = None
    """How many batches compute at the same time."""
    device: str | None = None
    policy: VersionPolicy = VersionPolicy()
    backend: str = ""
    filename: str = ""
    inputs: tuple[tuple[str, str, tuple[int, ...]], ...] = ()
    """Name, datatype and dims of a row or of the whole tensor, as far as stated. Other inputs are not
    checked."""
    outputs: tuple[tuple[str, str, tuple[int, ...]], ...] = ()
    ignored: tuple[str, ...] = ()
    """Fields that have no effect, a sentence each."""

    def options_on(self, device: str) -> dict[str, Any]:
        """Return the options of the engine on this device.

        On a GPU, a Triton instance copies the next batch while one computes. That takes two contexts, and the
        enqueue memory of one.
        """
        if self.instances is None:
            return dict(self.options)
        if device.startswith("cuda"):
            return {**self.options, "contexts": 2 * self.instances, "arenas": self.instances}
        return {**self.options, "contexts": self.instances}

    def check(self, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> None:
        """Check the stated tensors against the model's."""
        for side, stated, specs in (("input", self.inputs, inputs), ("output", self.outputs, outputs)):
            known = {spec.name: spec for spec in specs}
            for name, datatype, dims in stated:
                spec = known.get(name)
                if spec is None:
                    raise ModelError(f"{CONFIG} has an {side} {name!r}, and the model has {', '.join(known)}")
                if datatype and datatype != datatype_of(spec):
                    raise ModelError(
                        f"{CONFIG} has {side} {name!r} as {datatype}; in the model it is {datatype_of(spec)}"
                    )
                if dims and not (_fits(dims, spec.dims) or _fits(dims, spec.shape("rows"))):
                    of_row = "" if spec.axis is None else "a row of "
                    raise ModelError(
                        f"{CONFIG} has {side} {name!r} with dims {list(dims)}; {of_row}{side} {name!r} is "
                        f"{list(spec.dims)}"
                    )


def _fits(dims: tuple[int, ...], known: tuple[int | str, ...]) -> bool:
    """Return whether stated dims match the model's. Any size, even -1, fits a size that it leaves open."""
    return len(dims) == len(known) and all(
        isinstance(size, str) or dim == size for dim, size in zip(dims, known, strict=True)
    )


def read_model_config(folder: Path, within: Path | None = None) -> ModelConfig:
    """Read the ``config.pbtxt`` in a model's folder; defaults if there is none. Blocks.

    :param within: the folder that no link may lead out of. Default: the model's folder.
    """
    path = folder / CONFIG
    try:
        text = read_regular(path, CONFIG_NBYTES_MAX, within=within or folder).decode()
    except FileNotFoundError:
        return ModelConfig()
    except OSError as error:
        raise ModelError(f"{str(path)!r} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ModelError(f"{str(path)!r} cannot be read: {error}") from error
    try:
        return interpret(text, folder)
    except (AsynctrtError, RecursionError) as error:
        raise ModelError(f"{str(path)!r}: {error}") from error


def interpret(text: str, folder: Path) -> ModelConfig:
    """Turn the text of a ``config.pbtxt`` into settings."""
    message = parse_model_config(text)
    ignored: list[str] = []
    for path, value in _stated(message):
        why = REFUSED.get(path)
        if why is not None and value:
            raise ModelError(f"{path} is not supported: {why}")
        if why is None and path not in READ and value:
            ignored.append(f"{path} is ignored: {IGNORED[path]}")
    if message.name and message.name != folder.name:
        raise ModelError(f"its name is {message.name!r}, and that of its folder {folder.name!r}")
    if message.max_batch_size < 0:
        raise ModelError(
            f"max_batch_size is {message.max_batch_size}: state how many rows may run together, or 0 for a "
            "model whose requests run alone"
        )
    device = _device(message.instance_group, ignored)
    options = _options(message, ignored)
    Options(**options)
    return ModelConfig(
        options=options,
        instances=_instances(message.instance_group),
        device=device,
        policy=_policy(message.version_policy),
        backend=_backend(message),
        filename=_filename(message.default_model_filename),
        inputs=_tensors(message.input),
        outputs=_tensors(message.output),
        ignored=tuple(dict.fromkeys(ignored)),
    )


def _stated(message: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield path and value of every stated field, down to the fields that the tables above name."""
    for descriptor, value in message.ListFields():
        path = prefix + descriptor.name
        kind = descriptor.message_type
        is_known = path in READ or path in REFUSED or path in IGNORED
        if is_known or kind is None or kind.GetOptions().map_entry:
            yield path, value if is_known and kind is None else _truth(value)
        else:
            for item in value if descriptor.is_repeated else [value]:
                yield from _stated(item, f"{path}.")


def _truth(value: Any) -> bool:
    """Return whether a field says anything: a message that is present does, even if it is empty."""
    return bool(len(value)) if hasattr(value, "__len__") else bool(value) or hasattr(value, "ListFields")


def _backend(message: Any) -> str:
    given = message.backend or message.platform
    if given and given not in backend_names():
        raise ModelError(
            f"{'backend' if message.backend else 'platform'} {given!r} is not supported; supported: "
            f"{', '.join(backend_names())}"
        )
    return backend_names().get(given, "")


def _filename(given: str) -> str:
    if given and (Path(given).name != given or given in (".", "..")):
        raise ModelError(f"default_model_filename must be the name of a file, not {given!r}")
    return given


def _policy(policy: Any) -> VersionPolicy:
    choice = policy.WhichOneof("policy_choice")
    if choice == "all":
        return VersionPolicy(latest=None)
    if choice == "specific":
        if not policy.specific.versions:
            raise ModelError("version_policy is specific, and names no version")
        return VersionPolicy(named=tuple(str(version) for version in policy.specific.versions))
    count = policy.latest.num_versions if policy.latest.HasField("num_versions") else 1
    if count < 1:
        raise ModelError("version_policy.latest.num_versions must be ≥ 1")
    return VersionPolicy(latest=count)


def _device(groups: Any, ignored: list[str]) -> str | None:
    """Return the device that the instance groups name; ``None`` if they name none."""
    kinds = {group.kind for group in groups}
    gpus = {gpu for group in groups for gpu in group.gpus}
    if len(gpus) > 1 or len(kinds) > 1:
        raise ModelError(
            "instance_group has more than one device, and an engine runs on one: name one, and serve the "
            "model on each other device from a separate server"
        )
    if not groups:
        return None
    kind = groups[0].Kind.Name(groups[0].kind)
    if kind == "KIND_CPU":
        return "host"
    if kind == "KIND_MODEL":
        ignored.append("instance_group.kind KIND_MODEL is ignored: models do not choose their device")
        return None
    if gpus:
        return f"cuda:{gpus.pop()}"
    return "cuda:0" if kind == "KIND_GPU" else None


def _instances(groups: Any) -> int | None:
    """Return the total number of instances in all groups; ``None`` if none is stated."""
    counts = [group.count for group in groups]
    if min(counts, default=0) < 0:
        raise ModelError(f"instance_group.count must be ≥ 1, not {min(counts)}")
    return sum(counts) or None


def _options(message: Any, ignored: list[str]) -> dict[str, Any]:
    """Return the stated options of the engine."""
    options: dict[str, Any] = {}
    is_alone = message.HasField("max_batch_size") and message.max_batch_size == 0
    if is_alone:
        options["batching"] = "off"
    elif message.HasField("max_batch_size"):
        options["max_rows"] = message.max_batch_size
    batching = message.dynamic_batching
    if is_alone and batching.max_queue_delay_microseconds:
        ignored.append(
            "dynamic_batching.max_queue_delay_microseconds is ignored: requests run alone, as max_batch_size "
            "is 0"
        )
    elif batching.HasField("max_queue_delay_microseconds"):
        options["max_delay"] = batching.max_queue_delay_microseconds / 1e6
    if batching.priority_levels:
        options["priorities"] = batching.priority_levels
        if batching.default_priority_level != batching.priority_levels:
            ignored.append(
                "dynamic_batching.default_priority_level is ignored: a request that has none has the last"
            )
    return (
        options
        | _queue_options(
            batching.default_queue_policy,
            1 if is_alone else options.get("max_rows", MAX_ROWS_DEFAULT),
            ignored,
        )
        | _graphs(message.optimization.cuda)
    )


def _queue_options(policy: Any, rows_max: int, ignored: list[str]) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if policy.default_timeout_microseconds:
        if policy.timeout_action:
            ignored.append(
                "dynamic_batching.default_queue_policy.default_timeout_microseconds is ignored, as its "
                "timeout_action is DELAY: asynctrt refuses a request whose timeout has passed"
            )
        else:
            options["timeout"] = policy.default_timeout_microseconds / 1e6
            if not policy.allow_timeout_override:
                ignored.append(
                    "dynamic_batching.default_queue_policy.allow_timeout_override is always true: the "
                    "default is for requests that have no timeout"
                )
    if policy.max_queue_size:
        # max_queue_size counts requests, and the option rows; a full batch must fit.
        options["max_queue_rows"] = max(policy.max_queue_size, rows_max)
    return options


def _graphs(cuda: Any) -> dict[str, Any]:
    if cuda.HasField("graphs") and not cuda.graphs:
        return {"graphs": "off"}
    sizes = sorted({spec.batch_size for spec in cuda.graph_spec if spec.batch_size})
    return {"graphs": tuple(sizes)} if sizes else {}


def _tensors(items: Any) -> tuple[tuple[str, str, tuple[int, ...]], ...]:
    return tuple((item.name, _datatype(item), tuple(item.dims)) for item in items)


def _datatype(item: Any) -> str:
    """Return KServe's name of a datatype; empty if it is not stated."""
    name = item.DESCRIPTOR.fields_by_name["data_type"].enum_type.values_by_number[item.data_type].name
    return "" if name == "TYPE_INVALID" else str(name.removeprefix("TYPE_").replace("STRING", "BYTES"))
