"""OpenSSH signatures of plans: what is not signed, or not by an allowed key, or changed, is refused."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

import asynctrt
from asynctrt._util.files import CONFIG_NBYTES_MAX
from asynctrt.backends.tensorrt import signatures
from asynctrt.backends.tensorrt.trust import check_trust
from asynctrt.devices.host import HostDevice
from asynctrt.errors import UntrustedError, UsageError
from asynctrt.options import Options
from asynctrt.plans.opened import open_file
from tests.cli.test_app import asynctrt_command
from tests.doubles.tensorrt import EngineSpec, double_plan
from tests.helpers import installed

PLAN = double_plan(EngineSpec())
PROGRAM = Path("/usr/bin/ssh-keygen")


def keygen(*arguments):
    command = [installed(PROGRAM), *arguments]
    subprocess.run(command, check=True, capture_output=True, timeout=60, stdin=subprocess.DEVNULL)


def sign(key, path, namespace="asynctrt"):
    signatures.signature_path(path).unlink(missing_ok=True)
    keygen("-q", "-Y", "sign", "-n", namespace, "-f", key, path)


class Signed:
    """A signed plan in a folder, and the allowed signers."""

    def __init__(self, folder):
        self.plan = folder / "m.plan"
        self.signature = folder / "m.plan.sig"
        self.signers = folder / "config/asynctrt/allowed_signers"
        self.revoked = folder / "config/asynctrt/allowed_signers.revoked"
        self.signers.parent.mkdir(parents=True, mode=0o700)
        self.key, self.other = folder / "mine", folder / "other"
        for key in (self.key, self.other):
            keygen("-q", "-t", "ed25519", "-N", "", "-C", "", "-f", key)
        self.plan.write_bytes(PLAN)
        sign(self.key, self.plan)
        self.allow(f"me@here {self.public()}")

    def public(self, key=None):
        return " ".join((key or self.key).with_suffix(".pub").read_text().split()[:2])

    def allow(self, *lines):
        self.signers.write_text("".join(f"{line}\n" for line in lines))

    def check(self, content=PLAN):
        return signatures.check_signature(content, self.signature, self.signers, "'m.plan'")


@pytest.fixture
def signed(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("ASYNCTRT_ALLOWED_SIGNERS", raising=False)
    return Signed(tmp_path)


def test_a_plan_that_an_allowed_signer_has_signed(signed):
    assert signed.check() == "me@here"
    check_trust(PLAN, signed.plan, "it", ("signed",))


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("me@here OTHER", "is not among the allowed signers.*add a line: NAME"),
        ("", "is not among the allowed signers"),
        ("nonsense", "is not among the allowed signers.*missing key"),
        ('me@here namespaces="git" KEY', "Add asynctrt to namespaces="),
        ('me@here valid-before="20200101" KEY', "has expired.*valid-before"),
        ('me@here valid-after="21000101" KEY', "is not valid yet.*clock"),
        ("me@here cert-authority KEY", "is not among the allowed signers"),
        ("!me@here KEY", "does not accept its signature"),
    ],
)
def test_lines_that_do_not(signed, line, says):
    signed.allow(line.replace("KEY", signed.public()).replace("OTHER", signed.public(signed.other)))
    with pytest.raises(UntrustedError, match=f"'m.plan' is not trusted: .*{says}"):
        signed.check()


def test_a_signature_for_another_use_does_not_count(signed):
    for namespace in ("file", "git", "Asynctrt", "asynctrt2"):
        sign(signed.key, signed.plan, namespace)
        with pytest.raises(UntrustedError, match="signed for something else. Sign it with -n asynctrt"):
            signed.check()


@pytest.mark.parametrize("content", [b"", b"nonsense\n", b"\xff" * 100, b"-----BEGIN SSH SIGNATURE-----\n"])
def test_what_is_no_signature(signed, content):
    signed.signature.write_bytes(content)
    with pytest.raises(UntrustedError, match="signature cannot be read. Copy it again, or sign"):
        signed.check()


def test_a_plan_without_a_signature(signed):
    signed.signature.unlink()
    with pytest.raises(UntrustedError, match=r"is not signed.*ssh-keygen -Y sign -n asynctrt -f KEY PLAN"):
        signed.check()
    os.mkfifo(signed.signature)  # Whoever can write the folder of a plan could make a server wait.
    with pytest.raises(UntrustedError, match="not a regular file"):
        signed.check()


def test_files_are_read_up_to_a_limit(signed):
    line = f"me@here {signed.public()}\n"
    for size, is_read in ((CONFIG_NBYTES_MAX, True), (CONFIG_NBYTES_MAX + 1, False)):
        signed.signers.write_text("#" * (size - len(line) - 1) + "\n" + line)
        if is_read:
            assert signed.check() == "me@here"
        else:
            with pytest.raises(UsageError, match="too large for the allowed signers: more than 1,048,576"):
                signed.check()


def test_a_revoked_key(signed):
    signed.revoked.write_text(signed.public(signed.other) + "\n")
    assert signed.check() == "me@here"
    signed.revoked.write_text(signed.public() + "\n")
    with pytest.raises(UntrustedError, match="signers.revoked' revokes its key.*sign it with another"):
        signed.check()
    keygen("-k", "-f", signed.revoked, signed.key.with_suffix(".pub"))
    with pytest.raises(UntrustedError, match="revokes its key"):
        signed.check()
    with pytest.raises(UntrustedError, match="was changed after it was signed"):
        signed.check(b"changed")


def test_a_list_of_revoked_keys_that_cannot_be_used_allows_nothing(signed):
    signed.revoked.write_text("nonsense\n")
    with pytest.raises(UntrustedError, match="or is not a list of keys"):
        signed.check()
    signed.revoked.unlink()
    signed.revoked.symlink_to("gone")
    with pytest.raises(UsageError, match="the revoked keys cannot be read from"):
        signed.check()
    signed.revoked.unlink()
    signed.revoked.touch()
    signed.revoked.chmod(0o666)
    with pytest.raises(UsageError, match="chmod go-w"):
        signed.check()


def test_the_path_of_the_allowed_signers(monkeypatch, tmp_path):
    path = signatures.signers_path
    assert path({"XDG_CONFIG_HOME": "/x"}) == Path("/x/asynctrt/allowed_signers")
    assert path({}) == Path.home() / ".config/asynctrt/allowed_signers"
    assert path({"ASYNCTRT_ALLOWED_SIGNERS": "/y/z", "XDG_CONFIG_HOME": "/x"}) == Path("/y/z")
    with pytest.raises(UsageError, match="ASYNCTRT_ALLOWED_SIGNERS is set and empty"):
        path({"ASYNCTRT_ALLOWED_SIGNERS": ""})


def test_the_variable_names_the_allowed_signers(signed, tmp_path, monkeypatch):
    signed.signers.rename(tmp_path / "elsewhere")
    with pytest.raises(UsageError, match=r"No such file.*NAME namespaces=.*ASYNCTRT_ALLOWED_SIGNERS"):
        check_trust(PLAN, signed.plan, "it", ("signed",))
    monkeypatch.setenv("ASYNCTRT_ALLOWED_SIGNERS", str(tmp_path / "elsewhere"))
    check_trust(PLAN, signed.plan, "it", ("signed",))
    for wrong in ("/", str(tmp_path), "/dev/null"):
        monkeypatch.setenv("ASYNCTRT_ALLOWED_SIGNERS", wrong)
        with pytest.raises(UsageError):
            check_trust(PLAN, signed.plan, "it", ("signed",))


@pytest.mark.parametrize("mode", [0o666, 0o660, 0o646, 0o777])
def test_allowed_signers_that_others_can_write_are_not_used(signed, mode):
    signed.signers.chmod(mode)
    with pytest.raises(UsageError, match=rf"allowed_signers' .*\(mode {mode:o}\).*chmod go-w"):
        signed.check()


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o1777])
def test_allowed_signers_in_a_folder_that_others_can_write_are_not_used(signed, mode):
    signed.signers.parent.chmod(mode)
    with pytest.raises(UsageError, match="asynctrt' belongs to another user, or can be written by others"):
        signed.check()


def test_a_folder_above_that_everybody_can_write_is_refused(signed):
    above = signed.signers.parent.parent
    above.chmod(0o777)
    with pytest.raises(UsageError, match="can be written by everybody"):
        signed.check()
    above.chmod(0o1777)  # As /tmp is: nobody can rename what is another's.
    assert signed.check() == "me@here"


def test_a_link_to_allowed_signers_counts_as_they_do(signed, tmp_path):
    (tmp_path / "links").mkdir()
    link = tmp_path / "links/signers"
    link.symlink_to(signed.signers)
    real, signed.signers = signed.signers, link
    assert signed.check() == "me@here"
    link.parent.chmod(0o777)
    with pytest.raises(UsageError, match="links' belongs to another user, or can be written"):
        signed.check()
    link.parent.chmod(0o700)
    real.chmod(0o666)
    with pytest.raises(UsageError, match="mode 666"):
        signed.check()


@pytest.mark.parametrize("which", ["the folder", "the file"])
def test_allowed_signers_of_somebody_else_are_not_used(signed, monkeypatch, which):
    path = signed.signers if which == "the file" else signed.signers.parent
    if os.getuid() == 0:
        os.chown(path, 12345, 12345)
    else:
        monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(UsageError, match="belongs to another user"):
        signed.check()


def test_what_was_looked_at_is_what_is_used(signed, monkeypatch):
    """Each file is read once, and its path not passed on: to exchange it between two looks is of no use."""
    sign(signed.other, signed.plan)
    real = signatures._run

    def exchange(command, content):
        signed.signers.write_text(f"me@here {signed.public(signed.other)}\n")
        assert not {str(signed.signers), str(signed.signature), str(signed.plan)} & set(command)
        return real(command, content)

    monkeypatch.setattr(signatures, "_run", exchange)
    with pytest.raises(UntrustedError, match="is not among the allowed signers"):
        signed.check()


def test_the_copies_are_private_and_do_not_stay(signed, tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    seen = []
    real = signatures._run

    def look(command, content):
        (folder,) = tmp_path.glob("asynctrt-*")
        seen.append(folder.stat().st_mode & 0o777)
        return real(command, content)

    monkeypatch.setattr(signatures, "_run", look)
    signed.check()
    with pytest.raises(UntrustedError):
        signed.check(b"changed")
    assert seen == [0o700] * 4
    assert not list(tmp_path.glob("asynctrt-*"))
    (tmp_path / "tmp").mkdir()
    (tmp_path / "tmp").chmod(0o777)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    with pytest.raises(UsageError, match="tmp' can be written by everybody"):
        signed.check()


def program(folder, monkeypatch, text):
    """Put another program in the place of ssh-keygen."""
    (folder / "bin").mkdir()
    path = folder / "bin/ssh-keygen"
    path.write_text(f"#!{sys.executable}\n{text}\n")
    path.chmod(0o755)
    monkeypatch.setenv("PATH", str(path.parent))


def test_without_ssh_keygen_its_package_is_named(signed, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="ssh-keygen, which is not installed: apt install openssh-client"):
        signed.check()


@pytest.mark.tier2
@pytest.mark.parametrize("step", ["find-principals", "verify"])
def test_ssh_keygen_has_limited_time(signed, tmp_path, monkeypatch, step):
    hang = f"import sys, time\nif {step!r} in sys.argv: time.sleep(600)\nprint('me')"
    program(tmp_path, monkeypatch, hang)
    monkeypatch.setattr(signatures, "START_S", 2.0)
    with pytest.raises(UntrustedError, match="did not check its signature within 2 s"):
        signed.check()


def test_a_large_plan_has_more_time(monkeypatch):
    seen = []
    monkeypatch.setattr(subprocess, "run", lambda command, **given: seen.append(given["timeout"]))
    for content in (None, bytes(40_000_000)):
        signatures._run(["ssh-keygen"], content)
    assert seen == [60, 62]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "import sys; sys.exit('verify' in sys.argv)",
        "import sys; print('me'); sys.exit(255 if 'verify' in sys.argv else 0)",
        "import os; print('me', flush=True); os.kill(os.getpid(), 9)",
    ],
)
def test_what_decides_is_the_exit_status(signed, tmp_path, monkeypatch, text):
    """Not what it prints; and a program that ends before it has read the plan is no error of ours."""
    program(tmp_path, monkeypatch, text)
    with pytest.raises(UntrustedError, match="does not accept its signature"):
        signed.check(bytes(1 << 20))


def test_a_program_that_cannot_be_started(signed, tmp_path, monkeypatch):
    program(tmp_path, monkeypatch, "")
    (tmp_path / "bin/ssh-keygen").write_text("#!/no/such/interpreter\n")
    with pytest.raises(UsageError, match="cannot be checked.*No such file"):
        signed.check()


class NamedAsAGPU(HostDevice):
    """A device that plans are loaded on."""

    name = "cuda:0"


class TestEveryWayToLoadAPlan:
    """A signature that does not count is refused before anything else is asked of a plan."""

    @pytest.fixture
    def unsigned(self, signed):
        signed.allow(f"me@here {signed.public(signed.other)}")
        return signed.plan

    @pytest.mark.anyio
    async def test_open(self, unsigned):
        device = NamedAsAGPU()
        with pytest.raises(UntrustedError, match="is not among the allowed signers"):
            async with asynctrt.open(unsigned, device=device, tensorrt={"trust": "signed"}):
                pass
        device.close()

    def test_inspect(self, unsigned):
        with pytest.raises(UntrustedError, match="is not among the allowed signers"):
            open_file(unsigned, "host", options=Options(tensorrt={"trust": "signed"}))

    @pytest.mark.tier2
    def test_the_command(self, unsigned):
        arguments = ["inspect", unsigned, "--open", "--device", "host", "--tensorrt", "trust=signed"]
        code, _, err = asynctrt_command(*arguments)
        assert code == 1
        assert "UntrustedError: " in err
        assert "is not among the allowed signers" in err
