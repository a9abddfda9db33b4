"""The words of other servers and load testers for what asynctrt calls otherwise, in one place.

They are for messages: who writes ``max_batch_size`` is told of ``max_rows``. A load test takes those of load
testers (:data:`asynctrt.loadtest.settings.SYNONYMS`), in Python and on the command line.
"""

import difflib
from collections.abc import Iterable, Mapping
from typing import Final

SYNONYMS: Final = {
    "max_batch_size": "max_rows",
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
"""What Triton, Ray Serve and BentoML call options of an engine."""

COMMAND_SYNONYMS: Final = {
    "concurrency": "callers",
    "connections": "callers",
    "users": "callers",
    "vus": "callers",
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
    "repository_poll_secs": "watch",
    "exit_timeout_secs": "drain_timeout",
    "log_verbose": "log_level",
    "workers": "fronts",
}
"""What Triton, Ray Serve, BentoML, k6 and hey call flags."""

SHORT_FLAGS: Final = {
    "c": "callers",
    "d": "seconds",
    "z": "seconds",
    "n": "requests",
}
"""Flags of one letter: hey's, and k6's."""

ALL_SYNONYMS: Final = {**SYNONYMS, **COMMAND_SYNONYMS}
"""Where there are flags, they go before options: a server's ``workers`` are processes that accept clients."""


def nearest_name(given: str, names: Iterable[str], others: Mapping[str, str], cutoff: float) -> str | None:
    """Return the name that is most likely meant: the nearest, or what the nearest of ``others`` stands for.

    A word of others' for a name that is not among ``names`` means nothing here, whatever it looks like.

    :param cutoff: how alike they must be, from 0 to 1.
    """
    known = set(names)
    if given in others and others[given] not in known:
        return None
    meant = {other: name for other, name in others.items() if name in known}
    found = difflib.get_close_matches(given, [*known, *meant], n=1, cutoff=cutoff)
    return meant.get(found[0], found[0]) if found else None
