"""Who is refused for being too late is told when to come again."""

import pytest

from asynctrt.errors import DeadlineError, DeadlineUnreachableError
from asynctrt.serving.api import error_answer


@pytest.mark.parametrize(("predicted_s", "header"), [(0.0, "1"), (0.02, "1"), (1.0, "1"), (2.3, "3")])
def test_in_whole_seconds_and_one_at_least(predicted_s, header):
    error = DeadlineUnreachableError("too late")
    error.predicted_s = predicted_s
    answer = error_answer(error)
    assert answer.status == DeadlineUnreachableError.http_status
    assert dict(answer.headers)["Retry-After"] == header


def test_others_are_not():
    assert "Retry-After" not in dict(error_answer(DeadlineError("expired")).headers)
