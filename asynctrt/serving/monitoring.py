"""Serve pages such as metrics without the models and without a token, at a separate port."""

from collections.abc import Mapping
from dataclasses import replace

from asynctrt.errors import UnknownModelError
from asynctrt.serving.admission import Caller
from asynctrt.serving.api import Answer, Api, Headers, ModelRoute, Page, error_answer
from asynctrt.serving.coding import Body
from asynctrt.serving.memory import Hold
from asynctrt.serving.repository import Repository
from asynctrt.serving.settings import ServerSettings


class PagesAlone(Api):
    """Answer pages and nothing else, without a token, under the server's own names."""

    __slots__ = ()

    def __init__(self, pages: Mapping[str, Page], settings: ServerSettings) -> None:
        super().__init__(Repository(), replace(settings, tokens=()), dict(pages), checks_hosts=True)

    def route(self, path: bytes) -> ModelRoute | None:
        """Return ``None``: no path is a model's."""
        return None

    async def respond(
        self,
        method: str,
        path: bytes,
        headers: Headers,
        body: Body,
        caller: Caller | None = None,
        hold: Hold | None = None,
        *,
        is_authorized: bool = False,
    ) -> Answer:
        """Answer a page."""
        if self.page(path.decode("latin-1")) is None:
            return error_answer(UnknownModelError(f"there is nothing here but {', '.join(self.pages)}"))
        return await super().respond(method, path, headers, body, caller, hold, is_authorized=is_authorized)
