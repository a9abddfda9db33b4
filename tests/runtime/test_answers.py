"""The errors that callers are given."""

import asyncio

import pytest

from asynctrt.errors import InputError
from asynctrt.runtime.answers import answer_error, deadline_error
from asynctrt.scheduling.key import FIXED_SHAPE
from asynctrt.scheduling.request import Request
from tests.models import rows
from tests.runtime.support import make_request

pytestmark = pytest.mark.anyio


async def test_a_caller_who_has_gone_away_is_told_nothing():
    waiting, gone = asyncio.get_running_loop().create_future(), asyncio.get_running_loop().create_future()
    gone.cancel()
    for future in (waiting, gone, None):
        request = make_request(rows(1), future=future)
        answer_error(request, InputError("wrong"))
        assert request.future is request.payload is None
    with pytest.raises(InputError, match="wrong"):
        await waiting
    assert gone.cancelled()


def test_a_deadline_says_how_long_was_waited():
    request = Request(1, FIXED_SHAPE, 0, 1_000_000, 3_500_000)
    assert str(deadline_error(request, 5_000_000)).startswith(
        "the timeout of 2.500 ms passed after 4.000 ms in the queue"
    )
