"""Environment variables that are set and have no effect.

The flag ``--http-port`` of ``asynctrt serve`` is also the variable ``ASYNCTRT_SERVE_HTTP_PORT``. A misspelt
name sets nothing, and the author of a manifest would not notice.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Final

from asynctrt._util.synonyms import ALL_SYNONYMS, nearest_name
from asynctrt._util.validation import REMOVED_OPTIONS, removed
from asynctrt.errors import OptionsError, UsageError

PREFIX: Final = "ASYNCTRT_"
SERVE: Final = "ASYNCTRT_SERVE_"

SERVICE_LINKS: Final = re.compile(r"_SERVICE_(HOST|PORT(_\w+)?)$|_PORT_\d+_(TCP|UDP|SCTP)(_\w+)?$")
"""Variables that Kubernetes sets for a service named asynctrt-something, in every pod of its namespace."""

SERVICE_LINK: Final = re.compile(r"(tcp|udp|sctp)://")
"""The start of the value of one more such variable, NAME_PORT."""


def misspelt(environment: Mapping[str, str], known: Iterable[str]) -> list[str]:
    """Return a sentence for each variable that looks like ours but sets nothing, with the right name."""
    names = list(known)
    return [
        _sentence(name, names)
        for name, value in sorted(environment.items())
        if name.startswith(PREFIX)
        and name not in names
        and not SERVICE_LINKS.search(name)
        and not (name.endswith("_PORT") and SERVICE_LINK.match(value))
    ]


def check_values(environment: Mapping[str, str], known: Iterable[str]) -> None:
    """Refuse known variables that are set but empty, and variables of options that were removed.

    Docker compose sets a variable that it does not know to nothing. It would count as not set: the server
    would run without tokens, or without TLS.

    :raises UsageError: if a known variable is empty.
    :raises OptionsError: if a variable sets an option that only earlier releases had.
    """
    names = set(known)
    for name in sorted(environment.keys() - names):
        option = name.removeprefix(SERVE).lower()
        if name.startswith(SERVE) and option in REMOVED_OPTIONS:
            raise OptionsError(f"{name}: {removed(option)}")
    empty = sorted(name for name in names if environment.get(name) == "")
    if empty:
        raise UsageError(f"{', '.join(empty)}: set and empty. Give it a value, or do not set it")


def _sentence(name: str, names: list[str]) -> str:
    meant = _meant(name, names)
    hint = f"did you mean {meant}?" if meant else "a flag of serve, --http-port, is ASYNCTRT_SERVE_HTTP_PORT"
    return f"{name} is not a variable of asynctrt, and sets nothing: {hint}"


def _meant(name: str, names: list[str]) -> str | None:
    """Return the nearest variable, or the variable for another program's name."""
    for prefix in (SERVE, PREFIX):  # What all names begin with would make any two of them alike.
        if name.startswith(prefix):
            own = {known.removeprefix(prefix).lower(): known for known in names if known.startswith(prefix)}
            return own.get(nearest_name(name.removeprefix(prefix).lower(), own, ALL_SYNONYMS) or "")
    return None
