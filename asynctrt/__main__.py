"""Run the ``asynctrt`` command, also as ``python -m asynctrt``."""

import signal
import sys

import asynctrt_command
from asynctrt import __version__
from asynctrt.errors import MissingExtraError


def main() -> None:
    """Run the command line, or name the extra that it lacks. The version is told without any."""
    if sys.argv[1:] == ["--version"]:
        sys.stdout.write(f"asynctrt {__version__}\n")
        return
    try:
        # Imported here, as a missing extra must become a message rather than a traceback.
        from asynctrt.cli import main as run  # noqa: PLC0415
    except MissingExtraError as error:
        sys.exit(f"MissingExtraError: {error}")
    if getattr(signal.getsignal(signal.SIGINT), "__module__", "") == asynctrt_command.__name__:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # From here on commands see to it.
    try:
        run()
    except KeyboardInterrupt:  # While the command line was made, or where a command does not see to it.
        sys.exit(asynctrt_command.INTERRUPTED)


if __name__ == "__main__":
    asynctrt_command.main()
