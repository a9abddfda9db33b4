"""Rules about the source: sizes, docstrings, clocks, state, files, and a test for each module."""

import ast
import asyncio
import gc
import re
import subprocess
import warnings
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "asynctrt"
MODULES = sorted(PACKAGE.rglob("*.py"))

FUNCTION_LINES_MAX = 70
MODULE_LINES_MAX = 600


class SizeWarning(UserWarning):
    """Something is longer than its limit."""


@pytest.fixture(autouse=True, scope="module")
def _trees_are_kept():
    """Look for no garbage among the nodes of syntax trees: there is none, in millions."""
    gc.disable()
    yield
    trees.cache_clear()  # Or the next collection looks at each.
    gc.enable()


@cache
def trees():
    """Return every module with its syntax tree. Not at import: each worker of xdist imports this."""
    return {module: ast.parse(module.read_text()) for module in MODULES}


def sizes():
    """Yield the name, the lines and the limit of each module and each function of the package."""
    for module, tree in trees().items():
        name = str(module.relative_to(PACKAGE))
        yield name, len(module.read_text().splitlines()), MODULE_LINES_MAX
        for item, qualified in functions(tree):
            yield f"{name}:{qualified}", item.end_lineno - item.lineno + 1, FUNCTION_LINES_MAX


def functions(scope, prefix=""):
    for item in ast.iter_child_nodes(scope):
        inner = prefix
        if isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            inner = f"{prefix}{item.name}."
            if not isinstance(item, ast.ClassDef):
                yield item, f"{prefix}{item.name}"
        yield from functions(item, inner)


@pytest.mark.filterwarnings("always::tests.test_tidiness.SizeWarning")
def test_functions_and_modules_are_short():
    """Splitting what belongs together is worse than a long file, so this warns and does not fail."""
    for name, lines, limit in sizes():
        if lines > limit:
            warnings.warn(f"{name} has {lines} lines; the limit is {limit}", SizeWarning, stacklevel=1)


def test_every_module_says_what_it_is():
    silent = [
        str(module.relative_to(ROOT)) for module, tree in trees().items() if not ast.get_docstring(tree)
    ]
    assert not silent


def test_every_public_name_is_documented():
    """Methods that implement a protocol or override a method of ours are documented there; everything else
    where it is defined."""
    classes = {
        item.name: item
        for tree in trees().values()
        for item in ast.walk(tree)
        if isinstance(item, ast.ClassDef)
    }
    protocols = {
        member.name
        for tree in trees().values()
        for item in ast.walk(tree)
        if isinstance(item, ast.ClassDef) and any(ast.unparse(base) == "Protocol" for base in item.bases)
        for member in item.body
        if isinstance(member, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    protocols |= set(dir(asyncio.Protocol))
    silent = []
    for module, tree in trees().items():
        scopes = [tree, *(item for item in ast.walk(tree) if isinstance(item, ast.ClassDef))]
        for scope in scopes:
            if isinstance(scope, ast.ClassDef) and scope.name.startswith("_"):
                continue
            for item in scope.body:
                if not isinstance(item, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                    continue
                if item.name.startswith("_") or item.name in protocols or ast.get_docstring(item):
                    continue
                if "overload" in map(ast.unparse, item.decorator_list):
                    continue
                if isinstance(scope, ast.ClassDef) and is_documented_above(scope, item.name, classes):
                    continue
                silent.append(f"{module.relative_to(ROOT)}:{item.name}")
    assert not silent


def is_documented_above(scope, name, classes):
    """Return whether a base class, of those that are in the package, documents a method of this name."""
    bases = [classes[base] for base in map(ast.unparse, scope.bases) if base in classes]
    return any(
        any(getattr(item, "name", "") == name and ast.get_docstring(item) for item in base.body)
        or is_documented_above(base, name, classes)
        for base in bases
        if base is not scope
    )


def test_the_package_says_that_it_is_typed():
    assert (PACKAGE / "py.typed").exists()


def test_only_the_clock_reads_the_time():
    readers = [
        str(module.relative_to(ROOT))
        for module, tree in trees().items()
        for item in ast.walk(tree)
        if (isinstance(item, ast.Import) and any(alias.name == "time" for alias in item.names))
        or (isinstance(item, ast.ImportFrom) and item.module == "time")
    ]
    assert readers == ["asynctrt/_util/clock.py"]


OF_THE_PROCESS = {
    "backends/tensorrt/abilities.py:_filtering": "warnings are filtered by the process",
    "backends/tensorrt/messages.py:_logs": "TensorRT has one logger in a process",
    "devices/cuda/context.py:_gpus": "a GPU is lost, or stuck, for the whole process",
    "devices/cuda/streams.py:_collector": "Python has one garbage collector in a process",
    "runtime/shares.py:_devices": "a device is one, whichever engine runs on it",
}
"""State at module level, each with the reason why it cannot belong to an engine or to a device."""


def test_no_state_at_module_level():
    """Names at module level are constants, types, functions or loggers: nothing that two engines share."""
    allowed = {"logger", "app", "keys_app", "out", "err"}
    mutable = []
    for module, tree in trees().items():
        for item in tree.body:
            targets = item.targets if isinstance(item, ast.Assign) else [getattr(item, "target", None)]
            for target in targets:
                if isinstance(target, ast.Name) and isinstance(item.value, ast.List | ast.Set | ast.Call):
                    name = target.id
                    if not (name.isupper() or name in allowed or name == "__all__" or name == "T"):
                        mutable.append(f"{module.relative_to(PACKAGE)}:{name}")
    assert sorted(mutable) == sorted(OF_THE_PROCESS)


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="a source archive has no list of its files")
def test_the_top_level_is_what_it_should_be():
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    top = {line.split("/")[0] for line in listed.splitlines()}
    assert top <= {
        ".ci",
        ".gitignore",
        "CHANGELOG.md",
        "CONTRIBUTING.md",
        "LICENSE",
        "README.md",
        "SECURITY.md",
        "asynctrt",
        "docs",
        "examples",
        "pyproject.toml",
        "tests",
    }


def test_no_document_names_the_host_of_a_package_registry():
    """Packages are named; where they come from is for whoever installs them to decide."""
    hosts = re.compile(r"pypi\.org|pythonhosted\.org|anaconda\.org|npmjs\.(com|org)|pypi\.nvidia\.com")
    folders = [path for path in ROOT.iterdir() if path.is_dir() and path.name != ".venv"]
    documents = [*ROOT.glob("*.md"), *(path for folder in folders for path in folder.rglob("*.md"))]
    assert len(documents) > 3
    assert not [str(path.relative_to(ROOT)) for path in documents if hosts.search(path.read_text())]


UNTESTED = {
    "backends/onnx_objects.py": "tests/backends/test_onnxruntime.py and others open such objects",
    "backends/tensorrt_options.py": "tests/backends/tensorrt/test_model.py and others open plans with them",
    "loadtest/api.py": "tests/loadtest/test_local.py and test_job.py there try `loadtest.run`",
    "serving/api.py": "tests/serving/test_kserve_http.py and others try its routes through HTTP",
    "serving/command.py": "tests/serving/test_server.py and others try the command as a process",
    "serving/front.py": "tests/serving/test_fronts.py tries it as a process",
    **dict.fromkeys(
        (
            f"workers/{name}.py"
            for name in ("child", "engine", "front", "link", "messages", "pool", "process")
        ),
        "tests/workers/test_faults.py and others try real processes, tests/serving/test_fronts.py the pool",
    ),
    "workers/spawn.py": "the same, and tests/serving/test_fronts.py",
}
"""Modules that no test names or imports, each with what tries it."""


def test_tests_mirror_the_package():
    """Each module has a test of its name, or one that imports it, in its package's folder or contract/."""
    missing = []
    for folder in (
        "scheduling",
        "runtime",
        "devices",
        "kserve",
        "serving",
        "loadtest",
        "workers",
    ):
        tests = [path for top in (folder, "contract") for path in (ROOT / "tests" / top).rglob("test_*.py")]
        names = {path.name for path in tests}
        tried = {name for path in tests for name in imported(path)}
        for module in sorted((PACKAGE / folder).rglob("*.py")):
            dotted = ".".join(module.relative_to(ROOT).with_suffix("").parts)
            if module.name in ("__init__.py", "base.py") or f"test_{module.name}" in names or dotted in tried:
                continue
            missing.append(str(module.relative_to(PACKAGE)))
    assert set(missing) <= set(UNTESTED)


IMPORT = re.compile(r"^\s*(?:from|import) ([\w.]+)(?: import (\([^)]*\)|.*))?$", re.MULTILINE)


@cache
def imported(path):
    """Return the modules that a test may have imported: `from a import b` gives both a and a.b."""
    names = set()
    for module, given in re.findall(IMPORT, path.read_text()):
        parts = re.findall(r"\w+", given)
        names |= {module, *(f"{module}.{name}" for name in parts)}
    return names


STUMBLES = {
    "those that ...": r"\bthose (that|which|who|whose|of)\b",
    "what batches take": r"\bwhat (batches|a batch|it|they|each|one) (take|takes|took)\b",
    "is none, is no ...": r"(?<!there )\b(is|are|was|were) (none\b(?! of)|no (?!longer|more|less)\w)",
    "of its own": r"\bof (its|their|his|one's|our|your) own\b",
    "is to be done": r"\b(is|are|was|were) to be \w",
    "nobody, somebody, whoever": r"\b(nobody|somebody|whoever)\b",
    "is told": r"\b(is|are|was|were|be) told\b",
    "of which": r"\bof which\b",
    "as many, without as": r"\bas (many|much)\b(?![^.;:]*\bas\b)",
    "so many": r"\bso many\b",
    "for ever": r"\bfor ever\b",
    "all the same": r"\ball the same\b",
}
"""Phrases that a native reader stumbles over. Use the verb, name the subject, put the condition first."""


def test_the_english_is_plain():
    """Comments, docstrings and messages use none of the phrases."""
    stumble = re.compile("|".join(STUMBLES.values()), re.IGNORECASE)
    found = [
        f"{module.relative_to(PACKAGE)}: {text[max(0, match.start() - 40) : match.end() + 40]}"
        for module in MODULES
        for text in prose(module)
        for match in stumble.finditer(text)
    ]
    assert not found


def prose(module):
    """Yield the comments and the texts of a module, each as one line."""
    yield from re.findall(r"# .*", module.read_text())
    for item in ast.walk(trees()[module]):
        if isinstance(item, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "X" for part in item.values]
            yield " ".join("".join(parts).split())
        elif isinstance(item, ast.Constant) and isinstance(item.value, str):
            yield " ".join(item.value.split())
