"""The words of other servers and load testers for what asynctrt calls otherwise, in one place.

They are for messages: who writes ``max_batch_size`` is told of ``max_rows``. A load test takes those of load
testers (:data:`asynctrt.loadtest.settings.SYNONYMS`), in Python and on the command line.
"""

import difflib
from collections.abc import Iterable, Mapping
from typing import Final

SYNONYMS: Final = {
    "batch_size": "max_rows",
    "max_batch_size": "max_rows",
    "preferred_batch_size": "max_rows",
    "batch_timeout_micros": "max_delay",
    "batch_wait_timeout_s": "max_delay",
    "max_latency_ms": "max_delay",
    "max_queue_delay": "max_delay",
    "max_queue_delay_microseconds": "max_delay",
    "max_wait_time": "max_delay",
    "max_ongoing_requests": "max_queue_rows",
    "max_queue_size": "max_queue_rows",
    "max_queued_requests": "max_queue_rows",
    "max_concurrent_batches": "max_in_flight",
    "default_timeout_microseconds": "timeout",
    "priority_levels": "priorities",
    "instance_group": "contexts",
    "num_instances": "contexts",
    "num_replicas": "contexts",
    "workers": "contexts",
    "workers_per_device": "contexts",
}
"""What other servers call options of an engine: Triton, Ray Serve, BentoML, LitServe, TorchServe."""

COMMAND_SYNONYMS: Final = {
    "concurrency": "callers",
    "connections": "callers",
    "users": "callers",
    "vus": "callers",
    "concurrency_range": "callers",
    "duration": "seconds",
    "measurement_interval": "seconds",
    "time": "seconds",
    "qps": "rate",
    "rps": "rate",
    "request_rate": "rate",
    "request_rate_range": "rate",
    "spawn_rate": "rate",
    "iterations": "requests",
    "num_requests": "requests",
    "request_count": "requests",
    "think_time": "think",
    "wait_time": "think",
    "threshold": "slo",
    "latency_threshold": "slo",
    "dim": "dims",
    "shape": "dims",
    "shapes": "dims",
    "input_data": "inputs",
    "html": "report",
    "output": "json",
    "port": "http_port",
    "bind": "host",
    "address": "host",
    "ssl_certfile": "tls_certificate",
    "ssl_keyfile": "tls_key",
    "api_key": "tokens",
    "api_keys_file": "tokens_file",
    "model_repository": "models",
    "model_control_mode": "model_control",
    "repository_poll_secs": "watch",
    "exit_timeout_secs": "drain_timeout",
    "log_verbose": "log_level",
}
"""What other servers and load testers call flags: Triton, uvicorn, vLLM, k6, Locust, wrk, perf_analyzer."""

ALL_SYNONYMS: Final = {**SYNONYMS, **COMMAND_SYNONYMS}


def nearest_name(given: str, names: Iterable[str], others: Mapping[str, str], cutoff: float) -> str | None:
    """Return the name that is most likely meant: the nearest, or what the nearest of ``others`` stands for.

    :param cutoff: how alike they must be, from 0 to 1.
    """
    known = set(names)
    meant = {other: name for other, name in others.items() if name in known}
    found = difflib.get_close_matches(given, [*known, *meant], n=1, cutoff=cutoff)
    return meant.get(found[0], found[0]) if found else None
