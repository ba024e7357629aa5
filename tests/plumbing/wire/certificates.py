"""Certificates for tests, made when they run: a CA, and what it says of others."""

from __future__ import annotations

import atexit
import datetime
import functools
import ipaddress
import os
import shutil
import tempfile
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

from plumbing.wire.tcp import Security

_DAY = datetime.timedelta(days=1)
_PEM = serialization.Encoding.PEM
_FORMAT = serialization.PrivateFormat.PKCS8
_PURPOSES = {
    "server": x509.ExtendedKeyUsageOID.SERVER_AUTH,
    "client": x509.ExtendedKeyUsageOID.CLIENT_AUTH,
}


class Authority:
    """A CA whose certificate and whose subjects' certificates and keys are files in `place`."""

    def __init__(self, place: Path, name: str = "ca") -> None:
        self._place = place
        self._name = _called(name)
        self._keys: dict[str, ec.EllipticCurvePrivateKey] = {}
        self._key = ec.generate_private_key(ec.SECP256R1())
        now = datetime.datetime.now(datetime.UTC)
        certificate = (
            x509.CertificateBuilder()
            .subject_name(self._name)
            .issuer_name(self._name)
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - _DAY)
            .not_valid_after(now + _DAY)
            .public_key(self._key.public_key())
            .add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
            .sign(self._key, hashes.SHA256())
        )
        self.path = str(place / f"{name}.pem")
        Path(self.path).write_bytes(certificate.public_bytes(_PEM))

    def issue(
        self,
        name: str,
        *,
        file: str = "",
        hosts: tuple[str, ...] = ("localhost", "127.0.0.1"),
        age_days: int = 0,
        passphrase: bytes = b"",
        uses: tuple[str, ...] = (),
        issuer: str = "",
    ) -> Security:
        """A certificate for `name`, valid from yesterday for two days, and its key, in files
        called `file` or `name`; `issuer` names a key that signs it instead of the CA's."""
        key = ec.generate_private_key(ec.SECP256R1())
        begin = datetime.datetime.now(datetime.UTC) - (1 + age_days) * _DAY
        signed = (
            x509.CertificateBuilder()
            .subject_name(_called(name))
            .issuer_name(_called(issuer) if issuer else self._name)
            .serial_number(x509.random_serial_number())
            .not_valid_before(begin)
            .not_valid_after(begin + 2 * _DAY)
            .public_key(key.public_key())
            .add_extension(x509.SubjectAlternativeName([_alternative(h) for h in hosts]), False)
        )
        if uses:
            purposes = x509.ExtendedKeyUsage([_PURPOSES[use] for use in uses])
            signed = signed.add_extension(purposes, critical=False)
        certificate = signed.sign(self._keys.get(issuer, self._key), hashes.SHA256())
        self._keys[name] = key
        chain = certificate.public_bytes(_PEM)
        if issuer:
            chain += (self._place / f"{issuer}.pem").read_bytes()
        locked: serialization.KeySerializationEncryption = serialization.NoEncryption()
        if passphrase:
            locked = serialization.BestAvailableEncryption(passphrase)
        place = str(self._place / (file or name))
        write_secret(f"{place}.key", key.private_bytes(_PEM, _FORMAT, locked))
        Path(f"{place}.pem").write_bytes(chain)
        return Security(f"{place}.pem", f"{place}.key", self.path)


@functools.cache
def shared() -> Security:
    """One pair for both sides, where a test is not about who may connect."""
    place = Path(tempfile.mkdtemp(prefix="understudy-pair-"))
    atexit.register(shutil.rmtree, place, ignore_errors=True)
    return Authority(place).issue("shared")


def tls_flags(security: Security, prefix: str = "") -> tuple[str, ...]:
    """The flags of `lockserver serve`, or with `prefix` "lockserver-" those of `engine run`."""
    return (
        *(f"--{prefix}tls-cert", security.cert),
        *(f"--{prefix}tls-key", security.key),
        *(f"--{prefix}tls-ca", security.ca),
    )


def write_secret(path: str, data: bytes, mode: int = 0o600) -> str:
    """A file that replaces what was at `path`, as Kubernetes and certbot renew theirs."""
    Path(f"{path}.new").write_bytes(data)
    os.chmod(f"{path}.new", mode)
    os.replace(f"{path}.new", path)
    return path


def _alternative(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)


def _called(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
