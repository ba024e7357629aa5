"""Goal: a setting that cannot work ends `gateway serve` at once, with a sentence that says why."""

from __future__ import annotations

from pathlib import Path

import pytest

from gateway.server.settings import OPTIONS, settle
from plumbing.errors import UsageError
from plumbing.service.config import resolve
from tests.plumbing.wire.certificates import Authority


@pytest.fixture
def directory(tmp_path: Path) -> str:
    path = tmp_path / "pod"
    path.mkdir(mode=0o700)
    return str(path)


def settled(directory: str, **flags: str):
    return settle(resolve(OPTIONS, {"dir": directory, **flags}, {}))


def test_relative_paths_are_those_of_the_working_directory(directory: str, monkeypatch, tmp_path):
    """Goal: a successor finds the same files; method: names without a directory."""
    monkeypatch.chdir(tmp_path)
    pair = Authority(tmp_path).issue("pod")
    (tmp_path / "keys").write_text("sk-1\n")
    found = settled(directory, tls_cert="pod.pem", tls_key="pod.key", api_keys="keys")
    assert (found.tls_cert, found.tls_key) == (pair.cert, pair.key)
    assert found.api_keys == str(tmp_path / "keys")


def refusal(directory: str, **flags: str) -> tuple[str, str]:
    """Its code and sentence."""
    with pytest.raises(UsageError) as caught:
        settled(directory, **flags).check_files()
    return caught.value.code, caught.value.message


def test_tls_files_that_cannot_work_are_refused(directory: str, tmp_path: Path):
    """Goal: no gateway whose handshakes all fail; method: one flag alone, no file, no PEM, the key
    of another certificate, and an encrypted key, for which nobody is asked at the terminal."""
    authority = Authority(tmp_path)
    issued = authority.issue("pod")
    cert, key, foreign = issued.cert, issued.key, authority.issue("other").key
    for pair in ((cert, ""), ("", key), ("/nowhere", key), (key, key), (cert, foreign)):
        assert refusal(directory, tls_cert=pair[0], tls_key=pair[1])[0] == "gateway.bad_tls", pair
    locked = authority.issue("locked", passphrase=b"word")
    refused = refusal(directory, tls_cert=locked.cert, tls_key=locked.key)
    assert "decrypt it first" in refused[1]


def test_a_file_of_keys_without_a_key_is_refused_and_never_quoted(directory: str, tmp_path: Path):
    """Goal: no gateway that answers nobody, no key in a message; method: bad files."""
    path = tmp_path / "keys"
    assert refusal(directory, api_keys=str(path))[0] == "gateway.bad_api_keys"
    path.write_text(" \n\n")
    assert refusal(directory, api_keys=str(path))[0] == "gateway.bad_api_keys"
    path.write_bytes(b"sk-secret" * 200_000)
    assert "secret" not in refusal(directory, api_keys=str(path))[1]


def test_pool_file_that_cannot_be_used_is_refused_and_so_is_a_second_rule_of_sleep(
    directory: str, tmp_path: Path
):
    file = tmp_path / "pool.yaml"
    assert refusal(directory, pool=str(file))[0] == "pool.file_unreadable"
    file.write_text("models: 7")
    assert refusal(directory, pool=str(file))[0] == "pool.bad_setting"
    assert refusal(directory, pool=str(file), sleep_after="5s")[0] == "gateway.pool_decides"
