"""How the code is kept: sizes, names, clocks, and no word of where it was made."""

import ast
import asyncio
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "asynctrt"
MODULES = sorted(PACKAGE.rglob("*.py"))
TREES = {module: ast.parse(module.read_text()) for module in MODULES}

FUNCTION_LINES_MAX = 70
MODULE_LINES_MAX = 600


def functions():
    for module, tree in TREES.items():
        for item in ast.walk(tree):
            if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef):
                yield module, item


def test_functions_are_short():
    sizes = [
        (item.end_lineno - item.lineno + 1, f"{module.name}:{item.name}") for module, item in functions()
    ]
    largest = max(sizes)
    assert largest[0] <= FUNCTION_LINES_MAX, f"the largest function is {largest}"


def test_modules_are_short():
    sizes = [(len(module.read_text().splitlines()), str(module.relative_to(ROOT))) for module in MODULES]
    largest = max(sizes)
    assert largest[0] <= MODULE_LINES_MAX, f"the largest module is {largest}"


def test_every_module_says_what_it_is():
    silent = [str(module.relative_to(ROOT)) for module, tree in TREES.items() if not ast.get_docstring(tree)]
    assert not silent


def test_every_public_name_is_documented():
    """Methods that fulfil a protocol are documented there; everything else where it stands."""
    protocols = {
        member.name
        for tree in TREES.values()
        for item in ast.walk(tree)
        if isinstance(item, ast.ClassDef) and any(ast.unparse(base) == "Protocol" for base in item.bases)
        for member in item.body
        if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    protocols |= set(dir(asyncio.Protocol))
    silent = []
    for module, tree in TREES.items():
        scopes = [tree, *(item for item in ast.walk(tree) if isinstance(item, ast.ClassDef))]
        for scope in scopes:
            if isinstance(scope, ast.ClassDef) and scope.name.startswith("_"):
                continue
            for item in scope.body:
                if not isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    continue
                if item.name.startswith("_") or item.name in protocols or ast.get_docstring(item):
                    continue
                silent.append(f"{module.relative_to(ROOT)}:{item.name}")
    # What stands in a function's own scope, or overrides a documented method, speaks through that.
    assert silent == ["asynctrt/testing/latch.py:schedule"]


def test_the_package_says_that_it_is_typed():
    assert (PACKAGE / "py.typed").exists()


def test_only_the_clock_reads_the_time():
    readers = [
        str(module.relative_to(ROOT))
        for module, tree in TREES.items()
        for item in ast.walk(tree)
        if (isinstance(item, ast.Import) and any(alias.name == "time" for alias in item.names))
        or (isinstance(item, ast.ImportFrom) and item.module == "time")
    ]
    assert readers == ["asynctrt/clock.py"]


def test_no_state_at_module_level():
    """Module-level names are constants, types, functions, loggers: nothing that two engines would share."""
    allowed = {"logger", "app", "out", "err"}
    mutable = []
    for module, tree in TREES.items():
        for item in tree.body:
            targets = item.targets if isinstance(item, ast.Assign) else [getattr(item, "target", None)]
            for target in targets:
                if isinstance(target, ast.Name) and isinstance(item.value, ast.List | ast.Set | ast.Call):
                    name = target.id
                    if not (name.isupper() or name in allowed or name == "__all__" or name == "T"):
                        mutable.append(f"{module.relative_to(ROOT)}:{name}")
    assert not mutable


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="a source archive has no list of its files")
def test_the_top_level_is_what_it_should_be():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    top = {line.split("/")[0] for line in listed.splitlines()}
    assert top <= {
        ".ci",
        ".gitignore",
        ".readme",
        "CHANGELOG.md",
        "LICENSE",
        "README.md",
        "asynctrt",
        "examples",
        "pyproject.toml",
        "tests",
    }


def test_tests_mirror_the_package():
    """Each module of the pure and the asyncio half, of devices and backends has a test of its own name."""
    missing = [
        str(module.relative_to(ROOT))
        for folder in ("scheduling", "runtime", "devices", "backends", "serving", "loadtest")
        for module in sorted((PACKAGE / folder).glob("*.py"))
        if module.name not in ("__init__.py", "base.py")
        and not (ROOT / "tests" / folder / f"test_{module.name}").exists()
    ]
    # What a CUDA device makes is tried in test_cuda.py and, on a GPU, by the contract suites. The driver is
    # what tests/test_engine.py and tests/contract/test_engine.py are about; routes are tried
    # through HTTP, the command as a process, `loadtest.run` by test_local.py and test_job.py there.
    assert missing == [
        "asynctrt/runtime/driver.py",
        "asynctrt/devices/cuda_objects.py",
        "asynctrt/serving/api.py",
        "asynctrt/serving/command.py",
        "asynctrt/loadtest/api.py",
    ]
