"""ONNX models on a GPU, through ONNX Runtime's CUDA provider.

Each context has a separate session, on the context's stream and bound to the slab's GPU memory. It enqueues
batches there without waiting for them, except for one run in 64. ONNX Runtime cannot run one session on
several streams of ours, so each session has its own working memory; large weights are shared.

The engine captures batch sizes as CUDA graphs, as for any model, but each from a session that runs nothing
else. A graph refers to memory in the session's arena, which the next run reuses, and to kernels that cuDNN
created for that batch size and drops when the size changes. Replaying such a graph has ended a GPU's context
with an illegal instruction. ONNX Runtime was not designed for capture by others, so the contents of each
graph are checked, and its results are compared with the results of its session.
"""

import dataclasses
import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from functools import cache
from io import StringIO
from typing import Any, Final

from asynctrt._util.validation import PATH
from asynctrt.backends.onnx_axes import Axes
from asynctrt.backends.onnx_objects import OnnxObject, is_onnx_object, shown
from asynctrt.backends.onnx_options import CPU, CUDA, NO_FALLBACK, TENSORRT, OnnxOptions
from asynctrt.backends.onnxruntime import OnnxModel
from asynctrt.backends.onnxruntime_errors import Meaning, meaning_of
from asynctrt.backends.onnxruntime_session import (
    LOG_FATAL_ONLY,
    check_available,
    ort,
    session_options,
)
from asynctrt.backends.onnxruntime_streams import Batch, StreamedOnnxModel, StreamSession, refuse_session
from asynctrt.backends.onnxruntime_weights import SHARED_NBYTES_MIN, SharedWeights, share_weights
from asynctrt.devices.base import Device, Stream, mib
from asynctrt.devices.cuda import CudaDevice
from asynctrt.devices.cuda.captures import CAPTURING, outside_of_capture
from asynctrt.devices.cuda.streams import CudaStream
from asynctrt.devices.host import cores
from asynctrt.errors import (
    AsynctrtError,
    DeviceError,
    DeviceMemoryError,
    DeviceUnavailableError,
    ExecutionError,
    MissingExtraError,
    ModelError,
    OptionsError,
)
from asynctrt.tensors import varying_dims

CUDA_MEMORY: Final = "Cuda"
"""ONNX Runtime's name for GPU memory."""

LOG_ERRORS: Final = 3

SHRINKAGE: Final = "memory.enable_memory_arena_shrinkage"
"""The entry of a run's options that makes it free unused memory at its end."""

NAMED_MAX: Final = 6
"""The maximum number of nodes on the CPU that a warning names."""

SETTLE_S: Final = 10.0
"""How long closing a session waits for a stream that no longer computes."""

SETTLE_TRIES: Final = 3

SETTLE_EVERY: Final = 64
"""A session waits for one run in this many."""

RANDOM: Final = frozenset(
    {"Bernoulli", "Dropout", "Multinomial"}
    | {f"Random{kind}{like}" for kind in ("Normal", "Uniform") for like in ("", "Like")}
)
"""Operators that draw random numbers; a graph would draw the same ones each time."""

logger = logging.getLogger("asynctrt")


class OnnxCudaModel(StreamedOnnxModel):
    """A loaded ONNX model for one GPU. Loading blocks: ``asynctrt.open(path, device="cuda:0")`` does it in a
    thread.

    :param path: the ``.onnx`` file. Its axes are treated as in :class:`OnnxModel`.
    :param device: the GPU, the same object as the engine's.
    :param options: as for :class:`OnnxModel`. ``gpu_mem_limit`` of the CUDA provider is the maximum number of
        bytes for one session, including its weights unless they are shared. The default, and upper limit, is
        the free GPU memory within the device's budget when the session is loaded.
    :raises MissingExtraError: if the installed ONNX Runtime has no CUDA provider.
    :raises DeviceUnavailableError: if the provider cannot be loaded, for example because its CUDA libraries
        are missing.
    :raises ModelNotFoundError, ModelError, OptionsError: as for :class:`OnnxModel`.
    """

    capabilities = dataclasses.replace(StreamedOnnxModel.capabilities, has_host_twin=True)

    def __init__(
        self,
        path: str | os.PathLike[str] | OnnxObject,
        options: OnnxOptions | Mapping[str, Any] | None = None,
        *,
        device: Device,
    ) -> None:
        refuse_session(path)
        if not is_onnx_object(path):
            PATH("path", path)
        options = OnnxOptions.of(options)
        _check_providers(options)
        if not isinstance(device, CudaDevice):
            raise DeviceUnavailableError(
                f"{shown(path)} was to run on ONNX Runtime's CUDA provider, but {device!r} is not a GPU. "
                "Open it with device='cuda:0'"
            )
        check_provider()
        check_available([name for name, _ in options.providers])
        self._device = device
        self._given = path
        self._has_told = False
        self._read: ort.InferenceSession | None = None
        self._random: tuple[str, ...] = ()
        self._weights: SharedWeights | None = None
        self._was_optimised = False
        super().__init__(path, options)

    def _adopt(self, axes: Axes) -> None:
        super()._adopt(axes)
        texts = [spec.name for spec in (*self.inputs, *self.outputs) if spec.dtype.hasobject]
        if texts:
            raise ModelError(
                f"{self.name!r} has strings or Python values ({', '.join(texts)}), which do not lie on a "
                "GPU. Open it with device='host'"
            )
        # Copies to the host are only known once the batch is enqueued.
        can_capture = not self.capabilities.brings_outputs
        # The sizes of outputs must be known: from the inputs, or from a session with fixed sizes.
        is_known = set(varying_dims(self.inputs)).issuperset(varying_dims(self.outputs))
        self.capabilities = dataclasses.replace(
            self.capabilities,
            is_capturable=can_capture and is_known,
            is_specialisable=can_capture,
        )

    def host_twin(self) -> OnnxModel:
        """Return the same model on the CPU, with all cores, to try made-up rows on it. Blocks.

        The CUDA provider (1.31) may end the process after a failed run. The first twin takes the session that
        read names and types.
        """
        read, self._read = self._read, None
        if read is not None:
            twin = OnnxModel(read)
            twin.name = self.name
        else:
            config = self.options.session_config.items()
            settings = dataclasses.replace(
                self.options,
                providers=(),
                session_config={name: value for name, value in config if name != NO_FALLBACK},
                intra_op_num_threads=cores(),
            )
            twin = OnnxModel(self._given, settings)
        alone = self.capabilities.alone
        return twin.whole(alone) if alone else twin

    @property
    def device(self) -> Device:
        """The GPU that the model was loaded for."""
        return self._device

    def _load(self, options: ort.SessionOptions) -> ort.InferenceSession:
        """Load the model to read its names and types: on the CPU, or on the GPU if only that can run it."""
        options.intra_op_num_threads = cores()
        try:
            self._read = super()._load(options)
        except Exception as error:
            if "NOT_IMPLEMENTED" not in str(error):
                raise
        else:
            return self._read
        return self.source.load(options, [(CUDA, {"device_id": str(self._device.ordinal)}), (CPU, {})])

    def check_device(self, device: Device) -> None:
        """Check that the device is the GPU that the model was loaded for; it may be a different object."""
        if not isinstance(device, CudaDevice) or device.ordinal != self._device.ordinal:
            raise DeviceUnavailableError(
                f"{self!r} was loaded for {self._device.name}, not for {device.name!r}. Load it for that one"
            )

    def load_session(self, device: Device, stream: Stream, sizes: Mapping[str, int]) -> "CudaSession":
        """Load a session on ``stream``, within the available memory."""
        assert isinstance(device, CudaDevice)
        assert isinstance(stream, CudaStream)
        device.activate()
        before = device.memory()
        limit_nbytes = before.room_nbytes
        if self.options.gpu_mem_limit is not None:
            limit_nbytes = min(limit_nbytes, self.options.gpu_mem_limit)
        settings = provider_settings(
            device.ordinal, stream.handle, max(limit_nbytes, 1), self.options.of_provider(CUDA)
        )
        failed: BaseException
        try:
            if not self._was_optimised:
                self._share_weights(settings, device, stream)
                before = device.memory()
            session = self._load_on_gpu(settings, sizes)
            taken_nbytes = max(before.free_nbytes - device.memory().free_nbytes, 0)
            return CudaSession(
                session,
                device,
                stream,
                name=self.name,
                nbytes=taken_nbytes,
                random=self._random,
                has_one_size=bool(sizes),
            )
        except AsynctrtError as error:
            failed = error
        except Exception as error:
            failed = self._refused(error, device, stream)
        # The stream will be closed soon, and the frames in ONNX Runtime would keep a session on it alive.
        session = None
        raise failed.with_traceback(None)

    def close(self) -> None:
        """Free shared weights. All contexts are closed first."""
        super().close()
        self._read = None
        weights, self._weights = self._weights, None
        if weights is not None:
            weights.close()

    def _share_weights(self, settings: Mapping[str, str], device: CudaDevice, stream: CudaStream) -> None:
        """Before the first session is loaded, put the weights on the GPU for all sessions."""
        self._was_optimised = True
        if not self._is_large():
            return

        def load(options: ort.SessionOptions) -> ort.InferenceSession:
            return self._load_from(self.source.what, options, settings)

        where = "cuda", device.ordinal
        self._weights = share_weights(load, self._cuda_options(), device, stream, where, self.name)

    def _is_large(self) -> bool:
        """Whether the model may have weights worth sharing. They may be in files beside it."""
        if self.path is None:
            return len(self.source.what or b"") >= SHARED_NBYTES_MIN
        with suppress(OSError):  # Without read permission, do not share.
            return any(
                path.stat().st_size >= SHARED_NBYTES_MIN
                for path in self.path.parent.iterdir()
                if self.path.stem in path.name
            )
        return False

    def _load_on_gpu(self, settings: Mapping[str, str], sizes: Mapping[str, int]) -> ort.InferenceSession:
        options, what = self._cuda_options(), self.source.what
        if self._weights is not None:
            self._weights.add_to(options)
            what = str(self._weights.path)
            if sizes and self.options.graph_optimization_level != "disable_all":
                # This level computes values that depend on the sizes now, with weights read from the file.
                options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
        for name, size in sizes.items():
            options.add_free_dimension_override_by_name(name, size)
        session = self._load_from(what, options, settings)
        if CUDA not in session.get_providers():
            raise DeviceUnavailableError(
                f"ONNX Runtime {ort.__version__} could not load its CUDA provider for {self.name!r}, most "
                "often since CUDA's libraries are missing: pip install 'asynctrt[gpu]'"
            )
        self._tell_of_nodes(session)
        return session

    def _load_from(
        self, what: str | bytes | None, options: ort.SessionOptions, settings: Mapping[str, str]
    ) -> ort.InferenceSession:
        providers: list[Any] = [(CUDA, settings)]
        if self.options.allows_cpu:
            # ONNX Runtime refuses options that both name the CPU provider and forbid its use.
            providers.append((CPU, self.options.of_provider(CPU)))
        with CAPTURING:
            return ort.InferenceSession(what, options, providers=providers, enable_fallback=0)

    def _cuda_options(self) -> ort.SessionOptions:
        """Return the options of sessions that run. Their threads run CPU operators, mostly for shapes."""
        options = session_options(self.options)
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        return options

    def _refused(self, error: Exception, device: CudaDevice, stream: CudaStream) -> Exception:
        """Return the error for a session that could not be loaded."""
        meaning = meaning_of(str(error))
        known = device_error(meaning, device, stream, f"loading {self.name!r}")
        if known is not None:
            return known
        if "LoadLibrary" in str(error) or "cannot open shared object" in str(error):
            return DeviceUnavailableError(
                f"ONNX Runtime {ort.__version__} could not load its CUDA provider: {meaning.said}. It does "
                "not contain the CUDA libraries: pip install 'asynctrt[gpu]', or import torch before"
            )
        return ModelError(
            f"{self.source} cannot be loaded by ONNX Runtime {ort.__version__} on {device.name}: "
            f"{meaning.said}"
        )

    def _tell_of_nodes(self, session: ort.InferenceSession) -> None:
        """Inspect the nodes, once per model: warn about nodes on the CPU, and record what kinds there are."""
        if self._has_told:
            return
        self._has_told = True
        self.capabilities = dataclasses.replace(self.capabilities, changes_slowly=True)
        with suppress(Exception):  # Results do not depend on it.
            nodes = [
                (str(part.ep_name), str(node.op_type), str(node.name))
                for part in session.get_provider_graph_assignment_info()
                for node in part.get_nodes()
            ]
            self._random = tuple(sorted({kind for _, kind, _ in nodes} & RANDOM))
            has_convolutions = any("Conv" in kind for _, kind, _ in nodes)
            self.capabilities = dataclasses.replace(self.capabilities, changes_slowly=has_convolutions)
            on_cpu = [(kind, name) for place, kind, name in nodes if place == "CPUExecutionProvider"]
            if on_cpu:
                logger.warning("%r: %s", self.name, describe_fallback(on_cpu))


class CudaSession(StreamSession):
    """A session of the CUDA provider. The memory that loading it took counts towards the device's budget."""

    def __init__(
        self,
        session: ort.InferenceSession,
        device: CudaDevice,
        stream: CudaStream,
        *,
        name: str,
        nbytes: int,
        random: Sequence[str] = (),
        has_one_size: bool = False,
    ) -> None:
        device.count_in(nbytes)
        super().__init__(session, stream, memory="cuda", ordinal=device.ordinal, name=name)
        self.read_on_cpu = _elsewhere(session.get_inputs(), session.get_input_memory_infos)
        self.left_on_cpu = _elsewhere(session.get_outputs(), session.get_output_memory_infos)
        self._device = device
        self._stream = stream
        self._nbytes = nbytes
        self._random = random
        self._options, self._waiting = _run_options(waits=False), _run_options(waits=True)
        self._freeing = _run_options(waits=True)
        self._freeing.add_run_config_entry(SHRINKAGE, f"gpu:{device.ordinal}")
        # The first run allocates each tensor by itself. Later ones put all into one block, whose size the
        # first has shown, so that the memory of the first is only needed once.
        self._first = self._freeing if has_one_size else self._options
        self._runs = 0
        self._left: Batch | None = None
        """The latest batch since the session was last settled."""

    def put(self, binding: Any, stream: Stream, batch: Batch) -> None:
        """Enqueue a run. Wait for it if ONNX Runtime must free or copy something afterwards."""
        self._left = batch
        if stream.is_capturing:
            self._put_in_graph(binding)
            return
        options = self._options if self._runs else self._first
        self._runs += 1
        if self.left_on_cpu or self._runs % SETTLE_EVERY == 0:
            options = self._waiting
        self.run(binding, options)

    def _put_in_graph(self, binding: Any) -> None:
        if self._random:
            raise ExecutionError(
                f"{self.name!r} draws random numbers ({', '.join(self._random)}), and a graph would draw the "
                "same each time"
            )
        # Some operators make the GPU read host memory that they free when they return.
        self._stream.own_sources()
        self.run(binding, self._options)
        outside = outside_of_capture(self._stream.handle)
        if outside:
            raise ExecutionError(
                f"ONNX Runtime put into the graph of {self.name!r} what cannot be replayed: {outside}"
            )

    def error_of(self, error: Exception) -> BaseException:
        """Return the error for callers, and detect one that has made the GPU unusable."""
        meaning = meaning_of(str(error))
        known = device_error(meaning, self._device, self._stream, f"running {self.name!r}")
        return known or ExecutionError(f"ONNX Runtime failed to run {self.name!r}: {meaning.said}")

    @property
    def may_end(self) -> bool:
        """Whether ONNX Runtime can end the session.

        On a lost GPU, ending it would end the process. While work hangs, freeing memory would block forever.
        In both cases the session is left alive. Its memory then stays counted, because its stream may be gone
        by the time the work ends.
        """
        return self._device.state == "ready"

    def close(self) -> None:
        if self._session is not None and self.may_end:
            if not self.settle():
                self._session = None  # Leave it alive.
                return
            self._device.count_out(self._nbytes)
        super().close()

    def settle(self, binding: Any = None) -> bool:
        """Make ONNX Runtime free what runs have left, and return whether it has.

        Some operators (an LSTM, a Concat of many tensors) leave host memory that a function on the stream
        frees. ONNX Runtime enqueues that function at the end of a run that it waits for, or of the session.
        In the second case the function may hold the last reference to the memory's allocator and destroy it.
        CUDA does not permit that there, and the process ends (``std::terminate``: "CUDA failure 800 ...
        cudaFreeHost"). So this runs another batch and waits for it.

        :param binding: the binding to run. Default: zeros, because the memory of earlier batches may be gone.
        """
        if self._left is None:
            return True
        try:
            self._device.activate()
            settled = (
                self._stream.drain(SETTLE_S)
                and (self._run_zeros(self._left) if binding is None else self._ends(binding, self._waiting))
                and self._stream.drain(SETTLE_S)
            )
        except Exception:
            return False  # For example, the GPU is lost.
        if settled:
            self._left = None
        return settled

    def _run_zeros(self, batch: Batch) -> bool:
        """Run a batch of zeros like this one, or of one row if there is no room; return whether it ended.

        Its memory is freed as well: when the session ends, ONNX Runtime would hold the GIL meanwhile.
        """
        assert self._session is not None
        for rows in (batch.rows, 1):
            binding = self.io_binding()
            for name, zeros in batch.zeros(rows).items():
                binding.bind_cpu_input(name, zeros)
            for output in self._session.get_outputs():
                binding.bind_output(output.name, self.memory, self.ordinal)
            if self._ends(binding, self._freeing):
                return True
        return False

    def _ends(self, binding: Any, options: Any) -> bool:
        """Run, wait, and return whether the run succeeded.

        An earlier capture error, which the CUDA runtime keeps for the thread, may be reported first, once.
        """
        assert self._session is not None
        for _ in range(SETTLE_TRIES):
            with suppress(Exception):
                self._session.run_with_iobinding(binding, options)
                return True
        return False


def _elsewhere(tensors: Sequence[Any], ask: Callable[[], Sequence[Any]]) -> frozenset[str]:
    """Return the inputs or outputs that are not in GPU memory, or all of them if ONNX Runtime cannot tell."""
    names = [tensor.name for tensor in tensors]
    with suppress(Exception):
        places = [info.name for info in ask()]
        return frozenset(name for name, place in zip(names, places, strict=True) if place != CUDA_MEMORY)
    return frozenset(names)


def _run_options(*, waits: bool) -> ort.RunOptions:
    options = ort.RunOptions()
    options.log_severity_level = LOG_FATAL_ONLY
    if not waits:
        options.add_run_config_entry("disable_synchronize_execution_providers", "1")
    return options


def _check_providers(options: OnnxOptions) -> None:
    """Check that all providers can work on GPU memory."""
    names = [name for name, _ in options.providers if name not in (CUDA, CPU)]
    if TENSORRT in names:
        raise OptionsError(
            f"{TENSORRT} would build an engine for each session. Leave it out: runtime='tensorrt' builds a "
            "plan once, and keeps it"
        )
    if names:
        raise OptionsError(
            f"{' and '.join(names)} cannot be used with a GPU of the engine's: "
            f"rows lie in its memory, which {CUDA} and {CPU} take. Open the model with "
            "device='host', where rows lie in memory of the CPU"
        )


def check_provider() -> None:
    """Check that the installed ONNX Runtime has the CUDA provider, and load the CUDA libraries for it."""
    if not has_provider():
        raise MissingExtraError(
            f"ONNX models on a GPU need ONNX Runtime's CUDA provider, which the installed package "
            f"(onnxruntime {ort.__version__}) does not have: pip uninstall onnxruntime, then pip install "
            "'asynctrt[gpu]'"
        )
    _preload()


@cache
def _preload() -> None:
    """Load CUDA's libraries from pip packages if possible, and suppress ONNX Runtime's warnings."""
    # It prints the libraries that it does not find, although the system's loader may find them later.
    with redirect_stdout(StringIO()) as said:
        ort.preload_dlls()
    logger.debug("onnxruntime.preload_dlls: %s", said.getvalue().strip() or "all was found")
    # For each session it warns, through the process-wide logger, that the provider is not a plugin. An
    # application that wants its warnings can set the level after opening a model.
    ort.set_default_logger_severity(LOG_ERRORS)


def has_provider() -> bool:
    """Return whether the installed ONNX Runtime has the CUDA provider."""
    return CUDA in ort.get_available_providers()


def provider_settings(
    ordinal: int, stream: int, limit_nbytes: int, given: Mapping[str, str]
) -> dict[str, str]:
    """Return the provider's options for a session on a stream. The limit applies whatever is ``given``."""
    return {
        "device_id": str(ordinal),
        "user_compute_stream": str(stream),
        # The default doubles the arena on each extension, and there is one arena per context.
        "arena_extend_strategy": "kSameAsRequested",
        # The default tries every algorithm for every new shape, which takes seconds.
        "cudnn_conv_algo_search": "HEURISTIC",
        **given,
        "gpu_mem_limit": str(limit_nbytes),
    }


def describe_fallback(nodes: list[tuple[str, str]]) -> str:
    """Return the warning about nodes on the CPU, each given as operator and name."""
    kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(kind for kind, _ in nodes).most_common())
    names = ", ".join(repr(name) for _, name in nodes[:NAMED_MAX])
    more = f" and {len(nodes) - NAMED_MAX} more" if len(nodes) > NAMED_MAX else ""
    return (
        f"{len(nodes)} nodes run on the CPU ({kinds}): {names}{more}. Nodes that work on shapes cost little; "
        "others make batches wait for copies to the host and back (session_config={'"
        f"{NO_FALLBACK}': '1'}} refuses such models)"
    )


def device_error(meaning: Meaning, device: CudaDevice, stream: CudaStream, what: str) -> DeviceError | None:
    """Return the device's error for ONNX Runtime's message, or ``None`` if the device has no error."""
    if meaning.is_memory:
        asked = "" if meaning.nbytes is None else f" of {mib(meaning.nbytes)}"
        return DeviceMemoryError(
            f"{device.name} has no room for a buffer{asked} that ONNX Runtime needs for {what}; "
            f"{device.memory() if device.lost is None else 'the device is lost'}. Lower max_rows or "
            "contexts, or raise gpu_mem_limit of the CUDA provider if that is set"
        )
    # The message may only describe a consequence of a device error, so ask the stream itself.
    if device.lost is None:
        stream.check(what)
    return device.lost
