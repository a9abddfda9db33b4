"""Show the progress of a plan's build in a terminal."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from asynctrt._util.validation import printable
from asynctrt.backends.tensorrt.builder import BuildStep, Report


@contextmanager
def build_bar(console: Console) -> Iterator[Report]:
    """Show a progress bar for a whole build, with its current phase; it disappears at the end.

    The value takes the steps of the build. TensorRT's threads call it, which rich allows.
    """
    columns = TextColumn("{task.description}", markup=False), BarColumn(), MofNCompleteColumn()
    bar = Progress(
        *columns, TimeRemainingColumn(), console=console, transient=True, disable=not console.is_terminal
    )
    with bar as progress:
        task = progress.add_task("parsing the model", total=None)

        def show(step: BuildStep) -> None:
            if step.parent is None:
                progress.update(task, total=step.total, completed=step.done)
            progress.update(task, description=printable(step.phase.lower()))

        yield show
