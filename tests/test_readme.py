"""The README is right: its snippets run, its commands are those of CI, its tables are those of the code."""

import asyncio
import dataclasses
import re
import tomllib
from pathlib import Path

import numpy as np
import pytest

import asynctrt
from asynctrt.cli import LOAD_FLAGS
from asynctrt.loadtest.session import SETTING_NAMES
from asynctrt.options import Options
from asynctrt.serving.command import configure, read_config
from asynctrt.serving.settings import ServerSettings
from asynctrt.simulation.settings import FLAGS, SimulationSettings
from tests.benchmarks import tables
from tests.models import double_onnx, rows
from tests.serving.test_asgi import running

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
SHELL = re.findall(r"```sh\n(.*?)\n```", README, re.DOTALL)


@pytest.fixture(scope="module")
def names():
    """Return what the snippets define, without the first two, which run by themselves."""
    scope = {"asynctrt": asynctrt, "np": np}
    for snippet in PYTHON[2:]:
        exec(snippet, scope)
    return scope


def test_the_ten_lines_run_as_they_are(capsys):
    exec(PYTHON[0], {})
    assert re.fullmatch(r"100 answers in \d calls, the last: 198\n", capsys.readouterr().out)


def test_the_lines_for_a_model_run_as_they_are(tmp_path, monkeypatch, capsys):
    double_onnx(tmp_path / "model.onnx")
    monkeypatch.chdir(tmp_path)
    exec(PYTHON[1], {})
    assert re.search(r"\[\[.*\]\] 64 Timing\(queue_ns=\d+", capsys.readouterr().out)


def test_batching_priorities_overload(names, tmp_path, capsys):
    path = double_onnx(tmp_path / "model.onnx")
    result = asyncio.run(names["careful"](path, rows(3)))
    assert result["output"].tolist() == rows(6).tolist()
    assert "succeeded=1" in capsys.readouterr().out


def test_without_a_copy(names, tmp_path):
    async def run():
        async with asynctrt.open(double_onnx(tmp_path / "model.onnx")) as engine:
            return await names["without_a_copy"](engine, rows(4))

    assert asyncio.run(run()).tolist() == rows(8).tolist()


def test_a_function_as_a_model(names):
    assert (asyncio.run(names["use_it"]())["y"] == 2).all()


def test_a_websocket_in_an_application_and_its_client(names, tmp_path, monkeypatch):
    double_onnx(tmp_path / "model.onnx")
    monkeypatch.chdir(tmp_path)

    async def run():
        async with running(names["app"]) as address:
            return await names["ask"](f"ws://{address}/ws", rows(4))

    assert asyncio.run(run()).tolist() == rows(8).tolist()


def test_the_configuration_is_one(tmp_path):
    (text,) = re.findall(r"```toml\n(.*?)```", README, re.DOTALL)
    path = tmp_path / "serve.toml"
    path.write_text(text)
    planned = configure({}, read_config(path))
    assert planned.settings.tokens == ("s3cret",)
    (model,) = planned.models
    assert (model.name, model.version, model.settings["max_rows"]) == ("classifier", "2", 16)


def test_every_port_and_flag_that_is_named_is_there():
    settings = ServerSettings()
    assert f"127.0.0.1:{settings.http_port}/v2" in README
    assert f"127.0.0.1:{settings.grpc_port}" in README
    section = README[README.index("## Behind a socket") : README.index("## Under load")]
    for flag in re.findall(r"`--([\w-]+)`", section):
        assert hasattr(settings, flag.replace("-", "_")) or flag == "config"


def test_ci_runs_the_test_command():
    assert SHELL[1] in (ROOT / ".ci" / "run").read_text().splitlines()


def test_the_commands_name_extras_that_there_are():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for command in SHELL:
        for named in re.findall(r"\.\[([\w,]+)\]", command):
            assert set(named.split(",")) <= set(extras)
    for extra in ("cpu", "cli", "demo", "serve", "load", "otel", "dev"):
        assert f"`{extra}`" in README
        assert extra in extras


def test_a_load_test_in_an_applications_tests(names, tmp_path):
    async def run():
        async with asynctrt.open(double_onnx(tmp_path / "model.onnx")) as engine:
            return await names["is_fast_enough"](engine)

    holds, latency = asyncio.run(run())
    assert holds == (latency["p99"] < 250)


def test_every_flag_of_a_load_test_that_is_named_is_there():
    section = README[README.index("## Under load") : README.index("## Without a device")]
    known = {*SETTING_NAMES, *(flag[0] for flag in LOAD_FLAGS)}
    flags = re.findall(r"--([a-z][\w-]*)", section)
    assert len(flags) > 25
    assert {flag.replace("-", "_") for flag in flags} <= known


def test_every_flag_of_a_simulation_that_is_named_is_there():
    section = README[README.index("## Without a device") : README.index("## Options")]
    section += (ROOT / "docs" / "simulation.md").read_text()
    fields = {field.name for cls in (SimulationSettings, Options) for field in dataclasses.fields(cls)}
    known = {*fields, *(flag[0] for flag in FLAGS), "sweep"}
    flags = re.findall(r"--([a-z][\w-]*)", section)
    assert len(flags) > 25
    assert {flag.replace("-", "_") for flag in flags} <= known


def test_the_table_of_options_is_complete_and_right():
    table = dict(re.findall(r"^\| `(\w+)` \| (.*?) \|", README, re.MULTILINE))
    defaults = {field.name: field.default for field in dataclasses.fields(Options)}
    assert list(table) == list(defaults)
    for name, default in defaults.items():
        if default is not None:
            assert table[name].strip("`").replace('"', "'") == repr(default)


TEXT = README.replace("\n", " ")


def test_the_tables_of_figures_are_generated():
    assert set(re.findall(r"<!-- table: ([\w-]+) -->", README)) == set(tables.TABLES)
    assert tables.filled(README) == README, "the tables differ: python -m tests.benchmarks.tables"


class TestFiguresInSentences:
    """Figures that stand in sentences are those of the results that were kept."""

    def test_overhead(self):
        (delayed,) = [
            case["median"]["round_trip_us"]
            for case in tables.results("overhead")["cases"]
            if (case["device"], case["callers"], case["max_delay"]) == ("host", 1, 0.002)
        ]
        assert f"configured, the lone caller's round trip is {delayed:.0f} µs" in TEXT

    def test_the_perceptron(self):
        rate = tables.rows_per_s("mlp")
        engine = rate["engine, 256 callers"]
        assert f"it has {engine / rate['raw, 1 thread, batch 64']:.2f} times as much" in TEXT
        assert f"out of both cores, {engine / rate['raw, 2 threads, batch 64']:.2f}." in TEXT
        few = tables.rows_per_s("mlp-2-threads")["engine, 32 callers"]
        assert f"gives {tables.thousands(few)} rows/s for 32 callers" in TEXT

    def test_the_busy_loop(self):
        measured = tables.figures("busy_loop")
        helped, left = measured["busy loop"], measured["busy loop, GIL not handed over"]
        assert f"{helped['p50_us'] / 1000:.1f} ms after its compute time" in TEXT
        assert f"(p50; p99 {helped['p99_us'] / 1000:.1f} ms)" in TEXT
        assert f"it is {left['p50_us'] / 1000:.1f} ms, and {left['p99_us'] / 1000:.1f} (" in TEXT

    def test_a_server_over_a_long_time_and_with_hang_ups(self):
        soak = tables.figures("soak")
        early = next(mb for count, mb in soak["looks"] if count > soak["requests"] / 10)
        assert abs(soak["end"]["rss_mb"] - early) < 5
        first, end = soak["looks"][0][1], soak["end"]["rss_mb"]
        assert f"{first:.0f} MB after the first moments and {end:.0f} MB" in TEXT
        hangups = tables.figures("hangups")
        alone, disturbed = (
            tables.middle(hangups[name], "p99_us") / 1e3 for name in ("undisturbed", "with hang-ups")
        )
        assert f"from {alone:.1f} to {disturbed:.1f} ms" in TEXT

    def test_load_tests(self):
        sent = tables.figures("generation")["256 callers, load test"]["median"]["throughput"]
        assert f"it sends {tables.thousands(sent)} requests/s on one core" in TEXT
        truth = tables.figures("truth")
        worst = max(
            abs(case["measured_ms"][name] / case["on_paper_ms"][name] - 1)
            for case in truth["cases"]
            for name in ("p50", "p90", "p99")
        )
        assert f"are within {worst:.1%} of what" in TEXT
        frozen = truth["freeze"]
        assert f"p99 says {frozen['corrected']['p99']:,.0f} ms" in TEXT
        assert f"when requests were sent {frozen['uncorrected']['p99']:.1f} ms" in TEXT

    def test_nothing_is_left_behind(self):
        for before, after in tables.figures("memory").values():
            assert (before["threads"], before["descriptors"]) == (after["threads"], after["descriptors"])
            assert after["resident_kib"] - before["resident_kib"] < 1024

    def test_the_gpu(self):
        cases = tables.figures("gpu-completion")["cases"]
        busy = max(cases[f"{us} us, busy loop, adaptive"]["reaper"]["p99_us"] for us in (50, 200, 1000, 5000))
        assert f"comes at the next tick, {busy:.0f} µs at p99" in TEXT
        small = tables.figures("gpu-sharing")["cases"]["small, 2000 us"]
        one, eight = (small[arenas]["rows_per_s"] for arenas in "18")
        assert f"{one:,.0f} rows/s against {eight:,.0f} with eight" in TEXT
        rates = tables.figures("gpu-overlap")["batches_per_s"]
        overlapped, serial = rates["engine overlapped, device"], rates["raw serial"]
        said = f"{1e6 / overlapped:.0f} µs a batch, where one after the other takes {1e6 / serial:.0f}"
        assert said in TEXT
        gains = overlapped / serial, overlapped / rates["engine serial, device"]
        assert f"({gains[0]:.1f} and {gains[1]:.1f} times)" in TEXT
        grown = tables.figures("gpu-million")["resident_mib_growth"]
        assert f"leave the process {grown:.1f} MiB larger" in TEXT


def test_the_picture_is_there():
    assert (ROOT / ".readme" / "way.svg").exists()
    assert ".readme/way.svg" in README
