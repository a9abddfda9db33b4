"""The demo's model and its input, held against magika itself, and what it makes of folders."""

import asyncio
import sys
from pathlib import Path

import numpy as np
import pytest
from magika import Magika

import asynctrt
from asynctrt import demo
from asynctrt.errors import MissingExtraError

FILES = demo.find_files(demo.default_folders(), 60)


@pytest.fixture(scope="module")
def model():
    return demo.ContentModel.find()


def test_every_file_is_what_magika_says_it_is(model):
    """The same bytes, the same model, read and judged by the package that the model comes from."""
    expected, rows = {}, {}
    judge = Magika()
    for path in FILES:
        row = demo.read_row(model, path)
        if row is not None:
            rows[path] = row
            expected[path] = judge.identify_path(path).output.label

    async def identify():
        async with asynctrt.open(model.path, max_rows=demo.MAX_ROWS) as engine:
            results = await asyncio.gather(*[engine.infer(row) for row in rows.values()])
            return {
                path: model.label(result[engine.outputs[0].name][0])
                for path, result in zip(rows, results, strict=True)
            }

    assert len(expected) > 40
    assert asyncio.run(identify()) == {path: str(label) for path, label in expected.items()}


@pytest.mark.parametrize(
    "content",
    [b"x" * 50, b"  \n text with space around \n\n ", bytes(range(256)) * 40, b"a" * 1024, b"b" * 5000],
)
def test_the_input_is_what_magika_makes_of_the_bytes(model, content, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(content)
    row = demo.read_row(model, path)
    ours = row[0].tolist()
    block = content[: model.block_size].lstrip()
    head = list(block[: model.beg_size])
    assert ours[: len(head)] == head
    assert set(ours[len(head) : model.beg_size]) <= {model.padding}
    tail = list(content[-model.block_size :].rstrip()[-model.end_size :])
    assert ours[-len(tail) :] == tail
    assert row.shape == (1, model.beg_size + model.end_size)
    assert row.dtype == np.int32


@pytest.mark.parametrize("content", [b"", b"short", b" " * 100, b"\n\n  1234567"])
def test_what_says_too_little_is_left_out(model, content, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(content)
    assert demo.read_row(model, path) is None


def test_what_cannot_be_read_is_left_out(model, tmp_path):
    assert demo.read_row(model, tmp_path / "missing") is None
    assert demo.read_row(model, tmp_path) is None


def test_endings(model):
    assert model.agrees(Path("a.py"), "python") is True
    assert model.agrees(Path("a.PY"), "python") is True
    assert model.agrees(Path("a.py"), "html") is False
    assert model.agrees(Path("a.no-such-ending"), "python") is None
    assert model.agrees(Path("Makefile"), "makefile") is None


def test_low_scores_say_no_more_than_text_or_unknown(model):
    scores = np.full(len(model.labels), 0.001)
    scores[model.labels.index("python")] = 0.3
    assert model.label(scores) == "txt"
    scores[:] = 0.001
    scores[model.labels.index("elf")] = 0.3
    assert model.label(scores) == "unknown"
    scores[model.labels.index("elf")] = 0.9
    assert model.label(scores) == "elf"


def test_files_are_drawn_evenly_and_always_the_same(tmp_path):
    for number in range(30):
        (tmp_path / f"{number}.txt").write_text("content")
    (tmp_path / "link").symlink_to(tmp_path / "0.txt")
    assert len(demo.find_files([tmp_path], 100)) == 30
    some = demo.find_files([tmp_path], 10)
    assert len(some) == 10
    assert some == demo.find_files([tmp_path], 10)


def test_without_magika_the_message_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "magika", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'asynctrt\[demo\]'"):
        demo.ContentModel.find()


def test_one_by_one_and_together_find_the_same(model):
    rows = [(path, row) for path in FILES[:20] if (row := demo.read_row(model, path)) is not None]
    report = demo.DemoReport()
    advanced = []

    async def both():
        async with asynctrt.open(model.path, max_rows=demo.MAX_ROWS) as engine:
            await demo.run_together(engine, model, rows, report, advanced.append)
            await demo.run_one_by_one(engine, rows, report.one_by_one, advanced.append)

    asyncio.run(both())
    assert sum(report.found.values()) == report.together.files == report.one_by_one.files == len(rows)
    assert sum(advanced) == 2 * len(rows)
    assert report.together.latency_ms(50) <= report.together.latency_ms(99)
    assert report.together.mean_batch_rows > 1
    assert report.one_by_one.files_per_s > 0
    assert demo.DemoRun().files_per_s == demo.DemoRun().latency_ms(50) == 0
