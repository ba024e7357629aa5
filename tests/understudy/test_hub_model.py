"""Models of the Hugging Face Hub, with a stub of its library: what is downloaded, how it fails."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from plumbing.errors import UnderstudyError
from tests.helpers import until
from understudy.pod.ports import free_offset, free_pod_ports
from understudy.pod.table import LocalPod, program
from understudy.up.hub_download import BESIDE_SAFETENSORS, NEVER_LOADED
from understudy.up.models import hub_directory
from understudy.up.pods import prepare_local

TINY, OLD, GONE, SLOW = "acme/tiny", "acme/old", "acme/gone", "acme/slow"
EXIT_S = 60.0  # a starting Python on a busy machine
# Notes what it is asked for; one repository has no safetensors, one refuses, one never ends.
STUB = """
import json, os, pathlib, signal
def snapshot_download(repo_id, **asked):
    place = pathlib.Path(__file__).parent
    with (place / "asked").open("a") as file:
        print(json.dumps({"repo_id": repo_id, "token": os.environ.get("HF_TOKEN"), **asked}),
              file=file)
    if repo_id == "acme/gone":
        raise PermissionError("401 Client Error")
    if repo_id == "acme/slow":
        signal.pause()
    made = place / repo_id.replace("/", "-")
    made.mkdir(exist_ok=True)
    if repo_id != "acme/old":
        (made / "model.safetensors").touch()
    return str(made)
"""


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the stub's downloads are; beside it a package called vllm, since nothing is downloaded
    without one."""
    for name, text in (("vllm", ""), ("huggingface_hub", STUB)):
        (tmp_path / "lib" / name).mkdir(parents=True)
        (tmp_path / "lib" / name / "__init__.py").write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path / "lib"))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "lib"), prepend=":")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    return tmp_path / "lib/huggingface_hub"


def asked_of(hub: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (hub / "asked").read_text().splitlines()]


@pytest.mark.parametrize(
    ("model", "flags", "left_out"),
    [
        (TINY, (), [[*NEVER_LOADED, *BESIDE_SAFETENSORS]]),
        (OLD, (), [[*NEVER_LOADED, *BESIDE_SAFETENSORS], [*NEVER_LOADED]]),
        (TINY, ("--load-format", "npcache"), [[*NEVER_LOADED]]),
    ],
)
def test_weights_that_vllm_would_not_load_are_left_out(hub: Path, model, flags, left_out):
    """Goal: safetensors and no other format where there are any, unless a flag wants another."""
    assert located(model, flags) == hub / model.replace("/", "-")
    assert [each["ignore_patterns"] for each in asked_of(hub)] == left_out


def test_flags_of_vllm_say_which_revision_where_to_and_by_whose_token(hub: Path):
    """Goal: --revision, --download-dir and --hf-token mean what vLLM means."""
    located(TINY, ["--download_dir=/there", "--revision=abc", "--hf-token", "hf_secret"])
    located(TINY, ())
    given, plain = asked_of(hub)
    names = ("repo_id", "revision", "cache_dir", "token")
    assert [given[name] for name in names] == [TINY, "abc", "/there", "hf_secret"]
    assert [plain[name] for name in names] == [TINY, None, None, None]


def test_hub_that_does_not_give_the_model_is_a_sentence(hub: Path):
    with pytest.raises(UnderstudyError) as refused:
        located(GONE, ())
    assert refused.value.code == "hub.failed"
    assert f"{GONE} cannot be downloaded: PermissionError: 401" in refused.value.message
    assert "set HF_TOKEN" in refused.value.message


@pytest.mark.parametrize("given", [(), ("--served-model-name", "mine")])
def test_both_engines_get_one_directory_and_clients_the_id(hub: Path, tmp_path: Path, given):
    """Goal: as `vllm serve`: the model is called what the user called it, unless the user names it;
    the engines never ask the Hub for it."""
    said: list[str] = []
    pod = LocalPod(
        Path(),
        None,
        free_pod_ports(),
        backend="vllm",
        hub_id=TINY,
        backend_args=("--eager", *given),
    )
    prepared = asyncio.run(prepare_local(pod, tmp_path / "pod", said.append))
    snapshot, named = str(hub / "acme-tiny"), () if given else ("--served-model-name", TINY)
    told = [
        each.command[each.command.index("--") + 1 :]
        for each in prepared.containers
        if each.name.startswith("engine-")
    ]
    assert told == [(snapshot, *named, "--eager", *given)] * 2
    assert [line for line in said if TINY in line and snapshot in line]


@pytest.mark.parametrize("command", ["up", "drill"])
def test_ctrl_c_ends_a_download(hub: Path, tmp_path: Path, command: str):
    """Goal: code 130 and no trace at once, and no process goes on. Method: SIGINT to all processes
    of the terminal during a download."""
    ours = [f"--dir={tmp_path}/pod", f"--port-offset={free_offset()}"] if command == "up" else []
    words = [*program("understudy"), command, "--backend=vllm", f"--model={SLOW}", *ours]
    with subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as started:
        until((hub / "asked").exists, "the download to begin", EXIT_S)
        (child,) = psutil.Process(started.pid).children()
        os.killpg(started.pid, signal.SIGINT)
        output, errors = started.communicate(timeout=EXIT_S)
    assert started.returncode == 130
    assert "Traceback" not in output + errors
    until(lambda: not child.is_running(), "the download's process to end")


def located(model: str, flags: Sequence[str]) -> Path:
    return asyncio.run(hub_directory(model, flags))
