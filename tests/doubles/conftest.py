"""Fixtures of the double's tests."""

import pytest

from tests.doubles.support import Bench


@pytest.fixture
def bench():
    """Make benches, and close them."""
    made = []

    def make(*args, **kwargs):
        made.append(Bench(*args, **kwargs))
        return made[-1]

    yield make
    for one in made:
        one.close()
