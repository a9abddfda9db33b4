"""What the parent of several fronts tells them."""

import asyncio
import os

import pytest

import asynctrt
from asynctrt.errors import ModelError
from asynctrt.workers import pool as pool_module
from asynctrt.workers import spares
from asynctrt.workers.messages import (
    ATTACH_FDS,
    Attach,
    Close,
    Detach,
    Failed,
    From,
    Gone,
    Kill,
    Lost,
    Outbox,
    Ready,
    To,
    Want,
    channel,
    receive,
)
from asynctrt.workers.pool import Member, WorkerPool
from tests.helpers import WAIT_S, until
from tests.models import double_model

pytestmark = [pytest.mark.anyio, pytest.mark.tier2]


async def test_a_front_that_did_not_read_for_a_while_hears_all_that_matters():
    own, its = channel()
    own.settimeout(0)
    member = Member(0, outbox := Outbox(asyncio.get_running_loop(), own))
    for ticket in range(500):
        member.tell(From(ticket, 1, "x" * 1000))
    member.tell(Gone(7, "ended by SIGKILL"))
    heard = []
    async with asyncio.timeout(WAIT_S):
        while not heard or not isinstance(heard[-1], Gone):
            heard.append((await asyncio.to_thread(receive, its))[0])
    assert [message.ticket for message in heard[:-1]] == list(range(500))
    assert heard[-1].how == "ended by SIGKILL"
    outbox.close()
    own.close()
    its.close()


class Process:
    """A worker that notes what it is told."""

    pid = 1

    def __init__(self):
        self.told = []

    def send(self, message, fds=()):
        self.told.append((message, len(fds)))

    def kill(self, why=""):
        self.told.append((why, 0))


async def test_a_front_whose_descriptors_did_not_arrive_does_not_end_the_worker_of_others(monkeypatch):
    """Where the parent has none left, the kernel drops those that it was sent."""
    started = Started(monkeypatch, fronts=2)
    await started.say_ready(0)
    for number, count in ((0, ATTACH_FDS), (1, ATTACH_FDS - 1)):
        fds = [os.open(os.devnull, os.O_RDONLY) for _ in range(count)]
        started.pool.hear(number, To(1, Attach(4096, 4096, 0, 4)), fds)
    told = started.processes[0].told
    assert [(type(message), fds) for message, fds in told] == [(Attach, ATTACH_FDS), (Detach, 0)]
    heard = [receive(started.ends[1][1])[0] for _ in range(2)]
    assert isinstance(heard[1], Gone)
    assert "ulimit -n" in heard[1].how
    for number in (0, 1):
        started.gone(number)


class Started:
    """A pool whose workers are no processes, and fronts that want one.

    :param settings: of the engine that they want.
    """

    def __init__(self, monkeypatch, fronts, **settings):
        self.processes, self.hears, self.deaths = [], [], []
        self.ends = {}
        monkeypatch.setattr(pool_module, "start_worker", self._start)
        self.pool = WorkerPool(asyncio.get_running_loop())
        self.settings = settings
        for number in range(fronts):
            self.front(number)

    async def _start(self, _want, hear, died):
        self.processes.append(Process())
        self.hears.append(hear)
        self.deaths.append(died)
        return self.processes[-1]

    def front(self, number, *places):
        own, its = self.ends[number] = channel()
        its.settimeout(0)
        self.pool.add(number, Outbox(asyncio.get_running_loop(), own))
        for ticket, place in enumerate(places or [""], start=1):
            self.want(number, ticket, place)

    def gone(self, number):
        self.pool.remove(number)
        for end in self.ends.pop(number):
            end.close()

    def want(self, number, ticket, place=""):
        wanted = Want("kind", "host", asynctrt.Options(**self.settings), place)
        self.pool.hear(number, To(ticket, wanted), [])

    async def say_ready(self, *numbers):
        async with asyncio.timeout(WAIT_S), asynctrt.open(double_model()) as engine:
            ready = Ready(engine.description, engine.statistics())
        for number in numbers:
            await until(lambda number=number: len(self.hears) > number)
            self.hears[number](ready)

    def closed(self):
        """Which workers were closed."""
        return [
            number
            for number, process in enumerate(self.processes)
            if any(isinstance(message, Close) for message, _ in process.told)
        ]


async def test_workers_of_one_model_on_one_device_are_shared_each_with_its_own_kind(monkeypatch):
    """Two workers on one device, or two names of one model, differ in nothing but their places."""
    started = Started(monkeypatch, fronts=0, isolation="spare")
    for number in (0, 1):
        started.front(number, "a, worker 0", "a, worker 1", "b, worker 0")
    await started.say_ready(0, 1, 2)
    await until(lambda: len(started.processes) == 6)  # Each has a spare.
    for _, its in started.ends.values():
        heard = [receive(its)[0] for _ in range(3)]
        assert [(message.ticket, type(message.message)) for message in heard] == [
            (ticket, Ready) for ticket in (1, 2, 3)
        ]
    for number in (0, 1):
        started.pool.hear(number, To(2, Close()), [])
    assert started.closed() == [1]
    for number in (0, 1):
        started.gone(number)


async def test_a_worker_is_kept_for_fronts_that_take_the_places_of_all_that_died(monkeypatch):
    started = Started(monkeypatch, fronts=2, isolation="spare")
    await started.say_ready(0, 1)
    for number in (0, 1):
        started.gone(number)
    for number in (0, 1):
        started.front(number)
    for _, its in started.ends.values():
        heard, _ = receive(its)
        assert isinstance(heard.message, Ready)
    assert (len(started.processes), started.closed()) == (2, [])
    for number in (0, 1):
        started.pool.hear(number, To(1, Close()), [])
    assert started.closed() == [0, 1], "who closes an engine does not want it again"
    started.gone(0)
    started.gone(1)


@pytest.fixture(params=[False, True], ids=["worker and spare", "spare alone"])
async def left(request, monkeypatch):
    """A pool without fronts, and the numbers of the workers that the last one has left there."""
    started = Started(monkeypatch, fronts=1, isolation="spare")
    await started.say_ready(0, 1)
    if request.param:
        started.deaths[0]("ended by SIGKILL")
    started.gone(0)
    return started, [1] if request.param else [0, 1]


async def test_what_new_fronts_do_not_want_is_closed(left):
    started, unused = left
    started.front(0, "of another model")
    await started.say_ready(2, 3)
    started.pool.close_unused()
    assert started.closed() == unused
    started.gone(0)


async def test_what_no_front_has_is_closed_with_the_pool(left):
    started, unused = left
    assert started.closed() == []
    closing = asyncio.create_task(started.pool.aclose(WAIT_S))
    await until(lambda: started.closed() == unused)
    for number in unused:
        started.deaths[number]("ended with status 0")
    await closing


async def test_spares_that_die_are_replaced(monkeypatch):
    monkeypatch.setattr(spares, "PAUSE_S", 0.001)
    started = Started(monkeypatch, fronts=1, isolation="spare")
    await started.say_ready(0)
    for number in range(1, 5):
        await started.say_ready(number)
        started.deaths[number]("ended by SIGKILL")
    started.want(0, ticket=2)  # Whoever comes to the worker next starts no other one.
    await until(lambda: len(started.processes) == 6)
    started.deaths[0]("ended by SIGSEGV")
    started.want(0, ticket=3)
    await started.say_ready(5)
    await until(lambda: len(started.processes) == 7)
    started.gone(0)


@pytest.mark.parametrize("says", ["a front", "the worker", "the worker as it opens"])
async def test_why_a_worker_ended_is_heard_once_by_each_front(monkeypatch, says):
    """A front puts the reason behind how the worker ended: it must not be in both."""
    started = Started(monkeypatch, fronts=2)
    if says != "the worker as it opens":
        await started.say_ready(0)
    await until(lambda: started.hears)
    match says:
        case "a front":
            started.pool.hear(0, To(1, Kill("it hangs")), [])
        case "the worker":
            started.hears[0](Lost("it hangs"))
        case _:
            started.hears[0](Failed(ModelError("it hangs")))
    started.deaths[0]("ended by SIGKILL")
    for _, its in started.ends.values():
        heard = []
        while not heard or not isinstance(heard[-1], Gone):
            heard.append(receive(its)[0])
        assert heard[-1].how == "ended by SIGKILL"
        whys = [message.message for message in heard[:-1]]
        assert [why for why in whys if not isinstance(why, Ready)] == [
            Failed(whys[-1].error) if says == "the worker as it opens" else Lost("it hangs")
        ]
    for number in (0, 1):
        started.gone(number)
