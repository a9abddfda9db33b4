"""Answers that come in pieces: detecting the last message, and reading a ``text/event-stream``."""

import json
import re
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

from asynctrt.errors import OptionsError

DONE: Final = b"[DONE]"
"""The last event of a stream from services such as OpenAI's."""
LINE_END: Final = re.compile(rb"\r\n|\n|\r")
FIELD: Final = re.compile(r"([A-Za-z_][\w-]*(?:\.[\w-]+)*)=(.*)", re.DOTALL)

IsLast = Callable[[int, str], bool]
"""Return whether a message is the last of an answer, given its number in it (from 1) and its text."""


@dataclass(frozen=True, slots=True)
class Streamed:
    """An answer that came in pieces: the last piece, and when each came."""

    last: bytes
    came_ns: "array[int]"


def ending(text: str) -> IsLast:
    """Return a function that recognises the last message of an answer.

    :param text: the number of messages in an answer, ``3``; a JSON field and its value, ``done=true`` or
        ``choices.0.finish_reason=stop``; a regular expression to search for, ``/end|stop/``; or any other
        text that the message contains, ``[END]``.
    :raises OptionsError: if ``text`` is empty, zero, or an invalid regular expression.
    """
    if text.isdecimal() and int(text):
        count = int(text)
        return lambda number, _: number >= count
    if not text or text.isdecimal():
        raise OptionsError(
            f"until_message must be a number of messages, field=value, /regex/ or a text, not {text!r}"
        )
    if len(text) > 2 and text[0] == text[-1] == "/":
        try:
            pattern = re.compile(text[1:-1])
        except re.error as error:
            raise OptionsError(f"until_message: {text!r} is not a regular expression: {error}") from error
        return lambda _, message: pattern.search(message) is not None
    field = FIELD.fullmatch(text)
    if field is not None:
        path, value = field[1].split("."), field[2]
        return lambda _, message: value in _texts_at(message, path)
    return lambda _, message: text in message


def _texts_at(message: str, path: Sequence[str]) -> tuple[str, ...]:
    """Return the ways to write the value of a field; empty if the message has no such field."""
    try:
        value: Any = json.loads(message)
        for name in path:
            value = value[int(name)] if isinstance(value, list) else value[name]
    except (ValueError, LookupError, TypeError, RecursionError):
        return ()
    return (json.dumps(value), value) if isinstance(value, str) else (json.dumps(value),)


class Events:
    """Parse the events of a ``text/event-stream`` incrementally."""

    def __init__(self) -> None:
        self._line: list[bytes] = []
        """The parts of an incomplete line."""
        self._has_cr = False
        self._kind = b""
        self._data: list[bytes] = []

    def feed(self, came: bytes) -> Iterator[tuple[bytes, bytes]]:
        """Yield the kind, which may be empty, and the data of each event that ends in these bytes.

        Skip comments, which services send to keep a connection alive.
        """
        if self._has_cr and came.startswith(b"\n"):
            came = came[1:]
        self._has_cr = came.endswith(b"\r")
        first, *others = LINE_END.split(came)
        self._line.append(first)
        for other in others:
            line, self._line = b"".join(self._line), [other]
            if line:
                name, _, value = line.partition(b":")
                if name == b"data":
                    self._data.append(value.removeprefix(b" "))
                elif name == b"event":
                    self._kind = value.removeprefix(b" ")
                continue
            kind, data, self._kind, self._data = self._kind, self._data, b"", []
            if data:
                yield kind, b"\n".join(data)
