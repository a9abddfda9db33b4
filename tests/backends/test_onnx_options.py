"""What an option of ONNX Runtime says has its effect, and what cannot have one is refused."""

import ctypes
import dataclasses
import pickle
import shutil
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper

import asynctrt
from asynctrt._util.validation import docs_of
from asynctrt.backends import onnxruntime_session
from asynctrt.backends.onnx_options import CPU, CUDA, TENSORRT, OnnxOptions, relative_to
from asynctrt.backends.onnxruntime import OnnxModel, ort
from asynctrt.backends.onnxruntime_cuda import OnnxCudaModel
from asynctrt.core.loading import load_model
from asynctrt.devices.host import HostDevice, cores
from asynctrt.errors import (
    DeviceUnavailableError,
    InputError,
    MissingExtraError,
    ModelError,
    OptionsError,
    UsageError,
)
from asynctrt.options import Options
from tests.helpers import needed
from tests.models import double_onnx, rows, sequence_onnx, unnamed_output_onnx

AZURE = "AzureExecutionProvider"
"""A provider of ONNX Runtime's packages on PyPI besides the CPU's: it has no operator of these models."""

LIBRARY = """
int registered;
typedef struct { void *(*create_status)(int code, const char *message); } Api;
typedef struct { const Api *(*get_api)(unsigned version); } Base;
void *RegisterCustomOps(void *options, const Base *base) {
    registered++;
    return %s;
}
"""
"""A library of operators, of none, that counts how often it is asked; C without ONNX Runtime's headers."""


@pytest.fixture
def model(tmp_path):
    return double_onnx(tmp_path / "double.onnx")


def compiled(path, returns="0"):
    needed(shutil.which("cc") is not None, "there is no C compiler: run .ci/packages")
    command = ["cc", "-shared", "-fPIC", "-xc", "-", "-o", str(path)]
    subprocess.run(command, input=LIBRARY % returns, text=True, check=True, timeout=30)
    return path


def settings_of(model):
    return model.session.get_session_options()


async def answer(opened, value=3):
    """Return the answer to four rows of a number."""
    async with opened as engine:
        return (await engine.infer(np.full((2, 4), value, np.float32)))["output"].tolist()


DOUBLED = [[6.0] * 4] * 2


# ---- what they are, and what they are given as


def test_each_is_explained():
    assert all(text.endswith(".") for text in docs_of(OnnxOptions).values())


def test_options_are_given_in_each_way_that_others_are():
    made = OnnxOptions(intra_op_num_threads=2, session_config={"session.intra_op.allow_spinning": 0})
    entry = 'session_config = {"session.intra_op.allow_spinning" = "0"}'
    for given in (
        made,
        {"intra_op_num_threads": 2, "session_config": {"session.intra_op.allow_spinning": False}},
        ["intra_op_num_threads=2", entry],
    ):
        assert Options(onnx=given).onnx == made
    assert asynctrt.OnnxOptions is OnnxOptions
    assert repr(OnnxOptions(shared={"sr"})) == "OnnxOptions(shared=('sr',))"
    again = pickle.loads(pickle.dumps(Options(onnx=made)))
    assert again == Options(onnx=made)
    assert len({again, Options(onnx=made), Options(onnx={})}) == 2


@pytest.mark.parametrize(
    "given",
    [
        [("A", {"x": 1, "y": True}), "B"],
        [["A", {"x": "1", "y": "True"}], "B"],
        {"A": {"x": 1, "y": True}, "B": {}},
    ],
)
def test_providers_are_given_as_pairs_or_by_their_names(given):
    assert OnnxOptions(providers=given).providers == (("A", {"x": "1", "y": "True"}), ("B", {}))
    again = dataclasses.replace(OnnxOptions(providers=given), shared={"sr"})
    assert again.providers == OnnxOptions(providers=given).providers


def test_names_of_providers_may_have_commas_between_them():
    assert OnnxOptions(providers=f"{AZURE}, {CPU}").providers == ((AZURE, {}), (CPU, {}))


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (
            {"intra_op_threads": 2},
            "unknown option 'intra_op_threads' of ONNX Runtime; did you mean 'intra_op_nu",
        ),
        (
            {"intra_op_num_threads": 1025},
            "intra_op_num_threads must be a whole number from 0 to 1024, not 1025",
        ),
        ({"graph_optimization_level": "none"}, "graph_optimization_level must be 'disable_all', 'basic'"),
        ({"execution_mode": "parallel"}, "'execution_mode' was removed: make an .*InferenceSession"),
        ({"session_config": ["a"]}, "session_config must be names and values"),
        ({"session_config": {"a": None}}, "session_config must be names and values"),
        ({"free_dimension_overrides": {"batch": 0}}, "free_dimension_overrides must be whole numbers ≥ 1"),
        ({"providers": 8}, "providers must be names of execution providers"),
        ({"providers": [("A", {"x": [1]})]}, "providers must be names of execution providers"),
        ({"providers": [("A", {}, 1)]}, "providers must be names of execution providers"),
        ({"providers": ["A", "A"]}, "providers names 'A' twice"),
        ({"custom_ops": "no/such.so"}, "custom_ops: there is no file 'no/such.so'"),
        ({"enable_mem_pattern": False}, "'enable_mem_pattern' was removed: make an .*InferenceSession"),
        ({"providers": {CUDA: {"device_id": 1}}}, f"device_id, .* of {CUDA} are the engine's to give"),
        ({"providers": {CUDA: {"enable_cuda_graph": 1}}}, "Choose the GPU with device"),
    ],
)
def test_what_is_wrong_is_refused_at_once(given, says):
    with pytest.raises(OptionsError, match=says):
        asynctrt.open("missing.onnx", onnx=given)


def test_options_of_another_runtime_are_refused(tmp_path, model):
    with pytest.raises(OptionsError, match="runtime is 'tensorrt'"):
        asynctrt.open(model, runtime="tensorrt", onnx={"graph_optimization_level": "basic"})
    device = HostDevice()
    for other in (tmp_path / "m.plan", "tests.models:double_model", OnnxModel(model)):
        with pytest.raises(OptionsError, match="the option onnx says how ONNX Runtime loads a model"):
            load_model(other, device, onnx=OnnxOptions(graph_optimization_level="basic"))
    device.close()


# ---- what they do


def test_a_session_is_made_as_the_engine_needs_it_unless_options_say_otherwise(model):
    ours = settings_of(OnnxModel(model))
    assert (ours.intra_op_num_threads, ours.inter_op_num_threads, ours.log_severity_level) == (1, 1, 4)
    given = {
        "intra_op_num_threads": 2,
        "graph_optimization_level": "basic",
    }
    theirs = settings_of(OnnxModel(model, given))
    words = {"graph_optimization_level": ort.GraphOptimizationLevel.ORT_ENABLE_BASIC}
    assert {name: getattr(theirs, name) for name in given} == given | words


def test_as_many_threads_as_there_are_cores(model):
    assert OnnxModel(model, {"intra_op_num_threads": 0}).intra_op_threads == cores()
    assert OnnxModel(model, {"intra_op_num_threads": 2}).intra_op_threads == 2


def test_session_configuration_entries(model):
    entries = {"session.intra_op.allow_spinning": False, "session.dynamic_block_base": 4}
    settings = settings_of(OnnxModel(model, {"session_config": entries}))
    assert settings.get_session_config_entry("session.intra_op.allow_spinning") == "0"
    assert settings.get_session_config_entry("session.dynamic_block_base") == "4"


@pytest.mark.anyio
async def test_free_dimensions_are_fixed(tmp_path):
    path = sequence_onnx(tmp_path / "m.onnx")
    async with asynctrt.open(path, onnx={"free_dimension_overrides": {"length": 3}}) as engine:
        assert engine.inputs[0].dims == (3,)
        assert (await engine.infer(np.ones((2, 3), np.float32)))["total"].tolist() == [3, 3]
        with pytest.raises(InputError):
            await engine.infer(np.ones((2, 4), np.float32))
    assert OnnxModel(path, {"free_dimension_overrides": {"batch": 8}}).capabilities.rows_fixed == 8


# ---- libraries of operators


@pytest.mark.anyio
@pytest.mark.parametrize("is_named_by_its_package", [False, True])
async def test_a_library_of_operators_is_asked_for_them(
    tmp_path, model, monkeypatch, is_named_by_its_package
):
    library = compiled(tmp_path / "operators.so")
    (tmp_path / "some_operators.py").write_text(f"def get_library_path():\n    return {str(library)!r}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "some_operators", raising=False)
    # ONNX Runtime unloads it with the session.
    registered = ctypes.c_int.in_dll(ctypes.CDLL(str(library)), "registered")
    given = "some_operators" if is_named_by_its_package else library
    assert await answer(asynctrt.open(model, onnx={"custom_ops": given})) == DOUBLED
    assert registered.value == 1


def test_a_library_that_refuses_is_told_of_with_its_reason(tmp_path, model):
    reason = 'base->get_api(1)->create_status(1, "it needs a licence")'
    library = compiled(tmp_path / "operators.so", reason)
    with pytest.raises(OptionsError, match=r"custom_ops: .*operators.so.*it needs a licence"):
        OnnxModel(model, {"custom_ops": [library]})


def test_a_file_that_is_no_such_library(tmp_path, model):
    with pytest.raises(OptionsError, match=r"custom_ops: .*double.onnx' has no operators"):
        OnnxModel(model, {"custom_ops": model})


def test_a_package_that_is_missing_or_has_no_library(model, monkeypatch):
    monkeypatch.setitem(sys.modules, "onnxruntime_extensions", None)
    with pytest.raises(MissingExtraError, match="custom_ops names .*pip install onnxruntime-extensions"):
        OnnxModel(model, {"custom_ops": "onnxruntime_extensions"})
    with pytest.raises(OptionsError, match="the package 'numpy' has no library for ONNX Runtime"):
        OnnxModel(model, {"custom_ops": "numpy"})


def test_an_operator_that_is_not_known_leads_to_the_option(tmp_path):
    graph = helper.make_graph(
        [helper.make_node("NegPos", ["input"], ["output"], domain="ai.onnx.contrib")],
        "graph",
        *([helper.make_tensor_value_info(name, TensorProto.FLOAT, ["n", 4])] for name in ("input", "output")),
    )
    versions = [helper.make_opsetid("", 17), helper.make_opsetid("ai.onnx.contrib", 1)]
    onnx.save(helper.make_model(graph, opset_imports=versions, ir_version=9), tmp_path / "m.onnx")
    with pytest.raises(ModelError, match="onnx={'custom_ops': path}, or 'onnxruntime_extensions'"):
        OnnxModel(tmp_path / "m.onnx")


# ---- execution providers


@pytest.mark.anyio
async def test_other_providers_are_used(model, caplog):
    needed(AZURE in ort.get_available_providers(), "onnxruntime of PyPI for Linux has another provider")
    assert OnnxModel(model, {"providers": [AZURE, CPU]}).session.get_providers() == [AZURE, CPU]
    assert OnnxModel(model).session.get_providers() == [CPU]
    assert await answer(asynctrt.open(model, onnx={"providers": f"{AZURE},{CPU}"})) == DOUBLED
    assert f"no node of the model runs on {AZURE}" in caplog.text


def test_options_of_a_provider_reach_it(model, monkeypatch):
    made = []

    def session(what, options, *, providers, enable_fallback):
        made.append((what, providers, enable_fallback))
        return make(what, options, providers=providers)

    make = ort.InferenceSession
    monkeypatch.setattr(ort, "InferenceSession", session)
    OnnxModel(model, {"providers": {AZURE: {"x": 8}, CPU: {}}})
    assert made == [(str(model), [(AZURE, {"x": "8"}), (CPU, {})], 0)]


def test_what_does_not_load_is_told_with_its_options(model):
    """Here: to name the CPU's provider and to forbid it."""
    options = {"providers": CPU, "session_config": {"session.disable_cpu_ep_fallback": 1}}
    with pytest.raises(
        ModelError, match=r"Conflicting session configuration.*It was loaded with OnnxOptions\("
    ):
        OnnxModel(model, options)


def test_a_provider_that_is_not_here_is_an_error_that_lists_those_there_are(model):
    with pytest.raises(MissingExtraError, match=f"has no 'XnnpackExecutionProvider'; it has .*{CPU}"):
        OnnxModel(model, {"providers": ["XnnpackExecutionProvider", CPU]})


def test_a_provider_that_does_not_load_is_an_error(model, monkeypatch):
    """ONNX Runtime goes on with the CPU's instead."""
    monkeypatch.setattr(onnxruntime_session, "check_available", lambda names: None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # As in most programs.
        with pytest.raises(DeviceUnavailableError, match=f"could not load Xnnpack.* It would run on {CPU}"):
            OnnxModel(model, {"providers": ["XnnpackExecutionProvider", CPU]})


@pytest.mark.parametrize("name", [CUDA, TENSORRT])
def test_providers_of_a_gpu_lead_to_the_device(model, name):
    with pytest.raises(OptionsError, match=f"{name} runs on a GPU.*device='cuda:0'"):
        OnnxModel(model, {"providers": [name]})


class Forgetful(ort.InferenceSession):
    """A session that computes a binding again once it is bound anew, as the plugin of OpenVINO does."""

    def get_providers(self):
        return ["PluginExecutionProvider", CPU]

    def io_binding(self):
        binding = super().io_binding()
        bind, binding.is_new = binding.bind_input, False

        def bind_input(*given):
            binding.is_new = True
            bind(*given)

        binding.bind_input = bind_input
        return binding

    def run_with_iobinding(self, binding, run_options=None):
        if binding.is_new:
            super().run_with_iobinding(binding, run_options)
        binding.is_new = False


@pytest.mark.anyio
async def test_memory_is_bound_anew_where_a_provider_does_not_read_it_again(model):
    async with asynctrt.open(Forgetful(model, providers=[CPU]), contexts=1) as engine:
        for value in range(5):
            found = await engine.infer(np.full((2, 4), value, np.float32))
            assert found["output"].tolist() == [[2.0 * value] * 4] * 2


@pytest.mark.anyio
async def test_outputs_of_other_providers_whose_size_is_not_known(tmp_path):
    session = Forgetful(unnamed_output_onnx(tmp_path / "m.onnx"), providers=[CPU])
    async with asynctrt.open(session, contexts=1) as engine:
        for length in (2, 3, 3, 2):
            given = np.full((2, length), length, np.float32)
            found = await engine.infer(given)
            assert found["joined"].tolist() == [[float(length)] * 2 * length] * 2


# ---- models as objects


@pytest.mark.anyio
@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview])
async def test_the_content_of_a_file(model, kind):
    opened = asynctrt.open(kind(model.read_bytes()), onnx={"intra_op_num_threads": 2})
    assert await answer(opened) == DOUBLED


@pytest.mark.anyio
async def test_a_model_without_a_file_is_called_as_its_graph(model):
    async with asynctrt.open(model.read_bytes()) as engine:
        assert engine.name == "graph"
    with pytest.raises(ModelError, match=r"give model.SerializeToString\(\)"):
        await asynctrt.open(onnx.load(model))


@pytest.mark.anyio
async def test_a_session_stays_its_owners(model):
    session = ort.InferenceSession(model, providers=[CPU])
    async with asynctrt.open(session) as engine:
        answers = [await engine.infer(rows(value)) for value in range(20)]
        assert [one["output"].tolist() for one in answers] == [
            (2 * rows(value)).tolist() for value in range(20)
        ]
    assert await answer(asynctrt.open(session)) == DOUBLED
    (again,) = session.run(None, {"input": rows(4)})
    assert again.tolist() == (2 * rows(4)).tolist()


@pytest.mark.anyio
async def test_a_message_names_a_model_without_showing_it():
    large = bytes(3_000_000)
    said = [repr(asynctrt.open(large))]
    for settings in ({}, {"isolation": "process"}, {"runtime": "tensorrt"}, {"tensorrt": {}}):
        with pytest.raises(asynctrt.AsynctrtError) as caught:
            await asynctrt.open(large, **settings)
        said.append(str(caught.value))
    for text in said:
        assert "a model of 3,000,000 bytes" in text
        assert len(text) < 500
    with pytest.raises(ModelError) as caught:
        await asynctrt.open(["m.onnx"] * 100_000)
    assert len(str(caught.value)) < 1000


@pytest.mark.anyio
async def test_what_cannot_be_sent_to_another_process_asks_for_a_path(model):
    for given in (model.read_bytes(), ort.InferenceSession(model, providers=[CPU])):
        with pytest.raises(UsageError, match="it needs its path or 'module:attribute', not <a"):
            await asynctrt.open(given, isolation="process")


def test_a_session_cannot_go_to_a_gpu_or_be_given_options(model):
    session = ort.InferenceSession(model, providers=[CPU])
    with pytest.raises(UsageError, match="each context needs a session that works on its own stream"):
        OnnxCudaModel(session, device=HostDevice())
    with pytest.raises(OptionsError, match="onnx says how ONNX Runtime loads a model"):
        load_model(session, HostDevice(), onnx=OnnxOptions(graph_optimization_level="basic"))


# ---- the command line and files of settings


def test_paths_in_a_file_are_taken_from_its_folder():
    given = {
        "custom_ops": ["lib/a.so", "onnxruntime_extensions", "/b.so"],
        "graph_optimization_level": "basic",
    }
    assert relative_to(given, Path("conf")) == {
        "custom_ops": ["conf/lib/a.so", "onnxruntime_extensions", "/b.so"],
        "graph_optimization_level": "basic",
    }


def test_a_file_of_settings(tmp_path, model):
    from asynctrt.serving.command import configure, read_config

    compiled(tmp_path / "operators.so")
    path = tmp_path / "serve.toml"
    path.write_text(
        textwrap.dedent(
            """
            [onnx]
            intra_op_num_threads = 2

            [[models]]
            path = "double.onnx"
            onnx.custom_ops = ["./operators.so"]
            onnx.providers.AzureExecutionProvider = { x = 1 }
            onnx.providers.CPUExecutionProvider = {}

            [[models]]
            path = "double.onnx"
            name = "other"
            """
        )
    )
    first, second = configure({}, read_config(path)).models
    assert Options(**second.settings).onnx == OnnxOptions(intra_op_num_threads=2)
    assert Options(**first.settings).onnx == OnnxOptions(
        custom_ops=str(tmp_path / "operators.so"), providers=[(AZURE, {"x": "1"}), CPU]
    )


def command(*arguments):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "asynctrt", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
    )
    return done.returncode, done.stdout + done.stderr


@pytest.mark.tier2
@pytest.mark.parametrize(
    "arguments",
    [
        ("inspect", "--open"),
        ("load", "--seconds", "0.1"),
        ("serve", "--check"),
    ],
    ids=lambda arguments: arguments[0],
)
def test_commands(model, arguments):
    name, *flags = arguments
    status, said = command(
        name, model, *flags, "--onnx", "intra_op_num_threads=2", "--onnx", f"providers={CPU}"
    )
    assert status == 0, said
    status, said = command(name, model, *flags, "--onnx", "providers=XnnpackExecutionProvider")
    assert (status, "has no 'XnnpackExecutionProvider'" in " ".join(said.split())) == (1, True), said
