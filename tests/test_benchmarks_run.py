"""Each benchmark still runs, with the least that it can be asked for, and says what it measured."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "tests" / "benchmarks"
LEAST = {
    "where": ["--seconds", "0.05"],
    "copies": ["--batches", "1"],
    "delays": ["--count", "2"],
    "busy_loop": ["--requests", "3"],
    "memory": ["--requests", "2000", "--engines", "2"],
    "mlp": ["--repeats", "1", "--seconds", "0.05"],
    "serving": ["--repeats", "1", "--seconds", "0.1", "--only", "no-op, 64"],
    "hangups": ["--repeats", "1", "--seconds", "0.2", "--rate", "100", "--hang-ups", "5"],
    "soak": ["--requests", "3000"],
    "lateness": ["--seconds", "0.4", "--repeats", "1"],
    "truth": ["--seconds", "2"],
    "generation": ["--seconds", "0.1", "--repeats", "1"],
    "agreement": ["--seconds", "0.5", "--repeats", "1", "--count", "500", "--only", "4 ms"],
    "peers": ["--repeats", "1", "--seconds", "0.05"],
}
PARTS = {"client", "servers", "mosec_server"}
"""What the benchmark of serving starts as processes of their own."""


def test_every_benchmark_is_run_and_explained():
    names = {path.stem for path in FOLDER.glob("*.py")} - {"__init__", "common", *PARTS}
    assert names == set(LEAST)
    explained = (FOLDER / "README.md").read_text()
    assert all(f"tests.benchmarks.{name}`" in explained for name in names)


@pytest.mark.parametrize("name", LEAST)
def test_benchmark(name, tmp_path):
    path = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, "-m", f"tests.benchmarks.{name}", *LEAST[name], "--json", str(path)],
        capture_output=True,
        text=True,
        check=False,
        timeout=55,
        cwd=ROOT,
    )
    if done.returncode and "pip install async-batcher" in done.stderr:
        assert name == "peers", "only this one needs what is no dependency"
        return
    assert done.returncode == 0, done.stderr
    content = json.loads(path.read_text())
    assert content["figures"]
    assert content["machine"]["cores"]


def test_the_results_that_are_kept_are_of_benchmarks_that_there_are():
    kept = {path.stem.split("-")[0] for path in (FOLDER / "results").glob("*.json")}
    assert kept == {*LEAST, "overhead"}
