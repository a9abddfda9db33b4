"""Snapshots are values: frozen, compared, hashed, copied, pickled, turned into dictionaries and JSON."""

import copy
import dataclasses
import json
import pickle
from types import MappingProxyType

import pytest

import asynctrt
from asynctrt.statistics import (
    BatchStatistics,
    FrozenDict,
    ShapeStatistics,
    Statistics,
)
from tests.models import double_model, rows


def snapshot(**changes):
    zeros = {item.name: 0 for item in dataclasses.fields(Statistics)}
    sizes = {1: BatchStatistics(2, 3, 4, 5), 8: BatchStatistics(1, 1, 1, 1)}
    return Statistics(
        **{
            **zeros,
            "state": "open",
            "graphs": (1, 8),
            "launched": {"full": 3},
            "lanes": {7: 2},
            "by_batch_rows": sizes,
            "specialised": (),
        }
        | changes
    )


@pytest.mark.parametrize(
    "make",
    [copy.copy, copy.deepcopy, dataclasses.replace, lambda value: pickle.loads(pickle.dumps(value))],
)
def test_a_copy_equals_the_original(make):
    original = snapshot()
    made = make(original)
    assert made == original
    assert hash(made) == hash(original)
    assert type(made.by_batch_rows) is FrozenDict


def test_snapshots_differ_by_their_batches():
    assert snapshot() != snapshot(by_batch_rows={})
    assert len({snapshot(), snapshot(), snapshot(by_batch_rows={})}) == 2


def test_as_a_dictionary_and_as_json():
    plain = dataclasses.asdict(snapshot())
    assert plain["by_batch_rows"][1] == {"count": 2, "copy_in_ns": 3, "compute_ns": 4, "copy_out_ns": 5}
    assert json.loads(json.dumps(plain))["by_batch_rows"]["8"]["count"] == 1


@pytest.mark.parametrize("kind", [dict, MappingProxyType, FrozenDict])
def test_a_snapshot_keeps_a_frozen_copy_of_a_mapping(kind):
    sizes = {1: BatchStatistics(2, 3, 4, 5)}
    made = snapshot(by_batch_rows=kind(sizes))
    assert made.by_batch_rows == sizes
    sizes.clear()
    assert list(made.by_batch_rows) == [1]
    with pytest.raises(AttributeError):
        made.rows = 5


@pytest.mark.parametrize(
    "change",
    [
        lambda frozen: frozen.__setitem__(1, None),
        lambda frozen: frozen.__delitem__(1),
        lambda frozen: frozen.__ior__({2: None}),
        lambda frozen: frozen.clear(),
        lambda frozen: frozen.pop(1),
        lambda frozen: frozen.popitem(),
        lambda frozen: frozen.setdefault(2, None),
        lambda frozen: frozen.update({2: None}),
    ],
)
def test_a_frozen_mapping_cannot_be_changed(change):
    frozen = FrozenDict({1: "one"})
    with pytest.raises(TypeError, match=r"cannot be changed; dict\(mapping\) is a copy"):
        change(frozen)
    assert frozen == {1: "one"}
    assert dict(frozen) | {2: "two"} == {1: "one", 2: "two"}


@pytest.mark.anyio
async def test_the_statistics_of_an_engine_are_values():
    async with asynctrt.open(double_model()) as engine:
        await engine.infer(rows(1, 2))
        statistics = engine.statistics()
    assert pickle.loads(pickle.dumps(statistics)) == copy.deepcopy(statistics) == statistics
    assert json.loads(json.dumps(dataclasses.asdict(statistics)))["by_batch_rows"]["2"]["count"] == 1


def test_rows_per_batch():
    assert snapshot().mean_batch_rows == 0
    assert snapshot(rows=12, batches=3).mean_batch_rows == 4


def test_seconds_to_drain():
    sizes = {1: BatchStatistics(5, 0, 10**9, 0), 8: BatchStatistics(2, 10**8, 3 * 10**8, 4 * 10**8)}
    done = snapshot(by_batch_rows=sizes, contexts=3, contexts_quarantined=1)
    assert done.parallel_batches == 2
    assert done.drain_s() == 0
    assert dataclasses.replace(done, queued_rows=9).drain_s() == pytest.approx(2 * 0.4 / 2)
    later = dataclasses.replace(done, queued_rows=9, in_flight_batches=2)
    assert later.drain_s(waiting_rows=8) == pytest.approx((3 + 2) * 0.4 / 2)
    # Arenas bound what computes at once.
    assert dataclasses.replace(later, arenas=1).drain_s() == pytest.approx(4 * 0.4)


def test_nobody_knows_the_seconds_to_drain_before_a_batch_has_run_or_without_contexts():
    waiting = {"queued_rows": 1, "contexts": 1}
    for done in (snapshot(by_batch_rows={}, **waiting), snapshot(contexts_quarantined=1, **waiting)):
        assert done.drain_s() is None
    assert snapshot(by_batch_rows={}).drain_s() == 0


def test_a_front_that_is_told_of_no_batches_estimates_by_its_own_answers():
    front = snapshot(by_batch_rows={}, contexts=0, queued_rows=20, row_ns_foreign=5e7)
    assert front.drain_s() == pytest.approx(1.0)
    assert front.drain_s(waiting_rows=10) == pytest.approx(1.5)
    assert dataclasses.replace(front, queued_rows=0).drain_s() == 0


def test_the_share_of_busy_time():
    sizes = {1: BatchStatistics(1, 0, 10**9, 0)}
    before = snapshot(by_batch_rows=sizes, contexts=2)
    after = snapshot(by_batch_rows={**sizes, 2: BatchStatistics(1, 9, 10**9, 9)}, contexts=2)
    assert after.busy_share_since(before, 10**9) == 0.5
    assert after.busy_share_since(before, 4 * 10**9) == 0.125
    assert after.busy_share_since(before, 10**8) == 1.0


def test_shapes_that_were_specialised_are_told_once_each():
    small = ShapeStatistics("side=32", (1, 4), True, 3 * 10**9, 2**20, {1: 9 * 10**6}, {1: 3 * 10**6})
    large = dataclasses.replace(small, shape="side=64", is_captured=False)
    first, second = snapshot(specialised=(small,)), snapshot(specialised=(small, large))
    assert set(first.joined(second).specialised) == {small, large}
    assert second.without_gauges().specialised == ()
    assert pickle.loads(pickle.dumps(second)) == second
    assert str(small) == (
        "side=32: CUDA graphs of 1, 4 rows (1 rows 3.00 instead of 9.00 ms; built in 3.0 s, 1 MiB)"
    )
    assert str(large).startswith("side=64: sessions of 1, 4 rows")
