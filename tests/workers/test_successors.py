"""Who takes a worker's place is the same, is waited for while there is hope, and is tried again and again."""

import asyncio
import dataclasses
import gc
import os
from pathlib import Path

import numpy as np
import pytest

import asynctrt
from asynctrt._util import clock
from asynctrt.errors import DeadlineError, DeviceLostError, InternalError, ModelError
from asynctrt.tensors import TensorSpec
from asynctrt.workers import original, spares
from asynctrt.workers.link import FAILURES_MAX
from asynctrt.workers.spares import PAUSE_S_MAX, pause_s
from tests.helpers import WAIT_S, until
from tests.models import double_onnx, scale_onnx
from tests.workers.double import KIND, opened, workers
from tests.workers.models import SEGFAULT, rows

pytestmark = [pytest.mark.anyio, pytest.mark.tier2]


@pytest.fixture
def tried_soon(monkeypatch):
    """An engine that is lost is tried again at once."""
    monkeypatch.setattr(spares, "PAUSE_S", 0.001)


async def right(engine, first):
    assert np.array_equal((await engine.infer(rows(first)))["y"], 2 * rows(first))


OTHERS = {
    "wider": {"outputs": (TensorSpec("y", "float32", (8,)),)},
    "narrower": {"outputs": (TensorSpec("y", "float32", (2,)),)},
    "of another dtype": {"outputs": (TensorSpec("y", "int32", (4,)),)},
    "of another name": {"outputs": (TensorSpec("z", "float32", (4,)),)},
    "with other weights": {"files": (("m.onnx", "other"),)},
    "of another version": {"versions": (("onnxruntime", "1"),)},
}


@pytest.mark.usefixtures("tried_soon")
@pytest.mark.parametrize("other", OTHERS)
async def test_who_takes_a_worker_s_place_is_the_same_or_gets_no_request(other):
    async with workers(KIND) as made:
        first = dataclasses.replace(
            made.ready.description, files=(("m.onnx", "1"),), versions=(("onnxruntime", "2"),)
        )
        made.ready = dataclasses.replace(made.ready, description=first)
        async with opened() as engine:
            await right(engine, 1)
            changed = dataclasses.replace(first, **OTHERS[other])
            made.ready = dataclasses.replace(made.ready, description=changed)
            made.all[0].end("ended by SIGKILL")
            for _ in range(3):
                with pytest.raises(DeviceLostError, match="since the engine was opened|is installed now"):
                    await engine.infer(rows(2))
            assert all(worker.receiver is None for worker in made.all[1:]), "it was given the memory"
            assert engine.inputs == first.inputs
            made.ready = dataclasses.replace(made.ready, description=first)
            await until(lambda: engine.state == "open")
            await right(engine, 3)
    assert engine._front._heap.blocks == 0


async def test_workers_of_one_engine_are_the_same_from_the_beginning():
    async with workers(KIND) as made:
        made.starts = False
        opening = asyncio.ensure_future(opened(device="host,host")._open())
        await until(lambda: len(made.all) == 2)
        made.all[1].say_ready()
        made.ready = dataclasses.replace(made.ready, description=other_weights(made))
        made.all[0].say_ready()
        with pytest.raises(ModelError, match="was changed since the engine was opened"):
            await opening


def other_weights(made):
    return dataclasses.replace(made.ready.description, files=(("m.onnx", "other"),))


@pytest.mark.parametrize("changed", ["weights", "shape"])
async def test_a_file_that_was_changed_is_not_opened_in_the_place_of_the_old_one(tmp_path, changed):
    """With real workers: neither the old answers of others nor those of the new model come back."""
    path = scale_onnx(tmp_path / "m.onnx", 2)
    old = path.read_bytes()
    async with asyncio.timeout(WAIT_S), opened(str(path)) as engine:
        x = np.ones((1, *engine.inputs[0].dims), np.float32)
        secrets = await asyncio.gather(*[engine.infer(x * secret) for secret in (1001, 1002, 1003)])
        assert len(secrets) == 3
        new = tmp_path / "new.onnx"
        if changed == "weights":
            scale_onnx(new, 5)
        else:
            double_onnx(new, dims=(8,))
        new.rename(path)
        engine._front.links[0].kill()
        for number in range(3):
            with pytest.raises(DeviceLostError, match=r"m\.onnx' was changed since the engine was opened"):
                await engine.infer(x * number)
        assert engine.state == "lost"
        path.write_bytes(old)
        await until(lambda: engine.state == "open")
        assert (await engine.infer(x))["output"][0, 0] == 2


async def test_what_no_worker_wrote_is_no_answer():
    """A worker that says so without having written an answer is not believed, and ended."""
    async with workers(KIND) as made, opened() as engine:
        await asyncio.gather(*[engine.infer(rows(secret)) for secret in (1001, 1002, 1003)])
        made.stamps = False
        with pytest.raises(InternalError, match="was not written there for it"):
            await engine.infer(rows(1))
        made.stamps = True
        await until(lambda: made.all[0].how_it_ended)
        await right(engine, 2)
    assert engine._front._heap.blocks == 0


async def test_an_answer_that_was_written_for_another_is_none():
    async with workers(KIND) as made, opened() as engine:
        made.all[0].holds = True
        call = engine.submit(rows(1))
        await until(lambda: engine._front.links[0].groups)
        ((number, group),) = engine._front.links[0].groups.items()
        engine._memory.words[group.launched] = group.layout.stamp(number + 1)
        made.all[0].sender.put(4, 1, 1, number, clock.now_ns(), 0, 1000, 0, 0, 0)
        made.all[0].sender.publish()
        with pytest.raises(InternalError):
            await call
    assert engine._front._heap.blocks == 0


async def test_an_engine_that_was_open_once_is_tried_for_ever_and_ever_more_seldom(monkeypatch):
    pauses = []
    async with workers(KIND) as made, opened() as engine:
        one = engine._front.links[0]
        candidate = one._new_candidate

        def new_candidate(pause_s=0.0):
            pauses.append(pause_s)
            return candidate(0.0)

        monkeypatch.setattr(one, "_new_candidate", new_candidate)
        await right(engine, 1)
        made.why_not = "cannot have it"
        made.all[0].end("ended by SIGKILL")
        with pytest.raises(DeviceLostError, match="another one is tried in"):
            await engine.infer(rows(1))
        await until(lambda: len(pauses) > 20 * FAILURES_MAX)
        made.why_not = ""
        await until(lambda: engine.state == "open")
        await right(engine, 1)
        assert pauses[0] == 0
        assert pauses == [pause_s(number) for number in range(len(pauses))]
        assert pauses[-1] == PAUSE_S_MAX
        count = len(pauses)
        made.all[-1].end("ended by SIGKILL")
        await right(engine, 2)
        assert pauses[count:] == [0], "a worker was ready since"


@pytest.mark.usefixtures("tried_soon")
async def test_a_start_that_hangs_is_given_up_and_tried_again(monkeypatch):
    monkeypatch.setattr(original, "OPENING_S_MIN", 0.05)
    async with workers(KIND) as made, opened() as engine:
        monkeypatch.setattr(engine._front.links[0]._original, "_opening_s", 0.0)
        made.starts = False
        call = engine.submit(rows(1))
        made.all[0].holds = True
        made.all[0].end("ended by SIGKILL")
        with pytest.raises(DeviceLostError, match="it had not opened the engine after"):
            await call
        assert engine.state == "lost"
        made.starts = True
        await until(lambda: engine.state == "open")
        await right(engine, 2)


async def test_a_timeout_is_kept_while_a_worker_s_loop_does_not_run():
    async with workers(KIND) as made, opened() as engine:
        made.all[0].holds = True
        calls = [engine.submit(rows(number), timeout=0.05) for number in range(3)]
        other = engine.submit(rows(5))
        for call in calls:
            with pytest.raises(DeadlineError, match="timeout of 50.000 ms"):
                await call
        assert engine.statistics().expired == 3
        made.all[0].holds = False
        made.all[0].look()
        await other
        await until(lambda: engine._front._heap.blocks == 0)


async def test_what_is_launched_is_waited_for():
    async with workers(KIND) as made, opened() as engine:
        made.all[0].holds = True
        call = engine.submit(rows(1), timeout=0.05)
        await until(lambda: engine._front.links[0].groups)
        (group,) = engine._front.links[0].groups.values()
        engine._memory.words[group.launched] = 1
        with pytest.raises(DeadlineError):
            await engine.infer(rows(2), timeout=0.3)
        made.all[0].holds = False
        made.all[0].look()
        assert np.array_equal((await call)["y"], 2 * rows(1))


async def test_a_timeout_is_kept_while_others_are_tried_apart():
    async with workers(KIND) as made, opened() as engine:
        deadly = engine.submit(rows(SEGFAULT), priority=1)
        late = engine.submit(rows(SEGFAULT), timeout=0.2)
        await until(lambda: len(made.all) == 3)
        made.starts = False
        await until(lambda: len(made.all) == 4)  # They are in halves now, and wait for this worker.
        with pytest.raises(DeadlineError):
            await late
        made.starts = True
        made.all[-1].say_ready()
        with pytest.raises(asynctrt.PoisonError):
            await deadly
    assert engine._front._heap.blocks == 0


async def test_an_engine_that_is_closed_gives_its_shared_memory_back_at_once():
    """Neither the garbage collector nor whoever keeps the engine has to let go of it."""

    def mapped():
        return f" {inode} " in maps.read_text()

    maps = Path("/proc/self/maps")
    gc.disable()
    try:
        async with opened() as engine:
            inode = os.fstat(engine._memory.fd).st_ino
            answer = await engine.infer(np.ones((4000, 4), np.float32))
            assert mapped()
        assert not mapped()
        assert (answer["y"] == 2).all(), "it is the caller's"
        assert engine.statistics().succeeded == 1
    finally:
        gc.enable()
