"""The keywords of `loadtest.run` for type checkers are its settings, by name and by type."""

import dataclasses
from collections.abc import Sequence
from types import UnionType
from typing import Union, get_args, get_origin, get_type_hints

from asynctrt.loadtest.settings import LoadSettings, RunSettings


def test_each_setting_has_one_that_accepts_what_is_kept():
    """By name and by type: what a field keeps, its keyword accepts."""
    given, kept = get_type_hints(RunSettings), get_type_hints(LoadSettings)
    assert set(given) == {item.name for item in dataclasses.fields(LoadSettings)}
    for name, kind in kept.items():
        assert kinds(kind) - {tuple[str, ...]} <= kinds(given[name]), name
        assert (type(None) in kinds(kind)) == (type(None) in kinds(given[name])), name
        assert (tuple[str, ...] == kind) == (Sequence[str] in kinds(given[name])), name


def kinds(kind):
    return set(get_args(kind)) if get_origin(kind) in (Union, UnionType) else {kind}
