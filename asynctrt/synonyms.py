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
    "instance_count": "contexts",
    "instances": "contexts",
    "num_instances": "contexts",
    "num_replicas": "contexts",
    "replicas": "contexts",
    "workers": "isolation",
    "workers_per_device": "contexts",
}
"""What other servers call options of an engine: Triton, Ray Serve, BentoML, LitServe, TorchServe."""

COMMAND_SYNONYMS: Final = {
    "concurrency": "callers",
    "connections": "callers",
    "users": "callers",
    "vus": "callers",
    "concurrency_range": "callers",
    "number_of_users": "callers",
    "clients": "callers",
    "duration": "seconds",
    "run_time": "seconds",
    "measurement_interval": "seconds",
    "time": "seconds",
    "qps": "rate",
    "rps": "rate",
    "request_rate": "rate",
    "request_rate_range": "rate",
    "arrival_rate": "rate",
    "stages": "rate",
    "spawn_rate": "rate",
    "iterations": "requests",
    "num_requests": "requests",
    "number_of_requests": "requests",
    "request_count": "requests",
    "warmup_request_count": "warmup",
    "warm_up": "warmup",
    "ramp_up": "callers",
    "threads": "processes",
    "data": "body",
    "payload": "body",
    "request_body": "body",
    "json_body": "body",
    "headers": "header",
    "auth_token": "token",
    "summary_export": "json",
    "out": "json",
    "csv": "json",
    "export": "json",
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
    "http_address": "host",
    "gpu": "device",
    "gpus": "device",
    "accelerator": "device",
    "devices": "device",
    "reload": "watch",
    "backlog": "max_connections",
    "limit_concurrency": "max_requests",
    "max_concurrency": "max_requests",
    "timeout_keep_alive": "idle_timeout",
    "timeout_graceful_shutdown": "drain_timeout",
    "cors_origins": "allow_origins",
    "allowed_origins": "allow_origins",
    "metrics_address": "metrics_port",
    "quiet": "log_level",
    "debug": "log_level",
    "verbose": "log_level",
    "ssl_certfile": "tls_certificate",
    "ssl_keyfile": "tls_key",
    "api_key": "tokens",
    "api_keys_file": "tokens_file",
    "model_repository": "models",
    "model_control_mode": "model_control",
    "repository_poll_secs": "watch",
    "exit_timeout_secs": "drain_timeout",
    "log_verbose": "log_level",
    "workers": "fronts",
    "num_workers": "fronts",
    "api_server_count": "fronts",
}
"""What other servers and load testers call flags: Triton, uvicorn, vLLM, k6, Locust, wrk, perf_analyzer."""

SHORT_FLAGS: Final = {
    "c": "callers",
    "u": "callers",
    "d": "seconds",
    "z": "seconds",
    "n": "requests",
    "r": "rate",
}
"""Flags of one letter of load testers: wrk, hey, ab, k6, Locust."""

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
