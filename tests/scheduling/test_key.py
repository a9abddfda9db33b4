"""Keys: which requests may share a batch is one question, and what their batches cost is another."""

import itertools

from asynctrt.scheduling.key import FIXED_SHAPE, BatchKey

SHAPES = (), (("n", 3),), (("n", 4),)


def test_requests_share_a_batch_only_if_nothing_about_them_differs():
    keys = [
        BatchKey(shape, on_device, outputs)
        for shape in SHAPES
        for on_device in (False, True)
        for outputs in (False, True)
    ]
    assert len(set(keys)) == len(keys)
    for key, other in itertools.combinations(keys, 2):
        assert key != other


def test_the_key_of_rows_on_the_host_of_one_shape():
    assert BatchKey() == FIXED_SHAPE == ((), False, False, ())


def test_what_is_computed_costs_by_its_shape_alone():
    """Where rows come from does not change what the model does."""
    for shape in SHAPES:
        variants = [
            BatchKey(shape),
            BatchKey(shape, on_device=True),
            BatchKey(shape, outputs_on_device=True),
        ]
        assert {key.shape for key in variants} == {shape}


def test_copies_cost_by_where_the_rows_are():
    shape = SHAPES[1]
    keys = [
        BatchKey(shape, on_device=on_device, outputs_on_device=outputs)
        for on_device in (False, True)
        for outputs in (False, True)
    ]
    assert len({key.copy_key for key in keys}) == 4
