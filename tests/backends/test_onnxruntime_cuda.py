"""What can be told of ONNX Runtime's CUDA provider without a GPU; tests/gpu has the rest."""

import weakref
from contextlib import suppress
from types import SimpleNamespace

import numpy as np
import pytest

import asynctrt
from asynctrt.backends import onnxruntime_cuda
from asynctrt.backends.onnx_options import CUDA, OnnxOptions
from asynctrt.backends.onnxruntime import OnnxModel
from asynctrt.backends.onnxruntime_cuda import (
    SETTLE_EVERY,
    SETTLE_TRIES,
    SHRINKAGE,
    CudaSession,
    OnnxCudaModel,
    check_provider,
    describe_fallback,
    provider_settings,
)
from asynctrt.backends.onnxruntime_streams import Batch, StreamedOnnxModel
from asynctrt.devices.host import HostDevice, cores
from asynctrt.errors import (
    DeviceLostError,
    DeviceUnavailableError,
    ExecutionError,
    MissingExtraError,
    OptionsError,
)
from tests.backends.onnx_sessions import HostSessions
from tests.models import detector_onnx, double_onnx


def test_a_session_is_tied_to_its_stream_and_bounded():
    settings = provider_settings(1, 0xABC, 1 << 30, {})
    assert settings["device_id"] == "1"
    assert settings["user_compute_stream"] == str(0xABC)
    assert settings["gpu_mem_limit"] == str(1 << 30)
    assert settings["arena_extend_strategy"] == "kSameAsRequested"
    assert all(isinstance(value, str) for value in settings.values())


def test_options_of_the_provider_that_are_given_win():
    given = {"use_tf32": "0", "cudnn_conv_algo_search": "EXHAUSTIVE", "gpu_mem_limit": "9"}
    settings = provider_settings(0, 1, 1, given)
    assert settings["gpu_mem_limit"] == "1", "what is free, or less"
    assert settings["use_tf32"] == "0"
    assert settings["cudnn_conv_algo_search"] == "EXHAUSTIVE"


def test_nodes_on_the_cpu_are_counted_and_some_are_named():
    said = describe_fallback([("Shape", f"s{n}") for n in range(9)] + [("NonZero", "n")])
    assert said.startswith(
        "10 nodes run on the CPU (9 Shape, 1 NonZero): 's0', 's1', 's2', 's3', 's4', 's5' and"
    )
    assert "4 more" in said


def test_without_the_provider_the_extra_is_named(monkeypatch):
    monkeypatch.setattr(onnxruntime_cuda.ort, "get_available_providers", lambda: ["CPUExecutionProvider"])
    with pytest.raises(MissingExtraError, match=r"asynctrt\[gpu\]"):
        check_provider()


def test_another_device_than_a_gpu_is_refused(tmp_path):
    with pytest.raises(DeviceUnavailableError, match="cuda:0"):
        OnnxCudaModel(double_onnx(tmp_path / "m.onnx"), device=HostDevice())


class Undevised(OnnxCudaModel):
    """The model as it is before it knows a GPU."""

    def __init__(self, path, **options):
        self._given = path
        StreamedOnnxModel.__init__(self, path, options)


def test_the_twin_on_the_host_takes_the_session_that_read_names_and_types(tmp_path):
    """Loading a large model takes long."""
    model = Undevised(detector_onnx(tmp_path / "detector.onnx"))
    rows = np.random.default_rng(0).random((2, 3, 32, 32), np.float32)
    read = model._read
    first, second = model.host_twin(), model.host_twin()
    assert first.session is read is not second.session
    assert first.name == second.name == model.name == "detector"
    assert first.inputs == second.inputs == model.inputs
    answers = [twin.session.run(None, {"images": rows})[0] for twin in (first, second)]
    np.testing.assert_allclose(*answers, rtol=1e-4, atol=1e-5)
    assert first.intra_op_threads == second.intra_op_threads == cores()


def test_a_model_with_outputs_of_sizes_of_their_own_is_specialised_as_others_are(tmp_path):
    """As detectors have: the places of their answers have a name that no input has."""
    capabilities = Undevised(detector_onnx(tmp_path / "detector.onnx")).capabilities
    assert (capabilities.is_specialisable, capabilities.is_capturable) == (True, False)
    capabilities = Undevised(double_onnx(tmp_path / "double.onnx")).capabilities
    assert (capabilities.is_specialisable, capabilities.is_capturable) == (True, True)


@pytest.mark.parametrize("limit", [-1, 0, "8MiB", 0.5, True])
def test_a_limit_of_memory_that_is_none_is_refused(limit):
    with pytest.raises(
        OptionsError, match="gpu_mem_limit of CUDAExecutionProvider must be a whole number ≥ 1"
    ):
        OnnxOptions(providers={CUDA: {"gpu_mem_limit": limit}})
    assert OnnxOptions(providers={CUDA: {"gpu_mem_limit": 8 << 20}}).gpu_mem_limit == 8 << 20


@pytest.mark.parametrize(
    ("provider", "says"),
    [
        ("OpenVINOExecutionProvider", "OpenVINOExecutionProvider cannot be used with a GPU"),
        ("TensorrtExecutionProvider", "Leave it out: runtime='tensorrt' builds a plan once"),
    ],
)
def test_providers_that_do_not_work_for_the_engine_on_a_gpu_are_refused_there(tmp_path, provider, says):
    with pytest.raises(OptionsError, match=says):
        OnnxCudaModel(double_onnx(tmp_path / "m.onnx"), {"providers": provider}, device=HostDevice())


class DeferringSession:
    """Behaves as a session of ONNX Runtime's did on an H200.

    A function on the stream frees what runs leave. A run that ends, and is waited for, puts it there; or the
    end of the session, and then it ends the process.

    :param fails: whether batches of 8 rows fail, once they have left something.
    :param stale: how many runs raise an error that is of something else.
    """

    def __init__(self, stream, *, fails=False, stale=0):
        self.stream = stream
        self.fails = fails
        self.stale = stale
        self.state = {"left": 0, "left_most": 0}
        self.ran = []
        self.frees = []
        """Whether each run freed at its end what no tensor needs."""
        weakref.finalize(self, self._end, self.stream, self.state)

    def get_inputs(self):
        return [SimpleNamespace(name="x")]

    def get_outputs(self):
        return [SimpleNamespace(name="y")]

    def get_input_memory_infos(self):
        return [SimpleNamespace(name="Cuda")]

    get_output_memory_infos = get_input_memory_infos

    def io_binding(self):
        return SomeBinding()

    @staticmethod
    def _end(stream, state):
        stream.ended.append("process" if state["left"] or stream.functions else "session")

    def run_with_iobinding(self, binding, options):
        if self.stale:
            self.stale -= 1
            raise RuntimeError("CUDA failure 901: operation failed due to a previous error during capture")
        waits = True
        with suppress(RuntimeError):  # So it tells of an entry that is not there.
            waits = options.get_run_config_entry("disable_synchronize_execution_providers") != "1"
        self.ran.append((binding.rows, waits))
        frees = ""
        with suppress(RuntimeError):
            frees = options.get_run_config_entry(SHRINKAGE)
        assert waits or not frees, "memory would be freed that the batch still uses"
        self.frees.append(frees == "gpu:0")
        self.state["left"] += 1
        self.state["left_most"] = max(self.state.values())
        if self.fails and binding.rows == 8:
            raise RuntimeError("Non-zero status code returned while running LSTM node.")
        if waits:
            self.stream.functions, self.state["left"] = self.stream.functions + 1, 0


class SomeBinding:
    """An I/O binding to ``rows`` rows."""

    def __init__(self, rows=0):
        self.rows = rows

    def bind_cpu_input(self, name, array):
        assert (name, array.dtype, array.shape[1:]) == ("x", np.float32, (2,))
        assert not array.any()
        self.rows = len(array)

    def bind_output(self, name, memory, ordinal):
        assert (name, memory, ordinal) == ("y", "cuda", 0)


class DeferringStream:
    """The stream of such a session, and its device."""

    def __init__(self, *, drains=True, state="ready"):
        self.handle = 7
        self.is_capturing = False
        self.functions = 0
        self.drains = drains
        self.ended = []
        self.ordinal, self.state, self.lost, self.name, self.counted = 0, state, None, "cuda:0", 0

    def drain(self, timeout_s):
        if self.drains:
            self.functions = 0
        return self.drains

    def count_in(self, nbytes):
        self.counted += nbytes

    def count_out(self, nbytes):
        self.counted -= nbytes

    def activate(self):
        if self.state == "lost":
            raise DeviceLostError("it is lost")

    def check(self, what):
        pass


class PlacedSession(DeferringSession):
    """A session of three inputs and three outputs that says where it has them, if it can."""

    def __init__(self, stream, places):
        super().__init__(stream)
        self.places = places

    def get_inputs(self):
        return [SimpleNamespace(name=name) for name in "abc"]

    get_outputs = get_inputs

    def get_input_memory_infos(self):
        if not self.places:
            raise RuntimeError("not implemented")
        return [SimpleNamespace(name=place) for place in self.places]

    get_output_memory_infos = get_input_memory_infos


@pytest.mark.parametrize(
    ("places", "found"),
    [
        (("Cuda", "Cuda", "Cuda"), ""),
        (("Cuda", "Cpu", "Cuda"), "b"),
        (("CudaPinned", "Cuda", "Cpu"), "ac"),
        ((), "abc"),
    ],
)
def test_what_operators_on_the_cpu_read_and_write_is_known(places, found):
    """All of it, if ONNX Runtime does not say: rows would be those of an earlier batch, answers elsewhere."""
    stream = DeferringStream()
    inner = PlacedSession(stream, places)
    session = CudaSession(inner, stream, stream, name="m", nbytes=5)
    assert session.read_on_cpu == session.left_on_cpu == frozenset(found)
    session.put(SomeBinding(4), stream, batch_of(4))
    assert inner.ran == [(4, bool(found))], "what lies on the CPU is copied once the run has ended"


def batch_of(rows):
    return Batch((("x", np.dtype("float32"), (2,), 0),), rows)


def deferring(**settings):
    """Return a stream, a session of ONNX Runtime's on it, and ours around that."""
    stream = DeferringStream()
    inner = DeferringSession(stream)
    return stream, inner, CudaSession(inner, stream, stream, name="m", nbytes=5, **settings)


def end_session(stream, *, runs=1, fails=False, is_lost=False, stale=0, count=8):
    """Run and end a session; return the rows of its runs, and whether each was waited for."""
    found = DeferringSession(stream, fails=fails)
    ran = found.ran
    session = CudaSession(found, stream, stream, name="m", nbytes=5)
    for _ in range(runs):
        with suppress(ExecutionError):
            session.put(SomeBinding(count), stream, batch_of(count))
        assert stream.drain(1) == stream.drains
    found.stale = stale
    del found
    if is_lost:
        stream.state = "lost"
    session.close()
    session.close()
    return ran


@pytest.mark.parametrize("runs", [1, 3])
def test_a_session_ends_once_what_its_runs_left_is_freed(runs):
    stream = DeferringStream()
    assert end_session(stream, runs=runs) == [(8, False)] * runs + [(8, True)]
    assert stream.ended == ["session"]
    assert stream.counted == 0


def test_memory_is_freed_without_the_gil():
    """By the last run, as ONNX Runtime holds it while a session ends."""
    stream = DeferringStream()
    inner = DeferringSession(stream)
    frees = inner.frees
    session = CudaSession(inner, stream, stream, name="m", nbytes=5)
    session.put(SomeBinding(4), stream, batch_of(4))
    del inner
    session.close()
    assert frees == [False, True]


def test_what_only_the_first_run_of_the_only_size_needs_is_freed():
    stream, inner, session = deferring(has_one_size=True)
    bound = SomeBinding(4)
    for _ in range(3):
        session.put(bound, stream, batch_of(4))
    assert session.settle(bound)
    assert inner.frees == [True, False, False, False], "a graph would refer to memory that is freed"


def test_a_session_whose_batches_fail_is_settled_by_a_row():
    """There may be no room for such a batch, and what a failed run has left stays there."""
    stream = DeferringStream()
    ran = end_session(stream, fails=True)
    assert ran == [(8, False), *[(8, True)] * SETTLE_TRIES, (1, True)]
    assert stream.ended == ["session"]


def test_what_runs_leave_does_not_grow():
    """A run that is not waited for frees nothing: an LSTM left 300 bytes a batch for good."""
    stream, inner, session = deferring()
    for _ in range(1000):
        session.put(SomeBinding(4), stream, batch_of(4))
    assert inner.state["left_most"] <= SETTLE_EVERY
    assert sum(waits for _, waits in inner.ran) == 1000 // SETTLE_EVERY


@pytest.mark.parametrize(("stale", "ends"), [(1, True), (2, True), (9, False)])
def test_an_error_that_a_capture_left_does_not_pass_for_the_end_of_a_run(stale, ends):
    """The run that it came in the way of has freed nothing, and the end of the session ended the process."""
    stream = DeferringStream()
    end_session(stream, stale=stale)
    assert stream.ended == (["session"] if ends else [])


def test_before_a_capture_the_batch_that_is_bound_is_run_again():
    """Memory of other runs would get into the graph."""
    stream, inner, session = deferring()
    bound = SomeBinding(3)
    session.put(bound, stream, batch_of(3))
    assert session.settle(bound)
    assert session.settle(bound)
    assert inner.ran == [(3, False), (3, True)]


def test_a_session_that_did_not_come_to_rest_when_asked_is_not_ended_either():
    """Before a capture it is asked, too. It had forgotten then that something was left."""
    stream, inner, session = deferring()
    session.put(SomeBinding(4), stream, batch_of(4))
    inner.stale = 9
    del inner
    assert not session.settle(SomeBinding(4))
    session.close()
    assert stream.ended == []


def test_a_session_that_never_ran_ends_at_once():
    stream = DeferringStream()
    assert end_session(stream, runs=0) == []
    assert (stream.ended, stream.counted) == (["session"], 0)


@pytest.mark.parametrize("given", [{"drains": False}, {"is_lost": True}])
def test_a_session_that_cannot_end_without_harm_is_left_alive(given):
    stream = DeferringStream(drains=given.get("drains", True))
    end_session(stream, is_lost=given.get("is_lost", False))
    assert stream.ended == []
    assert stream.counted == 5, "its memory stays in use"


class Bytes:
    """A path, of a kind that this one is not."""

    def __fspath__(self):
        return b"m.onnx"


def for_a_gpu(path, options=None):
    return OnnxCudaModel(path, options, device=HostDevice())


@pytest.mark.parametrize("model", [OnnxModel, HostSessions, for_a_gpu])
@pytest.mark.parametrize("path", [None, 8, ["m.onnx"], object(), Bytes()])
def test_what_is_no_path_is_told_of_by_its_name(model, path):
    """Before anything is looked for: the device, the provider."""
    with pytest.raises(OptionsError, match="^path must be a path"):
        model(path)


@pytest.mark.parametrize("model", [OnnxModel, HostSessions, for_a_gpu])
@pytest.mark.parametrize(
    ("options", "says"),
    [
        (8, "^options must be an asynctrt.OnnxOptions"),
        ("graph_optimization_level=basic", "^options must be an asynctrt.OnnxOptions"),
        ({"graph_optimization_level": "both"}, "^graph_optimization_level must be 'disable_all', 'basic'"),
        ({"custom_op": 1}, "^unknown option 'custom_op' of ONNX Runtime; did you mean 'custom_ops'"),
    ],
)
def test_options_of_a_wrong_kind_are_told_of(tmp_path, model, options, says):
    """Before anything is loaded or looked for."""
    with pytest.raises(OptionsError, match=says):
        model(tmp_path / "missing.onnx", options)


@pytest.mark.anyio
async def test_a_runtime_that_does_not_fit_the_file_is_refused(tmp_path):
    path = double_onnx(tmp_path / "m.onnx")
    with pytest.raises(OptionsError, match="'onnxruntime' or 'tensorrt'"):
        asynctrt.open(path, runtime="tensorflow")
    plan = tmp_path / "m.plan"
    plan.write_bytes(b"")
    with pytest.raises(OptionsError, match="ONNX Runtime does not run"):
        await asynctrt.open(plan, runtime="onnxruntime")
    async with asynctrt.open(path, runtime="onnxruntime") as engine:
        assert engine.platform == "onnxruntime_onnx"


def test_graphs_of_a_library_that_was_not_made_for_them_are_compared_with_batches():
    assert OnnxCudaModel.capabilities.is_traced
