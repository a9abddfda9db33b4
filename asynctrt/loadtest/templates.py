"""What a load test sends to a server that does not speak KServe: JSON or text with a request's arrays in it.

In JSON, the string ``"${name}"`` stands for the array of that name as nested lists, ``"${name[0]}"`` for its
first row. Within a longer string, or in what is not JSON, it is replaced by its text.
"""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from asynctrt.errors import OptionsError, UsageError
from asynctrt.tensors import Array

PLACE: Final = re.compile(r"\$\{(\w+)(?:\[(\d+)\])?\}")


class Template:
    """A message with places for arrays.

    :param text: JSON, or any other text; ``@FILE`` for the content of a file.
    :raises UsageError: if the file cannot be read.
    """

    def __init__(self, text: str) -> None:
        if text.startswith("@"):
            try:
                text = Path(text[1:]).read_text()
            except (OSError, UnicodeDecodeError) as error:
                raise UsageError(f"the body {text[1:]!r} cannot be read: {error}") from error
        self._text = text
        self.names = tuple(dict.fromkeys(name for name, _ in PLACE.findall(text)))
        """The arrays that it needs."""
        try:
            self._content = json.loads(text)
            self.is_json = True
        except json.JSONDecodeError:
            self.is_json = False

    def fill(self, inputs: Mapping[str, Array]) -> str:
        """Return the message for one request.

        :raises OptionsError: if an array, or a row of it, is missing.
        """
        if not self.names:
            return self._text
        if not self.is_json:
            return self._filled_text(self._text, inputs)
        return json.dumps(self._filled(self._content, inputs), ensure_ascii=False)

    def _filled(self, item: Any, inputs: Mapping[str, Array]) -> Any:
        if isinstance(item, dict):
            return {name: self._filled(part, inputs) for name, part in item.items()}
        if isinstance(item, list):
            return [self._filled(part, inputs) for part in item]
        if not isinstance(item, str):
            return item
        alone = PLACE.fullmatch(item)
        return _value(alone, inputs) if alone is not None else self._filled_text(item, inputs)

    @staticmethod
    def _filled_text(text: str, inputs: Mapping[str, Array]) -> str:
        def shown(place: re.Match[str]) -> str:
            value = _value(place, inputs)
            while isinstance(value, list) and len(value) == 1:
                value = value[0]
            return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

        return PLACE.sub(shown, text)


def _value(place: re.Match[str], inputs: Mapping[str, Array]) -> Any:
    name, row = place[1], place[2]
    if name not in inputs:
        known = (
            f"the arrays are {', '.join(map(repr, inputs))}" if inputs else "there are no arrays: set inputs"
        )
        raise OptionsError(f"the body names {place[0]}, and {known}")
    array = inputs[name]
    if array.dtype.kind == "S":
        array = np.char.decode(array, "utf-8")
    if row is None:
        return array.tolist()
    if int(row) >= len(array):
        raise OptionsError(f"the body names {place[0]}, and {name!r} has {len(array)} row(s) in a request")
    return array[int(row)].tolist()
