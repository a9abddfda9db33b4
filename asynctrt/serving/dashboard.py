"""Serve the dashboard: its page, script and style, and the figures that it draws."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

import asynctrt
from asynctrt.serving.api import Answer, Headers, Page, json_answer
from asynctrt.serving.repository import Repository
from asynctrt.serving.sampler import SAMPLES_MAX, Sampler, key_of
from asynctrt.serving.served import ServedModel
from asynctrt.statistics import batch_bounds

STATIC: Final = Path(__file__).parent / "static"

FILES: Final = {
    "/": ("index.html", "text/html; charset=utf-8"),
    "/dashboard/dashboard.js": ("dashboard.js", "text/javascript; charset=utf-8"),
    "/dashboard/dashboard.css": ("dashboard.css", "text/css; charset=utf-8"),
    "/dashboard/uPlot.iife.min.js": ("uPlot.iife.min.js", "text/javascript; charset=utf-8"),
    "/dashboard/uPlot.min.css": ("uPlot.min.css", "text/css; charset=utf-8"),
    "/dashboard/uPlot.LICENSE": ("uPlot.LICENSE", "text/plain; charset=utf-8"),
}

ICON: Final = (
    b'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 16 16">'
    b'<rect width="16" height="16" rx="3" fill="#2563a8"/>'
    b'<path d="M3 12V8h2v4zm4 0V4h2v8zm4 0V6h2v6z" fill="#fff"/></svg>'
)

SAFE: Final = (
    (
        "Content-Security-Policy",
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
)
"""Allow nothing from other origins, nothing inline, and no framing."""

FRESH: Final = (("X-Content-Type-Options", "nosniff"), ("Cache-Control", "no-store"))
"""The headers of figures and descriptions, which change."""

RECENT: Final = 10
"""Samples that a page polls for; a page that has missed more fetches all."""


Ask = Callable[[ServedModel], Mapping[str, str]]


def dashboard_pages(repository: Repository, sampler: Sampler, ask: Ask) -> dict[str, Page]:
    """Return the dashboard's pages by path.

    The page, its script and style need no token, since only the page can ask the user for one.
    ``/dashboard/data`` returns all samples, ``/dashboard/recent`` the newest; both need the token.
    """
    pages = {path: static_page(*file) for path, file in FILES.items()}
    pages["/dashboard/icon.svg"] = _static(ICON, "image/svg+xml")
    pages["/dashboard/data"] = Page(partial(_figures, repository, sampler, ask, SAMPLES_MAX))
    pages["/dashboard/recent"] = Page(partial(_figures, repository, sampler, ask, RECENT))
    return pages


def static_page(name: str, content_type: str) -> Page:
    """Return the page of a file in ``static``, which needs no token."""
    return _static((STATIC / name).read_bytes(), content_type)


def _static(content: bytes, content_type: str) -> Page:
    headers = (("Content-Type", content_type), *SAFE, ("Cache-Control", "no-cache"))

    def respond(_: Headers) -> Answer:
        return Answer(200, headers, (content,))

    return Page(respond, is_open=True)


def _figures(repository: Repository, sampler: Sampler, ask: Ask, count: int, _: Headers) -> Answer:
    content = {
        "version": asynctrt.__version__,
        "is_draining": repository.is_draining,
        "index": repository.index(),
        "models": [_described(served, ask) for served in repository],
        **sampler.history(count),
    }
    return json_answer(content, headers=FRESH)


def _described(served: ServedModel, ask: Ask) -> dict[str, Any]:
    """Return a model's description, and its counts since it was loaded."""
    done = served.engine.statistics()
    return {
        "key": key_of(served),
        "name": served.name,
        "version": served.version,
        "platform": served.engine.platform,
        "device": served.engine.device_name,
        "state": done.state,
        "max_rows": served.engine.max_rows,
        "batching": served.why_batched,
        "batch_bounds": batch_bounds(served.engine.max_rows),
        "answered": served.succeeded(done),
        "rows": done.rows,
        "batches": done.batches,
        "launched": dict(done.launched),
        "failures": served.failures,
        "contexts_quarantined": done.contexts_quarantined,
        "worker_deaths": done.worker_deaths,
        "ask": ask(served),
    }
