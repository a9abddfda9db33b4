"""Models of the latency: tables, what engines measured, what is refused."""

import dataclasses
import json

import numpy as np
import pytest

import asynctrt
from asynctrt.errors import OptionsError, UsageError
from tests.simulation.latency import Cost, parse_latency, read_latency

TABLE = [
    {"rows": 1, "compute_ms": 1.0},
    {"rows": 9, "copy_in_ms": 0.8, "compute_ms": 5.0, "copy_out_ms": 0.4},
]


def test_sizes_between_and_beyond_are_on_straight_lines():
    model = parse_latency({"batches": TABLE}, "x")
    assert model.cost((), 1) == Cost(0, 1_000_000, 0)
    assert model.cost((), 5) == Cost(400_000, 3_000_000, 200_000)
    assert model.cost((), 17) == Cost(1_600_000, 9_000_000, 800_000)
    assert model.cost((), 5).total_ns == 3_600_000


def test_a_line_that_falls_never_reaches_nothing():
    model = parse_latency({"batches": [{"rows": 8, "compute_ms": 4}, {"rows": 9, "compute_ms": 2}]}, "x")
    assert model.cost((), 64).compute_ns == 500_000
    rising = parse_latency({"batches": [{"rows": 8, "compute_ms": 1}, {"rows": 9, "compute_ms": 2}]}, "x")
    assert rising.cost((), 1).compute_ns == 250_000


def test_shapes_have_tables_of_their_own():
    model = parse_latency({"batches": TABLE, "shapes": {"long": [{"rows": 4, "compute_ms": 7}]}}, "x")
    assert model.cost("long", 1) == model.cost("long", 64) == Cost(0, 7_000_000, 0)
    assert model.cost("short", 1).compute_ns == 1_000_000


def test_what_is_written_is_read_again(tmp_path):
    content = {"batches": TABLE, "shapes": {"long": TABLE[:1]}, "lanes": 3, "jitter": 0.1, "splits": True}
    model = parse_latency(content, "x")
    path = tmp_path / "model.json"
    path.write_text(json.dumps(model.as_json()))
    again = read_latency(path)
    assert again.as_json() == model.as_json()
    assert (again.lanes, again.jitter, again.interference, again.splits) == (3, 0.1, 0.0, True)


@pytest.mark.anyio
async def test_the_statistics_of_an_engine_are_a_model():
    x, y = (asynctrt.TensorSpec(name, "float32", (2,)) for name in "xy")
    model = asynctrt.FunctionModel(lambda inputs: inputs["x"], inputs=x, outputs=y)
    async with asynctrt.open(model) as engine:
        await engine.infer(np.ones((3, 2), np.float32))
        known = json.loads(json.dumps(dataclasses.asdict(engine.statistics())))
    size = known["by_batch_rows"]["3"]
    assert parse_latency(known, "x").cost((), 3).compute_ns == pytest.approx(size["compute_ns"], abs=1)


def sizes(**compute_ms):
    return {
        rows[1:]: {"count": count, "copy_in_ns": 0, "compute_ns": ms * 1e6 * count, "copy_out_ns": 0}
        for rows, (ms, count) in compute_ms.items()
    }


def test_more_rows_never_cost_less_than_was_measured_of_fewer():
    model = parse_latency({"by_batch_rows": sizes(r1=(1, 10), r2=(3, 30), r3=(1, 10), r8=(4, 5))}, "x")
    assert [model.cost((), rows).compute_ns for rows in (1, 2, 3, 8)] == [
        10**6,
        2_500_000,
        2_500_000,
        4 * 10**6,
    ]


def test_the_runs_of_a_load_test_are_put_together():
    runs = [{"batches": {"costs": sizes(r1=(1, 10))}}, {"batches": {"costs": sizes(r1=(3, 30), r4=(9, 1))}}]
    content = {"runs": runs, "target": {"device": "host"}, "machine": {"cores": 6}}
    model = parse_latency(content, "x")
    assert [model.cost((), rows).compute_ns for rows in (1, 4)] == [2_500_000, 9_000_000]
    assert (model.lanes, model.splits) == (6, True)
    content["target"]["device"] = "cuda:0"
    assert (parse_latency(content, "x").lanes, parse_latency(content, "x").splits) == (1, False)


def test_a_benchmark_gives_its_raw_batches_on_the_fewest_threads():
    cases = [
        {"kind": "raw", "threads": threads, "rows": rows, "median": {"batch_ms": ms}}
        for threads, rows, ms in ((1, 1, 2.0), (1, 8, 4.0), (2, 1, 1.0))
    ]
    model = parse_latency({"cases": [*cases, {"kind": "engine", "callers": 1, "median": {}}]}, "x")
    assert [model.cost((), rows).compute_ns for rows in (1, 8)] == [2_000_000, 4_000_000]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ([], "is a list, not an object"),
        ({}, 'has no "batches": give a table'),
        ({"batches": []}, "batches must be a list such as"),
        ({"batches": [{"rows": 1}]}, "batches, entry 1 lacks rows or compute_ms"),
        ({"batches": [{"rows": 0, "compute_ms": 1}]}, "entry 1: rows must be a whole number from 1"),
        ({"batches": [*TABLE, TABLE[0]]}, "entry 3: 1 rows are there already"),
        ({"batches": [{"rows": 1, "compute_ms": "x"}]}, "compute_ms must be a number from 0"),
        ({"batches": [{"rows": 1, "compute_ms": float("nan")}]}, "compute_ms must be a number from 0"),
        ({"batches": [{"rows": 1, "compute_ms": 0}]}, "compute_ms must be above 0"),
        ({"batches": [{"rows": 1, "compute_ms": 1, "ms": 2}]}, "unknown key"),
        ({"batches": TABLE, "lane": 2}, "did you mean 'lanes'?"),
        ({"batches": TABLE, "lanes": 0}, "lanes must be a whole number"),
        ({"batches": TABLE, "jitter": 11}, "jitter is a share"),
        ({"batches": TABLE, "splits": 1}, "splits must be true or false"),
        ({"batches": TABLE, "shapes": []}, "shapes must be an object"),
        ({"by_batch_rows": {}}, "has no batch in it: measure for longer"),
        ({"by_batch_rows": {"1": {"count": 1}}}, "by_batch_rows must have count, copy_in_ns"),
        ({"by_batch_rows": sizes(r1=(0, 1))}, "took no time to compute"),
        ({"by_batch_rows": sizes(r0=(1, 1))}, "is out of range"),
        ({"runs": []}, "does not say what batches cost"),
        ({"runs": [{"batches": {"by_rows": {"1": 2}}}]}, "does not say what batches cost"),
        ({"runs": 3}, "is not the report of a load test"),
        ({"cases": []}, "has no batches of a model"),
        ({"cases": [3]}, "is not the report of a benchmark"),
    ],
)
def test_what_is_no_model_is_refused_with_the_fix(content, says):
    with pytest.raises(OptionsError) as caught:
        parse_latency(content, "model.json")
    assert says in str(caught.value)
    assert "model.json" in str(caught.value)


def test_a_file_that_is_not_json_names_its_line(tmp_path):
    path = tmp_path / "model.json"
    path.write_text('{"batches": [\n  {"rows": 1 "compute_ms": 1}]}')
    with pytest.raises(OptionsError, match=r"line 2, column 14 is not JSON"):
        read_latency(path)
    path.write_text("[" * 100_000)
    with pytest.raises(OptionsError, match="not JSON|too deeply"):
        read_latency(path)
    with pytest.raises(UsageError, match="cannot be read"):
        read_latency(tmp_path / "none.json")
