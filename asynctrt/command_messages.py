"""The command line's messages about a flag's value, in asynctrt's words.

Current versions of typer let pydantic say what is wrong, as a developer would want to read it; earlier ones
say it themselves, and are left as they are.
"""

from typing import Any, Final

KINDS: Final = {
    "int_parsing": "is not a whole number",
    "int_from_float": "is not a whole number",
    "float_parsing": "is not a number",
    "bool_parsing": "is not true or false",
    "greater_than_equal": "is less than {ge}",
    "less_than_equal": "is more than {le}",
}
"""What is said of each kind of wrong value."""

PREFIX: Final = "Value error, "
"""What pydantic writes before the message of a check that typer made itself."""


def reword(error: Any) -> None:
    """Say in plain English which value is wrong in an error of typer's, and in what way."""
    cause = error.__cause__
    if not callable(getattr(cause, "errors", None)):
        return
    first = cause.errors()[0]
    kind = KINDS.get(first["type"])
    if kind is not None:
        given = first["input"]
        error.message = f"{given if first.get('ctx') else repr(given)} {kind.format(**first.get('ctx', {}))}"
    else:
        error.message = error.message.removeprefix(PREFIX)
