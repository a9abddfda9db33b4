"""The batch sizes that are captured or run before the first request."""

import asyncio
import threading

import pytest

import asynctrt
from asynctrt._util.cancellation import current
from asynctrt.backends.function import FunctionModel
from asynctrt.devices.host import HostDevice
from asynctrt.runtime.prepare import few_sizes, sizes_up_to
from asynctrt.tensors import TensorSpec
from tests.helpers import WAIT_S, until

pytestmark = pytest.mark.anyio


def test_sizes_are_close_to_each_other():
    assert sizes_up_to(1) == (1,)
    assert sizes_up_to(3) == (1, 2, 3)
    assert sizes_up_to(64) == (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
    for rows_max in range(2, 300):
        sizes = sizes_up_to(rows_max)
        assert sizes[-1] == rows_max
        for rows in range(2, rows_max + 1):
            padded = min(size for size in sizes if size >= rows)
            assert padded < rows * 1.5, (rows, padded)


def test_few_sizes_waste_no_more_than_a_third_of_a_large_batch():
    assert few_sizes((), 1) == (1,)
    assert few_sizes((), 6) == (1, 2, 4, 6)
    assert few_sizes((), 24) == (1, 2, 4, 8, 16, 24)
    assert few_sizes((), 64) == (1, 2, 4, 8, 16, 24, 32, 48, 64)
    assert few_sizes((1, 3, 80), 64) == (1, 3, 64)


class Held(FunctionModel):
    """Lets the first ``after`` batches through, and holds the next until the latch is open."""

    def __init__(self, after):
        spec = TensorSpec("x", "float32", (4,))
        super().__init__(self.double, inputs=spec, outputs=spec, batch_sizes=(2, 4, 8))
        self.after, self.ran, self.begun, self.latch = after, [], threading.Event(), threading.Event()

    def create_context(self, device):
        self.cancellation = current()
        return super().create_context(device)

    def double(self, inputs):
        if len(self.ran) >= self.after:
            self.begun.set()
            self.latch.wait(WAIT_S)
        self.ran.append(len(inputs["x"]))
        return 2 * inputs["x"]


@pytest.mark.parametrize("after", [0, 5])
async def test_who_stops_waiting_for_an_engine_has_no_further_batches_run(after, caplog):
    model, device = Held(after), HostDevice(in_place="never", threads=3)

    async def opened():
        await asynctrt.open(model, device=device, contexts=3)

    opening = asyncio.create_task(opened())
    await until(model.begun.is_set)
    opening.cancel()
    await until(lambda: model.cancellation.is_cancelled)
    model.latch.set()
    with pytest.raises(asyncio.CancelledError):
        await opening
    # The threads of other contexts may have had theirs on the device by then.
    assert after < len(model.ran) <= after + 3
    assert not caplog.records
