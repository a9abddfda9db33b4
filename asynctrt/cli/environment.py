"""Environment variables: which there are, which are set, and which are set in vain.

A flag ``--http-port`` of ``asynctrt serve`` is also the variable ``ASYNCTRT_SERVE_HTTP_PORT``. A name that is
misspelt sets nothing, and whoever wrote it into a manifest would not notice.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Final

from asynctrt._util.synonyms import ALL_SYNONYMS, nearest_name
from asynctrt.errors import UsageError

PREFIX: Final = "ASYNCTRT_"

SERVICE_LINKS: Final = re.compile(r"_SERVICE_(HOST|PORT(_\w+)?)$|_PORT_\d+_(TCP|UDP|SCTP)(_\w+)?$")
"""What Kubernetes sets for a service that is named asynctrt-something, in every pod of its namespace."""

SERVICE_LINK: Final = re.compile(r"(tcp|udp|sctp)://")
"""How the value of the remaining one begins, NAME_PORT."""

SECRETS: Final = ("ASYNCTRT_SERVE_TOKENS", "ASYNCTRT_LOAD_TOKEN", "ASYNCTRT_LOAD_HEADER")


def variables(parameters: Mapping[str, Iterable[str]]) -> dict[str, str]:
    """Return the flag of each variable that has a meaning, with its command.

    :param parameters: the names of the parameters of each command that takes variables.
    """
    return {
        f"{PREFIX}{command.upper()}_{name.upper()}": f"{command} --{name.replace('_', '-')}"
        for command, names in parameters.items()
        for name in names
    }


def shown(name: str, value: str) -> str:
    """Return a variable's value as it may be shown: not, if it is a secret."""
    return "(set, not shown)" if name in SECRETS and value else value


def misspelt(environment: Mapping[str, str], known: Iterable[str]) -> list[str]:
    """Return a sentence for each variable that looks like ours and sets nothing, with the right one."""
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
    """Refuse variables of ours that are set and empty, as docker compose makes of one that it does not know.

    What was to be set would count as not set: a server without tokens, or without TLS.

    :raises UsageError: if there is one.
    """
    empty = sorted(name for name in known if environment.get(name) == "")
    if empty:
        raise UsageError(f"{', '.join(empty)}: set and empty. Give it a value, or do not set it")


def _sentence(name: str, names: list[str]) -> str:
    meant = _meant(name, names)
    hint = f"did you mean {meant}?" if meant else "asynctrt env --all lists those there are"
    return f"{name} is not a variable of asynctrt, and sets nothing: {hint}"


def _meant(name: str, names: list[str]) -> str | None:
    """Return the variable that is nearest, or the one that another program's word stands for."""
    for prefix in {known[: known.index("_", len(PREFIX)) + 1] for known in names}:
        if name.startswith(prefix):
            own = {known.removeprefix(prefix).lower(): known for known in names if known.startswith(prefix)}
            meant = nearest_name(name.removeprefix(prefix).lower(), own, ALL_SYNONYMS, 0.75)
            return own[meant] if meant else nearest_name(name, names, {}, 0.85)
    return nearest_name(name, names, {}, 0.85)
