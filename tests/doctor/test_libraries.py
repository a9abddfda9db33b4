"""What the dynamic loader could take, from made-up folders and a made-up cache."""

import _ctypes
import json
import os
import shutil
from dataclasses import replace

import pytest

from asynctrt.doctor.children import Ending, ask
from asynctrt.doctor.findings import Level
from asynctrt.doctor.libraries import Candidate, is_elf, read_search_path
from tests.doctor.support import answered, crashed, files, found, report

ELF = b"\x7fELF"


def read(tmp_path, cache="", **env):
    return read_search_path(env, cache=cache, folders=[str(tmp_path / "standard")])


def test_the_order_is_that_of_the_loader(tmp_path):
    first = files(tmp_path / "a", libcudart__so__13=ELF)
    second = files(tmp_path / "b", libcudart__so__13=ELF, libcudart__so=ELF, other__so=ELF)
    cached = files(tmp_path / "c", libcudart__so__13=ELF)
    files(tmp_path / "standard", libcudart__so__13=ELF)
    path = read(
        tmp_path,
        f"2 libs found\n\tlibcudart.so.13 (libc6,x86-64) => {cached}/libcudart.so.13\n"
        f"\tlibcudart.so.13 (libc6) => {tmp_path}/of-32-bits\n\tlibm.so.6 (libc6,x86-64) => /lib/libm.so.6\n",
        LD_LIBRARY_PATH=f"{first}:{second}",
    )
    assert [one.path.parent.name for one in path.named("libcudart.so.13")] == ["a", "b", "c"]
    assert [one.source for one in path.candidates[:5]] == [
        "LD_LIBRARY_PATH",
        "LD_LIBRARY_PATH",
        "LD_LIBRARY_PATH",
        "ldconfig",
        "folder",
    ]
    assert "libcudart.so.13" in path.names()
    assert "libcudart.so" not in path.names()
    assert "libcuda.so.1" in path.names()


def test_entries_of_variables(tmp_path):
    path = read(tmp_path, LD_LIBRARY_PATH="/a::b;/c", LD_PRELOAD="/x/libcudart.so.12 /y:z")
    assert path.entries == ("/a", "", "b", "/c")
    assert path.preloaded == ("/x/libcudart.so.12", "/y", "z")
    assert read(tmp_path, LD_LIBRARY_PATH="").entries == ()


def test_the_same_file_by_two_paths_is_listed_once(tmp_path):
    files(tmp_path / "standard", libcudart__so__13=ELF)
    (tmp_path / "alias").symlink_to(tmp_path / "standard")
    path = read(tmp_path, LD_LIBRARY_PATH=str(tmp_path / "alias"))
    found = [one for one in path.candidates if one.path.name == "libcudart.so.13"]
    assert [one.source for one in found if one.path.is_relative_to(tmp_path)] == ["LD_LIBRARY_PATH"]


def test_versions_are_read_from_the_name_of_the_file(tmp_path):
    folder = files(tmp_path, libcudart__so__13__0__48=ELF, libcudnn__so__9=ELF)
    (folder / "libcudart.so.13").symlink_to("libcudart.so.13.0.48")
    one = Candidate("libcudart.so.13", folder / "libcudart.so.13", "ldconfig")
    assert (one.version, one.stem, one.target.name) == ("13.0.48", "libcudart", "libcudart.so.13.0.48")
    assert Candidate("libcudnn.so.9", folder / "libcudnn.so.9", "ldconfig").version is None
    assert is_elf(folder / "libcudnn.so.9")
    assert not is_elf(folder / "missing")


def checks_of(made):
    return {(one.check, one.level) for one in made.findings if one.check.startswith(("library", "path"))}


def test_a_link_that_points_nowhere(tmp_path):
    (tmp_path / "libcudnn.so.9").symlink_to("libcudnn.so.9.1.0")
    made = report(search_path=found((tmp_path / "libcudnn.so.9", "LD_LIBRARY_PATH")))
    (finding,) = made.find("library.link")
    assert "points to libcudnn.so.9.1.0, which is not there" in finding.what
    gone = report(search_path=found((tmp_path / "libcudart.so.12", "ldconfig")))
    assert "is listed but is not there" in gone.find("library.link")[0].what


def test_a_file_that_is_no_library(tmp_path):
    folder = files(tmp_path, libcudart__so__13=b"<html>404</html>")
    said = f"{folder}/libcudart.so.13: invalid ELF header"
    made = report(
        search_path=found((folder / "libcudart.so.13", "LD_LIBRARY_PATH")),
        libraries={"libcudart.so.13": answered({"error": said})},
    )
    (finding,) = made.find("library.damaged")
    assert finding.level is Level.ERROR
    assert "invalid ELF header" in finding.why


def test_a_library_that_lacks_another(tmp_path):
    folder = files(tmp_path, libcudnn__so__9=ELF)
    said = "libcublas.so.13: cannot open shared object file: No such file or directory"
    made = report(
        search_path=found((folder / "libcudnn.so.9", "ldconfig")),
        libraries={"libcudnn.so.9": answered({"error": said})},
    )
    (finding,) = made.find("library.needs")
    assert "it needs libcublas.so.13" in finding.what


def test_a_library_that_crashes_or_hangs_the_process(tmp_path):
    folder = files(tmp_path, libnvinfer__so__11=ELF)
    for outcome, verb in (
        (crashed(), "ends the process: SIGSEGV"),
        (replace(crashed("30 s"), ending=Ending.HUNG), "does not end"),
    ):
        made = report(
            search_path=found((folder / "libnvinfer.so.11", "ldconfig")),
            libraries={"libnvinfer.so.11": outcome},
        )
        assert verb in made.find("library.crash")[0].what


def test_two_versions_of_one_name(tmp_path):
    first = files(tmp_path / "a", libcudart__so__13=ELF + b"1")
    second = files(tmp_path / "b", libcudart__so__13=ELF + b"2")
    same = files(tmp_path / "c", libcudart__so__13=ELF + b"1")
    name = "libcudart.so.13"
    taken = {name: answered({"path": str(first / name), "version": "13.0"})}
    shadowed = report(
        search_path=found((first / name, "LD_LIBRARY_PATH"), (second / name, "ldconfig")), libraries=taken
    )
    (finding,) = shadowed.find("library.shadowed")
    assert f"The loader takes {first / name}" in finding.what
    assert str(second / name) in finding.what
    equal = report(
        search_path=found((first / name, "LD_LIBRARY_PATH"), (same / name, "ldconfig")), libraries=taken
    )
    assert not equal.find("library.shadowed")
    packaged = report(
        search_path=found((first / name, "ldconfig"), (second / name, "package")), libraries=taken
    )
    assert checks_of(packaged) >= {("library.twice", Level.WARNING)}


def test_a_family_that_is_there_twice_is_one_finding(tmp_path):
    names = [f"libcudnn{part}.so.9" for part in ("", "_graph", "_ops")]
    kinds = {name.replace(".", "__"): ELF for name in names}
    first = files(tmp_path / "a", **kinds)
    second = files(tmp_path / "b", **dict.fromkeys(kinds, ELF + b"2"))
    where = [
        (folder / name, source)
        for folder, source in ((first, "ldconfig"), (second, "package"))
        for name in names
    ]
    taken = {name: answered({"path": str(first / name)}) for name in names}
    (finding,) = report(search_path=found(*where), libraries=taken).find("library.twice")
    assert "libcudnn.so.9 is there twice, as are 2 more of its family" in finding.what
    assert str(first) in finding.what
    assert str(second) in finding.what


@pytest.mark.parametrize(
    ("entry", "check", "level"),
    [
        ("", "path.relative", Level.WARNING),
        ("lib", "path.relative", Level.WARNING),
        ("/usr/local/cuda/lib64/stubs", "path.stubs", Level.ERROR),
        ("/no/such/folder", "path.missing", Level.NOTE),
    ],
)
def test_entries_that_surprise(tmp_path, entry, check, level):
    path = read(tmp_path, LD_LIBRARY_PATH=f"{tmp_path}:{entry}:{tmp_path}")
    made = report(search_path=replace(path, candidates=()))
    assert checks_of(made) == {("library", Level.OK), (check, level)}


def test_a_preloaded_library():
    path = replace(found(), preloaded=("/x/libcudart.so.12", "/usr/lib/libjemalloc.so.2"))
    (finding,) = report(search_path=path).find("path.preload")
    assert "/x/libcudart.so.12" in finding.what


def test_the_toolkit_and_the_driver():
    newer = report(libraries={"libcudart.so.14": answered({"path": "/x", "version": "14.0"})})
    assert newer.find("runtime.newer")[0].level is Level.ERROR
    assert newer.find("runtime.several")
    minor = report(libraries={"libcudart.so.13": answered({"path": "/x", "version": "13.4"})})
    assert minor.find("runtime.newer")[0].level is Level.NOTE


def test_cudnn_of_another_toolkit_and_of_several_places():
    other = {"path": "/x/libcudnn.so.9", "version": "9.1.0", "cudart": 12040}
    (finding,) = report(libraries={"libcudnn.so.9": answered(other)}).find("cudnn.toolkit")
    assert "built for CUDA 12, and here is CUDA 13" in finding.what
    parts = {"libcudnn_ops.so.9": answered({"path": "/elsewhere/libcudnn_ops.so.9", "version": None})}
    assert report(libraries=parts).find("cudnn.mixed")


def test_the_probe_tells_the_file_that_the_loader_took(tmp_path):
    """A library that is certainly here, under the name of another, as a fake one on the path would be."""
    copy = tmp_path / "libcudart.so.13"
    shutil.copy(_ctypes.__file__, copy)
    env = {**os.environ, "LD_LIBRARY_PATH": str(tmp_path)}
    names = json.dumps(["libcudart.so.13", "libcudart.so.99"])
    value = ask("library", names, timeout_s=20, env=env).value
    assert value["libcudart.so.13"] == {"path": str(copy), "version": None}
    assert "cannot open shared object file" in value["libcudart.so.99"]["error"]
