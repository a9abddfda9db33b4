"""Turns of the event loop belong to clients: their connections share them, and what is left waits."""

import asyncio
from functools import partial

import pytest

from asynctrt.serving.memory import MemoryLimit
from asynctrt.serving.turns import ACTIVE_MAX, LONE_TURN_NS, SHARED_NS, TURN_NS, Turns

pytestmark = pytest.mark.anyio


def accounts(*names):
    memory = MemoryLimit(100)
    return [memory.account(name) for name in names]


def shared(turns, *served):
    """Let turns be short, as several clients were served in a row, and the round be over soon."""
    for number, account in enumerate(served):
        turns.spend(account, number, number)
    turns.charge(served[0], turns.turn_ns)


async def rounds(count=1):
    for _ in range(count):
        await asyncio.sleep(0)


class TestTurns:
    async def test_one_is_short_while_there_are_others(self):
        turns, (one, other) = Turns(), accounts("one", "other")
        turns.spend(one, 0, 1)
        assert turns.left_ns(one) == LONE_TURN_NS - 1
        turns.spend(other, 2, 3)
        assert turns.turn_ns == TURN_NS
        assert turns.left_ns(one) == TURN_NS - 1
        now_ns = 2 * SHARED_NS
        turns.spend(one, now_ns, now_ns + TURN_NS)
        await rounds()
        assert turns.left_ns(one) == LONE_TURN_NS
        turns.spend(other, now_ns + SHARED_NS + TURN_NS + 1, now_ns + SHARED_NS + TURN_NS + 2)
        assert turns.left_ns(one) == LONE_TURN_NS, "it was alone for long"

    async def test_little_is_given_back_when_it_is_half_a_turn_or_of_many(self):
        turns, (one,) = Turns(), accounts("one")
        for _ in range(10):
            turns.charge(one, LONE_TURN_NS // 20)
            await rounds()
        assert turns.left_ns(one) == LONE_TURN_NS // 2
        turns.charge(one, 1)
        await rounds()
        assert turns.left_ns(one) == LONE_TURN_NS
        for account in accounts(*range(ACTIVE_MAX + 1)):
            turns.charge(account, 1)
        await rounds()
        assert not turns._active

    async def test_what_is_spent_counts_until_the_round_is_over(self):
        turns, (one, other) = Turns(), accounts("one", "other")
        shared(turns, one, other)
        await rounds()
        turns.spend(one, 0, TURN_NS)
        assert turns.left_ns(one) == 0
        assert turns.left_ns(other) == TURN_NS
        await rounds()
        assert turns.left_ns(one) == TURN_NS

    async def test_connections_of_one_client_share_its_turn_one_after_the_other(self):
        turns, (one, other) = Turns(), accounts("one", "other")
        shared(turns, one, other)
        await rounds()
        done = []

        def work(account, name, left):
            assert turns.left_ns(account) > 0
            done.append(name)
            turns.spend(account, 0, TURN_NS // 2)
            if left > 1:
                turns.wait(account, partial(work, account, name, left - 1))

        for name in "abc":
            turns.wait(one, partial(work, one, name, 2))
        turns.wait(other, partial(work, other, "x", 1))
        assert turns.left_ns(one) == 0, "others of the same client wait"
        seen = []
        for _ in range(3):
            await rounds()
            seen.append("".join(done))
            done.clear()
        assert seen == ["abx", "ca", "bc"]
        await rounds()
        assert not done

    async def test_one_that_fails_holds_up_nobody(self, caplog):
        turns, (one,) = Turns(), accounts("one")
        done = []
        turns.wait(one, lambda: 1 / 0)
        turns.wait(one, lambda: done.append(1))
        await rounds()
        assert done == [1]
        assert "ZeroDivisionError" in caplog.text

    async def test_calls_wait_for_the_turn_of_their_client(self):
        turns, (one, other) = Turns(), accounts("one", "other")
        shared(turns, one, other)
        await rounds()
        done = []

        async def call(account, name):
            await turns.enter(account, TURN_NS // 2)
            done.append(name)

        calls = [asyncio.create_task(call(one, number)) for number in range(4)]
        calls.append(asyncio.create_task(call(other, "x")))
        await rounds()
        assert done == [0, 1, "x"]
        calls[2].cancel()
        await asyncio.wait(calls)
        assert done == [0, 1, "x", 3]
