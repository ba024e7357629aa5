"""Files that users renew while the gateway runs: API keys, the certificate and its key.

A file that cannot be read, or is bad, leaves what was read before in force and is a problem that
status shows. No message quotes a file: keys are secrets.
"""

from __future__ import annotations

import hashlib
import ssl
from functools import partial

from gateway.core.answers import Failure
from gateway.server.requests import Headers
from plumbing.errors import UsageError
from plumbing.wire.tcp import Renewed

KEYS_BYTES_MAX = 1 << 20  # some ten thousand keys


class ApiKeys(Renewed[frozenset[bytes]]):
    """The accepted keys, one per line. Only digests are kept."""

    def __init__(self, path: str) -> None:
        """Raises:
        UsageError: `gateway.bad_api_keys`.
        """
        super().__init__(partial(_read_keys, path), path)

    def check(self, headers: Headers) -> Failure | None:
        for name, value in headers:
            if name == b"authorization" and value[:7].lower() == b"bearer ":
                # How long it takes to find a digest says nothing about a key.
                if _digest(value[7:].strip()) in self.get():
                    return None
                return Failure(401, "invalid_api_key", "The API key is not valid.")
        return Failure(401, "invalid_api_key", "An API key is required: Authorization: Bearer KEY.")


def certificate(cert: str, key: str) -> Renewed[ssl.SSLContext]:
    """The context for handshakes that begin now.

    Raises:
        UsageError: `gateway.bad_tls`.
    """
    return Renewed(partial(_read_certificate, cert, key), cert, key)


def _read_keys(path: str) -> frozenset[bytes]:
    try:
        with open(path, "rb") as stream:
            text = stream.read(KEYS_BYTES_MAX + 1)
        if len(text) > KEYS_BYTES_MAX:
            raise ValueError(f"it exceeds the limit of {KEYS_BYTES_MAX} bytes")
        keys = {line.strip() for line in text.splitlines()} - {b""}
        if not keys:
            raise ValueError("it has no key")
    except (OSError, ValueError) as error:
        what = f"cannot use {path} (--api-keys): {_why(error)}; write one key per line"
        raise UsageError("gateway.bad_api_keys", what) from error
    return frozenset(map(_digest, keys))


def _read_certificate(cert: str, key: str) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.set_alpn_protocols(["http/1.1"])
    try:
        context.load_cert_chain(cert, key, password=_no_password)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        what = f"{cert} (--tls-cert) and {key} (--tls-key) as a PEM certificate and its private key"
        raise UsageError("gateway.bad_tls", f"cannot use {what}: {_why(error)}") from error
    return context


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _no_password() -> str:
    """Instead of asking at the terminal for the password of an encrypted key."""
    raise ValueError("the key is encrypted; decrypt it first (openssl pkey)")


def _why(error: Exception) -> str:
    """What is wrong, without a word of the file."""
    found = error.reason if isinstance(error, ssl.SSLError) else None
    return found or (error.strerror if isinstance(error, OSError) else None) or str(error)
