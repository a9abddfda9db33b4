"""The settings of a load test as keywords, for type checkers and editors.

They are the fields of :class:`~asynctrt.loadtest.settings.LoadSettings`. A type checker cannot derive them,
so a test compares them. The types are wider than the types of the fields, because
:func:`asynctrt.loadtest.run` converts the values.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypedDict

from numpy.typing import ArrayLike

from asynctrt.loadtest.settings import Arrivals
from asynctrt.tensors import Array

Given = str | Path | Array | Mapping[str, ArrayLike]
"""A file of arrays, one array, or arrays by name."""


class RunSettings(TypedDict, total=False):
    """The settings by their names. Times are in seconds, or text such as ``"1m30s"``."""

    rate: float | str | None
    callers: int | str | None
    think: float | str
    arrivals: Arrivals
    seconds: float | str | None
    warmup: float | str
    requests: int | None
    repeats: int | None
    answer_timeout: float | str
    max_outstanding: int | None
    slo: str | Sequence[str]
    rows: int
    dims: str | Sequence[str]
    inputs: Given | None
    samples: int
    expect: Given | None
    rtol: float
    atol: float
    processes: int
    seed: int
