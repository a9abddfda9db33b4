"""What an engine tells of itself, and what older versions do not tell."""

from types import SimpleNamespace

import pytest

from asynctrt.backends.tensorrt.details import read_details
from asynctrt.errors import UsageError
from asynctrt.testing.tensorrt import EngineSpec


def test_what_an_engine_tells(bench):
    spec = EngineSpec(
        name="mine", weights_nbytes=8192, aux_streams=2, refittable=True, hardware_compatibility="AMPERE_PLUS"
    )
    details = bench(spec).model.details()
    assert (details.name, details.aux_streams, details.is_refittable) == ("mine", 2, True)
    assert (details.weights_nbytes, details.stripped_nbytes, details.streamable_nbytes) == (8192, 0, 0)
    assert (details.hardware_compatibility, details.capability) == ("AMPERE_PLUS", "STANDARD")
    assert details.layers > 0


def test_a_version_that_tells_no_sizes(bench):
    """Before 10.14, there are no figures of an engine."""
    made = bench(EngineSpec())
    details = read_details(SimpleNamespace(), made.model._loaded.engine)
    assert details.weights_nbytes is details.stripped_nbytes is None


def test_a_closed_model_tells_nothing(bench):
    made = bench(EngineSpec())
    made.model.close()
    with pytest.raises(UsageError, match="is closed"):
        made.model.details()
