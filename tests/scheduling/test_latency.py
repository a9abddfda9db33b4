"""The expectation: robust against outliers, bounded, and a lower bound where nothing was seen."""

from asynctrt.scheduling.latency import BUCKETS_MAX, WINDOW, LatencyModel


def seen(*durations_ns, rows=8):
    model = LatencyModel()
    for duration_ns in durations_ns:
        model.observe("bucket", rows, duration_ns)
    return model


def test_nothing_is_expected_before_anything_was_seen():
    assert LatencyModel().expected_ns("bucket", 1) is None


def test_one_outlier_does_not_move_it():
    assert seen(*[1000] * 10, 90_000).expected_ns("bucket", 8) == 1000


def test_it_follows_when_the_service_changes():
    model = seen(*[1000] * WINDOW, *[5000] * WINDOW)
    assert model.expected_ns("bucket", 8) == 5000


def test_it_is_a_low_quantile():
    assert seen(*range(1, 17)).expected_ns("bucket", 8) == 5


def test_a_size_never_seen_takes_the_nearest_smaller_one():
    model = seen(100, rows=2)
    model.observe("bucket", 8, 900)
    assert model.expected_ns("bucket", 7) == 100
    assert model.expected_ns("bucket", 64) == 900
    assert model.expected_ns("bucket", 1) is None


def test_buckets_do_not_share_expectations():
    assert seen(100).expected_ns("other", 8) is None


def test_the_least_recently_seen_bucket_is_forgotten():
    model = LatencyModel()
    for bucket in range(BUCKETS_MAX):
        model.observe(bucket, 1, 10)
    model.observe(0, 1, 10)
    model.observe("new", 1, 10)
    assert model.expected_ns(0, 1) == 10
    assert model.expected_ns(1, 1) is None


def test_what_was_seen_is_of_just_that_size():
    model = seen(100, rows=2)
    assert model.has_seen("bucket", 2)
    assert not model.has_seen("bucket", 3)
    assert not model.has_seen("other", 2)
    assert model.expected_ns("bucket", 3) == 100


def test_what_launching_costs_is_not_known_from_the_start():
    model = LatencyModel()
    assert model.direct_ns == model.graph_ns == 0


def test_a_size_is_known_for_sure_when_one_slow_batch_does_no_harm():
    model = LatencyModel()
    for number, duration_ns in enumerate([5000, 1000, 1000, 1000]):
        assert not model.is_sure("bucket", 2), number
        model.observe("bucket", 2, duration_ns)
    assert model.is_sure("bucket", 2)
    assert not model.is_sure("bucket", 3)
    assert not model.is_sure("other", 2)
    model.observe("bucket", 2, 5000)
    assert model.expected_ns("bucket", 2) == 1000
