"""Plans that are opened only if they are trusted: by their digest, as built here, or by a signature."""

import hashlib
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from asynctrt.backends.tensorrt import TensorRTModel, TensorRTOptions, trust
from asynctrt.backends.tensorrt import model as model_module
from asynctrt.backends.tensorrt.trust import check_trust
from asynctrt.devices.host import HostDevice
from asynctrt.errors import OptionsError, UntrustedError, UsageError
from tests.doubles.tensorrt import EngineSpec, StrictTensorRT, double_plan

ROOT = Path(__file__).parents[3]
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

    monkeypatch.setattr(trust, "check_signature", check)
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


@pytest.mark.parametrize("ways", [(PIN,), ("built-here",), ("built-here", "sha256:" + "0" * 64)])
def test_one_flipped_bit_anywhere_is_refused(path, ways):
    trust.record(PIN.removeprefix("sha256:"))
    check_trust(PLAN, None, "it", ways)
    random = np.random.default_rng(3)
    for position in random.integers(len(PLAN) * 8, size=300):
        changed = bytearray(PLAN)
        changed[position // 8] ^= 1 << int(position % 8)
        with pytest.raises(UntrustedError):
            check_trust(bytes(changed), None, "it", ways)
    with pytest.raises(UntrustedError):
        check_trust(PLAN + b"\0", None, "it", ways)


def test_other_ways_count_beside_built_here(path):
    with pytest.raises(UntrustedError, match="asynctrt build MODEL.onnx -o PLAN"):
        check_trust(PLAN, None, "it", ("built-here",))
    check_trust(PLAN, None, "it", ("built-here", PIN))
    with pytest.raises(UntrustedError, match="given as bytes has no signature"):
        check_trust(PLAN, None, "it", ("built-here", "signed"))


def digest(number):
    return hashlib.sha256(str(number).encode()).hexdigest()


@pytest.fixture
def path(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return trust.records_path()


def test_a_digest_is_kept_privately(path):
    assert not trust.is_recorded(digest(1))
    trust.record(digest(1))
    trust.record(digest(1))
    assert trust.is_recorded(digest(1))
    assert not trust.is_recorded(digest(2))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert path.read_text() == f"{digest(1)}\n"


def test_the_oldest_go_first(path, monkeypatch):
    monkeypatch.setattr(trust, "RECORDS_MAX", 3)
    for number in (1, 2, 3, 1, 4):
        trust.record(digest(number))
    assert [trust.is_recorded(digest(number)) for number in range(1, 5)] == [True, False, True, True]


@pytest.mark.parametrize("what", ["file", "folder"])
def test_what_others_can_write_is_not_believed(path, what):
    trust.record(digest(1))
    (path if what == "file" else path.parent).chmod(0o777)
    with pytest.raises(UsageError, match=r"can be written by others.*chmod go-w"):
        trust.is_recorded(digest(1))


def test_a_link_is_not_followed(path, tmp_path):
    (tmp_path / "theirs").write_text(f"{digest(1)}\n")
    path.parent.mkdir()
    path.symlink_to(tmp_path / "theirs")
    with pytest.raises(UsageError, match="cannot be read"):
        trust.is_recorded(digest(1))


def test_lines_that_are_no_digests_count_for_nothing(path):
    trust.record(digest(1))
    path.write_bytes(b"\xff\0junk\n" + f"{digest(2)}\n".encode())
    assert trust.is_recorded(digest(2))
    assert not trust.is_recorded("junk")


@pytest.mark.tier2
def test_several_processes_at_once_lose_nothing(path):
    program = (
        "import sys; from asynctrt.backends.tensorrt.trust import record; import hashlib\n"
        "for number in range(50): record(hashlib.sha256(f'{sys.argv[1]}.{number}'.encode()).hexdigest())"
    )
    running = [subprocess.Popen([sys.executable, "-c", program, str(n)], cwd=ROOT) for n in range(3)]
    assert [one.wait(timeout=50) for one in running] == [0, 0, 0]
    assert all(trust.is_recorded(digest(f"{n}.{number}")) for n in range(3) for number in range(50))
