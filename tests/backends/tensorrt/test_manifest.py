"""What is kept beside a plan: read back as it was written, refused when damaged, used for its plan alone."""

import hashlib
import json
from contextlib import suppress

import numpy as np
import pytest

from asynctrt.backends.tensorrt import TensorRTModel
from asynctrt.backends.tensorrt.manifest import (
    Manifest,
    NamedTensor,
    find_manifest,
    manifest_path,
    read_manifest,
)
from asynctrt.devices.host import HostDevice
from asynctrt.errors import ModelError
from tests.doubles.tensorrt import EngineSpec, StrictTensorRT, TensorIO, double_plan

PLAN = double_plan(EngineSpec())


def manifest(plan=PLAN, **changed):
    facts = {
        "plan_digest": hashlib.sha256(plan).hexdigest(),
        "plan_nbytes": len(plan),
        "model": "m.onnx",
        "model_digest": "0" * 64,
        "external": {"weights.bin": "1" * 64},
        "builder": "tensorrt_rtx 1.7.1.116",
        "gpu": None,
        "inputs": (NamedTensor("tokens", "INT32", ("batch", "length")),),
        "outputs": (),
        "profiles": ("tokens=1x1:8x8:8x8",),
        "plugins": (),
        "options": {"max_rows": 8},
    }
    return Manifest(**(facts | changed))


def test_it_is_read_as_it_was_written(tmp_path):
    path = tmp_path / "m.plan.json"
    path.write_text(manifest().as_text())
    assert read_manifest(path) == manifest()
    assert manifest_path(tmp_path / "m.plan") == path
    path.write_text(json.dumps({**json.loads(manifest().as_text()), "layers": 3}))
    assert read_manifest(path) == manifest(), "what earlier versions wrote too"


def test_damaged_manifests_are_refused(tmp_path):
    path = tmp_path / "m.plan.json"
    whole = manifest().as_text().encode()
    random = np.random.default_rng(2)
    for _ in range(150):
        changed = bytearray(whole)
        for _ in range(random.integers(1, 5)):
            changed[random.integers(len(changed))] = random.integers(256)
        path.write_bytes(changed[: random.integers(len(changed) // 2, len(changed) + 1)])
        with suppress(ModelError):
            assert isinstance(read_manifest(path), Manifest)
    for text in ("[]", "{}", "[" * 100_000, json.dumps({"format": "asynctrt-plan-1"}), "1"):
        path.write_text(text)
        with pytest.raises(ModelError, match="cannot be read"):
            read_manifest(path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("plan_nbytes", "9"),
        ("model", None),
        ("external", []),
        ("options", "x"),
        ("gpu", 1),
        ("builder", 3),
    ],
)
def test_each_part_is_of_its_kind(tmp_path, name, value):
    path = tmp_path / "m.plan.json"
    path.write_text(json.dumps({**json.loads(manifest().as_text()), name: value}))
    with pytest.raises(ModelError, match="damaged"):
        read_manifest(path)


def test_it_counts_for_its_plan_alone(tmp_path, caplog):
    plan = tmp_path / "m.plan"
    assert find_manifest(plan, "0" * 64) is None
    manifest_path(plan).write_text(manifest().as_text())
    assert find_manifest(plan, manifest().plan_digest) == manifest()
    assert find_manifest(plan, "0" * 64) is None
    assert "is of another plan" in caplog.text
    manifest_path(plan).write_text("junk")
    assert find_manifest(plan, manifest().plan_digest) is None
    assert find_manifest(None, manifest().plan_digest) is None


def test_names_that_could_write_to_a_terminal():
    named = manifest(inputs=(NamedTensor("x", "FLOAT", (4, "le\x1b[31mngth", "\n")),))
    assert named.dimension_names() == {("x", 1): "le[31mngth"}


def test_messages_of_a_plan_have_the_names_of_its_model(tmp_path):
    """An engine knows no names: its dimension is called ``tokens.1`` without a manifest."""
    spec = EngineSpec(inputs=(TensorIO("tokens", "float32", (-1, -1)), TensorIO("mask", "float32", (-1, -1))))
    plan, device = tmp_path / "m.plan", HostDevice()
    content = double_plan(spec)
    plan.write_bytes(content)

    def dims():
        model = TensorRTModel(plan, device=device, flavour=StrictTensorRT(device))
        try:
            return [one.dims for one in (*model.inputs, *model.outputs)]
        finally:
            model.close()

    without = dims()
    assert without[:2] == [("tokens.1",), ("mask.1",)]
    both = tuple(NamedTensor(name, "FLOAT", ("batch", "length")) for name in ("tokens", "mask"))
    manifest_path(plan).write_text(manifest(content, inputs=both).as_text())
    assert dims() == [("length",)] * 4
    manifest_path(plan).write_text(manifest(b"other", inputs=both).as_text())
    assert dims() == without, "it is of another plan"
    device.close()
