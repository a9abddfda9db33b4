"""Draws the plots of a load test's report. The only importer of ``matplotlib``.

Each function draws one plot of the figures in a report, and returns ``None`` if the report lacks them. All
use matplotlib's defaults and :data:`STYLE`, whatever the application's own settings are, and leave these
unchanged. The same report gives the same bytes.
"""

import hashlib
import io
import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import wraps
from types import MappingProxyType
from typing import Any, Final, Literal, ParamSpec, TypeVar

from asynctrt.errors import MissingExtraError
from asynctrt.loadtest.criteria import LATENCIES, parse_slo
from asynctrt.loadtest.histogram import Counts
from asynctrt.loadtest.report import Moment, Report, Run
from asynctrt.loadtest.views import (
    MARKS,
    STAGES,
    Group,
    alone_at,
    by_label,
    groups,
    judged,
    lanes,
    main_groups,
    main_run,
    marks_for,
    mean_of,
    number,
    odds,
    sizes,
    stages,
    words,
)
from asynctrt.validation import printable

try:
    import matplotlib as mpl
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator
except ImportError as error:
    raise MissingExtraError("plots need matplotlib: pip install 'asynctrt[plots]'") from error

P = ParamSpec("P")
T = TypeVar("T")

# The palette of Okabe and Ito, which colour-blind people can tell apart, on greys.
BLUE: Final = "#0072b2"
ORANGE: Final = "#d55e00"
GREEN: Final = "#009e73"
AMBER: Final = "#e69f00"
RED: Final = "#c1121f"
TEXT: Final = "#1b2430"
SOFT: Final = "#5d6773"
PALE: Final = "#c3cad3"
RAMP: Final = "viridis"
"""Colours of runs that are ordered, such as by rate."""
BY_STAGE: Final = MappingProxyType(dict(zip(STAGES, ("#949eab", AMBER, BLUE, GREEN, "#dfe3e8"), strict=True)))
BY_FIGURE: Final = MappingProxyType({"p50": BLUE, "p99": ORANGE, "max": AMBER})
DASHED: Final = (0, (5, 3))

WIDTH_IN: Final = 9.0
DPI: Final = 100
LEGEND_CHARACTERS: Final = 92
"""Characters of a legend that fit above a plot, where each mark counts as seven."""
LABEL_CHARACTERS: Final = 32
LOG_FROM: Final = 30.0
"""Ratio of the largest value to the smallest from which an axis is logarithmic."""
SHARES_FROM: Final = 6.0
"""Ratio of the longest bar to the shortest from which bars show shares of their own lengths."""
SHORT_MS: Final = 0.3
"""Limit on the longest time below which times are in µs."""
BINS_MAX: Final = 64
SURE_ABOVE: Final = 3
"""Requests that must have been slower for a percentile to be known with 95% confidence."""

# Any, because matplotlib types each name of its settings.
STYLE: Final[Any] = MappingProxyType(
    {
        "font.family": ["DejaVu Sans", "sans-serif"],
        "font.sans-serif": ["DejaVu Sans"],
        "font.size": 9.0,
        "text.color": TEXT,
        # A dollar sign in a name is not mathematics.
        "text.parse_math": False,
        "axes.labelcolor": SOFT,
        "axes.edgecolor": PALE,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.axisbelow": True,
        "axes.grid": True,
        "axes.grid.axis": "y",
        "grid.color": "#e8ebef",
        "xtick.color": PALE,
        "xtick.labelcolor": SOFT,
        "ytick.color": PALE,
        "ytick.labelcolor": SOFT,
        "ytick.major.size": 0.0,
        "legend.frameon": False,
        "legend.borderaxespad": 0.2,
        "legend.handlelength": 1.6,
        "legend.columnspacing": 1.4,
        # Text stays text, which can be searched and read aloud, in the font of the page.
        "svg.fonttype": "none",
        "svg.hashsalt": "asynctrt",
    }
)


@dataclass(frozen=True, slots=True)
class Plot:
    """Hold one plot with its title and caption."""

    name: str
    """The name of the plot and of its file."""
    title: str
    caption: str
    """The caption, which says how to read the plot."""
    figure: Figure


def figures(report: Report) -> list[Plot]:
    """Draw every plot for which the report has figures."""
    made = {
        "ratios": ratios(report),
        "throughput-latency": throughput_latency(report),
        "settings": by_setting(report),
        "latency": latency_over_time(report),
        "throughput": throughput_over_time(report),
        "percentiles": percentiles(report),
        "batches": batches(report),
        "time": where_time_goes(report),
        "timeline": timeline(report),
    }
    return [Plot(name, *words(report, name), figure) for name, figure in made.items() if figure is not None]


def as_svg(figure: Figure) -> str:
    """Return a figure as SVG for a file or a page, with unique ids."""
    made = _saved(figure, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    # What precedes the element is not needed, even in a file of its own.
    text = made[made.index(b"<svg") :].decode()
    # Several figures of one page would have the same ids. Nothing refers to the ids of groups.
    mark = f"p{hashlib.sha256(made).hexdigest()[:8]}-"
    ids = re.compile(r'(\bid="|url\(#|href="#)')
    text = re.sub(r'<g id="[^"]*"', "<g", text)
    return re.sub(r"<[^>]+>", lambda tag: ids.sub(rf"\g<1>{mark}", tag[0]), text)


def as_png(figure: Figure) -> bytes:
    """Return a figure as PNG, with twice the resolution of a page."""
    return _saved(figure, format="png", dpi=2 * DPI, metadata={"Software": None})


# ---- how all of them are drawn


def _styled(draw: Callable[P, T]) -> Callable[P, T]:
    """Draw with the style, and restore the application's own."""

    @wraps(draw)
    def drawn(*args: P.args, **kwargs: P.kwargs) -> T:
        with mpl.rc_context():
            mpl.rcdefaults()
            mpl.rcParams.update(STYLE)
            return draw(*args, **kwargs)

    return drawn


@_styled
def _saved(figure: Figure, **how: Any) -> bytes:
    # Ticks are made only when a figure is drawn, with the style that is set then.
    raw = io.BytesIO()
    figure.savefig(raw, **how)
    return raw.getvalue()


def _axes(height_in: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH_IN, height_in), dpi=DPI, layout="constrained")
    return figure, figure.add_subplot()


def _short(text: str) -> str:
    text = printable(text)
    return text if len(text) <= LABEL_CHARACTERS else f"{text[: LABEL_CHARACTERS - 1]}…"


def _tick(value: float, _: int | None = None) -> str:
    return f"{value:,.10g}"


def _scale(
    axes: Axes, name: Literal["x", "y"], values: Iterable[float | None], beside: Sequence[Any] = ()
) -> None:
    """Make an axis logarithmic if the values are far apart, else begin at 0; ``beside`` does not decide
    it."""
    known = [value for value in values if value is not None and value > 0]
    axis = axes.xaxis if name == "x" else axes.yaxis
    if known and max(known) / min(known) > LOG_FROM:
        known += [value for value in beside if value is not None and value > 0]
        low, high = min(known) / 1.3, max(known) * 1.3
        axes.set(**{f"{name}scale": "log", f"{name}lim": (low, high)})
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high / low < 1e4 else (1.0,), numticks=20))
        axis.set_minor_locator(NullLocator())
    else:
        axes.set(**{f"{name}lim": (0, max(known, default=1.0) * 1.08)})
    axis.set_major_formatter(FuncFormatter(_tick))


def _legend(axes: Axes) -> None:
    """Place the legend above the plot if it fits in one line, else to its right."""
    handles, labels = axes.get_legend_handles_labels()
    labels = [_short(label) for label in labels]
    if not labels:
        return
    if sum(len(label) + 7 for label in labels) <= LEGEND_CHARACTERS:
        axes.legend(handles, labels, loc="lower left", bbox_to_anchor=(0, 1.01), ncols=len(labels))
    else:
        axes.legend(handles, labels, loc="upper left", bbox_to_anchor=(1.01, 1))


def _colours(shown: Sequence[Group]) -> list[str]:
    """Return a colour for each group; for many groups, ordered colours."""
    if len(shown) <= 2:
        return [BLUE, ORANGE][: len(shown)]
    ramp = mpl.colormaps[RAMP]
    return [mpl.colors.to_hex(ramp(0.84 * place / (len(shown) - 1))) for place in range(len(shown))]


def _each(shown: Sequence[Group]) -> Iterable[tuple[Group, str, Run, bool]]:
    """Yield every run with its group and colour, and whether it is the first of the group."""
    for group, colour in zip(shown, _colours(shown), strict=True):
        for place, run in enumerate(group.runs):
            yield group, colour, run, place == 0


def _columns(pairs: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    """Return the x and the y of the points that have a y."""
    known = [(x, y) for x, y in pairs if not math.isnan(y)]
    return [x for x, _ in known], [y for _, y in known]


# ---- one function for each plot


@_styled
def throughput_latency(report: Report) -> Figure | None:
    """Draw latency over throughput of several runs that do not merely repeat each other."""
    runs = [run for run in report.runs if "p50" in run.latency]
    rates = [run.throughput for run in runs]
    if len(runs) < 2 or report.kind == "compare" or max(rates) < 1.05 * min(rates):
        return None
    is_curve = report.kind in ("sweep", "search")
    figure, axes = _axes(3.8)
    for name in ("p50", "p99"):
        points = [(run, run.throughput, run.latency[name]) for run in runs if name in run.latency]
        if not points:
            continue
        look: dict[str, Any] = {"color": BY_FIGURE[name]}
        parts = [[run for run in part if not run.void] for part in by_label(report).values()]
        line = [(mean_of(part, "throughput"), mean_of(part, name)) for part in parts]
        if is_curve:
            axes.plot(*_columns(line), lw=1.4, alpha=0.75, gid=f"{name}-line", **look)
        states = {
            "holds": ("o", look["color"], [(x, y) for run, x, y in points if run.holds]),
            "fails": ("o", "white", [(x, y) for run, x, y in points if not run.void and not run.holds]),
            "void": ("x", look["color"], [(x, y) for run, x, y in points if run.void]),
        }
        for state, (marker, face, places) in states.items():
            if places:
                gid = f"{name}-{state}"
                axes.plot(*_columns(places), marker, mfc=face, ms=6, mew=1.6, gid=gid, **look)
        axes.plot([], [], "o-" if is_curve else "o", ms=5, label=name, **look)
    limits = [item for item in parse_slo(report.settings.get("slo") or ()) if item.figure in LATENCIES]
    for item in limits:
        look = {"color": BY_FIGURE.get(item.figure, SOFT), "ls": DASHED, "lw": 1.1}
        axes.axhline(item.limit, label=item.text, gid="limit", **look)
    latencies = [run.latency.get(name) for run in runs for name in ("p50", "p99")]
    _scale(axes, "y", [*latencies, *(item.limit for item in limits)])
    _scale(axes, "x", rates)
    axes.set(xlabel="throughput (requests/s)", ylabel="latency (ms)")
    _legend(axes)
    return figure


@_styled
def by_setting(report: Report) -> Figure | None:
    """Draw throughput and latency by the values of a setting, for a sweep over a setting other than the
    load."""
    names = sorted({name for run in report.runs for name in run.parameters} - {"rate", "callers"})
    cases = by_label(report)
    runs = report.runs
    if report.kind != "sweep" or len(cases) < 2 or not names:
        return None
    figure = Figure(figsize=(WIDTH_IN, 4.4), dpi=DPI, layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(2, 3))
    for axes, name, colour in ((above, "throughput", GREEN), (below, "p50", BLUE), (below, "p99", ORANGE)):
        found = [(place, run.figure(name)) for place, part in enumerate(cases.values()) for run in part]
        points = [(place, value) for place, value in found if value is not None]
        if points:
            line = [(place, mean_of(part, name)) for place, part in enumerate(cases.values())]
            axes.plot(*_columns(line), color=colour, lw=1.4, gid=f"{name}-line")
            axes.plot(*_columns(points), "o", color=colour, ms=5, label=name, gid=name)
    _scale(above, "y", [run.throughput for run in runs])
    _scale(below, "y", [run.latency.get(name) for run in runs for name in ("p50", "p99")])
    above.set(ylabel="requests/s")
    is_one = len(names) == 1 and all(set(run.parameters) == set(names) for run in runs)
    firsts = [part[0] for part in cases.values()]
    ticks = [_short(str(run.parameters[names[0]]) if is_one else run.label) for run in firsts]
    below.set_xticks(range(len(ticks)), ticks)
    if sum(map(len, ticks)) + 2 * len(ticks) > 110:
        below.tick_params("x", rotation=90 if len(ticks) > 24 else 30)
    below.set(xlabel=names[0] if is_one else "", ylabel="latency (ms)")
    _legend(below)
    return figure


@_styled
def latency_over_time(report: Report) -> Figure | None:
    """Draw latency, the generator's lateness and errors over time."""
    shown = main_groups(report, "search")
    runs = [run for group in shown for run in group.runs]
    moments = [moment for run in runs for moment in run.moments]
    if not any(one is not None for moment in moments for one in (moment.p50, moment.p99, moment.max)):
        return None
    figure, axes = _axes(3.8)
    have_p99 = [any(moment.p99 is not None for moment in run.moments) for run in runs]
    single = "p99" if sum(have_p99) > len(runs) / 2 else "p50"
    drawn: list[tuple[str, float | None]] = []
    for group, colour, run, is_first in _each(shown):
        for name, label, own, width, ls in _lines(group, colour, len(shown), single):
            found = [getattr(moment, name) for moment in run.moments]
            if any(value is not None for value in found):
                drawn += [(name, value) for value in found]
                thin = 0.6 if len(group.runs) > 1 else 1.0
                look: dict[str, Any] = {"color": own, "ls": ls, "lw": width * thin, "gid": name}
                if places := alone_at(found):
                    look |= {"marker": ".", "markevery": places}
                axes.plot(*_moments(run, name), label=label if is_first else None, **look)
    times = sorted({_middle(moment) for moment in moments if moment.errors})
    if times:
        look = {"color": RED, "ms": 9, "mew": 1.5, "transform": axes.get_xaxis_transform(), "gid": "errors"}
        axes.plot(times, [0.025] * len(times), "|", label="errors", **look)
    steady = [run.steady_from_s for run in runs if run.steady_from_s] if len(shown) == 1 else []
    for place, start in enumerate(steady):
        look = {"color": GREEN, "lw": 1.1, "ls": DASHED, "gid": "steady"}
        axes.axvline(start, label=None if place else "steady from here on", **look)
    # The lateness of the generator does not decide the scale of the latency.
    late = [value for name, value in drawn if name == "late_p99"]
    _scale(axes, "y", [value for name, value in drawn if name != "late_p99"], late)
    is_one_figure = len(shown) > (2 if single == "p99" else 1)
    _time_axis(axes, runs, f"{single} latency (ms)" if is_one_figure else "latency (ms)")
    return figure


def _lines(group: Group, colour: str, count: int, single: str) -> list[tuple[str, str, str, float, str]]:
    """Return the latency figures that are drawn: all of one group, two of two groups, one of several."""
    if count == 1:
        own = [("p50", "p50", BLUE, 1.5, "-"), ("p99", "p99", ORANGE, 1.5, "-")]
        if len(group.runs) == 1:
            own.append(("max", "max", AMBER, 1.0, ":"))
        return [*own, ("late_p99", "generator's lateness, p99", SOFT, 0.8, "-")]
    if count == 2 and single == "p99":
        return [(name, f"{group.key}, {name}", colour, 1.4, ls) for name, ls in (("p99", "-"), ("p50", ":"))]
    return [(single, group.key, colour, 1.4, "-")]


@_styled
def throughput_over_time(report: Report) -> Figure | None:
    """Draw answers per second, and the requests that were due, over time."""
    shown = main_groups(report, "search")
    runs = [run for group in shown for run in group.runs]
    if not any(moment.sent or moment.throughput for run in runs for moment in run.moments):
        return None
    figure, axes = _axes(3.2)
    for place, run in enumerate(runs):
        look: dict[str, Any] = {"color": PALE, "lw": 3.5 if len(runs) == 1 else 1.2, "gid": "due"}
        axes.plot(*_moments(run, "sent"), label=None if place else "due", **look)
    for group, colour, run, is_first in _each(shown):
        label = (group.name if len(shown) > 1 else "answered") if is_first else None
        look = {"color": colour, "lw": 0.9 if len(group.runs) > 1 else 1.5, "gid": "answered"}
        axes.plot(*_moments(run, "throughput"), label=label, **look)
    rates = [rate for run in runs for moment in run.moments for rate in (moment.sent, moment.throughput)]
    axes.set(ylim=(0, max(rates) * 1.08))
    axes.yaxis.set_major_formatter(FuncFormatter(_tick))
    _time_axis(axes, runs, "requests/s")
    return figure


def _moments(run: Run, name: str) -> tuple[list[float], list[float]]:
    """Return the middle of each moment, and its figure, with a gap where it has none."""
    found = [getattr(moment, name) for moment in run.moments]
    return [_middle(moment) for moment in run.moments], [math.nan if one is None else one for one in found]


def _middle(moment: Moment) -> float:
    return moment.at_s + moment.seconds / 2


def _time_axis(axes: Axes, runs: Sequence[Run], ylabel: str) -> None:
    ends = [moment.at_s + moment.seconds for run in runs for moment in run.moments]
    axes.set(xlim=(0, max(ends)), xlabel="time after the warm-up (s)", ylabel=ylabel)
    axes.xaxis.set_major_formatter(FuncFormatter(_tick))
    _legend(axes)


@_styled
def percentiles(report: Report) -> Figure | None:
    """Draw the whole distribution of the latency, with an axis that widens towards rare values."""
    runs = [part for part in _each(groups(report)) if part[2].answered]
    if not runs:
        return None
    figure, axes = _axes(3.8)
    drawn: list[float] = []
    most = 2.0
    for group, colour, run, is_first in runs:
        counts = Counts.decode(run.histogram)
        most = max(most, 2.0 * len(counts))
        marks = marks_for(len(counts))
        sure = [mark for mark in marks if len(counts) * (1 - mark / 100) >= SURE_ABOVE]
        tail = [mark for mark in marks if mark >= max(sure, default=0)]
        look: dict[str, Any] = {"color": colour, "lw": 0.9 if len(group.runs) > 1 else 1.7}
        label = (group.name or "latency") if is_first else None
        for part, ls, told in ((sure, "-", label), (tail, (0, (1, 2)), None)):
            found = [(counts.percentile(mark) or 0) / 1e6 for mark in part]
            axes.plot([odds(mark) for mark in part], found, ls=ls, label=told, gid="curve", **look)
            drawn += found
        dots = {name: value for name, value in run.uncorrected.items() if name.startswith("p")}
        differs = any(
            abs(run.latency.get(name, value) - value) > 0.01 * value for name, value in dots.items()
        )
        if dots and (differs or len(runs) == 1):
            label = "from when it was sent" if len(runs) == 1 else None
            where = [odds(float(name[1:])) for name in dots]
            look = {"color": colour, "mfc": "white", "ms": 4, "mew": 1.1, "gid": "uncorrected"}
            axes.plot(where, list(dots.values()), "o", label=label, **look)
            drawn += dots.values()
    axes.set(xscale="log", xlim=(1, most), xlabel="percentile of the requests", ylabel="latency (ms)")
    axes.xaxis.set_major_locator(FixedLocator([odds(mark) for mark in MARKS if odds(mark) <= most]))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda one_in, _: f"{100 - 100 / one_in:.10g}%"))
    axes.grid(visible=True, axis="x")
    _scale(axes, "y", drawn)
    _legend(axes)
    return figure


@_styled
def batches(report: Report) -> Figure | None:
    """Draw the number of batches by their rows."""
    shown = main_groups(report, "sweep", "search")
    known = [(group, colour, sizes(group.runs)) for group, colour in zip(shown, _colours(shown), strict=True)]
    known = [part for part in known if part[2]]
    if not known:
        return None
    figure, axes = _axes(3.0)
    largest = max(max(by_rows) for *_, by_rows in known)
    step = math.ceil(largest / BINS_MAX)
    width = 0.84 * step / len(known)
    for place, (group, colour, by_rows) in enumerate(known):
        bins: dict[int, int] = {}
        for rows, count in by_rows.items():
            bins[(rows - 1) // step] = bins.get((rows - 1) // step, 0) + count
        # A bar is drawn around the middle of its sizes.
        shift = (place - (len(known) - 1) / 2) * width
        middles = [part * step + (step + 1) / 2 + shift for part in bins]
        axes.bar(middles, list(bins.values()), width, color=colour, alpha=0.85, label=group.name or None)
        mean = sum(rows * count for rows, count in by_rows.items()) / sum(by_rows.values())
        look: dict[str, Any] = {"color": colour if len(known) > 1 else TEXT, "lw": 1.1, "ls": DASHED}
        axes.axvline(
            mean,
            label=f"{group.key if len(known) > 1 else ''} mean {number(mean)}".strip(),
            gid="mean",
            **look,
        )
    rows_axis = "rows in a batch" if step == 1 else f"rows in a batch, {step} sizes a bar"
    axes.set(xlim=(0.5 - step * 0.1, largest + step * 0.6), xlabel=rows_axis, ylabel="batches")
    axes.xaxis.set_major_locator(MaxNLocator(16, integer=True, min_n_ticks=1))
    axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(_tick))
    _legend(axes)
    return figure


@_styled
def where_time_goes(report: Report) -> Figure | None:
    """Draw the mean latency by stage."""
    known = [(group.name, stages(group.runs)) for group in groups(report)]
    known = [(name, found) for name, found in known if sum(found.values())]
    if not known:
        return None
    totals = [sum(found.values()) for _, found in known]
    # Beside a bar that is a hundred times as long the others could not be seen.
    is_shares = max(totals) / min(totals) > SHARES_FROM
    is_short = max(totals) < SHORT_MS
    units = [total / 100 if is_shares else 1e-3 if is_short else 1.0 for total in totals]
    longest = 100.0 if is_shares else max(totals) / units[0]
    figure, axes = _axes(1.1 + 0.42 * len(known))
    places = range(len(known))
    lefts = [0.0] * len(known)
    for stage, colour in BY_STAGE.items():
        widths = [found[stage] / unit for (_, found), unit in zip(known, units, strict=True)]
        if any(widths):
            drawn = axes.barh(places, widths, 0.62, lefts, color=colour, label=stage, gid=stage)
            form = "{:.0f}%".format if is_shares else number
            # A letter is narrower than 1% of the longest bar.
            texts = [form(width) for width in widths]
            least = [longest * (0.01 + 0.0095 * len(text)) for text in texts]
            texts = [texts[place] if widths[place] > least[place] else "" for place in places]
            dark = stage in ("compute", "copy out")
            axes.bar_label(drawn, texts, label_type="center", color="white" if dark else TEXT, fontsize=8.5)
        lefts = [left + width for left, width in zip(lefts, widths, strict=True)]
    for place, (left, total) in enumerate(zip(lefts, totals, strict=True)):
        told = f"{number(total * 1e3)} µs" if is_short else f"{number(total)} ms"
        axes.annotate(told, (left, place), (5, 0), textcoords="offset points", va="center")
    axes.set(xlim=(0, longest * 1.1), ylim=(len(known) - 0.5, -0.5))
    unit = "µs" if is_short else "ms"
    axes.set_xlabel("share of the mean latency (%)" if is_shares else f"mean latency ({unit})")
    axes.set_yticks(places, [_short(name) for name, _ in known])
    axes.grid(visible=False)
    axes.xaxis.set_major_formatter(FuncFormatter(_tick))
    _legend(axes)
    return figure


@_styled
def timeline(report: Report) -> Figure | None:
    """Draw batches over contexts: when each was copied in, computed, and copied out."""
    main = main_run(report)
    if main is None or not main.timeline:
        return None
    found = lanes(main.timeline)
    figure, axes = _axes(1.1 + 0.5 * len(found))
    start = min(bar.begin for lane in found for bar in lane)
    end = max(bar.end for lane in found for bar in lane)
    for place, lane in enumerate(found):
        parts = {
            "copy in": [(bar.begin, bar.copied_in - bar.begin) for bar in lane],
            "compute": [(bar.started, bar.computed - bar.started) for bar in lane],
            "copy out": [(bar.computed, bar.end - bar.computed) for bar in lane],
        }
        for stage, spans in parts.items():
            look: dict[str, Any] = {"facecolor": BY_STAGE[stage], "lw": 0, "gid": f"{stage}-{place}"}
            axes.broken_barh(spans, (place - 0.36, 0.72), label=None if place else stage, **look)
        for bar in lane:
            told = [str(bar.rows)] + [f"a{bar.arena}"] * (bar.arena is not None)
            # A letter is narrower than 0.8% of the width.
            if bar.computed - bar.started > 0.008 * (end - start) * max(map(len, told)):
                look = {
                    "ha": "center",
                    "va": "center",
                    "fontsize": 7.5,
                    "color": "white",
                    "linespacing": 1.05,
                }
                axes.text((bar.started + bar.computed) / 2, place, "\n".join(told), **look)
    axes.set_yticks(range(len(found)), [f"context {lane[0].context}" for lane in found])
    axes.set(xlim=(start, end), ylim=(len(found) - 0.5, -0.5), xlabel="time (ms)")
    axes.grid(visible=False)
    axes.xaxis.set_major_formatter(FuncFormatter(_tick))
    _legend(axes)
    return figure


@_styled
def ratios(report: Report) -> Figure | None:
    """Draw the ratios of a comparison, B over A, figure by figure."""
    if report.comparison is None or not report.comparison.ratios:
        return None
    items = list(report.comparison.ratios.items())
    figure, axes = _axes(1.1 + 0.4 * len(items))
    for place, (name, ratio) in enumerate(items):
        verdict = judged(name, ratio.low, ratio.high)
        colour = {"better": GREEN, "worse": RED, "": SOFT}[verdict]
        axes.plot([ratio.low, ratio.high], [place, place], color=colour, lw=3, solid_capstyle="butt")
        axes.plot([ratio.mean], [place], "o", color=colour, ms=8, gid=name)
        told = f"{ratio.mean:.3f} ({ratio.low:.3f} to {ratio.high:.3f})  {verdict or 'no certain difference'}"
        axes.annotate(told, (1.02, place), xycoords=axes.get_yaxis_transform(), va="center")
    ends = [1.0, *(end for _, ratio in items for end in (ratio.low, ratio.high))]
    low, high = min(ends), max(ends)
    if high / low > 2.5:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_minor_locator(NullLocator())
    margin = (high / low) ** 0.06
    axes.axvline(1, color=TEXT, lw=1)
    axes.set(xlim=(low / margin, high * margin), ylim=(len(items) - 0.5, -0.5), xlabel="B over A")
    axes.set_yticks(range(len(items)), [name for name, _ in items])
    axes.xaxis.set_major_formatter(FuncFormatter(_tick))
    axes.grid(visible=True, axis="x")
    axes.grid(visible=False, axis="y")
    return figure
