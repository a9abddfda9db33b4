"""What batches of a simulated device cost."""

from tests.simulation.latency import Cost, CostTable, Entry, LatencyModel, linear


def test_sizes_between_and_beyond_are_on_straight_lines():
    model = linear((1, 1.0), (9, 5.0, 0.8, 0.4))
    assert model.cost((), 1) == Cost(0, 1_000_000, 0)
    assert model.cost((), 5) == Cost(400_000, 3_000_000, 200_000)
    assert model.cost((), 17) == Cost(1_600_000, 9_000_000, 800_000)
    assert model.cost((), 5).total_ns == 3_600_000


def test_a_line_that_falls_never_reaches_nothing():
    assert linear((8, 4), (9, 2)).cost((), 64).compute_ns == 500_000
    assert linear((8, 1), (9, 2)).cost((), 1).compute_ns == 250_000


def test_shapes_have_tables_of_their_own():
    model = LatencyModel(linear((1, 1.0)).table, {"long": CostTable([Entry(4, 0.0, 7.0, 0.0)])})
    assert model.cost("long", 1) == model.cost("long", 64) == Cost(0, 7_000_000, 0)
    assert model.cost("short", 1).compute_ns == 1_000_000
