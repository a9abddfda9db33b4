"""Any KServe V2 server over HTTP as a load test's target.

A request's body is built once and sent many times. An answer is decoded only when its arrays are needed.
"""

import asyncio
import warnings
from collections.abc import Mapping
from typing import Any, Final

from asynctrt.errors import (
    AsynctrtError,
    ConnectionLostError,
    MissingExtraError,
    OptionsError,
    OverloadError,
    RequestError,
    TargetError,
)
from asynctrt.kserve.client import (
    TEXT_LENGTH_MAX,
    UNREADABLE,
    AnswerError,
    as_arrays,
    read_answer,
    read_specs,
    takes_binary,
    write_request,
)
from asynctrt.kserve.datatypes import write_tensor
from asynctrt.kserve.json_codec import parse_object
from asynctrt.loadtest.kserve import (
    PAGE_S,
    REFUSALS,
    Address,
    read_address,
    read_counters,
)
from asynctrt.loadtest.targets import (
    ANSWER_NBYTES_MAX,
    BatchCounters,
    Headers,
    TargetSpec,
    has,
    headers_of,
)
from asynctrt.loadtest.tls import Tls
from asynctrt.tensors import Array

try:
    import aiohttp
    from aiohttp.http_exceptions import ContentEncodingError
    from multidict import CIMultiDict
    from yarl import URL
except ImportError as error:
    raise MissingExtraError("load tests of servers need aiohttp: pip install 'asynctrt[load]'") from error

HEADERS_NBYTES_MAX: Final = 256 << 10
HEADERS_MAX: Final = 5000

OVERLOADED: Final = (429, 503)
"""Statuses of servers that have too much to do."""

KINDS: Final = {kind.http_status: kind for kind in (*REFUSALS, OverloadError)}
"""The error for each HTTP status of a KServe answer."""


class Pages:
    """Read a server's description and statistics of one model, and own the connections to the server."""

    def __init__(self, address: Address, headers: Headers, tls: Tls) -> None:
        self.address = address
        if has(headers, "Accept-Encoding"):
            raise OptionsError("the header 'Accept-Encoding' cannot be given: answers are read as they are")
        self.session = open_session(
            [*headers, ("Accept-Encoding", "identity")],
            tls.used_by(address.server.partition(":")[0]),
            skip_auto_headers=("Accept", "User-Agent"),
            auto_decompress=False,
        )
        self.takes_binary = True

    async def read(self) -> None:
        """Read the model's inputs, and whether the server accepts binary tensors."""
        metadata = await self._object(self.address.path)
        self.inputs = read_specs(metadata.get("inputs") or ())
        try:
            self.takes_binary = takes_binary(await self._object("/v2"))
        except AsynctrtError:
            return  # Some servers lack this page; keep the default.

    async def counters(self) -> BatchCounters | None:
        """Return the statistics of the model; ``None`` if the server has none, or they are too large.

        :raises ConnectionLostError: if the server cannot be reached or times out.
        """
        try:
            status, body = await self._ask(f"{self.address.path}/stats")
        except TargetError:
            return None
        if status != 200:
            return None
        try:
            return read_counters(parse_object(body, "the answer")["model_stats"])
        except UNREADABLE:
            return None

    async def aclose(self) -> None:
        """Close the connections."""
        await self.session.close()

    async def _object(self, path: str) -> dict[str, Any]:
        status, body = await self._ask(path)
        if status != 200:
            raise refusal(f"{self.address.shown}{path}", status, body)
        try:
            return parse_object(body, "the answer")
        except RequestError as error:
            raise TargetError(f"{self.address.shown}{path} is not in KServe's form: {error}") from error

    async def _ask(self, path: str) -> tuple[int, bytes]:
        url = URL(self.address.server + path, encoded=True)
        try:
            async with (
                asyncio.timeout(PAGE_S),
                self.session.get(url, allow_redirects=False) as response,
            ):
                return response.status, await read_body(response)
        except TimeoutError as error:
            raise ConnectionLostError(
                f"{self.address.shown}{path} did not answer within {PAGE_S:g} s"
            ) from error
        except (aiohttp.ClientError, OSError) as error:
            raise failure(self.address.shown + path, error) from error


class HttpTarget:
    """Send to the model at ``http://HOST:PORT/v2/models/NAME``, each request on a separate connection.

    :raises UsageError: for an address that names no server.
    :raises OptionsError: for one that names no model, or another than ``spec``.
    """

    kind = "http"
    in_flight_max = None
    has_connections = True
    """Whether each request in flight uses a separate connection."""

    def __init__(self, spec: TargetSpec) -> None:
        self._pages = pages = Pages(read_address(spec), headers_of(spec), spec.tls)
        self.name = pages.address.model
        self._server = pages.address.shown
        self._url = URL(f"{pages.address.server}{pages.address.path}/infer", encoded=True)
        self._post = pages.session.post
        self._create_task = asyncio.get_running_loop().create_task

    async def open(self) -> None:
        """Read the server's description of the model."""
        await self._pages.read()
        self.inputs = self._pages.inputs

    def prepare(self, inputs: Mapping[str, Array]) -> Any:
        arrays = as_arrays(inputs)
        tensors = [write_tensor(array) for array in arrays.values()] if self._pages.takes_binary else None
        body, headers = write_request(arrays, tensors)
        with warnings.catch_warnings():
            # aiohttp warns that sending a body of more than 1 MiB blocks the event loop. It does, but
            # reading a file in pieces, as the warning advises, takes longer.
            warnings.simplefilter("ignore", ResourceWarning)
            return aiohttp.BytesPayload(body, headers=headers)

    def start(self, prepared: Any) -> "asyncio.Future[Any]":
        return self._create_task(self._send(prepared))

    async def _send(self, payload: Any) -> tuple[bytes, Mapping[str, str]]:
        try:
            response = await self._post(self._url, data=payload, allow_redirects=False)
            body = await read_body(response)
        except (aiohttp.ClientError, OSError) as error:
            raise failure(self._server, error) from error
        if response.status != 200:
            raise refusal(self._server, response.status, body)
        return body, response.headers

    def outputs(self, answer: Any) -> Mapping[str, Array]:
        body, headers = answer
        coding = headers.get("Content-Encoding", "identity")
        if coding != "identity":
            raise TargetError(f"the answer is compressed with {coding}, which the request did not accept")
        try:
            return read_answer(body, headers)
        except AnswerError as error:
            raise TargetError(str(error)) from error

    async def batches(self) -> BatchCounters | None:
        return await self._pages.counters()

    async def aclose(self) -> None:
        await self._pages.aclose()


def open_session(headers: Headers, ssl: Any, **settings: Any) -> aiohttp.ClientSession:
    """Open a session that sends these headers with every request, and keeps no cookies."""
    return aiohttp.ClientSession(
        # Do not limit the connections, because a request that waits for one would be late. Resolve the host
        # name only once.
        connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=None, ssl=ssl),
        headers=CIMultiDict(headers),
        cookie_jar=aiohttp.DummyCookieJar(),
        timeout=aiohttp.ClientTimeout(total=None),  # The load test has its own timeout.
        # The limits of browsers and curl; the library's defaults are meant for servers.
        max_line_size=HEADERS_NBYTES_MAX,
        max_field_size=HEADERS_NBYTES_MAX,
        max_headers=HEADERS_MAX,
        **settings,
    )


async def read_body(response: aiohttp.ClientResponse) -> bytes:
    """Read the body of an answer. Release the connection, or close it if reading fails or is cancelled.

    :raises TargetError: if it has more than ``ANSWER_NBYTES_MAX`` bytes; the rest is not read.
    """
    nbytes = response.content_length
    if nbytes is not None and nbytes <= ANSWER_NBYTES_MAX and "Content-Encoding" not in response.headers:
        return await response.read()
    body = bytearray()
    try:
        if nbytes is None or nbytes <= ANSWER_NBYTES_MAX:
            async for piece in response.content.iter_any():
                body += piece
                if len(body) > ANSWER_NBYTES_MAX:
                    break
            else:
                return bytes(body)
        raise too_long()
    except BaseException:
        response.close()
        raise


def too_long() -> TargetError:
    """Return the error for an answer with too many bytes."""
    return TargetError(f"the answer has more than {ANSWER_NBYTES_MAX:,} bytes, and is not read any further")


def refusal(where: str, status: int, body: bytes) -> AsynctrtError:
    """Return the error for the status of a KServe server other than 200."""
    try:
        said = parse_object(body, "the answer")["error"]
        kind = KINDS[status]
    except (KeyError, AsynctrtError):
        return unsuccessful(where, status, body)
    return kind(str(said)[:TEXT_LENGTH_MAX])


def unsuccessful(where: str, status: int, body: bytes) -> AsynctrtError:
    """Return the error for a status that is not a success, with the beginning of the answer."""
    kind = OverloadError if status in OVERLOADED else TargetError
    return kind(f"{where} answered with status {status}: {quoted(body) or 'nothing else'}")


def failure(where: str, error: Exception) -> AsynctrtError:
    """Convert an error of the HTTP library to ours."""
    if isinstance(error, aiohttp.ClientResponseError):
        return TargetError(f"{where} did not answer in HTTP: {_clipped(error.message)}")
    # The library's own text has a status that no server sent.
    cause = error.__cause__
    said = str(getattr(cause, "message", "") or error).removeprefix("400, message:")
    text = _clipped(said.replace(" ssl:default", "")) or type(error).__name__
    if isinstance(cause, ContentEncodingError):
        return TargetError(f"the answer of {where} cannot be read: {text}")
    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.InvalidURL):
        return ConnectionLostError(f"{where} cannot be reached: {text}")
    return ConnectionLostError(f"the connection to {where} was lost: {text}")


def quoted(body: bytes) -> str:
    """Return the beginning of an answer for a message."""
    return _clipped(body[: 4 * TEXT_LENGTH_MAX].decode(errors="replace"))


def _clipped(text: str) -> str:
    return " ".join(text.split())[:TEXT_LENGTH_MAX]
