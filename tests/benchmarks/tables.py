"""Write the tables of the README and of `docs/`: `python -m tests.benchmarks.tables`.

Figures come from the results that are kept, options and errors from the code. A table stands between
`<!-- table: NAME -->` and `<!-- end -->`, with NAME one of `TABLES`.
"""

import dataclasses
import inspect
import json
import re
import statistics
from pathlib import Path

from asynctrt import errors
from asynctrt._util.synonyms import COMMAND_SYNONYMS, SYNONYMS
from asynctrt._util.validation import docs_of
from asynctrt.backends.onnx_options import OnnxOptions
from asynctrt.backends.tensorrt_options import TensorRTOptions
from asynctrt.loadtest.settings import LoadSettings
from asynctrt.options import Options
from asynctrt.serving import model_config
from asynctrt.serving.settings import ServerSettings

ROOT = Path(__file__).parent.parent.parent
README = ROOT / "README.md"
DOCUMENTS = (README, *sorted((ROOT / "docs").glob("*.md")))
MARKED = re.compile(r"(<!-- table: ([\w-]+) -->\n).*?(<!-- end -->)", re.DOTALL)


def results(name):
    """Return what a benchmark wrote when it was last kept."""
    return json.loads((ROOT / "tests" / "benchmarks" / "results" / f"{name}.json").read_text())


def figures(name):
    """Return the figures among the results of a benchmark."""
    return results(name)["figures"]


def middle(runs, figure):
    """Return the median of a figure over several runs."""
    return statistics.median(run[figure] for run in runs)


def thousands(value):
    """Write a number rounded to thousands."""
    return f"{round(value, -3):,.0f}"


def hundreds(value):
    """Write a number rounded to hundreds."""
    return f"{round(value, -2):,.0f}"


def overhead():
    """Yield the cost of a request to a no-op model, beside a peer and a bare loop."""
    yield (
        *("", "256 callers, requests/s", "CPU µs each", "32 callers, requests/s", "CPU µs each"),
        "a lone caller, µs",
    )
    measured = figures("overhead")
    for label, name in (
        ("asynctrt, events done at once", "immediate"),
        ("asynctrt, host device, on the loop", "host"),
        ("async-batcher 0.2.2", "async-batcher"),
        ("a bare loop without features", "bare loop"),
    ):
        cells = [label]
        for callers in (256, 32):
            runs = measured[f"{name}, {callers}"]
            cells += [thousands(middle(runs, "requests_per_s")), f"{middle(runs, 'cpu_us_per_request'):.1f}"]
        mean_us = middle(measured[f"{name}, 1"], "mean_us")
        yield (*cells, f"{round(mean_us, -1 if mean_us > 100 else 0):,.0f}")


def perceptron():
    """Yield the rows/s of a perceptron, raw and through an engine."""
    yield "", "raw `session.run`, 1 thread", "raw, 2 threads", "engine"
    rate = rows_per_s("mlp")
    for label, raw, callers in (
        ("batches of 64; 256 callers", "batch 64", "256 callers"),
        ("batches of 32; 32 callers", "batch 32", "32 callers"),
        ("batches of 1; a lone caller", "batch 1", "a lone caller"),
    ):
        cases = (f"raw, 1 thread, {raw}", f"raw, 2 threads, {raw}", f"engine, {callers}")
        yield (label, *(hundreds(rate[case]) for case in cases))


def rows_per_s(name):
    """Return the throughput of each case of the perceptron's benchmark."""
    return {case: middle(runs, "rows_per_s") for case, runs in figures(name).items()}


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


def serving():
    """Yield throughput, CPU and p99 of servers."""
    yield "", "64 connections", "CPU µs", "p99", "256 connections", "CPU µs", "p99"
    measured = figures("serving")
    for label, cases in SERVED.items():
        cells = [label]
        for case in cases:
            if case is None:
                cells += ["", "", ""]
            else:
                runs = measured[case]
                cells += [
                    hundreds(middle(runs, "requests_per_s")),
                    f"{middle(runs, 'server_cpu_us'):.0f}",
                    f"{middle(runs, 'p99_us') / 1e3:.1f}",
                ]
        yield cells


def frameworks():
    """Yield the perceptron behind other ways to serve a model from Python."""
    yield "", "64 connections: requests/s", "CPU µs", "p99, ms", "one connection: p50, ms"
    for label, runs in figures("frameworks").items():
        many = runs["64"]
        yield (
            label,
            hundreds(middle(many, "requests_per_s")),
            f"{middle(many, 'server_cpu_us'):,.0f}",
            f"{middle(many, 'p99_us') / 1e3:.0f}",
            f"{middle(runs['1'], 'p50_us') / 1e3:.1f}",
        )


def several():
    """Yield how long calls to four servers took, beside the best assignment."""
    yield "", "calls", "lost", "p99, ms", "of the best assignment, ms", "ratio"
    for label, found in figures("several")["company"].items():
        p99_ms, best_ms = found["p99_ms"], found["best_p99_ms"]
        ratio = f"{p99_ms / best_ms:.2f}"
        yield label, f"{found['calls']:,}", f"{found['lost']}", f"{p99_ms:.0f}", f"{best_ms:.0f}", ratio


def several_cost():
    """Yield what a client of several servers costs."""
    yield "", "calls/s", "CPU µs of the client"
    for label, runs in figures("several")["cost"].items():
        yield label, hundreds(middle(runs, "requests_per_s")), f"{middle(runs, 'cpu_us_per_request'):.0f}"


def workers():
    """Yield what a worker process costs: in process beside it, ratios of medians."""
    yield (
        *("", "in process: requests/s", "p50, µs", "a worker: requests/s", "p50, µs"),
        *("CPU of both, ratio", "CPU of the application, ratio"),
    )
    for case, runs in figures("workers")["cost"].items():
        model, callers = case.split(", ")
        own, theirs = runs["none"], runs["process"]
        yield (
            f"{model}, {callers} caller{'s' * (callers != '1')}",
            *[
                hundreds(middle(one, figure)) if figure == "requests_per_s" else f"{middle(one, figure):,.0f}"
                for one in (own, theirs)
                for figure in ("requests_per_s", "p50_us")
            ],
            *[f"{middle(theirs, figure) / middle(own, 'cpu_us'):.2f}" for figure in ("cpu_us", "own_cpu_us")],
        )


def gpu_kills():
    """Yield what became of requests whose workers with a GPU were killed."""
    yield "", "requests", "kills", "lost, wrong, answered twice", "until 256 more were answered, ms"
    for case, found in figures("worker_faults").items():
        yield (
            case.removeprefix("kills, "),
            f"{found['answered']:,}",
            str(found["kills"]),
            f"{found['lost']}, {found['wrong']}, {found['twice']}",
            f"{statistics.median(found['pauses_ms']):.0f} (at most {max(found['pauses_ms']):.0f})",
        )


def front_kills():
    """Yield what became of requests to a server whose fronts and workers were killed."""
    yield (
        "",
        "requests",
        "fronts and workers killed",
        "lost, wrong, answered twice",
        "asked again",
        "until 256 more were answered, ms",
    )
    for case, found in figures("front_faults").items():
        kills, pauses = found["kills"], found["pauses_ms"]
        yield (
            {"fronts": "fronts", "all": "fronts and workers, with a spare"}[case],
            f"{found['answered']:,}",
            f"{kills.get('front', 0)}, {kills.get('worker', 0)}",
            f"{found['lost']}, {found['wrong']}, {found['twice']}",
            f"{found['asked_again']:,}",
            f"{statistics.median(pauses):.0f} (at most {max(pauses):.0f})",
        )


def gpu_faults():
    """Yield how long callers wait after faults on a GPU."""
    yield "", "others are answered again after, ms", "it is answered or refused after, ms", "workers that end"
    for case, found in figures("worker_faults-rows").items():
        if "runs" in found:
            deaths = sorted({run["deaths"] for run in found["runs"]})
            yield (
                case.replace(", one worker", "; one worker").replace(", and a spare", "; and a spare"),
                f"{found['longest_pause_ms']:,.0f}",
                f"{found['refused_ms']:,.0f}",
                " or ".join(map(str, deaths)),
            )


def gpu_function_sizes():
    """Yield what a PyTorch function does in its first seconds, with few batch sizes and with any."""
    yield "", "opens in, s", "images/s, the first seconds", "p50 ms", "p99 ms", "images/s, the next"
    for name, case in figures("gpu-function_sizes").items():
        first = case["first"]
        yield (
            name,
            f"{case['open_s']:.1f}",
            f"{first['images_per_s']:,.0f}",
            *(f"{first[what] / 1e3:,.0f}" for what in ("p50_us", "p99_us")),
            f"{case['later']['images_per_s']:,.0f}",
        )


def scale():
    """Yield requests/s of a server by its fronts: HTTP and the other protocols as last measured."""
    yield "", "HTTP, requests/s", "p99, ms", "websocket", "p99, ms", "gRPC", "p99, ms"
    large = figures("scale-http-512")["fronts"]["HTTP"]
    http = figures("scale-http")["fronts"]["HTTP"] | {
        f"{case}, `--max-rows 512`": runs for case, runs in large.items()
    }
    measured = figures("scale-fronts")["fronts"] | {"HTTP": http}
    cases = dict.fromkeys(case for runs in measured.values() for case in runs)
    for case in sorted(cases, key=lambda case: ("bare" in case, *map(int, re.findall(r"\d+", case)))):
        cells = [case]
        for protocol in ("HTTP", "websocket", "gRPC"):
            runs = measured[protocol].get(case)
            if runs is None:
                cells += ["", ""]
            else:
                cells += [hundreds(middle(runs, "requests_per_s")), f"{middle(runs, 'p99_us') / 1e3:.0f}"]
        yield tuple(cells)


def gpu_onnx_poisson():
    """Yield the latency of ONNX models on a GPU when requests come at random."""
    yield "", "50% of capacity: engine, p50 / p99 ms", "by hand", "80%: engine", "by hand"
    for name, model in figures("ort_cuda")["models"].items():
        cells = [name]
        for share in ("50%", "80%"):
            for who in ("asynctrt", "by hand"):
                found = model["poisson"][share][who]
                cells.append(f"{found['p50_us'] / 1e3:.1f} / {found['p99_us'] / 1e3:.1f}")
        yield tuple(cells)


def busy_thread():
    """Yield what callers of an engine see beside a thread that computes in Python."""
    yield (
        *("64 callers, p50 / p99 ms", "alone", "beside a thread", "beside a thread, `tune_process()`"),
        "alone, requests/s",
        *("beside a thread", "`tune_process()`"),
    )
    for device, name in (("the host device", "busy_thread"), ("a GPU", "busy_thread-gpu")):
        measured = figures(name)
        for kind in ("in process", "a worker"):
            cases = [
                measured[f"{tuned}; {threads} threads; 64 callers"]
                for tuned, threads in ((kind, 0), (kind, 1), (f"{kind}, tuned", 1))
            ]
            yield (
                f"{device}, {kind}",
                *[f"{one['p50_us'] / 1e3:.1f} / {one['p99_us'] / 1e3:.1f}" for one in cases],
                *[hundreds(one["requests_per_s"]) for one in cases],
            )


def lengths():
    """Yield texts of all lengths through two encoders, padded and not."""
    yield "", "requests/s", "mean batch", "p50, ms", "p99, ms"
    for case, runs in figures("lengths").items():
        yield (
            case,
            f"{middle(runs, 'requests_per_s'):,.0f}",
            f"{middle(runs, 'mean_batch_rows'):.1f}",
            *[f"{middle(runs, figure) / 1e3:.1f}" for figure in ("p50_us", "p99_us")],
        )


def lateness():
    """Yield how late a load test sends its requests."""
    yield (
        *("requests/s", "to a server: p50 / p99", "cores", "in this process: p50 / p99", "cores"),
        "a bare loop: p99",
    )
    measured = figures("lateness")
    for rate in (5000, 20000, 50000):
        cells = [f"{rate:,}"]
        for pacing in ("adaptive", "timer"):
            found = measured[f"{pacing}, {rate}/s"]["median"]
            cells += [f"{found['late_p50_us']:.1f} / {found['late_p99_us']:.0f}", f"{found['cores']:.2f}"]
        yield (*cells, f"{measured[f'a bare loop, {rate}/s']['median']['late_p99_us']:.0f}")


def agreement():
    """Yield what other load generators measure beside ours."""
    yield "", "other", "theirs", "ours", "ratio"
    for name, found in figures("agreement").items():
        for figure, unit, digits in (("throughput", "requests/s", 0), ("p99_ms", "p99, ms", 2)):
            if figure in found:
                one = found[figure]
                both = [f"{one[who]:,.{digits}f}" for who in ("theirs", "ours")]
                yield f"{name}, {unit}", found["other"], *both, f"{one['ratio']:.2f}"


def goodput():
    """Yield the share of capacity that is answered in time, by the load."""
    measured = figures("goodput")["simulated"]
    loads = list(next(iter(measured["Poisson"].values())))
    yield "", *(f"{float(load):.0%}" for load in loads)
    for kind, cases in measured.items():
        for name, by_load in cases.items():
            yield f"{kind}: {name}", *(f"{middle(by_load[load], 'goodput'):.2f}" for load in loads)


def goodput_really():
    """Yield the share of capacity that a real engine answered in time, beside what was predicted."""
    yield "", "load", "in time", "least to most", "predicted", "p99, ms", "least to most", "predicted"
    for way, by_load in figures("goodput")["real"].items():
        for load, pairs in by_load.items():
            cells = []
            for figure, digits in (("goodput", 2), ("p99_ms", 0)):
                measured = sorted(pair["measured"][figure] for pair in pairs)
                predicted = middle([pair["predicted"] for pair in pairs], figure)
                cells += [
                    f"{statistics.median(measured):,.{digits}f}",
                    f"{measured[0]:,.{digits}f} to {measured[-1]:,.{digits}f}",
                    f"{predicted:,.{digits}f}",
                ]
            yield way, f"{float(load):.0%}", *cells


def gpu_completion():
    """Yield how late a coroutine goes on after its batch on the GPU."""
    yield "a batch takes", "idle loop", "cores", "busy loop"
    cases = figures("gpu-completion")["cases"]
    for work_us in (50, 200, 1000, 5000):
        idle, busy = (cases[f"{work_us} us, {kind} loop"] for kind in ("idle", "busy"))
        late = [
            f"{case['reaper']['p50_us']:.0f} / {case['reaper']['p99_us']:.0f}".replace("-0 /", "0 /")
            for case in (idle, busy)
        ]
        yield f"{work_us:,} µs", late[0], f"{idle['cores']:.2f}", late[1]


def gpu_saturation():
    """Yield the throughput of a saturated GPU, raw and through an engine."""
    yield "a batch takes", "requests", "raw", "engine", "ratio", "CPU µs a batch", "a request"
    cases = figures("gpu-saturation")["cases"]
    for work_us, size in ((100, 8), (300, 1), (300, 8), (1000, 1)):
        case = cases[f"{work_us} us, {64 // size} requests of {size}"]
        yield (
            f"{work_us:,} µs",
            f"{64 // size} of {size} row{'s' if size > 1 else ''}",
            f"{case['raw_rows_per_s']['one stream']:,.0f}",
            f"{case['engine_rows_per_s']:,.0f}",
            f"{case['ratio']['one stream']:.2f}",
            f"{case['cpu_us_a_batch']:.0f}",
            f"{case['cpu_us_a_request']:.1f}",
        )


def gpu_urgent():
    yield "", "p50 ms", "p99 ms", "others, images/s"
    cases = figures("gpu-urgent")["cases"]
    for name, said in (
        ("alone", "nothing else runs"),
        ("priority", "beside a flood, `priority=2`"),
        ("a share of 0.12", "on a part of the GPU, `partition(0.12)`"),
        ("a share of 0.25", "on a part of the GPU, `partition(0.25)`"),
    ):
        case = cases[name]
        flood = thousands(case["flood_per_s"]) if case["flood_per_s"] else "none"
        yield said, f"{case['p50_us'] / 1e3:.1f}", f"{case['p99_us'] / 1e3:.1f}", flood


def gpu_plans():
    """Yield what callers had of plans under the full library, beside its fastest raw loop."""
    yield (
        "callers",
        "ResNet-50, rows/s",
        "ratio",
        "cores",
        "p99, ms",
        "encoder, rows/s",
        "ratio",
        "cores",
        "p99, ms",
    )
    plans = figures("gpu-plans-8.6")
    for pair in zip(*(plans[f"{name}.plan"]["callers"] for name in ("resnet50", "encoder")), strict=True):
        cells = [f"{pair[0]['callers']:,}"]
        for case in pair:
            cells += [f"{case['rows_per_s']:,.0f}", f"{case['ratio']:.2f}", f"{case['cores']:.2f}"]
            cells += [f"{case['p99_us'] / 1e3:.1f}"]
        yield cells


def six():
    """Yield the figures of the README: what a request costs, and what a GPU gains."""
    yield "question", "figure"
    host = figures("overhead")
    yield (
        "requests/s through `await infer`, 256 callers, a no-op model on the event loop, one core",
        thousands(middle(host["host, 256"], "requests_per_s")),
    )
    yield (
        "round trip of a lone caller of it, on the event loop",
        f"{middle(host['host, 1'], 'mean_us'):.0f} µs",
    )
    served = figures("serving")["HTTP no-op, 64"]
    yield (
        "requests/s over HTTP, 64 connections, client and server on 2 cores",
        hundreds(middle(served, "requests_per_s")),
    )
    full = figures("gpu-saturation")["cases"]["1000 us, 64 requests of 1"]["ratio"]["one stream"]
    yield "H200: rows/s over a raw loop of the same batches of 1 ms", f"{full:.2f}"
    (plan,) = (one for one in figures("gpu-plans-8.6")["resnet50.plan"]["callers"] if one["callers"] == 256)
    yield (
        "H100, TensorRT 8.6, ResNet-50 in fp16, 256 callers: images/s; p99; share of a raw loop",
        f"{hundreds(plan['rows_per_s'])}; {plan['p99_us'] / 1e3:.0f} ms; {plan['ratio']:.2f}",
    )
    urgent = figures("gpu-urgent")["cases"]
    before, after = (urgent[name]["p99_us"] / 1e3 for name in ("priority", "a share of 0.25"))
    yield (
        "H200: p99 of an urgent request beside a flood, without and with a part of the GPU for it",
        f"{before:.1f} → {after:.1f} ms",
    )


def settings_of(cls, *, flag=False):
    """Return the function that yields the settings of a class: names, defaults and what they mean."""

    def yielded():
        yield "flag" if flag else "option", "default", "meaning"
        texts = docs_of(cls)
        for item in dataclasses.fields(cls):
            name = f"--{item.name.replace('_', '-')}" if flag else item.name
            default = "none" if item.default in (None, ()) else f"`{json.dumps(item.default)}`"
            if isinstance(item.default, bool):
                default = f"`{item.default}`"
            text = re.sub(r"(?<![\w`])'([^']+)'(?!\w)", r"`\1`", texts[item.name])
            yield f"`{name}`", default, text.replace("|", "\\|").replace(":mod:`logging`", "`logging`")

    return yielded


def typed_errors():
    """Yield every error, its statuses, and what it means."""
    yield "error", "is a", "HTTP", "gRPC", "meaning"
    for name, kind in vars(errors).items():
        if inspect.isclass(kind) and issubclass(kind, errors.AsynctrtError):
            text = " ".join(inspect.getdoc(kind).replace("``", "`").split())
            bases = ", ".join(f"`{base.__name__}`" for base in kind.__bases__)
            yield f"`{name}`", bases, str(kind.http_status), f"`{kind.grpc_code}`", text


def config_pbtxt():
    """Yield what asynctrt does with each setting of a ``config.pbtxt``."""
    yield "setting", "is", "meaning, or why"
    tables = {"read": model_config.READ, "refused": model_config.REFUSED, "ignored": model_config.IGNORED}
    for what, settings in tables.items():
        for path, said in settings.items():
            yield f"`{path}`", what, said


def other_words():
    """Yield what other programs call our options and flags."""
    yield "theirs", "ours"
    for theirs in sorted(SYNONYMS | COMMAND_SYNONYMS):
        ours = [words[theirs] for words in (COMMAND_SYNONYMS, SYNONYMS) if theirs in words]
        yield f"`{theirs}`", " or ".join(f"`{name}`" for name in ours)


def gpu_poisson():
    """Yield the latency of ResNet-50 under Poisson arrivals, beside the best possible."""
    yield "load", "best possible", "engine, p50", "p99", "p99 / best", "by hand, p99"
    found = figures("gpu-poisson")
    for share, case in found["load"].items():
        best, engine = case["ideal"]["p99_us"] / 1e3, case["engine, 4 contexts"]
        p50, p99 = engine["p50_us"] / 1e3, engine["p99_us"] / 1e3
        by_hand = case["hand-written"]["p99_us"] / 1e3
        yield (
            *(share, f"{best:.1f}", f"{p50:.1f}", f"{p99:.1f}"),
            *(f"{p99 / best:.2f}", f"{by_hand:.1f}"),
        )


def gpu_onnx():
    """Yield the rows/s of ONNX models on a GPU, on a loop with and without other work."""
    yield (
        *("", "bare loops", "engine, 1 caller", "8", "64", "256", "by hand, 1", "8", "64", "256"),
        *("loop never idle: engine, 256", "by hand"),
    )
    for name, model in figures("ort_cuda")["models"].items():
        if "failed" in model:
            continue
        callers = model["callers"]
        bare = max(rate for loops in model["bare"] for rate in loops.values())
        cells = [name, f"{bare:,.0f}"]
        for who in ("asynctrt", "by hand"):
            cells += [f"{callers[f'idle, {count}'][who]['requests_per_s']:,.0f}" for count in (1, 8, 64, 256)]
        cells += [f"{callers['busy, 256'][who]['requests_per_s']:,.0f}" for who in ("asynctrt", "by hand")]
        yield tuple(cells)


def zoo():
    """Yield the models of the zoo as last measured."""
    yield from zoo_lines(figures("zoo"))


def zoo_lines(models):
    """Yield how each model of the zoo opens, whether its answers are right, and its requests/s."""
    yield (
        *("model", "from", "opens as", "why", "answers equal to direct ones", "rows a batch"),
        *("requests/s", "a loop, 1 thread", "a loop, all cores"),
    )
    for name, found in models.items():
        options = ", ".join(f"`{option}`" for option in found["settings"])
        cells = [
            f"{name} ({options})" if options else name,
            found["from"],
            found["opens_as"],
            found["reason"],
        ]
        if "requests_per_s" in found:
            cells += [zoo_answers(found), f"{found['batch_rows']:.1f}"]
            cells += [
                f"{round(rate, -1) if rate > 1000 else rate:,.0f}"
                for rate in found["requests_per_s"].values()
            ]
        else:
            cells += [found.get("failed", ""), "", "", "", ""]
        yield tuple(cell.replace("|", "\\|") for cell in cells)


def zoo_answers(found):
    """Say how far the answers of one model are from direct ones."""
    if found["same_bit_for_bit"] == found["compared"]:
        return "bit for bit"
    if found["difference"] is None:
        return "**no**"
    within = f"to {found['difference']:.0e}"
    return within if found["is_within_tolerance"] else f"**no**, {within} only"


TABLES = {
    "six": six,
    "options": settings_of(Options),
    "tensorrt-options": settings_of(TensorRTOptions),
    "onnx-options": settings_of(OnnxOptions),
    "server-settings": settings_of(ServerSettings, flag=True),
    "load-settings": settings_of(LoadSettings, flag=True),
    "config-pbtxt": config_pbtxt,
    "errors": typed_errors,
    "synonyms": other_words,
    "overhead": overhead,
    "perceptron": perceptron,
    "serving": serving,
    "frameworks": frameworks,
    "several": several,
    "several-cost": several_cost,
    "workers": workers,
    "front-kills": front_kills,
    "busy-thread": busy_thread,
    "lateness": lateness,
    "lengths": lengths,
    "agreement": agreement,
    "goodput": goodput,
    "goodput-really": goodput_really,
    "gpu-completion": gpu_completion,
    "gpu-saturation": gpu_saturation,
    "gpu-poisson": gpu_poisson,
    "gpu-onnx": gpu_onnx,
    "gpu-onnx-poisson": gpu_onnx_poisson,
    "gpu-kills": gpu_kills,
    "gpu-faults": gpu_faults,
    "scale": scale,
    "gpu-urgent": gpu_urgent,
    "gpu-plans": gpu_plans,
    "gpu-function-sizes": gpu_function_sizes,
    "zoo": zoo,
}


def table(name):
    """Return the table of a name in Markdown."""
    return markdown(TABLES[name]())


def markdown(lines):
    """Return a table in Markdown: a line for the header, one for its rule, one for each case."""
    header, *lines = lines
    return "".join(
        "|" + "|".join(f" {cell} " if cell else " " for cell in cells) + "|\n"
        for cells in (header, ["---"] * len(header), *lines)
    )


def filled(text):
    """Return a text with its tables made anew."""
    return MARKED.sub(lambda found: f"{found[1]}\n{table(found[2])}\n{found[3]}", text)


if __name__ == "__main__":
    for document in DOCUMENTS:
        document.write_text(filled(document.read_text()))
