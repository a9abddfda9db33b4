"""The README and the pages of docs/ are right: snippets run, tables are of the code, links lead somewhere."""

import ast
import asyncio
import pkgutil
import re
import tomllib
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest
import typer

import asynctrt
from asynctrt.cli.app import LOAD_FLAGS, app
from asynctrt.loadtest.session import SETTING_NAMES
from asynctrt.options import Options
from asynctrt.serving.command import configure, read_config
from asynctrt.serving.settings import ServerSettings
from tests.benchmarks import pictures, tables
from tests.helpers import needed, until
from tests.models import double_model, double_onnx, rows
from tests.serving.test_asgi import running
from tests.serving.test_disconnect import post
from tests.test_rows import voice_onnx

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
DOCUMENTS = {document.name: document.read_text() for document in tables.DOCUMENTS}
FENCED = re.compile(r"```python\n(.*?)```", re.DOTALL)
SHELL = re.findall(r"```sh\n(.*?)\n```", README, re.DOTALL)
pytestmark = pytest.mark.anyio


def snippets():
    """Yield each fenced block of Python, but those that need a server: `test_the_client_of_the_readme` and
    ``test_clients_page`` run them."""
    for name, text in DOCUMENTS.items():
        for number, snippet in enumerate(FENCED.findall(text)):
            # Those with asynctrt.ray need its cluster: see `test_ray`.
            if "://127.0.0.1:8000" not in snippet and "asynctrt.ray" not in snippet:
                yield pytest.param(name, snippet, id=f"{name}-{number}")


def names_of(page, containing):
    """Run a page's one snippet that contains a text in an empty namespace; return what it defines."""
    (snippet,) = (text for text in FENCED.findall(DOCUMENTS[page]) if containing in text)
    if "fastapi" in snippet:
        needed(_is_here("fastapi"), "FastAPI is missing: pip install -e '.[dev]'")
    names = {}
    exec(compile(snippet, page, "exec"), names)
    return names


def _is_here(module):
    try:
        __import__(module)
    except ImportError:
        return False
    return True


@pytest.mark.parametrize(("page", "snippet"), list(snippets()))
def test_each_snippet_runs_by_itself(page, snippet, beside_a_model):
    """Each in an empty namespace, as it stands; those that define functions are called below."""
    if "fastapi" in snippet:
        needed(_is_here("fastapi"), "FastAPI is missing: pip install -e '.[dev]'")
    exec(compile(snippet, page, "exec"), {"__name__": "__main__"})


def test_the_eight_lines_say_what_they_should(capsys):
    snippet = FENCED.findall(README)[0]
    assert len([line for line in snippet.splitlines() if line]) == 8
    exec(snippet, {})
    assert re.findall(r"\d+", capsys.readouterr().out.replace("int64", "")) == [
        str(2 * n) for n in range(100)
    ]


async def test_the_client_of_the_readme(tmp_path, capsys):
    (snippet,) = (text for text in FENCED.findall(README) if "connect(" in text)
    engine = await asynctrt.open(double_onnx(tmp_path / "model.onnx"))
    async with engine, running_model(engine) as where:
        names = {}
        script = snippet.replace("127.0.0.1:8000", where).replace("asyncio.run(main())", "")
        exec(script, names)
        await names["main"]()
    assert "[2., 2., 2., 2.]" in capsys.readouterr().out


def running_model(engine):
    """Serve an engine as the model `model`; gives the address."""
    from asynctrt.serving import kserve_app

    return running(kserve_app(engine))


async def test_an_engine_for_urgent_requests_has_a_part_of_the_device():
    device = asynctrt.HostDevice(threads=4)
    async with names_of("deadlines.md", "divided")["divided"](double_model(), device) as engines:
        for engine in engines:
            np.testing.assert_array_equal((await engine.infer(rows(1, 2)))["output"], 2 * rows(1, 2))
            assert engine.statistics().succeeded == 1


async def test_callers_of_a_model_with_rows_on_another_axis_share_batches(tmp_path, capsys):
    names = names_of("rows.md", "voice_in")
    pieces = np.ones((3, 576), np.float32)

    async def listen(engine):
        return [found async for found in names["voice_in"](engine, pieces)]

    path = voice_onnx(tmp_path / "silero_vad.onnx", samples=576, width=128)
    async with names["open_detector"](path) as engine:
        found = await asyncio.gather(*[listen(engine) for _ in range(8)])
        batches = engine.statistics().batches
    assert found == [[16000.0] * 3] * 8
    assert batches < 24


async def test_what_was_found_of_rows_is_printed(tmp_path, capsys):
    await names_of("rows.md", "what_was_found")["what_was_found"](double_onnx(tmp_path / "model.onnx"))
    assert capsys.readouterr().out.startswith(
        "True made-up rows had the same answers alone and beside others"
    )


async def test_a_websocket_by_hand_and_with_the_client(tmp_path):
    names = names_of("websocket.md", "by_hand")
    async with (
        asynctrt.open(double_onnx(tmp_path / "model.onnx")) as engine,
        running_model(engine) as where,
    ):
        by_hand = await names["by_hand"](f"ws://{where}/v2/ws", [1.0, 2.0, 3.0, 4.0])
        with_client = await names["with_the_client"](f"ws://{where}/v2/ws", rows(4))
    assert by_hand == [2.0, 4.0, 6.0, 8.0]
    assert with_client.tolist() == rows(8).tolist()


@pytest.fixture
def beside_a_model(tmp_path, monkeypatch):
    """Make `model.onnx` in the working directory."""
    double_onnx(tmp_path / "model.onnx")
    monkeypatch.chdir(tmp_path)


RECIPES = {
    "README.md": "def explain",
    "embedding.md": "kserve_app(find_engine)",
    "observability.md": "def explain",
}
"""What each page's recipe for FastAPI has, and no other snippet of the page."""


@pytest.mark.parametrize("page", RECIPES)
async def test_a_model_in_fastapi(page, monkeypatch, beside_a_model):
    import aiohttp

    monkeypatch.setattr(asynctrt, "tune_process", lambda: None)  # It would be for all tests of this process.
    names = names_of(page, RECIPES[page])
    async with running(names["app"]) as where, aiohttp.ClientSession(f"http://{where}") as client:
        async with client.post("/predict", json=[1, 2, 3, 4]) as answer:
            assert (answer.status, await answer.json()) == (200, [2.0, 4.0, 6.0, 8.0])
        async with client.post("/predict", json=[1, 2]) as answer:
            assert (answer.status, "4" in (await answer.json())["error"]) == (400, True)
        for too_large in ([1e39, 2, 3, 4], ["a"]):
            async with client.post("/predict", json=too_large) as answer:
                assert answer.status in (400, 422)
        if page != "embedding.md":
            return
        async with client.get("/kserve/v2/health/ready") as answer:
            assert answer.status == 200


@pytest.mark.parametrize("page", RECIPES)
async def test_a_client_of_fastapi_that_hangs_up(page, monkeypatch, beside_a_model):
    monkeypatch.setattr(asynctrt, "tune_process", lambda: None)
    device, opened, engines = asynctrt.testing.LatchDevice(), asynctrt.open, []

    @asynccontextmanager
    async def open_held(path, **options):
        async with opened(path, device=device, **options) as engine:
            engines.append(engine)
            yield engine

    monkeypatch.setattr(asynctrt, "open", open_held)

    async with running(names_of(page, RECIPES[page])["app"]) as where:
        _, writer = await post(where, [1, 2, 3, 4])
        await device.wait_held(1)
        writer.close()
        await until(lambda: engines[0].statistics().cancelled == 1)
        device.open()


async def test_what_a_client_of_fastapi_is_told(monkeypatch, beside_a_model):
    import aiohttp

    monkeypatch.setattr(asynctrt, "tune_process", lambda: None)
    device, opened = asynctrt.testing.LatchDevice(), asynctrt.open

    def open_held(path, **options):
        return opened(path, device=device, **options | {"max_queue_rows": 1, "max_rows": 1, "contexts": 1})

    monkeypatch.setattr(asynctrt, "open", open_held)
    app = names_of("embedding.md", "kserve_app(find_engine)")["app"]

    async with running(app) as where, aiohttp.ClientSession(f"http://{where}") as client:

        async def told(values):
            async with client.post("/predict", json=values) as answer:
                return answer.status, answer.headers.get("Retry-After"), await answer.json()

        in_flight = asyncio.create_task(told([1, 2, 3, 4]))
        await device.wait_held(1)
        queued = asyncio.create_task(told([1, 2, 3, 4]))
        engine = app.state.engine
        await until(lambda: engine.statistics().queued_requests == 1)
        full = await told([1, 2, 3, 4])
        late = await queued
        device.open()
        answered, wrong, unread = await in_flight, await told([1, 2]), await told(["a"])
    assert (full[0], full[1]) == (503, "1")
    assert (late[0], late[1], "timeout" in late[2]["error"]) == (504, None, True)
    assert answered == (200, None, [2.0, 4.0, 6.0, 8.0])
    assert (wrong[0], "'input'" in wrong[2]["error"]) == (400, True)
    assert unread[0] == 422


async def test_metrics_and_spans_of_an_application(beside_a_model):
    import aiohttp

    app = names_of("observability.md", "FastAPI")["app"]
    async with running(app) as where, aiohttp.ClientSession(f"http://{where}") as client:
        async with client.post("/predict", json=[1, 2, 3, 4]) as answer:
            assert await answer.json() == [2.0, 4.0, 6.0, 8.0]
        async with client.post("/predict", json=[1, 2]) as answer:
            assert answer.status == 400
        async with client.get("/metrics/") as answer:
            found = await answer.text()
    assert 'nv_inference_count{model="classifier",version="1"} 1.0' in found


async def test_several_models_in_fastapi(beside_a_model):
    import aiohttp

    app = names_of("embedding.md", "AsyncExitStack")["app"]
    async with running(app) as where, aiohttp.ClientSession(f"http://{where}") as client:
        for name in ("detector", "classifier"):
            async with client.post(f"/{name}/predict", json=[1, 2, 3, 4]) as answer:
                assert await answer.json() == [2.0, 4.0, 6.0, 8.0]
        for name, values in (("detector", [1]), ("other", [1, 2, 3, 4])):
            async with client.post(f"/{name}/predict", json=values) as answer:
                assert answer.status in (400, 422)


async def test_a_model_in_starlette(beside_a_model):
    from asynctrt.client import connect

    app = names_of("embedding.md", "app = Starlette(")["app"]
    async with running(app) as where, connect(f"ws://{where}/kserve/v2/ws") as client:
        found = await client.infer("model", {"input": rows(4)})
    assert found["output"].tolist() == rows(8).tolist()


async def test_on_a_gpu(tmp_path):
    on_a_gpu = names_of("README.md", "on_a_gpu")["on_a_gpu"]
    result = await on_a_gpu(double_onnx(tmp_path / "model.onnx"), rows(3), "host")
    assert result["output"].tolist() == rows(6).tolist()


async def test_the_model_beside_the_examples_doubles(tmp_path):
    """It is what the README and the tutorial copy."""
    async with asynctrt.open(ROOT / "examples" / "model.onnx") as engine:
        found = await engine.infer(rows(3))
    assert found["output"].tolist() == rows(6).tolist()


def test_what_two_extras_need_is_the_same_version():
    """A client alone has to work as it does beside a server."""
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    needs = {}
    for extra in ("client", "serve", "load"):
        for need in extras[extra]:
            needs.setdefault(re.split("[>=]", need)[0], set()).add(need)
    assert [versions for versions in needs.values() if len(versions) > 1] == []


def test_batching_priorities_overload(capsys, beside_a_model):
    result = names_of("calls.md", "careful")["result"]
    assert result["output"].tolist() == [[2.0] * 4] * 3
    assert "succeeded=1" in capsys.readouterr().out


def test_a_function_as_a_model():
    assert (asyncio.run(names_of("calls.md", "use_it")["use_it"]())["y"] == 2).all()


async def test_errors_around_a_call(tmp_path):
    answer = names_of("errors.md", "answer")["answer"]
    async with asynctrt.open(double_onnx(tmp_path / "model.onnx")) as engine:
        answered = await answer(engine, rows(4))
        status, said = await answer(engine, rows(4)[:, :2])
    assert answered["output"].tolist() == rows(8).tolist()
    assert (status, "input" in said) == (400, True)


async def test_a_configuration_of_triton_is_as_the_page_says(tmp_path):
    """The config.pbtxt of the page, read, has the options of the snippet beside it."""
    from asynctrt.serving.model_config import read_model_config

    (text,) = re.findall(r"```\n(name: .*?)```", DOCUMENTS["migrating.md"], re.DOTALL)
    folder = tmp_path / "classifier"
    folder.mkdir()
    (folder / "config.pbtxt").write_text(text)
    config = read_model_config(folder)
    opening = names_of("migrating.md", "def classifier")["classifier"](
        double_onnx(tmp_path / "m.onnx"), "host"
    )
    async with opening as engine:
        options = engine.options
    assert config.device == "cuda:0"
    stated = config.options_on(config.device)
    assert set(stated) >= {
        "max_rows",
        "max_delay",
        "arenas",
        "contexts",
        "priorities",
        "timeout",
        "max_queue_rows",
    }
    assert {name: getattr(options, name) for name in stated} == stated


def test_the_configuration_is_one(tmp_path):
    (text,) = re.findall(r"```toml\n(.*?)```", DOCUMENTS["serving.md"], re.DOTALL)
    path = tmp_path / "serve.toml"
    path.write_text(text)
    planned = configure({}, read_config(path))
    assert planned.settings.tokens == ("s3cret",)
    (model,) = planned.models
    assert (model.name, model.version, model.settings["max_rows"]) == ("classifier", "2", 16)
    assert model.path == str(tmp_path / "classifier.onnx")


def test_every_port_and_flag_that_is_named_is_there():
    settings, page = ServerSettings(), DOCUMENTS["serving.md"]
    assert f"127.0.0.1:{settings.http_port}/v2" in page
    assert f"127.0.0.1:{settings.grpc_port}" in page
    flags = re.findall(r"`--([\w-]+)`", page)
    assert len(flags) > 20
    for flag in flags:
        assert hasattr(settings, flag.replace("-", "_")) or flag in ("config", "check")


def test_ci_runs_the_test_command():
    assert SHELL[1] in (ROOT / ".ci" / "run").read_text().splitlines()


def test_the_commands_name_extras_that_there_are():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    commands = [
        one for text in DOCUMENTS.values() for one in re.findall(r"```sh\n(.*?)\n```", text, re.DOTALL)
    ]
    assert len(commands) > 8
    for command in commands:
        for named in re.findall(r"\.\[([\w,]+)\]", command):
            assert set(named.split(",")) <= set(extras)
    for extra in extras:
        assert f"`{extra}`" in DOCUMENTS["installing.md"]


async def test_an_estimator_as_a_model():
    class Estimator:
        """Has the method of scikit-learn's classifiers."""

        def predict_proba(self, features):
            return np.stack([features[:, 0], 1 - features[:, 0]], axis=1)

    served = names_of("howto-models.md", "predict_proba")["served"]
    async with asynctrt.open(served(Estimator(), 3, 2)) as engine:
        found = await engine.infer(np.full((1, 3), 0.25))
    assert found["probabilities"].tolist() == [[0.25, 0.75]]


async def test_a_detector_in_an_endpoint():
    names = names_of("howto-models.md", "boxes_of")
    seen = []

    def detector(inputs):
        seen.append((inputs["images"].shape[1:], inputs["images"].max()))
        output = np.zeros((len(inputs["images"]), 4 + 2, 3), np.float32)
        output[:, :4, 1] = 1, 2, 3, 4
        output[:, 5, 1] = 0.75
        return output

    model = asynctrt.FunctionModel(
        detector,
        inputs=asynctrt.TensorSpec("images", "float32", (3, 640, 640)),
        outputs=asynctrt.TensorSpec("output0", "float32", (6, 3)),
    )
    async with asynctrt.open(model) as engine:
        boxes, classes, scores = await names["detect"](engine, np.full((640, 640, 3), 255, np.uint8))
    assert (boxes.tolist(), classes.tolist(), scores.tolist()) == ([[1, 2, 3, 4]], [1], [0.75])
    assert seen == [((3, 640, 640), 1)]


async def test_an_encoder_in_an_endpoint():
    names = names_of("howto-models.md", "embedding")

    def tokenizer(text, **given):
        ids = np.array([[len(word) for word in text.split()]], np.int64)
        return {"input_ids": ids, "token_type_ids": 0 * ids}

    model = asynctrt.FunctionModel(
        lambda inputs: np.stack([inputs["input_ids"].astype(np.float32)] * 2, axis=-1),
        inputs=asynctrt.TensorSpec("input_ids", "int64", ("sequence",)),
        outputs=asynctrt.TensorSpec("last_hidden_state", "float32", ("sequence", 2)),
    )
    async with names["encoder"](model) as engine:
        texts = ("three short words", "one")
        found = await asyncio.gather(*[names["embedding"](engine, tokenizer, text) for text in texts])
    assert [one.tolist() for one in found] == [[5, 5], [3, 3]]


async def test_recordings_share_a_call_of_their_pipeline():
    def pipe(recordings, batch_size):
        assert len(recordings) == batch_size
        return [{"text": f"{len(samples)} samples"} for samples in recordings]

    transcribe = names_of("howto-models.md", "transcriber")["transcriber"](pipe)

    async with transcribe:
        found = await asyncio.gather(*[transcribe(np.zeros(count, np.float32)) for count in (3, 5)])
    assert found == ["3 samples", "5 samples"]


async def test_options_of_onnxruntime(tmp_path, beside_a_model):
    for snippet in FENCED.findall(DOCUMENTS["onnx-runtime.md"]):
        names = {"asynctrt": asynctrt, "np": np}
        exec(snippet, names)
        for name in {"main", "with_a_session"} & set(names):
            assert (await names[name]())["output"].tolist() == [[0.0] * 4]
    for text in re.findall(r"```toml\n(.*?)```", DOCUMENTS["onnx-runtime.md"], re.DOTALL):
        (tmp_path / "serve.toml").write_text(text if "[[" in text[:2] else f"[[models]]\npath = 'm'\n{text}")
        (source,) = configure({}, read_config(tmp_path / "serve.toml")).models
        assert Options(**source.settings).onnx != asynctrt.OnnxOptions()


async def test_a_load_test_in_an_applications_tests(tmp_path):
    is_fast_enough = names_of("load-testing.md", "is_fast_enough")["is_fast_enough"]
    async with asynctrt.open(double_onnx(tmp_path / "model.onnx")) as engine:
        holds, latency = await is_fast_enough(engine)
    assert holds == (latency["p99"] < 250)


def test_every_flag_of_a_load_test_that_is_named_is_there():
    known = {*SETTING_NAMES, *(flag[0] for flag in LOAD_FLAGS), "fail_if"}  # The last is of compare.
    flags = re.findall(r"--([a-z][\w-]*)", DOCUMENTS["load-testing.md"])
    assert len(flags) > 25
    assert {flag.replace("-", "_") for flag in flags} <= known


def test_every_flag_of_every_command_is_there():
    commands = typer.main.get_command(app).commands
    found = [
        (page, command, flag)
        for page, text in DOCUMENTS.items()
        for command, rest in re.findall(r"\basynctrt (\w+)\b([^`\n#]*)", text)
        for flag in re.findall(r"(?<!\S)(--[a-z][\w-]*)", rest)
        if command in commands
    ]
    flags = {
        command: {"--help"}.union(*[{*option.opts, *option.secondary_opts} for option in described.params])
        for command, described in commands.items()
    }
    assert len(found) > 30
    assert [one for one in found if one[2] not in flags[one[1]]] == []


ELSEWHERE = re.compile(
    r"asynctrt\.(model|rows|batch_rows|queue_s|compute_s|launched_ns|d\.ts|js|service|socket|tensorrt|ray)\b"
)
"""Attributes of spans, files and a logger are not names of Python; `test_ray` runs the page about Ray."""


def test_every_name_of_the_package_is_there():
    for page, text in DOCUMENTS.items():
        for name in sorted(set(re.findall(r"(?<![\w/@.-])asynctrt(?:\.\w+)+", text))):
            if not ELSEWHERE.match(name):
                assert resolved(name), f"{page} names {name}"


def resolved(name):
    """Return whether a dotted name is that of a module, or of an attribute of one."""
    try:
        pkgutil.resolve_name(name)
    except (AttributeError, ImportError):
        return False
    return True


def test_each_fragment_of_python_compiles():
    """Fragments that need what a test does not have, such as PyTorch, are fenced as ``py``."""
    for page, text in DOCUMENTS.items():
        for fragment in re.findall(r"```py\n(.*?)```", text, re.DOTALL):
            compile(fragment, page, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


def test_every_link_to_a_file_leads_to_one():
    for document in tables.DOCUMENTS:
        text = re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)
        for target in re.findall(r"\]\((?!https:)([^)#\s]+)", text):
            assert (document.parent / target).exists(), f"{document.name} links to {target}"


def test_every_link_to_a_heading_leads_to_one():
    plain = {path: re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL) for path in tables.DOCUMENTS}
    headings = {
        path.name: {
            re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-")
            for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)
        }
        for path, text in plain.items()
    }
    found = [
        (path.name, Path(target).name or path.name, anchor)
        for path, text in plain.items()
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#([^)\s]+)\)", text)
    ]
    assert len(found) > 20
    assert [one for one in found if one[2] not in headings[one[1]]] == []


def test_the_readme_is_short():
    assert len(README.split()) <= 900


TEXT = (DOCUMENTS["benchmarks.md"] + DOCUMENTS["benchmarks-gpu.md"]).replace("\n", " ")


def test_the_tables_are_generated():
    texts = {document: document.read_text() for document in tables.DOCUMENTS}
    named = set(re.findall(r"<!-- table: ([\w-]+) -->", "".join(texts.values())))
    assert named == set(tables.TABLES)
    for document, text in texts.items():
        assert tables.filled(text) == text, f"{document.name} differs: python -m tests.benchmarks.tables"


def test_the_picture_is_drawn_from_the_results_that_are_kept():
    drawn = pictures.PICTURE.read_text()
    assert drawn.startswith(pictures.mark()), "it differs: python -m tests.benchmarks.pictures"


class TestFiguresInSentences:
    """Figures that stand in sentences are those of the results that were kept."""

    def test_overhead(self):
        delayed = tables.middle(tables.figures("overhead")["host, 1, max_delay=2 ms"], "mean_us")
        assert f" {delayed:.0f} µs" in TEXT

    def test_the_perceptron(self):
        rate = tables.rows_per_s("mlp")
        engine = rate["engine, 256 callers"]
        assert f" {engine / rate['raw, 1 thread, batch 64']:.2f} times" in TEXT
        assert f" {engine / rate['raw, 2 threads, batch 64']:.2f}." in TEXT
        few = tables.rows_per_s("mlp-2-threads")["engine, 32 callers"]
        assert f" {tables.thousands(few)} rows/s" in TEXT

    def test_the_busy_loop(self):
        measured = tables.figures("busy_loop")
        helped, left = measured["busy loop"], measured["busy loop, GIL not handed over"]
        assert f" {helped['p50_us'] / 1000:.1f} ms" in TEXT
        assert f"p99 {helped['p99_us'] / 1000:.1f} ms" in TEXT
        assert f" {left['p50_us'] / 1000:.1f} ms, and {left['p99_us'] / 1000:.1f} " in TEXT

    def test_a_server_over_a_long_time(self):
        soak = tables.figures("soak")
        early = next(mb for count, mb in soak["looks"] if count > soak["requests"] / 10)
        assert abs(soak["end"]["rss_mb"] - early) < 5
        first, end = soak["looks"][0][1], soak["end"]["rss_mb"]
        assert f" {first:.0f} MB" in TEXT
        assert f" {end:.0f} MB" in TEXT

    def test_load_tests(self):
        truth = tables.figures("truth")
        worst = max(
            abs(case["measured_ms"][name] / case["on_paper_ms"][name] - 1)
            for case in truth["cases"]
            for name in ("p50", "p90", "p99")
        )
        assert f" {worst:.1%} " in TEXT
        frozen = truth["freeze"]
        assert f" {frozen['corrected']['p99']:,.0f} ms" in TEXT
        assert f" {frozen['p99_on_paper_ms']:,.0f} ms" in TEXT

    def test_nothing_is_left_behind(self):
        for before, after in tables.figures("memory").values():
            assert (before["threads"], before["descriptors"]) == (after["threads"], after["descriptors"])
            assert after["resident_kib"] - before["resident_kib"] < 1024

    def test_the_gpu(self):
        for name in ("gpu-million", "gpu-million-onnxruntime"):
            grown = tables.figures(name)["resident_mib_growth"]
            assert f" {grown:.1f} MiB" in TEXT
