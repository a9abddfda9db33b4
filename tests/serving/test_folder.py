"""A folder of models in Triton's layout: found, loaded, swapped under load."""

import asyncio
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial

import numpy as np
import orjson
import pytest

from asynctrt._util import loops
from asynctrt.errors import (
    AsynctrtError,
    EngineClosedError,
    ModelError,
    ModelNotFoundError,
    ModelNotReadyError,
    UnknownModelError,
    UsageError,
)
from asynctrt.serving import folder, model_config, models
from asynctrt.serving import repository as repository_module
from asynctrt.serving.folder import ModelFolder
from asynctrt.serving.repository import Repository
from asynctrt.serving.server import Server
from asynctrt.serving.settings import ServerSettings
from tests.contract.test_transports import TRANSPORTS, Call
from tests.helpers import until
from tests.models import double_model, rows, scale_onnx
from tests.serving.support import WAIT_S, ask, settle_grpc

pytestmark = pytest.mark.anyio


@asynccontextmanager
async def loaded(path, *, is_tolerant=False, **kw):
    """A repository of the models in a folder."""
    repository = Repository()
    folder = ModelFolder(path, **kw)
    repository.add_place(folder)
    try:
        async with asyncio.timeout(WAIT_S):
            try:
                await repository.load_all()
            except AsynctrtError:
                if not is_tolerant:
                    raise
            yield repository, folder
    finally:
        await repository.aclose()


async def factor(repository, name="m", version=""):
    return (await repository.find(name, version).engine.infer(rows(1)))["output"][0, 0]


def states(repository):
    return {f"{item['name']}:{item['version']}": item["state"] for item in repository.index()}


def reason(repository, name="m", version="1"):
    (item,) = [item for item in repository.index() if (item["name"], item["version"]) == (name, version)]
    return item["reason"]


async def test_the_layout(tmp_path):
    scale_onnx(tmp_path / "m/1/model.onnx", 2)
    scale_onnx(tmp_path / "m/3/model.onnx", 4)
    scale_onnx(tmp_path / "m/10/model.onnx", 11)
    scale_onnx(tmp_path / "inner/1/model.onnx/model.onnx", 5)
    for other in ("m/010", "m/x", ".git/1", "m/²", "lost+found", "__pycache__"):
        (tmp_path / other).mkdir(parents=True)
    (tmp_path / "README").write_text("no model")
    (tmp_path / "loop").symlink_to("loop")
    async with loaded(tmp_path, settings={"max_rows": 3}) as (repository, _):
        assert states(repository) == {"m:10": "READY", "inner:1": "READY"}
        assert await factor(repository) == 11
        assert await factor(repository, "inner") == 5
        assert repository.find("m").engine.max_rows == 3
        assert repository.is_ready


async def test_a_folder_that_is_a_model_itself(tmp_path):
    """As exporters write it, and as it is mounted from a store of single models."""
    folder = tmp_path / "classifier"
    scale_onnx(folder / "model.onnx", 7)
    (folder / "config.pbtxt").write_text('name: "classifier" max_batch_size: 5')
    (folder / "tokenizer").mkdir()
    async with loaded(folder, settings={"max_rows": 3}) as (repository, place):
        assert states(repository) == {"classifier:1": "READY"}
        assert await factor(repository, "classifier") == 7
        assert repository.find("classifier").engine.max_rows == 5
        scale_onnx(folder / "model.onnx", 8)
        scale_onnx(folder / "other/2/model.onnx", 9)
        await repository.load("classifier")
        assert await factor(repository, "classifier") == 8
        await repository.load("other")
        assert await factor(repository, "other") == 9
        assert await place.names() == ["classifier", "other"]


async def test_a_folder_that_is_no_model_keeps_nothing_from_being_ready(tmp_path, caplog):
    scale_onnx(tmp_path / "m/1/model.onnx", 2)
    (tmp_path / "docs/images").mkdir(parents=True)
    async with loaded(tmp_path) as (repository, folder):
        assert repository.is_ready
        assert states(repository) == {"m:1": "READY"}
        await folder.names()
        assert caplog.text.count("'docs'") == 1


async def test_a_configuration_of_the_models_own(tmp_path):
    for version in (1, 2, 3):
        scale_onnx(tmp_path / f"m/{version}/other.onnx", version)
    (tmp_path / "m/config.pbtxt").write_text(
        'max_batch_size: 5 default_model_filename: "other.onnx" '
        "version_policy { latest { num_versions: 2 } } instance_group { kind: KIND_CPU count: 3 }"
    )
    settings = {"max_rows": 9, "max_delay": 0.25}
    async with loaded(tmp_path, device="cuda:7", settings=settings) as (repository, _):
        assert repository.versions("m") == ["2", "3"]
        options = repository.find("m").engine.options
        assert (options.max_rows, options.contexts, options.max_delay) == (5, 3, 0.25)
        assert repository.find("m").engine.device_name == "host"


@pytest.mark.parametrize(
    ("files", "config", "says"),
    [
        ({}, "", "has no versions"),
        ({"1/model.plan": b"x"}, None, "device='cuda:0'"),
        ({"1/other.onnx": b"x"}, None, r"1/model\.onnx"),
        ({"1/model.onnx": b"x", "1/model.plan": b"x"}, None, "state the backend"),
        ({"1/model.onnx": b"x"}, None, "ONNX Runtime"),
        ({"1/model.onnx": 2}, "max_batch: 3", r"m/config\.pbtxt.*max_batch"),
        ({"1/model.onnx": 2}, "ensemble_scheduling {}", r"m/config\.pbtxt.*ensembles"),
        ({"1/model.onnx": 2}, "version_policy { specific { versions: 7 } }", "names version 7"),
        ({"1/model.onnx": 2}, 'input { name: "input" data_type: TYPE_FP16 dims: 4 }', "it is FP32"),
    ],
)
async def test_what_cannot_be_served_is_listed_with_the_reason(tmp_path, files, config, says):
    (tmp_path / "m").mkdir()
    for name, content in files.items():
        path = tmp_path / "m" / name
        if isinstance(content, int):
            scale_onnx(path, content)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
    if config is not None:
        (tmp_path / "m/config.pbtxt").write_text(config)
    scale_onnx(tmp_path / "n/1/model.onnx", 3)
    async with loaded(tmp_path, is_tolerant=True) as (repository, _):
        with pytest.raises(Exception, match=says):
            await repository.load("m")
        (bad,) = [item for item in repository.index() if item["name"] == "m"]
        assert bad["state"] == "UNAVAILABLE"
        assert not repository.is_ready
        with pytest.raises(ModelNotReadyError, match=says):
            repository.find("m")
        assert await factor(repository, "n") == 3


async def test_loading_again_opens_what_has_changed(tmp_path):
    path = scale_onnx(tmp_path / "m/1/model.onnx", 2)
    scale_onnx(tmp_path / "m/2/model.onnx", 3)
    (tmp_path / "m/config.pbtxt").write_text("version_policy { all {} }")
    async with loaded(tmp_path) as (repository, _):
        first, second = (repository.find("m", version).engine for version in "12")
        (tmp_path / "m/config.pbtxt").write_text("version_policy { all {} } # a comment changes nothing")
        await repository.load("m")
        assert [repository.find("m", version).engine for version in "12"] == [first, second]
        scale_onnx(path, 5)
        await repository.load("m")
        assert repository.find("m", "2").engine is second
        assert await factor(repository, version="1") == 5
        await until(lambda: first.state == "closed")
        (tmp_path / "m/config.pbtxt").write_text("max_batch_size: 2")
        await repository.load("m")
        assert states(repository) == {"m:2": "READY"}
        assert repository.find("m").engine.max_rows == 2
        with pytest.raises(UnknownModelError):
            repository.find("m", "1")
        await until(lambda: second.state == "closed")


async def test_what_is_broken_changes_nothing(tmp_path):
    path = scale_onnx(tmp_path / "m/1/model.onnx", 2)
    (tmp_path / "m/config.pbtxt").write_text("version_policy { latest { num_versions: 2 } }")
    async with loaded(tmp_path) as (repository, _):
        engine = repository.find("m").engine
        whole = path.read_bytes()
        scale_onnx(tmp_path / "m/2/model.onnx", 9)
        (tmp_path / "m/3").mkdir()
        (tmp_path / "m/3/model.onnx").write_bytes(whole[: len(whole) // 2])
        with pytest.raises(ModelError, match=r"m/3/model\.onnx"):
            await repository.load("m")
        assert repository.find("m").engine is engine, "not the good one of two new ones alone either"
        assert states(repository) == {"m:1": "READY", "m:2": "UNAVAILABLE", "m:3": "UNAVAILABLE"}
        assert "3/model.onnx" in reason(repository, version="3")
        assert repository.is_ready, "what was never served is not missed"
        shutil.rmtree(tmp_path / "m/3")
        path.write_bytes(b"broken")
        with pytest.raises(ModelError, match=r"m/1/model\.onnx"):
            await repository.load("m")
        assert repository.find("m").engine is engine
        assert states(repository)["m:1"] == "READY"
        assert "1/model.onnx" in reason(repository)
        (tmp_path / "m/config.pbtxt").write_text("nonsense: 1")
        with pytest.raises(ModelError, match="nonsense"):
            await repository.load("m")
        shutil.rmtree(tmp_path / "m")
        with pytest.raises(UnknownModelError):
            await repository.load("m")
        assert await factor(repository) == 2
        scale_onnx(path, 7)
        await repository.load("m")
        assert (await factor(repository), reason(repository)) == (7, "")
        await until(lambda: engine.state == "closed")


async def test_a_file_that_changes_while_it_is_loaded(tmp_path):
    path = scale_onnx(tmp_path / "m/1/model.onnx", 2)
    async with loaded(tmp_path) as (repository, folder):
        find = folder.versions

        async def versions(name):
            (version, source), *_ = (await find(name)).items()

            async def opened():
                engine = await source.opener()
                scale_onnx(path, 4)
                return engine

            return {version: type(source)(opened, source.mark)}

        scale_onnx(path, 3)
        folder.versions = versions
        with pytest.raises(ModelError, match="changed while it was being loaded"):
            await repository.load("m")
        assert await factor(repository) == 2


async def test_new_models_are_found_when_they_are_asked_for(tmp_path):
    scale_onnx(tmp_path / "m/1/model.onnx", 2)
    async with loaded(tmp_path) as (repository, _):
        scale_onnx(tmp_path / "n/1/model.onnx", 3)
        with pytest.raises(UnknownModelError):
            repository.find("n")
        for name in ("..", "../" + tmp_path.name, "", ".", "o"):
            with pytest.raises(UnknownModelError):
                await repository.load(name)
        await repository.load("n")
        assert await factor(repository, "n") == 3
        await repository.unload("n")
        assert states(repository) == {"m:1": "READY", "n:1": "UNAVAILABLE"}
        assert repository.is_ready
        await repository.load("n")
        assert await factor(repository, "n") == 3


async def test_names_that_two_places_have(tmp_path):
    scale_onnx(tmp_path / "a/m/1/model.onnx", 2)
    scale_onnx(tmp_path / "b/m/1/model.onnx", 3)
    async with loaded(tmp_path / "a") as (repository, _):
        with pytest.raises(UsageError, match="come from"):
            repository.add("m", version="2", opener=double_model)
        repository.add_place(ModelFolder(tmp_path / "b"))
        with pytest.raises(UsageError, match="has the name of another"):
            await repository.load_all()
    repository = Repository()
    repository.add_place(ModelFolder(tmp_path / "nowhere"))
    with pytest.raises(ModelNotFoundError, match="nowhere"):
        await repository.load_all()


async def test_closing_while_a_version_is_loaded_and_another_drains(tmp_path):
    path = scale_onnx(tmp_path / "m/1/model.onnx", 2)
    async with loaded(tmp_path) as (repository, folder):
        before = repository.find("m").engine
        scale_onnx(path, 3)
        await repository.load("m")
        after = repository.find("m").engine
        scale_onnx(path, 4)
        find, closing = folder.versions, []

        async def versions(name):
            closing.append(asyncio.create_task(repository.aclose()))
            await closing[0]
            return await find(name)

        folder.versions = versions
        with pytest.raises(EngineClosedError):
            await repository.load("m")
        assert (before.state, after.state) == ("closed", "closed")
        assert not list(repository)


def links(model):
    (model / "1").mkdir(parents=True)
    (model / "1/a").symlink_to(".")
    (model / "1/b").symlink_to(".")


def pipe(model, name="config.pbtxt"):
    (model / "1").mkdir(parents=True)
    os.mkfifo(model / name)


def large(model):
    scale_onnx(model / "1/model.onnx", 2)
    with (model / "config.pbtxt").open("wb") as file:
        file.truncate(64 << 30)


def endless(model):
    scale_onnx(model / "1/model.onnx", 2)
    (model / "config.pbtxt").symlink_to("/dev/zero")


def nested(model):
    scale_onnx(model / "1/model.onnx", 2)
    (model / "config.pbtxt").write_text("input {" * 10_000)


def long_name(model):
    scale_onnx(model / "1/model.onnx", 2)
    (model / "config.pbtxt").write_text(f'default_model_filename: "{"x" * 300}"')


def not_text(model):
    (model / "1").mkdir(parents=True)
    (model / "1/model.onnx").write_bytes(b"\x08\xff" * 1000)


def link_out(model):
    scale_onnx(model.parents[1] / "secret/1/model.onnx", 2)
    model.symlink_to(model.parents[1] / "secret")


def version_out(model):
    scale_onnx(model.parents[1] / "secret/1/model.onnx", 2)
    model.mkdir()
    (model / "1").symlink_to(model.parents[1] / "secret/1")


def file_out(model):
    scale_onnx(model.parents[1] / "secret/1/model.onnx", 2)
    (model / "1").mkdir(parents=True)
    (model / "1/model.onnx").symlink_to(model.parents[1] / "secret/1/model.onnx")


def config_out(model):
    scale_onnx(model / "1/model.onnx", 2)
    (model.parents[1] / "config").write_text("max_batch_size: 3")
    (model / "config.pbtxt").symlink_to(model.parents[1] / "config")


BAD_MODELS = {
    "links to themselves": links,
    "a pipe for a configuration": pipe,
    "a pipe for a model": partial(pipe, name="1/model.onnx"),
    "a large configuration": large,
    "an endless configuration": endless,
    "a nested configuration": nested,
    "a long name": long_name,
    "no model": not_text,
    "a link out": link_out,
    "a version that is a link out": version_out,
    "a file that is a link out": file_out,
    "a configuration that is a link out": config_out,
}


class TestOwnersHarmThemselves:
    @pytest.mark.parametrize("plant", BAD_MODELS.values(), ids=BAD_MODELS)
    async def test_a_bad_model_is_listed_and_keeps_no_other_waiting(self, tmp_path, plant):
        scale_onnx(tmp_path / "all/good/1/model.onnx", 2)
        plant(tmp_path / "all/evil")
        async with loaded(tmp_path / "all", is_tolerant=True) as (repository, _):
            assert states(repository)["good:1"] == "READY"
            (bad,) = [item for item in repository.index() if item["name"] == "evil"]
            assert bad["state"] == "UNAVAILABLE"
            orjson.dumps(bad)
            assert str(tmp_path) not in bad["reason"]
            scale_onnx(tmp_path / "all/new/1/model.onnx", 3)
            await repository.load("new")
            assert await factor(repository, "new") == 3

    async def test_links_within_the_folder_are_followed(self, tmp_path):
        """As in a volume of Kubernetes, which is swapped by one link."""
        scale_onnx(tmp_path / "all/..2026/m/1/model.onnx", 2)
        (tmp_path / "all/..data").symlink_to("..2026")
        (tmp_path / "all/m").symlink_to("..data/m")
        (tmp_path / "link").symlink_to("all")
        async with loaded(tmp_path / "link") as (repository, _):
            assert await factor(repository) == 2

    @pytest.mark.parametrize("name", [b"caf\xe9", b"a\nb", b"\x1b[2J", b"\x9b", "\u202egpj".encode()])
    async def test_a_name_that_cannot_be_shown_is_no_models(self, tmp_path, caplog, name):
        scale_onnx(tmp_path / "good/1/model.onnx", 2)
        scale_onnx(tmp_path / os.fsdecode(name) / "1/model.onnx", 2)
        async with loaded(tmp_path) as (repository, folder):
            for _ in range(2):
                await folder.names()
            assert states(repository) == {"good:1": "READY"}
            assert caplog.text.count("not printable") == 1
        with pytest.raises(UsageError, match="printable"):
            repository.add(os.fsdecode(name))

    @pytest.mark.parametrize("name", ["files_mark", "read_model_config"])
    async def test_a_model_that_hangs_keeps_no_other_waiting(self, tmp_path, monkeypatch, name):
        scale_onnx(tmp_path / "evil/1/model.onnx", 2)
        scale_onnx(tmp_path / "good/1/model.onnx", 2)
        hangs = threading.Event()

        def files_mark(path):
            if path.parent.name == "evil":
                hangs.wait(WAIT_S)
            return models.files_mark(path)

        def read_model_config(folder, within):
            if folder.name == "evil":
                hangs.wait(WAIT_S)
            return model_config.read_model_config(folder, within)

        try:
            async with loaded(tmp_path) as (repository, _):
                monkeypatch.setattr(folder, name, locals()[name])
                scale_onnx(tmp_path / "evil/1/model.onnx", 3)
                hanging = asyncio.create_task(repository.load("evil"))
                scale_onnx(tmp_path / "good/1/model.onnx", 3)
                scale_onnx(tmp_path / "zzz/1/model.onnx", 4)
                for other in ("zzz", "good"):
                    await repository.load(other)
                assert states(repository)["zzz:1"] == "READY"
                assert await factor(repository, "good") == 3
                assert not hanging.done()
                hanging.cancel()
                await asyncio.wait([hanging])
        finally:
            hangs.set()

    async def test_a_model_that_hangs_at_the_start_keeps_no_other_waiting(self, tmp_path, monkeypatch):
        monkeypatch.setattr(repository_module, "ALONE_S", 0.01)
        repository, hangs = Repository(), asyncio.Event()

        async def opener():
            await hangs.wait()
            raise ModelError("at last")

        repository.add("evil", opener=opener)
        repository.add_place(ModelFolder(tmp_path))
        scale_onnx(tmp_path / "good/1/model.onnx", 2)
        loading = asyncio.create_task(repository.load_all())
        await until(lambda: states(repository).get("good:1") == "READY")
        hangs.set()
        with pytest.raises(ModelError, match="at last"):
            await loading
        await repository.aclose()

    async def test_a_load_for_which_there_is_no_thread_changes_nothing(self, tmp_path, monkeypatch):
        scale_onnx(tmp_path / "m/1/model.onnx", 2)

        class Refused(threading.Thread):
            def start(self):
                raise RuntimeError("can't start new thread")

        async with loaded(tmp_path) as (repository, _):
            scale_onnx(tmp_path / "m/1/model.onnx", 3)
            with monkeypatch.context() as patch:
                patch.setattr(loops, "Thread", Refused)
                with pytest.raises(ModelError, match="can't start new thread"):
                    await repository.load("m")
            assert await factor(repository) == 2
            await repository.load("m")
            assert await factor(repository) == 3

    async def test_loading_takes_no_thread_of_the_requests(self, tmp_path):
        scale_onnx(tmp_path / "m/1/model.onnx", 2)
        hangs = threading.Event()
        executor = ThreadPoolExecutor(1)
        asyncio.get_running_loop().set_default_executor(executor)
        hanging = asyncio.create_task(asyncio.to_thread(hangs.wait, WAIT_S))
        try:
            async with loaded(tmp_path) as (repository, _):
                scale_onnx(tmp_path / "m/1/model.onnx", 3)
                await repository.load("m")
                assert await factor(repository) == 3
        finally:
            hangs.set()
            await hanging
            executor.shutdown()


class Callers:
    """Callers over three protocols that check each answer against what may have given it.

    The model multiplies by a factor that only grows: ``least`` is served already, ``most`` may be.
    """

    def __init__(self, server):
        self.server = server
        self.least = self.most = 1
        self.answers = dict.fromkeys(("http", "websocket", "grpc"), 0)
        self.is_over = False

    async def call(self, transport):
        kind, options = TRANSPORTS[transport]
        client = kind(self.server, "", **options)

        async def one(caller):
            number = caller
            while not self.is_over:
                # More rows than a batch holds are split.
                given = np.full((11 if number % 5 == 0 else 1 + number % 3, 4), 1.0, np.float32)
                least, number = self.least, number + 1
                answer = await client.ask(Call({"input": given}, "m", id=str(caller)))
                output = answer.outputs["output"]
                assert output.shape == given.shape
                assert set(output.flat) <= set(range(least, self.most + 1)), output
                assert len(set(output.flat)) == 1, "all rows of an answer are of one version"
                self.answers[transport] += 1

        async with asyncio.TaskGroup() as tasks:
            for caller in range(4):
                tasks.create_task(one(caller))
        await client.leave()


async def test_swaps_under_load_lose_no_request_and_mix_up_no_answer(tmp_path):
    path = scale_onnx(tmp_path / "m/1/model.onnx", 1, work=8)
    folder = ModelFolder(tmp_path, settings={"max_rows": 4, "contexts": 1})
    repository = Repository()
    repository.add_place(folder)
    settings = ServerSettings(http_port=0, grpc_port=0, model_control=True)
    async with asyncio.timeout(WAIT_S), Server(repository, settings) as server:
        await repository.load_all()
        callers = Callers(server)
        async with asyncio.TaskGroup() as tasks:
            for transport in callers.answers:
                tasks.create_task(callers.call(transport))
            for count in range(2, 8):
                before = dict(callers.answers)
                callers.most = count
                good = scale_onnx(path, count, work=8).read_bytes()
                status, _, body = await ask(server, "/v2/repository/models/m/load", method="POST")
                assert status == 200, body
                callers.least = count
                path.write_bytes(good[:-20])
                status, _, body = await ask(server, "/v2/repository/models/m/load", method="POST")
                assert status == 400
                assert b"1/model.onnx" in body
                await until(partial(answered_more, callers.answers, before))
            callers.is_over = True
        # What was taken over a third protocol is answered too: all three had answers from every version.
        assert min(callers.answers.values()) >= 6
        assert len(list(repository)) == 1
    await settle_grpc()


def answered_more(answers, before):
    return all(answers[protocol] > before[protocol] for protocol in answers)


async def test_it_is_not_ready_before_it_has_looked_for_models(tmp_path):
    """A server listens before it looks: who asks then must not be told that all is there."""
    scale_onnx(tmp_path / "m" / "1" / "model.onnx", 2)
    repository = Repository()
    repository.add_place(ModelFolder(tmp_path))
    try:
        assert not repository.is_ready
        async with asyncio.timeout(WAIT_S):
            assert await repository.look_for_models() == ["m"]
            assert not repository.is_ready
            await repository.load_all()
        assert repository.is_ready
        (tmp_path / "later").mkdir()
        repository.add_place(ModelFolder(tmp_path / "later"))
        assert repository.is_ready
    finally:
        await repository.aclose()


async def test_it_is_ready_with_what_was_asked_for_by_name(tmp_path):
    for name in ("a", "b"):
        scale_onnx(tmp_path / name / "1" / "model.onnx", 2)
    repository = Repository()
    repository.add_place(ModelFolder(tmp_path))
    try:
        async with asyncio.timeout(WAIT_S):
            await repository.load("a")
        assert repository.is_ready
    finally:
        await repository.aclose()
