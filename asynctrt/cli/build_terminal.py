"""Show the progress of plan builds in a terminal."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from rich.console import Console
from rich.errors import LiveError
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from asynctrt._util.validation import printable
from asynctrt.backends.tensorrt.builder import BuildStep

LOGGER: Final = logging.getLogger("asynctrt.build")


def progress_on(console: Console) -> Progress:
    """Return progress bars that disappear at the end."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, transient=True)


class BuildBar:
    """A progress bar for a whole build, with its current phase."""

    def __init__(self, progress: Progress, model: str = "") -> None:
        self._progress = progress
        self._model = f"{model}: " if model else ""
        self.task: TaskID = progress.add_task(escape(f"{self._model}parsing the model"), total=None)

    def __call__(self, step: BuildStep) -> None:
        """Show one step. TensorRT's threads call this, which rich allows."""
        if step.parent is None:
            self._progress.update(self.task, total=step.total, completed=step.done)
        self._progress.update(self.task, description=escape(self._model + step.phase.lower()))


class _Bars(logging.Handler):
    """A handler that shows the plan cache's log of builds, with a bar for each running build."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress
        self._bars: dict[str, BuildBar] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Show one record: move the model's bar for a step, or print a line for anything else."""
        model, step = getattr(record, "model", ""), getattr(record, "step", None)
        bar = self._bars.get(model)
        if step is not None:
            if bar is not None:
                bar(step)
            return
        said = printable(record.getMessage())
        self._progress.console.print(said, highlight=False, markup=False, soft_wrap=True)
        if bar is None:
            with suppress(LiveError):  # Another live display is running, and rich allows only one at a time.
                self._progress.start()
            self._bars[model] = BuildBar(self._progress, printable(model.rpartition("/")[2]))
        else:
            self._progress.remove_task(self._bars.pop(model).task)

    def end(self) -> None:
        """Remove the bars of failed builds."""
        for bar in self._bars.values():
            self._progress.remove_task(bar.task)
        self._bars.clear()


@contextmanager
def builds_shown(
    console: Console, progress: Progress | None = None, *, is_wanted: bool = True
) -> Iterator[None]:
    """Show builds of the plan cache inside the block if the console is a terminal; otherwise log them.

    :param progress: existing bars to use. Default: new bars while a build runs.
    :param is_wanted: false to only log builds.
    """
    if not (is_wanted and console.is_terminal):
        yield
        return
    shown = progress or progress_on(console)
    bars, level, propagates = _Bars(shown), LOGGER.level, LOGGER.propagate
    LOGGER.addHandler(bars)
    LOGGER.setLevel(logging.DEBUG)
    LOGGER.propagate = False
    try:
        yield
    finally:
        LOGGER.removeHandler(bars)
        LOGGER.setLevel(level)
        LOGGER.propagate = propagates
        bars.end()
        if progress is None:
            shown.stop()
