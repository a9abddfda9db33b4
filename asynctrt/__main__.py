"""Run the ``asynctrt`` command, also as ``python -m asynctrt``."""

import sys

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
    run()


if __name__ == "__main__":
    main()
