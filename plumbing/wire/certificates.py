"""Certificates for the lock over TCP and for a fleet: a CA, the server's pair, the clients' pair.

Made with the `openssl` program, so that no Python package is needed for it. The names are those of
a Kubernetes Secret of type `kubernetes.io/tls`, and of cert-manager's.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Sequence

from plumbing.errors import UnderstudyError, UsageError
from plumbing.wire.tcp_address import SCHEME, TcpAddress

DAYS = 3650  # replacing the CA restarts everything; who wants short lives has a certificate manager
DEADLINE_S = 60.0  # openssl waits for entropy on a machine that has just started
KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")
AUTHORITY = (
    *("basicConstraints=critical,CA:TRUE,pathlen:0", "keyUsage=critical,keyCertSign,cRLSign"),
    "subjectKeyIdentifier=hash",
)
SIGNED = ("basicConstraints=critical,CA:FALSE", "authorityKeyIdentifier=keyid")


def create(
    directory: str, hosts: Sequence[str], server: str = "lockserver", client: str = "engine"
) -> list[str]:
    """Write `ca.crt`, `ca.key`, and `tls.crt`, `tls.key`, `ca.crt` in a directory of each side.

    Args:
        hosts: names and addresses by which clients reach the server.
        server, client: the directories. A client's certificate names it `understudy-<client>`.

    Returns:
        The paths that were written.

    Raises:
        UsageError: `lock.certificates_exist`, `lock.no_openssl`, `wire.bad_address`.
        UnderstudyError: `lock.openssl_failed`, `lock.certificates_unwritable`.
    """
    names = ",".join(_alternative(host) for host in hosts)
    authority = [os.path.join(directory, name) for name in ("ca.crt", "ca.key")]
    written = [*authority]
    try:
        os.makedirs(directory, mode=0o700, exist_ok=True)
        if os.listdir(directory):
            raise UsageError(
                "lock.certificates_exist",
                f"{directory} is not empty; name a new directory, so that no key is overwritten",
                path=directory,
            )
        _issue(f"understudy-{server}-ca", AUTHORITY, *authority)
        # A client's certificate is good for no server: it cannot pose as one.
        uses = {server: ("serverAuth", names), client: ("clientAuth", f"DNS:understudy-{client}")}
        for role, (use, alternatives) in uses.items():
            place = os.path.join(directory, role)
            os.mkdir(place, 0o700)
            files = [os.path.join(place, name) for name in ("tls.crt", "tls.key", "ca.crt")]
            signer = ("-CA", authority[0], "-CAkey", authority[1])
            more = (f"extendedKeyUsage={use}", f"subjectAltName={alternatives}")
            _issue(f"understudy-{role}", SIGNED + more, *files[:2], *signer)
            shutil.copyfile(authority[0], files[2])
            written += files
    except OSError as error:
        raise UnderstudyError(
            "lock.certificates_unwritable", f"cannot write {directory}: {error}", path=directory
        ) from error
    return written


def _issue(name: str, extensions: Sequence[str], cert: str, key: str, *signer: str) -> None:
    """A certificate and its private key, which only this user can read."""
    os.close(os.open(key, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))  # openssl keeps the mode
    command = [
        *("openssl", "req", "-x509", "-config", os.devnull, "-subj", f"/CN={name}"),
        *("-days", str(DAYS), *KEY, "-keyout", key, "-out", cert, *signer),
        *(word for each in extensions for word in ("-addext", each)),
    ]
    if shutil.which("openssl") is None:
        raise UsageError(
            "lock.no_openssl", "the program openssl is not installed; install it (3.0 or newer)"
        )
    try:
        subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE_S, check=True)
    except subprocess.SubprocessError as error:
        why = (getattr(error, "stderr", None) or str(error)).strip()[-500:]
        raise UnderstudyError(
            "lock.openssl_failed", f"openssl (3.0 or newer is needed) failed: {why}"
        ) from error


def _alternative(host: str) -> str:
    """`host` as OpenSSL's subjectAltName; anything but a name or an address is refused."""
    is_v6 = ":" in host
    address = TcpAddress.parse(f"{SCHEME}[{host}]:1" if is_v6 else f"{SCHEME}{host}:1")
    is_v4 = host.rpartition(".")[2].isdigit()  # an address, as no name ends in a number
    return f"IP:{address.host}" if is_v6 or is_v4 else f"DNS:{address.host}"
