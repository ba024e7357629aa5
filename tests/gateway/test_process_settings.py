"""Goal: a setting that cannot work ends `gateway serve` at once, with a sentence that says why."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from gateway.supervisor.settings import OPTIONS, settle
from plumbing.errors import UsageError
from plumbing.service.config import resolve


@pytest.fixture
def directory(tmp_path: Path) -> str:
    path = tmp_path / "pod"
    path.mkdir(mode=0o700)
    return str(path)


def settled(directory: str, **flags: str):
    return settle(resolve(OPTIONS, {"dir": directory, **flags}, {}))


def certificate(folder: Path, *flags: str) -> tuple[str, str]:
    cert, key = str(folder / "cert.pem"), str(folder / "key.pem")
    words = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    words += ["-subj", "/CN=pod", "-days", "1", "-keyout", key, "-out", cert, *flags]
    subprocess.run(words, check=True, capture_output=True)
    return cert, key


def test_defaults_are_those_of_the_reference(directory: str):
    """Goal: what `docs/reference.md` says; method: no flag at all."""
    settings = settled(directory)
    assert (settings.lock, settings.http_port, settings.drain_ms) == ("active", 9403, 43_000)
    child = settings.child
    assert (child.hold_ms, child.park_timeout_ms, child.resumes_max) == (10_000, 300_000, 32)
    assert (child.memory_bytes, child.keepalive_comments_ms, child.access_log) == (
        1 << 30,
        0,
        False,
    )


def test_relative_paths_are_those_of_the_working_directory(directory: str, monkeypatch, tmp_path):
    """Goal: a child finds the same files; method: names without a directory."""
    monkeypatch.chdir(tmp_path)
    cert, key = certificate(tmp_path, "-noenc")
    (tmp_path / "keys").write_text("sk-1\n")
    child = settled(directory, tls_cert="cert.pem", tls_key="key.pem", api_keys="keys").child
    assert (child.tls_cert, child.tls_key) == (cert, key)
    assert child.api_keys == str(tmp_path / "keys")


def refusal(directory: str, **flags: str) -> str:
    with pytest.raises(UsageError) as caught:
        settled(directory, **flags)
    return caught.value.message


def test_tls_files_that_cannot_work_are_refused(directory: str, tmp_path: Path):
    """Goal: each fault is named; method: one flag alone, no file, no PEM, an encrypted key, the key
    of another certificate."""
    cert, key = certificate(tmp_path, "-noenc")
    assert refusal(directory, tls_cert=cert) == "--tls-cert requires --tls-key"
    assert refusal(directory, tls_key=key) == "--tls-key requires --tls-cert"
    assert "No such file" in refusal(directory, tls_cert="/nowhere", tls_key=key)
    assert "are not a PEM certificate and its private key" in refusal(
        directory, tls_cert=key, tls_key=key
    )
    (tmp_path / "other").mkdir()
    _, foreign = certificate(tmp_path / "other", "-noenc")
    assert "KEY_VALUES_MISMATCH" in refusal(directory, tls_cert=cert, tls_key=foreign)
    cert, key = certificate(tmp_path, "-passout", "pass:word")
    assert "decrypt it first" in refusal(directory, tls_cert=cert, tls_key=key)


def test_a_file_of_keys_without_a_key_is_refused_and_never_quoted(directory: str, tmp_path: Path):
    """Goal: no gateway that answers nobody, no key in a message; method: bad files."""
    path = tmp_path / "keys"
    assert "No such file" in refusal(directory, api_keys=str(path))
    path.write_text(" \n\n")
    assert "has no key" in refusal(directory, api_keys=str(path))
    path.write_bytes(b"sk-secret\xff\n")
    assert refusal(directory, api_keys=str(path)).endswith("it is not UTF-8")


def test_numbers_out_of_range_are_refused(directory: str):
    """Goal: limits that make sense; method: one below each."""
    assert "the minimum is" in refusal(directory, memory_bytes="1MiB")
    assert "the minimum is 1" in refusal(directory, resumes_max="0")
    assert "such as 5s" in refusal(directory, keepalive_comments="soon")
    assert os.listdir(directory) == []
