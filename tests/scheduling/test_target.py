"""A latency target in words."""

import pytest

from asynctrt.errors import OptionsError
from asynctrt.scheduling.target import Target


@pytest.mark.parametrize(
    ("text", "target", "said"),
    [
        ("p99<20ms", Target(0.99, 20_000_000), "p99<20ms"),
        (" p99.9 < 1.5 s ", Target(0.999, 1_500_000_000), "p99.9<1500ms"),
        ("p50<300us", Target(0.5, 300_000), "p50<0.3ms"),
        ("p99.99<1234567us", Target(0.9999, 1_234_567_000), "p99.99<1234.567ms"),
        ("p99<20000s", Target(0.99, 20_000 * 10**9), "p99<20000000ms"),
        ("p99<4611686018427.387904ms", Target(0.99, 2**62), "p99<4611686018427.387904ms"),
    ],
)
def test_a_percentile_and_a_time(text, target, said):
    found = Target.parse(text)
    assert found == target
    assert str(found) == said
    assert Target.parse(str(found)) == found


@pytest.mark.parametrize(
    "text",
    [
        "",
        "p99",
        "p99>20ms",
        "p99<20",
        "p40<1ms",
        "p100<1ms",
        "p99<0ms",
        "mean<1ms",
        "p99<9999999999s",
        f"p99<{'9' * 400}s",
    ],
)
def test_anything_else_is_refused(text):
    with pytest.raises(OptionsError, match="is not a latency target: write p99<20ms"):
        Target.parse(text)
