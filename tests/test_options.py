"""Options are frozen and checked as a whole; a refusal says what would be right."""

import dataclasses
import pickle
import re
from decimal import Decimal

import numpy as np
import pytest

import asynctrt
from asynctrt._util.synonyms import SYNONYMS
from asynctrt._util.validation import REMOVED_OPTIONS, docs_of
from asynctrt.errors import OptionsError
from asynctrt.options import Options, Settings


def test_the_keywords_of_open_are_the_options():
    assert set(Settings.__annotations__) == {field.name for field in dataclasses.fields(Options)}


def test_every_option_is_explained():
    texts = docs_of(Options)
    assert set(texts) == {field.name for field in dataclasses.fields(Options)}
    assert all(text.endswith(".") for text in texts.values())


@pytest.mark.parametrize("name", ["timeout", "batch_timeout", "close_timeout"])
@pytest.mark.parametrize("given", [1e19, 1e300, float("inf"), Decimal("1e30"), np.float64(1e19)])
def test_a_timeout_may_be_as_long_as_it_likes(name, given):
    assert getattr(Options(**{name: given}), name) == float(given)


def test_what_others_call_an_option_is_one_here():
    names = {field.name for field in dataclasses.fields(Options)}
    assert set(SYNONYMS.values()) <= names
    assert not set(SYNONYMS) & names


def test_options_with_mappings_can_be_compared_hashed_and_sent():
    """A load test keeps engines open by their options, and a worker gets them pickled."""
    first = Options(pad={"n": (4, 8), "m": 3}, pad_with={"mask": "mask"})
    again = pickle.loads(pickle.dumps(first))
    assert first == again == dataclasses.replace(again)
    assert len({first, again, Options(pad={"n": 4})}) == 2
    with pytest.raises(TypeError):
        first.pad["n"] = (1,)


@pytest.mark.parametrize(
    "given",
    [
        {"images": (3, 64, 32), "scale": ()},
        [{"images": [3, 64, 32], "scale": []}],
        ["images=3x64x32 scale="],
        ({"images": "3,64,32", "scale": ()},),
    ],
)
def test_shapes_are_written_in_several_ways(given):
    options = Options(onnx={"shapes": given})
    assert options.onnx.shapes == ({"images": (3, 64, 32), "scale": ()},)
    assert pickle.loads(pickle.dumps(options)) == options
    assert len({options, Options(onnx={"shapes": given})}) == 1


@pytest.mark.parametrize("given", [{}, {"a": 3}, {"a": (-1,)}, {"a": ("x",)}, 3, ["a"], {"a": (1.5,)}])
def test_shapes_that_are_none(given):
    with pytest.raises(OptionsError, match="shapes must be"):
        Options(onnx={"shapes": given})


@pytest.mark.parametrize(
    ("wrong", "hint"),
    [
        ("max_row", "max_rows"),
        ("maxdelay", "max_delay"),
        ("context", "contexts"),
        ("time_out", "timeout"),
        ("batch_size", "max_rows"),
        ("max_batchsize", "max_rows"),
        ("max_queue_delay", "max_delay"),
        ("max_queue_size", "max_queue_rows"),
        ("workers", "isolation"),
        ("batch_timout", "batch_timeout"),
        ("graph", "graphs"),
    ],
)
def test_an_unknown_option_is_refused_with_the_nearest(wrong, hint):
    with pytest.raises(
        OptionsError, match=f"unknown option '{wrong}'; did you mean '{hint}'[?] Valid options: "
    ):
        asynctrt.open("model.onnx", **{wrong: 1})
    with pytest.raises(OptionsError, match=f"unknown option '{wrong}'"):
        Options(**{wrong: 1})


@pytest.mark.parametrize(("name", "instead"), REMOVED_OPTIONS.items())
def test_an_option_that_was_removed_names_what_to_use_instead(name, instead):
    with pytest.raises(OptionsError, match=f"the option '{name}' was removed: {re.escape(instead)}"):
        asynctrt.open("model.onnx", **{name: 1})
    with pytest.raises(OptionsError, match=f"the option '{name}' was removed"):
        Options(**{name: 1})


def test_an_unknown_option_that_is_like_none():
    with pytest.raises(
        OptionsError, match="unknown option 'zzz'; valid options: batching, ignore_extra, max_rows"
    ):
        asynctrt.open("model.onnx", zzz=1)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"max_rows": 0}, "max_rows must be a whole number ≥ 1, not 0"),
        ({"max_queue_rows": None}, "max_queue_rows must be a whole number ≥ 1, not None"),
        ({"priorities": 0}, "priorities"),
        ({"priorities": 257}, "priorities"),
        ({"contexts": 4097}, "contexts"),
        ({"arenas": 4097}, "arenas"),
        ({"lanes": 4097}, "lanes"),
        ({"max_delay": -0.1}, "max_delay must be a number of seconds ≥ 0 and ≤ 1, not -0.1"),
        ({"max_delay": 2}, "≤ 1, not 2. For milliseconds, divide by 1000"),
        ({"timeout": -1}, "timeout"),
        ({"close_timeout": None}, "close_timeout"),
        ({"timeout_until": "busy"}, "'launch' or 'answer', not 'busy'"),
        ({"timeout_until": None}, "'launch' or 'answer', not None"),
        ({"idempotent": 1}, "True or False"),
        ({"batch_timeout": -1}, "batch_timeout must be a number of seconds ≥ 0, not -1"),
        (
            {"tensorrt": {"flavour": "trt"}},
            "'tensorrt', 'tensorrt_lean', 'tensorrt_dispatch' or 'tensorrt_rtx', not 'trt'",
        ),
        ({"tensorrt": {"flavour": ""}}, "flavour must be"),
        ({"tensorrt": {"build": {"dimm": 1}}}, "unknown option 'dimm' of a build; did you mean 'dims'"),
        ({"onnx": {"batch_axis": {"x": -1}}}, "batch_axis must be axes from 0 on"),
        ({"onnx": {"batch_axis": 1}}, "batch_axis must be axes from 0 on"),
        ({"onnx": {"shared": 3}}, "shared must be names of inputs"),
        ({"max_rows": 64, "max_queue_rows": 32}, "max_queue_rows (32) must be ≥ max_rows (64)"),
        ({"contexts": 2, "arenas": 3}, "arenas (3) must be ≤ contexts (2)"),
    ],
)
def test_an_impossible_option_is_refused_with_the_fix(settings, says):
    with pytest.raises(OptionsError) as caught:
        Options(**settings)
    assert says in str(caught.value)


def test_single_settings_win_over_options():
    base = Options(max_rows=8, contexts=2)
    assert Options.from_settings(base, {"max_rows": 4}) == Options(max_rows=4, contexts=2)


def test_options_of_an_applications_own_class():
    @dataclasses.dataclass(frozen=True)
    class Mine(Options):
        team: str = ""

    mine = Mine(max_rows=3, team="vision")
    kept = Options.from_settings(mine, {"timeout": 2})
    assert (type(kept), kept.max_rows, kept.timeout, kept.team) == (Mine, 3, 2, "vision")


def test_options_of_another_type_are_refused():
    with pytest.raises(OptionsError, match="options must be an asynctrt.Options, not a dict"):
        asynctrt.open("model.onnx", options={"max_rows": 3})


@pytest.mark.parametrize(
    ("graphs", "sizes"),
    [
        ("auto", "auto"),
        ("off", "off"),
        ((1, 8, 64), (1, 8, 64)),
        ([64, 8, 1, 8], (1, 8, 64)),
        ("1,8,64", (1, 8, 64)),
        (" 64, 8 ,1", (1, 8, 64)),
        ("(1, 8, 64)", (1, 8, 64)),
        ("[1, 8, 64]", (1, 8, 64)),
        ("4", (4,)),
        (range(1, 4), (1, 2, 3)),
        ((np.int64(8),), (8,)),
        (np.array([8, 1]), (1, 8)),
    ],
)
def test_sizes_of_graphs(graphs, sizes):
    options = Options(graphs=graphs)
    assert options.graphs == sizes
    assert all(type(size) is int for size in options.graphs if not isinstance(options.graphs, str))
    assert Options.from_settings(options, {"contexts": 3}).graphs == sizes


@pytest.mark.parametrize(
    "graphs",
    [
        *("", "on", "AUTO", "1,,8", "1;8", "0", "1,-8", "1.5", (), [0], (1, -1), None, 8, True, ("a",)),
        *((1.5, 8), (True, 8), (8.0,)),  # To round one down would capture another size than was asked for.
    ],
)
def test_sizes_of_graphs_that_are_none(graphs):
    with pytest.raises(OptionsError, match=r"graphs must be 'auto', 'off' or batch sizes .* not ") as caught:
        Options(graphs=graphs)
    assert repr(graphs) in str(caught.value)


@pytest.mark.parametrize(
    ("given", "kept"), [(None, None), (5, 5.0), (0.5, 0.5), (float("inf"), float("inf"))]
)
def test_a_batch_timeout_may_be_long_or_none(given, kept):
    assert Options(batch_timeout=given).batch_timeout == kept


def test_a_value_that_nests_without_end_is_text():
    with pytest.raises(OptionsError, match="plugins"):
        Options.from_settings(None, {"tensorrt": ["plugins=" + "[" * 10**5]})
