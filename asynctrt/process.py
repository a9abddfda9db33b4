"""What a program of ours sets for its whole process. That is for a command to do, and not for a library."""

import gc
import sys
from pathlib import Path
from typing import Final

SWITCH_INTERVAL_S: Final = 0.0005
"""How soon a thread that computes gets the GIL back from the loop. Python's own 5 ms suits no server."""


def let_threads_in() -> None:
    """Let threads that compute have the GIL soon."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def find_modules_here() -> None:
    """Have the working directory on the path, for ``module:attribute``, as ``python -m`` does."""
    if not {"", str(Path.cwd())} & set(sys.path):
        sys.path.insert(0, str(Path.cwd()))


def keep_what_is_there() -> None:
    """Once all is loaded: full collections that looked through it held the loop for 40 ms each."""
    gc.collect()
    gc.freeze()
