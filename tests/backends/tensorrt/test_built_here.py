"""The digests of plans that were built here: kept, bounded, private, and written by one process at a time."""

import hashlib
import stat
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from asynctrt.backends.tensorrt import built_here
from asynctrt.backends.tensorrt.trust import check_trust
from asynctrt.errors import UntrustedError, UsageError
from tests.doubles.tensorrt import EngineSpec, double_plan

ROOT = Path(__file__).parents[3]
PLAN = double_plan(EngineSpec())


def digest(number):
    return hashlib.sha256(str(number).encode()).hexdigest()


@pytest.fixture(autouse=True)
def path(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return built_here.records_path()


def test_a_digest_is_kept_privately(path):
    assert not built_here.is_recorded(digest(1))
    built_here.record(digest(1))
    built_here.record(digest(1))
    assert built_here.is_recorded(digest(1))
    assert not built_here.is_recorded(digest(2))
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert path.read_text() == f"{digest(1)}\n"


def test_the_oldest_go_first(path, monkeypatch):
    monkeypatch.setattr(built_here, "RECORDS_MAX", 3)
    for number in (1, 2, 3, 1, 4):
        built_here.record(digest(number))
    assert [built_here.is_recorded(digest(number)) for number in range(1, 5)] == [True, False, True, True]


@pytest.mark.parametrize("what", ["file", "folder"])
def test_what_others_can_write_is_not_believed(path, what):
    built_here.record(digest(1))
    (path if what == "file" else path.parent).chmod(0o777)
    with pytest.raises(UsageError, match=r"can be written by others.*chmod go-w"):
        built_here.is_recorded(digest(1))


def test_a_link_is_not_followed(path, tmp_path):
    (tmp_path / "theirs").write_text(f"{digest(1)}\n")
    path.parent.mkdir()
    path.symlink_to(tmp_path / "theirs")
    with pytest.raises(UsageError, match="cannot be read"):
        built_here.is_recorded(digest(1))


def test_lines_that_are_no_digests_count_for_nothing(path):
    built_here.record(digest(1))
    path.write_bytes(b"\xff\0junk\n" + f"{digest(2)}\n".encode())
    assert built_here.is_recorded(digest(2))
    assert not built_here.is_recorded("junk")


@pytest.mark.tier2
def test_several_processes_at_once_lose_nothing(path):
    program = (
        "import sys; from asynctrt.backends.tensorrt.built_here import record; import hashlib\n"
        "for number in range(50): record(hashlib.sha256(f'{sys.argv[1]}.{number}'.encode()).hexdigest())"
    )
    running = [subprocess.Popen([sys.executable, "-c", program, str(n)], cwd=ROOT) for n in range(3)]
    assert [one.wait(timeout=50) for one in running] == [0, 0, 0]
    assert all(built_here.is_recorded(digest(f"{n}.{number}")) for n in range(3) for number in range(50))


def test_one_flipped_bit_anywhere_is_refused():
    built_here.record(hashlib.sha256(PLAN).hexdigest())
    check_trust(PLAN, None, "it", ("built-here",))
    random = np.random.default_rng(7)
    for position in random.integers(len(PLAN) * 8, size=300):
        changed = bytearray(PLAN)
        changed[position // 8] ^= 1 << int(position % 8)
        with pytest.raises(UntrustedError, match="asynctrt build MODEL.onnx -o PLAN"):
            check_trust(bytes(changed), None, "it", ("built-here",))
    with pytest.raises(UntrustedError):
        check_trust(PLAN + b"\0", None, "it", ("built-here",))


def test_other_ways_count_beside_it():
    pin = f"sha256:{hashlib.sha256(PLAN).hexdigest()}"
    check_trust(PLAN, None, "it", ("built-here", pin))
    with pytest.raises(UntrustedError, match="given as bytes has no signature"):
        check_trust(PLAN, None, "it", ("built-here", "signed"))
