"""Who may connect over TCP: which settings and which files, and what renewing those does."""

from __future__ import annotations

import hashlib
import os
import ssl
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from plumbing.errors import UsageError
from plumbing.wire.tcp import psk
from plumbing.wire.tcp.address import TcpAddress
from plumbing.wire.tcp.security import FILE_BYTES_MAX, Security, _check_secret, read_file, settle
from tests.helpers import open_fds, room_for
from tests.plumbing.wire.certificates import Authority, write_secret

ROOT = str(Path(__file__).resolve().parents[3])
HERE = TcpAddress("localhost", 7443)
ANYWHERE = TcpAddress("0.0.0.0", 7443)


@pytest.mark.parametrize(
    ("address", "files", "expected"),
    [
        (HERE, (None, None, None, None), "wire.insecure_address"),
        (HERE, ("c", "k", "a", None), Security("c", "k", "a")),
        (ANYWHERE, ("c", "k", "a", None), Security("c", "k", "a")),
        (ANYWHERE, (None, None, None, "p"), Security(psk="p")),
        (HERE, (None, None, None, "p"), Security(psk="p")),
        (ANYWHERE, (None, None, None, None), "wire.insecure_address"),
        (ANYWHERE, ("", "", "", ""), "wire.insecure_address"),
        (HERE, ("c", None, None, None), "wire.incomplete_security"),
        (ANYWHERE, ("c", "k", None, None), "wire.incomplete_security"),
        (HERE, (None, None, "a", "p"), "wire.two_securities"),
        (HERE, ("c", "k", "a", "p"), "wire.two_securities"),
    ],
)
def test_settings_are_one_kind_of_security_or_a_usage_error(
    address: TcpAddress, files: tuple[str | None, ...], expected: Security | str | None
):
    """Goal: certificates or a key; nothing, incomplete ones, or both are refused and the error
    names what is missing. Method: a table."""
    if not isinstance(expected, str):
        assert settle(address, *files, is_open=False, open_flag="--open") == expected
        return
    with pytest.raises(UsageError) as caught:
        settle(address, *files, is_open=False, open_flag="--open")
    assert caught.value.code == expected
    if expected == "wire.incomplete_security":
        assert "CA's certificate" in caught.value.message
    if expected == "wire.insecure_address":
        assert ("--open" in caught.value.message) == (address == HERE)


@pytest.mark.parametrize(
    ("address", "files", "expected"),
    [
        (HERE, (None, None, None, None), None),
        (HERE, (None, None, None, "p"), Security(psk="p")),
        (ANYWHERE, (None, None, None, None), "wire.insecure_address"),
        (HERE, ("c", None, None, None), "wire.incomplete_security"),
    ],
)
def test_only_loopback_may_be_open_and_only_when_asked_for(
    address: TcpAddress, files: tuple[str | None, ...], expected: Security | str | None
):
    """Goal: the flag opens a loopback address and nothing else. Method: a table, with the flag."""
    if not isinstance(expected, str):
        assert settle(address, *files, is_open=True, open_flag="--open") == expected
        return
    with pytest.raises(UsageError) as caught:
        settle(address, *files, is_open=True, open_flag="--open")
    assert caught.value.code == expected


@pytest.mark.parametrize(
    ("owner", "mode", "is_fine"),
    [
        (1000, 0o600, True),
        (1000, 0o400, True),
        (1000, 0o640, False),
        (1000, 0o604, False),
        (1000, 0o602, False),
        (0, 0o600, True),
        (0, 0o440, True),
        (0, 0o640, True),
        (0, 0o460, False),
        (0, 0o444, False),
        (0, 0o644, False),
        (1001, 0o600, False),
    ],
)
def test_secret_belongs_to_its_reader_or_to_root(
    owner: int, mode: int, is_fine: bool, monkeypatch: pytest.MonkeyPatch
):
    """Goal: only its owner may be able to read a secret; its group too if root owns it, as
    Kubernetes mounts Secrets with fsGroup. Method: a table of owners and modes, as user 1000."""
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    found = os.stat_result((stat.S_IFREG | mode, 0, 0, 1, owner, 2000, 0, 0, 0, 0))
    if is_fine:
        _check_secret("psk", "the pre-shared key", found)
        return
    with pytest.raises(UsageError, match="known to other users") as caught:
        _check_secret("psk", "the pre-shared key", found)
    assert caught.value.code == "wire.secret_readable"
    assert ("1001" if owner == 1001 else f"{mode:04o}") in caught.value.message


def test_secret_is_checked_through_the_links_that_kubernetes_makes(tmp_path: Path):
    """Goal: a Secret's files are links to links; what counts is the file at their end. Method: the
    layout of a mounted Secret, its mode tight and then loose."""
    (tmp_path / "..2026").mkdir()
    path = write_secret(str(tmp_path / "..2026/psk"), b"s" * 32)
    (tmp_path / "..data").symlink_to("..2026")
    (tmp_path / "psk").symlink_to("..data/psk")
    link = str(tmp_path / "psk")
    assert read_file(link, "the pre-shared key", is_secret=True) == b"s" * 32
    os.chmod(path, 0o644)
    with pytest.raises(UsageError, match=r"mode is 0644.*defaultMode: 0400"):
        read_file(link, "the pre-shared key", is_secret=True)
    assert read_file(link, "the certificate", is_secret=False) == b"s" * 32


def test_file_that_cannot_be_read_is_a_usage_error(tmp_path: Path):
    """Goal: no file, a directory, a pipe without a writer, an endless file: each is an error, none
    hangs, and no descriptor leaks."""
    before = len(open_fds())
    os.mkdir(tmp_path / "directory", 0o700)
    os.mkfifo(tmp_path / "pipe", 0o600)
    (tmp_path / "huge").write_bytes(b"x" * (FILE_BYTES_MAX + 1))
    os.chmod(tmp_path / "huge", 0o600)
    for name, words in (
        ("nothing", "No such file"),
        ("directory", "is not a file"),
        ("pipe", "is not a file"),
        ("huge", "is not a file of at most"),
    ):
        with pytest.raises(UsageError, match=words) as caught:
            read_file(str(tmp_path / name), "the private key", is_secret=True)
        assert caught.value.code == "wire.file"
    assert len(open_fds()) == before


def test_pre_shared_key_gives_both_ends_the_same_certificate():
    """Goal: one secret gives one key and one certificate, byte for byte, in any process; another
    secret gives others. Method: derive here and in a new interpreter; a newline at the end of the
    secret is ignored."""
    secret = bytes(range(100, 140))
    ours = psk.derive(secret, "psk")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from plumbing.wire.tcp import psk\n"
        "for part in psk.derive(bytes(range(100, 140)) + b'\\r\\n', 'psk'): print(part.decode())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, ROOT], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "".join(f"{part.decode()}\n" for part in ours)
    other = psk.derive(secret[:-1] + b"!", "psk")
    assert other[0] != ours[0]
    assert other[1] != ours[1]


def test_certificate_of_a_pre_shared_key_never_changes():
    """Goal: two releases derive the same certificate; otherwise a mixed pod could not connect.
    Method: the digest of a known secret's certificate."""
    cert, _ = psk.derive(b"0123456789abcdef0123456789abcdef", "psk")
    digest = hashlib.sha256(ssl.PEM_cert_to_DER_cert(cert.decode())).hexdigest()
    assert digest == "b027e4acebdb4b8635872e7b3fa4851575b387b8883518486ace5796b08e287c"


def test_random_pre_shared_key_may_end_in_a_newline_byte():
    """Goal: one in 128 random keys ends with a byte that looks like a newline and is still valid.
    Method: 32 such bytes; a longer key with and without a newline."""
    random = b"r" * 31
    assert psk.derive(random + b"\n", "psk") != psk.derive(random + b"\r", "psk")
    assert psk.derive(random + b"!\n", "psk") == psk.derive(random + b"!", "psk")


def test_short_pre_shared_key_is_refused_with_the_command_that_creates_one():
    """Goal: fewer than 32 bytes are refused, with the command that creates a key."""
    with pytest.raises(UsageError, match="openssl rand") as caught:
        psk.derive(b"x" * 30 + b"\n", "/etc/psk")
    assert caught.value.code == "wire.psk_too_short"
    assert "/etc/psk" in caught.value.message


def test_pre_shared_key_without_its_package_is_a_clear_error(monkeypatch: pytest.MonkeyPatch):
    """Goal: where `cryptography` is not installed, the error says what to install or use instead.
    Method: make its import fail."""
    monkeypatch.setitem(sys.modules, "cryptography", None)
    with pytest.raises(UsageError, match=r"understudy\[psk\]") as caught:
        psk.derive(b"x" * 32, "psk")
    assert caught.value.code == "wire.no_cryptography"


def test_contexts_are_strict(tmp_path: Path):
    """Goal: TLS 1.3 only, a certificate from every peer, the server's name checked where
    certificates have names, no session resumed."""
    tls = Authority(tmp_path).issue("engine-0")
    shared = Security(psk=write_secret(str(tmp_path / "psk"), b"s" * 32))
    for security in (tls, shared):
        for context in (security.server_context(), security.client_context()):
            assert context.minimum_version is ssl.TLSVersion.TLSv1_3
            assert context.verify_mode is ssl.CERT_REQUIRED
        assert security.server_context().num_tickets == 0
        assert security.server_context() is security.server_context()
    assert tls.client_context().check_hostname
    assert tls.names_peers
    assert not shared.names_peers


def test_files_that_are_not_certificates_are_a_usage_error(tmp_path: Path):
    """Goal: each unusable file is named; a passphrase is never asked for, and the key is never
    written to disk. Method: break one file at a time."""
    before = len(open_fds())
    authority = Authority(tmp_path)
    good = authority.issue("good")
    locked = authority.issue("locked", passphrase=b"secret")
    nonsense = write_secret(str(tmp_path / "nonsense"), b"\xff nonsense")
    for security, words in (
        (Security(nonsense, good.key, good.ca), "nonsense and .* are not a certificate"),
        (Security(good.cert, nonsense, good.ca), "are not a certificate and its private key"),
        (Security(good.cert, locked.key, good.ca), "passphrase"),
        (locked, "without a passphrase"),
        (Security(good.cert, good.key, nonsense), "nonsense contains no CA certificate"),
        (Security(good.cert, good.key, good.key), "contains no CA certificate"),
        (Security(good.cert, good.key, str(tmp_path / "none")), "No such file"),
    ):
        with pytest.raises(UsageError, match=words):
            security.server_context()
        with pytest.raises(UsageError, match=words):
            security.client_context()
    assert len(open_fds()) == before


def test_renewed_files_are_used_and_broken_ones_are_a_temporary_problem(tmp_path: Path):
    """Goal: a new certificate is used without a restart; a broken one is a problem and the old one
    stays in use until it is fixed; unchanged files are not read again. Method: renew and break the
    files by renaming, as certificate managers do."""
    authority = Authority(tmp_path)
    security = authority.issue("lock", file="tls")
    first = security.server_context()
    assert security.cert is not None
    good = Path(security.cert).read_bytes()
    write_secret(security.cert, b"nonsense")
    for _ in range(2):
        assert security.server_context() is first
        assert security.problem is not None
        assert "stay in use" in security.problem
    os.unlink(security.cert)
    assert security.server_context() is first
    assert "No such file" in str(security.problem)
    write_secret(security.cert, good)
    second = security.server_context()
    assert security.problem is None
    assert second is not first
    authority.issue("lock", file="tls")  # the pair is replaced one file after the other
    third = security.server_context()
    assert third is not second
    assert security.problem is None
    assert security.server_context() is third


def test_renewed_files_without_a_descriptor_to_load_them_are_a_temporary_problem(tmp_path: Path):
    """Goal: a shortage while certificates are renewed ends no handshake and no status request.
    Method: renew the files, then look with room for no descriptor, for one, and for enough."""
    authority = Authority(tmp_path)
    security = authority.issue("lock", file="tls")
    first = security.server_context()
    authority.issue("lock", file="tls")
    for count in (0, 1):
        with room_for(count):
            assert security.server_context() is first
        assert "Too many open files" in str(security.problem)
    assert security.server_context() is not first
    assert security.problem is None


def test_problem_is_cleared_when_the_old_file_returns(tmp_path: Path):
    """Goal: a link that is changed and changed back, like a Secret that is rolled back, leaves no
    problem."""
    good = write_secret(str(tmp_path / "good"), b"g" * 32)
    bad = write_secret(str(tmp_path / "bad"), b"short")
    link = tmp_path / "psk"
    link.symlink_to(good)
    security = Security(psk=str(link))
    first = security.client_context()
    link.unlink()
    link.symlink_to(bad)
    assert security.client_context() is first
    assert "must have at least 32" in str(security.problem)
    link.unlink()
    link.symlink_to(good)
    assert security.client_context() is first
    assert security.problem is None
