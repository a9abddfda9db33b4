"""Call a server over HTTP: KServe V2 with raw tensors, so Triton and others understand it, too."""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any, Final, Self
from urllib.parse import quote, urlsplit

from asynctrt import errors
from asynctrt.client.base import Client
from asynctrt.client.persistence import (
    NotConnectedError,
    persist,
    queue_timeout,
    remote_error,
)
from asynctrt.errors import AsynctrtError, ConnectionLostError, MissingExtraError, UsageError
from asynctrt.kserve.client import AnswerError, as_arrays, describe_request, read_answer
from asynctrt.kserve.datatypes import write_tensor
from asynctrt.kserve.json_codec import dump, parse_object
from asynctrt.tensors import Array

try:
    import aiohttp
    from yarl import URL
except ImportError as error:
    raise MissingExtraError("clients over HTTP need aiohttp: pip install 'asynctrt[client]'") from error

HEAD_NBYTES: Final = "Inference-Header-Content-Length"
KIND: Final = "Asynctrt-Error"
"""The header in which a server of asynctrt names the class of an error."""

BY_STATUS: Final = {
    400: errors.RequestError,
    401: errors.UnauthorizedError,
    404: errors.UnknownModelError,
    413: errors.TooLargeError,
    501: errors.UnsupportedError,
}
"""The error for the status of a server that does not name its class."""

TEXT_LENGTH_MAX: Final = 300


class HttpClient(Client):
    """Made by :func:`asynctrt.client.connect` for an address with ``http`` or ``https``."""

    def __init__(
        self,
        url: str,
        *,
        token: str | None,
        max_in_flight: int,
        attempts: int,
        idempotent: bool,
        settings: Mapping[str, Any],
    ) -> None:
        super().__init__(url.rstrip("/").removesuffix("/v2"), max_in_flight, attempts, idempotent=idempotent)
        if not urlsplit(url).hostname:
            raise UsageError(f"{url!r} is not the address of a server, such as http://HOST:PORT")
        self._token = token
        self._settings = {"limit": max_in_flight, **settings}
        self._session: aiohttp.ClientSession | None = None
        self._is_closed = False

    def __repr__(self) -> str:
        return f"<asynctrt.client.HttpClient {self.url}>"

    async def __aenter__(self) -> Self:
        if self._session is not None or self._is_closed:
            raise UsageError("this client was already entered: call connect(...) again for a new one")
        headers = {"Accept-Encoding": "identity"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        try:
            connector = aiohttp.TCPConnector(**self._settings)
        except TypeError as error:
            raise UsageError(f"aiohttp refuses a setting of this client: {error}") from error
        self._session = aiohttp.ClientSession(
            connector=connector,
            headers=headers,
            cookie_jar=aiohttp.DummyCookieJar(),
            timeout=aiohttp.ClientTimeout(total=None),  # A call has its own deadline.
        )
        return self

    async def aclose(self) -> None:
        """Close the connections to the server. Idempotent."""
        session, self._session, self._is_closed = self._session, None, True
        if session is not None:
            await session.close()

    async def infer(
        self,
        model: str,
        inputs: Any,
        *,
        version: str = "",
        outputs: Sequence[str] | None = None,
        timeout: float | None = None,
        priority: int = 0,
        deadline: float | None = None,
        idempotent: bool | None = None,
    ) -> dict[str, Array]:
        """Send rows as one POST: see :meth:`asynctrt.client.Client.infer`."""
        if not isinstance(inputs, Mapping):
            inputs = {await self._only_input(model, version): inputs}
        arrays = as_arrays(inputs)
        tensors = [write_tensor(array) for array in arrays.values()]
        head = dump(
            describe_request(
                arrays,
                [len(tensor) for tensor in tensors],
                outputs=outputs,
                timeout=queue_timeout(timeout, deadline),
                priority=priority,
            )
        )
        body = b"".join((head, *tensors))
        headers = {HEAD_NBYTES: str(len(head)), "Content-Type": "application/octet-stream"}
        path = f"{_path(model, version)}/infer"

        async def send() -> dict[str, Array]:
            answer, given = await self._ask("POST", path, body, headers)
            length = given.get(HEAD_NBYTES)
            try:
                found = read_answer(answer, None if length is None else int(length))
            except ValueError as error:
                raise AnswerError(f"{HEAD_NBYTES} is {length!r:.40}, not a number of bytes") from error
            # The caller may write to its outputs, so they are copies.
            return {name: array.copy() for name, array in found.items()}

        return await persist(
            send,
            attempts=self._attempts,
            is_idempotent=self._idempotent if idempotent is None else idempotent,
            deadline=deadline,
            is_over=lambda: self._session is None,
        )

    async def metadata(self, model: str, *, version: str = "") -> dict[str, Any]:
        """Ask for a description: see :meth:`asynctrt.client.Client.metadata`."""

        async def send() -> dict[str, Any]:
            answer, _ = await self._ask("GET", _path(model, version))
            return parse_object(answer, "the answer")

        return await persist(send, attempts=self._attempts, is_idempotent=True, deadline=None)

    async def _ask(
        self, method: str, path: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
    ) -> tuple[bytes, Mapping[str, str]]:
        if self._session is None:
            raise NotConnectedError(
                "this client is closed" if self._is_closed else "use the client in `async with connect(...)`"
            )
        url = URL(self.url + path, encoded=True)
        try:
            async with self._session.request(
                method, url, data=body, headers=headers, allow_redirects=False
            ) as response:
                answer = await response.read()
        except (aiohttp.ClientConnectorError, aiohttp.InvalidURL) as error:
            raise NotConnectedError(f"cannot connect to {self.url}: {_text_of(error)}") from error
        except asyncio.CancelledError:
            raise
        except (aiohttp.ClientError, OSError) as error:
            raise ConnectionLostError(f"the connection to {self.url} was lost: {_text_of(error)}") from error
        if response.status != 200:
            raise _refusal(response.status, response.headers.get(KIND), answer)
        return answer, response.headers


def _path(model: str, version: str) -> str:
    versions = f"/versions/{quote(version, safe='')}" if version else ""
    return f"/v2/models/{quote(model, safe='')}{versions}"


def _refusal(status: int, kind: str | None, body: bytes) -> AsynctrtError:
    try:
        text = str(parse_object(body, "the answer")["error"])
    except (KeyError, AsynctrtError):
        said = " ".join(body[: 4 * TEXT_LENGTH_MAX].decode(errors="replace").split())[:TEXT_LENGTH_MAX]
        return remote_error(
            None, status, f"the server answered with status {status}: {said or 'nothing else'}"
        )
    if kind is None and status in BY_STATUS:
        return BY_STATUS[status](text)
    return remote_error(kind, status, text)


def _text_of(error: BaseException) -> str:
    return f"{str(error) or type(error).__name__:.{TEXT_LENGTH_MAX}}"
