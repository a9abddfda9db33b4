"""The choice of the package that runs a plan, and the messages when none can be loaded."""

import sys
import types
from importlib.machinery import ModuleSpec

import pytest

from asynctrt.backends.tensorrt.flavours import cuda_runtimes, describe_runtimes, find_flavour
from asynctrt.backends.tensorrt.plan import TAG_RTX, TAG_TENSORRT
from asynctrt.devices.host import HostDevice
from asynctrt.errors import DeviceUnavailableError, MissingExtraError, ModelError, OptionsError
from tests.doubles.tensorrt import StrictTensorRT

FULL, LEAN, DISPATCH, RTX = "tensorrt", "tensorrt_lean", "tensorrt_dispatch", "tensorrt_rtx"


class Packages:
    """An import finder for the four packages: missing, installed, or installed and broken."""

    def __init__(self, installed):
        self.installed = installed

    def find_spec(self, name, path=None, target=None):
        if name not in (FULL, LEAN, DISPATCH, RTX):
            return None
        found = self.installed.get(name)
        if found is None:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return ModuleSpec(name, self)

    def create_module(self, spec):
        return None

    def exec_module(self, module):
        found = self.installed[module.__name__]
        if isinstance(found, BaseException):
            raise found
        module.__version__ = found


@pytest.fixture
def installed(monkeypatch):
    """Set which of the packages are installed, for the duration of the test."""

    def install(**packages):
        for name in (FULL, LEAN, DISPATCH, RTX):
            monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.setattr(sys, "meta_path", [Packages(packages), *sys.meta_path])

    return install


@pytest.mark.parametrize(
    ("packages", "tag", "expected"),
    [
        ([FULL, LEAN, DISPATCH, RTX], TAG_TENSORRT, FULL),
        ([LEAN, DISPATCH, RTX], TAG_TENSORRT, LEAN),
        ([DISPATCH, RTX], TAG_TENSORRT, DISPATCH),
        ([FULL, LEAN, DISPATCH, RTX], TAG_RTX, RTX),
    ],
)
def test_the_first_that_is_installed_and_fits_the_plan(installed, packages, tag, expected):
    installed(**dict.fromkeys(packages, "11.4.0.106"))
    found = find_flavour(None, tag, "the plan")
    assert found.name == expected
    assert found.is_real
    assert found.version == "11.4.0.106"


@pytest.mark.parametrize(("tag", "extras"), [(TAG_TENSORRT, (FULL, "lean", "dispatch")), (TAG_RTX, ("rtx",))])
def test_without_any_the_extras_are_named(installed, tag, extras):
    installed(**({RTX: "1.7.1.116"} if tag == TAG_TENSORRT else {FULL: "11.4.0.106"}))
    with pytest.raises(MissingExtraError) as caught:
        find_flavour(None, tag, "the plan")
    for extra in extras:
        assert f"'asynctrt[{extra}]'" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "extra"), [(FULL, FULL), (LEAN, "lean"), (DISPATCH, "dispatch"), (RTX, "rtx")]
)
def test_one_that_was_asked_for_and_is_not_there(installed, name, extra):
    installed()
    with pytest.raises(MissingExtraError, match=rf"pip install 'asynctrt\[{extra}\]'"):
        find_flavour(name, TAG_RTX if name == RTX else TAG_TENSORRT, "the plan")


@pytest.mark.parametrize(
    ("error", "fix"),
    [
        (ImportError("libnvinfer_lean.so.11: cannot open shared object file"), "another wheel"),
        (ImportError("libcuda.so.1: cannot open shared object file"), "NVIDIA driver"),
        (OSError("libcudart.so.12: cannot open shared object file"), "CUDA 12"),
        (ImportError("undefined symbol: foo"), "Find the library that the message names"),
        (ModuleNotFoundError("No module named 'tensorrt_lean_bindings'", name="x"), "only partly installed"),
    ],
)
def test_one_that_is_there_and_cannot_be_loaded(installed, error, fix):
    installed(**{LEAN: error})
    with pytest.raises(DeviceUnavailableError) as caught:
        find_flavour(LEAN, TAG_TENSORRT, "the plan")
    assert str(error) in str(caught.value)
    assert fix in str(caught.value)


def test_a_broken_package_is_passed_over_with_a_warning(installed, caplog):
    installed(**{FULL: ImportError("libnvinfer.so.10: cannot open"), LEAN: "11.4.0.106"})
    assert find_flavour(None, TAG_TENSORRT, "the plan").name == LEAN
    assert "libnvinfer.so.10" in caplog.text


def test_when_all_are_broken_the_first_is_the_error(installed):
    installed(**{FULL: ImportError("libnvinfer.so.10: cannot open"), LEAN: ImportError("other")})
    with pytest.raises(DeviceUnavailableError, match="libnvinfer.so.10"):
        find_flavour(None, TAG_TENSORRT, "the plan")


@pytest.mark.parametrize(
    ("name", "tag", "fits"), [(LEAN, TAG_RTX, "tensorrt_rtx"), (RTX, TAG_TENSORRT, "tensorrt_lean")]
)
def test_a_plan_of_the_other_kind(name, tag, fits):
    """With the real packages."""
    with pytest.raises(ModelError) as caught:
        find_flavour(name, tag, "the plan 'x.plan'")
    assert "x.plan" in str(caught.value)
    assert tag.decode() in str(caught.value)
    assert fits in str(caught.value)


def test_the_double_is_no_real_one():
    trt = StrictTensorRT(HostDevice())
    found = find_flavour(trt, TAG_TENSORRT, "the plan")
    assert found.module is trt
    assert not found.is_real
    assert found.title == f"tensorrt {trt.__version__}"


def test_a_module_is_as_its_name():
    module = types.ModuleType(LEAN)
    module.__version__ = "11.4.0.106"
    found = find_flavour(module, TAG_TENSORRT, "the plan")
    assert found.is_real
    assert repr(found) == "<Flavour tensorrt_lean 11.4.0.106>"


def test_a_name_that_is_none():
    with pytest.raises(OptionsError, match="tensorrt_lean"):
        find_flavour("lean", TAG_TENSORRT, "the plan")


def test_two_cuda_runtimes_are_found_and_said(tmp_path):
    maps = tmp_path / "maps"
    line = "7f00-7f01 r-xp 00000000 00:00 1    {}\n"
    paths = [
        "/a b/libcudart.so.12.4.127",
        "/usr/libcudart-0d2c.so.13",
        "/usr/libcudart.so.13.backup/x",
        "/lib/libc.so",
    ]
    maps.write_text("".join(line.format(path) * 2 for path in paths) + "7f00-7f01 rw-p 0 00:00 0 \n")
    assert cuda_runtimes(maps) == tuple(paths[:2])
    said = describe_runtimes(cuda_runtimes(maps))
    assert "2 CUDA runtimes" in said
    assert all(path in said for path in paths[:2])


def test_one_cuda_runtime_or_none_is_no_matter(tmp_path):
    assert cuda_runtimes(tmp_path / "none") == ()
    assert describe_runtimes(()) == describe_runtimes(("/usr/libcudart.so.13",)) == ""
