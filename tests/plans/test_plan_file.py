"""Plans: what their header tells, and damaged ones."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from asynctrt.errors import ModelError, ModelNotFoundError
from asynctrt.plans.plan_file import find_plan
from tests.backends.tensorrt.helpers import header
from tests.doubles.tensorrt import EngineSpec, double_plan

RTX = Path(__file__).parents[1] / "gpu" / "identity.rtx.plan"
"""It was built by TensorRT for RTX itself."""


def test_a_real_plan_of_tensorrt_for_rtx():
    found = find_plan(RTX)
    assert (found.kind, found.tag) == ("TensorRT for RTX", "vtrt")
    assert found.nbytes == RTX.stat().st_size
    assert found.digest == hashlib.sha256(RTX.read_bytes()).hexdigest()
    assert found.version.startswith("1.")
    assert "8.9" in found.compute_capabilities
    assert "9.0" not in found.compute_capabilities
    assert found.surplus_nbytes == 0


def test_a_plan_is_known_by_its_content_whatever_its_name(tmp_path):
    path = tmp_path / "model.onnx"
    path.write_bytes(double_plan(EngineSpec(), version="10.13.2.6") + b"more")
    found = find_plan(path)
    assert (found.kind, found.version, found.surplus_nbytes) == ("TensorRT", "10.13.2.6", 4)
    assert found.compute_capabilities is None


def test_files_that_are_no_plans(tmp_path):
    with pytest.raises(ModelNotFoundError, match="there is no file"):
        find_plan(tmp_path / "missing.plan")
    for content, says in (
        (b"", "is empty"),
        (b"PK\x03\x04" + bytes(99), "a zip archive"),
        (b"ftrt", "is truncated"),
        (header(nbytes=10_000_000), "its header says 10,000,000 bytes"),
        (b"ptrt" + bytes(99), "before 8.6"),
    ):
        path = tmp_path / "bad.plan"
        path.write_bytes(content)
        with pytest.raises(ModelError, match=says):
            find_plan(path)


def test_damaged_plans_are_refused_or_read_but_never_more(tmp_path):
    whole = RTX.read_bytes()
    random = np.random.default_rng(7)
    path = tmp_path / "damaged.plan"
    digests, refused = {find_plan(RTX).digest}, 0
    for _ in range(100):
        damaged = bytearray(whole)
        damaged[random.integers(64)] ^= 1 << random.integers(8)
        path.write_bytes(damaged)
        try:
            digests.add(find_plan(path).digest)
        except ModelError:
            refused += 1
    assert 0 < refused < 100
    # Every flipped bit that is not refused is another digest.
    assert len(digests) > 1
