"""Call a server over HTTP: KServe V2, with raw tensors if the server accepts them, otherwise as JSON."""

import asyncio
import math
from collections.abc import Mapping
from http import HTTPStatus
from typing import Any, Final, Self
from urllib.parse import quote, urlsplit

from asynctrt import errors
from asynctrt._util.loops import is_cancelled
from asynctrt.client.base import ClientSettings, OneServer, Wanted
from asynctrt.client.persistence import NotConnectedError, remote_error
from asynctrt.errors import (
    AsynctrtError,
    ConnectionLostError,
    MissingExtraError,
    RequestError,
    UsageError,
    show,
)
from asynctrt.kserve.client import (
    TEXT_LENGTH_MAX,
    AnswerError,
    as_arrays,
    read_answer,
    takes_binary,
    text_of,
    write_request,
)
from asynctrt.kserve.datatypes import write_tensor
from asynctrt.kserve.json_codec import parse_object
from asynctrt.tensors import Array

try:
    import aiohttp
    from yarl import URL
except ImportError as error:
    raise MissingExtraError("clients over HTTP need aiohttp: pip install 'asynctrt[client]'") from error

KIND: Final = "Asynctrt-Error"
"""The header in which an asynctrt server names the class of an error."""

DRAIN: Final = "Asynctrt-Drain-Seconds"
"""The header in which an asynctrt server says how long its queues take, or that it is draining."""

BY_STATUS: Final[Mapping[int, type[AsynctrtError]]] = {
    HTTPStatus.BAD_REQUEST: errors.RequestError,
    HTTPStatus.UNAUTHORIZED: errors.UnauthorizedError,
    HTTPStatus.FORBIDDEN: errors.UnauthorizedError,
    HTTPStatus.NOT_FOUND: errors.UnknownModelError,
    HTTPStatus.REQUEST_ENTITY_TOO_LARGE: errors.TooLargeError,
    HTTPStatus.NOT_IMPLEMENTED: errors.UnsupportedError,
}
"""The error for each status, for a server that does not name its class."""

REFUSAL_NBYTES_MAX: Final = 64 * 1024
"""The maximum number of bytes read of an error's body."""


class HttpClient(OneServer):
    """A client over HTTP, made by :func:`asynctrt.client.connect` for ``http`` or ``https``."""

    def __init__(self, url: str, settings: ClientSettings) -> None:
        super().__init__(url.rstrip("/").removesuffix("/v2"), settings)
        if not _is_address(url):
            raise UsageError(f"{show(self.url)} is not the address of a server, such as http://HOST:PORT")
        self._max_size = math.inf if settings.max_size is None else settings.max_size
        self._session: aiohttp.ClientSession | None = None
        self._takes_binary: bool | None = None
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<asynctrt.client.HttpClient {self.url}>"

    async def __aenter__(self) -> Self:
        if self._session is not None or self._is_closed:
            raise UsageError("this client was already entered: call connect(...) again for a new one")
        self._enter()
        settings = {"limit": self._settings.max_in_flight, **self._settings.library}
        try:
            connector = aiohttp.TCPConnector(**settings)
        except TypeError as error:
            raise UsageError(f"aiohttp refuses a setting of this client: {error}") from error
        self._session = aiohttp.ClientSession(
            connector=connector,
            headers={"Accept-Encoding": "identity", **self._settings.headers},
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None),  # Each call has its own deadline.
        )
        return self

    async def aclose(self) -> None:
        """Close the connections to the server. Idempotent."""
        self._origin.check(self)
        session, self._session, self._is_closed = self._session, None, True
        if session is not None:
            await session.close()

    @property
    def _is_over(self) -> bool:
        return self._session is None

    async def _infer(self, model: str, version: str, inputs: Any, wanted: Wanted) -> dict[str, Array]:
        arrays = as_arrays(await self._named(model, version, inputs))
        if self._takes_binary is None:
            self._takes_binary = await self._learns_binary()
        tensors = [write_tensor(array) for array in arrays.values()] if self._takes_binary else None
        body, headers = write_request(arrays, tensors, **wanted._asdict())
        answer, given = await self._ask("POST", f"{_path(model, version)}/infer", body, headers)
        # The caller may write to its outputs, so they are copies.
        return {name: array.copy() for name, array in read_answer(answer, given).items()}

    async def _learns_binary(self) -> bool:
        """Ask the server whether it accepts raw tensors, or only JSON."""
        try:
            answer, _ = await self._ask("GET", "/v2")
            return takes_binary(parse_object(answer, "the answer"))
        except NotConnectedError:
            raise
        except AsynctrtError:
            return True  # Some servers have no such page.

    async def _describe(self, model: str, version: str) -> dict[str, Any]:
        answer, _ = await self._ask("GET", _path(model, version))
        try:
            return parse_object(answer, "the answer")
        except RequestError as error:
            raise AnswerError(f"{error}; it begins {show(answer)}") from error

    async def _ask(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> tuple[bytes, Mapping[str, str]]:
        if self._session is None:
            raise NotConnectedError(
                "this client is closed" if self._is_closed else "use the client in `async with connect(...)`"
            )
        url = URL(self._address + path, encoded=True)
        try:
            async with self._session.request(
                method, url, data=body, headers=headers, allow_redirects=False
            ) as response:
                answer = await self._read(response)
        except (aiohttp.ClientConnectorError, aiohttp.InvalidURL, UnicodeError) as error:
            raise NotConnectedError(f"cannot connect to {self.url}: {text_of(error)}") from error
        except asyncio.CancelledError:
            if not self._is_closed or is_cancelled():
                raise
            # Closing the pool cancels requests that wait for a connection; this task was not cancelled.
            raise NotConnectedError("this client was closed") from None
        except (aiohttp.ClientError, OSError, RuntimeError) as error:
            # asyncio resolves hosts in threads, which raise RuntimeError while the interpreter exits.
            # Drop the traceback: aiohttp keeps the error in an object that one of its frames refers to.
            raise ConnectionLostError(
                f"the connection to {self.url} was lost: {text_of(error)}"
            ) from error.with_traceback(None)
        drain = response.headers.get(DRAIN, "0")
        self.is_draining = drain == "draining"
        self.drain_s = float(drain) if drain.replace(".", "").isdigit() else 0.0
        if response.status != HTTPStatus.OK:
            raise _refusal(response.status, response.headers.get(KIND), answer)
        return answer, response.headers

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        """Return the body of an answer; of an error, only a bounded part for the message."""
        is_refusal = response.status != HTTPStatus.OK
        if self._max_size == math.inf and not is_refusal:
            return await response.read()
        parts, nbytes = [], 0
        async for part in response.content.iter_any():
            parts.append(part)
            nbytes += len(part)
            if is_refusal and nbytes >= REFUSAL_NBYTES_MAX:
                break
            if nbytes > self._max_size and not is_refusal:
                raise AnswerError(f"the answer has more than the {self._max_size:,} bytes of max_size")
        return b"".join(parts)


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0 and not (parts.query or parts.fragment)
    except ValueError:
        return False


def _path(model: str, version: str) -> str:
    versions = f"/versions/{quote(version, safe='')}" if version else ""
    return f"/v2/models/{quote(model, safe='')}{versions}"


def _refusal(status: int, kind: str | None, body: bytes) -> AsynctrtError:
    try:
        text = str(parse_object(body, "the answer")["error"])
    except (KeyError, AsynctrtError):
        said = " ".join(body[: 4 * TEXT_LENGTH_MAX].decode(errors="replace").split())[:TEXT_LENGTH_MAX]
        text = f"the server answered with status {status}: {said or 'nothing else'}"
    if kind is None and status in BY_STATUS:
        return BY_STATUS[status](text)
    return remote_error(kind, status, text)
