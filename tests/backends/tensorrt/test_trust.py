"""Plans that are opened only if they are trusted: by their digest, or by a signature."""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from asynctrt.backends.tensorrt import TensorRTModel, TensorRTOptions
from asynctrt.backends.tensorrt import model as model_module
from asynctrt.backends.tensorrt import trust as trust_module
from asynctrt.backends.tensorrt.trust import check_trust
from asynctrt.devices.host import HostDevice
from asynctrt.errors import OptionsError, UntrustedError
from tests.doubles.tensorrt import EngineSpec, StrictTensorRT, double_plan

PLAN = double_plan(EngineSpec())
PIN = f"sha256:{hashlib.sha256(PLAN).hexdigest()}"


@pytest.fixture
def opened(monkeypatch):
    """Open a plan; it says whether the library saw it."""
    device = HostDevice()
    seen = []
    load = model_module._load

    def spy(plan, *args):
        seen.append(plan.content)
        return load(plan, *args)

    monkeypatch.setattr(model_module, "_load", spy)

    def make(plan, **options):
        seen.clear()
        model = TensorRTModel(
            plan, device=device, flavour=StrictTensorRT(device), options=TensorRTOptions(**options)
        )
        model.close()
        return seen

    make.seen = seen
    yield make
    device.close()


def test_without_the_option_every_plan_is_opened_as_before(opened):
    assert opened(PLAN) == [PLAN]


def test_a_plan_that_is_named_by_its_digest(opened, tmp_path):
    path = tmp_path / "m.plan"
    path.write_bytes(PLAN)
    assert opened(path, trust=PIN) == [PLAN]
    assert opened(PLAN, trust=["sha256:" + "0" * 64, PIN.upper().replace("SHA256", "sha256")]) == [PLAN]


def test_another_plan_is_refused_before_the_library_sees_it(opened):
    other = double_plan(EngineSpec(steps=7))
    with pytest.raises(UntrustedError, match=r"none of the 1 that the option trust names.*trust=\['sha256:"):
        opened(other, trust=PIN)
    assert opened.seen == []


def test_one_flipped_bit_anywhere_is_refused():
    random = np.random.default_rng(3)
    for _ in range(1000):
        changed = bytearray(PLAN)
        changed[random.integers(len(PLAN))] ^= 1 << random.integers(8)
        with pytest.raises(UntrustedError):
            check_trust(bytes(changed), None, "it", (PIN,))
    with pytest.raises(UntrustedError):
        check_trust(PLAN + b"\0", None, "it", (PIN,))


@pytest.mark.parametrize("wrong", ["", "unsigned", "sha256:12", "sha256:" + "g" * 64, ["signed", 7], 7])
def test_ways_that_there_are_not(wrong):
    with pytest.raises(OptionsError, match="trust must be 'signed', 'built-here', 'sha256:'"):
        TensorRTOptions(trust=wrong)


def test_plans_that_have_to_be_signed(opened, tmp_path, monkeypatch):
    """How signatures are checked is in test_signatures.py."""
    seen = []

    def check(content, signature, signers, where):
        seen.append((content, signature, signers, where))
        if content != PLAN:
            raise UntrustedError("no")

    monkeypatch.setattr(trust_module, "check_signature", check)
    monkeypatch.setenv("ASYNCTRT_ALLOWED_SIGNERS", "/signers")
    path = tmp_path / "m.plan"
    path.write_bytes(PLAN)
    assert opened(path, trust="signed") == [PLAN]
    assert seen == [(PLAN, tmp_path / "m.plan.sig", Path("/signers"), repr(str(path)))]
    with pytest.raises(UntrustedError, match="given as bytes has no signature"):
        opened(PLAN, trust="signed")
    assert opened(PLAN, trust=("signed", PIN)) == [PLAN]
    assert len(seen) == 1, "a plan that is trusted by its digest needs no signature"
    path.write_bytes(double_plan(EngineSpec(steps=7)))
    with pytest.raises(UntrustedError, match="no"):
        opened(path, trust="signed")
    assert opened.seen == []
