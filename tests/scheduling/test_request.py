"""The transition table, over every pair of state and change."""

import itertools

import pytest

from asynctrt.errors import InternalError
from asynctrt.scheduling.key import BatchKey
from asynctrt.scheduling.request import Change, Request, State, change

ALLOWED = {
    (State.QUEUED, Change.LAUNCH): State.IN_FLIGHT,
    (State.QUEUED, Change.FAIL): State.FAILED,
    (State.QUEUED, Change.CANCEL): State.CANCELLED,
    (State.QUEUED, Change.EXPIRE): State.EXPIRED,
    (State.IN_FLIGHT, Change.COMPLETE): State.DONE,
    (State.IN_FLIGHT, Change.FAIL): State.FAILED,
    (State.IN_FLIGHT, Change.CANCEL): State.MASKED,
    (State.MASKED, Change.COMPLETE): State.CANCELLED,
    (State.MASKED, Change.FAIL): State.CANCELLED,
}


def request_in(state: State) -> Request:
    request = Request(1, BatchKey(), 0, 0)
    request.state = state
    return request


@pytest.mark.parametrize(("state", "what"), list(itertools.product(State, Change)))
def test_every_pair(state, what):
    request = request_in(state)
    if (state, what) in ALLOWED:
        change(request, what)
        assert request.state is ALLOWED[state, what]
    else:
        with pytest.raises(InternalError, match=what.name):
            change(request, what)
        assert request.state is state


def test_repr_shows_the_state():
    assert repr(Request(3, BatchKey(), 1, 0)) == "<Request QUEUED rows=3 priority=1>"
