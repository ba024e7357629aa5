"""Who may connect over TCP: which settings and which files, and what renewing those does."""

from __future__ import annotations

import os
import ssl
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest

from plumbing.errors import UsageError
from plumbing.wire import tcp
from plumbing.wire.tcp import FILE_BYTES_MAX, Security, check_file, settle
from plumbing.wire.tcp_address import TcpAddress
from tests.helpers import room_for
from tests.plumbing.wire.certificates import Authority, write_secret


@pytest.mark.parametrize("files", [(None, None, None), ("", "", ""), ("c", "k", None)])
def test_incomplete_settings_are_a_usage_error_that_names_what_is_missing(
    files: tuple[str | None, ...],
):
    """Goal: no address is open to whoever can reach it, loopback included."""
    address = TcpAddress("localhost", 7443)
    with pytest.raises(UsageError, match=r"CA's certificate.*`lockserver c") as caught:
        settle(address, *files)
    assert caught.value.code == "wire.incomplete_security"
    assert settle(address, "c", "k", "a") == Security("c", "k", "a")


@pytest.mark.parametrize(
    ("owner", "mode", "fault"),
    [
        (1000, 0o600, ""),
        (1000, 0o640, "0640"),
        (1000, 0o602, "0602"),
        (0, 0o640, ""),
        (0, 0o460, "0460"),
        (0, 0o444, "0444"),
        (1001, 0o600, "1001"),
    ],
)
def test_secret_belongs_to_its_reader_or_to_root(
    owner: int, mode: int, fault: str, monkeypatch: pytest.MonkeyPatch
):
    """Goal: only its owner may be able to read a secret; its group too if root owns it, as
    Kubernetes mounts Secrets with fsGroup. Method: a table of owners and modes, as user 1000."""
    found = os.stat_result((stat.S_IFREG | mode, 0, 0, 1, owner, 2000, 0, 0, 0, 0))
    system = SimpleNamespace(geteuid=lambda: 1000, stat=lambda _: found)
    monkeypatch.setattr(tcp, "os", system)
    check_file("key", "the certificate")
    if not fault:
        check_file("key", "the private key", is_secret=True)
        return
    with pytest.raises(UsageError, match=f"known to other users.*{fault}") as caught:
        check_file("key", "the private key", is_secret=True)
    assert caught.value.code == "wire.secret_readable"


def test_secret_is_checked_through_the_links_that_kubernetes_makes(tmp_path: Path):
    """Goal: a Secret's files are links to links; what counts is the file at their end. Method: the
    layout of a mounted Secret, its mode tight and then loose."""
    (tmp_path / "..2026").mkdir()
    path = write_secret(str(tmp_path / "..2026/tls.key"), b"s" * 32)
    (tmp_path / "..data").symlink_to("..2026")
    (tmp_path / "tls.key").symlink_to("..data/tls.key")
    check_file(str(tmp_path / "tls.key"), "the private key", is_secret=True)
    os.chmod(path, 0o644)
    with pytest.raises(UsageError, match=r"mode is 0644.*defaultMode: 0400"):
        check_file(str(tmp_path / "tls.key"), "the private key", is_secret=True)


def test_file_that_cannot_be_read_is_a_usage_error(tmp_path: Path):
    """Goal: no file, a directory, a pipe without a writer, an endless file: none hangs."""
    os.mkdir(tmp_path / "directory")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "huge").write_bytes(b"x" * (FILE_BYTES_MAX + 1))
    for name in ("nothing", "directory", "pipe", "huge"):
        with pytest.raises(UsageError, match=r"not a file of at most|No such file") as caught:
            check_file(str(tmp_path / name), "the private key", is_secret=True)
        assert caught.value.code == "wire.file"


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
    """Goal: each unusable file is named; a passphrase is never asked for. Method: break one file
    at a time."""
    authority = Authority(tmp_path)
    good = authority.issue("good")
    locked = authority.issue("locked", passphrase=b"secret")
    nonsense = write_secret(str(tmp_path / "nonsense"), b"\xff nonsense")
    for security, words in (
        (Security(nonsense, good.key, good.ca), "nonsense and .* are not a certificate"),
        (Security(good.cert, nonsense, good.ca), "are not a certificate and its private key"),
        (locked, "without a passphrase"),
        (Security(good.cert, good.key, good.key), "contains no CA certificate"),
        (Security(good.cert, good.key, str(tmp_path / "none")), "No such file"),
    ):
        for context in (security.server_context, security.client_context):
            with pytest.raises(UsageError, match=words):
                context()


def test_renewed_files_without_a_descriptor_to_load_them_are_a_temporary_problem(tmp_path: Path):
    """Goal: a shortage while certificates are renewed ends no handshake and no status request.
    Method: renew the files, then look with room for no descriptor, and for enough."""
    authority = Authority(tmp_path)
    security = authority.issue("lock", file="tls")
    first = security.server_context()
    authority.issue("lock", file="tls")
    with room_for(0):
        assert security.server_context() is first
        assert "Too many open files" in str(security.problem)
    assert security.server_context() is not first
    assert security.problem is None
