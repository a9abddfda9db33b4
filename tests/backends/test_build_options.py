"""The options of a build: their forms, their limits, and what contradicts itself."""

import pytest

from asynctrt import BuildOptions, OptionsError


def test_forms():
    options = BuildOptions(dims={"length": "1:8:16", "in.1": 4}, precision="fp16", compute_capabilities="8.9")
    assert options.dims == (("length", (1, 8, 16)), ("in.1", (4, 4, 4)))
    assert BuildOptions(dims=["length=1:8:16", "in.1=4"]).dims == options.dims
    assert (options.precision, options.compute_capabilities) == (("fp16",), ("8.9",))
    assert BuildOptions(profiles="x=1").profiles == ("x=1",)


def test_what_is_written_as_json_is_the_same_options():
    options = BuildOptions(dims={"a": "1:2:3"}, profiles=(), precision=("int8", "fp16"), timing_cache="cache")
    assert BuildOptions.from_settings(None, options.as_json()) == options


def test_limits_of_memory_are_always_set():
    """The library's own are all of the GPU."""
    assert BuildOptions().workspace == BuildOptions().tactic_memory == 1 << 30


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"flavour": "tensorrt_lean"}, "flavour must be 'tensorrt' or 'tensorrt_rtx'"),
        ({"dims": "length"}, "dims must be NAME=SIZE or NAME=MIN:OPT:MAX"),
        ({"dims": {"length": "3:2:1"}}, "dims must be"),
        ({"dims": {"length": 0}}, "dims must be"),
        ({"precision": "fp32"}, "precision must be one or several of 'fp16'"),
        ({"compute_capabilities": "sm89"}, "compute_capabilities must be compute capabilities such as '8.9'"),
        ({"workspace": 0}, "workspace must be a whole number"),
        ({"profiles": "x=1", "dims": "a=1"}, "Leave one of the two out"),
        ({"exclude_lean_runtime": True}, "says nothing without version_compatible"),
        ({"plugins": "missing.so"}, "plugins: there is no file 'missing.so'"),
        ({"timing_cache": "/missing/cache"}, "not the path of a file in a folder that is there"),
        ({"max_row": 3}, "unknown option 'max_row' of a build; did you mean 'max_rows'"),
    ],
)
def test_what_is_wrong_is_said(settings, said):
    with pytest.raises(OptionsError, match=said):
        BuildOptions.from_settings(None, settings)
