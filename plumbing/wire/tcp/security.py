"""Who may connect over TCP: settings in, TLS contexts out.

Either certificates on both sides (mutual TLS), or a pre-shared key (which becomes just that, see
`psk`), or nothing at all where only this host can connect. TLS 1.3 only: both ends are ours.
"""

from __future__ import annotations

import os
import ssl
from dataclasses import dataclass, field

from plumbing.errors import UsageError
from plumbing.wire.fds import OwnedFd
from plumbing.wire.tcp import psk, secret_file
from plumbing.wire.tcp.address import TcpAddress

_Stamp = tuple[tuple[int, ...] | None, ...]


@dataclass
class _Kept:
    """Contexts by side, each with the state of the files that it was made of."""

    contexts: dict[ssl._SSLMethod, tuple[_Stamp, ssl.SSLContext]] = field(default_factory=dict)
    problem: str | None = None


@dataclass(frozen=True)
class Security:
    """Files: a certificate, its private key and the CA of the peers', or a pre-shared key.

    The files are looked at for each new connection, so renewed ones are used at once; those that
    cannot be used are a `problem`, and the last good ones stay in use until they can.
    """

    cert: str | None = None
    key: str | None = None
    ca: str | None = None
    psk: str | None = None
    _kept: _Kept = field(default_factory=_Kept, init=False, repr=False, compare=False)

    @property
    def problem(self) -> str | None:
        """What was wrong with the files when they were last looked at."""
        return self._kept.problem

    @property
    def names_peers(self) -> bool:
        """Whether a peer's certificate says who it is; with a pre-shared key all have the same."""
        return self.psk is None

    def server_context(self) -> ssl.SSLContext:
        """For the accepting side. Each connection proves itself anew: no session is resumed.

        Raises:
            UsageError: these files have never been usable; a code under `wire.` says why.
        """
        return self._context(ssl.PROTOCOL_TLS_SERVER)

    def client_context(self) -> ssl.SSLContext:
        """For the connecting side, which with certificates also checks the server's name.

        Raises:
            UsageError: as for `server_context`.
        """
        return self._context(ssl.PROTOCOL_TLS_CLIENT)

    def _context(self, side: ssl._SSLMethod) -> ssl.SSLContext:
        stamp = tuple(_stamp(path) for path in (self.cert, self.key, self.ca, self.psk) if path)
        kept = self._kept.contexts.get(side)
        if kept is not None and kept[0] == stamp:
            self._kept.problem = None
            return kept[1]
        try:
            context = self._make(side)
        except UsageError as error:
            if kept is None:
                raise
            self._kept.problem = f"{error}; what was there before stays in use"
            return kept[1]
        self._kept.contexts[side] = (stamp, context)
        self._kept.problem = None
        return context

    def _make(self, side: ssl._SSLMethod) -> ssl.SSLContext:
        context = ssl.SSLContext(side)
        context.minimum_version = ssl.TLSVersion.TLSv1_3
        context.check_hostname = side is ssl.PROTOCOL_TLS_CLIENT and self.psk is None
        context.verify_mode = ssl.CERT_REQUIRED
        if side is ssl.PROTOCOL_TLS_SERVER:
            context.num_tickets = 0
        if self.psk is not None:
            secret = secret_file.read(self.psk, "the pre-shared key", is_secret=True)
            cert, key = psk.derive(secret, self.psk)
            ca = cert
        else:
            assert self.cert
            assert self.key
            assert self.ca
            cert = secret_file.read(self.cert, "the certificate", is_secret=False)
            key = secret_file.read(self.key, "the private key", is_secret=True)
            ca = secret_file.read(self.ca, "the CA's certificate", is_secret=False)
        self._load(context, cert, key, ca)
        return context

    def _load(self, context: ssl.SSLContext, cert: bytes, key: bytes, ca: bytes) -> None:
        try:
            context.load_verify_locations(cadata=ca.decode("ascii"))
        except (ssl.SSLError, ValueError) as error:
            raise UsageError(
                "wire.bad_certificate", f"{self.ca} holds no certificate of a CA, in PEM: {error}"
            ) from error
        try:
            # OpenSSL reads files only; this one is nowhere but in memory, and both parts of it
            # are of one moment.
            with OwnedFd(os.memfd_create("understudy-key", os.MFD_CLOEXEC)) as memory:
                _write(memory.fileno(), cert + b"\n" + key)
                place = f"/proc/self/fd/{memory.fileno()}"
                context.load_cert_chain(place, password=_no_password)
        except (ssl.SSLError, ValueError) as error:
            raise UsageError(
                "wire.bad_certificate",
                f"{self.cert} and {self.key} are not a certificate and its private key, both PEM"
                f" and without a passphrase: {error}",
            ) from error


def settle(
    address: TcpAddress, cert: str | None, key: str | None, ca: str | None, psk: str | None
) -> Security | None:
    """How connections to `address` are secured; None: not at all, as only this host can connect.

    Raises:
        UsageError: `wire.insecure_address`, `wire.two_securities` or `wire.incomplete_security`.
    """
    files = {"certificate": cert, "private key": key, "CA's certificate": ca}
    missing = [what for what, path in files.items() if not path]
    if psk and len(missing) < len(files):
        raise UsageError(
            "wire.two_securities",
            f"{address} can have certificates or a pre-shared key, not both; leave one out",
        )
    if psk:
        return Security(psk=psk)
    if not missing:
        return Security(cert, key, ca)
    if len(missing) < len(files):
        raise UsageError(
            "wire.incomplete_security",
            f"TLS on {address} needs a certificate, its private key and the certificate of the CA"
            f" that the other side's are from; there is no {' and no '.join(missing)}",
        )
    check(address, None)
    return None


def check(address: TcpAddress, security: Security | None) -> None:
    """Refuse an address that others can reach without anything to keep them out.

    Raises:
        UsageError: `wire.insecure_address`.
    """
    if security is None and not address.is_loopback:
        raise UsageError(
            "wire.insecure_address",
            f"{address} can be reached from other hosts, and whoever does could take the lock: give"
            " a certificate, its key and a CA, or a file with a pre-shared key, or use a"
            " loopback address",
        )


def _stamp(path: str) -> tuple[int, ...] | None:
    """What changes when a file does, also when a link on the way to it does."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def _write(fd: int, data: bytes) -> None:
    written = os.write(fd, data)
    assert written == len(data)


def _no_password() -> str:
    raise ValueError("the key has a passphrase, and nobody is here to type it")
