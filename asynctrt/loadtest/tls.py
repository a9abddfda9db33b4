"""TLS of a load test: whom to trust, and the client's own certificate."""

import ssl
from dataclasses import dataclass
from pathlib import Path

from asynctrt.errors import OptionsError, UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Tls:
    """Say whom to trust, and who the client is. Only addresses with TLS (https, wss, grpcs) use it.

    :param ca: a PEM file of certificates to trust instead of the system's.
    :param cert: a PEM file with the client's certificate, for servers that ask for one.
    :param key: a PEM file with its key. Default: the key is in ``cert``.
    :param insecure: do not check the server's certificate.
    :raises OptionsError: for a key without a certificate, or ``insecure`` with a ``ca``.
    """

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    insecure: bool = False

    def __post_init__(self) -> None:
        if self.key is not None and self.cert is None:
            raise OptionsError("key belongs to the client's certificate: give cert too")
        if self.insecure and self.ca is not None:
            raise OptionsError("ca says whom to trust, and insecure trusts everyone: give only one of them")

    def used_by(self, scheme: str) -> "ssl.SSLContext | bool":
        """Return what aiohttp takes: the context for an address with TLS, and otherwise its default."""
        return self.context() if scheme in ("https", "wss") else True

    def context(self) -> ssl.SSLContext:
        """Return the context for HTTP and websockets.

        :raises UsageError: if a file cannot be read, or does not hold what it should.
        """
        for path in (self.ca, self.cert, self.key):
            self._read(path)  # The library's errors do not name the file.
        try:
            context = ssl.create_default_context(cafile=self.ca)
            if self.insecure:
                context.check_hostname = False
                context.verify_mode = ssl.CERT_NONE
            if self.cert is not None:
                context.load_cert_chain(self.cert, self.key, password=_no_password)
        except (OSError, ValueError) as error:
            raise UsageError(f"the certificates of the load test cannot be used: {error}") from error
        return context

    def credentials(self) -> tuple[bytes | None, bytes | None, bytes | None]:
        """Return the trusted certificates, the client's key and its certificate, as gRPC takes them.

        :raises OptionsError: for ``insecure``, which gRPC does not have.
        :raises UsageError: if a file cannot be read, or does not hold what it should.
        """
        if self.insecure:
            raise OptionsError(
                "gRPC always checks the server's certificate: instead of insecure, name it with ca"
            )
        self.context()
        return self._read(self.ca), self._read(self.key or self.cert), self._read(self.cert)

    @staticmethod
    def _read(path: Path | None) -> bytes | None:
        if path is None:
            return None
        try:
            return path.read_bytes()
        except OSError as error:
            raise UsageError(f"the certificates {str(path)!r} cannot be read: {error}") from error


def _no_password() -> str:
    raise ValueError("the key has a password")
