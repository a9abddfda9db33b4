"""Show in a terminal how far the builds of plans are."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Final

from rich.console import Console
from rich.errors import LiveError
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from asynctrt.backends.tensorrt.builder import BuildStep

ESCAPES: Final = {code: f"\\x{code:02x}" for code in (*range(32), 127, *range(128, 160))}
"""Names of models may come from files of others: they must not control the terminal."""

LOGGER: Final = logging.getLogger("asynctrt.build")


def progress_on(console: Console) -> Progress:
    """Return bars that disappear in the end."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, transient=True)


class BuildBar:
    """Shows how far a build is: a bar for the whole, with the phase that it is in."""

    def __init__(self, progress: Progress, model: str = "") -> None:
        self._progress = progress
        self._model = f"{model}: " if model else ""
        self.task: TaskID = progress.add_task(escape(f"{self._model}parsing the model"), total=None)

    def __call__(self, step: BuildStep) -> None:
        """Show one step. Called on TensorRT's threads, which rich allows."""
        if step.parent is None:
            self._progress.update(self.task, total=step.total, completed=step.done)
        self._progress.update(self.task, description=escape(self._model + step.phase.lower()))


class _Bars(logging.Handler):
    """Shows what the plan cache logs of its builds, each with a bar while it goes on."""

    def __init__(self, progress: Progress) -> None:
        super().__init__()
        self._progress = progress
        self._bars: dict[str, BuildBar] = {}

    def emit(self, record: logging.LogRecord) -> None:
        """Show one record: a step moves its model's bar, anything else is a line."""
        model, step = getattr(record, "model", ""), getattr(record, "step", None)
        bar = self._bars.get(model)
        if step is not None:
            if bar is not None:
                bar(step)
            return
        said = record.getMessage().translate(ESCAPES)
        self._progress.console.print(said, highlight=False, markup=False, soft_wrap=True)
        if bar is None:
            with suppress(LiveError):  # Something else is being shown, of which there can be one at a time.
                self._progress.start()
            self._bars[model] = BuildBar(self._progress, model.rpartition("/")[2].translate(ESCAPES))
        else:
            self._progress.remove_task(self._bars.pop(model).task)

    def end(self) -> None:
        """Remove what is left of builds that failed."""
        for bar in self._bars.values():
            self._progress.remove_task(bar.task)
        self._bars.clear()


@contextmanager
def builds_shown(
    console: Console, progress: Progress | None = None, *, is_wanted: bool = True
) -> Iterator[None]:
    """Show builds of the plan cache while inside, if the console is a terminal; else they are logged.

    :param progress: the bars that there are already. Default: some of its own, while there is a build.
    :param is_wanted: false leaves everything to the log.
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
