"""The console script: the command ``asynctrt``, silent under Ctrl-C from its first moment on.

It stands beside the package, whose import takes most of a command's start: in there it would be too late.
"""

import os
import signal

INTERRUPTED = 130
"""The exit status after Ctrl-C, as in a shell: 128 plus the number of SIGINT."""


def main() -> None:
    """Run the command. Ctrl-C while it is imported ends it at once, as there is nothing to undo yet."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # Else somebody wants it ignored.
        signal.signal(signal.SIGINT, _end)
    from asynctrt.__main__ import main as run  # noqa: PLC0415

    run()


def _end(*_: object) -> None:
    os._exit(INTERRUPTED)
