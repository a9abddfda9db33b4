"""The README tells the truth: its snippets run, its commands are those of CI, its tables are the code's."""

import asyncio
import dataclasses
import json
import re
import statistics
import tomllib
from pathlib import Path

import numpy as np
import pytest

import asynctrt
from asynctrt.cli import LOAD_FLAGS
from asynctrt.loadtest.session import SETTING_NAMES
from asynctrt.options import Options
from asynctrt.serving.command import plan, read_config
from asynctrt.serving.settings import ServerSettings
from tests.models import double_onnx, rows
from tests.serving.test_asgi import running

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
PYTHON = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
SHELL = re.findall(r"```sh\n(.*?)\n```", README, re.DOTALL)


@pytest.fixture(scope="module")
def names():
    """What the snippets define, all but the first, which runs by itself."""
    scope = {"asynctrt": asynctrt, "np": np}
    for snippet in PYTHON[1:]:
        exec(snippet, scope)
    return scope


def test_the_ten_lines_run_as_they_are(tmp_path, monkeypatch, capsys):
    double_onnx(tmp_path / "model.onnx")
    monkeypatch.chdir(tmp_path)
    exec(PYTHON[0], {})
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
    planned = plan({}, read_config(path))
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
    section = README[README.index("## Under load") : README.index("## Options")]
    known = {*SETTING_NAMES, *(flag[0] for flag in LOAD_FLAGS)}
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


def results(name):
    return json.loads((ROOT / "tests" / "benchmarks" / "results" / f"{name}.json").read_text())


def thousands(value):
    return f"{round(value, -3):,.0f}"


def middle(runs, figure):
    return statistics.median(run[figure] for run in runs)


def test_the_figures_of_overhead_are_those_measured():
    measured = {
        (case["device"], case["callers"], case["max_delay"]): case["median"]
        for case in results("overhead")["cases"]
    }
    for name, device in (("events done at once", "immediate"), ("host device", "host")):
        many, some, lone = (measured[device, callers, 0.0] for callers in (256, 32, 1))
        cells = [
            f"asynctrt, {name}",
            *(
                f(run)
                for run in (many, some)
                for f in (
                    lambda run: thousands(run["requests_per_s"]),
                    lambda run: f"{run['cpu_us_per_request']:.1f}",
                )
            ),
            f"{lone['round_trip_us']:.0f}",
        ]
        assert f"| {' | '.join(cells)} |" in README
    delayed = measured["host", 1, 0.002]["round_trip_us"]
    assert f"configured, the lone caller's round trip is {delayed:.0f} µs" in README


def test_the_figures_of_the_peers_are_those_measured():
    measured = results("peers")["figures"]
    for name, label in (
        ("async-batcher", "async-batcher 0.2.2"),
        ("bare loop", "a bare loop without features"),
    ):
        many, some, lone = (measured[callers][name] for callers in ("256", "32", "1"))
        cells = [label]
        for runs in (many, some):
            cells += [thousands(middle(runs, "requests_per_s")), f"{middle(runs, 'cpu_us_per_request'):.1f}"]
        round_trip = middle(lone, "round_trip_us")
        cells.append(f"{round(round_trip, -1 if round_trip > 100 else 0):,.0f}")
        assert f"| {' | '.join(cells)} |" in README


def test_the_figures_of_the_perceptron_are_those_measured():
    rate = {}
    for case in results("mlp")["figures"]["cases"]:
        key = ("engine", case["callers"]) if case["kind"] == "engine" else (case["threads"], case["rows"])
        rate[key] = case["median"]["rows_per_s"]
    for label, size, callers in (
        ("batches of 64; 256 callers", 64, 256),
        ("batches of 32; 32 callers", 32, 32),
        ("batches of 1; a lone caller", 1, 1),
    ):
        figures = [rate[1, size], rate[2, size], rate["engine", callers]]
        assert f"| {label} | {' | '.join(f'{round(figure, -2):,.0f}' for figure in figures)} |" in README
    assert f"it has {rate['engine', 256] / rate[1, 64]:.2f} times as much" in README
    assert f"out of both cores, {rate['engine', 256] / rate[2, 64]:.2f}." in README
    few = {
        case["callers"]: case["median"]["rows_per_s"]
        for case in results("mlp-2-threads")["figures"]["cases"]
        if case["kind"] == "engine"
    }
    assert f"gives {thousands(few[32])} rows/s for 32 callers" in README


def test_the_figures_of_the_busy_loop_are_those_measured():
    measured = results("busy_loop")["figures"]
    helped, left = measured["busy loop"], measured["busy loop, GIL not handed over"]
    text = README.replace("\n", " ")
    assert f"{helped['p50_us'] / 1000:.1f} ms after its compute time" in text
    assert f"(p50; p99 {helped['p99_us'] / 1000:.1f} ms)" in text
    assert f"it is {left['p50_us'] / 1000:.1f} ms, and {left['p99_us'] / 1000:.1f} (" in text


SERVED = {
    "KServe over HTTP, no-op": ("HTTP no-op, 64", "HTTP no-op, 256"),
    "Mosec 0.9.8, no-op": ("Mosec no-op, 64", "Mosec no-op, 256"),
    "uvicorn alone": ("uvicorn alone, 64", None),
    "KServe over HTTP, MLP": ("HTTP MLP, 64", "HTTP MLP, 256"),
    "Mosec 0.9.8, MLP": ("Mosec MLP, 64", "Mosec MLP, 256"),
    "websocket, no-op, 1 in flight each": ("websocket no-op, 64 x 1", "websocket no-op, 256 x 1"),
    "websocket, no-op, 16 in flight each": ("websocket no-op, 64 x 16", None),
    "`websockets` alone, 1 in flight each": ("websockets alone, 64 x 1", None),
    "`websockets` alone, 16 in flight each": ("websockets alone, 64 x 16", None),
    "websocket, MLP, 4 in flight each": ("websocket MLP, 64 x 4", None),
    "KServe over gRPC, no-op": ("gRPC no-op, 64", None),
    "`grpc.aio` alone": ("grpc.aio alone, 64", None),
}
"""What the README calls the cases of the benchmark of serving, with 64 connections and with 256."""


def served_line(label, cases, measured):
    cells = [label]
    for case in cases:
        if case is None:
            cells += ["", "", ""]
        else:
            runs = measured[case]
            rate = round(middle(runs, "requests_per_s"), -2)
            cells += [
                f"{rate:,.0f}",
                f"{middle(runs, 'server_cpu_us'):.0f}",
                f"{middle(runs, 'p99_us') / 1e3:.1f}",
            ]
    return f"| {' | '.join(cells)} |".replace("  ", " ")


def test_the_figures_of_serving_are_those_measured():
    measured = results("serving")["figures"]
    for label, cases in SERVED.items():
        assert served_line(label, cases, measured) in README


def test_a_server_does_not_grow_and_others_are_not_disturbed_as_measured():
    soak = results("soak")["figures"]
    early = next(mb for count, mb in soak["looks"] if count > soak["requests"] / 10)
    assert abs(soak["end"]["rss_mb"] - early) < 5
    text = README.replace("\n", " ")
    assert f"{soak['looks'][0][1]:.0f} MB after the first moments and {soak['end']['rss_mb']:.0f} MB" in text
    hangups = results("hangups")["figures"]
    alone, disturbed = [middle(hangups[name], "p99_us") / 1e3 for name in ("undisturbed", "with hang-ups")]
    assert f"from {alone:.1f} to {disturbed:.1f} ms" in text


def test_the_figures_of_load_tests_are_those_measured():
    late = results("lateness")["figures"]
    for rate in (5000, 20000, 50000):
        cells = [f"{rate:,}"]
        for pacing in ("spin", "adaptive", "timer"):
            found = late[f"{pacing}, {rate}/s"]["median"]
            cells += [f"{found['late_p50_us']:.1f} / {found['late_p99_us']:.0f}", f"{found['cores']:.2f}"]
        cells.append(f"{late[f'a bare loop, {rate}/s']['median']['late_p99_us']:.0f}")
        assert f"| {' | '.join(cells)} |" in README
    text = README.replace("\n", " ")
    sent = results("generation")["figures"]["256 callers, load test"]["median"]["throughput"]
    assert f"it sends {thousands(sent)} requests/s on one core" in text
    truth = results("truth")["figures"]
    worst = max(
        abs(case["measured_ms"][name] / case["on_paper_ms"][name] - 1)
        for case in truth["cases"]
        for name in ("p50", "p90", "p99")
    )
    assert f"are within {worst:.1%} of what" in text
    frozen = truth["freeze"]
    assert f"p99 says {frozen['corrected']['p99']:,.0f} ms" in text
    assert f"when requests were sent {frozen['uncorrected']['p99']:.1f} ms" in text


def test_what_other_load_generators_find_is_as_measured():
    for name, found in results("agreement")["figures"].items():
        for figure, unit, digits in (("throughput", "requests/s", 0), ("p99_ms", "p99, ms", 2)):
            if figure in found:
                one = found[figure]
                cells = [f"{name}, {unit}", found["other"]]
                cells += [f"{one[who]:,.{digits}f}" for who in ("theirs", "ours")]
                assert f"| {' | '.join(cells)} | {one['ratio']:.2f} |" in README


def test_nothing_is_left_behind_as_measured():
    for before, after in results("memory")["figures"].values():
        assert (before["threads"], before["descriptors"]) == (after["threads"], after["descriptors"])
        assert after["resident_kib"] - before["resident_kib"] < 1024


def test_the_picture_is_there():
    assert (ROOT / ".readme" / "way.svg").exists()
    assert ".readme/way.svg" in README


def rows_of(*cells):
    return "| " + " | ".join(cells) + " |"


class TestTheFiguresOfTheGpu:
    """They are those that were kept of a run on one."""

    @staticmethod
    def figures(name):
        return results(f"gpu-{name}")["figures"]

    def test_completion(self):
        cases = self.figures("completion")["cases"]
        for work_us in (50, 200, 1000, 5000):
            cells = [f"{work_us:,} µs"]
            for waiting in ("adaptive", "spin", "thread"):
                case = cases[f"{work_us} us, idle loop, {waiting}"]
                late = case["reaper"]
                cells += [f"{late['p50_us']:.0f} / {late['p99_us']:.0f}".replace("-0 /", "0 /")]
                cells += [f"{case['cores']:.2f}"]
            assert rows_of(*cells) in README
        busy = max(cases[f"{us} us, busy loop, adaptive"]["reaper"]["p99_us"] for us in (50, 200, 1000, 5000))
        assert f"comes at the next tick, {busy:.0f} µs at p99" in README

    def test_saturation(self):
        cases = self.figures("saturation")["cases"]
        for work_us, size in ((100, 8), (300, 1), (300, 8), (1000, 1)):
            case = cases[f"{work_us} us, {64 // size} requests of {size}"]
            assert (
                rows_of(
                    f"{work_us:,} µs",
                    f"{64 // size} of {size} row{'s' if size > 1 else ''}",
                    f"{case['raw_rows_per_s']['one stream']:,.0f}",
                    f"{case['engine_rows_per_s']:,.0f}",
                    f"{case['ratio']['one stream']:.2f}",
                    f"{case['cpu_us_a_batch']:.0f}",
                    f"{case['cpu_us_a_request']:.1f}",
                )
                in README
            )

    def test_sharing(self):
        cases = self.figures("sharing")["cases"]
        for arenas, case in cases["fills, 500 us"].items():
            memory = f"{case['device_nbytes'] / 2**20:,.0f} MiB"
            assert (
                rows_of(arenas, f"{case['rows_per_s']:,.0f}", f"{case['p99_us'] / 1e3:.1f}", memory) in README
            )
        small = cases["small, 2000 us"]
        said = f"{small['1']['rows_per_s']:,.0f} rows/s\nagainst {small['8']['rows_per_s']:,.0f} with eight"
        assert said in README

    def test_overlap(self):
        rates = self.figures("overlap")["batches_per_s"]
        overlapped = rates["engine overlapped, device"]
        serial = rates["raw serial"], rates["engine serial, device"]
        assert (
            f"{1e6 / overlapped:.0f} µs a batch, where one after the other takes {1e6 / serial[0]:.0f}"
            in README
        )
        assert f"({overlapped / serial[0]:.1f} and {overlapped / serial[1]:.1f} times)" in README

    def test_resnet_and_memory(self):
        images = self.figures("resnet")["images"]
        for pair in zip(images["uint8"]["saturation"], images["float32"]["saturation"], strict=True):
            cells = [str(pair[0]["rows"])]
            for case in pair:
                cells += [f"{case['raw_images_per_s']['one stream']:,.0f}"]
                cells += [f"{case['engine_images_per_s']:,.0f}", f"{case['ratio']['one stream']:.2f}"]
            assert rows_of(*cells) in README
        grown = self.figures("million")["resident_mib_growth"]
        assert f"leave the process {grown:.1f} MiB larger" in README
