"""Files that users renew while the gateway runs: API keys, the certificate and its key.

They are looked at once a second. A file that cannot be read, or is bad, leaves what was read before
in force and is a problem that status shows. No message quotes a file: keys are secrets.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import ssl

from gateway.core.answers import Failure
from gateway.server.requests import Headers
from plumbing.errors import UsageError

logger = logging.getLogger(__name__)

KEYS_BYTES_MAX = 1 << 20  # some ten thousand keys


class WatchedFiles:
    """What was read of `paths`, and is again when any of them has changed. OSError and ValueError
    of a later `load` are a problem. `code`, `fault`: of an error, with a place for each path and
    for the reason."""

    code = fault = ""

    def __init__(self, *paths: str) -> None:
        """Raises:
        UsageError: they cannot be used.
        """
        self.problem: str | None = None
        self._paths = paths
        self._seen = self._state()
        try:
            self.load()
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise UsageError(self.code, self.fault.format(*paths, _why(error))) from error

    def load(self) -> None:
        raise NotImplementedError  # by each kind of file

    def look(self) -> None:
        state = self._state()
        if state == self._seen:
            return
        self._seen = state
        try:
            self.load()
        except (OSError, ValueError) as error:
            why = _why(error)
            self.problem = f"cannot use {' and '.join(self._paths)}, kept what was read: {why}"
            logger.warning("%s", self.problem)
        else:
            self.problem = None
            logger.info("read %s again", " and ".join(self._paths))

    def _state(self) -> list[tuple[int, int, int]]:
        """What changes with the files; also behind the symbolic links of a Kubernetes volume."""
        found = []
        for path in self._paths:
            with contextlib.suppress(OSError):
                now = os.stat(path)
                found.append((now.st_mtime_ns, now.st_ino, now.st_size))
        return found


class ApiKeys(WatchedFiles):
    """The accepted keys, one per line. Only digests are kept."""

    code = "gateway.bad_api_keys"
    fault = "cannot use {} (--api-keys): {}; write one key per line"

    def check(self, headers: Headers) -> Failure | None:
        for name, value in headers:
            if name == b"authorization" and value[:7].lower() == b"bearer ":
                if self.knows(value[7:].strip()):
                    return None
                return Failure(401, "invalid_api_key", "The API key is not valid.")
        return Failure(401, "invalid_api_key", "An API key is required: Authorization: Bearer KEY.")

    def knows(self, key: bytes) -> bool:
        return _digest(key) in self._digests  # how long that takes says nothing about a key

    def load(self) -> None:
        with open(self._paths[0], "rb") as stream:
            text = stream.read(KEYS_BYTES_MAX + 1)
        if len(text) > KEYS_BYTES_MAX:
            raise ValueError(f"it exceeds the limit of {KEYS_BYTES_MAX} bytes")
        keys = {line.strip() for line in text.splitlines()} - {b""}
        if not keys:
            raise ValueError("it has no key")
        self._digests = frozenset(_digest(key) for key in keys)


class Certificate(WatchedFiles):
    """A TLS context whose certificate follows its files; handshakes that follow use the new one."""

    code = "gateway.bad_tls"
    fault = (
        "cannot use {} (--tls-cert) and {} (--tls-key) as a PEM certificate and its private key: {}"
    )

    def __init__(self, cert: str, key: str) -> None:
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.set_alpn_protocols(["http/1.1"])
        super().__init__(cert, key)

    def load(self) -> None:
        cert, key = self._paths
        self.context.load_cert_chain(cert, key, password=_no_password)


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _no_password() -> str:
    """Instead of asking at the terminal for the password of an encrypted key."""
    raise ValueError("the key is encrypted; decrypt it first (openssl pkey)")


def _why(error: Exception) -> str:
    """What is wrong, without a word of the file."""
    found = error.reason if isinstance(error, ssl.SSLError) else None
    return found or (error.strerror if isinstance(error, OSError) else None) or str(error)
