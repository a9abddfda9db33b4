"""Whatever lies where a file is to be read: it is refused, and neither waited for nor read without end."""

import ast
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

import asynctrt
from asynctrt._util.files import SpecialFileError, open_regular, read_regular
from asynctrt.backends.tensorrt.abilities import check_lean_runtime
from asynctrt.backends.tensorrt.flavours import Flavour
from asynctrt.backends.tensorrt.jit import KernelCache
from asynctrt.backends.tensorrt.manifest import read_manifest
from asynctrt.backends.tensorrt.plan import read_plan
from asynctrt.backends.tensorrt.signatures import check_signature
from asynctrt.backends.tensorrt.trust import is_recorded
from asynctrt.core.loading import load_model
from asynctrt.devices.host import HostDevice
from asynctrt.errors import AsynctrtError, CallerError, ModelError
from asynctrt.plans.building import read_source
from asynctrt.plans.plan_file import digest_of
from asynctrt.serving.command import read_config
from asynctrt.serving.credentials import Certificate, read_tokens
from asynctrt.serving.model_config import read_model_config

READERS = {
    "serve.toml": read_config,
    "tokens": read_tokens,
    "chain.pem": lambda path: Certificate(path, Path(__file__)),
    "key.pem": lambda path: Certificate(Path(__file__), path),
    "config.pbtxt": lambda path: read_model_config(path.parent),
    "model.onnx": lambda path: load_model(path, HostDevice()),
    "built.onnx": read_source,
    "digested": digest_of,
    "model.plan": read_plan,
    "model.plan.json": read_manifest,
    "model.plan.sig": lambda path: check_signature(b"", path, path, "the plan"),
    "signers": lambda path: check_signature(b"", Path(__file__), path, "the plan"),
    "built-here": lambda path: is_recorded("0" * 64, path),
}
UNBOUNDED = {"model.onnx", "built.onnx", "digested", "model.plan", "built-here"}
"""A model is as large as it is, and of a list of digests the beginning is read."""


def folder(path):
    path.mkdir()


def endless(path):
    path.symlink_to("/dev/zero")


def loop(path):
    path.symlink_to(path)


def large(path):
    with path.open("wb") as file:
        file.truncate(64 << 30)


KINDS = {"pipe": os.mkfifo, "folder": folder, "endless": endless, "loop": loop, "large": large}


@pytest.fixture(autouse=True)
def is_private():
    before = os.umask(0o077)
    yield
    os.umask(before)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        # The one that is read as raw bytes takes seconds.
        pytest.param(name, kind, marks=[pytest.mark.tier2] if (name, kind) == ("x.raw", "large") else [])
        for name in READERS
        for kind in KINDS
        if (kind, name in UNBOUNDED) != ("large", True)
    ],
)
def test_what_is_no_file_of_that_kind_is_refused(tmp_path, name, kind):
    path = tmp_path / name
    KINDS[kind](path)
    with pytest.raises(CallerError) as caught:
        READERS[name](path)
    assert isinstance(caught.value, AsynctrtError)
    assert name in str(caught.value) or str(tmp_path) in str(caught.value)


@pytest.mark.parametrize("kind", ["pipe", "endless"])
def test_a_lean_runtime_that_is_no_file_is_refused_before_the_library_waits_for_it(tmp_path, kind):
    path = tmp_path / "libnvinfer_lean.so"
    KINDS[kind](path)
    flavour = Flavour("tensorrt", SimpleNamespace(__version__="10.16.1"), is_real=False)
    with pytest.raises(ModelError, match="libnvinfer_lean"):
        check_lean_runtime(flavour, path)


OPENED_OTHERWISE = {
    "of the system": {
        *("_util/cgroup.py", "backends/tensorrt/flavours.py", "loadtest/making.py"),
        *("doctor/probes/package.py", "plans/cache.py", "serving/sampler.py"),
    },
    "/dev/null": {"__main__.py"},
    "of packages": {"cli/demo.py", "kserve/protobuf.py", "loadtest/page.py", "serving/dashboard.py"},
    "named on the command line of a load test": {
        f"loadtest/{name}.py" for name in ("command", "samples", "templates", "tls")
    },
    "written": {"serving/fronts.py", "serving/log.py"},
    "to open others": {"_util/files.py"},
}
"""Modules that open files by other ways than ``open_regular``, by what files these are."""


def opens_a_file(node):
    """Return whether code opens a file by a way that waits for pipes, and follows links anywhere."""
    if not isinstance(node, ast.Call):
        return False
    called = node.func
    if isinstance(called, ast.Attribute):
        mode = node.args[0].value if node.args and isinstance(node.args[0], ast.Constant) else None
        is_of_os = isinstance(called.value, ast.Name) and called.value.id == "os"
        is_open = called.attr == "open" and (is_of_os or mode in ("r", "rb", "w", "wb", "a", "ab", "r+b"))
        return is_open or called.attr in ("read_text", "read_bytes")
    return isinstance(called, ast.Name) and called.id == "open"


def test_whatever_else_opens_files_opens_none_of_others():
    package = Path(asynctrt.__file__).parent
    found = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if any(map(opens_a_file, ast.walk(ast.parse(path.read_text("utf-8")))))
    }
    assert found == set().union(*OPENED_OTHERWISE.values())


@pytest.mark.parametrize("kind", ["pipe", "endless", "loop"])
def test_a_cache_that_is_no_file_is_left_out(tmp_path, caplog, kind):
    KINDS[kind](tmp_path / "cache")
    KernelCache(tmp_path / "cache", None)
    assert "was not read" in caplog.text


def test_a_file_that_grows_is_read_as_far_as_the_limit(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(b"x" * 10)
    real = os.fstat

    def smaller(descriptor):
        status = list(real(descriptor))
        status[6] = 4
        return os.stat_result(status)

    monkeypatch.setattr(os, "fstat", smaller)
    assert read_regular(path, 10) == b"x" * 10
    with pytest.raises(SpecialFileError, match="more than 9 bytes"):
        read_regular(path, 9)


def test_a_link_out_of_a_folder_is_not_followed(tmp_path):
    inner = tmp_path / "folder"
    inner.mkdir()
    (tmp_path / "secret").write_text("secret")
    (inner / "own").write_text("own")
    (inner / "out").symlink_to(tmp_path / "secret")
    (inner / "within").symlink_to("own")
    (inner / "up").symlink_to("..")
    with open_regular(inner / "within", within=inner) as file:
        assert file.read() == b"own"
    for path in ("out", "up/secret"):
        with pytest.raises(SpecialFileError, match="a link out of"):
            open_regular(inner / path, within=inner)


def test_a_link_that_changes_while_it_is_read_is_noticed(tmp_path, monkeypatch):
    inner, secret = tmp_path / "folder", tmp_path / "secret"
    inner.mkdir()
    secret.write_text("secret")
    (inner / "own").write_text("own")
    (inner / "link").symlink_to(secret)
    real = os.fstat

    def changed(descriptor):
        (inner / "link").unlink()
        (inner / "link").symlink_to("own")
        return real(descriptor)

    monkeypatch.setattr(os, "fstat", changed)
    with pytest.raises(SpecialFileError, match="replaced"):
        open_regular(inner / "link", within=inner)
