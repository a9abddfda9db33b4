"""A load test's report as one self-contained HTML page. The only importer of ``jinja2``."""

from base64 import b64encode
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Final

from asynctrt.errors import MissingExtraError
from asynctrt.loadtest import summary
from asynctrt.loadtest.charts import charts
from asynctrt.loadtest.report import Report

try:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
except ImportError as error:
    raise MissingExtraError("a report as HTML needs jinja2: pip install 'asynctrt[load]'") from error

STATIC: Final = Path(__file__).parent / "static"
UPLOT: Final = Path(__file__).parent.parent / "serving" / "static"
"""The dashboard's directory, which has the only copy of uPlot."""
SCRIPTS: Final = (UPLOT / "uPlot.iife.min.js", STATIC / "report.js")


@dataclass(frozen=True, slots=True)
class Script:
    """A script of the page, allowed by its hash in the page's content security policy."""

    text: str

    @property
    def hash(self) -> str:
        """The hash of the text, as a content security policy writes it."""
        return b64encode(sha256(self.text.encode()).digest()).decode()


def render(report: Report) -> str:
    """Return the page. It loads nothing and has no scripts except for charts; all foreign text is escaped."""
    drawn = charts(report)
    environment = Environment(
        loader=FileSystemLoader(STATIC),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    main = summary.main_run(report)
    is_several = main is not None and report.kind not in ("run", "repeats")
    parts = {"Target": report.target, "Settings": report.settings, "Machine": report.machine}
    return environment.get_template("report.html.j2").render(
        headline=summary.headline(report),
        target=summary.name_of(report),
        about=summary.about(report),
        banners=summary.banners(report),
        tiles=summary.tiles(report),
        tiles_of=main.label if is_several and main is not None else "",
        results=summary.results(report),
        charts=drawn,
        chart_style=(UPLOT / "uPlot.min.css").read_text("utf-8") if drawn else "",
        scripts=[Script(path.read_text("utf-8")) for path in SCRIPTS] if drawn else [],
        tables=summary.tables(report),
        facts=[(title, list(summary.flat(part))) for title, part in {**parts, "Report": report.made}.items()],
        has_void=bool(report.void),
    )
