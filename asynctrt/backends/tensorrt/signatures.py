"""Check the OpenSSH signature of a plan with ``ssh-keygen``, against the keys that are allowed to sign plans.

``ssh-keygen -Y sign -n asynctrt -f KEY PLAN`` writes the signature beside the plan, as ``PLAN.sig``. The
valid keys are in an allowed-signers file, whose format ``man ssh-keygen`` describes. Write access to that
file decides what code runs here, and ``ssh-keygen`` does not check its owner or mode, so this module does.
Every file is read once; ``ssh-keygen`` gets copies that only this user can write, and the plan from a pipe.
"""

import os
import shutil
import stat
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from asynctrt._util.files import CONFIG_NBYTES_MAX, foreign_access, open_regular, read_regular
from asynctrt.errors import UntrustedError, UsageError

NAMESPACE: Final = "asynctrt"
"""The required purpose of a signature: one made for an e-mail or a commit is not accepted."""

VARIABLE: Final = "ASYNCTRT_ALLOWED_SIGNERS"

REVOKED: Final = ".revoked"
"""The suffix of the file of revoked keys, after the name of the allowed-signers file."""

START_S: Final = 60.0
"""How long ``ssh-keygen`` may take, excluding reading the plan, on a busy machine."""

NBYTES_PER_S: Final = 20e6
"""The minimum rate at which it must read the plan: a tenth of its hashing rate on a core with other work."""

REASONS: Final = {
    "incorrect signature": "it was changed after it was signed. Copy both again, or sign it again",
    "namespace does not match": "it was signed for something else. Sign it with -n asynctrt",
    "not permitted for use in signature namespace": (
        "its key may sign other things only. Add asynctrt to namespaces= in its line"
    ),
    "expired": (
        "its key or certificate has expired. Sign it with another key, or change valid-before in its line"
    ),
    "not yet valid": "its key is not valid yet. Check valid-after in its line, and this machine's clock",
    "parse signature": "its signature cannot be read. Copy it again, or sign the plan again",
    "No principal matched": (
        "its key is not among the allowed signers. If you know whose it is, add a line: "
        'NAME namespaces="asynctrt" ssh-ed25519 AAAA...'
    ),
}
"""Texts of ``ssh-keygen`` when it refuses a signature, with their meanings; the first match applies.

They only choose the message. The decision is the exit status.
"""


def signature_path(path: Path) -> Path:
    """Return the path of a plan's signature."""
    return path.with_name(f"{path.name}.sig")


def signers_path(env: Mapping[str, str] = os.environ) -> Path:
    """Return the path of the allowed-signers file."""
    given = env.get(VARIABLE)
    if given == "":
        raise UsageError(f"{VARIABLE} is set and empty. Give it the path of a file, or do not set it")
    config = env.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(given or f"{config}/asynctrt/allowed_signers")


def check_signature(content: bytes, signature: Path, signers: Path, where: str) -> str:
    """Check that an allowed signer has signed exactly this content, and return the signer's identity."""
    try:
        signed = read_regular(signature, CONFIG_NBYTES_MAX)
    except OSError as error:
        raise UntrustedError(
            f"{where} is not signed: {str(signature)!r} cannot be read: {error.strerror}. If you know where "
            f"the plan comes from, sign it: ssh-keygen -Y sign -n {NAMESPACE} -f KEY PLAN"
        ) from error
    revoked = Path(f"{signers}{REVOKED}")
    files = {"signature": signed, "signers": _read_own(signers, "the allowed signers")}
    if os.path.lexists(revoked):
        files["revoked"] = _read_own(revoked, "the revoked keys")
    program = shutil.which("ssh-keygen")
    if program is None:
        raise UsageError(
            f"the signature of {where} has to be checked by ssh-keygen, which is not installed: apt install "
            "openssh-client"
        )
    try:
        with tempfile.TemporaryDirectory(prefix="asynctrt-") as folder:
            _check_above(Path(folder).resolve())
            for name, one in files.items():
                (Path(folder) / name).write_bytes(one)
            return _verify(program, content, Path(folder), signers, where)
    except subprocess.TimeoutExpired as error:
        raise UntrustedError(
            f"{where} is not trusted: ssh-keygen did not check its signature within {error.timeout:.0f} s. "
            "Try again when this machine has less to do"
        ) from error
    except OSError as error:
        raise UsageError(f"the signature of {where} cannot be checked: {error}") from error


def _verify(program: str, content: bytes, folder: Path, signers: Path, where: str) -> str:
    """Check the signature in a folder, and return the identity of its signer."""
    base = [program, "-Y"]
    files = ["-f", str(folder / "signers"), "-s", str(folder / "signature")]
    found = _run([*base, "find-principals", *files], None)
    # Any of several identities will do: each is a name for the same line of the allowed signers.
    identity = os.fsdecode(found.stdout.partition(b"\n")[0])
    if found.returncode or not identity:
        raise UntrustedError(_refusal(found, signers, where))
    verify = [*base, "verify", "-n", NAMESPACE, "-I", identity, *files]
    has_revoked = (folder / "revoked").exists()
    checked = _run([*verify, *(["-r", str(folder / "revoked")] if has_revoked else [])], content)
    if not checked.returncode:
        return identity
    # Its output does not say whether the key is revoked.
    if has_revoked and not _run(verify, content).returncode:
        raise UntrustedError(
            f"{where} is not trusted: {str(signers) + REVOKED!r} revokes its key, or is not a list of keys. "
            "If this is still the plan that you mean, sign it with another key"
        )
    raise UntrustedError(_refusal(checked, signers, where))


def _run(command: list[str], content: bytes | None) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(  # noqa: S603  (a program that this user has installed)
        command,
        input=content or b"",
        capture_output=True,
        timeout=START_S + len(content or b"") / NBYTES_PER_S,
        check=False,
        env={**os.environ, "LC_ALL": "C"},
    )


def _refusal(done: subprocess.CompletedProcess[bytes], signers: Path, where: str) -> str:
    said = b" ".join((done.stderr + done.stdout).split()).decode(errors="replace")
    reasons = (reason for words, reason in REASONS.items() if words in said)
    reason = next(reasons, "ssh-keygen does not accept its signature")
    return f"{where} is not trusted: {reason} ({str(signers)!r}). ssh-keygen says: {said:.300}"


def _read_own(path: Path, what: str) -> bytes:
    """Return the content of a file after checking that only this user or root can change or replace it."""
    try:
        real = Path(os.path.realpath(path, strict=True))
        with open_regular(real) as file:
            _check_own(real, os.fstat(file.fileno()))
            content = file.read(CONFIG_NBYTES_MAX + 1)
        # A symbolic link counts too: replacing it is as good as changing the file.
        for one in (path.absolute(), real):
            _check_own(one.parent, one.parent.stat())
            _check_above(one.parent)
    except OSError as error:
        raise UsageError(
            f"{what} cannot be read from {str(path)!r}: {error.strerror}. Write a line for each key there, "
            f'NAME namespaces="{NAMESPACE}" ssh-ed25519 AAAA..., or name another file in {VARIABLE}'
        ) from error
    if len(content) > CONFIG_NBYTES_MAX:
        raise UsageError(f"{str(path)!r} is too large for {what}: more than {CONFIG_NBYTES_MAX:,} bytes")
    return content


def _check_own(path: Path, status: os.stat_result) -> None:
    """Check that no other user can decide which keys are valid."""
    access = foreign_access(path, status)
    if access is not None:
        raise UsageError(
            f"{access}, who could put their own key there: chmod go-w {path}, or copy it to a "
            "folder that only you can write"
        )


def _check_above(folder: Path) -> None:
    """Check that not every user can replace this folder."""
    for parent in folder.parents:
        mode = stat.S_IMODE(parent.stat().st_mode)
        if mode & 0o002 and not mode & stat.S_ISVTX:
            raise UsageError(
                f"{str(parent)!r} can be written by everybody (mode {mode:o}), who could put a folder with "
                f"their own keys there: chmod o-w {parent}"
            )
