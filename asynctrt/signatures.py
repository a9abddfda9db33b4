"""Sign files with Ed25519 keys, and check signatures. The only importer of ``cryptography``.

What is signed is the SHA-256 of a file, behind a text that says what it is for, so that a signature counts
for nothing else. A signature lies beside its file, as ``FILE.sig``. Who has a trusted private key decides
what code runs on the machines that trust it.
"""

import base64
import binascii
import hashlib
import json
import os
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from asynctrt.errors import MissingExtraError, UntrustedError, UsageError
from asynctrt.files import make_private, open_regular, write_whole

try:
    from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
except ImportError as error:
    raise MissingExtraError(
        "keys and signatures need the package cryptography: pip install 'asynctrt[trust]'"
    ) from error

PURPOSE: Final = b"asynctrt: a plan may be deserialised\0"
"""What a signature says of a digest."""

FORMAT: Final = "asynctrt-signature-1"

FILE_NBYTES_MAX: Final = 8192
"""More than any key or signature has."""

SUFFIX: Final = ".sig"


@dataclass(frozen=True, slots=True)
class TrustedKey:
    """A public key."""

    name: str
    """The name of its file, for people."""
    raw: bytes
    """Its 32 bytes."""

    @property
    def id(self) -> str:
        """The SHA-256 of the key, which tells keys apart whatever their files are called."""
        return hashlib.sha256(self.raw).hexdigest()


def signature_path(path: Path) -> Path:
    """Return where the signature of a file is."""
    return path.with_name(path.name + SUFFIX)


def trusted_folder(env: Mapping[str, str] = os.environ) -> Path:
    """Return the folder of the public keys that this user trusts, which need not be there."""
    config = env.get("XDG_CONFIG_HOME") or str(Path.home() / ".config")
    return Path(config) / "asynctrt" / "trusted"


def create_key(path: Path) -> TrustedKey:
    """Create a key pair: a private key, which only its owner can read, and beside it ``PATH.pub``.

    :raises UsageError: if either is there already, or cannot be written.
    """
    private = Ed25519PrivateKey.generate()
    public_path = path.with_name(path.name + ".pub")
    for one in (path, public_path):
        if os.path.lexists(one):
            raise UsageError(
                f"{str(one)!r} is there already. Choose another name: keys are never overwritten"
            )
    secret = private.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(secret)
    except OSError as error:
        raise UsageError(f"{str(path)!r} cannot be written: {error.strerror}") from error
    public = private.public_key()
    try:
        write_whole(public_path, _public_pem(public))
    except UsageError:
        path.unlink(missing_ok=True)  # Half a pair is of no use, and in the way of the next try.
        raise
    return TrustedKey(public_path.stem, public.public_bytes_raw())


def read_key(path: Path) -> TrustedKey:
    """Read a public key.

    :raises UsageError: if the file cannot be read, is none, or can be replaced by others.
    """
    return _read_key(path)[0]


def _read_key(path: Path) -> tuple[TrustedKey, os.stat_result]:
    """Return a public key, and whose file it is."""
    raw, status = _read(path, "a public key")
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o022:
        raise UsageError(
            f"{str(path)!r} can be written by others (mode {mode:o}), who could put their own key there: "
            f"chmod go-w {path}"
        )
    try:
        key = serialization.load_pem_public_key(raw)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise UsageError(
            f"{str(path)!r} is no public key in PEM. Give the .pub file that asynctrt keys new has made"
        ) from error
    if not isinstance(key, Ed25519PublicKey):
        raise UsageError(f"{str(path)!r} is a key of another kind. Keys are Ed25519: asynctrt keys new NAME")
    return TrustedKey(path.stem, key.public_bytes_raw()), status


def trust(path: Path, folder: Path) -> TrustedKey:
    """Trust a public key: from now on, what it has signed may run here.

    :raises UsageError: if it is none, or the folder cannot be written.
    """
    key = read_key(path)
    try:
        make_private(folder)
    except OSError as error:
        raise UsageError(f"{str(folder)!r} cannot be made: {error.strerror}") from error
    write_whole(
        folder / f"{key.id[:16]}.{key.name}.pub", _public_pem(Ed25519PublicKey.from_public_bytes(key.raw))
    )
    return key


def forget(id_start: str, folder: Path) -> TrustedKey:
    """Trust a key no more. Engines that are open stay open.

    :param id_start: its id, or enough of its beginning.
    :raises UsageError: if no trusted key, or several, begin so.
    """
    found = {path: key for path, key in _trusted(folder) if id_start and key.id.startswith(id_start)}
    if len({key.id for key in found.values()}) != 1:
        raise UsageError(
            f"{len(found)} trusted keys have an id that begins with {id_start!r}. asynctrt keys list shows "
            "all of them"
        )
    for path in found:
        path.unlink()
    return next(iter(found.values()))


def trusted_keys(folder: Path) -> tuple[TrustedKey, ...]:
    """Return the keys that this user trusts.

    :raises UsageError: if one of the files cannot be read, is none, or can be replaced by others.
    """
    return tuple(key for _, key in _trusted(folder))


def sign(digest: bytes, key_path: Path) -> str:
    """Return the signature of a file, as it is written beside it.

    :param digest: the SHA-256 of the file.
    :param key_path: the private key.
    :raises UsageError: if it cannot be read, is none, or can be read by others.
    """
    raw, status = _read(key_path, "a private key")
    try:
        key = serialization.load_pem_private_key(raw, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise UsageError(
            f"{str(key_path)!r} is no private key in PEM without a passphrase. Give the file that asynctrt "
            "keys new has made"
        ) from error
    if not isinstance(key, Ed25519PrivateKey):
        raise UsageError(
            f"{str(key_path)!r} is a key of another kind. Keys are Ed25519: asynctrt keys new NAME"
        )
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o077:
        raise UsageError(
            f"the private key {str(key_path)!r} can be read by others (mode {mode:o}). Make a new one if it "
            f"has been; otherwise: chmod 600 {key_path}"
        )
    public = TrustedKey(key_path.name, key.public_key().public_bytes_raw())
    content = {
        "format": FORMAT,
        "key": public.id,
        "sha256": digest.hex(),
        "signature": base64.b64encode(key.sign(PURPOSE + digest)).decode(),
    }
    return json.dumps(content, indent=1) + "\n"


def verify(digest: bytes, signature: bytes, keys: Iterable[TrustedKey], where: str) -> TrustedKey:
    """Return the trusted key that has signed a file.

    :param digest: the SHA-256 of the very bytes that are to be used.
    :param signature: the content of the file's signature.
    :param where: the name of the file in messages.
    :raises UntrustedError: if none has, or the signature is of other bytes, or none at all.
    """
    said = _parse(signature, where)
    if said["sha256"] != digest.hex():
        raise UntrustedError(
            f"{where} is not what was signed: its SHA-256 is {digest.hex()}, and the signature is for "
            f"{said['sha256'][:64]!r}. It was changed or replaced since: copy both again, or sign it again"
        )
    known = {key.id: key for key in keys}
    key = known.get(said["key"])
    if key is None:
        raise UntrustedError(
            f"{where} was signed by the key {said['key'][:64]!r}, which is not trusted here; {len(known)} "
            "keys are. If you know whose it is: asynctrt keys trust THEIR.pub"
        )
    try:
        raw = base64.b64decode(said["signature"], validate=True)
        if base64.b64encode(raw).decode() != said["signature"]:
            raise ValueError  # It has bits that count for nothing: somebody changed it.
        Ed25519PublicKey.from_public_bytes(key.raw).verify(raw, PURPOSE + digest)
    except (InvalidSignature, binascii.Error, ValueError) as error:
        raise UntrustedError(
            f"{where} has a signature that was not made by the key {key.id} ({key.name}). It is damaged or "
            "forged: get both files again"
        ) from error
    return key


def read_signature_file(path: Path, where: str) -> bytes:
    """Return the content of a signature.

    :raises UntrustedError: if there is none, or it cannot be read.
    """
    try:
        return _read(path, "a signature")[0]
    except UsageError as error:
        raise UntrustedError(
            f"{where} is not signed: {error}. If you know where it comes from, sign it: asynctrt sign FILE "
            "--key KEY; then its key has to be trusted: asynctrt keys trust KEY.pub"
        ) from error


def _parse(signature: bytes, where: str) -> dict[str, str]:
    try:
        content: Any = json.loads(signature)
    except (ValueError, RecursionError):
        content = None
    names = ("format", "key", "sha256", "signature")
    if not isinstance(content, dict) or not all(isinstance(content.get(name), str) for name in names):
        raise UntrustedError(f"the signature of {where} cannot be read. Sign the file again")
    if content["format"] != FORMAT:
        raise UntrustedError(
            f"the signature of {where} has the format {content['format'][:40]!r}, and {FORMAT!r} is known "
            "here. Sign the file again"
        )
    return content


def _trusted(folder: Path) -> list[tuple[Path, TrustedKey]]:
    paths = sorted(folder.glob("*.pub"))
    if paths:
        _check_ours(folder, folder.stat())
        for parent in folder.resolve().parents:
            _check_sealed(parent, parent.stat())
    # Their files begin with a part of their id, so that two of one name have room.
    found = []
    for path in paths:
        key, status = _read_key(path)
        _check_ours(path, status)
        found.append((path, TrustedKey(path.stem.partition(".")[2], key.raw)))
    return found


def _check_ours(path: Path, status: os.stat_result) -> None:
    """Check that nobody else decides which key is trusted.

    :raises UsageError: if somebody else can replace it.
    """
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o022 or status.st_uid not in (os.getuid(), 0):
        raise UsageError(
            f"{str(path)!r} belongs to somebody else, or can be written by others (mode {mode:o}), who could "
            f"put their own key there: chmod go-w {path}, or copy it to a place of your own"
        )


def _check_sealed(parent: Path, status: os.stat_result) -> None:
    """Check that not everybody can put another folder in the place of one in this folder.

    :raises UsageError: if anybody can.
    """
    mode = stat.S_IMODE(status.st_mode)
    if mode & 0o002 and not mode & stat.S_ISVTX:
        raise UsageError(
            f"{str(parent)!r} can be written by everybody (mode {mode:o}), who could put a folder with their "
            f"own keys there: chmod o-w {parent}"
        )


def _public_pem(key: Ed25519PublicKey) -> bytes:
    return bytes(
        key.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )


def _read(path: Path, what: str) -> tuple[bytes, os.stat_result]:
    """Return the content of a file, and whose it is: of the very file that was read."""
    try:
        with open_regular(path) as file:
            status = os.fstat(file.fileno())
            content = file.read(FILE_NBYTES_MAX + 1)
    except OSError as error:
        raise UsageError(f"{what} is to be read from {str(path)!r}: {error.strerror}") from error
    if len(content) > FILE_NBYTES_MAX:
        raise UsageError(f"{str(path)!r} is too large for {what}: more than {FILE_NBYTES_MAX} bytes")
    return content, status
