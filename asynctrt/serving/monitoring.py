"""Serve metrics and the dashboard without the models: at a separate port, or in an application."""

import asyncio
import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Final

from asynctrt.errors import UnknownModelError
from asynctrt.serving.admission import Caller
from asynctrt.serving.api import Answer, Api, Headers, ModelRoute, Page, error_answer
from asynctrt.serving.asgi import KServeApp, Source
from asynctrt.serving.coding import Body
from asynctrt.serving.dashboard import dashboard_pages
from asynctrt.serving.memory import Hold
from asynctrt.serving.metrics import Metrics
from asynctrt.serving.repository import Repository
from asynctrt.serving.sampler import Sampler
from asynctrt.serving.settings import ServerSettings

SAMPLE_S: Final = 1.0


class PagesAlone(Api):
    """Answer pages and nothing else: no model, no health check."""

    __slots__ = ()

    def __init__(
        self, pages: Mapping[str, Page], settings: ServerSettings, *, checks_hosts: bool = False
    ) -> None:
        super().__init__(Repository(), settings, dict(pages), checks_hosts=checks_hosts)

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
            known = ", ".join(name for name in self.pages if not name.startswith("/dashboard/"))
            return error_answer(UnknownModelError(f"there is nothing here but {known}"))
        return await super().respond(method, path, headers, body, caller, hold, is_authorized=is_authorized)


def metrics_alone(metrics: Metrics, settings: ServerSettings) -> Api:
    """Return what the port for metrics answers: one page, without a token, under the server's own names."""
    return open_pages({"/metrics": metrics.page(is_open=True)}, settings)


def open_pages(pages: Mapping[str, Page], settings: ServerSettings) -> Api:
    """Return what a port without tokens answers."""
    return PagesAlone(pages, replace(settings, tokens=()), checks_hosts=True)


def monitoring_app(
    engine: Source, *, name: str = "model", settings: ServerSettings | None = None
) -> KServeApp:
    """Return an ASGI application with the metrics at ``metrics`` and the dashboard at its root.

    ``Mount("/monitoring", monitoring_app(repository))`` in Starlette and FastAPI. Give it the
    :class:`Repository` that :func:`kserve_app` has: what an application asks of an engine itself is in the
    engine's statistics, and so in most metrics, but not in the histograms of latencies, nor in failures.

    :param engine: an open engine, a repository, or a function that returns either.
    :param name: the model's name, for a single engine.
    :param settings: ``tokens`` and ``allow_origins`` count. The dashboard's page needs no token; its figures
        and the metrics do.
    """
    return KServeApp(engine, name, settings or ServerSettings(), _monitoring)


def _monitoring(repository: Repository, settings: ServerSettings) -> Api:
    sampler = Sampler(repository)
    metrics = Metrics(
        repository,
        loop_lag_ns=lambda: sampler.loop_lag_ns,
        busy_share=sampler.busy_share,
    )
    pages = {**dashboard_pages(repository, sampler), "/metrics": metrics.page()}
    _sample(weakref.ref(sampler))
    return PagesAlone(pages, settings)


def _sample(reference: "weakref.ref[Sampler]") -> None:
    """Sample once a second for as long as something has the sampler."""
    sampler = reference()
    if sampler is not None:
        sampler.sample()
        asyncio.get_running_loop().call_later(SAMPLE_S, _sample, reference)
