"""KServe V2 over HTTP as a load test's target, anybody's server. The only importer of ``aiohttp``.

A request's body is built once and sent many times; of an answer nothing is read but its bytes until somebody
wants the arrays. Measured on uvloop, CPU time a request: 50 us with 16 in flight; with 256, 42 us with a
collector that is held back, and 65 us with one that goes through all that is alive again and again.
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
from asynctrt.loadtest.kserve import (
    BINARY,
    REFUSALS,
    SAID_LENGTH_MAX,
    UNREADABLE,
    Address,
    choose_model,
    read_address,
    read_answer,
    read_counters,
    read_index,
    read_specs,
    write_binary,
    write_json,
)
from asynctrt.loadtest.targets import SERVER_IN_FLIGHT, BatchCounters, Target, TargetSpec
from asynctrt.serving.wire import parse_object
from asynctrt.statistics import BatchTrace
from asynctrt.tensors import Array

try:
    import aiohttp
    from yarl import URL
except ImportError as error:
    raise MissingExtraError("load tests of servers need aiohttp: pip install 'asynctrt[load]'") from error

PAGE_S: Final = 10.0
"""How long a server may take to say something about itself."""
HEAD_NBYTES: Final = "Inference-Header-Content-Length"

KINDS: Final = {kind.http_status: kind for kind in (*REFUSALS, OverloadError)}
"""What a server means by a status, if it says it as KServe does."""


async def open_http_target(spec: TargetSpec) -> Target:
    """The model at ``http://HOST:PORT/v2/models/NAME``; see :func:`~asynctrt.loadtest.kserve.read_address`.

    :raises TargetError: if nobody is there, or nobody that speaks KServe.
    :raises AsynctrtError: what the server says against it: no such model, a token that is missing or wrong.
    """
    return HttpTarget(await open_pages(read_address(spec), spec.token))


async def open_pages(address: Address, token: str | None) -> "Pages":
    """What a server says of a model. If the address does not name it, it is the only one.

    :raises OptionsError: if there are others. The rest is as for :func:`open_http_target`.
    """
    pages = Pages(address, token)
    try:
        await pages.read()
    except ConnectionLostError as error:
        await pages.aclose()
        raise TargetError(str(error)) from error
    except BaseException:
        await pages.aclose()
        raise
    return pages


class Pages:
    """What a server says of one model, and the connections to it."""

    def __init__(self, address: Address, token: str | None) -> None:
        self.address = address
        headers = {"Accept-Encoding": "identity"}
        if token:
            headers["Authorization"] = f"Bearer {token}"
        self.session = aiohttp.ClientSession(
            # As many connections as requests on the way: one that waited for another would be late. The name
            # of the host is looked up once.
            connector=aiohttp.TCPConnector(limit=0, ttl_dns_cache=None),
            headers=headers,
            skip_auto_headers=("Accept", "User-Agent"),
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None),  # The load test has its own.
            auto_decompress=False,
        )
        self.takes_binary = True

    async def read(self) -> None:
        """Ask for all that does not change."""
        if not self.address.model:
            model = choose_model(await self._index(), self.address.server)
            self.address = Address(self.address.server, model)
        metadata = await self._object("GET", self.address.path)
        self.inputs = read_specs(metadata.get("inputs") or ())
        try:
            extensions = (await self._object("GET", "/v2")).get("extensions")
        except AsynctrtError:
            return  # Some have no such page, and it does not matter.
        self.takes_binary = not isinstance(extensions, list) or BINARY in extensions

    async def counters(self) -> BatchCounters | None:
        """The statistics of the model; ``None`` where there are none.

        :raises ConnectionLostError: if the server is gone.
        """
        status, body = await self._ask("GET", f"{self.address.path}/stats")
        if status != 200:
            return None
        try:
            return read_counters(parse_object(body, "the answer")["model_stats"])
        except (*UNREADABLE, AsynctrtError):
            return None

    async def aclose(self) -> None:
        """Close the connections."""
        await self.session.close()

    async def _index(self) -> set[str]:
        """The models that the server has."""
        status, body = await self._ask("POST", "/v2/repository/index", b"{}")
        if status == 401:
            raise refusal(self.address.server, status, body)
        try:
            # It is a list, and the reader of JSON is for objects.
            return read_index(parse_object(b'{"models":' + body + b"}", "the answer")["models"])
        except (*UNREADABLE, AsynctrtError):
            raise OptionsError(
                f"{self.address.server} does not list its models (status {status}): name one in the address, "
                "or with --model NAME"
            ) from None

    async def _object(self, method: str, path: str) -> dict[str, Any]:
        status, body = await self._ask(method, path)
        if status != 200:
            raise refusal(f"{self.address.server}{path}", status, body)
        try:
            return parse_object(body, "the answer")
        except RequestError as error:
            raise TargetError(f"{self.address.server}{path} is not what KServe has there: {error}") from error

    async def _ask(self, method: str, path: str, body: bytes | None = None) -> tuple[int, bytes]:
        url = self.address.server + path
        try:
            async with (
                asyncio.timeout(PAGE_S),
                self.session.request(
                    method, URL(url, encoded=True), data=body, allow_redirects=False
                ) as response,
            ):
                return response.status, await response.read()
        except TimeoutError as error:
            raise ConnectionLostError(f"{url} gave no answer within {PAGE_S:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise failure(url, error) from error


class HttpTarget:
    """One model over HTTP: a request is one POST, on a connection that no other is on."""

    kind = "http"

    def __init__(self, pages: Pages) -> None:
        self.name = pages.address.model
        self.inputs = pages.inputs
        self.in_flight_max = SERVER_IN_FLIGHT
        self._pages = pages
        self._server = pages.address.server
        self._url = URL(f"{self._server}{pages.address.path}/infer", encoded=True)
        self._post = pages.session.post
        self._create_task = asyncio.get_running_loop().create_task

    def prepare(self, inputs: Mapping[str, Array], priority: int) -> Any:
        with warnings.catch_warnings():
            # Of a body of more than 1 MiB, that to send it holds the loop. It does, and to read a file in
            # pieces, as is advised, takes longer.
            warnings.simplefilter("ignore", ResourceWarning)
            if not self._pages.takes_binary:
                return aiohttp.BytesPayload(write_json(inputs, priority), content_type="application/json")
            body, head_nbytes = write_binary(inputs, priority)
            return aiohttp.BytesPayload(body, headers={HEAD_NBYTES: str(head_nbytes)})

    def start(self, prepared: Any) -> "asyncio.Future[Any]":
        return self._create_task(self._send(prepared))

    async def _send(self, payload: Any) -> tuple[bytes, Mapping[str, str]]:
        try:
            response = await self._post(self._url, data=payload, allow_redirects=False)
            # The connection is free again when all is read, or closed if that fails or is cancelled.
            body = await response.read()
        except (aiohttp.ClientError, OSError) as error:
            raise failure(self._server, error) from error
        if response.status != 200:
            raise refusal(self._server, response.status, body)
        return body, response.headers

    def outputs(self, answer: Any) -> Mapping[str, Array]:
        body, headers = answer
        coding = headers.get("Content-Encoding", "identity")
        if coding != "identity":
            raise TargetError(f"the answer is compressed with {coding}, which was not asked for")
        length = headers.get(HEAD_NBYTES)
        try:
            return read_answer(body, None if length is None else int(length))
        except ValueError as error:
            raise TargetError(f"{HEAD_NBYTES} is {length!r:.40}, not a number of bytes") from error

    async def batches(self) -> BatchCounters | None:
        return await self._pages.counters()

    def trace(self) -> list[BatchTrace]:
        return []

    async def aclose(self) -> None:
        await self._pages.aclose()


def refusal(where: str, status: int, body: bytes) -> AsynctrtError:
    """What a status other than 200 means."""
    try:
        said = parse_object(body, "the answer")["error"]
        kind = KINDS[status]
    except (KeyError, AsynctrtError):
        text = " ".join(body[: 4 * SAID_LENGTH_MAX].decode(errors="replace").split())[:SAID_LENGTH_MAX]
        return TargetError(f"{where} answered with status {status}: {text or 'nothing else'}")
    return kind(str(said)[:SAID_LENGTH_MAX])


def failure(where: str, error: Exception) -> AsynctrtError:
    """What an error of the HTTP library means."""
    said = str(error) or type(error).__name__
    if isinstance(error, aiohttp.ClientResponseError):
        return TargetError(f"{where} answered what is no HTTP: {error.message:.{SAID_LENGTH_MAX}}")
    if isinstance(error, aiohttp.ClientConnectorError | aiohttp.InvalidURL):
        return ConnectionLostError(f"{where} cannot be reached: {said:.{SAID_LENGTH_MAX}}")
    return ConnectionLostError(f"the connection to {where} was lost: {said:.{SAID_LENGTH_MAX}}")
