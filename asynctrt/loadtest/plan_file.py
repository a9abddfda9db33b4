"""A load test in a TOML file: the flags of ``asynctrt load`` under the same names, and its ``target``.

::

    target = "http://127.0.0.1:8000/items/${id}"
    inputs = "items.csv"
    rate = "10..100@30s,100@2m"
    slo = ["p99<50ms", "errors<0.1%"]
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from asynctrt._util.files import read_toml
from asynctrt._util.synonyms import ALL_SYNONYMS
from asynctrt._util.validation import FLAG, PATH, TEXT, TEXTS, Check, check_names, number
from asynctrt.core.loading import is_attribute
from asynctrt.errors import OptionsError
from asynctrt.loadtest.session import OPTION_NAMES, SETTING_NAMES
from asynctrt.loadtest.settings import in_own_words

NBYTES_MAX: Final = 16 << 20

FLAGS: Final[Mapping[str, Check]] = {
    **dict.fromkeys(("model", "token", "device", "body", "method", "until_message"), TEXT),
    **dict.fromkeys(("header", "sweep", "compare", "fail_if"), TEXTS),
    **dict.fromkeys(("ca", "cert", "key", "json", "report"), PATH),
    **dict.fromkeys(("insecure", "search"), FLAG),
    "precision": number(0.001, 1),
}
"""The flags of ``load`` besides the settings of a load test and of an engine."""

PATHS: Final = ("inputs", "expect", "ca", "cert", "key", "json", "report")


def read_plan_file(path: Path, flags: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    """Return the target and the flags of a file. Relative paths in it are taken from the file's folder.

    :param flags: the flags of the command line, which win. ``rate`` also wins over the file's ``callers``,
        and the reverse.
    :raises UsageError: if it cannot be read.
    :raises OptionsError: if it is not valid TOML, has an unknown or invalid setting, or has no target.
    """
    content = read_toml(path, NBYTES_MAX, "the load test")
    given = in_own_words(content)
    names = ["target", *FLAGS, *SETTING_NAMES, *OPTION_NAMES]
    check_names(given, names, f"setting in {path}", synonyms=ALL_SYNONYMS)
    target = TEXT("target", given.pop("target", ""))
    if not target:
        raise OptionsError(f"{str(path)!r} has no target: write target = 'http://HOST:PORT/PATH'")
    for name, value in given.items():
        if name in FLAGS:
            given[name] = FLAGS[name](name, value)
        if name in PATHS and str(value) != "-":
            given[name] = path.parent / PATH(name, value)
    if str(given.get("body", "")).startswith("@"):
        given["body"] = f"@{path.parent / given['body'][1:]}"
    for name, other in (("rate", "callers"), ("callers", "rate")):
        if name in flags:
            given.pop(other, None)
    is_file = "://" not in target and target != "demo" and not is_attribute(target)
    return str(path.parent / target) if is_file else target, {**given, **flags}
