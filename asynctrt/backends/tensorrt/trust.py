"""Check that a plan is trusted, on the exact bytes to be deserialised, because deserialising runs them."""

import hashlib
import hmac
from pathlib import Path

from asynctrt.backends.tensorrt.built_here import is_recorded
from asynctrt.backends.tensorrt.signatures import check_signature, signature_path, signers_path
from asynctrt.errors import UntrustedError

SIGNED = "signed"
PINNED = "sha256:"
BUILT_HERE = "built-here"


def check_trust(content: bytes, path: Path | None, where: str, trust: tuple[str, ...]) -> None:
    """Check that a plan is trusted, by one of the methods in the option ``trust``.

    :param content: the whole plan. The caller must use these bytes and no others.
    :param path: its file, with the signature beside it, or ``None``.
    :param where: the name of the plan in messages.
    :param trust: ``signed``, ``built-here`` and digests; if empty, every plan is trusted.
    :raises UntrustedError: if the plan is not trusted.
    :raises UsageError: if the allowed signers cannot be read, or ``ssh-keygen`` is not installed.
    """
    if not trust:
        return
    digest = hashlib.sha256(content).digest()
    pins = [way.removeprefix(PINNED) for way in trust if way.startswith(PINNED)]
    if any(hmac.compare_digest(pin, digest.hex()) for pin in pins):
        return
    if BUILT_HERE in trust and is_recorded(digest.hex()):
        return
    if SIGNED not in trust:
        if BUILT_HERE in trust:
            raise UntrustedError(
                f"{where} is not trusted: it was not built by this user on this machine, or was changed "
                f"since; its SHA-256 is {digest.hex()}. Build it again: asynctrt build MODEL.onnx -o PLAN; "
                f"or sign it and add 'signed'; or name it: trust=['{PINNED}{digest.hex()}']"
            )
        raise UntrustedError(
            f"{where} is not trusted: its SHA-256 is {digest.hex()}, which is none of the {len(pins)} that "
            f"the option trust names. It was changed or replaced, or if this is the plan that you mean: "
            f"trust=['{PINNED}{digest.hex()}']"
        )
    if path is None:
        raise UntrustedError(
            f"{where} is not trusted: a plan that is given as bytes has no signature beside it. Give its "
            f"path, or trust=['{PINNED}...'] with the digest that you expect"
        )
    check_signature(content, signature_path(path), signers_path(), where)
