"""Plans that are opened only if they are trusted: by their digest, or by a signature."""

import hashlib

import numpy as np
import pytest

from asynctrt.backends.tensorrt import TensorRTModel, TensorRTOptions
from asynctrt.backends.tensorrt import model as model_module
from asynctrt.backends.tensorrt.trust import check_trust
from asynctrt.devices.host import HostDevice
from asynctrt.errors import OptionsError, UntrustedError
from asynctrt.testing.tensorrt import EngineSpec, StrictTensorRT, double_plan

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
    pytest.importorskip("cryptography", reason="needs the extra `trust`")
    from asynctrt import signatures

    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    path = tmp_path / "m.plan"
    path.write_bytes(PLAN)
    with pytest.raises(UntrustedError, match="is not signed.*asynctrt sign FILE"):
        opened(path, trust="signed")
    signatures.create_key(tmp_path / "mine")
    signature = signatures.sign(hashlib.sha256(PLAN).digest(), tmp_path / "mine")
    signatures.signature_path(path).write_text(signature)
    with pytest.raises(UntrustedError, match="is not trusted here"):
        opened(path, trust="signed")
    signatures.trust(tmp_path / "mine.pub", signatures.trusted_folder())
    assert opened(path, trust="signed") == [PLAN]
    with pytest.raises(UntrustedError, match="given as bytes has no signature"):
        opened(PLAN, trust="signed")
    assert opened(PLAN, trust=("signed", PIN)) == [PLAN]
    path.write_bytes(double_plan(EngineSpec(steps=7)))
    with pytest.raises(UntrustedError, match="is not what was signed"):
        opened(path, trust="signed")
    assert opened.seen == []
