"""Who may connect over TCP: which settings and which files, and what renewing those does."""

from __future__ import annotations

import os
import ssl
import stat
from pathlib import Path

import pytest

from plumbing.errors import UsageError
from plumbing.wire.tcp import FILE_BYTES_MAX, Security, _check_secret, read_file, settle
from plumbing.wire.tcp_address import TcpAddress
from tests.helpers import open_fds, room_for
from tests.plumbing.wire.certificates import Authority, write_secret


@pytest.mark.parametrize(
    "files", [(None, None, None), ("", "", ""), ("c", None, None), ("c", "k", None)]
)
def test_incomplete_settings_are_a_usage_error_that_names_what_is_missing(
    files: tuple[str | None, ...],
):
    """Goal: no address is open to whoever can reach it, loopback included. Method: what is missing
    in turn, and the whole."""
    for host in ("localhost", "0.0.0.0"):
        address = TcpAddress(host, 7443)
        with pytest.raises(UsageError, match=r"CA's certificate.*`lockserver c") as caught:
            settle(address, *files)
        assert caught.value.code == "wire.incomplete_security"
        assert settle(address, "c", "k", "a") == Security("c", "k", "a")


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
        _check_secret("key", "the private key", found)
        return
    with pytest.raises(UsageError, match="known to other users") as caught:
        _check_secret("key", "the private key", found)
    assert caught.value.code == "wire.secret_readable"
    assert ("1001" if owner == 1001 else f"{mode:04o}") in caught.value.message


def test_secret_is_checked_through_the_links_that_kubernetes_makes(tmp_path: Path):
    """Goal: a Secret's files are links to links; what counts is the file at their end. Method: the
    layout of a mounted Secret, its mode tight and then loose."""
    (tmp_path / "..2026").mkdir()
    path = write_secret(str(tmp_path / "..2026/tls.key"), b"s" * 32)
    (tmp_path / "..data").symlink_to("..2026")
    (tmp_path / "tls.key").symlink_to("..data/tls.key")
    link = str(tmp_path / "tls.key")
    assert read_file(link, "the private key", is_secret=True) == b"s" * 32
    os.chmod(path, 0o644)
    with pytest.raises(UsageError, match=r"mode is 0644.*defaultMode: 0400"):
        read_file(link, "the private key", is_secret=True)
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


def test_contexts_are_strict(tmp_path: Path):
    """Goal: TLS 1.3 only, a certificate from every peer, the server's name
    checked, no session resumed."""
    security = Authority(tmp_path).issue("engine-0")
    for context in (security.server_context(), security.client_context()):
        assert context.minimum_version is ssl.TLSVersion.TLSv1_3
        assert context.verify_mode is ssl.CERT_REQUIRED
    assert security.server_context().num_tickets == 0
    assert security.server_context() is security.server_context()
    assert security.client_context().check_hostname


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
