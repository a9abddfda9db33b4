"""The option latency_target: where what is done for it is seen."""

import asyncio
import logging

import pytest

import asynctrt
from asynctrt.errors import OptionsError
from asynctrt.scheduling.replay import Choice
from tests.models import double_model, rows

pytestmark = pytest.mark.anyio
WAIT_S = 30


async def test_without_one_there_is_nothing_to_see():
    async with asynctrt.open(double_model()) as engine:
        assert engine.statistics().objective is None


async def test_it_is_in_the_statistics_and_refuses_nobody():
    async with asynctrt.open(double_model(), latency_target="p99 < 0.001ms") as engine:
        for _ in range(3):
            await asyncio.wait_for(engine.infer(rows(1)), WAIT_S)
        found = engine.statistics().objective
        assert isinstance(found, asynctrt.ObjectiveStatistics)
        assert found.target == "p99<0.001ms"
        assert (found.max_rows, found.max_in_flight, found.delay_s, found.changes) == (None, None, 0.0, 0)
        assert found.met_share is None
        assert found.reason == "too little is known yet"
        assert engine.statistics().refused == 0


async def test_a_change_is_logged_once_and_what_is_held_back_is_answered(caplog):
    async with asynctrt.open(double_model(), max_rows=8, latency_target="p99<20ms") as engine:
        with caplog.at_level(logging.INFO, "asynctrt"):
            engine._scheduler.objective.impose(Choice(4, 1, 1_000_000))
            answers = await asyncio.wait_for(
                asyncio.gather(*[engine.infer(value * rows(1)) for value in range(6)]), WAIT_S
            )
        assert [answer["output"][0, 1] for answer in answers] == [2 * value for value in range(6)]
        told = [record.getMessage() for record in caplog.records if "p99<20ms" in record.getMessage()]
        assert len(told) == 1
        assert "batches of at most 4 rows, 1 at once, held back for up to 1 ms (it was imposed)" in told[0]
        done = engine.statistics()
        assert (done.objective.max_rows, done.objective.max_in_flight, done.objective.delay_s) == (
            4,
            1,
            0.001,
        )
        assert max(done.by_batch_rows) <= 4


def test_what_is_no_target_is_refused():
    with pytest.raises(OptionsError, match="'p99' is not a latency target"):
        asynctrt.Options(latency_target="p99")
    assert asynctrt.Options(latency_target="p95 < 2s").latency_target == "p95<2000ms"
