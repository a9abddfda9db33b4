"""The notations of the options ``pad``, ``pad_with`` and ``shapes``."""

from collections.abc import Mapping
from typing import Any, Final

from asynctrt._util.frozen import FrozenDict
from asynctrt._util.validation import as_int, sizes_in
from asynctrt.errors import OptionsError

MASK: Final = "mask"
LENGTH: Final = "length"
OFF: Final = "off"

AUTO_REMOVED: Final = (
    "pad='auto' was removed: by default rows are padded where that changes no answer. Elsewhere give sizes: "
    "pad={'length': (32, 64, 128)}"
)


def sizes_of(given: Any) -> str | FrozenDict[str, tuple[int, ...]]:
    """Return the sizes of each dimension in rising order, from a mapping or a list of ``NAME=32,64,128``.

    ``off`` instead of the mapping: no dimension is padded. A name may be several names joined by ``=``, for a
    model that has several names for the dimension.

    :raises TypeError, ValueError: for anything else.
    :raises OptionsError: for ``auto``, which earlier releases had.
    """
    if given in (OFF, [OFF], (OFF,)):
        return OFF
    if _is_auto(given):
        raise OptionsError(AUTO_REMOVED)
    found = {}
    for name, sizes in _named(given).items():
        if _is_auto(sizes):
            raise OptionsError(AUTO_REMOVED)
        found[name] = tuple(
            sorted(set(sizes_in(sizes if isinstance(sizes, str | list | tuple) else [sizes])))
        )
    return FrozenDict(found)


def shapes_of(given: Any) -> tuple[FrozenDict[str, tuple[int, ...]], ...]:
    """Return shapes of rows, each with the dimensions of some inputs.

    They are given as a mapping, as several, or as texts such as ``images=3x640x640``, with spaces between
    inputs.

    :raises TypeError, ValueError: for anything else.
    """
    parts = [given] if isinstance(given, Mapping | str) else list(given)
    found = []
    for part in parts:
        named = _named(part.split() if isinstance(part, str) else part)
        found.append(FrozenDict({name: _dims(dims) for name, dims in named.items()}))
    return tuple(dict.fromkeys(found))


def values_of(given: Any) -> FrozenDict[str, int | float | str]:
    """Return the padding value of each input, from a mapping or a list of ``NAME=VALUE``.

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
    return FrozenDict(found)


def _dims(given: Any) -> tuple[int, ...]:
    if isinstance(given, str):
        text = given.strip("()[] ").rstrip(",").replace("x", ",")
        given = text.split(",") if text else ()
    dims = tuple(int(part) if isinstance(part, str) else as_int(part) for part in given)
    if any(size < 0 for size in dims):
        raise ValueError
    return dims


def _is_auto(given: Any) -> bool:
    if isinstance(given, list | tuple) and len(given) == 1:
        given = given[0]  # A command line flag that was given once.
    return isinstance(given, str) and given.partition(":")[0].strip() == "auto"


def _named(given: Any) -> dict[str, Any]:
    if isinstance(given, list | tuple) and all(isinstance(text, str) and "=" in text for text in given):
        parts = (text.rpartition("=") for text in given)
        given = {name.strip(): value.strip() for name, _, value in parts}
    if not isinstance(given, Mapping) or not given or not all(isinstance(name, str) for name in given):
        raise TypeError
    return dict(given)
