"""Options: valid values, and refusals with the reason."""

import dataclasses
import re

import pytest

import asynctrt
from asynctrt.backends.tensorrt import TensorRTOptions, model
from asynctrt.backends.tensorrt.flavours import Flavour
from asynctrt.devices.host import HostDevice
from asynctrt.errors import ModelError, OptionsError
from asynctrt.options import Options
from tests.doubles.tensorrt import EngineSpec, StrictTensorRT, double_plan
from tests.models import double_model


def test_the_defaults_are_safe():
    options = TensorRTOptions()
    assert not options.allow_host_code
    assert options.lean_runtime is None
    assert repr(options) == "TensorRTOptions()"


def test_its_repr_shows_what_was_chosen():
    shown = repr(TensorRTOptions(memory_budget=2, trust="signed"))
    assert shown == "TensorRTOptions(trust=('signed',), memory_budget=2)"


def test_it_is_frozen_and_has_keywords_alone():
    with pytest.raises(dataclasses.FrozenInstanceError):
        TensorRTOptions().memory_budget = 3
    with pytest.raises(TypeError):
        TensorRTOptions("tensorrt")


@pytest.mark.parametrize(
    "wrong",
    [
        {"flavour": "tensorflow"},
        {"allow_host_code": "yes"},
        {"memory_budget": 0},
        {"memory_budget": 1.5},
        {"memory_budget": True},
        {"trust": "me"},
        {"verbosity": None},
        {"runtime_cache": 7},
    ],
)
def test_what_is_out_of_range_is_named(wrong):
    with pytest.raises(OptionsError) as caught:
        TensorRTOptions(**wrong)
    name, value = next(iter(wrong.items()))
    assert name in str(caught.value)
    assert repr(value) in str(caught.value)


def test_a_lean_runtime_has_to_be_there(tmp_path):
    with pytest.raises(OptionsError, match="no file"):
        TensorRTOptions(lean_runtime=tmp_path / "libnvinfer_lean.so.10")


def test_a_plugin_has_to_be_there(tmp_path):
    with pytest.raises(OptionsError, match="plugins: there is no file"):
        TensorRTOptions(plugins=tmp_path / "absent")


def test_they_are_an_option_of_an_engine():
    options = TensorRTOptions(memory_budget=1 << 30, trust="signed", verbosity=20)
    mapping = {"memory_budget": 1 << 30, "trust": "signed", "verbosity": 20}
    lines = ["memory_budget=1073741824", "trust=signed", "verbosity = 20"]
    assert Options(tensorrt=mapping).tensorrt == Options(tensorrt=lines).tensorrt == options
    lines = ["allow_host_code=true", 'trust = "signed"']
    assert Options(tensorrt=lines).tensorrt == TensorRTOptions(allow_host_code=True, trust="signed")
    with pytest.raises(OptionsError, match="the option 'suspendable' was removed: close the engine"):
        Options(tensorrt={"suspendable": True})
    assert Options().tensorrt is None
    hash(Options(tensorrt=mapping))


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"memory_bugdet": 1}, "unknown option 'memory_bugdet' of TensorRT; did you mean 'memory_budget'"),
        (["memory_budget=many"], "memory_budget must be a whole number ≥ 1, not 'many'"),
        (["memory_budget"], "tensorrt must be an asynctrt.TensorRTOptions, a mapping"),
        ("memory_budget=1", "tensorrt must be an asynctrt.TensorRTOptions"),
        (7, "tensorrt must be an asynctrt.TensorRTOptions"),
    ],
)
def test_what_is_wrong_with_them_is_said_at_once(given, said):
    with pytest.raises(OptionsError, match=re.escape(said)):
        asynctrt.open("model.plan", device="cuda:0", tensorrt=given)


@pytest.mark.anyio
async def test_they_are_for_plans_alone():
    with pytest.raises(OptionsError, match=r"the option tensorrt is for TensorRT plans \(\.plan"):
        await asynctrt.open(double_model(), tensorrt={"allow_host_code": True})


@pytest.mark.anyio
async def test_they_reach_the_model(tmp_path, monkeypatch):
    device = HostDevice()
    double = StrictTensorRT(device)
    path = tmp_path / "model.plan"
    path.write_bytes(double_plan(EngineSpec(version_compatible=True)))
    monkeypatch.setattr(model, "find_flavour", lambda *_: Flavour("tensorrt", double, is_real=False))
    monkeypatch.setattr(HostDevice, "name", "cuda:0")
    with pytest.raises(ModelError, match="allow_host_code=True"):
        await asynctrt.open(path, device=device)
    async with asynctrt.open(path, device=device, tensorrt={"allow_host_code": True}, graphs="off") as engine:
        assert engine._model.options.allow_host_code
