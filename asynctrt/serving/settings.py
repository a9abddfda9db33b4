"""The settings of a server: addresses, limits, times. The command's flags have the same names."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, get_args

from asynctrt._util.validation import (
    FLAG,
    PATH,
    PORT,
    TEXT,
    WORDS,
    changed_repr,
    choice,
    count,
    documented,
    duration,
    setting,
    validate,
)
from asynctrt.errors import OptionsError

SECONDS_MAX: Final = 1e6
TIMER_MS_MAX: Final = 2**31 - 2
"""gRPC's own limit for a time in ms; one more would mean none."""
ORIGIN: Final = re.compile(r"[a-z][a-z0-9+.-]*://[^/?#\sA-Z]+")
"""A page's origin, as browsers send it."""
OnDeviceLost = Literal["report", "exit"]
LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error"]


@documented
@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """Listening addresses and limits of a server. Times are in seconds, sizes in bytes.

    :raises OptionsError: for a value that is not valid, or two that contradict each other.
    """

    host: str = setting(
        default="127.0.0.1",
        check=TEXT,
        doc="""The address to listen on. The default accepts connections from this machine only; ``0.0.0.0``:
        any.""",
    )
    http_port: int = setting(
        default=8000,
        check=PORT,
        doc="Port of KServe over HTTP, the websocket, metrics and the dashboard. 0: any free port.",
    )
    grpc: bool = setting(
        default=True,
        check=FLAG,
        doc="Whether to serve gRPC.",
    )
    grpc_port: int = setting(
        default=8001,
        check=PORT,
        doc="Port of KServe over gRPC. 0: any free port.",
    )
    metrics_port: int | None = setting(
        default=None,
        check=PORT.or_none,
        doc="A port that serves only ``/metrics``, without a token. Triton's is 8002. Default: none.",
    )

    fronts: int = setting(
        default=1,
        check=count(1),
        doc="""Server processes that share the ports, each with its own event loop, for more requests than
        one core can read and write. Models run in worker processes, which all fronts share. Limits
        and the dashboard are each front's own; statistics are of all fronts, and metrics of all are at
        ``metrics_port``. Linux only.""",
    )

    tokens: tuple[str, ...] = setting(
        default=(),
        check=WORDS,
        is_secret=True,
        doc="""Bearer tokens. Every request needs one, except for health and the dashboard's page.
        Default: no request needs one.""",
    )
    tokens_file: Path | None = setting(
        default=None,
        check=PATH.or_none,
        doc="""A file with more bearer tokens, one a line. Every user of the machine can see ``tokens`` in
        the list of processes, but not this file's. Lines that are empty or begin with ``#`` do not count.
        SIGHUP makes the server read it again, and the certificate.""",
    )
    tls_certificate: Path | None = setting(
        default=None,
        check=PATH.or_none,
        doc="A PEM file with the certificate chain. With it and ``tls_key``, HTTP and gRPC use TLS.",
    )
    tls_key: Path | None = setting(
        default=None,
        check=PATH.or_none,
        doc="A PEM file with the certificate's key, without a passphrase.",
    )
    allow_origins: tuple[str, ...] = setting(
        default=(),
        check=WORDS,
        doc="""Origins whose pages may send requests and open websockets, besides the server's own; without
        ``tokens``, that only if it is an address or ``localhost``. ``*``: all origins.""",
    )
    allow_hosts: tuple[str, ...] = setting(
        default=(),
        check=WORDS,
        doc="""Names under which the server is reached, besides addresses, ``localhost``, ``host`` and the
        machine's own name. Requests that name another host are refused without ``tokens``, and always at
        ``metrics_port``, as a page could have made its name lead here. ``*``: all names.""",
    )
    model_control: bool = setting(
        default=False,
        check=FLAG,
        doc="Whether clients may load and unload models.",
    )

    max_body: int = setting(
        default=64 << 20,
        check=count(1),
        doc="Bytes of the largest request body, before and after decompression.",
    )
    max_memory: int | None = setting(
        default=None,
        check=count(1).or_none,
        doc="""Bytes that are held for all clients together: of bodies and messages that arrive, of requests
        in progress, of answers that are not sent yet. The server reads no large ones while there are more,
        then refuses. A message over gRPC counts as ``max_grpc_message`` until it has come. Besides, each
        connection may have 256 KiB. Default: 1 GiB, or 4 times ``max_body`` if that is more, but no more than
        a fifth of the memory that the machine or its container has.""",
    )
    max_grpc_message: int | None = setting(
        default=None,
        check=count(1).or_none,
        doc="""Bytes of the largest request over gRPC, within ``max_body``, and of the largest answer. While
        gRPC copies a message, no other request is served: 1 ms with 4 MiB, 4 ms with 16 MiB, 90 ms with 60
        MiB, so send large tensors over HTTP or websockets. Default: 4 MiB, or up to 16 MiB if a full batch of
        a model that is loaded at the start has that many bytes.""",
    )
    grpc_http2_min_recv_ping_interval_without_data: int = setting(
        default=5_000,
        check=count(0, TIMER_MS_MAX),
        doc="""How many ms apart the pings of a gRPC client must be, as in Triton; a client that pings more
        often is cut off. The shortest interval of clients in Go is 10 s.""",
    )
    grpc_max_connection_age: int | None = setting(
        default=None,
        check=count(1, TIMER_MS_MAX).or_none,
        doc="""After how many ms a gRPC connection is asked to end, as in Triton, so that clients behind a
        balancer of connections find new servers. Calls in progress finish. Default: never.""",
    )
    grpc_max_connection_age_grace: int | None = setting(
        default=None,
        check=count(1, TIMER_MS_MAX).or_none,
        doc="""How many ms calls in progress may then still take, as in Triton. Default: any time.""",
    )
    max_json: int = setting(
        default=4 << 20,
        check=count(1),
        doc="""Bytes of JSON in one request, of JSON in one answer (a number counts as four times its raw
        bytes), and of all but raw tensors in one request over gRPC. More is refused with status 413: send
        large tensors, and ask for them, as binary data. While JSON is parsed or written, no other
        request is served: 9 ms with the default.""",
    )
    max_answer: int = setting(
        default=1 << 30,
        check=count(1),
        doc="""Bytes of all outputs of one request, as far as the shapes of its inputs tell: a model that
        gives n x n values for n can be asked for more than there is memory. Where dimensions are padded,
        bytes of its inputs, too, as they are then.""",
    )
    max_headers: int = setting(
        default=64 << 10,
        check=count(1),
        doc="Bytes of a request line and its headers.",
    )
    max_connections: int = setting(
        default=4096,
        check=count(1),
        doc="""HTTP and websocket connections at once, and the same number for gRPC; requests on any further
        one are answered 503. A quarter is for clients that have none. Connections without a request give way
        to new ones, and health checks are always answered. ``asynctrt serve`` raises its own limit of open
        files as far as it may.""",
    )
    max_requests: int = setting(
        default=65536,
        check=count(1),
        doc="Requests in progress at once; any further one is answered 503.",
    )
    max_requests_per_connection: int = setting(
        default=256,
        check=count(1),
        doc="""Requests in flight on one websocket or gRPC stream, and calls on one gRPC connection. The
        server reads no more while there are more, or while their answers have more than ``max_body``
        bytes.""",
    )

    client_header: str | None = setting(
        default=None,
        check=TEXT.or_none,
        doc="""A header that names the client, for a server behind a proxy that sets it and lets no client set
        it, such as ``X-Real-IP``. Clients share models, memory and the server's time equally when there is
        not enough. Default: several tokens distinguish clients, otherwise their addresses do (of IPv6,
        their networks).""",
    )
    request_timeout: float = setting(
        default=60.0,
        check=duration(0, SECONDS_MAX),
        doc="""Time allowed from the first byte of a request, or of a websocket's message, to its last; over
        gRPC, from its headers to the end of its message.""",
    )
    idle_timeout: float = setting(
        default=120.0,
        check=duration(0, SECONDS_MAX),
        doc="How long a connection without traffic stays open.",
    )
    write_timeout: float = setting(
        default=30.0,
        check=duration(0, SECONDS_MAX),
        doc="""How long a client may read less than 1 KiB a second of an answer that is waiting for it; over
        gRPC, how long it may take for an answer whose room others need.""",
    )
    drain_timeout: float = setting(
        default=30.0,
        check=duration(0, SECONDS_MAX),
        doc="After SIGTERM: how long to wait for requests in progress, and for a model that is being loaded.",
    )
    drain_delay: float = setting(
        default=0.0,
        check=duration(0, SECONDS_MAX),
        doc="After SIGTERM: how long to go on serving as not ready, so that load balancers send elsewhere.",
    )

    on_device_lost: OnDeviceLost = setting(
        default="report",
        check=choice(*get_args(OnDeviceLost)),
        doc="""What to do when a model's GPU is lost, which only a new process can recover. ``report``: say
        that the server is not ready, and after 30 s that it is not alive. ``exit``: stop at once,
        with exit status 75.""",
    )

    gpu_memory: int | None = setting(
        default=None,
        check=count(1).or_none,
        doc="""Bytes that the models together may hold on each GPU: weights, what contexts keep, arenas and
        slabs. A model that does not fit is not loaded. With worker processes: each has it. Default: what the
        GPU has.""",
    )
    log_format: LogFormat = setting(
        default="text",
        check=choice(*get_args(LogFormat)),
        doc="""How ``asynctrt serve`` writes its log to standard error: ``text``, or ``json``, one object a
        line.""",
    )
    log_level: LogLevel = setting(
        default="info",
        check=choice(*get_args(LogLevel)),
        doc="""The least important lines that ``asynctrt serve`` logs: ``debug``, ``info``, ``warning`` or
        ``error``.""",
    )
    access_log: Path | None = setting(
        default=None,
        check=PATH.or_none,
        doc="""A file for one JSON object a request, an inference over websocket or gRPC included; ``-`` is
        standard output. Lines are dropped if the disk is full or the reader has stopped.""",
    )

    __repr__ = changed_repr

    def __post_init__(self) -> None:
        validate(self)
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise OptionsError("tls_certificate and tls_key go together: give both or neither")
        for origin in self.allow_origins:
            if origin not in ("*", "null") and not ORIGIN.fullmatch(origin):
                raise OptionsError(
                    f"allow_origins has {origin!r:.200}, which is not a page's origin: give it as browsers "
                    "send it, such as https://app.example, in lower case and without a slash at its end"
                )
        if self.max_memory is not None and self.max_memory < self.max_body:
            raise OptionsError(
                f"max_memory is {self.max_memory}, less than one request may have: max_body is "
                f"{self.max_body}. Raise the one, or lower the other"
            )
        if self.fronts > 1 and self.model_control:
            raise OptionsError(
                f"model_control is for a server of one process, and fronts is {self.fronts}. Leave one of "
                "them out"
            )
