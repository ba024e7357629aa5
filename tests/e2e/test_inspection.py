"""The commands that inspect a pod, on a running one."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import tarfile
from pathlib import Path
from typing import Any

import pytest

from plumbing.errors import DegradedError
from tests.e2e.pods import ENVIRONMENT, UNDERSTUDY, Pod, in_pod
from understudy.drill.prompts import CHATS, COMPLETIONS

WAIT_S = 60.0
DEGRADED = DegradedError.exit_code


async def understudy(pod: Pod, *words: str, **env: str) -> tuple[int, str]:
    """Run the command on the pod's directory: its exit code and stdout."""
    process = await asyncio.create_subprocess_exec(
        *(UNDERSTUDY, *words, f"--dir={pod.directory}"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env={**ENVIRONMENT, **env},
    )
    out, err = await asyncio.wait_for(process.communicate(), WAIT_S)
    assert b"Traceback" not in err, err.decode()
    assert process.returncode is not None
    return process.returncode, out.decode()


async def checked(pod: Pod, *flags: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """The results of doctor, by the checks' ids."""
    code, out = await understudy(pod, "doctor", "--json", *flags)
    return code, {each["id"]: each for each in json.loads(out)["checks"]}


@pytest.mark.slow
@in_pod
async def test_status_doctor_and_bundle_work_while_the_lock_server_hangs(pod: Pod, tmp_path: Path):
    """Goal: the commands work when something is wrong. Method: stop the lock server; status reports
    that the pod is degraded, with its exit code, and doctor and bundle finish."""
    await pod.whole()
    hung = pod.pid("lockserver")
    os.kill(hung, signal.SIGSTOP)
    try:
        output = tmp_path / "bundle.tar.gz"
        # At the same time: each waits for the lock server.
        (status, out), (_, checks), (bundle, _) = await asyncio.gather(
            understudy(pod, "status", "--check"),
            checked(pod),
            understudy(pod, "support-bundle", f"--output={output}"),
        )
        assert (status, "degraded" in out) == (DEGRADED, True), out
        assert checks["shared"]["status"] == "pass"
        assert bundle == 0
        with tarfile.open(output) as archive:
            names = {member.name.partition("/")[2] for member in archive.getmembers()}
        assert {"status.json", "doctor.json", "processes.json", "events.jsonl"} <= names
    finally:
        os.kill(hung, signal.SIGCONT)
    await pod.whole()


@pytest.mark.slow
@in_pod
async def test_support_bundle_of_a_running_pod_is_complete_and_has_no_secret(
    pod: Pod, tmp_path: Path
):
    """Goal: one file is enough for support. Method: send a request with a prompt and set a secret
    in the command's environment; check what the bundle contains, and that the secrets are nowhere
    in it."""
    async with pod.load() as load:
        await load.answers(4)
    output = tmp_path / "bundle.tar.gz"
    secret = "correct-horse-battery-staple"
    code, out = await understudy(
        pod, "support-bundle", f"--output={output}", VLLM_API_KEY=secret, MY_PASSWORD=secret
    )
    assert code == 0
    assert "missing" not in out
    with tarfile.open(output) as archive:
        texts = {
            member.name.partition("/")[2]: archive.extractfile(member).read().decode()
            for member in archive.getmembers()
        }
    assert json.loads(texts["status.json"])["state"] == "healthy"
    checks = {each["id"]: each["status"] for each in json.loads(texts["doctor.json"])["checks"]}
    assert "fail" not in checks.values()
    assert {checks[name] for name in ("shared", "flock", "engines", "peer_pidfd")} == {"pass"}
    kinds = {json.loads(line)["type"] for line in texts["events.jsonl"].splitlines()}
    assert {"lock.granted", "engine.state"} <= kinds
    processes = json.loads(texts["processes.json"])
    assert {each["pid"] for each in processes} >= set(pod.processes())
    engine = next(each for each in processes if each["pid"] == pod.pid("engine-0"))
    assert engine["environment"]["ENGINE_ID"] == "engine-0"
    assert engine["rss_bytes"] > 0
    assert {f"log/{name}.log" for name in pod.runner.pids()} <= set(texts)
    assert {"state/lockserver.json", "state/engine_engine-0.json"} <= set(texts)
    for prompt in (*COMPLETIONS, *CHATS):
        assert not any(prompt in text for text in texts.values())
    assert not any(secret in text for text in texts.values())
