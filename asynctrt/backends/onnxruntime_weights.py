"""The weights of an ONNX model, held once on a GPU for all of its sessions.

ONNX Runtime optimises the model and copies its weights to the GPU for each session. Here both happen once.
The optimised model is kept as a file, with its weights beside it. The weights are copied to the GPU, and each
session gets their addresses (``SessionOptions.add_initializer``). A session that cannot use them, because an
operator on the CPU reads them, loads them from the file.
"""

import logging
import tempfile
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np

from asynctrt.backends.onnxruntime import ort
from asynctrt.devices.base import COPY_S, Buffer, Device, Stream, aligned, mib
from asynctrt.errors import DeviceError, DeviceLostError

SHARED_NBYTES_MIN: Final = 16 << 20
"""With fewer bytes of weights, each session has separate weights."""

WEIGHT_NBYTES_MIN: Final = 1 << 16
"""Smaller weights are not shared: many are constants that the CPU reads when it loads a model."""

MODEL: Final = "model.onnx"
WEIGHTS: Final = "weights.bin"

DTYPES: Final[Mapping[int, Any]] = {
    1: np.float32, 2: np.uint8, 3: np.int8, 10: np.float16, 11: np.float64,
}  # fmt: skip
"""NumPy's types by ``onnx.TensorProto.DataType``, for weight types that ONNX Runtime can bind."""

logger = logging.getLogger("asynctrt")


class Weight(NamedTuple):
    """A weight in the file beside a model."""

    name: str
    dtype: Any
    dims: tuple[int, ...]
    offset: int
    nbytes: int


class SharedWeights:
    """The weights on the GPU, and the files of the model that refer to them, written as :func:`optimising`
    says."""

    def __init__(
        self,
        folder: "tempfile.TemporaryDirectory[str]",
        device: Device,
        stream: Stream,
        where: tuple[str, int],
    ) -> None:
        self._folder = folder
        self.path = Path(folder.name, MODEL)
        self._buffer: Buffer | None = None
        self._values: dict[str, Any] = {}
        found = _weights_of(self.path)
        nbytes = sum(aligned(weight.nbytes) for weight in found)
        if nbytes < SHARED_NBYTES_MIN:
            return
        self._buffer = device.allocate(nbytes)
        try:
            self._copy(found, stream, where)
        except BaseException:
            self.close()
            raise

    def __repr__(self) -> str:
        return f"<SharedWeights {self.nbytes} bytes>"

    @property
    def nbytes(self) -> int:
        """Return their size in bytes on the GPU; 0 if there are too few to share."""
        return 0 if self._buffer is None else self._buffer.nbytes

    def add_to(self, options: ort.SessionOptions) -> None:
        """Make the session loaded with these options from :attr:`path` use these weights in place."""
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        for name, value in self._values.items():
            options.add_initializer(name, value)

    def close(self) -> None:
        """Free the weights and remove the files, once no session is left. Idempotent."""
        self._values.clear()
        buffer, self._buffer = self._buffer, None
        if buffer is not None:
            buffer.close()
        self._folder.cleanup()

    def _copy(self, found: list[Weight], stream: Stream, where: tuple[str, int]) -> None:
        assert self._buffer is not None
        holder = _holder()
        data = np.memmap(Path(self._folder.name, WEIGHTS), np.uint8, mode="r")
        address = self._buffer.address
        for weight in found:
            stream.copy_bytes(address, data[weight.offset :].ctypes.data, weight.nbytes)
            # ONNX Runtime can wrap foreign memory of any type only as an output. The value keeps the binding
            # alive, and the binding its session.
            binding = holder.io_binding()
            binding.bind_output("output", *where, weight.dtype, weight.dims, address)
            self._values[weight.name] = binding.get_outputs()[0]
            address += aligned(weight.nbytes)
        if not stream.drain(COPY_S):
            raise DeviceError(f"{mib(self.nbytes)} of weights were not copied within {COPY_S:g} s")


def optimising(options: ort.SessionOptions) -> "tempfile.TemporaryDirectory[str]":
    """Make the session loaded with these options write its optimised model to a folder; return the folder."""
    folder = tempfile.TemporaryDirectory(prefix="asynctrt-", ignore_cleanup_errors=True)
    options.optimized_model_filepath = str(Path(folder.name, MODEL))
    entries = {"file_name": WEIGHTS, "min_size_in_bytes": str(WEIGHT_NBYTES_MIN)}
    for name, value in entries.items():
        options.add_session_config_entry(f"session.optimized_model_external_initializers_{name}", value)
    return folder


def share_weights(
    load: Callable[[ort.SessionOptions], ort.InferenceSession],
    options: ort.SessionOptions,
    device: Device,
    stream: Stream,
    where: tuple[str, int],
    name: str,
) -> SharedWeights | None:
    """Load a model once, and put its weights on the GPU for all sessions; ``None`` if that fails."""
    if find_spec("onnx") is None:
        logger.info("%r: each session has separate weights, as onnx is not installed", name)
        return None
    folder = optimising(options)
    try:
        load(options)  # The session ends at once, because it has separate weights.
        shared = SharedWeights(folder, device, stream, where)
    except DeviceLostError:
        folder.cleanup()
        raise
    except Exception as error:
        logger.info("%r: each session has separate weights: %s", name, error)
        folder.cleanup()
        return None
    if not shared.nbytes:
        shared.close()
        return None
    logger.info("%r: %s of weights are shared by all sessions", name, mib(shared.nbytes))
    return shared


def _holder() -> ort.InferenceSession:
    """Return a small session of the CPU provider that is never run."""
    from onnx import TensorProto, helper  # noqa: PLC0415  (as below)

    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [1]) for name in ("input", "output")]
    node = helper.make_node("Identity", ["input"], ["output"])
    model = helper.make_model(
        helper.make_graph([node], "holder", ends[:1], ends[1:]),
        opset_imports=[helper.make_opsetid("", 13)],
        ir_version=8,
    )
    return ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])


def _weights_of(path: Path) -> list[Weight]:
    """Return the weights stored in the file beside a model."""
    import onnx  # noqa: PLC0415  (slow to import, and only for large models)

    found = []
    model = onnx.load(path, load_external_data=False)
    for tensor in model.graph.initializer:
        place = {entry.key: entry.value for entry in tensor.external_data}
        dtype = DTYPES.get(tensor.data_type)
        if tensor.data_location != onnx.TensorProto.EXTERNAL or dtype is None:
            continue
        dims = tuple(int(dim) for dim in tensor.dims)
        nbytes = int(np.prod(dims, dtype=np.int64)) * np.dtype(dtype).itemsize
        assert place["location"] == WEIGHTS, place
        found.append(Weight(str(tensor.name), dtype, dims, int(place.get("offset", 0)), nbytes))
    return found
