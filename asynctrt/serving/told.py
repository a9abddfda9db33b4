"""What clients are told of a model that cannot be loaded: why, and not where the server keeps its files."""

import re
from typing import Final

from asynctrt.errors import AsynctrtError, copy_for

WORKING: Final = re.compile(r"[;,]? *the working directory is (?:'[^']*'|\"[^\"]*\")")
QUOTED: Final = re.compile(r"(['\"])(/(?:(?!\1).)*)\1")
"""An absolute path in quotes, which may have blanks."""
BARE: Final = re.compile(r"(?<![\w.:/~-])/(?!v2/)[^\s'\":]+")
"""One without quotes; no part of a URL, and none of the server's own."""
MODEL_FILE: Final = re.compile(r"[^/]+/(?:\d+/[^/]+|config\.pbtxt)\Z")
"""The end of a path that is within a repository of models, which clients know by its names."""


def without_folders(text: str) -> str:
    """Return a message with names of files for absolute paths, without the working directory, in UTF-8."""
    text = WORKING.sub("", text)
    for path in {found[2] for found in QUOTED.finditer(text)}:
        # Wherever it occurs: others than us do not put it into quotes.
        text = text.replace(path, _name_of(path))
    text = BARE.sub(lambda found: _name_of(found[0]), text)
    # Names of files may be any bytes, and JSON has none for those that are not UTF-8.
    return text.encode(errors="backslashreplace").decode()


def _name_of(path: str) -> str:
    within = MODEL_FILE.search(path)
    if within is not None:
        return within[0]
    folder, _, name = path.rpartition("/")
    return name if folder else path


def told(error: AsynctrtError) -> AsynctrtError:
    """Return a copy of an error whose message clients may read; the server's log has the whole."""
    copy = copy_for(error)
    copy.args = tuple(without_folders(item) if isinstance(item, str) else item for item in copy.args)
    return copy
