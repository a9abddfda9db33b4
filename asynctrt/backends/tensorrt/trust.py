"""Check that a plan is trusted, on the exact bytes to be deserialised, because deserialising runs them.

The digests of plans that this user has built on this machine are in a file. Write access to it decides what
runs as this user, so only this user may have it.
"""

import hashlib
import hmac
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from asynctrt._util.files import (
    CONFIG_NBYTES_MAX,
    foreign_access,
    locked,
    make_private,
    open_regular,
    write_whole,
)
from asynctrt.backends.tensorrt.signatures import check_signature, signature_path, signers_path
from asynctrt.errors import UntrustedError, UsageError

SIGNED = "signed"
PINNED = "sha256:"
BUILT_HERE = "built-here"

RECORDS_MAX: Final = 4096
"""The maximum number of digests kept; the oldest are dropped first."""

LINE: Final = re.compile(r"[0-9a-f]{64}")


def check_trust(content: bytes, path: Path | None, where: str, trust: tuple[str, ...]) -> None:
    """Check that a plan is trusted, by one of the methods in the option ``trust``."""
    if not trust:
        return
    digest = hashlib.sha256(content).hexdigest()
    pins = [way.removeprefix(PINNED) for way in trust if way.startswith(PINNED)]
    if any(hmac.compare_digest(pin, digest) for pin in pins):
        return
    if BUILT_HERE in trust and is_recorded(digest):
        return
    if SIGNED not in trust:
        if BUILT_HERE in trust:
            raise UntrustedError(
                f"{where} is not trusted: it was not built by this user on this machine, or was changed "
                f"since; its SHA-256 is {digest}. Build it again: asynctrt build MODEL.onnx -o PLAN; "
                f"or sign it and add 'signed'; or name it: trust=['{PINNED}{digest}']"
            )
        raise UntrustedError(
            f"{where} is not trusted: its SHA-256 is {digest}, which is none of the {len(pins)} that "
            f"the option trust names. It was changed or replaced, or if this is the plan that you mean: "
            f"trust=['{PINNED}{digest}']"
        )
    if path is None:
        raise UntrustedError(
            f"{where} is not trusted: a plan that is given as bytes has no signature beside it. Give its "
            f"path, or trust=['{PINNED}...'] with the digest that you expect"
        )
    check_signature(content, signature_path(path), signers_path(), where)


def records_path(env: Mapping[str, str] = os.environ) -> Path:
    """Return the file of the digests, which need not exist."""
    state = env.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    return Path(state) / "asynctrt" / "built-here"


def record(digest: str, path: Path | None = None) -> None:
    """Record that this user has built the plan with this SHA-256, in hexadecimal."""
    path = path or records_path()
    try:
        make_private(path.parent)
    except OSError as error:
        raise UsageError(f"{str(path.parent)!r} cannot be made: {error.strerror}") from error
    with locked(path.with_name(path.name + ".lock")):
        known = [one for one in _read(path) if one != digest]
        kept = [*known, digest][-RECORDS_MAX:]
        write_whole(path, "".join(f"{one}\n" for one in kept), mode=0o600)


def is_recorded(digest: str, path: Path | None = None) -> bool:
    """Return whether this user has built a plan."""
    return digest in _read(path or records_path())


def _read(path: Path) -> list[str]:
    try:
        folder = path.parent.stat()
        with open_regular(path, follow=False) as file:
            status = os.fstat(file.fileno())
            content = file.read(CONFIG_NBYTES_MAX)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UsageError(
            f"the digests of plans that were built here cannot be read from {str(path)!r}: {error.strerror}"
        ) from error
    for what, found in ((path.parent, folder), (path, status)):
        access = foreign_access(what, found)
        if access is not None:
            raise UsageError(
                f"{access}, who could let their own plans run: chmod go-w {what}; or remove it, and build "
                "the plans again"
            )
    return [line for line in content.decode(errors="replace").splitlines() if LINE.fullmatch(line)]
