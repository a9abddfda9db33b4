"""Keys and signatures: what is not signed, or by nobody who is trusted, or changed since, is refused."""

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from asynctrt.errors import UntrustedError, UsageError

pytest.importorskip("cryptography", reason="needs the extra `trust`")

from asynctrt import signatures

ROOT = Path(__file__).parent.parent
CONTENT = b"the content of a plan"
DIGEST = hashlib.sha256(CONTENT).digest()


@pytest.fixture
def made(tmp_path):
    """A key pair, and a signature that it has made."""
    key = signatures.create_key(tmp_path / "mine")
    return tmp_path, key, signatures.sign(DIGEST, tmp_path / "mine").encode()


def verify(signature, *keys, digest=DIGEST):
    return signatures.verify(digest, signature, keys, "'m.plan'")


def test_a_signature_of_a_trusted_key(made):
    _, key, signature = made
    assert verify(signature, key) == key
    content = json.loads(signature)
    assert (content["key"], content["sha256"]) == (key.id, DIGEST.hex())


def test_keys_are_files_of_their_owner(made):
    folder, key, _ = made
    assert (folder / "mine").stat().st_mode & 0o777 == 0o600
    assert signatures.read_key(folder / "mine.pub").raw == key.raw
    for name in ("mine", "mine.pub"):
        (folder / "other").unlink(missing_ok=True)
        (folder / name).rename(folder / "aside")
        with pytest.raises(UsageError, match="is there already"):
            signatures.create_key(folder / "mine")
        (folder / "aside").rename(folder / name)


def test_one_flipped_bit_of_the_file_is_refused(made):
    _, key, signature = made
    for bit in range(8 * len(CONTENT)):
        changed = bytearray(CONTENT)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(UntrustedError, match="is not what was signed"):
            verify(signature, key, digest=hashlib.sha256(changed).digest())


def test_one_flipped_bit_of_the_signature_is_refused(made):
    _, key, signature = made
    for bit in range(8 * len(signature)):
        changed = bytearray(signature)
        changed[bit // 8] ^= 1 << bit % 8
        with pytest.raises(UntrustedError):
            verify(bytes(changed), key)


def test_signatures_that_are_none(made):
    _, key, signature = made
    right = json.loads(signature)
    wrong = [
        b"",
        b"\xff\xfe",
        b"[]",
        b"[" * 5000,
        b"null",
        json.dumps({**right, "signature": 7}).encode(),
        json.dumps({**right, "signature": ""}).encode(),
        json.dumps({**right, "signature": right["signature"][:40]}).encode(),
        json.dumps({**right, "signature": "é"}).encode(),
        json.dumps({**right, "format": "asynctrt-signature-2"}).encode(),
        json.dumps({name: right[name] for name in ("format", "key", "sha256")}).encode(),
    ]
    for content in wrong:
        with pytest.raises(UntrustedError):
            verify(content, key)


def test_a_signature_of_somebody_else(made, tmp_path):
    _, key, signature = made
    other = signatures.create_key(tmp_path / "other")
    with pytest.raises(UntrustedError, match="which is not trusted here; 1 keys are"):
        verify(signature, other)
    with pytest.raises(UntrustedError, match="0 keys are"):
        verify(signature)
    # One that names a trusted key, but was made by another.
    theirs = {**json.loads(signatures.sign(DIGEST, tmp_path / "other")), "key": key.id}
    with pytest.raises(UntrustedError, match="was not made by the key"):
        verify(json.dumps(theirs).encode(), key, other)


def test_a_bare_signature_of_the_digest_counts_for_nothing(made):
    """What is signed says what it is for, so that a signature for another use is none."""
    folder, key, signature = made
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    private = load_pem_private_key((folder / "mine").read_bytes(), None)
    import base64

    forged = {**json.loads(signature), "signature": base64.b64encode(private.sign(DIGEST)).decode()}
    with pytest.raises(UntrustedError, match="was not made by the key"):
        verify(json.dumps(forged).encode(), key)


def test_trusting_and_forgetting(made, tmp_path):
    folder, key, _ = made
    trusted = tmp_path / "config" / "trusted"
    assert signatures.trusted_keys(trusted) == ()
    for _ in range(2):
        assert signatures.trust(folder / "mine.pub", trusted) == key
    (one,) = signatures.trusted_keys(trusted)
    assert (one.id, one.name) == (key.id, "mine")
    for start in ("", "zz"):
        with pytest.raises(UsageError, match="keys list"):
            signatures.forget(start, trusted)
    assert signatures.forget(key.id[:8], trusted).id == key.id
    assert signatures.trusted_keys(trusted) == ()


def test_the_folder_of_trusted_keys():
    assert signatures.trusted_folder({"XDG_CONFIG_HOME": "/x"}) == Path("/x/asynctrt/trusted")
    assert signatures.trusted_folder({}) == Path.home() / ".config/asynctrt/trusted"


def test_files_that_others_can_write_or_read_are_not_used(made, tmp_path):
    folder, _, _ = made
    trusted = tmp_path / "trusted"
    signatures.trust(folder / "mine.pub", trusted)
    trusted.chmod(0o777)
    with pytest.raises(UsageError, match="chmod go-w"):
        signatures.trusted_keys(trusted)
    (folder / "mine.pub").chmod(0o666)
    with pytest.raises(UsageError, match="chmod go-w"):
        signatures.read_key(folder / "mine.pub")
    (folder / "mine").chmod(0o640)
    with pytest.raises(UsageError, match="chmod 600"):
        signatures.sign(DIGEST, folder / "mine")


def test_a_folder_above_that_everybody_can_write_is_refused(made, tmp_path):
    above = tmp_path / "above"
    signatures.trust(tmp_path / "mine.pub", above / "asynctrt/trusted")
    above.chmod(0o777)
    with pytest.raises(UsageError, match="can be written by everybody"):
        signatures.trusted_keys(above / "asynctrt/trusted")
    above.chmod(0o1777)  # As /tmp is: nobody can rename what is another's.
    assert len(signatures.trusted_keys(above / "asynctrt/trusted")) == 1


def test_folders_of_keys_are_made_for_their_owner_alone(made, tmp_path):
    before = os.umask(0)
    try:
        signatures.trust(tmp_path / "mine.pub", tmp_path / "config/asynctrt/trusted")
    finally:
        os.umask(before)
    for folder in ("config", "config/asynctrt", "config/asynctrt/trusted"):
        assert (tmp_path / folder).stat().st_mode & 0o777 == 0o700


def test_a_link_in_the_place_of_a_new_key_is_not_followed(tmp_path):
    (tmp_path / "new.pub").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match="is there already"):
        signatures.create_key(tmp_path / "new")
    assert not (tmp_path / "elsewhere").exists()


@pytest.mark.parametrize("which", ["the folder", "a key"])
def test_trusted_keys_of_somebody_else_are_not_used(made, tmp_path, monkeypatch, which):
    folder, _, _ = made
    trusted = tmp_path / "trusted"
    signatures.trust(folder / "mine.pub", trusted)
    if os.getuid() == 0:
        (path,) = trusted.iterdir()
        os.chown(trusted if which == "the folder" else path, 12345, 12345)
    else:
        monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(UsageError, match="belongs to somebody else"):
        signatures.trusted_keys(trusted)


def test_the_mode_of_a_key_is_that_of_the_file_that_was_read(made, tmp_path, monkeypatch):
    """Else it could be put in another's place between the two looks."""
    folder, _, _ = made
    path = folder / "mine.pub"
    path.chmod(0o666)
    monkeypatch.setattr(Path, "stat", lambda self, **kw: os.lstat("/dev/null"))
    with pytest.raises(UsageError, match="mode 666"):
        signatures.read_key(path)


def test_half_a_pair_of_keys_is_not_left(tmp_path, monkeypatch):
    def full(path, content, **kw):
        raise UsageError("the disk is full")

    monkeypatch.setattr(signatures, "write_whole", full)
    with pytest.raises(UsageError, match="full"):
        signatures.create_key(tmp_path / "k")
    assert not list(tmp_path.iterdir())


def test_a_pipe_is_no_signature(tmp_path):
    """Whoever can write the folder of a plan could let the server wait for ever."""
    os.mkfifo(tmp_path / "m.plan.sig")
    with pytest.raises(UntrustedError, match="no regular file"):
        signatures.read_signature_file(tmp_path / "m.plan.sig", "the plan")


def test_the_public_key_in_place_of_the_private_one(made):
    """Others may read it, but that is not what is wrong."""
    folder, _, _ = made
    with pytest.raises(UsageError, match="is no private key in PEM"):
        signatures.sign(DIGEST, folder / "mine.pub")


def test_files_that_are_no_keys(made, tmp_path):
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

    folder, _, _ = made
    path = tmp_path / "wrong"
    private = X25519PrivateKey.generate()
    others = (
        private.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        ),
        private.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        ),
    )
    for content in (b"", b"nonsense", (folder / "mine").read_bytes()[:60], bytes(9000), *others):
        path.write_bytes(content)
        path.chmod(0o600)
        with pytest.raises(UsageError):
            signatures.read_key(path)
        with pytest.raises(UsageError):
            signatures.sign(DIGEST, path)
    with pytest.raises(UsageError, match="No such file"):
        signatures.sign(DIGEST, tmp_path / "missing")


def command(*arguments, folder, status=0):
    done = subprocess.run(
        [sys.executable, "-W", "error", "-m", "asynctrt", *map(str, arguments)],
        capture_output=True,
        text=True,
        check=False,
        timeout=50,
        cwd=folder,
        env={
            **os.environ,
            "XDG_CONFIG_HOME": str(folder / "config"),
            "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))),
        },
    )
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout + done.stderr


@pytest.mark.tier2
def test_the_commands(tmp_path):
    path = tmp_path / "m.plan"
    path.write_bytes(CONTENT)
    assert "asynctrt keys trust mine.pub" in command("keys", "new", "mine", folder=tmp_path)
    assert "is not signed" in command("verify", path, folder=tmp_path, status=1)
    assert DIGEST.hex() in command("sign", path, "--key", "mine", folder=tmp_path)
    assert "not trusted here" in command("verify", path, folder=tmp_path, status=1)
    assert "trusted: " in command("keys", "trust", "mine.pub", folder=tmp_path)
    assert "mine" in command("keys", "list", folder=tmp_path)
    assert "signed by" in command("verify", path, folder=tmp_path)
    path.write_bytes(CONTENT + b"!")
    assert "is not what was signed" in command("verify", path, folder=tmp_path, status=1)
