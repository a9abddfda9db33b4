"""The first tier's look at worker processes: rows, a failing row, a killed worker, a deadly row."""

import asyncio
import os
import signal

import numpy as np
import pytest

from asynctrt.errors import ExecutionError, PoisonError
from tests.helpers import until
from tests.workers.models import RAISE, SEGFAULT, rows
from tests.workers.test_isolated_engine import opened

pytestmark = pytest.mark.anyio


async def test_an_engine_in_a_worker_process():
    async with opened(max_rows=8, isolation="spare") as engine:
        firsts = [*range(1, 20), RAISE, SEGFAULT]
        answers = await asyncio.gather(*[engine.infer(rows(one)) for one in firsts], return_exceptions=True)
        assert isinstance(answers.pop(), PoisonError)
        assert type(answers.pop()) is ExecutionError
        for first, answer in zip(firsts, answers, strict=False):
            assert np.array_equal(answer["y"], 2 * rows(first))
        await until(lambda: engine.state == "open")
        deaths = engine.workers[0].deaths
        os.kill(engine.workers[0].pid, signal.SIGKILL)
        await until(lambda: engine.workers[0].deaths == deaths + 1)
        assert np.array_equal((await engine.infer(rows(7)))["y"], 2 * rows(7))
