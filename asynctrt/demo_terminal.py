"""Show in a terminal what `asynctrt demo` does."""

import sys
from collections.abc import Callable
from shutil import which
from typing import Final

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table

from asynctrt import demo
from asynctrt.demo_parts import Course, Part

LABELS_MAX: Final = 8

LACKING: Final = (
    "Some thirty lines make a batcher. What they lack: a bounded queue, deadlines, priorities, requests of "
    "several rows, several batches at once, and an end that answers everybody."
)


LATE: Final = (
    "The same load in four ways. Loop late: by how many ms something else on the event loop was woken late, "
    "the 99th percentile."
)


class DemoView:
    """Prints results as they come, above a bar for what is going on."""

    def __init__(self, out: Console, progress: Progress, course: Course) -> None:
        self._out = out
        self._progress = progress
        self._course = course
        self._parts = 0

    def begin(self, what: str, total: int) -> Callable[[], None]:
        """Begin a bar; return what advances it."""
        for task in self._progress.task_ids:
            self._progress.remove_task(task)
        task = self._progress.add_task(what, total=total)
        return lambda: self._progress.advance(task)

    def show_files(self, found: demo.Found, model: demo.ContentModel) -> None:
        """Print what the files are."""
        if not found.files:
            self._say(f"No file could be identified in {', '.join(map(str, self._course.folders))}.")
            return
        table = Table(title="Your files, as a real model sees them", title_justify="left")
        for column in ("type", "files", "extension agrees"):
            table.add_column(column, justify="left" if column == "type" else "right")
        for label, files in found.labels.most_common(LABELS_MAX):
            judged = found.judged[label]
            table.add_row(label, f"{files:,}", f"{found.right[label] / judged:.0%}" if judged else "-")
        others = len(found.labels) - LABELS_MAX
        if others > 0:
            rest = found.files - sum(files for _, files in found.labels.most_common(LABELS_MAX))
            table.add_row(f"{others} more", f"{rest:,}", "")
        self._out.print(table)
        judged, right = found.judged.total(), found.right.total()
        self._say(
            f"The extension agrees for {right:,} of {judged:,} files that have a known one. "
            f"{found.skipped:,} files were unreadable or too small."
        )

    def show_part(self, part: Part) -> None:
        """Print what each way made of a load."""
        if not part.results:
            return
        self._out.print(f"\n[bold]{escape(part.title)}[/]", highlight=False)
        if not self._parts:
            self._say(LATE)
        self._parts += 1
        self._say(part.about)
        table = Table(caption_justify="left")
        columns = [f"{part.callers} at a time", "answers/s", "p50 ms", "p99 ms", "loop late"]
        if part.own_work_s:
            columns.append("own work")
        for column in columns:
            table.add_column(column, justify="right" if table.columns else "left", no_wrap=True)
        for name, done in part.results.items():
            cells = [
                f"{done.answers_per_s:,.0f}",
                f"{done.latency_ms(50):,.1f}" if done.answers else "-",
                f"{done.latency_ms(99):,.1f}" if done.answers else "-",
                f"{done.late_ms(99):,.1f}" if done.late_ns else "-",
            ]
            if part.own_work_s:
                cells.append(f"{done.own_share:.0%}")
            table.add_row(name, *cells, style="bold" if name == "asynctrt" else None)
        self._out.print(table)
        if part.own_work_s:
            self._say("own work: the share of the time that was left for that task.")
        compared = part.compared()
        if compared is not None:
            ratio, best = compared
            self._say(f"asynctrt: {ratio:.2f} times the answers of the best of the others ({best}).")

    def show_dashboard(self, url: str | None) -> None:
        """Print where the dashboard is, or how to get one, and what to try."""
        self._progress.stop()
        self._say("\n" + LACKING)
        if url is not None:
            self._out.print(f"\n[bold]The dashboard: {escape(url)}/[/]", highlight=False, soft_wrap=True)
            self._say("Both models, under a light load. Ctrl-C ends it.")
        self._out.print("\nTo try next:", highlight=False)
        address = url or "http://127.0.0.1:8000"
        tries = [
            ("demo ~/Downloads", "your own files"),
            (f"load {address}/v2/models/layers --callers 64", "a load, to be seen on the dashboard"),
            ("doctor", "whether this machine is ready for a GPU"),
        ]
        if url is None:
            tries[1:2] = [
                ("demo --dashboard", "and then a dashboard of both models"),
                ("load demo", "the first model under load"),
            ]
        for command, what in tries:
            self._out.print(
                f"  {_command()} {command}\n      {what}", highlight=False, markup=False, soft_wrap=True
            )

    def _say(self, text: str) -> None:
        self._out.print(text, highlight=False, markup=False)


def _command() -> str:
    """Return the command as it can be called here: it is on the path only in an active environment."""
    if which("asynctrt"):
        return "asynctrt"
    given = sys.argv[0]
    return f"{sys.executable} -m asynctrt" if given.endswith(".py") else given
