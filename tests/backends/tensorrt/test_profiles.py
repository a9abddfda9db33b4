"""Profiles: their notation, proposals, and what does not fit a network."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asynctrt.backends.tensorrt.profiles import NetworkTensor, parse_profile, profile_text, profiles_of
from asynctrt.errors import ModelError, OptionsError

IMAGE = NetworkTensor("image", "FLOAT", (-1, 3, 224, 224), ("batch", None, None, None))
TOKENS = NetworkTensor("tokens", "INT32", (-1, -1), ("batch", "length"))
MASK = NetworkTensor("mask", "INT32", (-1, -1), ("batch", "length"))
NAMELESS = NetworkTensor("in", "FLOAT", (-1, -1, 4), (None, None, None))
FIXED = NetworkTensor("fixed", "FLOAT", (2, 4), (None, None))


def test_the_notation():
    assert parse_profile("input=1x3x8:2x3x8:4x3x8") == {"input": ((1, 3, 8), (2, 3, 8), (4, 3, 8))}
    assert parse_profile("a=1:2:3,b=4x5") == {"a": ((1,), (2,), (3,)), "b": ((4, 5),) * 3}


names = st.text(min_size=1, max_size=8).filter(lambda name: "=" not in name)
sizes = st.lists(st.tuples(*[st.integers(1, 99)] * 3).map(sorted), min_size=1, max_size=4)


@settings(max_examples=25, deadline=None)
@given(st.dictionaries(names, sizes, min_size=1, max_size=3))
def test_what_is_written_is_read_again_whatever_inputs_are_called(ranges):
    profile = {name: tuple(zip(*dims, strict=True)) for name, dims in ranges.items()}
    assert parse_profile(profile_text(profile)) == profile


@pytest.mark.parametrize("name", ["input:0", "gpu_0/data,1", "a b", "x:1x2"])
def test_names_with_marks_of_the_notation_in_them(name):
    profile = {name: ((1, 2), (3, 4), (5, 6)), "b": ((1,), (1,), (1,))}
    assert parse_profile(profile_text(profile)) == profile


@pytest.mark.parametrize(
    "text",
    ["input", "input=", "=1x2", "input=1x2:2x2", "a=1:2:3;b=1", "a=1x", "a=1,a=2", "a=-1", "a=1:2:3:4", "é"],
)
def test_what_is_not_the_notation(text):
    with pytest.raises(OptionsError, match="Write it as 'input=1x3x224x224:"):
        parse_profile(text)


@pytest.mark.parametrize("text", ["a=0x1", "a=2:1:3", "a=1:3:2", "a=1x2:1:1x2", f"a={2**31}"])
def test_sizes_out_of_order_or_range(text):
    with pytest.raises(OptionsError, match="rise from the smallest to the best to the largest"):
        parse_profile(text)


def test_a_proposal_takes_one_row_to_the_most_and_is_best_for_the_most():
    assert profiles_of((), [IMAGE], 16, {}) == (
        {"image": ((1, 3, 224, 224), (16, 3, 224, 224), (16, 3, 224, 224))},
    )
    assert profiles_of((), [FIXED], 16, {}) == ()
    assert profiles_of((), [FIXED, TOKENS], 2, {"length": (1, 8, 9), "batch": (1, 1, 4)}) == (
        {"tokens": ((1, 1), (1, 8), (4, 9))},
    )
    assert profiles_of((), [NAMELESS], 2, {"in.1": (3, 3, 3)}) == ({"in": ((1, 3, 4), (2, 3, 4), (2, 3, 4))},)


def test_inputs_that_share_a_dimension_get_the_same_sizes():
    (profile,) = profiles_of((), [TOKENS, MASK], 8, {"length": (1, 16, 32)})
    assert profile["tokens"] == profile["mask"] == ((1, 1), (8, 16), (8, 32))


def test_sizes_that_nobody_knows_are_asked_for():
    with pytest.raises(OptionsError, match=r"large they get: length\. .*--dims length=1:128:512"):
        profiles_of((), [TOKENS, MASK], 8, {})
    with pytest.raises(OptionsError, match=r"in\.1.*It has in\[in\.0, in\.1, 4\]"):
        profiles_of((), [NAMELESS], 8, {})
    with pytest.raises(OptionsError, match=r"dims names \['lenght'\].*'batch', 'length'"):
        profiles_of((), [TOKENS], 8, {"lenght": (1, 1, 1), "length": (1, 1, 1)})


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("imgae=1x3x224x224", r"names \['imgae'\], which is not an input"),
        ("image=1x3x224x224", r"lacks \['tokens'\]"),
        ("image=1x3x224,tokens=1x1", "other dimensions than the model for 'image'"),
        ("image=1x4x224x224,tokens=1x1", "Only sizes that are dynamic can be chosen"),
    ],
)
def test_profiles_that_do_not_fit(text, said):
    """The library takes a wrong name without a word."""
    with pytest.raises(OptionsError, match=said):
        profiles_of((text,), [IMAGE, TOKENS], 8, {})


def test_a_profile_for_a_model_of_fixed_sizes():
    with pytest.raises(OptionsError, match="every size of fixed\\[2, 4\\] is fixed"):
        profiles_of(("fixed=2x4",), [FIXED], 8, {})


def test_an_input_whose_values_are_a_shape():
    shape = NetworkTensor("shape", "INT64", (2,), (None,), is_shape_tensor=True)
    with pytest.raises(ModelError, match="the values of input 'shape' are a shape"):
        profiles_of((), [IMAGE, shape], 8, {})
