"""ONNX models on a GPU, through ONNX Runtime's CUDA provider.

Each context has a session of its own, on the context's stream and bound to the slab's memory on the GPU, and
puts a batch there without waiting for it, but for one in 64. ONNX Runtime has no way to run one session on
several streams of ours, so its working memory is there once for each session; large weights are shared.

Batch sizes are captured as CUDA graphs by the engine, as for any model, each from a session that runs nothing
else: a graph refers to memory of the session's arena, which the next run is given again, and to kernels that
cuDNN made for that batch size, which it drops when the size changes. Replaying a graph then has ended a GPU's
context with an illegal instruction. ONNX Runtime was not made to be captured by others, so what it put into a
graph is looked at, and each graph is compared with what its session computed.
"""

import ctypes
import dataclasses
import logging
import os
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout, suppress
from functools import cache
from io import StringIO
from typing import Any, Final

from asynctrt.backends.onnx_axes import FIRST_AXIS, ROWS, RowSettings
from asynctrt.backends.onnxruntime import OnnxModel
from asynctrt.backends.onnxruntime_errors import Meaning, meaning_of
from asynctrt.backends.onnxruntime_session import (
    LOG_FATAL_ONLY,
    check_available,
    check_loaded,
    ort,
    session_options,
)
from asynctrt.backends.onnxruntime_streams import Batch, StreamedOnnxModel, StreamSession, refuse_session
from asynctrt.backends.onnxruntime_weights import SHARED_NBYTES_MIN, SharedWeights, share_weights
from asynctrt.devices.base import Device, Stream, mib
from asynctrt.devices.cuda import CudaDevice
from asynctrt.devices.cuda.captures import CAPTURING, outside_of_capture
from asynctrt.devices.cuda.streams import CudaStream
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
from asynctrt.onnx_objects import OnnxObject, is_onnx_object, shown
from asynctrt.onnx_options import CPU, CUDA, NO_FALLBACK, TENSORRT, OnnxOptions
from asynctrt.validation import PATH

CUDA_MEMORY: Final = "Cuda"
"""What ONNX Runtime calls the memory of a GPU."""

LOG_ERRORS: Final = 3

NAMED_MAX: Final = 6
"""How many nodes that run on the CPU a warning names."""

SETTLE_S: Final = 10.0
"""How long the end of a session waits for a stream on which nothing computes any more."""

SETTLE_TRIES: Final = 3

SETTLE_EVERY: Final = 64
"""One run of a session in this many is waited for."""

RANDOM: Final = frozenset(
    {"Bernoulli", "Dropout", "Multinomial"}
    | {f"Random{kind}{like}" for kind in ("Normal", "Uniform") for like in ("", "Like")}
)
"""Operators that draw random numbers, of which a graph would draw the same each time."""

logger = logging.getLogger("asynctrt")


class OnnxCudaModel(StreamedOnnxModel):
    """A loaded ONNX model for one GPU. Loading blocks: ``asynctrt.open(path, device="cuda:0")`` does it in a
    thread.

    :param path: the ``.onnx`` file. What is said of its axes at :class:`OnnxModel` holds here.
    :param device: the GPU, the same object as the engine's.
    :param options: as for :class:`OnnxModel`. ``gpu_mem_limit`` of the CUDA provider is the most bytes that
        one session may hold, weights included unless they are shared by all. Default, and limit: what is
        left of the GPU's memory, and of the device's budget, when it is loaded.
    :raises MissingExtraError: if the installed ONNX Runtime has no CUDA provider.
    :raises DeviceUnavailableError: if the provider cannot be loaded: its CUDA libraries are missing, say.
    :raises ModelNotFoundError, ModelError, OptionsError: as :class:`OnnxModel`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | OnnxObject,
        options: OnnxOptions | Mapping[str, Any] | None = None,
        *,
        device: Device,
        rows: RowSettings = FIRST_AXIS,
    ) -> None:
        refuse_session(path)
        if not is_onnx_object(path):
            PATH("path", path)
        options = OnnxOptions.of(options)
        ROWS("rows", rows)
        _check_providers(options)
        if not isinstance(device, CudaDevice):
            raise DeviceUnavailableError(
                f"{shown(path)} was to run on ONNX Runtime's CUDA provider, and {device!r} is no GPU. Open "
                "it with device='cuda:0'"
            )
        check_provider()
        check_available([name for name, _ in options.providers])
        self._device = device
        self._given, self._rows = path, rows
        self._has_told = False
        self._random: tuple[str, ...] = ()
        self._weights: SharedWeights | None = None
        self._was_optimised = False
        super().__init__(path, options, rows=rows)

    def _decide_memory(self) -> None:
        super()._decide_memory()
        texts = [spec.name for spec in (*self.inputs, *self.outputs) if spec.dtype.hasobject]
        if texts:
            raise ModelError(
                f"{self.name!r} has strings or Python values ({', '.join(texts)}), which do not lie on a "
                "GPU. Open it with device='host'"
            )
        # What it copies to the host itself is known only while it is put on the stream, and what TensorRT
        # does on a stream that captures is not known at all.
        symbols = {dim for spec in self.inputs for dim in spec.dims if isinstance(dim, str)}
        can_capture = not self.brings_outputs and not self._has_tensorrt
        self.is_capturable = can_capture and symbols.issuperset(
            dim for spec in self.outputs for dim in spec.dims if isinstance(dim, str)
        )

    def host_twin(self) -> OnnxModel:
        """Return the same model on the CPU, to try what made-up rows do. Blocks.

        ONNX Runtime's CUDA provider (1.31) may end the process after a run that failed.

        :raises ModelError: if the CPU provider does not have its operators.
        """
        entries = {name: value for name, value in self.options.session_config.items() if name != NO_FALLBACK}
        settings = dataclasses.replace(
            self.options, providers=(), launch="threads", batch_sizes=None, session_config=entries
        )
        twin = OnnxModel(self._given, settings, rows=self._rows)
        return twin.whole(self.alone) if self.alone else twin

    @property
    def device(self) -> Device:
        """The GPU that it was loaded for."""
        return self._device

    def _load(self, options: ort.SessionOptions) -> ort.InferenceSession:
        """Load the model to read its names and types: on the CPU, unless only the GPU has its operators."""
        try:
            return super()._load(options)
        except Exception as error:
            if "NOT_IMPLEMENTED" not in str(error):
                raise
        return self.source.load(options, [(CUDA, {"device_id": str(self._device.ordinal)}), (CPU, {})])

    @property
    def _has_tensorrt(self) -> bool:
        return any(name == TENSORRT for name, _ in self.options.providers)

    def check_device(self, device: Device) -> None:
        """Check that it is the GPU that the model was loaded for, as the same object or another."""
        if not isinstance(device, CudaDevice) or device.ordinal != self._device.ordinal:
            raise DeviceUnavailableError(
                f"{self!r} was loaded for {self._device.name}, not for {device.name!r}. Load it for that one"
            )

    def load_session(self, device: Device, stream: Stream, sizes: Mapping[str, int]) -> "CudaSession":
        """Load a session that works on ``stream``, within the memory that there is.

        :raises DeviceMemoryError: if it does not fit.
        :raises DeviceLostError, DeviceUnavailableError, ModelError: for what else stands in the way.
        """
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
                session, device, stream, name=self.name, nbytes=taken_nbytes, random=self._random
            )
        except AsynctrtError as error:
            failed = error
        except Exception as error:
            failed = self._refused(error, device, stream)
        # The stream is closed soon, and ONNX Runtime's frames keep a session on it alive.
        session = None
        raise failed.with_traceback(None)

    def close(self) -> None:
        """Free the weights, if they are shared. Every context is closed before."""
        super().close()
        weights, self._weights = self._weights, None
        if weights is not None:
            weights.close()

    def _share_weights(self, settings: Mapping[str, str], device: CudaDevice, stream: CudaStream) -> None:
        """Put the weights on the GPU for all sessions, before the first is loaded."""
        self._was_optimised = True
        # What TensorRT has compiled cannot be written to a file.
        if self._has_tensorrt or not self._is_large():
            return

        def load(options: ort.SessionOptions) -> ort.InferenceSession:
            return self._load_from(self.source.what, options, settings)

        where = "cuda", device.ordinal
        self._weights = share_weights(load, self._cuda_options(), device, stream, where, self.name)

    def _is_large(self) -> bool:
        """Whether the model may have weights that are worth sharing: they may lie in files beside it."""
        if self.path is None:
            return len(self.source.what or b"") >= SHARED_NBYTES_MIN
        with suppress(OSError):  # Who may not look has weights of their own for each session.
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
                # What depends on them is computed now, by what reads the weights from their file.
                options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
        for name, size in sizes.items():
            options.add_free_dimension_override_by_name(name, size)
        session = self._load_from(what, options, settings)
        if CUDA not in session.get_providers():
            raise DeviceUnavailableError(
                f"ONNX Runtime {ort.__version__} could not load its CUDA provider for {self.name!r}, most "
                "often since CUDA's libraries are missing: pip install 'asynctrt[gpu]'"
            )
        if self._has_tensorrt:
            check_loaded(session, [TENSORRT], repr(self.name))
        self._tell_of_nodes(session)
        return session

    def _load_from(
        self, what: str | bytes | None, options: ort.SessionOptions, settings: Mapping[str, str]
    ) -> ort.InferenceSession:
        providers: list[Any] = [(CUDA, settings)]
        if self._has_tensorrt:
            ours = {name: settings[name] for name in ("device_id", "user_compute_stream")}
            providers.insert(0, (TENSORRT, ours | self.options.of_provider(TENSORRT)))
        if self.options.allows_cpu:
            # To name the CPU's provider and to forbid its use is a contradiction that is refused.
            providers.append((CPU, self.options.of_provider(CPU)))
        with CAPTURING:
            return ort.InferenceSession(what, options, providers=providers, enable_fallback=0)

    def _cuda_options(self) -> ort.SessionOptions:
        """Return those of sessions that run: their threads do what runs on the CPU, shapes mostly."""
        options = session_options(self.options)
        options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
        return options

    def _refused(self, error: Exception, device: CudaDevice, stream: CudaStream) -> Exception:
        """Return why a session was not loaded."""
        meaning = meaning_of(str(error))
        known = device_error(meaning, device, stream, f"loading {self.name!r}")
        if known is not None:
            return known
        if "LoadLibrary" in str(error) or "cannot open shared object" in str(error):
            return DeviceUnavailableError(
                f"ONNX Runtime {ort.__version__} could not load its CUDA provider: {meaning.said}. It brings "
                "no CUDA libraries of its own: pip install 'asynctrt[gpu]', or import torch before"
            )
        return ModelError(
            f"{self.source} cannot be loaded by ONNX Runtime {ort.__version__} on {device.name}: "
            f"{meaning.said}"
        )

    def _tell_of_nodes(self, session: ort.InferenceSession) -> None:
        """Look at the nodes, once for the model: warn of those that run on the CPU, note random ones."""
        if self._has_told:
            return
        self._has_told = True
        ask = getattr(session, "get_provider_graph_assignment_info", None)
        if ask is None:
            return  # An older version.
        with suppress(Exception):  # Answers do not depend on it.
            nodes = [
                (str(part.ep_name), str(node.op_type), str(node.name))
                for part in ask()
                for node in part.get_nodes()
            ]
            self._random = tuple(sorted({kind for _, kind, _ in nodes} & RANDOM))
            on_cpu = [(kind, name) for place, kind, name in nodes if place == "CPUExecutionProvider"]
            if on_cpu:
                logger.warning("%r: %s", self.name, describe_fallback(on_cpu))


class RawModel:
    """A session of the CUDA provider for ``session.run``, beside which the engine is measured.

    It is left alive to the end of the process: to end it could end the process, see :class:`CudaSession`.

    :raises MissingExtraError: if the installed ONNX Runtime has no such provider.
    """

    def __init__(
        self, path: str | os.PathLike[str], device: Device, options: OnnxOptions | None = None
    ) -> None:
        assert isinstance(device, CudaDevice)
        check_provider()
        given = options or OnnxOptions()
        ours = session_options(given)
        if given.intra_op_num_threads is None:
            ours.intra_op_num_threads = 0  # ONNX Runtime's own default.
        settings = {"device_id": str(device.ordinal), "cudnn_conv_algo_search": "HEURISTIC"}
        providers = [(CUDA, settings | given.of_provider(CUDA))]
        if given.allows_cpu:
            providers.append((CPU, given.of_provider(CPU)))
        self.session = ort.InferenceSession(os.fspath(path), ours, providers=providers, enable_fallback=0)
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(self.session))


class CudaSession(StreamSession):
    """A session of the CUDA provider, whose memory counts as the device's.

    :param nbytes: what loading it took of the GPU's memory.
    :param random: the operators of the model that draw random numbers.
    """

    def __init__(
        self,
        session: ort.InferenceSession,
        device: CudaDevice,
        stream: CudaStream,
        *,
        name: str,
        nbytes: int,
        random: Sequence[str] = (),
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
        self._runs = 0
        self._left: Batch | None = None
        """A batch after which nothing was waited for."""

    def put(self, binding: Any, stream: Stream, batch: Batch) -> None:
        """Put a run on the stream, and wait for it if ONNX Runtime has to free or to copy something then.

        :raises ExecutionError: also if the stream captures, and what was put there cannot be replayed.
        """
        self._left = batch
        if stream.is_capturing:
            self._put_in_graph(binding)
            return
        self._runs += 1
        waits = self.left_on_cpu or self._runs % SETTLE_EVERY == 0
        self.run(binding, self._waiting if waits else self._options)

    def _put_in_graph(self, binding: Any) -> None:
        if self._random:
            raise ExecutionError(
                f"{self.name!r} draws random numbers ({', '.join(self._random)}), and a graph would draw the "
                "same each time"
            )
        # Some operators have the GPU read memory of the host that they free once they return.
        self._stream.own_sources()
        self.run(binding, self._options)
        outside = outside_of_capture(self._stream.handle)
        if outside:
            raise ExecutionError(
                f"ONNX Runtime put into the graph of {self.name!r} what cannot be replayed: {outside}"
            )

    def error_of(self, error: Exception) -> BaseException:
        """Return the error for callers; one that has made the GPU unusable is noticed."""
        meaning = meaning_of(str(error))
        known = device_error(meaning, self._device, self._stream, f"running {self.name!r}")
        return known or ExecutionError(f"ONNX Runtime failed to run {self.name!r}: {meaning.said}")

    @property
    def may_end(self) -> bool:
        """Whether ONNX Runtime can end the session.

        On a lost GPU it would end the process. Where work hangs, freeing memory would wait for that for ever;
        the session is left alive then, and its memory stays counted, as its stream may be gone by the time
        the work ends.
        """
        return self._device.state == "ready"

    def close(self) -> None:
        if self._session is not None and self.may_end:
            if not self.settle():
                self._session = None  # It is left alive.
                return
            self._device.count_out(self._nbytes)
        super().close()

    def settle(self, binding: Any = None) -> bool:
        """Have ONNX Runtime free what runs have left, and say whether it has.

        Some operators (an LSTM, a Concat of many tensors) leave host memory, which a function on the stream
        frees. ONNX Runtime puts it there at the end of a run that it waits for, or of the session. Then that
        function may be the last to know the memory's allocator, and ends it, which CUDA does not permit
        there; and the process ends (``std::terminate``: "CUDA failure 800 ... cudaFreeHost"). So another
        batch is run, and waited for.

        :param binding: what it is bound to. Default: zeros, as the memory of earlier batches may be gone.
        """
        if self._left is None:
            return True
        try:
            self._device.activate()
            settled = (
                self._stream.drain(SETTLE_S)
                and (self._run_zeros(self._left) if binding is None else self._ends(binding))
                and self._stream.drain(SETTLE_S)
            )
        except Exception:
            return False  # The GPU is lost, say.
        if settled:
            self._left = None
        return settled

    def _run_zeros(self, batch: Batch) -> bool:
        """Run a batch of zeros like this or, if there is no room for one, of a row; say whether it ended."""
        assert self._session is not None
        for rows in (batch.rows, 1):
            binding = self.io_binding()
            for name, zeros in batch.zeros(rows).items():
                binding.bind_cpu_input(name, zeros)
            for output in self._session.get_outputs():
                binding.bind_output(output.name, self.memory, self.ordinal)
            if self._ends(binding):
                return True
        return False

    def _ends(self, binding: Any) -> bool:
        """Run and wait, and say whether the run came to its end.

        An error that a capture left with this thread (CUDA's runtime keeps the last) may come first, once.
        """
        assert self._session is not None
        for _ in range(SETTLE_TRIES):
            with suppress(Exception):
                self._session.run_with_iobinding(binding, self._waiting)
                return True
        return False


def _elsewhere(tensors: Sequence[Any], ask: Callable[[], Sequence[Any]]) -> frozenset[str]:
    """Return the inputs or outputs that are not in memory of the GPU: all, if ONNX Runtime cannot tell."""
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
    """Check that all providers are among those that work on memory of the GPU.

    :raises OptionsError: if not.
    """
    names = [name for name, _ in options.providers if name not in (TENSORRT, CUDA, CPU)]
    if names or options.provider_libraries:
        raise OptionsError(
            f"{' and '.join(names or options.provider_libraries)} cannot be used with a GPU of the engine's: "
            f"rows lie in its memory, which {TENSORRT}, {CUDA} and {CPU} take. Open the model with "
            "device='host', where rows lie in memory of the CPU"
        )


def check_provider() -> None:
    """Check that the installed ONNX Runtime has the CUDA provider, and load CUDA's libraries for it.

    :raises MissingExtraError: if it has not.
    """
    if not has_provider():
        raise MissingExtraError(
            f"ONNX models on a GPU need ONNX Runtime's CUDA provider, which the installed package "
            f"(onnxruntime {ort.__version__}) does not have: pip uninstall onnxruntime, then pip install "
            "'asynctrt[gpu]'"
        )
    _preload()


@cache
def _preload() -> None:
    """Load CUDA's libraries from where pip puts them, if it can, and let it warn of nothing."""
    if hasattr(ort, "preload_dlls"):
        # It prints what it does not find, though the system's loader may find that later.
        with redirect_stdout(StringIO()) as said:
            ort.preload_dlls()
        logger.debug("onnxruntime.preload_dlls: %s", said.getvalue().strip() or "all was found")
    # It warns for each session that the provider is no plugin, by the one logger that is the whole process's.
    # An application that wants its warnings sets the level after it has opened a model.
    ort.set_default_logger_severity(LOG_ERRORS)


def has_provider() -> bool:
    """Return whether the installed ONNX Runtime has the CUDA provider."""
    return CUDA in ort.get_available_providers()


def provider_settings(
    ordinal: int, stream: int, limit_nbytes: int, given: Mapping[str, str]
) -> dict[str, str]:
    """Return the provider's options for a session on a stream.

    :param limit_nbytes: the most that its arena may hold, whatever is given.
    :param given: options that win over ours.
    """
    return {
        "device_id": str(ordinal),
        "user_compute_stream": str(stream),
        # The default doubles what it holds, of which there is one for each context.
        "arena_extend_strategy": "kSameAsRequested",
        # The default tries every algorithm for every new shape, which takes seconds.
        "cudnn_conv_algo_search": "HEURISTIC",
        **given,
        "gpu_mem_limit": str(limit_nbytes),
    }


def describe_fallback(nodes: list[tuple[str, str]]) -> str:
    """Return what a warning says of nodes, each its operator and its name, that run on the CPU."""
    kinds = ", ".join(f"{count} {kind}" for kind, count in Counter(kind for kind, _ in nodes).most_common())
    names = ", ".join(repr(name) for _, name in nodes[:NAMED_MAX])
    more = f" and {len(nodes) - NAMED_MAX} more" if len(nodes) > NAMED_MAX else ""
    return (
        f"{len(nodes)} nodes run on the CPU ({kinds}): {names}{more}. Those that work on shapes cost little; "
        "others make batches wait for copies to the host and back (session_config={'"
        f"{NO_FALLBACK}': '1'}} refuses such models)"
    )


def device_error(meaning: Meaning, device: CudaDevice, stream: CudaStream, what: str) -> DeviceError | None:
    """Return the device's error for what ONNX Runtime said, or ``None`` if the device has none."""
    if meaning.is_memory:
        asked = "" if meaning.nbytes is None else f" of {mib(meaning.nbytes)}"
        return DeviceMemoryError(
            f"{device.name} has no room for a buffer{asked} that ONNX Runtime needs for {what}; "
            f"{device.memory() if device.lost is None else 'the device is lost'}. Lower max_rows or "
            "contexts, or raise gpu_mem_limit of the CUDA provider if that is set"
        )
    # It may have told of something else that follows from it, so the stream itself is asked.
    if device.lost is None:
        stream.check(what)
    return device.lost
