"""Draw pictures in `docs/` from the results that are kept: `python -m tests.benchmarks.pictures`."""

import hashlib
import io
import json
import re

import matplotlib as mpl
from matplotlib.figure import Figure

from tests.benchmarks.tables import ROOT, figures

PICTURE = ROOT / "docs" / "callers.svg"
MODELS = {"resnet50": "ResNet-50", "encoder": "a text encoder"}
LOOPS = {"idle": "a loop that is idle otherwise", "busy": "a loop that others keep busy"}
LINES = {
    "asynctrt": ("asynctrt", "#1769aa", "o"),
    "by hand": ("a batcher by hand", "#c0561f", "s"),
    "async-batcher": ("async-batcher", "#777777", "^"),
}
MARK = "<!-- drawn from {} -->\n"


def points():
    """Return what is drawn: for each model, the bare loop and for each case the rows/s of each line."""
    kept = figures("ort_cuda")["models"]
    return {
        model: {
            "bare": max(max(runs["one thread"], runs["two threads"]) for runs in kept[model]["bare"]),
            "cases": {
                case: {line: found["requests_per_s"] for line, found in lines.items()}
                for case, lines in kept[model]["callers"].items()
            },
        }
        for model in MODELS
    }


def mark():
    """Return the first line of the picture of these points."""
    return MARK.format(hashlib.sha256(json.dumps(points(), sort_keys=True).encode()).hexdigest())


def draw():
    """Return the picture as SVG."""
    with mpl.rc_context({"svg.hashsalt": "asynctrt", "font.size": 9, "svg.fonttype": "none"}):
        figure = Figure(figsize=(8, 5.2), layout="constrained")
        for row, (model, found) in zip(
            figure.subplots(len(MODELS), len(LOOPS), sharex=True), points().items(), strict=True
        ):
            for axes, (loop, title) in zip(row, LOOPS.items(), strict=True):
                axes.axhline(
                    found["bare"], color="black", linestyle=":", linewidth=1, label="bare loop, full batches"
                )
                for line, (label, color, marker) in LINES.items():
                    given = {
                        int(case.partition(", ")[2]): lines[line]
                        for case, lines in found["cases"].items()
                        if case.startswith(loop)
                    }
                    axes.plot(
                        list(given),
                        list(given.values()),
                        color=color,
                        marker=marker,
                        markersize=4,
                        label=label,
                    )
                axes.set_xscale("log", base=2)
                axes.set_xticks([1, 8, 64, 256], ["1", "8", "64", "256"])
                axes.set_ylim(bottom=0)
                axes.set_ylim(top=1.15 * max(found["bare"], *found["cases"]["idle, 256"].values()))
                axes.set_title(f"{MODELS[model]}, {title}", fontsize=9)
                axes.grid(visible=True, linewidth=0.3)
            row[0].set_ylabel("rows/s")
            for axes in row[1:]:
                axes.tick_params(labelleft=False)
        for axes in figure.axes[-len(LOOPS) :]:
            axes.set_xlabel("callers who each ask again at once")
        handles, labels = figure.axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
        drawn = io.StringIO()
        figure.savefig(drawn, format="svg", metadata={"Date": None, "Creator": None})
    text = drawn.getvalue()
    text = text[text.index("<svg") :]
    return mark() + re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)


if __name__ == "__main__":
    PICTURE.write_text(draw())
