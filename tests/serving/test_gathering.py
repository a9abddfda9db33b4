"""Calls that wait for each other so that their rows share a batch."""

import asyncio
from unittest.mock import Mock

import pytest

from asynctrt.serving.gathering import TURNS, WAIT_S, Gathering

pytestmark = pytest.mark.anyio


class Calls:
    """Calls that note when they were released, by the iteration of the loop."""

    def __init__(self):
        self.gathering = Gathering()
        self.turn = 0
        self.released = {}
        self.tasks = []

    def read(self, *names):
        for name in names:
            self.gathering.expect(name)

    def arrive(self, *names):
        for name in names:
            self.gathering.arrived(name)
            self.tasks.append(asyncio.create_task(self._wait(name)))

    async def _wait(self, name):
        if self.gathering.pays:
            await self.gathering.wait(None)
        self.released[name] = self.turn

    async def turns(self, count):
        for _ in range(count):
            await asyncio.sleep(0)
            self.turn += 1


async def test_calls_of_a_lone_caller_never_wait():
    calls = Calls()
    for name in "abc":
        calls.read(name)
        calls.arrive(name)
        await calls.turns(1)
    assert calls.released == {"a": 0, "b": 1, "c": 2}


async def test_calls_that_overlap_are_released_together():
    calls = Calls()
    calls.read("a", "b")
    calls.arrive("a")
    await calls.turns(TURNS // 2)
    calls.arrive("b")
    await calls.turns(TURNS // 2)
    calls.read("c")
    calls.arrive("c")
    await calls.turns(TURNS - 2)
    assert not calls.released
    await calls.turns(4)
    assert sorted(calls.released) == ["a", "b", "c"]
    assert len(set(calls.released.values())) == 1


async def test_a_call_that_waited_in_vain_is_the_last_to_wait():
    calls = Calls()
    calls.read("a", "b")
    calls.arrive("a", "b")
    await calls.turns(TURNS + 4)
    calls.read("c")
    calls.arrive("c")
    await calls.turns(TURNS + 4)
    assert calls.released["c"] > calls.released["a"] + TURNS
    calls.read("d")
    calls.arrive("d")
    await calls.turns(1)
    assert calls.released["d"] == calls.turn - 1


async def test_a_message_that_does_not_come_is_waited_for_once():
    calls = Calls()
    calls.read("silent", "a", "b")
    calls.arrive("a", "b")
    await calls.turns(2 * TURNS)
    assert not calls.released
    await asyncio.sleep(2 * WAIT_S)
    assert sorted(calls.released) == ["a", "b"]
    calls.read("c")
    calls.arrive("c")
    await calls.turns(TURNS + 4)
    assert "c" in calls.released


async def test_messages_that_never_come_hold_back_no_call_longer_however_many_there_are(monkeypatch):
    calls = Calls()
    loop = asyncio.get_running_loop()
    later = []
    monkeypatch.setattr(loop, "call_later", lambda delay, *of: later.append((delay, *of)) or Mock())
    for number in range(3):
        calls.read(f"silent {number}", "a", "b")
        calls.arrive("a")
        await calls.turns(TURNS)
        calls.read(f"another {number}")
        calls.arrive("b")
        await calls.turns(TURNS)
        assert not calls.released
        ((delay, give_up),) = later
        assert delay == WAIT_S
        give_up()
        await calls.turns(1)
        assert sorted(calls.released) == ["a", "b"]
        calls.released.clear()
        later.clear()


async def test_clients_whose_messages_come_are_waited_for_however_often():
    calls = Calls()
    calls.gathering.pays = True
    calls.read("next")
    for _ in range(3):
        calls.arrive("next")
        await calls.turns(1)
        calls.read("a", "next")
        calls.arrive("a")
        await calls.turns(TURNS + 4)
        assert "a" not in calls.released
        await asyncio.sleep(2 * WAIT_S)
        assert "a" in calls.released
        calls.released.clear()


async def test_a_call_that_ends_without_waiting_is_not_waited_for():
    calls = Calls()
    calls.read("a", "b", "bad")
    calls.arrive("a", "b")
    await calls.turns(2 * TURNS)
    assert not calls.released
    calls.gathering.arrived("bad")
    await calls.turns(TURNS + 4)
    assert sorted(calls.released) == ["a", "b"]


async def test_a_cancelled_call_holds_up_no_other():
    calls = Calls()
    calls.read("a", "b", "c")
    calls.arrive("a", "b", "c")
    await calls.turns(1)
    calls.tasks[1].cancel()
    await calls.turns(TURNS + 4)
    assert sorted(calls.released) == ["a", "c"]
