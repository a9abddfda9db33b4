"""Triton's config.pbtxt: what is read, what is ignored with a warning, what is refused."""

import re

import pytest
import tritonclient.grpc.model_config_pb2 as triton
from google.protobuf import text_format

from asynctrt.errors import AsynctrtError, ModelError
from asynctrt.kserve.protobuf import message_classes
from asynctrt.options import Options
from asynctrt.serving.model_config import (
    IGNORED,
    READ,
    REFUSED,
    ModelConfig,
    VersionPolicy,
    interpret,
    read_model_config,
)
from asynctrt.tensors import TensorSpec

WHOLE = """
name: "m"
platform: "onnxruntime_onnx"
max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 format: FORMAT_NCHW dims: [ 3, -1 ] } ]
output [ { name: "y" data_type: TYPE_STRING dims: [ 1 ] label_filename: "labels.txt" } ]
instance_group [ { count: 2 kind: KIND_GPU gpus: [ 1 ] }, { count: 1 kind: KIND_GPU gpus: 1 } ]
dynamic_batching {
  preferred_batch_size: [ 4, 8 ]
  max_queue_delay_microseconds: 1500
  priority_levels: 2
  default_queue_policy { max_queue_size: 100 default_timeout_microseconds: 5000 allow_timeout_override: true }
}
version_policy: { specific: { versions: [ 1, 3 ] } }
parameters { key: "intra_op_thread_count" value: { string_value: "2" } }
response_cache { enable: true }
optimization { cuda { graphs: true graph_spec { batch_size: 4 } graph_spec { batch_size: 1 } } }
model_transaction_policy { decoupled: false }
model_warmup [ { name: "zeros" inputs { key: "x" value: { data_type: TYPE_FP32 zero_data: true } } } ]
"""


def test_all_that_is_read(tmp_path):
    folder = tmp_path / "m"
    config = interpret(WHOLE, folder)
    assert config.options == {
        "max_rows": 8,
        "max_delay": 0.0015,
        "priorities": 2,
        "timeout": 0.005,
        "max_queue_rows": 100,
        "graphs": (1, 4),
    }
    assert config.device == "cuda:1"
    assert config.options_on("cuda:1") == config.options | {"contexts": 6, "arenas": 3}
    assert config.options_on("host") == config.options | {"contexts": 3}
    Options(**config.options_on("cuda:1"))
    assert config.policy == VersionPolicy(named=("1", "3"))
    assert config.backend == "onnxruntime"
    assert config.inputs == (("x", "FP32", (3, -1)),)
    assert config.outputs == (("y", "BYTES", (1,)),)
    assert [sentence.split()[0] for sentence in config.ignored] == [
        "input.format",
        "output.label_filename",
        "dynamic_batching.preferred_batch_size",
        "parameters",
        "model_warmup",
        "response_cache.enable",
        "dynamic_batching.default_priority_level",
    ]


def test_it_is_tritons_own_text_form():
    theirs = text_format.Parse(WHOLE, triton.ModelConfig())
    mine = message_classes()["ModelConfig"].FromString(theirs.SerializeToString())
    assert mine.SerializeToString(deterministic=True) == theirs.SerializeToString(deterministic=True)


def fields(message=triton.ModelConfig.DESCRIPTOR, prefix=""):
    """Yield path and text of each of Triton's fields, down to those that the tables name."""
    for field in message.fields:
        path, kind = prefix + field.name, field.message_type
        if path in READ.keys() | REFUSED.keys() | IGNORED.keys() or kind is None or not kind.fields:
            yield path, f"{field.name} {value_of(field)}"
        elif kind.GetOptions().map_entry:
            yield path, f"{field.name} {{}}"
        else:
            for inner, text in fields(kind, f"{path}."):
                yield inner, f"{field.name} {{ {text} }}"


def value_of(field):
    """Return a value of a field's type that is not its default."""
    if field.message_type is not None:
        return "{}"
    if field.enum_type is not None:
        return f": {field.enum_type.values[-1].name}"
    return {field.TYPE_STRING: ': "x"', field.TYPE_BOOL: ": true"}.get(field.type, ": 1")


FIELDS = dict(fields()) | {"platform": 'platform: "tensorrt_plan"', "backend": 'backend: "tensorrt"'}


def test_every_field_of_tritons_is_in_one_of_the_tables():
    assert FIELDS.keys() == READ.keys() | REFUSED.keys() | IGNORED.keys()
    assert len({*READ, *REFUSED, *IGNORED}) == len(READ) + len(REFUSED) + len(IGNORED)


@pytest.mark.parametrize("path", FIELDS)
def test_every_field_of_tritons_is_read_or_refused_or_ignored_with_a_warning(tmp_path, path):
    text = FIELDS[path]
    if path in REFUSED:
        with pytest.raises(ModelError, match=f"^{re.escape(path)} is not supported: ") as caught:
            interpret(text, tmp_path / "x")
        assert str(caught.value).endswith(REFUSED[path])
    elif path in READ:
        interpret(text, tmp_path / "x")
    else:
        assert interpret(text, tmp_path / "x").ignored == (f"{path} is ignored: {IGNORED[path]}",)


def test_a_field_that_triton_lacks_is_named_with_its_line(tmp_path):
    for text, line in (("new_setting: 1", "1:1"), ("\ninput {\n new_setting: 1 }", "3:2")):
        with pytest.raises(ModelError, match=rf'{line} .*no field named "new_setting"'):
            interpret(text, tmp_path / "x")


def test_defaults(tmp_path):
    assert read_model_config(tmp_path) == ModelConfig()
    assert interpret("", tmp_path) == ModelConfig()
    assert ModelConfig().policy.choose(["2", "10", "9"]) == ["10"]


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        ("", ["11"]),
        ("version_policy { latest {} }", ["11"]),
        ("version_policy { latest { num_versions: 2 } }", ["9", "11"]),
        ("version_policy { latest { num_versions: 9 } }", ["2", "9", "11"]),
        ("version_policy { all {} }", ["2", "9", "11"]),
        ("version_policy { specific { versions: [ 11, 2 ] } }", ["2", "11"]),
    ],
)
def test_version_policies(tmp_path, text, chosen):
    assert interpret(text, tmp_path).policy.choose(["11", "2", "9"]) == chosen


@pytest.mark.parametrize(
    ("text", "device"),
    [
        ("", None),
        ("instance_group { count: 1 }", None),
        ("instance_group { kind: KIND_AUTO gpus: 2 }", "cuda:2"),
        ("instance_group { kind: KIND_CPU }", "host"),
        ("instance_group { kind: KIND_GPU }", "cuda:0"),
        ("instance_group { kind: KIND_GPU gpus: 3 }", "cuda:3"),
        ("instance_group { kind: KIND_MODEL }", None),
    ],
)
def test_devices(tmp_path, text, device):
    assert interpret(text, tmp_path).device == device


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("max_batch_size: -1", "max_batch_size is -1: state how many rows"),
        ("max_batch: 3", r'1:1.*no field named "max_batch"'),
        ("max_batch_size: 'x'", "1:17"),
        ("max_batch_size: 8\ninput {", "2:"),
        ('name: "other"', "its name is 'other'"),
        ('backend: "python"', "backend 'python' is not supported; supported: onnxruntime"),
        ('platform: "pytorch_libtorch"', "platform 'pytorch_libtorch'"),
        ('default_model_filename: "../secret"', "name of a file"),
        ("version_policy { specific {} }", "names no version"),
        ("version_policy { latest { num_versions: 0 } }", "≥ 1"),
        ("instance_group { gpus: [ 0, 1 ] kind: KIND_GPU }", "more than one device"),
        ("instance_group [ { count: 3 }, { count: -1 } ]", r"instance_group\.count must be ≥ 1, not -1"),
        ("instance_group { kind: KIND_CPU } instance_group { kind: KIND_GPU }", "more than one device"),
        ("dynamic_batching { max_queue_delay_microseconds: 9000000 }", "max_delay"),
    ],
)
def test_what_is_refused(tmp_path, text, says):
    with pytest.raises(AsynctrtError, match=says):
        interpret(text, tmp_path)
    (tmp_path / "config.pbtxt").write_text(text)
    with pytest.raises(ModelError, match=r"config\.pbtxt"):
        read_model_config(tmp_path)


def test_a_file_that_is_no_text(tmp_path):
    (tmp_path / "config.pbtxt").write_bytes(b"\xff\xfe")
    with pytest.raises(ModelError, match=r"config\.pbtxt.*cannot be read"):
        read_model_config(tmp_path)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("dynamic_batching { priority_levels: 3 default_priority_level: 1 }", "default_priority_level"),
        (
            (
                "dynamic_batching { default_queue_policy "
                "{ timeout_action: DELAY default_timeout_microseconds: 5 } }"
            ),
            "timeout_action is DELAY",
        ),
        ("instance_group { kind: KIND_MODEL }", "KIND_MODEL"),
    ],
)
def test_what_is_ignored_is_said(tmp_path, text, says):
    config = interpret(text, tmp_path)
    assert says in " ".join(config.ignored)
    assert "timeout" not in config.options


def test_a_default_that_is_stated_is_not_worth_a_word(tmp_path):
    text = (
        "response_cache { enable: false } dynamic_batching { preserve_ordering: false } "
        "optimization { input_pinned_memory { enable: false } }"
    )
    assert interpret(text, tmp_path).ignored == ()


X, Y = TensorSpec("x", "float32", (3, "n")), TensorSpec("y", "int64", ())
H, W = TensorSpec("h", "float32", (2, 4), axis=1), TensorSpec("w", object, ("n", 4), axis=None)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('input { name: "x" data_type: TYPE_FP32 dims: [ 3, -1 ] }', None),
        ('output { name: "y" data_type: TYPE_INT64 }', None),
        ('input { name: "x" dims: [ 3, 7 ] }', None),
        ('input { name: "x" dims: [ -1, 3, -1 ] }', None),
        ('input { name: "h" dims: [ 2, -1, 4 ] }', None),
        ('input { name: "h" dims: [ 2, 4 ] }', None),
        ('input { name: "w" data_type: TYPE_STRING dims: [ -1, 4 ] }', None),
        ('input { name: "h" dims: [ -1, 2, 4 ] }', r"dims \[-1, 2, 4\]; a row of input 'h' is \[2, 4\]"),
        ('input { name: "w" dims: [ 4 ] }', r"dims \[4\]; input 'w' is \['n', 4\]"),
        ('input { name: "z" }', "the model has x, h, w"),
        ('output { name: "x" }', "the model has y"),
        ('input { name: "x" data_type: TYPE_FP16 }', "it is FP32"),
        ('input { name: "x" dims: [ 3 ] }', "dims"),
        ('input { name: "x" dims: [ 4, -1 ] }', "dims"),
    ],
)
def test_tensors_are_compared_with_the_models(tmp_path, text, says):
    config = interpret(text, tmp_path)
    if says is None:
        config.check([X, H, W], [Y])
    else:
        with pytest.raises(ModelError, match=says):
            config.check([X, H, W], [Y])
