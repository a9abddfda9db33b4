"""The wheel and the source archive: built, and installed from the built file."""

import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from importlib.util import find_spec
from pathlib import Path

import pytest

import asynctrt
from tests.helpers import needed

pytestmark = [pytest.mark.tier2, pytest.mark.timeout(300)]
ROOT = Path(__file__).parent.parent
ELSEWHERE = ("PYTHONPATH", "PYTHONHOME")


def run(*command, cwd):
    """Run it with none of the variables that tell Python where to look for modules: a checkout, say."""
    environment = {name: value for name, value in os.environ.items() if name not in ELSEWHERE}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=200,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The source archive, and the wheel that is built from it, not from the checkout."""
    needed(find_spec("hatchling"), "hatchling is missing: pip install -e '.[dev]'")
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "hatchling", "build", "-t", "sdist", "-d", folder, cwd=ROOT)
    (archive,) = folder.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        opened.extractall(folder, filter="data")
    (source,) = (path for path in folder.iterdir() if path.is_dir())
    run(sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", folder, cwd=source)
    (wheel,) = folder.glob("*.whl")
    return source, wheel


def test_the_archive_has_what_it_takes_to_test_it(built):
    source, _ = built
    for part in (
        ".ci/run",
        "asynctrt/py.typed",
        "docs/conf.py",
        "examples/quickstart.py",
        "tests/conftest.py",
        "LICENSE",
    ):
        assert (source / part).exists(), part
    assert not list(source.rglob("__pycache__"))


def test_the_wheel_has_the_package_with_its_files_and_no_more(built):
    _, wheel = built
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert tops == {"asynctrt", f"asynctrt-{asynctrt.__version__}.dist-info"}
    package = {
        str(path.relative_to(ROOT))
        for path in (ROOT / "asynctrt").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert package <= set(names)


def test_the_installed_wheel_works(built, tmp_path, monkeypatch):
    """In an environment that has this one's dependencies, and asynctrt from the wheel alone."""
    _, wheel = built
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    venv.create(tmp_path / "venv", symlinks=True)
    (site,) = (tmp_path / "venv").glob("lib/python*/site-packages")
    run(sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", site, wheel, cwd=tmp_path)
    (site / "others.pth").write_text("\n".join(path for path in sys.path if path.endswith("site-packages")))
    python = tmp_path / "venv" / "bin" / "python"
    where = run(python, "-c", "import asynctrt; print(asynctrt.__file__)", cwd=tmp_path)
    assert where.strip() == str(site / "asynctrt" / "__init__.py")
    said = run(python, "-m", "asynctrt", "--version", cwd=tmp_path)
    assert said == f"asynctrt {asynctrt.__version__}\n"
    assert "Commands" in run(python, "-m", "asynctrt", "--help", cwd=tmp_path)
    assert "answers of (4,)" in run(python, ROOT / "examples" / "batch_function.py", cwd=tmp_path)
