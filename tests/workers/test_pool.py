"""What the parent of several fronts tells them."""

import asyncio

import pytest

from asynctrt.workers.messages import From, Gone, channel, receive
from asynctrt.workers.pool import Member
from tests.helpers import WAIT_S

pytestmark = [pytest.mark.anyio, pytest.mark.tier2]


async def test_a_front_that_did_not_read_for_a_while_hears_all_that_matters():
    own, its = channel()
    own.settimeout(0)
    member = Member(asyncio.get_running_loop(), 0, own)
    for ticket in range(500):
        member.tell(From(ticket, 1, "x" * 1000))
    member.tell(Gone(7, "ended by SIGKILL"))
    heard = []
    async with asyncio.timeout(WAIT_S):
        while not heard or not isinstance(heard[-1], Gone):
            heard.append((await asyncio.to_thread(receive, its))[0])
    assert [message.ticket for message in heard[:-1]] == list(range(500))
    assert heard[-1].how == "ended by SIGKILL"
    member.forget()
    own.close()
    its.close()
