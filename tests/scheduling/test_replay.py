"""What would have become of requests with other batches."""

import pytest

from asynctrt.scheduling.replay import WORK_CONSERVING, Choice, Replayed, replay


def played(arrivals, choice=WORK_CONSERVING, *, takes=lambda rows, _: 10, within=15, **how):
    return replay(
        [item if isinstance(item, tuple) else (item, 1) for item in arrivals],
        choice,
        takes,
        within_ns=within,
        percentile=0.99,
        **{"begin_ns": 0, "rows_max": 4, "width": 1, "is_split": False, **how},
    )


@pytest.mark.parametrize(
    ("arrivals", "choice", "expected"),
    [
        # The first goes alone, and the others wait for it.
        ([0, 1, 2, 3], WORK_CONSERVING, Replayed(0.25, 19)),
        # They go together, which only the first waits for.
        ([0, 1, 2, 3], Choice(delay_ns=3), Replayed(1.0, 13)),
        # A full batch waits for nothing.
        ([0, 0, 0, 0], Choice(delay_ns=3), Replayed(1.0, 10)),
        ([0, 1], Choice(rows_max=2, delay_ns=5), Replayed(1.0, 11)),
        # Nobody else comes.
        ([0, 50], Choice(delay_ns=3), Replayed(1.0, 13)),
        ([0, 0, 0, 0], Choice(rows_max=2), Replayed(0.5, 20)),
        # What is larger than that goes alone.
        ([(0, 3), (0, 1)], Choice(rows_max=2), Replayed(0.5, 20)),
        ([(0, 3), (0, 2)], WORK_CONSERVING, Replayed(0.5, 20)),
    ],
)
def test_batches_are_formed_as_a_choice_says(arrivals, choice, expected):
    assert played(arrivals, choice) == expected


def test_several_at_once():
    assert played([0, 1], width=2) == Replayed(1.0, 10)
    assert played([0, 1], Choice(concurrency=1), width=2) == Replayed(0.5, 19)
    assert played([0, 0, 0, 0], width=2, is_split=True, takes=lambda rows, _: 4 * rows) == Replayed(1.0, 8)


def test_batches_beside_others_take_longer():
    assert played([0, 1], width=2, takes=lambda _, is_beside: 30 if is_beside else 10) == Replayed(0.5, 30)


def test_what_waits_when_it_begins_is_there_at_once():
    assert played([0, 1, 2, 3], begin_ns=5) == Replayed(1.0, 15)


def test_a_choice_in_words():
    assert str(WORK_CONSERVING) == "work-conserving"
    assert str(Choice(8, 1, 1_500_000)) == "batches of at most 8 rows, 1 at once, held back for up to 1.5 ms"
