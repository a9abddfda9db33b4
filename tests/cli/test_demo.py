"""The demo's model and its input, held against magika itself, and what it makes of folders."""

import asyncio
import math
import os
import re
import sys
import threading

import numpy as np
import pytest
from magika import Magika

import asynctrt
from asynctrt.cli import demo
from asynctrt.errors import MissingExtraError

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def model():
    return demo.ContentModel()


@pytest.mark.tier2
async def test_every_file_is_what_magika_says_it_is(model):
    """The same bytes, the same model, read and judged by the package that the model comes from."""
    expected, rows = {}, {}
    judge = Magika()
    for path in demo.find_files(demo.default_folders(), 60):
        row = model.row(path)
        if row is not None:
            rows[path] = row
            expected[path] = judge.identify_path(path).output.label
    async with asynctrt.open(model.path) as engine:
        results = await asyncio.gather(*[engine.infer(row) for row in rows.values()])
        found = {
            path: model.label(result[engine.outputs[0].name][0])
            for path, result in zip(rows, results, strict=True)
        }
    assert len(expected) > 40
    assert found == {path: str(label) for path, label in expected.items()}


@pytest.mark.parametrize(
    "content",
    [b"x" * 50, b"  \n text with space around \n\n ", bytes(range(256)) * 40, b"a" * 1024, b"b" * 5000],
)
def test_the_input_is_what_magika_makes_of_the_bytes(model, content, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(content)
    row = model.row(path)
    ours = row[0].tolist()
    beginning, end, block = (model.config[name] for name in ("beg_size", "end_size", "block_size"))
    head = list(content[:block].lstrip()[:beginning])
    assert ours[: len(head)] == head
    assert set(ours[len(head) : beginning]) <= {model.config["padding_token"]}
    tail = list(content[-block:].rstrip()[-end:])
    assert ours[-len(tail) :] == tail
    assert row.shape == (1, beginning + end)
    assert row.dtype == np.int32


@pytest.mark.parametrize("content", [b"", b"short", b" " * 100, b"\n\n  1234567"])
def test_what_says_too_little_is_left_out(model, content, tmp_path):
    path = tmp_path / "file"
    path.write_bytes(content)
    assert model.row(path) is None


def test_what_cannot_be_read_is_left_out(model, tmp_path):
    os.mkfifo(tmp_path / "pipe")
    assert model.row(tmp_path / "pipe") is None
    assert model.row(tmp_path / "missing") is None
    assert model.row(tmp_path) is None


def test_low_scores_say_no_more_than_text_or_unknown(model):
    labels = model.config["target_labels_space"]
    scores = np.full(len(labels), 0.001)
    scores[labels.index("python")] = 0.3
    assert model.label(scores) == "txt"
    scores[:] = 0.001
    scores[labels.index("elf")] = 0.3
    assert model.label(scores) == "unknown"
    scores[labels.index("elf")] = 0.9
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
        demo.ContentModel()


async def test_without_threadpoolctl_the_message_names_the_extra(monkeypatch):
    monkeypatch.setattr(demo, "threadpool_limits", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'asynctrt\[demo\]'"):
        await demo.Course([]).run()


@pytest.mark.tier2
async def test_a_demo_that_is_interrupted_shows_what_it_has(tmp_path):
    """Cancelled while the second way is measured: the first is shown all the same."""
    for number in range(12):
        (tmp_path / f"{number}.py").write_text(
            f"import os\n\n\ndef function_{number}():\n    return os.getcwd()\n"
        )
    said, noted = [], []
    course = demo.Course(demo.find_files([tmp_path]), 0.5, said.append, noted.append)
    running = asyncio.create_task(course.run())
    while "1. Plain load: a batcher by hand" not in noted:
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait([running], timeout=20)
    assert running.cancelled()
    shown = "\n".join(said)
    assert re.search(r"12 files.* 12 python", shown)
    assert re.search(r"in the coroutine +[\d,]+ +[\d,]+$", shown, re.MULTILINE)
    assert "asynctrt / by hand" not in shown, "nothing can be said of what was not measured"
    assert "2. Overload" not in shown


@pytest.mark.parametrize(
    ("engine", "hand", "says"),
    [
        (100, 91, "answered no difference"),
        (91, 100, "answered no difference"),
        (0, 0, "answered no difference"),
        (120, 100, "answered x 1.20"),
        (50, 100, "answered x 0.50"),
        (1, 0, "answered x inf"),
    ],
)
def test_small_ratios_are_no_difference(engine, hand, says):
    assert demo.compared("answered", engine, hand) == says


@pytest.mark.parametrize(("engine", "hand"), [(20, math.inf), (math.inf, 20), (math.inf, math.inf)])
def test_what_was_never_answered_is_not_a_ratio(engine, hand):
    assert demo.compared("p99 ms", engine, hand) == "p99 ms cannot be compared"


@pytest.mark.parametrize(
    ("answered", "sent", "p99_ms"), [(100, 100, 100), (100, 101, 100), (100, 102, math.inf), (0, 0, 0)]
)
def test_requests_that_were_never_answered_count_in_the_percentile(answered, sent, p99_ms):
    """A batcher that fails half of its callers at once would have the best percentile of all."""
    load = demo.Load(None, [], sent=sent, latencies_ms=[*range(1, answered + 1)])
    assert demo.p99_ms(load) == p99_ms


async def test_a_caller_who_leaves_tells_nobody_beforehand():
    told = []

    async def infer(row, timeout=None):
        told.append(timeout)
        await asyncio.get_running_loop().create_future()

    load = demo.Load(infer, [1])
    await asyncio.wait_for(load.send(leaves_after=0.01), 20)
    assert (told, load.used) == ([None], 0)


async def test_a_batcher_by_hand_answers_each_caller_with_its_own_row():
    batcher = demo.HandBatcher(np.negative, 4)
    rows = [np.full((1, 1), number, np.float32) for number in range(11)]
    answers = await asyncio.wait_for(asyncio.gather(*map(batcher.infer, rows)), 20)
    assert [answer.tolist() for answer in answers] == [[[-number]] for number in range(11)]
    await batcher.end()


async def test_a_batcher_by_hand_fails_its_callers_and_goes_on():
    def predict(rows):
        if rows.min() < 0:
            raise ValueError("negative")
        return rows

    batcher = demo.HandBatcher(predict, 1)
    with pytest.raises(ValueError, match="negative"):
        await asyncio.wait_for(batcher.infer(np.full((1, 1), -1.0)), 20)
    assert (await asyncio.wait_for(batcher.infer(np.ones((1, 1))), 20)).tolist() == [[1.0]]
    await batcher.end()


async def test_a_batcher_by_hand_computes_nothing_for_callers_who_left():
    """It is a good batcher: two batches at a time, and no row of a caller who left while it waited."""
    begun, release, computed = [], threading.Event(), []

    def predict(rows):
        begun.append(len(rows))
        release.wait(20)
        computed.extend(rows[:, 0].tolist())
        return rows

    batcher = demo.HandBatcher(predict, 2)
    requests = [asyncio.create_task(batcher.infer(np.full((1, 1), float(number)))) for number in range(6)]
    while len(begun) < 2:
        await asyncio.sleep(0.001)
    requests[4].cancel()
    await asyncio.wait([requests[4]])
    release.set()
    answers = await asyncio.wait_for(asyncio.gather(*requests, return_exceptions=True), 20)
    assert begun == [2, 2, 1]
    assert sorted(computed) == [0.0, 1.0, 2.0, 3.0, 5.0]
    assert isinstance(answers[4], asyncio.CancelledError)
    await batcher.end()


async def test_what_is_late_or_fails_is_not_answered_and_what_leaves_does_not_count():
    async def infer(row, timeout=None):
        async with asyncio.timeout(timeout):
            if row is None:
                await asyncio.get_running_loop().create_future()
            if row < 0:
                raise ValueError("poison")

    load = demo.Load(infer, [1, -1, None])
    for _ in range(3):
        await load.send(0.01)
    await load.send(row=1, counts=False)
    assert (load.sent, load.used, len(load.latencies_ms)) == (3, 2, 1)


async def test_shutdown_counts_who_is_never_answered():
    rows = [np.ones((1, demo.WIDTH), np.float32)]
    layers = demo.Layers()
    batcher = demo.HandBatcher(layers.predict, 4)
    assert await demo.lost(batcher.infer, rows, batcher.end) != "0 of 256"
    async with layers.open() as engine:
        assert await demo.lost(engine.infer, rows, engine.drain) == "0 of 256"
