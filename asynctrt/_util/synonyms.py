"""Names from other servers and load testers, with asynctrt's names for the same things.

Messages use them: for ``max_batch_size`` the message suggests ``max_rows``.
"""

import difflib
from collections.abc import Iterable, Mapping
from typing import Final

SYNONYMS: Final = {
    "max_batch_size": "max_rows",
    "batch_size": "max_rows",
    "preferred_batch_size": "max_rows",
    "batch_timeout_micros": "max_delay",
    "batch_wait_timeout_s": "max_delay",
    "max_latency_ms": "max_delay",
    "max_queue_delay": "max_delay",
    "max_queue_delay_microseconds": "max_delay",
    "max_wait_time": "max_delay",
    "max_ongoing_requests": "max_queue_rows",
    "max_queued_requests": "max_queue_rows",
    "default_timeout_microseconds": "timeout",
    "priority_levels": "priorities",
    "instance_group": "contexts",
    "instance_count": "contexts",
    "num_replicas": "contexts",
    "replicas": "contexts",
    "workers": "isolation",
}
"""Engine options by the names of Triton, Ray Serve and BentoML."""

COMMAND_SYNONYMS: Final = {
    "concurrency": "callers",
    "connections": "callers",
    "users": "callers",
    "vus": "callers",
    "clients": "callers",
    "run_time": "seconds",
    "request_rate": "rate",
    "num_requests": "requests",
    "number_of_requests": "requests",
    "duration": "seconds",
    "time": "seconds",
    "qps": "rate",
    "rps": "rate",
    "stages": "rate",
    "iterations": "requests",
    "threads": "processes",
    "headers": "header",
    "summary_export": "json",
    "out": "json",
    "think_time": "think",
    "threshold": "slo",
    "output": "json",
    "port": "http_port",
    "address": "host",
    "gpu": "device",
    "gpus": "device",
    "max_concurrency": "max_requests",
    "verbose": "log_level",
    "ssl_certfile": "tls_certificate",
    "ssl_keyfile": "tls_key",
    "api_key": "tokens",
    "model_repository": "models",
    "model_control_mode": "model_control",
    "exit_timeout_secs": "drain_timeout",
    "log_verbose": "log_level",
    "workers": "fronts",
}
"""Flags by the names of Triton, Ray Serve, BentoML, k6 and hey."""

SHORT_FLAGS: Final = {
    "c": "callers",
    "d": "seconds",
    "z": "seconds",
    "n": "requests",
}
"""One-letter flags of hey and k6."""

ALL_SYNONYMS: Final = {**SYNONYMS, **COMMAND_SYNONYMS}
"""Flags take precedence over options: a server's ``workers`` are processes that accept clients."""


def nearest_name(
    given: str, names: Iterable[str], others: Mapping[str, str], cutoff: float = 0.75
) -> str | None:
    """Return the name that was most likely meant: the nearest one, or the meaning of the nearest synonym.

    A synonym for a name that is not among ``names`` has no match, whatever it resembles.

    :param others: synonyms, with the names that they stand for.
    :param cutoff: the minimum similarity, from 0 to 1: "bogus" is to "gpus" as 0.67.
    """
    known = set(names)
    if given in others and others[given] not in known:
        return None
    meant = {other: name for other, name in others.items() if name in known}
    found = difflib.get_close_matches(given, [*known, *meant], n=1, cutoff=cutoff)
    return meant.get(found[0], found[0]) if found else None
