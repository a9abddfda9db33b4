"""Whose request goes next: the gate alone, with simulated time."""

import random
from collections import Counter

import pytest

from asynctrt.serving.fairness import SHARED_NS, Gate, Ticket

MS = 1_000_000
BATCH = 64


def gate_of(*, batch=BATCH, busy=2, full=4, rows=4096):
    return Gate(
        batch_rows=batch,
        busy_rows=busy * batch,
        full_rows=full * batch,
        waiting_rows_max=rows,
    )


def send(gate, lane, rows=1, *, now_ns=0, **kw):
    """A request that passes, or waits."""
    ticket = Ticket(lane, rows, **kw)
    if not gate.enter(ticket, now_ns):
        gate.wait(ticket)
    return ticket


def flood(gate, name="greedy", count=1000, rows=1, **kw):
    lane = gate.lane(name)
    return [send(gate, lane, rows, **kw) for _ in range(count)]


def finish(gate, tickets, now_ns=0):
    """End what is inside, and return what is admitted then."""
    for ticket in tickets:
        gate.end(ticket)
    return gate.admit(now_ns)


def test_while_there_is_room_everybody_passes():
    gate = gate_of()
    assert all(ticket.is_inside for ticket in flood(gate, count=4 * BATCH))
    assert not flood(gate, "greedy", 1, rows=BATCH)[0].is_inside
    assert (gate.rows, gate.waiting) == (4 * BATCH, 1)


def test_who_has_little_does_not_wait():
    gate = gate_of()
    flood(gate)
    late = gate.lane("late")
    assert [send(gate, late).is_inside for _ in range(BATCH // 4 + 1)] == [True] * (BATCH // 4) + [False]


def test_many_connections_of_one_client_have_little_together():
    gate = gate_of()
    flood(gate)
    passed = [send(gate, gate.lane("greedy")).is_inside for _ in range(100)]
    assert sum(passed) == BATCH // 4


def test_nobody_overtakes_what_his_connection_has_waiting():
    gate = gate_of(batch=8)
    greedy = flood(gate, count=100)
    lane = next(ticket.lane for ticket in greedy)
    for ticket in greedy:
        gate.end(ticket)
    assert gate.waiting
    assert not send(gate, lane).is_inside


def test_another_ones_request_makes_the_queue_short():
    """A flood that fits into the engine's queue is noticed when it holds somebody up."""
    gate = gate_of()
    greedy = flood(gate, count=4 * BATCH)
    assert gate.waiting == 0
    assert send(gate, gate.lane("late"), now_ns=MS).is_inside
    more = [send(gate, greedy[0].lane, now_ns=MS) for _ in range(1000)]
    assert not more[0].is_inside
    # An eighth of a batch less than two stay inside, so that the next one is not full.
    while gate.rows > 2 * BATCH - BATCH // 8:
        assert finish(gate, [greedy.pop()], MS) == []
    assert finish(gate, [greedy.pop()], MS) == more[:1]
    # It is as long as before when nobody came for a while.
    gate.admit(SHARED_NS)
    assert gate.rows < 2 * BATCH
    gate.admit(SHARED_NS + MS)
    assert gate.rows == 4 * BATCH


def test_equals_make_nobody_wait_longer():
    """Many connections of one client with little each are no reason to keep the queue short."""
    gate = gate_of()
    assert all(send(gate, gate.lane("one")).is_inside for _ in range(4 * BATCH))


@pytest.mark.parametrize("sizes", [(1, 1), (1, 16), (4, 64), (64, 3)])
def test_clients_have_the_same_rows_however_they_come(sizes):
    gate = gate_of()
    inside = []
    for number, size in enumerate(sizes):
        inside += [one for one in flood(gate, number, 2048 // size, size) if one.is_inside]
    rows = Counter()
    for _ in range(6):
        ended, inside = inside, []
        inside = finish(gate, ended)
        for ticket in inside:
            rows[ticket.lane.client] += ticket.rows
    assert len(rows) == 2
    few, many = sorted(rows.values())
    assert many - few <= 2 * max(*sizes, BATCH // 4)


def test_connections_of_a_client_share_what_it_gets():
    gate = gate_of(batch=8)
    inside = flood(gate, "other") + flood(gate, "many")
    lanes = [gate.lane("many") for _ in range(4)]
    for _ in range(200):
        for lane in lanes:
            send(gate, lane)
    rows = Counter()
    inside = [ticket for ticket in inside if ticket.is_inside]
    for _ in range(15):
        inside = finish(gate, inside)
        for ticket in inside:
            rows[ticket.lane] += 1
    shares = [rows[lane] for lane in lanes]
    assert min(shares) > 0
    assert max(shares) - min(shares) <= 4


def test_urgent_requests_go_first_and_gain_no_share():
    gate = gate_of(batch=8)
    lane = gate.lane("urgent")
    inside = flood(gate, "plain", 500)
    plain = [send(gate, lane) for _ in range(100)]
    urgent = [send(gate, lane, priority=2) for _ in range(100)]
    order = []
    inside = [ticket for ticket in [*inside, *plain, *urgent] if ticket.is_inside]
    waited = [ticket for ticket in [*plain, *urgent] if not ticket.is_inside]
    rows = Counter()
    while any(ticket.is_waiting for ticket in waited):
        inside = finish(gate, inside)
        order += [ticket.priority for ticket in inside if ticket.lane is lane]
        if any(ticket.is_waiting for ticket in waited):
            rows.update(ticket.lane.client for ticket in inside)
    assert order == sorted(order, reverse=True)
    few, many = sorted(rows.values())
    assert many - few <= 8


def test_too_much_is_refused_to_who_has_the_most():
    gate = gate_of(batch=8, rows=100)
    lane = flood(gate, "greedy", 132)[0].lane
    assert gate.waiting_rows == 100
    assert gate.make_room(Ticket(lane, 1)) == ([], False)
    late = Ticket(gate.lane("late"), 8)
    crowded, has_room = gate.make_room(late)
    assert has_room
    assert [ticket.lane for ticket in crowded] == [lane] * 8
    assert not any(ticket.is_waiting for ticket in crowded)
    gate.wait(late)
    assert gate.waiting_rows == 100


def test_what_has_left_is_not_admitted():
    gate = gate_of(batch=8)
    greedy = flood(gate, "greedy", 500)
    gone = [ticket for ticket in greedy if ticket.is_waiting][::2]
    assert all(gate.leave(ticket) for ticket in gone)
    assert not gate.leave(gone[0])
    inside = [ticket for ticket in greedy if ticket.is_inside]
    while gate.waiting:
        inside = finish(gate, inside)
        assert inside
        assert not set(inside) & set(gone)
    assert gate.waiting_rows == 0


def test_deadlines():
    gate = gate_of(batch=8)
    lane = flood(gate, "greedy", 32)[0].lane
    tickets = [send(gate, lane, deadline_ns=number) for number in (30, 10, 20)]
    assert gate.earliest_ns() == 10
    gate.leave(tickets[1])
    assert gate.earliest_ns() == 20
    assert gate.due(20) == tickets[2:]
    assert gate.due(29) == []
    assert gate.due(30) == tickets[:1]
    assert (gate.earliest_ns(), gate.waiting) == (None, 0)


def test_with_no_room_to_wait_everybody_passes():
    gate = gate_of(rows=0)
    assert all(ticket.is_inside for ticket in flood(gate, count=10_000))


def test_clients_are_forgotten_with_their_requests():
    gate = gate_of()
    for number in range(100):
        gate.end(send(gate, gate.lane(number)))
    assert len(gate._clients) == 0


def counted(gate, lanes, tickets, now_ns):
    """The requests that are still there, as the gate counts them."""
    inside = [ticket for ticket in tickets if ticket.is_inside]
    waiting = [ticket for ticket in tickets if ticket.is_waiting]
    assert gate.rows == sum(ticket.rows for ticket in inside)
    assert gate.waiting == len(waiting) == sum(lane.waiting for lane in lanes)
    assert gate.waiting_rows == sum(ticket.rows for ticket in waiting)
    assert not waiting or inside or gate.admit(now_ns), "what waits is let in when nothing else is"
    return inside + waiting


@pytest.mark.parametrize("seed", range(20))
def test_any_order_of_events(seed):
    """Nothing is lost, counts are right, and whoever has little is in the engine within a few batches."""
    choose = random.Random(seed)
    gate = gate_of(batch=choose.choice([1, 2, 8]), rows=choose.choice([20, 200]))
    lanes = [gate.lane(name) for name in (1, 1, 2, 3)]
    tickets, now_ns = [], 0
    for _ in range(2000):
        now_ns += choose.randrange(5 * MS)
        match choose.randrange(8):
            case 0 | 1 | 2 | 3:
                ticket = Ticket(
                    choose.choice(lanes),
                    choose.randint(1, gate.batch_rows),
                    priority=choose.randrange(3),
                    deadline_ns=now_ns + choose.randrange(100 * MS),
                )
                if not gate.enter(ticket, now_ns) and gate.make_room(ticket)[1]:
                    gate.wait(ticket)
                tickets.append(ticket)
            case 4 | 5:
                inside = [ticket for ticket in tickets if ticket.is_inside]
                for ticket in choose.sample(inside, choose.randint(0, len(inside))):
                    gate.end(ticket)
                gate.admit(now_ns)
            case 6:
                waiting = [ticket for ticket in tickets if ticket.is_waiting]
                if waiting:
                    gate.leave(choose.choice(waiting))
            case 7:
                assert all(ticket.deadline_ns <= now_ns for ticket in gate.due(now_ns))
        tickets = counted(gate, lanes, tickets, now_ns)
    for ticket in gate.clear():
        assert not ticket.is_waiting
    assert (gate.waiting, gate.waiting_rows) == (0, 0)
