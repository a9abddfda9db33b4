"""Every small model of an exporter opens by default, and callers at once get the answers of direct runs."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import asynctrt
from tests.zoo import compare
from tests.zoo.models import ENTRIES, FILES, OF_EXPORTERS, SIZES

ROOT = Path(__file__).parent.parent.parent
CALLERS = 16
REQUESTS = 64


@pytest.mark.anyio
@pytest.mark.parametrize("entry", OF_EXPORTERS, ids=lambda entry: entry.name)
async def test_callers_at_once_get_the_answers_of_direct_runs(entry):
    path = entry.path(FILES)
    session = compare.direct_session(path)
    rng = np.random.default_rng(1)
    requests = [entry.request(rng, int(size)) for size in rng.integers(0, SIZES, REQUESTS)]
    async with asynctrt.open(path, **entry.settings) as engine:
        answers = await compare.ask(engine, requests, CALLERS)
        assert engine.batching.is_on is entry.shares_batches
    for request, answer in zip(requests, answers, strict=True):
        assert compare.difference(answer, compare.direct_answer(session, request)) <= entry.tolerance


def test_every_file_is_small_and_has_an_entry_and_an_exporter():
    sizes = {path.stem: path.stat().st_size for path in FILES.glob("*.onnx")}
    assert (
        set(sizes)
        == {entry.file_stem for entry in OF_EXPORTERS}
        == set(json.loads((FILES / "made.json").read_text()))
    )
    assert max(sizes.values()) <= 60_000
    assert sum(sizes.values()) <= 500_000
    assert len({entry.name for entry in ENTRIES}) == len(ENTRIES)


@pytest.mark.parametrize(
    "ours",
    [
        {"y": np.float32([1, 2])},
        {"y": np.float32([[1, 2.5]])},
        {"y": np.float64([[1, 2]])},
        {"z": np.float32([[1, 2]])},
        {"y": np.float32([[1, np.nan]])},
        {"y": [{"a": 1.0}]},
        {},
    ],
)
def test_answers_that_differ_are_seen(ours):
    direct = {"y": np.float32([[1, 2]])}
    assert compare.difference(direct, direct) == 0
    assert compare.is_same(direct, direct)
    assert compare.difference(ours, direct) >= 0.25
    assert not compare.is_same(ours, direct)


def test_maps_and_strings_are_compared():
    direct = {"label": np.array(["a"], object), "scores": [{"a": 0.75, "b": 0.25}]}
    assert compare.difference(dict(reversed(direct.items())), direct) == 0
    assert compare.difference({**direct, "label": np.array(["b"], object)}, direct) == np.inf
    assert compare.difference({**direct, "scores": [{"a": 0.25, "c": 0.75}]}, direct) == np.inf
    assert compare.difference({**direct, "scores": [{"a": 0.75, "b": 0.5}]}, direct) == 1


@pytest.mark.tier2
def test_the_table_is_printed_and_kept(tmp_path):
    path = tmp_path / "zoo.json"
    command = [
        sys.executable,
        "-m",
        "tests.zoo.run",
        "--models",
        "keras_texts,keras_picture",
        "--json",
        str(path),
    ]
    done = subprocess.run(
        [*command, "--seconds", "0.01", "--repeats", "1"],
        capture_output=True,
        text=True,
        check=False,
        timeout=55,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    figures = json.loads(path.read_text())["figures"]
    assert set(figures) == {"keras_texts", "keras_picture"}
    for found in figures.values():
        assert found["opens_as"] == "batched"
        assert found["is_within_tolerance"]
        assert min(found["requests_per_s"].values()) > 0
    assert [line.split(" | ")[0] for line in done.stdout.splitlines()[2:4]] == [
        "| keras_texts",
        "| keras_picture",
    ]
