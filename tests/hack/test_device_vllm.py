"""The device run of vLLM without a device: one sentence names what is missing.

Method: the command itself in a process, for a device that does not exist. What it does with one is
rehearsed by `--rehearse`, which takes minutes and vLLM's CPU build.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

from hack import device_vllm


def run(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "hack.device_vllm", *words],
        cwd=device_vllm.ROOT,
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.parametrize(("words", "code"), [((), 0), (("--require",), 1)])
def test_what_is_missing_is_printed_in_one_sentence(words: tuple[str, ...], code: int):
    """No such GPU: one line with the reason, nothing written, and a failure only with --require."""
    before = sorted(device_vllm.BENCH.glob("*"))
    done = run("--device", "GPU-that-does-not-exist", *words)
    assert done.returncode == code, done.stderr
    [line] = done.stdout.splitlines()
    assert line.startswith("device run of vLLM: nothing was measured, since ")
    assert sorted(device_vllm.BENCH.glob("*")) == before


def test_a_rehearsal_is_never_written_to_bench_device():
    """`--rehearse --out bench/device/…`: refused before anything is started."""
    done = run("--rehearse", "--out", str(device_vllm.BENCH / "x.json"))
    assert done.returncode == 2
    assert "reports of real devices only" in done.stderr
