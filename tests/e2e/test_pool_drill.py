"""Goal: the drill of a pool finds nothing in a pod that works, and says what it did.

Method: one short drill of the real command, with kills of two kinds; its document is compared with
docs/cli_json.md, and its page is read.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.documents import mismatches
from tests.e2e.pods import AS_USERS_RUN_IT
from understudy.cli.main import main
from understudy.schema import PoolDrillDocument

UNDERSTUDY = str(Path(sys.executable).parent / "understudy")
TARGETS = ("pool", "backend-model")
WAIT_S = 480.0


@pytest.mark.slow
def test_drill_of_a_pool_passes_and_prints_what_is_documented(
    tmp_path_factory: pytest.TempPathFactory,
):
    temporary = tmp_path_factory.mktemp("t")  # sockets have short paths only
    flags = [f"--target={each}" for each in TARGETS]
    flags += [f"--kills={len(TARGETS)}", "--duration-s=8"]
    done = subprocess.run(
        [UNDERSTUDY, "drill", "--pool", *flags, "--json"],
        env={**os.environ, **AS_USERS_RUN_IT, "TMPDIR": str(temporary)},
        capture_output=True,
        text=True,
        timeout=WAIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["passed"]
    assert report["problems"] == []
    assert report["killed"] == dict.fromkeys(TARGETS, 1)
    assert report["switches"]
    assert all(each["back_ms"] is not None for each in report["outcomes"])
    assert all(each["answered"] for each in report["models"].values())
    assert 0 < report["longest_wait_of_bound"] <= 1
    assert mismatches(report, PoolDrillDocument) == []
    assert os.listdir(temporary) == []


@pytest.mark.parametrize(
    ("flags", "code"),
    [
        (["--pool", "--attach"], "drill.needless_flag"),
        (["--pool", "--model=/"], "drill.needless_flag"),
        (["--pool", "--dir=/run/x"], "drill.needless_flag"),
        (["--pool", "/no/such/file.yaml"], "pool."),
        (["--target=pool"], "drill.needs_pool"),
        (["--target=shadow:backend-model"], "drill.needs_pool"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(flags: list[str], code: str):
    answer = CliRunner().invoke(main, ["drill", *flags])
    assert answer.exit_code == 2
    assert f"[{code}" in answer.output
