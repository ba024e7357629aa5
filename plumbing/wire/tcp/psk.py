"""A pre-shared key as mutual TLS: both ends derive one private key and one certificate from it.

Python's ssl module supports TLS 1.3's own pre-shared keys only from 3.13 on. So the secret becomes
an Ed25519 key (HKDF), which signs a certificate whose fields are all fixed; since such signatures
are deterministic, both ends have the same bytes, and each trusts exactly that certificate. A server
sends it to every client, so that a weak secret could be guessed offline: the secret must be random
and at least 32 bytes long.
"""

from __future__ import annotations

import datetime

from plumbing.errors import UsageError

SECRET_BYTES_MIN = 32
_INFO = b"understudy wire pre-shared key 1: ed25519"
_NAME = "understudy pre-shared key"
_FROM = datetime.datetime(2000, 1, 1, tzinfo=datetime.UTC)
_UNTIL = datetime.datetime(9999, 12, 31, 23, 59, 59, tzinfo=datetime.UTC)  # RFC 5280 §4.1.2.5: none


def derive(secret: bytes, path: str) -> tuple[bytes, bytes]:
    """The certificate and the private key, both PEM, of `secret`, which was read from `path`.

    A newline at its end, as editors and `echo` add one, is removed, unless the secret would be too
    short without it: then it is taken to be the last of 32 random bytes.

    Raises:
        UsageError: `wire.psk_too_short`, `wire.no_cryptography`.
    """
    line = secret.removesuffix(b"\n").removesuffix(b"\r")
    secret = line if len(line) >= SECRET_BYTES_MIN else secret
    if len(secret) < SECRET_BYTES_MIN:
        raise UsageError(
            "wire.psk_too_short",
            f"the pre-shared key {path} has {len(secret)} bytes; it must have at least"
            f" {SECRET_BYTES_MIN} random ones: create it with `openssl rand -hex 32`",
        )
    try:
        # Imported here so that only users of a pre-shared key need this package and its memory.
        from cryptography import x509
        from cryptography.hazmat.primitives import hashes, serialization
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
        from cryptography.hazmat.primitives.kdf.hkdf import HKDF
    except ImportError as error:
        raise UsageError(
            "wire.no_cryptography",
            f"a pre-shared key needs the Python package cryptography ({error}): pip install"
            " 'understudy[psk]', or use certificates instead",
        ) from error
    seed = HKDF(hashes.SHA256(), length=32, salt=None, info=_INFO).derive(secret)
    key = Ed25519PrivateKey.from_private_bytes(seed)
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, _NAME)])
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .serial_number(1)
        .not_valid_before(_FROM)
        .not_valid_after(_UNTIL)
        .public_key(key.public_key())
        .add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        .sign(key, None)
    )
    pem = serialization.Encoding.PEM
    return certificate.public_bytes(pem), key.private_bytes(
        pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
