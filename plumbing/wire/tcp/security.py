"""Who may connect over TCP: settings in, TLS contexts out.

Certificates on both sides (mutual TLS), also on loopback: other users of the host could take the
lock there. TLS 1.3 only: both ends are ours.
"""

from __future__ import annotations

import os
import ssl
import stat
from dataclasses import dataclass, field

from plumbing.errors import UsageError
from plumbing.wire.fds import OwnedFd
from plumbing.wire.tcp.address import TcpAddress

# A key is a few hundred bytes, a bundle of certificates a few hundred kilobytes.
FILE_BYTES_MAX = 1024 * 1024

_Stamp = tuple[tuple[int, ...] | None, ...]


@dataclass
class _Kept:
    """Contexts by side, each with the state of the files it was made from."""

    contexts: dict[ssl._SSLMethod, tuple[_Stamp, ssl.SSLContext]] = field(default_factory=dict)
    problem: str | None = None


@dataclass(frozen=True)
class Security:
    """Paths of a certificate, its private key and the peers' CA.

    The files are checked at each new connection, so renewed ones are used at once. If they cannot
    be used, `problem` gives the reason and the last good ones stay in use.
    """

    cert: str
    key: str
    ca: str
    _kept: _Kept = field(default_factory=_Kept, init=False, repr=False, compare=False)

    @property
    def problem(self) -> str | None:
        """What was wrong with the files when they were last checked."""
        return self._kept.problem

    def server_context(self) -> ssl.SSLContext:
        """For the accepting side. Sessions are not resumed: each connection authenticates.

        Raises:
            UsageError: the files have never been usable; the code, under `wire.`, is the reason.
        """
        return self._context(ssl.PROTOCOL_TLS_SERVER)

    def client_context(self) -> ssl.SSLContext:
        """For the connecting side, which checks the server's name.

        Raises:
            UsageError: as for `server_context`.
        """
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def _context(self, side: ssl._SSLMethod) -> ssl.SSLContext:
        stamp = tuple(_stamp(path) for path in (self.cert, self.key, self.ca))
        kept = self._kept.contexts.get(side)
        if kept is not None and kept[0] == stamp:
            self._kept.problem = None
            return kept[1]
        try:
            context = self._make(side)
        except UsageError as error:
            if kept is None:
                raise
            self._kept.problem = f"{error}; the previous files stay in use"
            return kept[1]
        self._kept.contexts[side] = (stamp, context)
        self._kept.problem = None
        return context

    def _make(self, side: ssl._SSLMethod) -> ssl.SSLContext:
        context = ssl.SSLContext(side)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = side is ssl.PROTOCOL_TLS_CLIENT
        context.verify_mode = ssl.CERT_REQUIRED
        if side is ssl.PROTOCOL_TLS_SERVER:
            context.num_tickets = 0
        cert = read_file(self.cert, "the certificate", is_secret=False)
        key = read_file(self.key, "the private key", is_secret=True)
        ca = read_file(self.ca, "the CA's certificate", is_secret=False)
        self._load(context, cert, key, ca)
        return context

    def _load(self, context: ssl.SSLContext, cert: bytes, key: bytes, ca: bytes) -> None:
        try:
            context.load_verify_locations(cadata=ca.decode("ascii"))
        except (ssl.SSLError, ValueError) as error:
            raise UsageError(
                "wire.bad_certificate", f"{self.ca} contains no CA certificate in PEM: {error}"
            ) from error
        try:
            # OpenSSL reads files only; this one is in memory, and both parts of it were read at the
            # same time.
            with OwnedFd(os.memfd_create("understudy-key", os.MFD_CLOEXEC)) as memory:
                _write(memory.fileno(), cert + b"\n" + key)
                place = f"/proc/self/fd/{memory.fileno()}"
                context.load_cert_chain(place, password=_no_password)
        except (ssl.SSLError, ValueError) as error:
            raise UsageError(
                "wire.bad_certificate",
                f"{self.cert} and {self.key} are not a certificate and its private key, in PEM and"
                f" without a passphrase: {error}",
            ) from error
        except OSError as error:  # no descriptor or memory for the copy
            raise UsageError(
                "wire.file", f"cannot load the private key {self.key}: {error.strerror}"
            ) from error


def settle(address: TcpAddress, cert: str | None, key: str | None, ca: str | None) -> Security:
    """How connections to `address` are secured.

    Raises:
        UsageError: `wire.incomplete_security`.
    """
    if cert and key and ca:
        return Security(cert, key, ca)
    files = {"certificate": cert, "private key": key, "CA's certificate": ca}
    missing = ", ".join(what for what, path in files.items() if not path)
    raise UsageError(
        "wire.incomplete_security",
        f"TLS on {address} needs a certificate, its private key and the certificate of the CA that"
        f" signed the other side's; missing: {missing} (`lockserver certificates DIR` writes them)",
    )


def read_file(path: str, what: str, *, is_secret: bool) -> bytes:
    """The contents of `path`, which errors call `what`.

    A secret must be readable by this user only; if it belongs to root, its group may read it too.
    That is the only way in which Kubernetes can pass a Secret to a process that is not root: with
    `fsGroup`, the files belong to root and have mode 0440. PostgreSQL has the same rule for its
    keys. Links are followed, as Kubernetes uses them; the open file is what is checked.

    Raises:
        UsageError: `wire.file`: it cannot be read; `wire.secret_readable`.
    """
    try:
        # Non-blocking: opening a pipe must not hang.
        with OwnedFd(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)) as fd:
            found = os.fstat(fd.fileno())
            if is_secret:
                _check_secret(path, what, found)
            if not stat.S_ISREG(found.st_mode) or found.st_size > FILE_BYTES_MAX:
                raise UsageError(
                    "wire.file",
                    f"{what}, {path}, is not a file of at most {FILE_BYTES_MAX} bytes",
                    path=path,
                )
            return os.read(fd.fileno(), FILE_BYTES_MAX)
    except OSError as error:
        raise UsageError(
            "wire.file", f"cannot read {what}, {path}: {error.strerror}", path=path
        ) from error


def _check_secret(path: str, what: str, found: os.stat_result) -> None:
    if found.st_uid not in (0, os.geteuid()):
        why, fix = f"it belongs to uid {found.st_uid}", f"chown it to uid {os.geteuid()}"
    elif found.st_mode & (0o037 if found.st_uid == 0 else 0o077):
        why = f"its mode is {stat.S_IMODE(found.st_mode):04o}"
        fix = "chmod 600 it (a Kubernetes Secret: defaultMode: 0400 on its volume)"
    else:
        return
    raise UsageError(
        "wire.secret_readable",
        f"{what}, {path}, may be known to other users ({why}); create a new one and {fix}",
        path=path,
    )


def _stamp(path: str) -> tuple[int, ...] | None:
    """Changes when the file changes, or a link in the path to it."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _write(fd: int, data: bytes) -> None:
    written = os.write(fd, data)
    assert written == len(data)


def _no_password() -> str:
    raise ValueError("the key has a passphrase")
