"""The ``asynctrt`` command, also as ``python -m asynctrt``."""

import sys

from asynctrt.errors import MissingExtraError


def main() -> None:
    """Run the command line, or say what to install for it."""
    try:
        # Not at the top: it needs an extra, whose absence is to be a message and not a traceback.
        from asynctrt.cli import main as run  # noqa: PLC0415
    except MissingExtraError as error:
        sys.exit(f"MissingExtraError: {error}")
    run()


if __name__ == "__main__":
    main()
