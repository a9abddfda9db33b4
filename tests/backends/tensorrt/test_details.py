"""What an engine tells of itself, and what older versions do not tell."""

from types import SimpleNamespace

import pytest

from asynctrt.backends.tensorrt.details import read_details
from asynctrt.errors import UsageError
from tests.doubles.tensorrt import EngineSpec


def test_what_an_engine_tells(bench):
    spec = EngineSpec(
        name="mine", weights_nbytes=8192, aux_streams=2, refittable=True, hardware_compatibility="AMPERE_PLUS"
    )
    details = bench(spec).model.details()
    assert (details.name, details.aux_streams, details.is_refittable) == ("mine", 2, True)
    assert (details.weights_nbytes, details.stripped_nbytes) == (8192, 0)
    assert (details.hardware_compatibility, details.capability) == ("AMPERE_PLUS", "STANDARD")
    assert details.layers > 0
    assert details.layer_names == tuple(f"mine step {step}" for step in range(details.layers))


@pytest.mark.parametrize("double", ["tensorrt_lean", "tensorrt_rtx"])
def test_layers_by_package(bench, double):
    """Lean has a method for them that cannot return."""
    details = bench(EngineSpec(), double=double).model.details()
    assert bool(details.layer_names) == (double == "tensorrt_rtx")


@pytest.mark.parametrize("told", ["", "[]", '{"Layers": 7}', '{"Layers": [{}]}', '{"Layers": []}'])
def test_plans_that_kept_nothing_of_their_layers(bench, told, monkeypatch):
    made = bench(EngineSpec())
    kind = made.trt.EngineInspector
    monkeypatch.setattr(kind, "get_engine_information", lambda *args: told)
    assert made.model.details().layer_names == ()


def test_detailed_layers_have_names_too(bench, monkeypatch):
    made = bench(EngineSpec())
    told = '{"Layers": [{"Name": "conv1 + relu", "LayerType": "CaskConvolution"}, "plain"]}'
    monkeypatch.setattr(made.trt.EngineInspector, "get_engine_information", lambda *args: told)
    assert made.model.details().layer_names == ("conv1 + relu", "plain")


def test_a_version_that_tells_no_sizes(bench):
    """Before 10.14, there are no figures of an engine."""
    made = bench(EngineSpec())
    details = read_details(SimpleNamespace(), made.model._loaded.engine, made.model._loaded.abilities)
    assert details.weights_nbytes is details.stripped_nbytes is None


def test_a_closed_model_tells_nothing(bench):
    made = bench(EngineSpec())
    made.model.close()
    with pytest.raises(UsageError, match="is closed"):
        made.model.details()
