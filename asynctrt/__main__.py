"""Run the ``asynctrt`` command, also as ``python -m asynctrt``."""

import os
import signal
import sys
from pathlib import Path

from asynctrt import __version__
from asynctrt._util.process import INTERRUPTED
from asynctrt.errors import MissingExtraError


def main() -> None:
    """Run the command line, or name the missing extra. ``--version`` works without any extra."""
    if sys.argv[1:] == ["--version"]:
        sys.stdout.write(f"asynctrt {__version__}\n")
        return
    _open_standard_streams()
    is_default = (
        signal.getsignal(signal.SIGINT) is signal.default_int_handler
    )  # Otherwise the parent process wants SIGINT to be ignored.
    if is_default:
        signal.signal(signal.SIGINT, _end)
    try:
        # Imported here, because a missing extra must become a message rather than a traceback. The import
        # takes most of a command's start-up, when Ctrl-C has nothing to undo yet.
        from asynctrt.cli.app import main as run  # noqa: PLC0415
    except MissingExtraError as error:
        sys.exit(f"MissingExtraError: {error}")
    if is_default:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # From here on commands handle it.
    try:
        run()
    except KeyboardInterrupt:  # While the command line was built, or in a command that does not handle it.
        sys.exit(INTERRUPTED)


def _open_standard_streams() -> None:
    """Open closed standard streams on the null device, so that no connection gets their descriptors."""
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # The lowest number that is free.
            stream = open(number, "w" if number else "r", encoding="utf-8", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def _end(*_: object) -> None:
    os._exit(INTERRUPTED)


if __name__ == "__main__":
    # `python -m` puts the working directory first, where anyone may have left a file named like a package.
    if not sys.flags.safe_path and sys.path[0] in ("", str(Path.cwd())):
        del sys.path[0]
    main()
