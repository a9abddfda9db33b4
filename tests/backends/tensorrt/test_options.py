"""Options: valid values, and refusals with the reason."""

import dataclasses

import pytest

from asynctrt.backends.tensorrt import TensorRTOptions
from asynctrt.errors import OptionsError


def test_the_defaults_are_safe():
    options = TensorRTOptions()
    assert not options.allow_host_code
    assert options.lean_runtime is None
    assert repr(options) == "TensorRTOptions()"


def test_its_repr_shows_what_was_chosen():
    assert repr(TensorRTOptions(max_threads=2, nvtx="none")) == "TensorRTOptions(max_threads=2, nvtx='none')"


def test_it_is_frozen_and_has_keywords_alone():
    with pytest.raises(dataclasses.FrozenInstanceError):
        TensorRTOptions().max_threads = 3
    with pytest.raises(TypeError):
        TensorRTOptions("tensorrt")


@pytest.mark.parametrize(
    "wrong",
    [
        {"flavour": "tensorflow"},
        {"allow_host_code": "yes"},
        {"memory_budget": 0},
        {"memory_budget": 1.5},
        {"memory_watermark": 0.0},
        {"memory_watermark": 1.1},
        {"memory_watermark": True},
        {"memory_watermark": -1},
        {"persistent_cache_limit": -1},
        {"weight_streaming_budget": "1G"},
        {"aux_streams": "mine"},
        {"aux_streams": None},
        {"max_threads": 0},
        {"max_threads": True},
        {"verbosity": None},
        {"nvtx": "all"},
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


@pytest.mark.parametrize("watermark", [0.9, 1.0, 2**30])
def test_a_watermark_is_a_fraction_or_bytes(watermark):
    assert TensorRTOptions(memory_watermark=watermark).memory_watermark == watermark
