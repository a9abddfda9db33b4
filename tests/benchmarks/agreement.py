"""Do other load generators measure the same? MLPerf's LoadGen on an engine, ``perf_analyzer`` on a server.

LoadGen (``pip install mlcommons-loadgen``) and ours run in turn, A B A B, each in a process of its own; so do
``perf_analyzer``, which .ci/packages installs, and ours.
"""

import asyncio
import csv
import functools
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import uvloop

import asynctrt
from asynctrt import loadtest
from asynctrt._util.process import shorten_switch_interval
from asynctrt.devices.host import HostDevice
from asynctrt.loadtest.samples import random_inputs
from tests.benchmarks.common import arguments, copying_model, in_turn, median, save, show
from tests.benchmarks.mlp import mlp_onnx
from tests.helpers import installed
from tests.serving import test_perf_analyzer as analyzer

ROOT = Path(__file__).parent.parent.parent
BATCH_S = 0.004
RATES = {"4 ms a batch": 1000, "MLP": 4000}
CALLERS = 8


def sleeping_model():
    """Return a model that takes 4 ms for a batch of any size."""
    return copying_model(lambda _: BATCH_S)


def opened(model, folder):
    options = {"max_queue_rows": 1 << 17}
    if model == "MLP":
        path = Path(folder) / "mlp.onnx"
        if not path.exists():
            mlp_onnx(path)
        return asynctrt.open(path, **options)
    device = HostDevice(threads=1, in_place="never")
    return asynctrt.open(sleeping_model(), device=device, contexts=1, **options)


async def under_loadgen(model, scenario, seconds, count, folder):
    """Measure with LoadGen, and return the throughput and the p99 in ms from its log."""
    import mlperf_loadgen as lg

    loop = asyncio.get_running_loop()
    logs = tempfile.mkdtemp(dir=folder)
    async with opened(model, folder) as engine:
        inputs = random_inputs(engine.inputs, {}, 1)
        await engine.infer(inputs)
        responses = []

        def complete():
            done = responses.copy()
            responses.clear()
            lg.QuerySamplesComplete(done)

        def answered(number, future):
            future.result()
            if not responses:
                loop.call_soon(complete)  # All answers of one turn of the loop at once.
            responses.append(lg.QuerySampleResponse(number, 0, 0))

        def submit(numbers):
            for number in numbers:
                engine.submit(inputs).add_done_callback(functools.partial(answered, number))

        def issue(samples):
            loop.call_soon_threadsafe(submit, [sample.id for sample in samples])

        def test():
            settings = lg.TestSettings()
            settings.mode = lg.TestMode.PerformanceOnly
            settings.min_duration_ms = int(seconds * 1000)
            if scenario == "server":
                settings.scenario = lg.TestScenario.Server
                settings.server_target_qps = RATES[model]
                settings.server_target_latency_ns = 10**9
                settings.server_target_latency_percentile = 0.99
            else:
                settings.scenario = lg.TestScenario.Offline
                settings.min_query_count = count
                settings.offline_expected_qps = 1
            output = lg.LogOutputSettings()
            output.outdir = logs
            log = lg.LogSettings()
            log.log_output = output
            log.enable_trace = False
            sut = lg.ConstructSUT(issue, lambda: None)
            qsl = lg.ConstructQSL(64, 64, lambda samples: None, lambda samples: None)
            lg.StartTestWithLogSettings(sut, qsl, settings, log)
            lg.DestroyQSL(qsl)
            lg.DestroySUT(sut)

        await asyncio.to_thread(test)
    found = {}
    for line in (Path(logs) / "mlperf_log_detail.txt").read_text().splitlines():
        entry = json.loads(line.partition(":::MLLOG ")[2] or "{}")
        found[entry.get("key")] = entry.get("value")
    name = "result_completed_samples_per_sec" if scenario == "server" else "result_samples_per_second"
    return {"throughput": found[name], "p99_ms": found["result_99.00_percentile_latency_ns"] / 1e6}


async def under_ours(model, scenario, seconds, count, folder):
    async with opened(model, folder) as engine:
        if scenario == "offline":  # All are due at once: as many callers as the engine's queue has room for.
            load = {"callers": 1024, "requests": count, "seconds": 600.0, "answer_timeout": 600.0}
        else:
            load = {"rate": RATES[model], "seconds": seconds, "slo": "p99<1s"}
        report = await loadtest.run(engine, **load, warmup=0)
    (run,) = report.runs
    assert not run.errors, run.errors
    return {"throughput": run.throughput, "p99_ms": run.latency["p99"]}


def apart(who, *details):
    """Measure once in a process of its own."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.benchmarks.agreement", "--one", json.dumps([who, *details])],
        cwd=ROOT,
        check=True,
        capture_output=True,
        text=True,
    )
    return json.loads(done.stdout.splitlines()[-1])


def one(text):
    who, *details = json.loads(text)
    shorten_switch_interval()
    run = under_loadgen if who == "LoadGen" else under_ours
    print(json.dumps(uvloop.run(run(*details))))


def under_perf_analyzer(binary, served, model, seconds, folder):
    path = Path(folder) / "perf.csv"
    window = (
        "--measurement-interval",
        int(seconds * 1000 / 3),
        "--stability-percentage",
        999,
        "--max-trials",
        3,
    )
    command = [binary, "-m", model, "-i", "http", "-u", served.addresses["http"], "-f", path]
    command += ["--concurrency-range", CALLERS, "--percentile", 99, *window]
    subprocess.run(
        list(map(str, command)),
        env=os.environ | {"LD_LIBRARY_PATH": str(analyzer.LIBRARY)},
        check=True,
        capture_output=True,
        timeout=60 + 4 * seconds,
    )
    (row,) = csv.DictReader(path.read_text().splitlines())
    return {"throughput": float(row["Inferences/Second"]), "p99_ms": float(row["p99 latency"]) / 1e3}


def ours_on_a_server(served, model, seconds):
    url = f"http://{served.addresses['http']}/v2/models/{model}"
    report = uvloop.run(loadtest.run(url, callers=CALLERS, seconds=seconds, warmup=1.0))
    (run,) = report.runs
    assert not run.errors, run.errors
    return {"throughput": run.throughput, "p99_ms": run.latency["p99"]}


def main():
    if "--one" in sys.argv:
        one(sys.argv[sys.argv.index("--one") + 1])
        return
    options = arguments(__doc__, seconds=10.0, repeats=5, count=24_576, only="")
    lines, figures = [], {}

    def note(name, other, results):
        a, b = (results[who] for who in (other, "asynctrt"))
        figures[name] = {"other": other, "runs": {other: a, "asynctrt": b}}
        for figure in ("throughput", "p99_ms"):
            if name.startswith("offline") and figure == "p99_ms":
                continue  # A single query has none.
            theirs, ours = median(a, figure), median(b, figure)
            figures[name][figure] = {"theirs": theirs, "ours": ours, "ratio": ours / theirs}
            lines.append(
                (f"{name}, {figure}", other, f"{theirs:,.2f}", f"{ours:,.2f}", f"{ours / theirs:.3f}")
            )

    with tempfile.TemporaryDirectory() as folder:
        mlp_onnx(Path(folder) / "mlp.onnx")
        for scenario in ("server", "offline"):
            for model in RATES:
                if options.only not in f"{scenario}, {model}":
                    continue
                details = (model, scenario, options.seconds, options.count, folder)
                runs = {who: functools.partial(apart, who, *details) for who in ("LoadGen", "asynctrt")}
                note(
                    f"{scenario}, {model}", "LoadGen", in_turn(runs, options.repeats, f"{scenario}, {model}")
                )
        binary = installed(analyzer.BINARY)
        (Path(folder) / "agreement_models.py").write_text(
            "from tests.benchmarks.agreement import sleeping_model\n"
        )
        models = {"sleeping_model": "4 ms a batch", "mlp": "MLP"}
        served = analyzer.Served(Path(folder), "agreement_models:sleeping_model", f"mlp={folder}/mlp.onnx")
        try:
            for name, said in models.items():
                if options.only not in f"HTTP, {said}":
                    continue
                runs = {
                    "perf_analyzer": functools.partial(
                        under_perf_analyzer, binary, served, name, options.seconds, folder
                    ),
                    "asynctrt": functools.partial(ours_on_a_server, served, name, options.seconds),
                }
                found = in_turn(runs, options.repeats, f"HTTP, {said}")
                note(f"{CALLERS} callers over HTTP, {said}", "perf_analyzer", found)
        finally:
            served.stop()
    show("Side by side, medians", ("", "other", "theirs", "ours", "ours over theirs"), lines)
    save(options.json, "other load generators beside ours", figures)


if __name__ == "__main__":
    main()
