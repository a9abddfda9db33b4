"""Environment variables that are set and have no effect.

The flag ``--http-port`` of ``asynctrt serve`` is also the variable ``ASYNCTRT_SERVE_HTTP_PORT``. A misspelt
name sets nothing, and the author of a manifest would not notice.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Final

from asynctrt._util.validation import REMOVED_OPTIONS, removed
from asynctrt.errors import OptionsError, UsageError

SERVE: Final = "ASYNCTRT_SERVE_"

SERVICE_LINK: Final = re.compile(r"_SERVICE_(HOST|PORT)|_PORT_\d+_")
"""Part of the names of variables that Kubernetes sets for a service named asynctrt-serve, in every pod of its
namespace. One more, NAME_PORT, has an address such as tcp://10.0.0.1:8000 as its value."""


def misspelt(environment: Mapping[str, str], known: Iterable[str]) -> list[str]:
    """Return a sentence for each variable that looks like one of ``serve`` but sets nothing."""
    names = set(known)
    return [
        f"{name} is not a variable of asynctrt, and sets nothing: see asynctrt serve --help"
        for name, value in sorted(environment.items())
        if name.startswith(SERVE)
        and name not in names
        and not SERVICE_LINK.search(name)
        and "://" not in value
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
