"""Read and reread a server's secrets from files: tokens, and a certificate with its key.

Reading and using are two steps: a broken file is refused when it is read, so it changes nothing.
"""

import ssl
import stat
from pathlib import Path
from typing import NamedTuple

from asynctrt._util.files import CONFIG_NBYTES_MAX, read_regular
from asynctrt.errors import OptionsError


def read_tokens(path: Path) -> tuple[str, ...]:
    """Read tokens, one per line. Empty lines and lines that begin with ``#`` are ignored."""
    try:
        text = _read(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise OptionsError(f"cannot read the tokens in {str(path)!r}: {error}") from error
    lines = [line.strip() for line in text.splitlines()]
    tokens = tuple(dict.fromkeys(line for line in lines if line and not line.startswith("#")))
    if not tokens:
        raise OptionsError(f"{str(path)!r} has no token: write at least one, each on its own line")
    for number, line in enumerate(lines, 1):
        if line in tokens and not (line.isascii() and line.isprintable() and " " not in line):
            # Do not quote the token: the message ends up in a log.
            raise OptionsError(
                f"line {number} of {str(path)!r} is not a token: it has a space, or a character that is not "
                "printable ASCII"
            )
    return tokens


def _read(path: Path) -> bytes:
    return read_regular(path, CONFIG_NBYTES_MAX)


def is_readable_by_all(path: Path) -> bool:
    """Return whether any user of the machine may read a file."""
    return bool(path.stat().st_mode & stat.S_IROTH)


class Pem(NamedTuple):
    """A certificate chain and its key, as read from their files, and an SSL context that uses them."""

    chain: bytes
    key: bytes
    context: ssl.SSLContext


class Certificate:
    """A server's certificate, which may change while the server runs.

    Listen with :attr:`context`: each new connection uses the :attr:`pem` of that moment, and open connections
    keep theirs.
    """

    def __init__(self, chain: Path, key: Path) -> None:
        self._paths = chain, key
        self.pem = self.read()
        self.context = self.pem.context
        # The callback runs in every handshake, whether or not the client names a server.
        self.context.sni_callback = self._choose

    def __repr__(self) -> str:
        return f"<Certificate {str(self._paths[0])!r}>"

    def read(self) -> Pem:
        """Read the files without using them yet: assign the result to :attr:`pem`."""
        chain, key = self._paths
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        try:
            pem = Pem(_read(chain), _read(key), context)
            context.load_cert_chain(chain, key)
            if (_read(chain), _read(key)) != pem[:2]:
                raise OSError("they are being written")
        except (OSError, ssl.SSLError) as error:
            raise OptionsError(
                f"tls_certificate {str(chain)!r} with tls_key {str(key)!r} cannot be used: {error}. Both "
                "must be PEM files, the key without a passphrase"
            ) from error
        return pem

    def _choose(self, handshake: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        if handshake.context is not self.pem.context:
            handshake.context = self.pem.context
