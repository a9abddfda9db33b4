"""How the options ``pad`` and ``pad_with`` may be written."""

from collections.abc import Mapping
from typing import Any, Final

from asynctrt.validation import as_int

MASK: Final = "mask"
LENGTH: Final = "length"


def sizes_of(given: Any) -> dict[str, tuple[int, ...]]:
    """Return the sizes of each dimension in rising order, from a mapping or a list of ``NAME=32,64,128``.

    A name may be several with ``=`` between them, for a model that has no one name for the dimension.

    :raises TypeError, ValueError: for anything else.
    """
    found = {name: _sizes(given) for name, given in _named(given).items()}
    if not all(found.values()) or min(map(min, found.values())) < 1:
        raise ValueError
    return found


def values_of(given: Any) -> dict[str, int | float | str]:
    """Return what each input is padded with, from a mapping or a list of ``NAME=VALUE``.

    :raises TypeError, ValueError: for anything but numbers, ``mask``, ``length`` and ``length:DIMENSION``.
    """
    found: dict[str, int | float | str] = {}
    for name, value in _named(given).items():
        if isinstance(value, str) and (value in (MASK, LENGTH) or value.startswith(f"{LENGTH}:")):
            found[name] = value
        elif isinstance(value, str):
            found[name] = float(value) if set(value) & set(".enEN") else int(value)
        elif isinstance(value, bool | int | float):
            found[name] = value
        else:
            raise TypeError
    return found


def _sizes(given: Any) -> tuple[int, ...]:
    if isinstance(given, str):
        given = [int(part) for part in given.strip("()[] ").rstrip(",").split(",")]
    return tuple(sorted({as_int(size) for size in (given if isinstance(given, list | tuple) else [given])}))


def _named(given: Any) -> dict[str, Any]:
    if isinstance(given, list | tuple) and all(isinstance(text, str) and "=" in text for text in given):
        parts = (text.rpartition("=") for text in given)
        given = {name.strip(): value.strip() for name, _, value in parts}
    if not isinstance(given, Mapping) or not given or not all(isinstance(name, str) for name in given):
        raise TypeError
    return dict(given)
