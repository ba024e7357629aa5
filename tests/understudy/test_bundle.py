"""The support bundle with nothing running, and what never leaves the machine. `tests/e2e` has it of
a running pod."""

from __future__ import annotations

import asyncio
import io
import json
import os
import stat
import subprocess
import tarfile
from pathlib import Path

import pytest

from plumbing.errors import UsageError
from understudy import bundle as bundle_module
from understudy.bundle import (
    LOG_TAIL_BYTES,
    NOT_KEPT,
    Bundle,
    collect,
    redacted,
    redacted_environment,
)
from understudy.pod.table import program


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = tmp_path / "pod"
    (path / "log").mkdir(mode=0o700, parents=True)
    return path


def collected(directory: Path, output: Path) -> tuple[dict[str, str], list[str]]:
    """The entries of a bundle by name, and what the command said."""
    said: list[str] = []
    assert asyncio.run(collect(directory, directory / "log", output, said.append)) == output
    with tarfile.open(output) as archive:
        members = archive.getmembers()
        folders = {member.name.partition("/")[0] for member in members}
        assert len(folders) == 1
        assert {stat.S_IMODE(member.mode) for member in members} == {0o600}
        texts = {
            member.name.partition("/")[2]: archive.extractfile(member).read().decode()
            for member in members
        }
    return texts, said


def test_bundle_of_a_pod_that_is_down_has_what_is_on_disk(directory: Path, tmp_path: Path):
    """Goal: help where nothing runs any more. Method: state and logs of a pod that was, a pipe and
    a link in the way; every entry is there or named as missing."""
    (directory / "engine_engine-0.json").write_text(
        '{"engine": {"id": "engine-0", "state": "dead"}}'
    )
    (directory / "log" / "gms.log").write_text("the last words\n")
    os.mkfifo(directory / "log" / "lockserver.log")
    (directory / "log" / "engine-0.log").symlink_to("/etc/shadow")
    output = tmp_path / "b.tar.gz"
    texts, said = collected(directory, output)
    assert stat.S_IMODE(output.stat().st_mode) == 0o600
    status = json.loads(texts["status.json"])
    assert status["state"] == "down"
    assert status["lockserver"]["error"]
    assert json.loads(texts["doctor.json"])["dir"] == str(directory)
    assert json.loads(texts["state/engine_engine-0.json"])["engine"]["state"] == "dead"
    assert texts["log/gms.log"] == "the last words\n"
    machine = json.loads(texts["machine.json"])
    assert {"build", "uname", "packages", "environment", "files"} <= set(machine)
    assert "MemTotal" in machine["files"]["/proc/meminfo"]
    missing = [line for line in said if line.startswith("missing: ")]
    assert {line.split(": ")[1] for line in missing} == {
        *("events.jsonl", "log/lockserver.log", "log/engine-0.log")
    }
    named = {line.split()[0] for line in said if line not in missing}
    assert set(texts) - {"contents.txt"} <= named
    assert said[-1].startswith(str(output))
    assert texts["contents.txt"].splitlines() == said[:-1]


def test_bundle_is_never_written_over_what_is_there(directory: Path, tmp_path: Path):
    """Goal: the last bundle stays. Method: its name again, and a directory that is not there."""
    there = tmp_path / "there"
    there.write_text("mine")
    for output in (there, tmp_path / "none" / "x"):
        with pytest.raises(UsageError, match=r"bundle\.not_written"):
            asyncio.run(collect(directory, directory / "log", output, print))
    assert there.read_text() == "mine"


def test_bundle_of_a_container_with_a_read_only_root(directory: Path):
    """Goal: `kubectl exec … support-bundle`. Method: the command in a directory that it cannot
    write to: a sentence; `--output -`. Nobody writes to /proc, not even root."""
    command = [*program("understudy"), "support-bundle", f"--dir={directory}"]
    done = subprocess.run(command, cwd="/proc", capture_output=True, check=False)
    assert done.returncode == 2
    assert b"--output, or - for standard output [bundle.not_written]" in done.stderr
    done = subprocess.run([*command, "--output=-"], cwd="/proc", capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as found:
        assert {"status.json", "doctor.json"} <= {
            each.rpartition("/")[2] for each in found.getnames()
        }
    assert b"review it before you share it" in done.stderr


def test_half_a_line_is_not_kept(directory: Path, tmp_path: Path):
    """Goal: a log's end begins with a line whose beginning was combed, too. Method: a log that is
    too long by the name of what it has in its first line."""
    line, rest = "secret: abc\n", "x" * (LOG_TAIL_BYTES - len("abc\n") - 1) + "\n"
    (directory / "log" / "engine-1.log").write_text(line + rest)
    texts, _ = collected(directory, tmp_path / "b.tar.gz")
    assert texts["log/engine-1.log"] == rest


def test_bundle_keeps_the_end_of_what_is_too_long_and_stops_when_it_is_full(
    monkeypatch: pytest.MonkeyPatch,
):
    """Goal: a bundle that can be sent. Method: a long entry, and one more than fits."""
    monkeypatch.setattr(bundle_module, "BUNDLE_BYTES_MAX", 200)
    bundle = Bundle()
    bundle.add("long", "a" * 1000 + "the end", 100)
    assert bundle.entries["long"].endswith(b"the end")
    assert len(bundle.entries["long"]) < 150
    bundle.add("more", "b" * 100, 100)
    assert list(bundle.entries) == ["long"]
    assert "limit of 200 B" in bundle.missing["more"]


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [
        ("UNDERSTUDY_DIR", "/run/understudy", "/run/understudy"),
        ("ENGINE_ID", "engine-0", "engine-0"),
        ("VLLM_API_KEY", "abc", NOT_KEPT),
        ("UNDERSTUDY_TOKEN", "abc", NOT_KEPT),
        ("AWS_SECRET_ACCESS_KEY", "abc", NOT_KEPT),
        ("DATABASE_URL", "postgres://u:p@h/d", NOT_KEPT),
        ("MY_OWN_THING", "who knows", NOT_KEPT),
        ("UNDERSTUDY_PROXY", "http://user:pw@proxy:1", f"http://{NOT_KEPT}@proxy:1"),
    ],
)
def test_environment_keeps_values_that_are_known_and_no_secret(name, value, kept):
    """Goal: an allow-list. Method: known names, known names of secrets, unknown names."""
    assert redacted_environment({name: value}) == {name: kept}


@pytest.mark.parametrize(
    ("text", "kept"),
    [
        ('{"lock": "active", "token": 17}', '{"lock": "active", "token": 17}'),
        ("held by engine-0, token 17", "held by engine-0, token 17"),
        ('{"message": "took over in 28 ms"}', '{"message": "took over in 28 ms"}'),
        ("hf_token=hf_abcdefghijklmnop", f"hf_token={NOT_KEPT}"),
        ("Authorization: Bearer abc.def-ghi", f"Authorization: Bearer {NOT_KEPT}"),
        ("api_key='abc', x=1", f"api_key='{NOT_KEPT}', x=1"),
        ('"password": "abc"', f'"password": "{NOT_KEPT}"'),
        (
            "Received request c-1: prompt: 'my diary', n=1",
            f"Received request c-1: prompt: {NOT_KEPT}",
        ),
        ('body {"messages": [{"role": "user"}]}', f'body {{"messages": {NOT_KEPT}'),
        ("see https://u:p@host/x", f"see https://{NOT_KEPT}@host/x"),
        ("see https://u:p@ss@host/x", f"see https://{NOT_KEPT}@host/x"),
        ("see https://h/x?sig=abc&y=1", f"see https://h/x?sig={NOT_KEPT}&y=1"),
        ("see h/x?X-Amz-Signature=abc&y=1", f"see h/x?X-Amz-Signature={NOT_KEPT}&y=1"),
        ('{"Authorization": "Basic dTpw"}', f'{{"Authorization": "Basic {NOT_KEPT}"}}'),
        ("Cookie: a=b; c=d", f"Cookie: {NOT_KEPT}"),
        ("{'api_key': ['abc', 'def'], 'x': 1}", f"{{'api_key': [{NOT_KEPT}], 'x': 1}}"),
        ('password="two words"', f'password="{NOT_KEPT}"'),
        ("password: 12345678", f"password: {NOT_KEPT}"),
        ("passphrase=abc private_key=def", f"passphrase={NOT_KEPT} private_key={NOT_KEPT}"),
        (r'"{\"api_key\": \"abc\"}"', rf'"{{\"api_key\": \"{NOT_KEPT}\"}}"'),
        (r'"{\"prompt\": \"my diary\"}"', rf'"{{\"prompt\": {NOT_KEPT}'),
        ("vllm serve m --api-key abc --port 1", f"vllm serve m --api-key {NOT_KEPT} --port 1"),
        ("x --api-key=abc y --hf-token --other", f"x --api-key={NOT_KEPT} y --hf-token --other"),
        ("[--api-key, abc, --tokenizer, m]", f"[--api-key, {NOT_KEPT} --tokenizer, m]"),
        ('["--hf-token", "abc"]', f'["--hf-token", "{NOT_KEPT}'),
        ("  - --api-key\n  - abc\n", f"  - --api-key\n  - {NOT_KEPT}\n"),
        ("vllm serve m --max-num-batched-tokens 8", "vllm serve m --max-num-batched-tokens 8"),
        ("got gho_abcdefghijklmnopqr there", f"got {NOT_KEPT} there"),
        ("api_key=None, secret: null", "api_key=None, secret: null"),
        (
            "-----BEGIN PRIVATE KEY-----\nMIIE\nabc\n-----END PRIVATE KEY-----",
            f"-----BEGIN PRIVATE KEY-----{NOT_KEPT}-----END PRIVATE KEY-----",
        ),
        ("two\nlines, secret: abc\nthree", f"two\nlines, secret: {NOT_KEPT}\nthree"),
    ],
)
def test_running_text_loses_secrets_and_prompts_and_nothing_else(text, kept):
    """Goal: logs stay of use. Method: lines of ours that look alike, secrets and requests."""
    assert redacted(text) == kept
