"""The demo's model and its input, held against magika itself, and what it makes of folders."""

import asyncio
import sys
from pathlib import Path

import numpy as np
import pytest
from magika import Magika

import asynctrt
from asynctrt import demo, demo_parts
from asynctrt.comparison import Measured, by_hand, ways_to
from asynctrt.errors import MissingExtraError


@pytest.fixture(scope="module")
def model():
    return demo.ContentModel.find()


@pytest.mark.tier2
def test_every_file_is_what_magika_says_it_is(model):
    """The same bytes, the same model, read and judged by the package that the model comes from."""
    expected, rows = {}, {}
    judge = Magika()
    for path in demo.find_files(demo.default_folders(), 60):
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


class Shown:
    """A view that keeps what it was told."""

    def __init__(self):
        self.jobs, self.parts, self.files, self.url = [], [], None, "not yet"

    def begin(self, what, total):
        done = [what, 0, total]
        self.jobs.append(done)

        def advance():
            done[1] += 1

        return advance

    def show_files(self, found, model):
        self.files = found

    def show_part(self, part):
        self.parts.append(part)

    def show_dashboard(self, url):
        self.url = url


def course_of(folder, **settings):
    for number in range(12):
        (folder / f"{number}.py").write_text(
            f"import os\n\n\ndef function_{number}():\n    return os.getcwd()\n"
        )
    return demo_parts.Course(folders=(folder,), **{"seconds": 0.05, **settings})


@pytest.mark.tier2
def test_a_demo_that_is_interrupted_shows_what_it_has(model, tmp_path, monkeypatch):
    """Cancelled while the second way is measured: the first is shown all the same."""
    shown, measured = Shown(), []

    async def measure(way, rows, **load):
        if measured:
            await asyncio.get_running_loop().create_future()
        measured.append(way)
        return Measured(answers=3, elapsed_ns=10**9, latencies_ns=[10**6], late_ns=[0])

    async def interrupted():
        running = asyncio.create_task(course_of(tmp_path).run(model, shown))
        while not measured:
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait([running], timeout=20)
        assert running.cancelled()

    monkeypatch.setattr(demo_parts, "measure", measure)
    asyncio.run(interrupted())
    (part,) = shown.parts
    assert list(part.results) == ["in the coroutine"]
    assert part.compared() is None
    assert shown.url == "not yet"


def test_no_file_is_no_demo(model, tmp_path):
    shown = Shown()
    asyncio.run(demo_parts.Course(folders=(tmp_path,)).run(model, shown))
    assert (shown.files.files, shown.parts) == (0, [])


def test_what_is_compared_is_the_best_of_the_others():
    part = demo_parts.Part("title", "about", 8)
    assert part.compared() is None
    for name, answers in {"in the coroutine": 20, "by hand": 50, "asynctrt": 100}.items():
        part.results[name] = Measured(answers=answers, elapsed_ns=10**9)
    assert part.compared() == (2.0, "by hand")
    part.results = {"by hand": Measured(), "asynctrt": Measured(answers=1, elapsed_ns=10**9)}
    assert part.compared() is None, "nothing can be said over none"


@pytest.mark.anyio
@pytest.mark.parametrize("way", list(ways_to(abs, None, 4)))
async def test_each_way_answers_each_caller_with_its_own_row(way):
    """Whoever measures wrong answers measures nothing."""
    spec = asynctrt.TensorSpec("x", "float32", (1,))
    model = asynctrt.FunctionModel(
        lambda inputs: -inputs["x"], inputs=spec, outputs=asynctrt.TensorSpec("y", "float32", (1,))
    )
    async with asynctrt.open(model, max_rows=4) as engine, ways_to(np.negative, engine, 4)[way]() as infer:
        rows = [np.full((1, 1), number, np.float32) for number in range(11)]
        answers = await asyncio.wait_for(asyncio.gather(*map(infer, rows)), 20)
    for number, answer in enumerate(answers):
        assert np.asarray(answer["y"] if way == "asynctrt" else answer).tolist() == [[-number]]


@pytest.mark.anyio
async def test_a_batcher_by_hand_fails_its_callers_and_goes_on():
    def predict(rows):
        if rows.min() < 0:
            raise ValueError("negative")
        return rows

    async with by_hand(predict, 1) as infer:
        with pytest.raises(ValueError, match="negative"):
            await asyncio.wait_for(infer(np.full((1, 1), -1.0)), 20)
        assert (await asyncio.wait_for(infer(np.ones((1, 1))), 20)).tolist() == [[1.0]]
