"""What a server can be told: addresses, limits, times. The command's flags have the same names."""

import ast
import dataclasses
import inspect
import itertools
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

from asynctrt.errors import OptionsError
from asynctrt.options import whole


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerSettings:
    """How a server listens and what it bears. Times are in seconds, sizes in bytes.

    :raises OptionsError: for a value that is impossible, or at odds with another.
    """

    host: str = "127.0.0.1"
    """The address to listen on. The default is reached from this machine alone; ``0.0.0.0`` from anywhere."""
    http_port: int = 8000
    """KServe over HTTP, websocket, metrics and the dashboard. 0: one that is free."""
    grpc: bool = True
    """Whether to serve gRPC."""
    grpc_port: int = 8001
    """KServe over gRPC. 0: one that is free."""
    metrics_port: int | None = None
    """A port that has nothing but ``/metrics``, without a token. Triton's is 8002. Default: no such port."""

    tokens: tuple[str, ...] = field(default=(), repr=False)
    """Bearer tokens, one of which every request needs, but for health and the dashboard's page. None: open
    to all."""
    tls_certificate: Path | None = None
    """A PEM file with the certificate chain; with ``tls_key``, HTTP and gRPC speak TLS."""
    tls_key: Path | None = None
    """A PEM file with the certificate's key, without a passphrase."""
    allow_origins: tuple[str, ...] = ()
    """Origins whose pages may open websockets, besides the server's own; ``*``: all."""
    model_control: bool = False
    """Whether clients may load and unload models."""

    max_body: int = 64 << 20
    """The largest request body, and the largest one after it was decompressed."""
    max_json: int = 4 << 20
    """Bytes of JSON in one request. To read it holds the loop, 5 to 30 ms a MB: large tensors go raw."""
    max_headers: int = 64 << 10
    """Bytes of a request's line and headers."""
    max_tensors: int = 64
    """Inputs, and outputs, that a request may name."""
    max_connections: int = 4096
    """HTTP and websocket connections at once; a further one is closed at once."""
    max_requests: int = 65536
    """Requests that are being answered at once; a further one is answered 503."""
    max_requests_per_connection: int = 256
    """Requests in flight on one websocket or gRPC stream; the server then reads no further."""

    request_timeout: float = 60.0
    """From a request's first byte to its last."""
    idle_timeout: float = 120.0
    """How long a connection may stay open with nothing going on."""
    write_timeout: float = 30.0
    """How long a client may take none of an answer that waits for it."""
    drain_timeout: float = 30.0
    """After SIGTERM: how long requests that were taken may last."""
    drain_delay: float = 0.0
    """After SIGTERM: how long to go on, not ready, so that balancers send elsewhere."""

    access_log: Path | None = None
    """A file for one JSON object a request, an inference over websocket or gRPC included; ``-`` is standard
    output."""

    def __post_init__(self) -> None:
        for item in dataclasses.fields(self):
            value = getattr(self, item.name)
            count = whole(value)
            if item.name.startswith("max_") and (count is None or count < 1):
                raise OptionsError(f"{item.name} is a whole number of at least 1, not {value!r}")
            is_port = item.name.endswith("_port") and value is not None
            if is_port and (count is None or not 0 <= count < 65536):
                raise OptionsError(f"{item.name} is a port, 0 to 65535, not {value!r}")
            if item.name.endswith(("_timeout", "_delay")) and not (
                isinstance(value, int | float) and not isinstance(value, bool) and 0 <= value < 1e6
            ):
                raise OptionsError(f"{item.name} is in seconds, 0 or more, not {value!r}")
        if (self.tls_certificate is None) != (self.tls_key is None):
            raise OptionsError("tls_certificate and tls_key go together: give both or neither")
        for name in ("tokens", "allow_origins"):
            items: object = getattr(self, name)
            if not isinstance(items, list | tuple) or not all(_is_word(item) for item in items):
                raise OptionsError(f"{name} is a list of words of printable ASCII characters without spaces")
            object.__setattr__(self, name, tuple(items))


def _is_word(item: object) -> bool:
    return isinstance(item, str) and item != "" and item.isascii() and item.isprintable() and " " not in item


def attribute_docs(cls: type) -> dict[str, str]:
    """What stands below each field of a class: the help of the flag of that name.

    A field that has nothing below it belongs to the one above.
    """
    texts = {}
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(definition, ast.ClassDef)
    for item, below in itertools.pairwise(definition.body):
        if (
            isinstance(item, ast.AnnAssign)
            and isinstance(item.target, ast.Name)
            and isinstance(below, ast.Expr)
        ):
            text = ast.literal_eval(below.value)
            texts[item.target.id] = " ".join(text.replace("``", "'").split())
    return texts
