"""Templates of what is sent to servers that do not speak KServe, with placeholders for arrays.

In JSON, the string ``"${name}"`` stands for the array of that name as nested lists, and ``"${name[0]}"`` for
its first row. Within a longer string, or outside JSON, a placeholder is replaced by the text of its value.
The rest of the body is unchanged.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote

import numpy as np

from asynctrt.errors import OptionsError, UsageError
from asynctrt.tensors import Array

PLACE: Final = re.compile(r"\$\{(\w+)(?:\[(\d+)\])?\}")
PLACE_IN_JSON: Final = re.compile(rf'(?<!\\)"{PLACE.pattern}"|{PLACE.pattern}')
"""Matches a placeholder that is a whole JSON string, or is within one."""


class Template:
    """A message with placeholders for arrays.

    :param text: JSON, any other text, or bytes; ``@FILE`` for the content of a file. Only text can have
        placeholders.
    :raises UsageError: if the file cannot be read.
    """

    def __init__(self, text: str | bytes) -> None:
        if isinstance(text, str) and text.startswith("@"):
            try:
                self._content = Path(text[1:]).read_bytes()
            except OSError as error:
                raise UsageError(f"the body {text[1:]!r} cannot be read: {error}") from error
        else:
            self._content = text.encode() if isinstance(text, str) else bytes(text)
        try:
            self._text: str | None = self._content.decode()
        except UnicodeDecodeError:
            self._text = None
        self.is_text = self._text is not None
        found = PLACE.findall(self._text) if self._text is not None else []
        self.names = tuple(dict.fromkeys(name for name, _ in found))
        """The names of the arrays in the placeholders."""
        self.is_json = self._text is not None and _is_json(self._text.removeprefix("\ufeff"))

    def fill(self, inputs: Mapping[str, Array]) -> bytes:
        """Return the message for one request.

        :raises OptionsError: if an array or a row is missing, or has values that JSON cannot represent.
        """
        if not self.names or self._text is None:
            return self._content

        def shown(place: re.Match[str]) -> str:
            if not self.is_json:
                return _as_text(_value(place[1], place[2], inputs))
            if place[1] is not None:
                return _as_json(_value(place[1], place[2], inputs))
            return json.dumps(_as_text(_value(place[3], place[4], inputs)), ensure_ascii=False)[1:-1]

        return (PLACE_IN_JSON if self.is_json else PLACE).sub(shown, self._text).encode()


def has_places(text: str) -> bool:
    """Return whether a text has placeholders."""
    return PLACE.search(text) is not None


def fill_line(text: str, inputs: Mapping[str, Array], *, is_address: bool = False) -> str:
    """Replace the placeholders of a header or, percent-encoded, of an address by the text of their values.

    :raises OptionsError: if an array or a row is missing, or a value has a character that ends a header.
    """

    def shown(place: re.Match[str]) -> str:
        value = _as_text(_value(place[1], place[2], inputs))
        if is_address:
            return quote(value, safe="")
        if not value.isprintable():
            raise OptionsError(f"the value of {place[0]} has a character that cannot be in a header")
        return value

    return PLACE.sub(shown, text)


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _as_json(value: Any) -> str:
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except ValueError as error:
        raise OptionsError(
            "an array for the body contains NaN or infinity, which JSON cannot represent"
        ) from error


def _as_text(value: Any) -> str:
    while isinstance(value, list) and len(value) == 1:
        value = value[0]
    return value if isinstance(value, str) else _as_json(value)


def _value(name: str, row: str | None, inputs: Mapping[str, Array]) -> Any:
    place = f"${{{name}}}" if row is None else f"${{{name}[{row}]}}"
    if name not in inputs:
        known = (
            f"the arrays are {', '.join(map(repr, inputs))}" if inputs else "there are no arrays: set inputs"
        )
        raise OptionsError(f"the request names {place}, and {known}")
    array = inputs[name]
    if array.dtype.kind == "S":
        array = np.char.decode(array, "utf-8")
    if row is None:
        return array.tolist()
    if int(row) >= len(array):
        raise OptionsError(f"the request names {place}, and {name!r} has {len(array)} row(s) in a request")
    return array[int(row) : int(row) + 1].tolist()[0]  # Its row may be any object.
